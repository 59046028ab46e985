//! The operations of a forward pass over prepared rows. The decoder is written here, once; how rows are multiplied with a
//! matrix is a choice: by kernels that take few rows each (`few`), or in blocks (`many`).

use super::Pass;
use super::code::{ByRows, EndCode};
use super::few;
use super::half_rows::HalfRows;
use super::kv::LayerCache;
use super::layers::Layers;
use super::many::InBlocks;
use super::params::{
    AttentionParams, EmbedParams, JoinParams, MOST_PIECES, Piece, RopeParams, Scaling,
};
use super::shape::{self, Tiling};
use super::taps::Taps;
use super::weights::{Attention, Matrix, Mlp};
use crate::exec::cuda::device::pod::Pod;
use crate::exec::cuda::device::{Address, Kernel, Launch, Op};
use crate::model::LayerSkip;
use crate::model::decoder::{Decoder, Layer};

/// What rows are multiplied.
#[derive(Clone, Copy)]
pub(super) enum Input {
    /// The residual stream behind the norm of these weights.
    Normed(Address),
    /// What the attention has put together.
    Attended,
    /// What has gone through the MLP's gate.
    Activated,
    /// f16 rows that are there, as [`HalfRows`] lie.
    Halves(Address),
    /// f32 rows that are there, behind a norm: where logits are wanted, of the rows that want some alone. The squares are what
    /// the norm takes for theirs.
    Rows { rows: Address, norm: Address, squares: Address },
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
    /// Logits of the rows that want them, by this product.
    Logits(&'a ByRows),
    /// f32 rows, which grow by them, by this product. The sums of their squares go elsewhere.
    Sums { code: &'a ByRows, to: Address, squares: Address },
}

/// A pass in the making.
pub(super) struct PassOps<'a> {
    pub(super) layers: &'a Layers,
    pub(super) pass: &'a Pass,
    /// Who multiplies, where it has rows of blocks.
    blocks: Option<InBlocks<'a>>,
    /// What of the decoder it runs, and keeps.
    part: DecoderPart<'a>,
    ops: Vec<Op>,
}

/// What of a decoder a pass runs, and what it keeps; all of it, and nothing, where nothing is said.
#[derive(Clone, Copy, Default)]
pub(crate) struct DecoderPart<'a> {
    /// From where to where it goes.
    pub(crate) extent: Extent,
    /// Hidden states to keep.
    pub(crate) taps: Option<&'a Taps>,
    /// What to go without.
    pub(crate) skip: Option<&'a LayerSkip>,
}

/// From where to where a pass goes through a decoder.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) enum Extent {
    /// From tokens to logits.
    #[default]
    Whole,
    /// From tokens to the residual stream behind the layers.
    Layers,
    /// From there to logits.
    Head,
}

impl Extent {
    pub(crate) fn has_layers(self) -> bool {
        self != Self::Head
    }

    pub(crate) fn has_head(self) -> bool {
        self != Self::Layers
    }
}

impl<'a> PassOps<'a> {
    pub(super) fn new(
        layers: &'a Layers,
        pass: &'a Pass,
        blocks: Option<InBlocks<'a>>,
        part: DecoderPart<'a>,
    ) -> Self {
        Self { layers, pass, blocks, part, ops: Vec::new() }
    }

    /// Embedding, layers, head.
    pub(super) fn decoder(mut self, decoder: &Decoder<Matrix, Address>, ends: &EndCode) -> Vec<Op> {
        if self.part.extent.has_layers() {
            self.embed(&decoder.embed, ends.embed);
            self.tap(0);
            for (idx, layer) in decoder.layers.iter().enumerate() {
                self.layer(layer, idx);
                self.tap(idx + 1);
            }
        }
        if self.part.extent.has_head() {
            self.head(decoder.head(), Input::Normed(decoder.final_norm), &ends.head);
        }
        self.ops
    }

    /// What was put together.
    pub(super) fn ops(self) -> Vec<Op> {
        self.ops
    }

    /// A decoder layer like all others.
    pub(super) fn layer(&mut self, layer: &Layer<Matrix, Address>, idx: usize) {
        let skip = self.part.skip;
        if !skip.is_some_and(|skip| skip.skips_attention(idx)) {
            self.attend(layer.input_norm, &layer.attention, self.layers.cache.layer(idx));
        }
        if !skip.is_some_and(|skip| skip.skips_mlp(idx)) {
            self.mlp(&layer.mlp);
        }
    }

    /// Logits: few rows want some, whatever the pass.
    pub(super) fn head(&mut self, head: &Matrix, input: Input, code: &ByRows) {
        few::multiply(self, head, input, Output::Logits(code));
    }

    /// `residual += out(attention(qkv(norm(residual))))`
    fn attend(&mut self, norm: Address, part: &Attention, cache: LayerCache) {
        self.multiply(&part.qkv, Input::Normed(norm), Output::Heads { part, cache });
        self.attend_with(part, cache);
    }

    /// `residual += out(attention(heads))`, of heads that are there.
    pub(super) fn attend_with(&mut self, part: &Attention, cache: LayerCache) {
        self.attention(cache);
        self.multiply(&part.out, Input::Attended, Output::Residual);
    }

    /// `residual += down(silu(gate) * up)`
    pub(super) fn mlp(&mut self, part: &Mlp) {
        let activated = Output::Activated { next: &part.down };
        self.multiply(&part.gate_up, Input::Normed(part.norm), activated);
        self.multiply(&part.down, Input::Activated, Output::Residual);
    }

    /// Keeps the residual stream behind `layer` layers, if it is wanted.
    fn tap(&mut self, layer: usize) {
        let Some(taps) = self.part.taps else { return };
        let from = self.layers.workspace.residual;
        for to in taps.places(layer) {
            self.push(taps.copy(from, to, self.pass.num_rows));
        }
    }

    /// Puts rows together from pieces that lie side by side (`join.cu`).
    pub(super) fn join(&mut self, code: Kernel, pieces: &[Piece], params: JoinParams) {
        let mut all = [Piece::default(); MOST_PIECES];
        all[..pieces.len()].copy_from_slice(pieces);
        let len: u32 = pieces.iter().map(|piece| piece.len).sum();
        let params = JoinParams {
            pieces: all,
            num_pieces: pieces.len() as u32,
            eps: self.layers.config.rms_norm_eps,
            joined_units: self.half_rows(len as usize).units(),
            ..params
        };
        let shared_bytes = shape::OPERAND_SHARED_BYTES;
        self.launch(code, params.num_rows, shape::ROW_THREADS, shared_bytes, params);
    }

    pub(super) fn multiply(&mut self, matrix: &Matrix, input: Input, output: Output<'_>) {
        match self.blocks {
            Some(blocks) => blocks.multiply(self, matrix, input, output),
            None => few::multiply(self, matrix, input, output),
        }
    }

    pub(super) fn embed(&mut self, embed: &Matrix, code: Kernel) {
        let work = &self.layers.workspace;
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
        self.launch(code, grid, shape::ROW_THREADS, 0, params);
    }

    /// Head norms, if there are any, and rotation, which the product has left undone.
    pub(super) fn rotate(
        &mut self,
        part: &Attention,
        cache: LayerCache,
        input: Address,
        scaling: Scaling,
    ) {
        let (layers, work) = (self.layers, &self.layers.workspace);
        let params = RopeParams {
            input,
            scaling,
            q_norm: part.q_norm.unwrap_or(0),
            k_norm: part.k_norm.unwrap_or(0),
            rope: layers.rope,
            rows: work.rows,
            pages: self.pass.pages,
            queries: work.queries,
            cache: cache.memory,
            kv_scales: cache.scales,
            eps: layers.config.rms_norm_eps,
            num_rows: self.pass.num_rows as u32,
            num_heads: layers.config.num_heads as u32,
            num_kv_heads: layers.config.num_kv_heads as u32,
            max_pages: self.pass.max_pages as u32,
            unused: 0,
        };
        self.launch(layers.code.rope, self.pass.num_rows as u32, shape::ROW_THREADS, 0, params);
    }

    /// Where the attention's rows go: in blocks to their places.
    pub(super) fn attended(&self) -> Address {
        let work = &self.layers.workspace;
        self.blocks.map_or(work.attended, |blocks| {
            let bytes = blocks.first * self.layers.config.q_size() * size_of::<u16>();
            work.block_attended + bytes as Address
        })
    }

    /// How rows of so many halves lie for products of few rows.
    pub(super) fn half_rows(&self, len: usize) -> HalfRows {
        HalfRows::new(len, self.layers.capability)
    }

    pub(super) fn attention(&mut self, cache: LayerCache) {
        let (layers, work, tiling) = (self.layers, &self.layers.workspace, self.pass.tiling);
        let output = self.half_rows(layers.config.q_size());
        let blocks = Tiling::blocks(layers.num_sms as usize);
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
            scale: 1.0 / (layers.config.head_dim as f32).sqrt(),
            num_tiles: self.pass.num_tiles as u32,
            num_kv_heads: layers.config.num_kv_heads as u32,
            max_pages: self.pass.max_pages as u32,
            split_tokens: shape::SPLIT_TOKENS as u32,
            max_items: Tiling::max_items(blocks) as u32,
            // Rows of blocks are written once more, as operands.
            output_units: if self.blocks.is_none() { output.units() } else { 0 },
            unused: 0,
        };
        let shared_bytes = tiling.shared_bytes(layers.precision.kv, layers.config.head_dim);
        let kernel = layers.code.attention(tiling);
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
