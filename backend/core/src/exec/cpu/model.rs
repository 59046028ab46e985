//! One model on the CPU: its weights in memory, its KV cache, and the forward pass over ragged rows.
//!
//! Every stage works row by row, or in kernels whose reduction order is fixed per row, so the result
//! of a row does not depend on the rows beside it.
#![allow(unsafe_code)]

use super::attention::{Attention, Row, Task};
use super::kv::KvCache;
use super::linear::{Prepared, Weight, linear, prepare};
use super::pool::SyncPtr;
use super::scratch::Scratch;
use super::tree::{self, Input, Inputs};
use super::weights::{Layer, Weights};
use super::{Isa, Pool, ops};
use crate::batch::{Forward, Logits, Segment};
use crate::engine::{Engine, Manifest};
use crate::model::{ModelConfig, RopeTable};
use crate::pages::PageId;
use crate::{Error, Result};
use std::sync::Arc;

/// Rows that go through the layers together at most: more gain nothing, and each takes memory.
const MAX_ROWS: usize = 512;

/// A model ready to run.
pub struct Model {
    config: ModelConfig,
    rope: RopeTable,
    weights: Arc<Weights>,
    kv: KvCache,
    /// Pages for the branches of trees, of one layer: as many as a pass needed at most.
    branches: Option<KvCache>,
    taps: Taps,
    compute: Compute,
    scratch: Scratch,
    /// Rows that go through the layers together.
    max_rows: usize,
}

/// Hidden states that are kept of a pass.
#[derive(Default)]
struct Taps {
    /// So many layers each are behind them.
    layers: Vec<usize>,
    /// `[row][layer][hidden]` of the last pass.
    values: Vec<f32>,
}

impl Taps {
    /// Keeps the residual stream behind `layer` layers, if it is wanted, of the rows from `first` on.
    fn keep(&mut self, layer: usize, first: usize, residual: &[f32], width: usize) {
        let row_len = self.layers.len() * width;
        self.values.resize((first + residual.len() / width) * row_len, 0.0);
        let places = self.layers.iter().enumerate().filter(|(_, wanted)| **wanted == layer);
        for (place, _) in places {
            let rows = self.values[first * row_len..].chunks_exact_mut(row_len);
            for (row, hidden) in rows.zip(residual.chunks_exact(width)) {
                row[place * width..][..width].copy_from_slice(hidden);
            }
        }
    }
}

/// Who computes, and how.
struct Compute {
    isa: Isa,
    pool: Arc<Pool>,
}

/// What one of several models in a process gets to run with.
pub struct Resources {
    /// Pages of the KV cache.
    pub num_pages: usize,
    /// Rows that go through the layers together, at most; longer passes are cut.
    pub rows: usize,
    /// Instructions to compute with.
    pub isa: Isa,
    /// Threads to compute on.
    pub pool: Arc<Pool>,
}

impl Model {
    /// Loads the engine's weights and makes a cache of `num_pages` pages.
    pub fn load(engine: &Engine, num_pages: usize, isa: Isa, pool: Arc<Pool>) -> Result<Self> {
        let weights = Arc::new(Weights::load(engine, &pool)?);
        Self::new(engine, weights, Resources { num_pages, rows: MAX_ROWS, isa, pool })
    }

    /// A model with the engine's weights, which others may compute with too.
    pub fn new(engine: &Engine, weights: Arc<Weights>, resources: Resources) -> Result<Self> {
        let Resources { num_pages, rows, isa, pool } = resources;
        let manifest = engine.manifest();
        let config = manifest.model.clone();
        let kv = KvCache::new(
            manifest.precision.kv,
            config.num_layers,
            num_pages,
            config.num_kv_heads,
            config.head_dim,
        )?;
        let max_rows = rows.clamp(1, MAX_ROWS);
        Ok(Self {
            rope: RopeTable::new(&config, manifest.limits.max_seq_len),
            weights,
            kv,
            branches: None,
            taps: Taps::default(),
            scratch: Scratch::new(&config, &manifest.precision, isa, max_rows),
            config,
            compute: Compute { isa, pool },
            max_rows,
        })
    }

    /// Bytes that a model takes besides weights and cache, where its steps have up to `rows` rows; logits are their
    /// reader's.
    pub fn working_bytes(engine: &Engine, isa: Isa, rows: usize) -> usize {
        let Manifest { model, precision, limits, .. } = engine.manifest();
        let rope = limits.max_seq_len * model.head_dim * size_of::<f32>();
        rope + Scratch::bytes(model, precision, isa, rows.clamp(1, MAX_ROWS))
    }

    /// The KV cache.
    pub fn kv(&self) -> &KvCache {
        &self.kv
    }

    /// Makes room for the branches of a pass.
    fn reserve_branches(&mut self, num_pages: usize) -> Result<()> {
        let has = self.branches.as_ref().map_or(0, KvCache::num_pages);
        if num_pages > has {
            let (kv, heads) = (&self.kv, self.kv.num_kv_heads());
            self.branches = Some(KvCache::new(kv.dtype(), 1, num_pages, heads, kv.head_dim())?);
        }
        Ok(())
    }

    /// Runs at most `max_rows` rows, `first_row` of the pass and those behind it, through all layers and appends the logits that they want, unless it is given up:
    /// `false` then.
    fn pass(
        &mut self,
        all: &Inputs<'_>,
        first_row: usize,
        inputs: &[Input<'_>],
        unwanted: &dyn Fn() -> bool,
        logits: &mut Logits,
    ) -> bool {
        let Self { config, rope, weights, kv, branches, taps, compute, scratch, max_rows: _ } =
            self;
        let branches = branches.as_ref().map(|own| (all, own));
        let rows = all.attended(inputs);
        let tasks = attention_tasks(config, kv, compute.isa, &rows);
        let decoder = &weights.decoder;
        let (width, first) = (config.hidden_size, first_row);
        embed(&decoder.embed, inputs, &mut scratch.residual);
        taps.keep(0, first, &scratch.residual, width);
        for (idx, layer) in decoder.layers.iter().enumerate() {
            let layer_idx = idx;
            let stage = Stage {
                config,
                rope,
                kv,
                branches,
                compute,
                layer,
                layer_idx,
                inputs,
                rows: &rows,
            };
            if unwanted() {
                return false;
            }
            stage.attend(scratch, &tasks);
            if unwanted() {
                return false;
            }
            stage.mlp(scratch);
            taps.keep(idx + 1, first, &scratch.residual, width);
        }
        let (norm, head) = (&decoder.final_norm, decoder.head());
        compute.head(config, norm, head, inputs, scratch, &mut logits.values);
        true
    }
}

impl Forward for Model {
    fn takes_trees(&self) -> bool {
        true
    }

    fn keep(&mut self, pages: &[PageId], first_draft: usize, path: &[usize]) -> Result<()> {
        for (from, to) in tree::moves(first_draft, path) {
            for layer in 0..self.config.num_layers {
                // SAFETY: nothing else runs meanwhile.
                unsafe { self.kv.copy(layer, pages, to, &self.kv, layer, pages, from) };
            }
        }
        Ok(())
    }

    fn tap(&mut self, layers: &[usize]) -> Result<()> {
        let num_layers = self.config.num_layers;
        if let Some(layer) = layers.iter().find(|&&layer| layer > num_layers) {
            let message = format!("hidden states behind layer {layer} of a model of {num_layers}");
            return Err(Error::Unsupported(message));
        }
        self.taps.layers = layers.to_vec();
        Ok(())
    }

    fn taps(&mut self) -> Result<&[f32]> {
        Ok(&self.taps.values)
    }

    fn forward(&mut self, segments: &[Segment<'_>]) -> Result<Logits> {
        let logits = self.forward_unless(segments, &|| false)?;
        Ok(logits.expect("nobody gives it up"))
    }

    fn gives_up(&self) -> bool {
        true
    }

    fn forward_unless(
        &mut self,
        segments: &[Segment<'_>],
        unwanted: &dyn Fn() -> bool,
    ) -> Result<Option<Logits>> {
        let mut inputs = Inputs::new(segments);
        let vocab_size = self.config.vocab_size;
        if let Some(input) = inputs.rows.iter().find(|input| input.token as usize >= vocab_size) {
            let message =
                format!("token {} is outside of the vocabulary of {vocab_size}", input.token);
            return Err(Error::bad_request("input_ids", message));
        }
        self.reserve_branches(inputs.place(self.kv.num_pages()))?;
        let num_logits = inputs.rows.iter().filter(|input| input.has_logits).count();
        let mut logits = Logits { vocab_size, values: Vec::with_capacity(num_logits * vocab_size) };
        self.taps.values.clear();
        for (idx, rows) in inputs.rows.chunks(self.max_rows).enumerate() {
            if !self.pass(&inputs, idx * self.max_rows, rows, unwanted, &mut logits) {
                return Ok(None);
            }
        }
        Ok(Some(logits))
    }
}

fn attention_tasks(config: &ModelConfig, kv: &KvCache, isa: Isa, rows: &[Row<'_>]) -> Vec<Task> {
    let num_heads = config.num_heads;
    Attention { isa, kv, layer: 0, branches: None, num_heads, scale: 1.0, q: &[], rows }.tasks()
}

fn embed(embed: &Weight, inputs: &[Input<'_>], residual: &mut Vec<f32>) {
    residual.resize(inputs.len() * embed.k(), 0.0);
    for (input, x) in inputs.iter().zip(residual.chunks_exact_mut(embed.k())) {
        embed.row(input.token as usize, x);
    }
}

/// One layer of one pass.
struct Stage<'a> {
    config: &'a ModelConfig,
    rope: &'a RopeTable,
    kv: &'a KvCache,
    /// The pass, and the pages of its branches.
    branches: Option<(&'a Inputs<'a>, &'a KvCache)>,
    compute: &'a Compute,
    layer: &'a Layer,
    layer_idx: usize,
    inputs: &'a [Input<'a>],
    /// What each row attends to.
    rows: &'a [Row<'a>],
}

impl Stage<'_> {
    /// `residual += out(attention(qkv(norm(residual))))`
    fn attend(&self, s: &mut Scratch, tasks: &[Task]) {
        let (compute, part, rows) = (self.compute, &self.layer.attention, self.rows.len());
        compute.norm(&s.residual, &part.norm, self.config.rms_norm_eps, &mut s.normed);
        compute.multiply(&part.qkv, &s.normed, rows, &mut s.prepared, &mut s.qkv);
        self.rotate_and_store(s);
        self.copy_branches();
        self.attention(s, tasks);
        compute.multiply(&part.out, &s.attended, rows, &mut s.prepared, &mut s.projected);
        compute.add(&mut s.residual, &s.projected, self.config.hidden_size);
    }

    /// `residual += down(silu(gate) * up)`
    fn mlp(&self, s: &mut Scratch) {
        let (compute, part, rows) = (self.compute, &self.layer.mlp, self.rows.len());
        compute.norm(&s.residual, &part.norm, self.config.rms_norm_eps, &mut s.normed);
        compute.multiply(&part.gate_up, &s.normed, rows, &mut s.prepared, &mut s.gate_up);
        let ff = self.config.intermediate_size;
        s.activated.resize(rows * ff, 0.0);
        compute.rows(&mut s.activated, ff, |row, out| {
            ops::silu_mul(compute.isa, &s.gate_up[row * 2 * ff..][..2 * ff], out);
        });
        compute.multiply(&part.down, &s.activated, rows, &mut s.prepared, &mut s.projected);
        compute.add(&mut s.residual, &s.projected, self.config.hidden_size);
    }

    /// Rotates queries and keys by their positions, puts the queries side by side and keys and values
    /// into the cache.
    fn rotate_and_store(&self, s: &mut Scratch) {
        let (config, part, isa) = (self.config, &self.layer.attention, self.compute.isa);
        let (q_size, kv_size, eps) = (config.q_size(), config.kv_size(), config.rms_norm_eps);
        s.queries.resize(self.rows.len() * q_size, 0.0);
        let queries = SyncPtr(s.queries.as_mut_ptr());
        self.compute.rows(&mut s.qkv, config.qkv_size(), |idx, qkv| {
            let Input { pages, slot, position, .. } = self.inputs[idx];
            let (cos, sin) = self.rope.at(position);
            let (q, kv) = qkv.split_at_mut(q_size);
            let (key, value) = kv.split_at_mut(kv_size);
            let q_norm = part.q_norm.as_deref().map(|weight| (weight, eps));
            let k_norm = part.k_norm.as_deref().map(|weight| (weight, eps));
            ops::qk_norm_rope(isa, q, q_norm, cos, sin);
            ops::qk_norm_rope(isa, key, k_norm, cos, sin);
            // SAFETY: every row has its own (sequence, slot), each visited once; nothing reads the
            // layer's pages before all rows are done. The queries' ranges do not overlap and lie inside.
            unsafe {
                self.kv.write(self.layer_idx, pages, slot, key, value);
                queries.get().add(idx * q_size).copy_from_nonoverlapping(q.as_ptr(), q_size);
            }
        });
    }

    fn copy_branches(&self) {
        let Some((inputs, own)) = self.branches else { return };
        self.compute.pool.for_each(inputs.num_branches(), |idx| {
            // SAFETY: the layer's keys and values are stored already, and every branch has pages of its own.
            unsafe { inputs.copy_branch(idx, self.kv, self.layer_idx, own) };
        });
    }

    fn attention(&self, s: &mut Scratch, tasks: &[Task]) {
        s.attended.resize(s.queries.len(), 0.0);
        let attention = Attention {
            isa: self.compute.isa,
            kv: self.kv,
            layer: self.layer_idx,
            branches: self.branches.map(|(_, own)| own),
            num_heads: self.config.num_heads,
            scale: 1.0 / (self.config.head_dim as f32).sqrt(),
            q: &s.queries,
            rows: self.rows,
        };
        let out = SyncPtr(s.attended.as_mut_ptr());
        self.compute.pool.for_each(tasks.len(), |idx| {
            // SAFETY: `out` is as long as `q`; tasks differ in rows or heads and each is run once; the
            // layer's keys and values are stored already.
            unsafe { attention.run_task(&tasks[idx], out.get()) };
        });
    }
}

impl Compute {
    /// Runs `task(row, values)` for every row of `width` values, on all threads if there are several.
    fn rows(&self, values: &mut [f32], width: usize, task: impl Fn(usize, &mut [f32]) + Sync) {
        self.pool.for_each_chunk(values, width, task);
    }

    fn norm(&self, x: &[f32], weight: &[f32], eps: f32, out: &mut Vec<f32>) {
        let width = weight.len();
        out.resize(x.len(), 0.0);
        self.rows(out, width, |row, out| {
            ops::rms_norm(self.isa, &x[row * width..][..width], weight, eps, out);
        });
    }

    fn add(&self, x: &mut [f32], y: &[f32], width: usize) {
        self.rows(x, width, |row, x| ops::add(self.isa, x, &y[row * width..][..width]));
    }

    fn multiply(
        &self,
        weight: &Weight,
        x: &[f32],
        rows: usize,
        prepared: &mut Prepared,
        out: &mut Vec<f32>,
    ) {
        out.resize(rows * weight.n(), 0.0);
        prepare(self.isa, weight.dtype(), x, rows, weight.k(), prepared, &self.pool);
        linear(self.isa, &self.pool, weight, prepared, rows, out);
    }

    /// Appends the logits of the rows that want them.
    fn head(
        &self,
        config: &ModelConfig,
        norm: &[f32],
        head: &Weight,
        inputs: &[Input<'_>],
        s: &mut Scratch,
        logits: &mut Vec<f32>,
    ) {
        let width = config.hidden_size;
        let wanted = inputs.iter().zip(s.residual.chunks_exact(width));
        let wanted = wanted.filter(|(input, _)| input.has_logits);
        s.activated.clear();
        wanted.for_each(|(_, x)| s.activated.extend_from_slice(x));
        let rows = s.activated.len() / width;
        if rows == 0 {
            return;
        }
        self.norm(&s.activated, norm, config.rms_norm_eps, &mut s.normed);
        prepare(self.isa, head.dtype(), &s.normed, rows, width, &mut s.prepared, &self.pool);
        let first = logits.len();
        logits.resize(first + rows * head.n(), 0.0);
        linear(self.isa, &self.pool, head, &s.prepared, rows, &mut logits[first..]);
    }
}
