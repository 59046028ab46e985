//! Safetensors files beside a fixed `config.json`. An input is a raw file (after a 0), or a header that
//! is given its length and as much data as it claims (after a 1).
#![no_main]

use libfuzzer_sys::fuzz_target;
use serde_json::Value;
use spec_fuzz::{file, folder, read_checkpoint};

/// More data is not made.
const MAX_BYTES: u64 = 1 << 20;
const CONFIG: &[u8] = include_bytes!("../corpus/config/llama.json");

fuzz_target!(|input: &[u8]| {
    let bytes = match input.split_first() {
        Some((0, raw)) => raw.to_vec(),
        Some((_, header)) => framed(header),
        None => return,
    };
    let config = CONFIG.split(|&byte| byte == 0xff).next().unwrap_or_default();
    file("config.json", config);
    file("model.safetensors", &bytes);
    read_checkpoint(folder());
});

fn framed(header: &[u8]) -> Vec<u8> {
    let json: Value = serde_json::from_slice(header).unwrap_or_default();
    let ends = json.as_object().into_iter().flat_map(|tensors| tensors.values());
    let end = ends.filter_map(|tensor| tensor["data_offsets"][1].as_u64()).max().unwrap_or(0);
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header);
    bytes.resize(bytes.len() + end.min(MAX_BYTES) as usize, 0x38);
    bytes
}
