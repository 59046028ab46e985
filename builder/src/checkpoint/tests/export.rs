//! Exported folders open again with the same model, rounded to bf16.

use super::super::testing::GgufFile;
use super::super::{Checkpoint, TokenizerSource};
use super::read;
use crate::export::export;
use anyhow::bail;
use std::fs;
use std::path::Path;

fn write_gguf(folder: &Path, file: &GgufFile) -> std::path::PathBuf {
    let path = folder.join("m.gguf");
    fs::write(&path, file.bytes()).unwrap();
    path
}

#[test]
fn an_exported_model_opens_again_with_the_same_config_and_values() {
    for arch in ["llama", "qwen2", "qwen3", "phi3"] {
        let dir = tempfile::tempdir().unwrap();
        let gguf = write_gguf(dir.path(), &GgufFile::tiny(arch));
        let out = dir.path().join("hf");
        export(&gguf, &out, |source, folder| {
            let TokenizerSource::Gguf(metadata) = source else { bail!("not from the file") };
            Ok(fs::write(folder.join("tokenizer.json"), format!("{}", metadata.tokens.len()))?)
        })
        .unwrap();
        let (from, to) = (Checkpoint::open(&gguf).unwrap(), Checkpoint::open(&out).unwrap());
        assert_eq!(from.config, to.config);
        assert_eq!(from.generation.end_tokens, to.generation.end_tokens);
        for (name, _) in from.tensors() {
            let bf16 = |v: f32| half::bf16::from_f32(v).to_f32();
            let want: Vec<f32> = read(&from, name).into_iter().map(bf16).collect();
            assert_eq!(want, read(&to, name), "{name}");
        }
        assert_eq!(fs::read_to_string(out.join("tokenizer.json")).unwrap(), "40");
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 2, "nothing is left behind");
    }
}

#[test]
fn a_failed_export_leaves_nothing_and_a_full_folder_alone() {
    let dir = tempfile::tempdir().unwrap();
    let mut file = GgufFile::tiny("llama");
    let gguf = write_gguf(dir.path(), &file);
    let out = dir.path().join("hf");
    assert!(export(&gguf, &out, |_, _| bail!("no tokenizer")).is_err());
    assert!(!out.exists());

    file.tensor_mut("blk.1.ffn_up.weight").3[4 * 40..4 * 41]
        .copy_from_slice(&f32::INFINITY.to_le_bytes());
    write_gguf(dir.path(), &file);
    let message = format!("{:#}", export(&gguf, &out, |_, _| Ok(())).unwrap_err());
    assert!(message.contains("`model.layers.1.mlp.up_proj.weight`: row 1 holds inf"), "{message}");
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1, "only the GGUF file is there");

    fs::create_dir(&out).unwrap();
    fs::write(out.join("mine"), "x").unwrap();
    let message = format!("{:#}", export(&gguf, &out, |_, _| Ok(())).unwrap_err());
    assert!(message.contains("is not empty"), "{message}");
    assert!(out.join("mine").exists());
}
