//! Heads on the hidden states of a fixed target: EAGLE, P-EAGLE and Medusa. An input is a `config.json` and, behind a 0xff, the
//! header of a safetensors file, which is given as much data as it claims.
#![no_main]

use libfuzzer_sys::fuzz_target;
use spec_build::checkpoint::Checkpoint;
use spec_fuzz::{file, folder, parts, read_tensors, safetensors};
use std::fs;
use std::sync::LazyLock;

const CONFIG: &[u8] = include_bytes!("../corpus/config/llama.json");
const TENSORS: &[u8] = include_bytes!("../corpus/safetensors/llama.safetensors");

static TARGET: LazyLock<Checkpoint> = LazyLock::new(|| {
    let target = folder().join("target");
    fs::create_dir_all(&target).expect("a folder for the target");
    let config = parts(CONFIG).next().unwrap_or_default();
    fs::write(target.join("config.json"), config).expect("writes");
    // The first byte says how the corpus of the other target is to be read.
    fs::write(target.join("model.safetensors"), &TENSORS[1..]).expect("writes");
    Checkpoint::open(&target).expect("a target")
});

fuzz_target!(|input: &[u8]| {
    let mut parts = parts(input);
    file("config.json", parts.next().unwrap_or_default());
    // All 0: a map of the vocabulary is one of its first tokens.
    file("model.safetensors", &safetensors(parts.next().unwrap_or_default(), 0));
    for shares in [true, false] {
        if let Ok(head) = Checkpoint::open_draft(folder(), &*TARGET, shares) {
            read_tensors(&head);
        }
    }
});
