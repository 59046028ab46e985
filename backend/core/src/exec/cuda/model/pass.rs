//! The operations of a forward pass over prepared rows. The decoder is written here, once; how rows are multiplied with a
//! matrix is a choice: by kernels that take few rows each (`few`), or by a library (`many`).

use super::few;
use super::kv::LayerCache;
use super::many::InBlocks;
use super::params::{AttentionParams, EmbedParams, RopeParams, Scaling};
use super::shape;
use super::taps::Taps;
use super::weights::{Attention, Matrix, Mlp};
use super::{Model, Pass};
use crate::exec::cuda::device::pod::Pod;
use crate::exec::cuda::device::{Address, Kernel, Launch, Op};

/// What rows are multiplied.
#[derive(Clone, Copy)]
pub(super) enum Input {
    /// The residual stream behind the norm of these weights.
    Normed(Address),
    /// What the attention has put together.
    Attended,
    /// What has gone through the MLP's gate.
    Activated,
}

/// What becomes of the sums.
#[derive(Clone, Copy)]
pub(super) enum Output<'a> {
    /// Heads, normed and rotated: queries for the attention, keys and values to this cache.
    Heads { part: &'a Attention, cache: LayerCache },
    /// The residual stream grows by them.
    Residual,
    /// silu(gate) * up, as the next product takes it.
    Activated { next: &'a Matrix },
    /// Logits of the rows that want them.
    Logits,
}

/// A pass in the making.
pub(super) struct PassOps<'a> {
    pub(super) model: &'a Model,
    pub(super) pass: &'a Pass,
    /// Who multiplies, where that is a library.
    blocks: Option<InBlocks<'a>>,
    /// Hidden states to keep.
    taps: Option<&'a Taps>,
    ops: Vec<Op>,
}

impl<'a> PassOps<'a> {
    pub(super) fn new(
        model: &'a Model,
        pass: &'a Pass,
        blocks: Option<InBlocks<'a>>,
        taps: Option<&'a Taps>,
    ) -> Self {
        Self { model, pass, blocks, taps, ops: Vec::new() }
    }

    /// Embedding, layers, head.
    pub(super) fn all(mut self) -> Vec<Op> {
        let decoder = &self.model.weights.decoder;
        self.embed(&decoder.embed);
        self.tap(0);
        for (idx, layer) in decoder.layers.iter().enumerate() {
            self.attend(layer.input_norm, &layer.attention, self.model.cache.layer(idx));
            self.mlp(&layer.mlp);
            self.tap(idx + 1);
        }
        let input = Input::Normed(decoder.final_norm);
        // Few rows want logits, whatever the pass.
        few::multiply(&mut self, decoder.head(), input, Output::Logits);
        self.ops
    }

    /// `residual += out(attention(qkv(norm(residual))))`
    fn attend(&mut self, norm: Address, part: &Attention, cache: LayerCache) {
        self.multiply(&part.qkv, Input::Normed(norm), Output::Heads { part, cache });
        self.attention(cache);
        self.multiply(&part.out, Input::Attended, Output::Residual);
    }

    /// `residual += down(silu(gate) * up)`
    fn mlp(&mut self, part: &Mlp) {
        let activated = Output::Activated { next: &part.down };
        self.multiply(&part.gate_up, Input::Normed(part.norm), activated);
        self.multiply(&part.down, Input::Activated, Output::Residual);
    }

    /// Keeps the residual stream behind `layer` layers, if it is wanted.
    fn tap(&mut self, layer: usize) {
        let Some(taps) = self.taps else { return };
        let from = self.model.workspace.residual;
        let bytes = self.pass.num_rows * taps.row_bytes();
        for to in taps.places(layer) {
            self.push(Op::Copy { from, to, bytes });
        }
    }

    fn multiply(&mut self, matrix: &Matrix, input: Input, output: Output<'_>) {
        match self.blocks {
            Some(blocks) => blocks.multiply(self, matrix, input, output),
            None => few::multiply(self, matrix, input, output),
        }
    }

    fn embed(&mut self, embed: &Matrix) {
        let (model, work) = (self.model, &self.model.workspace);
        let params = EmbedParams {
            weights: embed.weights,
            scales: embed.scales,
            rows: work.rows,
            residual: work.residual,
            squares: work.squares,
            num_rows: self.pass.num_rows as u32,
            k: embed.k as u32,
        };
        let grid = self.pass.num_rows as u32;
        self.launch(model.code.embed, grid, shape::ROW_THREADS, 0, params);
    }

    /// Head norms, if there are any, and rotation, which the product has left undone.
    pub(super) fn rotate(
        &mut self,
        part: &Attention,
        cache: LayerCache,
        input: Address,
        scaling: Scaling,
    ) {
        let (model, work) = (self.model, &self.model.workspace);
        let params = RopeParams {
            input,
            scaling,
            q_norm: part.q_norm.unwrap_or(0),
            k_norm: part.k_norm.unwrap_or(0),
            rope: model.rope,
            rows: work.rows,
            pages: self.pass.pages,
            queries: work.queries,
            cache: cache.memory,
            kv_scales: cache.scales,
            eps: model.config.rms_norm_eps,
            num_rows: self.pass.num_rows as u32,
            num_heads: model.config.num_heads as u32,
            num_kv_heads: model.config.num_kv_heads as u32,
            max_pages: self.pass.max_pages as u32,
            unused: 0,
        };
        self.launch(model.code.rope, self.pass.num_rows as u32, shape::ROW_THREADS, 0, params);
    }

    /// Where the attention's rows go: in blocks to their places.
    pub(super) fn attended(&self) -> Address {
        let first = self.blocks.map_or(0, |blocks| blocks.first);
        let bytes = first * self.model.config.q_size() * size_of::<u16>();
        self.model.workspace.attended + bytes as Address
    }

    fn attention(&mut self, cache: LayerCache) {
        let (model, work, tiling) = (self.model, &self.model.workspace, self.pass.tiling);
        let pairs = self.pass.num_tiles * model.config.num_kv_heads;
        let blocks = tiling.blocks(model.num_sms as usize, pairs);
        let params = AttentionParams {
            queries: work.queries,
            cache: cache.memory,
            rows: work.rows,
            tiles: work.tiles,
            pages: self.pass.pages,
            output: self.attended(),
            partials: work.attention_partials,
            arrivals: work.attention_arrivals,
            kv_scales: cache.scales,
            scale: 1.0 / (model.config.head_dim as f32).sqrt(),
            num_tiles: self.pass.num_tiles as u32,
            num_kv_heads: model.config.num_kv_heads as u32,
            max_pages: self.pass.max_pages as u32,
            split_tokens: shape::SPLIT_TOKENS as u32,
            max_items: tiling.max_items(blocks) as u32,
        };
        let shared_bytes = tiling.shared_bytes(model.precision.kv, model.config.head_dim);
        let kernel = model.code.attention(tiling);
        self.launch(kernel, blocks as u32, shape::ATTENTION_THREADS, shared_bytes, params);
    }

    pub(super) fn launch<P: Pod>(
        &mut self,
        kernel: Kernel,
        grid: u32,
        block: u32,
        shared_bytes: u32,
        params: P,
    ) {
        let launch = Launch::new(kernel, grid, block, shared_bytes, params);
        self.push(Op::Launch(launch));
    }

    pub(super) fn push(&mut self, op: Op) {
        self.ops.push(op);
    }
}
