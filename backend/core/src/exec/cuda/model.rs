//! One model on a GPU: its weights, its KV cache, and the launches of a forward pass over prepared rows.
//!
//! A pass is a fixed sequence of launches for given numbers of rows; everything else (tokens, positions, pages) is
//! read on the device. So passes can be recorded once and replayed.

use super::code::{ByRows, Code};
use super::device::{Address, Device, Launch, upload};
use super::kv;
use super::params::{AttentionParams, EmbedParams, GemmParams, RopeParams};
use super::plain::{Plain, bytes_of};
use super::shape;
use super::tables::{Bounds, Tables, passes};
use super::weights::{Layer, Matrix, Weights};
use super::workspace::{Capacity, Workspace};
use crate::Result;
use crate::batch::Segment;
use crate::engine::{Engine, Precision};
use crate::model::Dtype;
use crate::model::{ModelConfig, RopeTable};
use spec_kernels::GEMM_ROWS;

/// Rows that one launch of a product takes.
const MOST_ROWS: usize = GEMM_ROWS[GEMM_ROWS.len() - 1];

/// A model on a device.
#[derive(Debug)]
pub struct Model {
    config: ModelConfig,
    precision: Precision,
    weights: Weights,
    code: Code,
    /// f32 `[positions][head_dim]`: cosines, then sines.
    rope: Address,
    cache: Address,
    /// Bytes of one layer's cache.
    layer_bytes: usize,
    workspace: Workspace,
    capacity: Capacity,
    max_seq_len: usize,
    num_sms: u32,
}

/// The rows of a pass; their tables are in the workspace.
#[derive(Clone, Copy, Debug)]
pub struct Pass {
    /// Rows.
    pub num_rows: usize,
    /// Places for tiles.
    pub num_tiles: usize,
    /// Rows that want logits, the first entries of `logit_rows`.
    pub num_logits: usize,
    /// u32 `[sequences][max_pages]`.
    pub pages: Address,
    /// Width of the page table.
    pub max_pages: usize,
}

impl Model {
    /// Loads the engine's code and weights and makes a cache of `num_pages` pages.
    pub fn load(engine: &Engine, num_pages: usize, device: &mut dyn Device) -> Result<Self> {
        let manifest = engine.manifest();
        let (config, precision) = (manifest.model.clone(), manifest.precision.clone());
        let num_sms = device.describe().num_sms;
        let code = Code::load(engine, device)?;
        let weights = Weights::upload(engine, device)?;
        let max_seq_len = manifest.limits.max_seq_len;
        let rope = upload_rope(&RopeTable::new(&config, max_seq_len), max_seq_len, device)?;
        let capacity = Capacity::of(manifest);
        let workspace = Workspace::alloc(manifest, &capacity, num_sms as usize, device)?;
        let cache_bytes = num_pages * kv::page_bytes(precision.kv, &config);
        let cache = device.alloc(cache_bytes)?;
        Ok(Self {
            precision,
            weights,
            code,
            rope,
            cache,
            layer_bytes: cache_bytes / config.num_layers,
            workspace,
            capacity,
            max_seq_len,
            num_sms,
            config,
        })
    }

    /// Shape of the model.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// Where the tables of a pass go, and its results come from.
    pub fn workspace(&self) -> &Workspace {
        &self.workspace
    }

    /// How large a pass may be.
    pub fn capacity(&self) -> &Capacity {
        &self.capacity
    }

    /// Runs segments for their keys and values alone; does not wait.
    pub fn run_without_logits(
        &self,
        segments: &[Segment<'_>],
        device: &mut dyn Device,
    ) -> Result<()> {
        for tables in passes(segments, &self.bounds()) {
            self.issue(&tables, device)?;
        }
        Ok(())
    }

    /// How large the tables of a pass may be.
    pub(super) fn bounds(&self) -> Bounds {
        let group = self.config.num_heads / self.config.num_kv_heads;
        let Capacity { rows, sequences, .. } = self.capacity;
        Bounds { rows, sequences, tile_rows: shape::tile_rows(group) }
    }

    /// Uploads the tables of a pass and runs it; does not wait.
    pub(super) fn issue(&self, tables: &Tables, device: &mut dyn Device) -> Result<()> {
        let work = &self.workspace;
        upload(device, work.rows, &tables.rows)?;
        upload(device, work.tiles, &tables.tiles)?;
        upload(device, work.logit_rows, &tables.logit_rows)?;
        upload(device, work.pages, &tables.pages)?;
        let pass = Pass {
            num_rows: tables.rows.len(),
            num_tiles: tables.tiles.len(),
            num_logits: tables.logit_rows.len(),
            pages: work.pages,
            max_pages: tables.max_pages,
        };
        self.pass(&pass).iter().try_for_each(|launch| device.launch(launch))
    }

    /// The launches of a pass: embedding, layers, head.
    pub fn pass(&self, pass: &Pass) -> Vec<Launch> {
        let mut steps = Steps { model: self, pass, launches: Vec::new() };
        steps.embed();
        for (idx, layer) in self.weights.layers.iter().enumerate() {
            steps.attend(idx, layer);
            steps.mlp(layer);
        }
        steps.head();
        steps.launches
    }
}

fn upload_rope(table: &RopeTable, len: usize, device: &mut dyn Device) -> Result<Address> {
    let mut values = Vec::new();
    for position in 0..len {
        let (cos, sin) = table.at(position);
        values.extend_from_slice(cos);
        values.extend_from_slice(sin);
    }
    let address = device.alloc(size_of_val(&values[..]))?;
    device.write(address, bytes_of(&values))?;
    Ok(address)
}

/// A pass in the making.
struct Steps<'a> {
    model: &'a Model,
    pass: &'a Pass,
    launches: Vec<Launch>,
}

impl Steps<'_> {
    fn embed(&mut self) {
        let (model, work) = (self.model, &self.model.workspace);
        let embed = &model.weights.embed;
        let params = EmbedParams {
            weights: embed.weights,
            scales: embed.scales,
            rows: work.rows,
            residual: work.residual,
            num_rows: self.pass.num_rows as u32,
            k: embed.k as u32,
        };
        let grid = self.pass.num_rows as u32;
        self.push(model.code.embed, grid, shape::ROW_THREADS, 0, params);
    }

    /// `residual += out(attention(qkv(norm(residual))))`
    fn attend(&mut self, idx: usize, layer: &Layer) {
        let (model, work) = (self.model, self.model.workspace);
        let cache = model.cache + (idx * model.layer_bytes) as Address;
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
        self.rotate(layer, cache);
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

    fn head(&mut self) {
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
        let shared_bytes = shape::gemm_shared_bytes(GEMM_ROWS[idx]);
        self.push(product.kernels[idx], model.num_sms, shape::GEMM_THREADS, shared_bytes, params);
    }

    /// Head norms and rotation where the product has left them undone.
    fn rotate(&mut self, layer: &Layer, cache: Address) {
        let (model, work) = (self.model, &self.model.workspace);
        let Some(kernel) = model.code.rope else { return };
        let params = RopeParams {
            input: work.raw,
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
        self.push(kernel, self.pass.num_rows as u32, shape::ROW_THREADS, 0, params);
    }

    fn attention(&mut self, cache: Address) {
        let (model, work) = (self.model, &self.model.workspace);
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
            split_tokens: shape::split_tokens(model.max_seq_len) as u32,
            max_splits: shape::max_splits(model.max_seq_len) as u32,
            unused: 0,
        };
        let grid = model.num_sms * shape::ATTENTION_BLOCKS;
        let shared_bytes = shape::attention_shared_bytes(model.precision.kv, model.config.head_dim);
        self.push(model.code.attention, grid, shape::ATTENTION_THREADS, shared_bytes, params);
    }

    fn push<P: Plain>(
        &mut self,
        kernel: super::device::Kernel,
        grid: u32,
        block: u32,
        shared_bytes: u32,
        params: P,
    ) {
        let params = bytes_of(&[params]).to_vec();
        self.launches.push(Launch { kernel, grid, block, shared_bytes, params, overlap: true });
    }
}

impl Model {
    /// As `types.cuh` numbers the formats.
    fn kv_format(&self) -> u32 {
        if self.precision.kv == Dtype::Fp8 { 1 } else { 2 }
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
