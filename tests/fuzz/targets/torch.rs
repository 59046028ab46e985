//! Files of `torch.save` beside a fixed `config.json`. An input is a raw archive (after a 0), or a pickle that is given an
//! archive with one storage (after a 1).
#![no_main]

use libfuzzer_sys::fuzz_target;
use spec_fuzz::{file, folder, read_checkpoint};

const CONFIG: &[u8] = include_bytes!("../corpus/config/llama.json");
/// Bytes of the storage.
const STORAGE: &[u8] = &[0x38; 4096];

fuzz_target!(|input: &[u8]| {
    let bytes = match input.split_first() {
        Some((0, raw)) => raw.to_vec(),
        Some((_, pickle)) => archived(pickle),
        None => return,
    };
    let config = CONFIG.split(|&byte| byte == 0xff).next().unwrap_or_default();
    file("config.json", config);
    file("pytorch_model.bin", &bytes);
    read_checkpoint(folder());
});

/// A ZIP archive of the pickle and of storage `0`.
fn archived(pickle: &[u8]) -> Vec<u8> {
    let (mut bytes, mut directory) = (Vec::new(), Vec::new());
    for (name, data) in [("m/data.pkl", pickle), ("m/data/0", STORAGE)] {
        let header = (bytes.len() as u32).to_le_bytes();
        let len = (data.len() as u32).to_le_bytes();
        let name_len = (name.len() as u16).to_le_bytes();
        let common = [&[0; 14][..], &len, &len, &name_len, &[0, 0]].concat();
        bytes.extend([b"PK\x03\x04", &common[..], name.as_bytes(), data].concat());
        let entry = [b"PK\x01\x02\x14\0", &common[..], &[0; 10], &header, name.as_bytes()];
        directory.extend(entry.concat());
    }
    let (len, offset) = (directory.len() as u32, bytes.len() as u32);
    bytes.extend(directory);
    bytes.extend([b"PK\x05\x06", &[0; 8][..], &len.to_le_bytes(), &offset.to_le_bytes()].concat());
    bytes.extend([0, 0]);
    bytes
}
