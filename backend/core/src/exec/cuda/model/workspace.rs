//! The memory that passes work in: one allocation, cut by a plan that is a function of the engine and the GPU.

use super::half_rows::HalfRows;
use super::many::Prefill;
use super::params::{Best, Row, Tile};
use super::shape::{self, Tiling};
use crate::Result;
use crate::engine::{Limits, Manifest};
use crate::exec::cuda::device::arrays;
use crate::exec::cuda::device::{Address, Description, Device};
use crate::model::ModelConfig;
use crate::model::decoder::{Layer, Linear};
use crate::model::eagle::Eagle;
use crate::pages::pages_for;

/// Fewest rows that a pass is planned for: what prefill runs at a time.
const MIN_PASS_ROWS: usize = 256;

/// Array sizes of a pass, in elements.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Capacity {
    /// Rows of a pass.
    pub rows: usize,
    /// Rows of a pass that few-row products compute, and rows that get logits in any pass.
    pub few: usize,
    /// Rows of a pass through blocks of prompts, where these are multiplied as such.
    pub blocks: Option<usize>,
    /// Sequences of a pass.
    pub sequences: usize,
    /// Tiles of a pass, narrow and wide ones: each sequence may have one that is not full.
    pub tiles: [usize; 2],
    /// Width of a full page table.
    pub max_pages: usize,
}

impl Capacity {
    /// What the engine's steps need.
    pub(crate) fn of(manifest: &Manifest, prefill: Prefill) -> Self {
        Self::new(&manifest.model, &manifest.limits, prefill)
    }

    /// What steps of a model within these limits need.
    pub(crate) fn new(model: &ModelConfig, limits: &Limits, prefill: Prefill) -> Self {
        let places = match model.drafts_at_once() {
            false => limits.max_draft_len + 1,
            // What the step before has brought, and a mask for each draft but the first.
            true => 2 * limits.max_draft_len.max(1),
        };
        let few = (limits.max_batch_size * places).max(MIN_PASS_ROWS.min(limits.max_num_tokens));
        let blocks = (prefill != Prefill::Exact).then(|| shape::block_rows(limits.max_num_tokens));
        let rows = few.max(blocks.unwrap_or(0));
        let group = model.num_heads / model.num_kv_heads;
        Self {
            rows,
            few,
            blocks,
            sequences: limits.max_batch_size,
            tiles: TILINGS.map(|tiling| limits.max_batch_size + rows.div_ceil(tiling.rows(group))),
            max_pages: pages_for(limits.max_seq_len),
        }
    }

    /// Whether a pass over so many rows of each sequence has room, with logits for all of them. `group` is query heads of a
    /// key head.
    pub(crate) fn holds(&self, sequences: usize, places: usize, group: usize) -> bool {
        let tiling = Tiling::of(sequences, places, group);
        let num_tiles = sequences * places.div_ceil(tiling.rows(group));
        let mut bounds = TILINGS.iter().zip(self.tiles);
        let most_tiles = bounds.find_map(|(&each, tiles)| (each == tiling).then_some(tiles));
        sequences * places <= self.few && most_tiles.is_some_and(|most| num_tiles <= most)
    }
}

/// Where the arrays of a pass are.
#[derive(Clone, Copy, Debug, Default)]
pub struct Workspace {
    /// f32 `[rows][hidden]`.
    pub residual: Address,
    /// f32 `[rows][tiles of hidden]`: sums of its squares.
    pub squares: Address,
    /// f16 `[few][hidden]`, as [`HalfRows`] lie: normed rows, where products take them as halves.
    pub normed: Address,
    /// f32 `[rows][qkv]`, for models with head norms and for heads on hidden states.
    pub raw: Address,
    /// f16 `[rows][queries]`.
    pub queries: Address,
    /// f16 `[few][queries]`, as [`HalfRows`] lie. What is behind a row's last stays zero: nothing else is written here.
    pub attended: Address,
    /// f16 `[few][intermediate]`, as these.
    pub activated: Address,
    /// f16 `[blocks][queries]`, one row behind the other: of passes through blocks.
    pub block_attended: Address,
    /// f16 `[blocks][intermediate]`, as these.
    pub block_activated: Address,
    /// f32 `[few][vocabulary]`.
    pub logits: Address,
    /// [`Best`] `[few][tiles of the vocabulary]`.
    pub best: Address,
    /// f32: sums that blocks of a product add up for each other.
    pub gemm_partials: Address,
    /// u32 `[tiles]`: how much of a product's tile is summed up; 0 between launches.
    pub gemm_arrivals: Address,
    /// f32: sums that blocks of the attention add up for each other.
    pub attention_partials: Address,
    /// u32 `[items]`: how many of the attention's sums have arrived; 0 between launches.
    pub attention_arrivals: Address,
    /// [`Row`] `[rows]`.
    pub rows: Address,
    /// [`Tile`] `[tiles]`.
    pub tiles: Address,
    /// u32 `[rows]`: rows that want logits.
    pub logit_rows: Address,
    /// u32 `[sequences][max_pages]`.
    pub pages: Address,
}

impl Workspace {
    /// Bytes of the arrays, in the order of the fields.
    fn sizes(manifest: &Manifest, capacity: &Capacity, device: &Description) -> [usize; 19] {
        let model = &manifest.model;
        let Description { num_sms, capability, .. } = *device;
        let (grid, sms) = (shape::gemm_grid(num_sms, capability) as usize, num_sms as usize);
        let Capacity { rows, few, blocks, sequences, tiles, max_pages } = *capacity;
        let num_logits = model.num_logits();
        let vocab_tiles = num_logits.div_ceil(shape::TILE_OUTPUTS);
        let is_raw = model.qk_norm || model.draft_head.is_some();
        let shapes = shared_tiles(model);
        let shapes = || shapes.iter().copied();
        let most_rows = shape::most_gemm_rows(capability).min(few);
        let most_rows = shape::gemm_rows(capability)[shape::gemm_rows_idx(most_rows, capability)];
        let partials =
            shapes().map(|shape| shape::gemm_partials(shape, grid, most_rows, capability));
        let halves = |len| HalfRows::new(len, capability).bytes(few);
        let normed = match shape::has_warpgroups(capability) {
            true => halves(model.hidden_size),
            false => 0,
        };
        let block_halves = |len| blocks.unwrap_or(0) * len * size_of::<u16>();
        let gemm_partials = partials.max().unwrap_or(0);
        let widest = shapes().map(|[n, _]| n).max().unwrap_or(0);
        let attending = Tiling::blocks(sms);
        let partials = TILINGS.map(|tiling| tiling.partials(model.head_dim, attending));
        [
            rows * model.hidden_size * size_of::<f32>(),
            rows * model.hidden_size.div_ceil(shape::TILE_OUTPUTS) * size_of::<f32>(),
            normed,
            if is_raw { rows * model.qkv_size() * size_of::<f32>() } else { 0 },
            rows * model.q_size() * size_of::<u16>(),
            halves(model.q_size()),
            halves(model.intermediate_size),
            block_halves(model.q_size()),
            block_halves(model.intermediate_size),
            few * num_logits * size_of::<f32>(),
            few * vocab_tiles * size_of::<Best>(),
            gemm_partials * size_of::<f32>(),
            widest.div_ceil(shape::TILE_OUTPUTS) * size_of::<u32>(),
            largest(partials) * size_of::<f32>(),
            Tiling::max_items(attending) * size_of::<u32>(),
            rows * size_of::<Row>(),
            largest(tiles) * size_of::<Tile>(),
            rows * size_of::<u32>(),
            sequences * max_pages * size_of::<u32>(),
        ]
    }

    /// Bytes that [`alloc`](Self::alloc) takes.
    pub(crate) fn bytes(manifest: &Manifest, capacity: &Capacity, on: &Description) -> usize {
        arrays::total(&Self::sizes(manifest, capacity, on))
    }

    /// Allocates all arrays, zeroed.
    pub(crate) fn alloc(
        manifest: &Manifest,
        capacity: &Capacity,
        device: &mut dyn Device,
    ) -> Result<Self> {
        let [
            residual,
            squares,
            normed,
            raw,
            queries,
            attended,
            activated,
            block_attended,
            block_activated,
            logits,
            best,
            gemm_partials,
            gemm_arrivals,
            attention_partials,
            attention_arrivals,
            rows,
            tiles,
            logit_rows,
            pages,
        ] = arrays::alloc(Self::sizes(manifest, capacity, device.describe()), device)?;
        Ok(Self {
            residual,
            squares,
            normed,
            raw,
            queries,
            attended,
            activated,
            block_attended,
            block_activated,
            logits,
            best,
            gemm_partials,
            gemm_arrivals,
            attention_partials,
            attention_arrivals,
            rows,
            tiles,
            logit_rows,
            pages,
        })
    }
}

/// Shapes of the products whose blocks share tiles: not that with the head, and all layers are alike.
fn shared_tiles(model: &ModelConfig) -> Vec<[usize; 2]> {
    let mut shapes: Vec<_> = Layer::of(model, 0).matrices().map(Linear::shape).into();
    if let Some(eagle) = model.eagle() {
        let Eagle { fc, first, .. } = Eagle::of(model, eagle);
        shapes.extend([fc.shape(), first.attention.qkv.shape()]);
    }
    shapes
}

/// Ways to attend; a pass needs the workspace of one.
const TILINGS: [Tiling; 2] = [Tiling::Narrow, Tiling::Wide];

fn largest([narrow, wide]: [usize; 2]) -> usize {
    narrow.max(wide)
}
