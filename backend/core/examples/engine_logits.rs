//! Logits of a model folder's target behind every token of some texts, in the format of
//! `scripts/bench/llama_logits.cpp`: `engine_logits FOLDER THREADS`.
//!
//! Reads texts until the input ends, each a count and so many token ids; writes each text's rows of the vocabulary's
//! logits. All are 32-bit little endian, whole numbers and floats.

use spec_core::exec::Pool;
use spec_core::runtime::{Isa, ModelFolder, pages_for};
use spec_core::testing::batch::{Forward, Segment};
use spec_core::testing::{PageId, cpu};
use std::error::Error;
use std::io::{BufWriter, Read, Write};
use std::path::Path;
use std::sync::Arc;

/// Tokens of the longest text.
const MAX_LEN: usize = 1024;

fn main() -> Result<(), Box<dyn Error>> {
    let mut args = std::env::args().skip(1);
    let (Some(folder), Some(threads)) = (args.next(), args.next()) else {
        return Err("usage: engine_logits FOLDER THREADS".into());
    };
    let pool = Arc::new(Pool::new(threads.parse()?));
    let target = ModelFolder::open(Path::new(&folder))?.target;
    let mut model = cpu::Model::load(&target, pages_for(MAX_LEN), Isa::detect(), pool)?;

    let mut input = Vec::new();
    std::io::stdin().read_to_end(&mut input)?;
    let mut rest: Vec<u32> =
        input.as_chunks::<4>().0.iter().map(|&bytes| u32::from_le_bytes(bytes)).collect();
    let mut output = BufWriter::new(std::io::stdout().lock());
    while let Some((&count, behind)) = rest.split_first() {
        let len = count as usize;
        if len == 0 || len > MAX_LEN || len > behind.len() {
            return Err(format!(
                "a text says {len} tokens: 1 to {MAX_LEN} are allowed, {} follow",
                behind.len()
            )
            .into());
        }
        let tokens = &behind[..len];
        let pages: Vec<PageId> = (0..pages_for(len) as PageId).collect();
        let segment = Segment {
            tokens,
            first_position: 0,
            pages: &pages,
            prompt_len: 0,
            num_logits: len,
            tree: &[],
        };
        for value in model.forward(&[segment])?.values {
            output.write_all(&value.to_le_bytes())?;
        }
        rest = behind[len..].to_vec();
    }
    output.flush()?;
    Ok(())
}
