//! Safetensors files beside a fixed `config.json`. An input is a raw file (after a 0), or a header that
//! is given its length and as much data as it claims (after a 1).
#![no_main]

use libfuzzer_sys::fuzz_target;
use spec_fuzz::{file, folder, read_checkpoint, safetensors};

const CONFIG: &[u8] = include_bytes!("../corpus/config/llama.json");

fuzz_target!(|input: &[u8]| {
    let bytes = match input.split_first() {
        Some((0, raw)) => raw.to_vec(),
        Some((_, header)) => safetensors(header, 0x38),
        None => return,
    };
    let config = CONFIG.split(|&byte| byte == 0xff).next().unwrap_or_default();
    file("config.json", config);
    file("model.safetensors", &bytes);
    read_checkpoint(folder());
});
