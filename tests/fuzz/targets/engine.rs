//! Engine files. An input is a raw file (after a 0), or a manifest that is given its hash, its identity
//! and its places (after a 1): mutations then reach what lies behind the hashes.
#![no_main]

use libfuzzer_sys::fuzz_target;
use spec_core::engine::{Engine, Manifest};
use spec_core::exec::Pool;
use spec_core::runtime::Isa;
use spec_core::testing::batch::{Forward, Segment};
use spec_core::testing::cpu::Model;
use spec_fuzz::file;
use std::sync::Arc;

/// Larger files are not made.
const MAX_BYTES: u64 = 1 << 20;

fuzz_target!(|input: &[u8]| {
    let bytes = match input.split_first() {
        Some((0, raw)) => raw.to_vec(),
        Some((_, manifest)) => match framed(manifest) {
            Some(bytes) => bytes,
            None => return,
        },
        None => return,
    };
    let Ok(engine) = Engine::open(file("fuzz.engine", &bytes)) else { return };
    let _ = engine.verify_hashes(|_| ());
    let _ = engine.open_drafter();
    run(&engine);
});

/// What opens must load and run.
fn run(engine: &Engine) {
    let manifest = engine.manifest();
    if manifest.limits.max_seq_len * manifest.model.head_dim > 1 << 20 {
        return;
    }
    let Ok(mut model) = Model::load(engine, 1, Isa::detect(), Arc::new(Pool::new(1))) else {
        return;
    };
    let segment = Segment { tokens: &[0], first_position: 0, pages: &[0], prompt_len: 0, num_logits: 1, tree: &[] };
    let _ = model.forward(&[segment]);
}

fn framed(json: &[u8]) -> Option<Vec<u8>> {
    let mut manifest: Manifest = serde_json::from_slice(json).ok()?;
    if manifest.sections.iter().map(|section| section.bytes).try_fold(0u64, u64::checked_add)?
        > MAX_BYTES
    {
        return None;
    }
    manifest.identity = manifest.compute_identity();
    let mut start: u64 = 0;
    loop {
        let mut end = start;
        for section in &mut manifest.sections {
            section.offset = end.next_multiple_of(256);
            end = section.offset + section.bytes;
        }
        let json = serde_json::to_vec(&manifest).ok()?;
        let needed = (56 + json.len() as u64).next_multiple_of(256);
        if needed == start {
            let mut bytes = b"SPECENG\n\x01\0\0\0\0\0\0\0".to_vec();
            bytes.extend((json.len() as u64).to_le_bytes());
            bytes.extend(blake3::hash(&json).as_bytes());
            bytes.extend(json);
            bytes.resize(start as usize, b' ');
            bytes.resize(end as usize, 0);
            return Some(bytes);
        }
        start = needed;
    }
}
