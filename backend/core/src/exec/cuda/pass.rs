//! The launches of a forward pass over prepared rows whose products take few rows each: every row has the same bits in
//! any pass.

use super::code::ByRows;
use super::device::{Address, Kernel, Launch};
use super::model::{Model, Pass};
use super::params::{AttentionParams, EmbedParams, GemmParams, RopeParams, Scaling};
use super::plain::Plain;
use super::shape;
use super::weights::{Layer, Matrix};
use spec_kernels::GEMM_ROWS;

/// Rows that one launch of a product takes.
const MOST_ROWS: usize = GEMM_ROWS[GEMM_ROWS.len() - 1];

/// A pass in the making.
pub(super) struct Launches<'a> {
    pub(super) model: &'a Model,
    pub(super) pass: &'a Pass,
    pub(super) launches: Vec<Launch>,
}

impl<'a> Launches<'a> {
    /// Nothing yet.
    pub(super) fn new(model: &'a Model, pass: &'a Pass) -> Self {
        Self { model, pass, launches: Vec::new() }
    }

    /// Embedding, layers, head.
    pub(super) fn all(mut self) -> Vec<Launch> {
        self.embed();
        for (idx, layer) in self.model.weights.layers.iter().enumerate() {
            self.attend(idx, layer);
            self.mlp(layer);
        }
        self.head();
        self.launches
    }

    pub(super) fn embed(&mut self) {
        let (model, work) = (self.model, &self.model.workspace);
        let embed = &model.weights.embed;
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
        self.push(model.code.embed, grid, shape::ROW_THREADS, 0, params);
    }

    /// `residual += out(attention(qkv(norm(residual))))`
    fn attend(&mut self, idx: usize, layer: &Layer) {
        let (model, work) = (self.model, self.model.workspace);
        let cache = model.layer_cache(idx);
        let product = Product {
            input: work.residual,
            norm: layer.input_norm,
            output: if model.config.qk_norm { work.raw } else { work.queries },
            output_bytes: match model.config.qk_norm {
                true => model.config.qkv_size() * size_of::<f32>(),
                false => model.config.q_size() * size_of::<u16>(),
            },
            cache,
            ..Product::new(&layer.qkv, &model.code.qkv, model.config.hidden_size, F32)
        };
        self.product(&product, self.pass.num_rows);
        if model.config.qk_norm {
            self.rotate(layer, cache, work.raw, Scaling::default());
        }
        self.attention(cache);
        let product = Product {
            input: work.attended,
            output: work.residual,
            output_bytes: model.config.hidden_size * size_of::<f32>(),
            ..Product::new(&layer.out, &model.code.out, model.config.q_size(), F16)
        };
        self.product(&product, self.pass.num_rows);
    }

    /// `residual += down(silu(gate) * up)`
    fn mlp(&mut self, layer: &Layer) {
        let (model, work) = (self.model, self.model.workspace);
        let (hidden, wide) = (model.config.hidden_size, model.config.intermediate_size);
        let product = Product {
            input: work.residual,
            norm: layer.post_norm,
            output: work.activated,
            output_bytes: wide * size_of::<u16>(),
            ..Product::new(&layer.gate_up, &model.code.gate_up, hidden, F32)
        };
        self.product(&product, self.pass.num_rows);
        let product = Product {
            input: work.activated,
            output: work.residual,
            output_bytes: hidden * size_of::<f32>(),
            ..Product::new(&layer.down, &model.code.down, wide, F16)
        };
        self.product(&product, self.pass.num_rows);
    }

    pub(super) fn head(&mut self) {
        let (model, work) = (self.model, self.model.workspace);
        let vocab_size = model.config.vocab_size;
        let product = Product {
            input: work.residual,
            norm: model.weights.final_norm,
            output: work.logits,
            output_bytes: vocab_size * size_of::<f32>(),
            row_index: work.logit_rows,
            best: work.best,
            ..Product::new(&model.weights.head, &model.code.head, model.config.hidden_size, F32)
        };
        self.product(&product, self.pass.num_logits);
    }

    /// The product of all rows, as many launches as it takes.
    fn product(&mut self, product: &Product<'_>, num_rows: usize) {
        for first in (0..num_rows).step_by(MOST_ROWS) {
            self.few_rows(product, first, (num_rows - first).min(MOST_ROWS));
        }
    }

    fn few_rows(&mut self, product: &Product<'_>, first: usize, num_rows: usize) {
        let (model, work) = (self.model, &self.model.workspace);
        let Matrix { weights, scales, bias, n, k } = *product.matrix;
        let vocab_tiles = n.div_ceil(shape::TILE_OUTPUTS);
        // With an index the input stays whole: the index says which of its rows.
        let is_indexed = product.row_index != 0;
        let skipped = if is_indexed { 0 } else { first };
        let params = GemmParams {
            weights,
            scales,
            bias,
            input: at(product.input, skipped, product.input_bytes),
            norm: product.norm,
            squares: at(work.squares, skipped, model.squares_bytes()),
            rows: at(work.rows, first, 32),
            row_index: at(product.row_index, first, if is_indexed { 4 } else { 0 }),
            partials: work.gemm_partials,
            arrivals: work.gemm_arrivals,
            output: at(product.output, first, product.output_bytes),
            cache: product.cache,
            rope: model.rope,
            pages: self.pass.pages,
            best: at(product.best, first, if product.best == 0 { 0 } else { 8 * vocab_tiles }),
            eps: model.config.rms_norm_eps,
            k_scale: 1.0,
            v_scale: 1.0,
            num_rows: num_rows as u32,
            n: n as u32,
            k: k as u32,
            num_heads: model.config.num_heads as u32,
            num_kv_heads: model.config.num_kv_heads as u32,
            max_pages: self.pass.max_pages as u32,
            kv: model.kv_format(),
        };
        let idx = shape::gemm_rows_idx(num_rows);
        let shared_bytes = shape::gemm_shared_bytes(GEMM_ROWS[idx], model.capability);
        self.push(product.kernels[idx], model.num_sms, shape::GEMM_THREADS, shared_bytes, params);
    }

    /// Head norms, if there are any, and rotation, which the product has left undone.
    pub(super) fn rotate(
        &mut self,
        layer: &Layer,
        cache: Address,
        input: Address,
        scaling: Scaling,
    ) {
        let (model, work) = (self.model, &self.model.workspace);
        let params = RopeParams {
            input,
            scaling,
            q_norm: layer.q_norm,
            k_norm: layer.k_norm,
            rope: model.rope,
            rows: work.rows,
            pages: self.pass.pages,
            queries: work.queries,
            cache,
            eps: model.config.rms_norm_eps,
            k_scale: 1.0,
            v_scale: 1.0,
            num_rows: self.pass.num_rows as u32,
            num_heads: model.config.num_heads as u32,
            num_kv_heads: model.config.num_kv_heads as u32,
            max_pages: self.pass.max_pages as u32,
            unused: 0,
        };
        self.push(model.code.rope, self.pass.num_rows as u32, shape::ROW_THREADS, 0, params);
    }

    pub(super) fn attention(&mut self, cache: Address) {
        let (model, work, tiling) = (self.model, &self.model.workspace, self.pass.tiling);
        let blocks = shape::attention_blocks(model.num_sms as usize);
        let params = AttentionParams {
            queries: work.queries,
            cache,
            rows: work.rows,
            tiles: work.tiles,
            pages: self.pass.pages,
            output: work.attended,
            partials: work.attention_partials,
            arrivals: work.attention_arrivals,
            scale: 1.0 / (model.config.head_dim as f32).sqrt(),
            v_scale: 1.0,
            num_tiles: self.pass.num_tiles as u32,
            num_kv_heads: model.config.num_kv_heads as u32,
            max_pages: self.pass.max_pages as u32,
            split_tokens: shape::SPLIT_TOKENS as u32,
            max_items: tiling.max_items(blocks) as u32,
            unused: 0,
        };
        let shared_bytes = tiling.shared_bytes(model.precision.kv, model.config.head_dim);
        let kernel = model.code.attention(tiling);
        self.push(kernel, blocks as u32, shape::ATTENTION_THREADS, shared_bytes, params);
    }

    pub(super) fn push<P: Plain>(
        &mut self,
        kernel: Kernel,
        grid: u32,
        block: u32,
        shared_bytes: u32,
        params: P,
    ) {
        self.launches.push(Launch::new(kernel, grid, block, shared_bytes, params));
    }
}

/// A product with a matrix: from where to where.
struct Product<'a> {
    matrix: &'a Matrix,
    kernels: &'a ByRows,
    input: Address,
    /// Bytes of an input row.
    input_bytes: usize,
    norm: Address,
    row_index: Address,
    output: Address,
    /// Bytes of an output row.
    output_bytes: usize,
    cache: Address,
    best: Address,
}

/// Bytes of an element.
const F32: usize = 4;
const F16: usize = 2;

impl<'a> Product<'a> {
    fn new(matrix: &'a Matrix, kernels: &'a ByRows, width: usize, element_bytes: usize) -> Self {
        Self {
            matrix,
            kernels,
            input: 0,
            input_bytes: width * element_bytes,
            norm: 0,
            row_index: 0,
            output: 0,
            output_bytes: 0,
            cache: 0,
            best: 0,
        }
    }
}

/// The address of an element of an array.
fn at(array: Address, idx: usize, element_bytes: usize) -> Address {
    array + (idx * element_bytes) as Address
}
