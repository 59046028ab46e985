//! A real model, where one was fetched (`scripts/fetch-model smollm2-135m`).

use super::super::Checkpoint;
use crate::export::export;
use spec_core::model::Family;
use std::env;
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

/// blake3 of the exported weights: the same bytes as an independent conversion that transformers' own
/// GGUF loader agrees with (sha256 7ef915c9bf9d94d8d70211970476878352a5b95855c589ae987916d7a455242b).
const WEIGHTS: &str = "26952486d351680e1d588bec3370d3f75ed7cae59de7d40c144b28f6323423fc";

fn model() -> Option<PathBuf> {
    let folder = env::var_os("SPEC_MODELS")
        .map_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("../models"), PathBuf::from);
    let path = folder.join("smollm2-135m-instruct-q4_1.gguf");
    if path.is_file() {
        return Some(path);
    }
    let _ = writeln!(io::stderr(), "skipped: {} is not there", path.display());
    None
}

#[test]
fn a_real_model_exports_to_the_known_bytes() {
    let Some(path) = model() else { return };
    let checkpoint = Checkpoint::open(&path).unwrap();
    assert_eq!(checkpoint.config.family, Family::Llama);
    assert_eq!((checkpoint.config.num_layers, checkpoint.config.vocab_size), (30, 49152));
    assert_eq!(checkpoint.generation.end_tokens.first(), Some(&2));

    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("hf");
    export(&path, &out, |_, _| Ok(())).unwrap();
    let mut hasher = blake3::Hasher::new();
    let mut file = std::fs::File::open(out.join("model.safetensors")).unwrap();
    let mut block = vec![0; 1 << 20];
    loop {
        match file.read(&mut block).unwrap() {
            0 => break,
            n => drop(hasher.update(&block[..n])),
        }
    }
    assert_eq!(hasher.finalize().to_hex().as_str(), WEIGHTS);
    assert_eq!(Checkpoint::open(&out).unwrap().config, checkpoint.config);
}
