//! The JSON files of a Hugging Face folder, beside fixed tensors: `config.json`, `generation_config.json`,
//! `tokenizer_config.json` and `hf_quant_config.json`, with a 0xff between two.
#![no_main]

use libfuzzer_sys::fuzz_target;
use spec_fuzz::{file, folder, no_file, parts, read_checkpoint};

const TENSORS: &[u8] = include_bytes!("../corpus/safetensors/llama.safetensors");
const NAMES: [&str; 4] =
    ["config.json", "generation_config.json", "tokenizer_config.json", "hf_quant_config.json"];

fuzz_target!(|input: &[u8]| {
    // The first byte says how the corpus of the other target is to be read.
    file("model.safetensors", &TENSORS[1..]);
    let mut parts = parts(input);
    for name in NAMES {
        match parts.next() {
            Some(bytes) => drop(file(name, bytes)),
            None => no_file(name),
        }
    }
    read_checkpoint(folder());
});
