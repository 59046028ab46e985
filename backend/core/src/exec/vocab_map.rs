//! The tokens that a head has logits of, where those are not all.

use crate::engine::Engine;
use crate::{Error, Result};

/// Those of an engine's head, one a row; none where they are the first ones of the vocabulary.
pub fn of(engine: &Engine) -> Result<Option<Vec<u32>>> {
    if !engine.manifest().model.maps_vocab() {
        return Ok(None);
    }
    let reader = engine.reader()?;
    let map = reader.section("vocab_map").floats()?;
    reader.finish()?;
    tokens(engine, &map).map(Some)
}

/// The same of a section that was read.
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
