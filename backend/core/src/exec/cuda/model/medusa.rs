//! Medusa heads on a GPU: their weights, and passes of one head over rows of states.
//!
//! They have no layers of a decoder: their products run as those of their target do, in memory of their own. As with a model, a
//! row's result does not depend on the rows beside it, to the bit.

use super::code::{self, ByRows, LoadKernel, MedusaCode};
use super::forward::download;
use super::half_rows::HalfRows;
use super::layers::Layers;
use super::outline::SOMEWHERE;
use super::params::{Best, JoinParams, Piece};
use super::pass::{DecoderPart, Input, Output, PassOps};
use super::shape;
use super::unit_norm::UnitNorm;
use super::weights::{Held, Matrix, Weights};
use super::workspace::Workspace;
use super::{Model, Pass};
use crate::batch::Logits;
use crate::draft_source::MAX_DRAFT_BRANCHES;
use crate::engine::{Engine, Kernels, Limits, Manifest};
use crate::exec::cuda::device::{Address, Description, Device, Kernel, Op, arrays, upload};
use crate::model::{MedusaConfig, ModelConfig, medusa};
use crate::{Error, Result};
use std::sync::Arc;

type Parts = medusa::Medusa<Matrix, Address>;

/// Heads ready to run.
pub struct Medusa {
    /// The target's, with numbers and memory of the heads.
    layers: Layers,
    medusa: MedusaConfig,
    parts: Box<Parts>,
    code: MedusaCode,
    buffers: Buffers,
    unit_norm: UnitNorm,
    capacity: Capacity,
    /// Whose matrix to the logits heads take that have none of their own.
    target: Option<Arc<Model>>,
    /// What the addresses of `parts` are valid with.
    _weights: Option<Held>,
}

/// Rows at most.
#[derive(Clone, Copy, Debug, Default)]
struct Capacity {
    /// Whose hidden states become states: those that a step verifies.
    verified: usize,
    /// That a head has logits of: one a sequence, or a branch of its drafts.
    drafting: usize,
}

impl Capacity {
    fn of(limits: &Limits) -> Self {
        // A step of one sequence may have that many branches of its drafts.
        let drafting = limits.max_batch_size.max(MAX_DRAFT_BRANCHES);
        Self { verified: drafting * (limits.max_draft_len + 1), drafting }
    }
}

/// What passes work in.
#[derive(Clone, Copy, Debug)]
struct Buffers {
    /// f32 `[verified][hidden]`: hidden states that the host brings.
    taps: Address,
    /// f32 `[verified][hidden]`.
    states: Address,
    /// f16 `[drafting][hidden]`, as [`HalfRows`] lie: states as products take them.
    halves: Address,
    /// f32 `[drafting][hidden]`: rows behind a block.
    grown: Address,
    /// f16 `[drafting][hidden]`, as these: the same as products take them.
    grown_halves: Address,
    /// f32 `[drafting][hidden]`: what a block's product adds up; zero before.
    sums: Address,
    /// f32 `[drafting][tiles]`: squares of sums, which nobody wants.
    squares: Address,
}

/// Bytes of the buffers, in the order of the fields, and of what passes use of a workspace.
fn sizes(manifest: &Manifest, device: &Description) -> [usize; 12] {
    let model = &manifest.model;
    let Capacity { verified, drafting } = Capacity::of(&manifest.limits);
    let Description { num_sms, capability, .. } = *device;
    let (hidden, vocab_size) = (model.hidden_size, model.vocab_size);
    let f32 = size_of::<f32>();
    let tiles = |outputs: usize| outputs.div_ceil(shape::TILE_OUTPUTS);
    let most_rows = shape::most_gemm_rows(capability).min(drafting);
    let most_rows = shape::gemm_rows(capability)[shape::gemm_rows_idx(most_rows, capability)];
    let grid = shape::gemm_grid(num_sms, capability) as usize;
    let partials = shape::gemm_partials([hidden, hidden], grid, most_rows, capability);
    let halves = HalfRows::new(hidden, capability).bytes(drafting);
    let normed = if shape::has_warpgroups(capability) { halves } else { 0 };
    [
        verified * hidden * f32,
        verified * hidden * f32,
        halves,
        drafting * hidden * f32,
        halves,
        drafting * hidden * f32,
        drafting * tiles(hidden) * f32,
        normed,
        drafting * vocab_size * f32,
        drafting * tiles(vocab_size) * size_of::<Best>(),
        partials * f32,
        tiles(hidden) * size_of::<u32>(),
    ]
}

impl Medusa {
    /// Loads the engine onto the GPU of `target`.
    pub fn load(engine: &Engine, target: Arc<Model>, device: &mut dyn Device) -> Result<Self> {
        let weights = Held::Own(Weights::upload(engine, device)?);
        Self::load_from(engine, weights, target, device)
    }

    /// As `load`, with weights that are there.
    pub(crate) fn load_from(
        engine: &Engine,
        weights: Held,
        target: Arc<Model>,
        device: &mut dyn Device,
    ) -> Result<Self> {
        let manifest = engine.manifest();
        let bad = |what: String| {
            Err(Error::BadEngine(format!("engine {}: {what}", engine.path().display())))
        };
        let medusa = manifest.model.medusa().cloned();
        let (Some(medusa), Weights::Medusa(parts)) = (medusa, weights.weights()) else {
            return bad("it has no Medusa heads".into());
        };
        let (own, theirs) = (&manifest.model, target.config());
        if (own.hidden_size, own.vocab_size) != (theirs.hidden_size, theirs.vocab_size) {
            let sizes = |model: &ModelConfig| (model.hidden_size, model.vocab_size);
            let (own, theirs) = (sizes(own), sizes(theirs));
            return bad(format!(
                "width and tokens of its heads are {own:?}, of the target {theirs:?}"
            ));
        }
        let parts = parts.clone();
        let code =
            code::load(engine, device, |kernels, loader| MedusaCode::of(kernels, &medusa, loader))?;
        let sizes = sizes(manifest, device.describe());
        let [
            taps,
            states,
            halves,
            grown,
            grown_halves,
            sums,
            squares,
            normed,
            logits,
            best,
            gemm_partials,
            gemm_arrivals,
        ] = arrays::alloc(sizes, device)?;
        let buffers = Buffers { taps, states, halves, grown, grown_halves, sums, squares };
        let workspace = Workspace {
            normed,
            logits,
            best,
            gemm_partials,
            gemm_arrivals,
            ..Workspace::default()
        };
        let precision = manifest.precision.clone();
        let layers = Layers { workspace, precision, ..target.layers.clone() };
        let capacity = Capacity::of(&manifest.limits);
        let unit_norm = UnitNorm::alloc(&layers.config, capacity.drafting, device)?;
        let (target, _weights) = (Some(target), Some(weights));
        Ok(Self { layers, medusa, parts, code, buffers, unit_norm, capacity, target, _weights })
    }

    /// With kernels from elsewhere, and memory nowhere; heads must have matrices of their own.
    pub(super) fn outline(
        layers: Layers,
        weights: Weights,
        loader: &mut impl LoadKernel,
    ) -> Result<Self> {
        let medusa = layers.config.medusa().cloned();
        let (Some(medusa), Weights::Medusa(parts)) = (medusa, weights) else {
            return Err(Error::Unsupported("an outline of what is no Medusa heads".into()));
        };
        let kernels = Kernels { model: &layers.config, precision: &layers.precision };
        let code = MedusaCode::of(&kernels, &medusa, loader)?;
        let buffers = Buffers {
            taps: 0,
            states: 0,
            halves: 0,
            grown: 0,
            grown_halves: 0,
            sums: 0,
            squares: 0,
        };
        let (unit_norm, capacity) = (UnitNorm::outline(SOMEWHERE), Capacity::default());
        let (target, _weights) = (None, None);
        Ok(Self { layers, medusa, parts, code, buffers, unit_norm, capacity, target, _weights })
    }

    /// Bytes that heads take on a GPU besides weights.
    pub(crate) fn working_bytes(manifest: &Manifest, device: &Description) -> usize {
        let capacity = Capacity::of(&manifest.limits);
        arrays::total(&sizes(manifest, device))
            + UnitNorm::bytes(&manifest.model, capacity.drafting)
    }

    /// What they are.
    pub(crate) fn config(&self) -> &MedusaConfig {
        &self.medusa
    }

    /// Values of a state.
    pub(crate) fn width(&self) -> usize {
        self.layers.config.hidden_size
    }

    /// Tokens that they draft.
    pub(crate) fn vocab_size(&self) -> usize {
        self.layers.config.vocab_size
    }

    /// What puts rows together, and copies them.
    pub(crate) fn join_code(&self) -> Kernel {
        self.code.join
    }

    /// Where logits come.
    pub(crate) fn workspace(&self) -> &Workspace {
        &self.layers.workspace
    }

    /// f32 `[rows][width]`: what heads begin with, and what `fuse` makes.
    pub(crate) fn states(&self) -> Address {
        self.buffers.states
    }

    /// Whether there is room for a step that drafts for so many sequences and verifies so many rows of each.
    pub(crate) fn holds(&self, sequences: usize, places: usize) -> bool {
        sequences <= self.capacity.drafting && sequences * places <= self.capacity.verified
    }

    /// States behind the target's last norm, of rows of hidden states.
    pub(crate) fn fuse(&self, num_rows: usize, rows: Address) -> Vec<Op> {
        let pass = of_rows(num_rows);
        let mut ops = self.ops(&pass);
        let params = JoinParams {
            kept: self.buffers.states,
            keeps_normed: 1,
            num_rows: num_rows as u32,
            ..JoinParams::default()
        };
        ops.join(self.code.join, &[self.piece(rows, self.parts.norm)], params);
        ops.ops()
    }

    /// What comes before the heads: the first states as products take them.
    pub(crate) fn begin(&self, num_rows: usize) -> Vec<Op> {
        let pass = of_rows(num_rows);
        let mut ops = self.ops(&pass);
        let params = JoinParams { joined: self.buffers.halves, ..self.block_params(num_rows) };
        ops.join(self.code.join, &[self.piece(self.buffers.states, 0)], params);
        ops.ops()
    }

    /// Logits of the head with this number, for the rows that it began with.
    pub(crate) fn head(&self, idx: usize, num_rows: usize) -> Vec<Op> {
        let Self { parts, buffers, code, .. } = self;
        let pass = of_rows(num_rows);
        let mut ops = self.ops(&pass);
        let head = &parts.heads[idx];
        let (mut rows, mut halves) = (buffers.states, buffers.halves);
        for block in &head.blocks {
            let code = code.block.as_ref().expect("loaded where there are blocks");
            let sums = Output::Sums { code, to: buffers.sums, squares: buffers.squares };
            ops.multiply(block, Input::Halves(halves), sums);
            let params = JoinParams {
                joined: buffers.grown_halves,
                sums: buffers.sums,
                kept: buffers.grown,
                ..self.block_params(num_rows)
            };
            ops.join(self.code.join, &[self.piece(rows, 0)], params);
            (rows, halves) = (buffers.grown, buffers.grown_halves);
        }
        let (matrix, code) = self.to_logits(head);
        ops.head(matrix, self.unit_norm.of(rows), code);
        ops.ops()
    }

    /// What makes a head's logits.
    fn to_logits<'a>(&'a self, head: &'a medusa::MedusaHead<Matrix>) -> (&'a Matrix, &'a ByRows) {
        let own = head.head.as_ref().zip(self.code.head.as_ref());
        let of_target = || {
            let target = self.target.as_ref().expect("loaded with its target");
            (target.decoder.head(), &target.ends.head)
        };
        own.unwrap_or_else(of_target)
    }

    /// Of rows that become the input of a block, whose sums start at nothing.
    fn block_params(&self, num_rows: usize) -> JoinParams {
        JoinParams {
            cleared: self.buffers.sums,
            cleared_len: self.width() as u32,
            num_rows: num_rows as u32,
            ..JoinParams::default()
        }
    }

    /// Rows of a buffer that is as wide as a state.
    fn piece(&self, rows: Address, norm: Address) -> Piece {
        let len = self.width() as u32;
        Piece { rows, norm, stride: len, len }
    }

    fn ops<'a>(&'a self, pass: &'a Pass) -> PassOps<'a> {
        PassOps::new(&self.layers, pass, None, DecoderPart::default())
    }

    /// Makes states of hidden states, `[row][hidden]`; waits for the device.
    pub(super) fn states_of(&self, taps: &[f32], device: &mut dyn Device) -> Result<Vec<f32>> {
        let mut states = Vec::with_capacity(taps.len());
        for taps in taps.chunks(self.capacity.verified * self.width()) {
            upload(device, self.buffers.taps, taps)?;
            let ops = self.fuse(taps.len() / self.width(), self.buffers.taps);
            ops.iter().try_for_each(|op| device.issue(op))?;
            download(device, self.buffers.states, taps.len(), &mut states)?;
        }
        Ok(states)
    }

    /// Logits of a head for rows of states; waits for the device.
    pub(super) fn logits_of(
        &self,
        head: usize,
        states: &[f32],
        device: &mut dyn Device,
    ) -> Result<Logits> {
        let vocab_size = self.vocab_size();
        let mut logits = Logits { vocab_size, values: Vec::new() };
        for states in states.chunks(self.capacity.drafting * self.width()) {
            let num_rows = states.len() / self.width();
            upload(device, self.buffers.states, states)?;
            let ops = [self.begin(num_rows), self.head(head, num_rows)].concat();
            ops.iter().try_for_each(|op| device.issue(op))?;
            let count = num_rows * vocab_size;
            download(device, self.workspace().logits, count, &mut logits.values)?;
        }
        Ok(logits)
    }
}

/// A pass whose rows all want logits.
fn of_rows(num_rows: usize) -> Pass {
    Pass { num_rows, num_logits: num_rows, ..Pass::default() }
}
