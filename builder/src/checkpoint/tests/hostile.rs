//! Files that were cut, altered or made to harm: an error, never a panic or a large allocation.

use super::super::testing::{Folder, GgufFile, raw_safetensors, safetensors};
use super::super::{Checkpoint, safetensors as format};
use super::{open_bytes, open_gguf, refused};
use proptest::prelude::*;
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

/// Opens and, if that works, reads everything.
fn exercise(path: &Path) -> anyhow::Result<()> {
    let checkpoint = Checkpoint::open(path)?;
    for (name, tensor) in checkpoint.tensors() {
        let mut out = vec![0.0; tensor.shape().iter().product()];
        checkpoint.read_rows(name, 0..tensor.num_rows(), &mut out)?;
    }
    Ok(())
}

/// Cuts the file shorter and shorter: some lengths of the data, then every length of the header.
fn cut_anywhere(path: &Path, file: &Path, header_len: usize) {
    exercise(path).unwrap();
    let whole = fs::metadata(file).unwrap().len() as usize;
    let handle = fs::OpenOptions::new().write(true).open(file).unwrap();
    let lengths = (0..header_len).chain((header_len..whole).step_by(997)).collect::<Vec<_>>();
    for len in lengths.into_iter().rev() {
        handle.set_len(len as u64).unwrap();
        assert!(exercise(path).is_err(), "{len} of {whole} bytes");
    }
}

/// What is refused at once never gets a fuzzer past what refuses it.
#[test]
fn every_head_that_fuzzing_starts_from_opens() {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fuzz/corpus");
    let dir = tempfile::tempdir().unwrap();
    let write = |folder: &str, config: &[u8], weights: &[u8]| {
        let folder = dir.path().join(folder);
        fs::create_dir_all(&folder).unwrap();
        fs::write(folder.join("config.json"), config).unwrap();
        fs::write(folder.join("model.safetensors"), weights).unwrap();
        folder
    };
    let config = fs::read(corpus.join("config/llama.json")).unwrap();
    let weights = fs::read(corpus.join("safetensors/llama.safetensors")).unwrap();
    let parts = |input: &[u8]| -> Vec<Vec<u8>> {
        input.split(|byte| *byte == 0xff).map(<[u8]>::to_vec).collect()
    };
    // The first byte is not the file's.
    let target = Checkpoint::open(&write("target", &parts(&config)[0], &weights[1..])).unwrap();
    let mut num = 0;
    for seed in fs::read_dir(corpus.join("head")).unwrap() {
        let seed = seed.unwrap().path();
        let [config, header] = <[_; 2]>::try_from(parts(&fs::read(&seed).unwrap())).unwrap();
        let header = String::from_utf8(header).unwrap();
        let tensors: BTreeMap<String, serde_json::Value> = serde_json::from_str(&header).unwrap();
        let end = tensors.values().filter_map(|tensor| tensor["data_offsets"][1].as_u64()).max();
        let weights = raw_safetensors(&header, &vec![0; end.unwrap() as usize]);
        let head = Checkpoint::open_draft(&write("head", &config, &weights), &target, true);
        assert!(head.is_ok(), "{}: {:#}", seed.display(), head.err().unwrap());
        num += 1;
    }
    assert!(num >= 5, "{num} heads in {}", corpus.display());
}

#[test]
fn a_gguf_file_cut_anywhere_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("m.gguf");
    fs::write(&path, GgufFile::tiny("llama").bytes()).unwrap();
    cut_anywhere(&path, &path, 3000);
}

#[test]
fn a_safetensors_file_cut_anywhere_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    Folder::llama().write(dir.path());
    cut_anywhere(dir.path(), &dir.path().join("model.safetensors"), 2500);
}

#[test]
fn a_file_that_shrinks_after_it_was_opened_is_an_error() {
    let dir = tempfile::tempdir().unwrap();
    Folder::llama().write(dir.path());
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    let file = fs::OpenOptions::new().write(true).open(dir.path().join("model.safetensors"));
    file.unwrap().set_len(3000).unwrap();
    let result = checkpoint.read_rows("lm_head.weight", 47..48, &mut [0.0; 32]);
    assert!(format!("{:#}", result.unwrap_err()).contains("`lm_head.weight`: reading 128 bytes"));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    #[test]
    fn altered_gguf_headers_never_panic(flips in prop::collection::vec((0usize..2600, any::<u8>()), 1..6)) {
        let mut bytes = GgufFile::tiny("llama").bytes();
        flips.iter().for_each(|(at, byte)| bytes[*at] = *byte);
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("m.gguf");
        fs::write(&path, &bytes).unwrap();
        let _ = exercise(&path);
    }

    #[test]
    fn altered_safetensors_headers_never_panic(flips in prop::collection::vec((0usize..2600, any::<u8>()), 1..6)) {
        let folder = Folder::llama();
        let dir = tempfile::tempdir().unwrap();
        folder.write(dir.path());
        let mut bytes = safetensors(&folder.blobs);
        flips.iter().for_each(|(at, byte)| bytes[*at] = *byte);
        fs::write(dir.path().join("model.safetensors"), &bytes).unwrap();
        let _ = exercise(dir.path());
    }

    #[test]
    fn altered_configs_never_panic(flips in prop::collection::vec((0usize..340, any::<u8>()), 1..4)) {
        let folder = Folder::llama();
        let dir = tempfile::tempdir().unwrap();
        folder.write(dir.path());
        let mut bytes = folder.config.to_string().into_bytes();
        flips.iter().for_each(|(at, byte)| bytes[*at] = *byte);
        fs::write(dir.path().join("config.json"), &bytes).unwrap();
        let _ = exercise(dir.path());
    }
}

#[test]
fn counts_and_lengths_beyond_the_file_are_refused() {
    let whole = GgufFile::tiny("llama").bytes();
    // Tensor count, metadata count, length of the first key.
    for at in [8, 16, 24] {
        for claim in [u64::MAX, 1 << 62, 1 << 33] {
            let mut bytes = whole.clone();
            bytes[at..at + 8].copy_from_slice(&claim.to_le_bytes());
            refused(open_bytes(&bytes), &["are claimed", "are left"]);
        }
    }
    for (kind, len) in [(4, u64::MAX), (4, 1 << 62), (8, u64::MAX / 8), (12, 1 << 61)] {
        let mut file = GgufFile::tiny("llama");
        file.list("tokenizer.ggml.tokens", kind, len, &[0; 16]);
        refused(open_gguf(&file), &["tokenizer.ggml.tokens", "are claimed"]);
    }
    let mut many = whole;
    many[16..24].copy_from_slice(&65537u64.to_le_bytes());
    many.resize(1 << 20, 0);
    refused(open_bytes(&many), &["it has 65537 metadata values, at most 65536"]);
    let mut nested = GgufFile::tiny("llama");
    nested.list("x", 9, 1, &[0; 64]);
    refused(open_gguf(&nested), &["`x`", "array of value type 9"]);
}

#[test]
fn sizes_that_overflow_are_refused() {
    let mut file = GgufFile::tiny("llama");
    file.tensor_mut("blk.0.attn_q.weight").1 = vec![1 << 40, 1 << 40];
    refused(open_gguf(&file), &["`blk.0.attn_q.weight`", "overflows"]);
    file.tensor_mut("blk.0.attn_q.weight").1 = vec![1 << 20, 1 << 20];
    refused(open_gguf(&file), &["`blk.0.attn_q.weight`", "after the end of the file"]);
}

#[test]
fn gguf_tensors_may_not_overlap_or_repeat() {
    let file = GgufFile::tiny("llama");
    let mut bytes = file.bytes();
    let name = b"blk.0.attn_q.weight";
    let at = bytes.windows(name.len()).position(|w| w == name).unwrap() + name.len() + 4 + 16 + 4;
    for (offset, part) in [(0u64, "overlap"), (33, "expected a multiple of 32")] {
        bytes[at..at + 8].copy_from_slice(&offset.to_le_bytes());
        refused(open_bytes(&bytes), &[part]);
    }
    bytes[at..at + 8].copy_from_slice(&(u64::MAX - 31).to_le_bytes());
    refused(open_bytes(&bytes), &["after the end of the file"]);

    let mut twice = file.clone();
    twice.tensor("output_norm.weight", &[32]);
    refused(open_gguf(&twice), &["`output_norm.weight` appears twice"]);
    let mut key = file;
    key.values.push(key.values[0].clone());
    refused(open_gguf(&key), &["`general.architecture` appears twice"]);
}

#[test]
fn safetensors_headers_that_lie_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("x.safetensors");
    let tensor = |shape: &str, from: u64, to: u64| {
        format!(r#"{{"dtype":"F32","shape":{shape},"data_offsets":[{from},{to}]}}"#)
    };
    let one = tensor("[2]", 0, 8);
    for (header, part) in [
        (format!(r#"{{"a":{one}}}"#), None),
        (format!(r#"{{"a":{one},"a":{one}}}"#), Some("expected from 8")),
        (format!(r#"{{"a":{one},"b":{}}}"#, tensor("[1]", 4, 8)), Some("expected from 8")),
        (format!(r#"{{"a":{one},"b":{}}}"#, tensor("[1]", 8, 12)), Some("at most 8")),
        (format!(r#"{{"a":{}}}"#, tensor("[1]", 4, 8)), Some("expected from 0")),
        (format!(r#"{{"a":{}}}"#, tensor("[1]", 0, 4)), Some("end at 4")),
        (format!(r#"{{"a":{}}}"#, tensor("[3]", 0, 8)), Some("its shape [3]")),
        (format!(r#"{{"a":{}}}"#, tensor("[4294967296,4294967296]", 0, 8)), Some("its shape")),
        (format!(r#"{{"a":{}}}"#, tensor("[2]", 8, 0)), Some("expected from 0")),
        (format!(r#"{{"a":{}}}"#, tensor("[-1]", 0, 8)), Some("tensor `a`")),
        (one.replace("F32", "F33"), Some("header")),
        (format!(r#"{{"a":{}}}"#, one.replace("F32", "F33")), Some("`F33` is unknown")),
        ("[".repeat(50_000), Some("header")),
        (r#"{"a":"#.repeat(50_000), Some("header")),
    ] {
        fs::write(&path, raw_safetensors(&header, &[0; 8])).unwrap();
        match (format::open(&path), part) {
            (Ok(tensors), None) => assert_eq!(tensors.len(), 1),
            (Err(error), Some(part)) => {
                let message = format!("{error:#}");
                assert!(message.contains(part), "`{part}` is not in: {message}");
            }
            (result, _) => panic!("{header}: {result:?}"),
        }
    }
    for claim in [u64::MAX, 1 << 40, 9] {
        fs::write(&path, [claim.to_le_bytes(), [b' '; 8]].concat()).unwrap();
        assert!(format!("{:#}", format::open(&path).unwrap_err()).contains("claims"));
    }
}

#[test]
fn an_oversized_configuration_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    Folder::llama().write(dir.path());
    fs::write(dir.path().join("config.json"), vec![b' '; (4 << 20) + 1]).unwrap();
    refused(Checkpoint::open(dir.path()), &["config.json is over 4194304 bytes"]);
    fs::write(dir.path().join("config.json"), "[]").unwrap();
    refused(Checkpoint::open(dir.path()), &["config.json is no JSON object"]);
}
