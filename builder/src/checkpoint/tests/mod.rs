//! Tests of whole checkpoints, and of the block decoders.

mod blocks;
mod draft_vocab;
mod eagle;
mod export;
mod fp8;
mod gguf;
mod hf;
mod hostile;
mod medusa;
mod real;

use super::Checkpoint;
use super::testing::{Folder, GgufFile};
use std::fs;

/// Opens a folder as it would be found on disk. Tensors stay readable: their file is open.
fn open(folder: &Folder) -> anyhow::Result<Checkpoint> {
    let dir = tempfile::tempdir().unwrap();
    folder.write(dir.path());
    Checkpoint::open(dir.path())
}

fn open_gguf(file: &GgufFile) -> anyhow::Result<Checkpoint> {
    open_bytes(&file.bytes())
}

fn open_bytes(bytes: &[u8]) -> anyhow::Result<Checkpoint> {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.gguf");
    fs::write(&path, bytes).unwrap();
    Checkpoint::open(&path)
}

/// The whole of a tensor.
fn read(checkpoint: &Checkpoint, name: &str) -> Vec<f32> {
    let tensor = checkpoint.tensor(name).unwrap();
    let mut out = vec![f32::NAN; tensor.shape().iter().product()];
    checkpoint.read_rows(name, 0..tensor.num_rows(), &mut out).unwrap();
    out
}

/// The error must hold every part.
#[track_caller]
fn refused(result: anyhow::Result<Checkpoint>, parts: &[&str]) {
    let message = format!("{:#}", result.expect_err("it was accepted"));
    for part in parts {
        assert!(message.contains(part), "`{part}` is not in: {message}");
    }
}
