//! An EAGLE head on a GPU: its weights, its KV cache, and passes over ragged rows of tokens and states.
//!
//! As with a model, a row's result does not depend on the rows beside it, to the bit.

mod pass;
mod states;

use super::code::{self, HeadCode, LayerCode, LoadKernel};
use super::forward::download;
use super::half_rows::HalfRows;
use super::layers::Layers;
use super::outline::SOMEWHERE;
use super::shape;
use super::tables::{Bounds, passes};
use super::unit_norm::UnitNorm;
use super::weights::{Held, Matrix, Weights};
use super::workspace::{Capacity, Workspace};
use super::{Model, Prefill};
use crate::batch::Logits;
use crate::draft::{HeadPass, HeadSegment, MaskRow};
use crate::engine::{Engine, Kernels, Manifest};
use crate::exec::cuda::device::{Address, Description, Device, Kernel, arrays, upload};
use crate::exec::vocab_map;
use crate::model::{EagleConfig, EagleKind, ModelConfig, eagle};
use crate::pages::PageId;
use crate::{Error, Result};
use std::sync::Arc;

type Parts = eagle::Eagle<Matrix, Address>;

/// A head ready to run.
pub struct Eagle {
    layers: Layers,
    eagle: EagleConfig,
    parts: Box<Parts>,
    code: HeadCode,
    buffers: Buffers,
    /// Before the head of EAGLE-1, which has no norm.
    unit_norm: Option<UnitNorm>,
    capacity: Capacity,
    vocab_map: Option<Vec<u32>>,
    mask: Option<MaskRow>,
    /// On the same GPU, for what the head has not of its own.
    target: Option<Arc<Model>>,
    /// What the addresses of `parts` are valid with.
    _weights: Option<Held>,
}

/// What passes work in besides the workspace of layers.
#[derive(Clone, Copy, Debug)]
struct Buffers {
    /// f32 `[rows][taps][hidden of the target]`.
    taps: Address,
    /// f32 `[rows][hidden]`: what each row comes with.
    states: Address,
    /// f16, as [`HalfRows`] lie, as wide as the widest product that reads it.
    joined: Address,
    /// f32 `[rows]`: squares of sums, which nobody wants.
    squares: Address,
    /// f32 `[rows][hidden]`: what rows hand on.
    handed_on: Address,
}

/// Bytes of the arrays, in the order of the fields.
fn sizes(
    model: &ModelConfig,
    eagle: &EagleConfig,
    rows: usize,
    capability: (u32, u32),
) -> [usize; 5] {
    let hidden = model.hidden_size;
    let (fc, first) = (eagle.fc_inputs(hidden), eagle.first_inputs(hidden));
    let tiles = model.qkv_size().max(hidden).div_ceil(shape::TILE_OUTPUTS);
    let rows_of = |width: usize, element: usize| rows * width * element;
    [
        rows_of(eagle.taps.len() * eagle.target_hidden, size_of::<f32>()),
        rows_of(hidden, size_of::<f32>()),
        HalfRows::new(fc.max(first), capability).bytes(rows),
        rows_of(tiles, size_of::<f32>()),
        rows_of(hidden, size_of::<f32>()),
    ]
}

impl Eagle {
    /// Loads the engine onto the target's GPU, and makes a cache of `num_pages` pages.
    pub fn load(
        engine: &Engine,
        target: Arc<Model>,
        num_pages: usize,
        device: &mut dyn Device,
    ) -> Result<Self> {
        let weights = Held::Own(Weights::upload(engine, device)?);
        Self::load_from(engine, weights, Some(target), num_pages, device)
    }

    /// As `load`, with weights that are there; without a target that is elsewhere.
    pub(crate) fn load_from(
        engine: &Engine,
        weights: Held,
        target: Option<Arc<Model>>,
        num_pages: usize,
        device: &mut dyn Device,
    ) -> Result<Self> {
        let manifest = engine.manifest();
        let eagle = manifest.model.eagle().cloned();
        let (Some(eagle), Weights::Eagle(parts)) = (eagle, weights.weights()) else {
            return Err(bad(engine, "it is no EAGLE head"));
        };
        let parts = parts.clone();
        if (parts.embed.is_none() || parts.head.is_none()) && target.is_none() {
            return Err(bad(
                engine,
                "it leaves matrices to its target: run both on one GPU (`draft_gpu`)",
            ));
        }
        let vocab_map = vocab_map::of(engine)?;
        let capacity = Capacity::of(manifest, Prefill::Exact);
        let (layer_code, code) = code::load(engine, device, |kernels, loader| {
            Ok((LayerCode::of(kernels, loader)?, HeadCode::of(kernels, &eagle, loader)?))
        })?;
        let capability = device.describe().capability;
        let sizes = sizes(&manifest.model, &eagle, capacity.rows, capability);
        let [taps, states, joined, squares, handed_on] = arrays::alloc(sizes, device)?;
        let buffers = Buffers { taps, states, joined, squares, handed_on };
        let unit_norm = match eagle.kind {
            EagleKind::Eagle1 => Some(UnitNorm::alloc(&manifest.model, capacity.rows, device)?),
            EagleKind::Eagle3 => None,
        };
        let layers = Layers::alloc(engine, layer_code, &capacity, num_pages, device)?;
        let mut head = Self {
            layers,
            eagle,
            parts,
            code,
            buffers,
            unit_norm,
            capacity,
            vocab_map,
            mask: None,
            target,
            _weights: Some(weights),
        };
        head.mask = head.read_mask(device)?;
        Ok(head)
    }

    /// With kernels from elsewhere, and memory nowhere.
    pub(super) fn outline(
        layers: Layers,
        weights: Weights,
        loader: &mut impl LoadKernel,
    ) -> Result<Self> {
        let eagle = layers.config.eagle().cloned();
        let (Some(eagle), Weights::Eagle(parts)) = (eagle, weights) else {
            return Err(Error::Unsupported("an outline of what is no EAGLE head".into()));
        };
        if parts.embed.is_none() || parts.head.is_none() {
            return Err(Error::Unsupported(
                "an outline of a head without matrices of its own".into(),
            ));
        }
        let kernels = Kernels { model: &layers.config, precision: &layers.precision };
        let code = HeadCode::of(&kernels, &eagle, loader)?;
        let none = Buffers { taps: 0, states: 0, joined: 0, squares: 0, handed_on: 0 };
        let capacity = Capacity::default();
        Ok(Self {
            layers,
            eagle,
            parts,
            code,
            buffers: none,
            unit_norm: Some(UnitNorm::outline(SOMEWHERE)),
            capacity,
            vocab_map: None,
            mask: None,
            target: None,
            _weights: None,
        })
    }

    /// Bytes that a head takes on a GPU besides weights and cache.
    pub(crate) fn working_bytes(
        manifest: &Manifest,
        eagle: &EagleConfig,
        device: &Description,
    ) -> usize {
        let capacity = Capacity::of(manifest, Prefill::Exact);
        let sizes = sizes(&manifest.model, eagle, capacity.rows, device.capability);
        let own = arrays::total(&sizes);
        let unit_norm = match eagle.kind {
            EagleKind::Eagle1 => UnitNorm::bytes(&manifest.model, capacity.rows),
            EagleKind::Eagle3 => 0,
        };
        own + unit_norm + Layers::bytes(manifest, &capacity, device)
    }

    /// Where the tables of a pass go, and its results come from.
    pub(crate) fn workspace(&self) -> &Workspace {
        &self.layers.workspace
    }

    /// Query heads of a key head.
    pub(crate) fn group(&self) -> usize {
        self.layers.group()
    }

    /// What it is besides its layers.
    pub(crate) fn config(&self) -> &EagleConfig {
        &self.eagle
    }

    /// Whether its rows leave states that other rows come with.
    fn hands_on(&self) -> bool {
        self.eagle.mask_token.is_none()
    }

    /// Values of a state.
    pub(crate) fn width(&self) -> usize {
        self.layers.config.hidden_size
    }

    /// Values of the hidden states that a state is made of.
    fn taps_len(&self) -> usize {
        self.eagle.taps.len() * self.eagle.target_hidden
    }

    /// Tokens that its target has.
    pub(crate) fn vocab_size(&self) -> usize {
        self.layers.config.vocab_size
    }

    /// What puts rows together, and copies them.
    pub(crate) fn join_code(&self) -> Kernel {
        self.code.join
    }

    /// The target's token of each of its own; none where they are the same.
    pub(crate) fn vocab_map(&self) -> Option<&[u32]> {
        self.vocab_map.as_deref()
    }

    /// What the rows behind the first draft are made of, if all drafts come from one pass: P-EAGLE.
    pub(crate) fn mask(&self) -> Option<&MaskRow> {
        self.mask.as_ref()
    }

    /// What spreads logits over the target's vocabulary; none where the first tokens are drafted.
    pub(crate) fn spread_code(&self) -> Option<Kernel> {
        self.code.spread
    }

    /// f32 `[rows][width]`: what the rows of a pass come with, and what `fuse` makes.
    pub(crate) fn states(&self) -> Address {
        self.buffers.states
    }

    /// Whether a pass over so many rows of each sequence has room.
    pub(crate) fn holds(&self, sequences: usize, places: usize) -> bool {
        self.capacity.holds(sequences, places, self.layers.group())
    }

    /// Copies a page of the cache onto another one, in all layers; does not wait.
    pub(crate) fn copy_page(
        &self,
        from: PageId,
        to: PageId,
        device: &mut dyn Device,
    ) -> Result<()> {
        self.layers.copy_page(from, to, device)
    }

    fn bounds(&self) -> Bounds {
        let Capacity { few: rows, sequences, .. } = self.capacity;
        Bounds { rows, blocks: None, sequences, group: self.layers.group() }
    }

    /// Runs segments, and waits for what those with logits bring.
    pub(crate) fn forward(
        &self,
        segments: &[HeadSegment<'_>],
        device: &mut dyn Device,
    ) -> Result<HeadPass> {
        let (width, vocab_size) = (self.width(), self.vocab_size());
        assert!(segments.iter().all(|each| each.tree.is_empty()), "a tree of a head's drafts");
        let plain = HeadSegment::without_states(segments, width, vocab_size)?;
        let states = segments.iter().map(|each| each.states).collect::<Vec<_>>().concat();
        let vocab_size = self.eagle.draft_vocab;
        let mut out = HeadPass { logits: Logits { vocab_size, values: vec![] }, states: vec![] };
        let mut rest = &states[..];
        for mut tables in passes(&plain, &self.bounds()) {
            for row in &mut tables.rows {
                row.first = self.eagle.first_seen(row.slot as usize) as u32;
            }
            let (states, behind) = rest.split_at(tables.rows.len() * width);
            rest = behind;
            upload(device, self.buffers.states, states)?;
            let pass = self.layers.upload(&tables, device)?;
            self.pass(&pass, false).iter().try_for_each(|op| device.issue(op))?;
            let (work, num) = (&self.layers.workspace, pass.num_logits);
            download(device, work.logits, num * vocab_size, &mut out.logits.values)?;
            let handed_on = if self.hands_on() { num * width } else { 0 };
            download(device, self.buffers.handed_on, handed_on, &mut out.states)?;
        }
        Ok(out)
    }
}

fn bad(engine: &Engine, what: &str) -> Error {
    Error::BadEngine(format!("engine {}: {what}", engine.path().display()))
}
