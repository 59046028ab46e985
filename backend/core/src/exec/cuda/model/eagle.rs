//! An EAGLE head on a GPU: its weights, its KV cache, and passes over ragged rows of tokens and states.
//!
//! As with a model, a row's result does not depend on the rows beside it, to the bit.

use super::code::{self, ByRows, HeadCode, LayerCode, LoadKernel};
use super::forward::download;
use super::layers::Layers;
use super::outline::SOMEWHERE;
use super::params::{JoinParams, Piece, Scaling};
use super::pass::{DecoderPart, Input, Output, PassOps};
use super::shape;
use super::tables::{Bounds, passes};
use super::taps::Taps;
use super::unit_norm::UnitNorm;
use super::weights::{Held, Matrix, Weights};
use super::workspace::{Capacity, Workspace};
use super::{Model, Pass, Prefill};
use crate::batch::Logits;
use crate::draft::{HeadPass, HeadSegment, MaskRow};
use crate::engine::{Engine, Kernels, Manifest};
use crate::exec::cuda::device::{Address, Description, Device, Kernel, Op, arrays, upload};
use crate::exec::vocab_map;
use crate::model::{EagleConfig, EagleKind, ModelConfig, TapNorms, eagle};
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
    /// f16 `[rows]`, as wide as the widest product that reads it.
    joined: Address,
    /// f32 `[rows]`: squares of sums, which nobody wants.
    squares: Address,
    /// f32 `[rows][hidden]`: what rows hand on.
    handed_on: Address,
}

/// Bytes of the arrays, in the order of the fields.
fn sizes(model: &ModelConfig, eagle: &EagleConfig, rows: usize) -> [usize; 5] {
    let hidden = model.hidden_size;
    let (fc, first) = (eagle.fc_inputs(hidden), eagle.first_inputs(hidden));
    let tiles = model.qkv_size().max(hidden).div_ceil(shape::TILE_OUTPUTS);
    let rows_of = |width: usize, element: usize| rows * width * element;
    [
        rows_of(eagle.taps.len() * eagle.target_hidden, size_of::<f32>()),
        rows_of(hidden, size_of::<f32>()),
        rows_of(fc.max(first), size_of::<u16>()),
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
        let sizes = sizes(&manifest.model, &eagle, capacity.rows);
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

    /// What rows of the mask token are made of, if it has one; waits for the device.
    fn read_mask(&self, device: &mut dyn Device) -> Result<Option<MaskRow>> {
        let mask = self.eagle.mask_token.zip(self.parts.mask_hidden);
        let Some((token, taps)) = mask else { return Ok(None) };
        let width = self.eagle.target_hidden;
        let tap = |idx: usize| taps + (idx * width * size_of::<f32>()) as Address;
        self.fuse(1, tap, self.taps_len()).iter().try_for_each(|op| device.issue(op))?;
        let mut state = Vec::new();
        download(device, self.buffers.states, self.width(), &mut state)?;
        Ok(Some(MaskRow { token, state }))
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
        let own = arrays::total(&sizes(&manifest.model, eagle, capacity.rows));
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

    /// The table of token vectors, and the kernel that reads it.
    fn embed(&self) -> (&Matrix, Kernel) {
        match (&self.parts.embed, self.code.embed, &self.target) {
            (Some(embed), Some(code), _) => (embed, code),
            (_, _, Some(target)) => (&target.decoder.embed, target.ends.embed),
            _ => unreachable!("checked when it was made"),
        }
    }

    /// What makes logits.
    fn head(&self) -> (&Matrix, &ByRows) {
        match (&self.parts.head, &self.code.head, &self.target) {
            (Some(head), Some(code), _) => (head, code),
            (_, _, Some(target)) => (target.decoder.head(), &target.ends.head),
            _ => unreachable!("checked when it was made"),
        }
    }

    /// A pass over rows that come with the states in their buffer, or `goes_on` with what those with logits of the pass
    /// before have handed on.
    pub(crate) fn pass(&self, pass: &Pass, goes_on: bool) -> Vec<Op> {
        let states = if goes_on { self.buffers.handed_on } else { self.buffers.states };
        let Self { layers, parts, buffers, .. } = self;
        let work = &layers.workspace;
        let first = &parts.first;
        let mut ops = PassOps::new(layers, pass, None, DecoderPart::default());
        let (embed, code) = self.embed();
        ops.embed(embed, code);
        match self.eagle.kind {
            EagleKind::Eagle1 => self.fuse_tokens(&mut ops, states),
            EagleKind::Eagle3 => self.join_tokens(&mut ops, states),
        }
        let sums = Output::Sums { code: &self.code.qkv, to: work.raw, squares: buffers.squares };
        ops.multiply(&first.attention.qkv, Input::Halves(buffers.joined), sums);
        let cache = layers.cache.layer(0);
        ops.rotate(&first.attention, cache, work.raw, Scaling::default());
        if pass.num_logits == 0 && parts.layers.is_empty() {
            // Its keys and values are all that is wanted of a row.
            return ops.ops();
        }
        ops.attend_with(&first.attention, cache);
        ops.mlp(&first.mlp);
        for (idx, layer) in parts.layers.iter().enumerate() {
            ops.layer(layer, idx + 1);
        }
        if pass.num_logits > 0 {
            if self.hands_on() {
                self.hand_on(&mut ops);
            }
            let (head, code) = self.head();
            let input = match (parts.final_norm, self.unit_norm) {
                (Some(norm), _) => Input::Normed(norm),
                (None, Some(norm)) if self.hands_on() => norm.of(buffers.handed_on),
                _ => unreachable!("EAGLE-1 hands on rows, and has a norm that changes nothing"),
            };
            ops.head(head, input, code);
        }
        ops.ops()
    }

    /// EAGLE-3: tokens and states side by side, each behind its norm, as the input of the first layer's attention. The
    /// residual stream begins with the state.
    fn join_tokens(&self, ops: &mut PassOps<'_>, states: Address) {
        let (work, first) = (&self.layers.workspace, &self.parts.first);
        let norm = |norm: Option<Address>| norm.expect("EAGLE-3 has it");
        let pieces = [
            self.piece(work.residual, norm(first.token_norm)),
            self.piece(states, norm(first.hidden_norm)),
        ];
        let params = JoinParams {
            kept: work.residual,
            keeps_normed: self.eagle.norm_before_residual.into(),
            ..self.first_layer_params(ops.pass)
        };
        ops.join(self.code.join, &pieces, params);
    }

    /// EAGLE-1: `fc` over tokens and states begins the residual stream, which the first layer's attention takes as it is.
    fn fuse_tokens(&self, ops: &mut PassOps<'_>, states: Address) {
        let Self { layers, parts, buffers, .. } = self;
        let residual = layers.workspace.residual;
        let params = JoinParams {
            joined: buffers.joined,
            // Where the tokens stood comes the product.
            cleared: residual,
            cleared_len: self.width() as u32,
            num_rows: ops.pass.num_rows as u32,
            ..JoinParams::default()
        };
        ops.join(self.code.join, &[self.piece(residual, 0), self.piece(states, 0)], params);
        let sums = Output::Sums { code: &self.code.fc, to: residual, squares: buffers.squares };
        ops.multiply(&parts.fc, Input::Halves(buffers.joined), sums);
        ops.join(self.code.join, &[self.piece(residual, 0)], self.first_layer_params(ops.pass));
    }

    /// How rows become the input of the first layer's attention, whose sums start at nothing.
    fn first_layer_params(&self, pass: &Pass) -> JoinParams {
        JoinParams {
            joined: self.buffers.joined,
            cleared: self.layers.workspace.raw,
            cleared_len: self.parts.first.attention.qkv.n as u32,
            num_rows: pass.num_rows as u32,
            ..JoinParams::default()
        }
    }

    /// Keeps the states of rows that have logits.
    fn hand_on(&self, ops: &mut PassOps<'_>) {
        let work = &self.layers.workspace;
        let norm = self.parts.final_norm.filter(|_| self.eagle.norm_output);
        let params = JoinParams {
            row_index: work.logit_rows,
            kept: self.buffers.handed_on,
            keeps_normed: 1,
            num_rows: ops.pass.num_logits as u32,
            ..JoinParams::default()
        };
        ops.join(self.code.join, &[self.piece(work.residual, norm.unwrap_or(0))], params);
    }

    /// Rows of a buffer that is as wide as a state.
    fn piece(&self, rows: Address, norm: Address) -> Piece {
        let len = self.width() as u32;
        Piece { rows, norm, stride: len, len }
    }

    /// Makes states of hidden states in their buffer, `[row][tap][hidden]`.
    fn fuse_uploaded(&self, num_rows: usize) -> Vec<Op> {
        let (width, row_len) = (self.eagle.target_hidden, self.taps_len());
        let rows = |tap: usize| self.buffers.taps + (tap * width * size_of::<f32>()) as Address;
        self.fuse(num_rows, rows, row_len)
    }

    /// Makes states of rows of hidden states: of those behind each tap where the first one is, `stride` values from one to
    /// the next. EAGLE-1 takes them as they are, behind the norm.
    pub(crate) fn fuse(
        &self,
        num_rows: usize,
        rows: impl Fn(usize) -> Address,
        stride: usize,
    ) -> Vec<Op> {
        let Self { layers, parts, buffers, eagle, .. } = self;
        let width = eagle.target_hidden;
        let norm = |idx: usize| match eagle.tap_norms {
            TapNorms::None => 0,
            TapNorms::Each => parts.tap_norms[idx],
            TapNorms::Together => parts.tap_norms[0] + (idx * width * size_of::<f32>()) as Address,
        };
        let tap = |idx: usize| Piece {
            rows: rows(idx),
            norm: norm(idx),
            stride: stride as u32,
            len: width as u32,
        };
        let taps: Vec<Piece> = (0..eagle.taps.len()).map(tap).collect();
        let pass = Pass { num_rows, ..Pass::default() };
        let mut ops = PassOps::new(layers, &pass, None, DecoderPart::default());
        let params = JoinParams {
            is_together: (eagle.tap_norms == TapNorms::Together).into(),
            num_rows: num_rows as u32,
            ..JoinParams::default()
        };
        let (to, squares) = (buffers.states, buffers.squares);
        if eagle.kind == EagleKind::Eagle1 {
            ops.join(self.code.join, &taps, JoinParams { kept: to, keeps_normed: 1, ..params });
            return ops.ops();
        }
        let (joined, cleared_len) = (buffers.joined, parts.fc.n as u32);
        ops.join(self.code.join, &taps, JoinParams { joined, cleared: to, cleared_len, ..params });
        let sums = Output::Sums { code: &self.code.fc, to, squares };
        ops.multiply(&parts.fc, Input::Halves(buffers.joined), sums);
        ops.ops()
    }

    /// Appends the states of rows whose hidden states are on the device, `[row][width]`; waits for it.
    pub(super) fn read_states(
        &self,
        taps: &Taps,
        num_rows: usize,
        device: &mut dyn Device,
        to: &mut Vec<f32>,
    ) -> Result<()> {
        let stride = self.eagle.target_hidden;
        for first in (0..num_rows).step_by(self.capacity.rows) {
            let count = self.capacity.rows.min(num_rows - first);
            let before = (first * stride * size_of::<f32>()) as Address;
            let ops = self.fuse(count, |tap| taps.place(tap) + before, stride);
            ops.iter().try_for_each(|op| device.issue(op))?;
            download(device, self.buffers.states, count * self.width(), to)?;
        }
        Ok(())
    }

    /// Makes states of hidden states, `[row][tap][hidden]`; waits for the device.
    pub(super) fn states_of(&self, taps: &[f32], device: &mut dyn Device) -> Result<Vec<f32>> {
        let row_len = self.taps_len();
        let mut states = Vec::with_capacity(taps.len() / row_len * self.width());
        for taps in taps.chunks(self.capacity.rows * row_len) {
            let num_rows = taps.len() / row_len;
            upload(device, self.buffers.taps, taps)?;
            self.fuse_uploaded(num_rows).iter().try_for_each(|op| device.issue(op))?;
            download(device, self.buffers.states, num_rows * self.width(), &mut states)?;
        }
        Ok(states)
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
