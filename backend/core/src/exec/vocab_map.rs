//! The tokens that a head drafts, where it does not draft all.

use crate::engine::Engine;
use crate::{Error, Result};

/// The target's token of each row of a head, as the engine has them.
pub(super) fn tokens(engine: &Engine, map: &[f32]) -> Result<Vec<u32>> {
    let vocab_size = engine.manifest().model.vocab_size;
    let token = |(row, &value): (usize, &f32)| {
        let is_token = value >= 0.0 && value < vocab_size as f32 && value.fract() == 0.0;
        if is_token {
            return Ok(value as u32);
        }
        let path = engine.path().display();
        let what = format!("row {row} of its head is token {value} of {vocab_size}");
        Err(Error::BadEngine(format!("engine {path}: {what}")))
    };
    map.iter().enumerate().map(token).collect()
}
