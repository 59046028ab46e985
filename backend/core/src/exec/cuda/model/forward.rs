//! Forward passes whose logits come to the host: prefill, and whatever the pure functions decide about.

use super::Model;
use super::tables::passes;
use crate::batch::{Forward, Logits, Segment};
use crate::exec::cuda::device::{Address, Device, Gpu};
use crate::{Error, Result};
use std::sync::Arc;

/// A model on a GPU, as the executor on the host uses it.
pub struct OnHost {
    model: Arc<Model>,
    gpu: Gpu,
}

impl OnHost {
    /// `model` is on `gpu`.
    pub fn new(model: Arc<Model>, gpu: Gpu) -> Self {
        Self { model, gpu }
    }
}

impl Forward for OnHost {
    fn forward(&mut self, segments: &[Segment<'_>]) -> Result<Logits> {
        let vocab_size = self.model.config().vocab_size;
        let mut tokens = segments.iter().flat_map(|segment| segment.tokens);
        if let Some(token) = tokens.find(|&&token| token as usize >= vocab_size) {
            let message = format!("token {token} is outside of the vocabulary of {vocab_size}");
            return Err(Error::bad_request("input_ids", message));
        }
        let mut logits = Logits { vocab_size, values: Vec::new() };
        let mut device = self.gpu.lock();
        for tables in passes(segments, &self.model.bounds()) {
            self.model.issue(&tables, &mut **device)?;
            let count = tables.logit_rows.len() * vocab_size;
            download(&mut **device, self.model.workspace().logits, count, &mut logits.values)?;
        }
        Ok(logits)
    }
}

/// Appends `count` values; waits for the device.
fn download(device: &mut dyn Device, from: Address, count: usize, to: &mut Vec<f32>) -> Result<()> {
    if count == 0 {
        return Ok(());
    }
    let mut bytes = vec![0; count * size_of::<f32>()];
    device.read(from, &mut bytes)?;
    to.extend(bytes.as_chunks::<4>().0.iter().map(|&four| f32::from_le_bytes(four)));
    Ok(())
}
