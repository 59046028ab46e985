//! Forward passes whose logits come to the host: prefill, and whatever the pure functions decide about.

use super::tables::passes;
use super::taps::Taps;
use super::trees::Chains;
use super::{Capacity, DecoderPart, Eagle, Model, Prefill};
use crate::batch::{Forward, Logits, PromptBlocks, Segment};
use crate::engine::Manifest;
use crate::exec::cuda::device::{Address, Device, Gpu};
use crate::model::LayerSkip;
use crate::pages::PageId;
use crate::{Error, Result};
use std::ops::Range;
use std::sync::Arc;

/// A model on a GPU, as the executor on the host uses it.
pub struct OnHost {
    model: Arc<Model>,
    gpu: Gpu,
    /// Pages of its cache for branches of trees.
    scratch: Range<PageId>,
    /// Of the last pass.
    chains: Chains,
    taps: Option<Taps>,
    /// What passes go without.
    skip: Option<LayerSkip>,
    /// Makes states of them on the device, which then take their place.
    head: Option<Arc<Eagle>>,
    /// `[row][layer][hidden]` of the last pass, or `[row][width]` of the head.
    tapped: Vec<f32>,
}

impl OnHost {
    /// `model` is on `gpu`.
    pub fn new(model: Arc<Model>, gpu: Gpu) -> Self {
        Self {
            model,
            gpu,
            scratch: 0..0,
            chains: Chains::default(),
            taps: None,
            skip: None,
            head: None,
            tapped: Vec::new(),
        }
    }

    /// With pages of the model's cache that no sequence has, for branches of trees.
    pub fn with_scratch(self, scratch: Range<PageId>) -> Self {
        Self { scratch, ..self }
    }

    /// Goes without some of the layers.
    pub fn without(self, skip: LayerSkip) -> Self {
        Self { skip: Some(skip), ..self }
    }

    /// Tells no hidden states, but what a head on the same GPU makes of them.
    pub fn with_head(self, head: Option<Arc<Eagle>>) -> Self {
        Self { head, ..self }
    }

    /// Bytes that hidden states behind so many layers take on the GPU.
    pub(crate) fn tap_bytes(manifest: &Manifest, prefill: Prefill, num_taps: usize) -> usize {
        let rows = Capacity::of(manifest, prefill).rows;
        Taps::bytes(num_taps, rows, manifest.model.hidden_size)
    }

    fn copy_pages(&self, pages: &[(PageId, PageId)]) -> Result<()> {
        let mut device = self.gpu.lock();
        pages.iter().try_for_each(|&(from, to)| self.model.copy_page(from, to, &mut **device))
    }
}

impl Forward for OnHost {
    fn prompt_blocks(&self) -> Option<PromptBlocks> {
        self.model.prompt_blocks()
    }

    fn takes_trees(&self) -> bool {
        !self.scratch.is_empty()
    }

    fn keep(&mut self, pages: &[PageId], first_draft: usize, path: &[usize]) -> Result<()> {
        self.copy_pages(&self.chains.kept(pages, first_draft, path))
    }

    fn tap(&mut self, layers: &[usize]) -> Result<()> {
        let config = self.model.config();
        if let Some(layer) = layers.iter().find(|&&layer| layer > config.num_layers) {
            let num_layers = config.num_layers;
            let message = format!("hidden states behind layer {layer} of a model of {num_layers}");
            return Err(Error::Unsupported(message));
        }
        let (rows, hidden) = (self.model.capacity().rows, config.hidden_size);
        self.taps = match layers {
            [] => None,
            _ => Some(Taps::alloc(layers, rows, hidden, &mut **self.gpu.lock())?),
        };
        Ok(())
    }

    fn taps(&mut self) -> Result<&[f32]> {
        Ok(&self.tapped)
    }

    fn forward(&mut self, segments: &[Segment<'_>]) -> Result<Logits> {
        let vocab_size = self.model.config().vocab_size;
        let mut tokens = segments.iter().flat_map(|segment| segment.tokens);
        if let Some(token) = tokens.find(|&&token| token as usize >= vocab_size) {
            let message = format!("token {token} is outside of the vocabulary of {vocab_size}");
            return Err(Error::bad_request("input_ids", message));
        }
        let width = self.model.config().num_logits();
        self.chains = Chains::new(segments, self.scratch.clone())?;
        self.copy_pages(&self.chains.copies)?;
        self.tapped.clear();
        let chains = self.chains.segments(segments);
        let mut logits = Logits { vocab_size: width, values: Vec::new() };
        let mut device = self.gpu.lock();
        for tables in passes(&chains, &self.model.bounds()) {
            let (taps, skip) = (self.taps.as_ref(), self.skip.as_ref());
            let part = DecoderPart { taps, skip, ..DecoderPart::default() };
            self.model.issue(&tables, part, &mut **device)?;
            let count = tables.logit_rows.len() * width;
            download(&mut **device, self.model.workspace().logits, count, &mut logits.values)?;
            if let Some(taps) = &self.taps {
                let num_rows = tables.rows.len();
                match &self.head {
                    None => taps.read(num_rows, &mut **device, &mut self.tapped)?,
                    Some(head) => {
                        head.read_states(taps, num_rows, &mut **device, &mut self.tapped)?
                    }
                }
            }
        }
        if chains.len() > segments.len() {
            let wants = chains
                .iter()
                .flat_map(|s| (0..s.tokens.len()).map(|row| s.tokens.len() - row <= s.num_logits));
            let wants: Vec<bool> = wants.collect();
            logits.values = pick(&logits.values, width, logit_order(&self.chains.order, &wants));
            if !self.tapped.is_empty() {
                let width = self.tapped.len() / wants.len();
                self.tapped = pick(&self.tapped, width, self.chains.order.iter().copied());
            }
        }
        Ok(logits)
    }
}

/// The rows of `width` values each in another order, or some of them.
fn pick(values: &[f32], width: usize, order: impl Iterator<Item = usize>) -> Vec<f32> {
    order.flat_map(|row| &values[row * width..(row + 1) * width]).copied().collect()
}

/// Where the logits of rows stand among those that were computed, for the rows of `order` that want any.
fn logit_order<'a>(order: &'a [usize], wants: &'a [bool]) -> impl Iterator<Item = usize> + 'a {
    let mut before: Vec<usize> = Vec::with_capacity(wants.len());
    let mut num_logits = 0;
    for &wants in wants {
        before.push(num_logits);
        num_logits += usize::from(wants);
    }
    order.iter().filter(|&&row| wants[row]).map(move |&row| before[row])
}

/// Appends `count` values; waits for the device.
pub(super) fn download(
    device: &mut dyn Device,
    from: Address,
    count: usize,
    to: &mut Vec<f32>,
) -> Result<()> {
    if count == 0 {
        return Ok(());
    }
    let mut bytes = vec![0; count * size_of::<f32>()];
    device.read(from, &mut bytes)?;
    to.extend(bytes.as_chunks::<4>().0.iter().map(|&four| f32::from_le_bytes(four)));
    Ok(())
}
