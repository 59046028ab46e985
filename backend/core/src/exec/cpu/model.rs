//! One model on the CPU: its weights in memory, its KV cache, and the forward pass over ragged rows.
//!
//! Every stage works row by row, or in kernels whose reduction order is fixed per row, so the result
//! of a row does not depend on the rows beside it.
#![allow(unsafe_code)]

use super::attention::{Attention, Row, Task};
use super::kv::KvCache;
use super::layer::{Compute, Stage};
use super::linear::Weight;
use super::scratch::Scratch;
use super::tree::{self, Input, Inputs};
use super::weights::Weights;
use super::{Isa, Pool};
use crate::batch::{Forward, Logits, Segment};
use crate::engine::{Engine, Manifest, Precision};
use crate::model::{LayerSkip, ModelConfig, RopeTable};
use crate::pages::PageId;
use crate::{Error, Result};
use std::sync::{Arc, Mutex, PoisonError};

/// Rows that go through the layers together at most: more gain nothing, and each takes memory.
const MAX_ROWS: usize = 512;

/// A model ready to run.
pub struct Model {
    config: ModelConfig,
    precision: Precision,
    rope: Arc<RopeTable>,
    weights: Arc<Weights>,
    kv: Arc<KvCache>,
    /// Who runs has it: a whole and its parts share the cache.
    turn: Arc<Mutex<()>>,
    /// Pages for the branches of trees, of one layer: as many as a pass needed at most.
    branches: Option<KvCache>,
    taps: Taps,
    compute: Compute,
    scratch: Scratch,
    /// Rows that go through the layers together.
    max_rows: usize,
    /// What it goes without.
    skip: LayerSkip,
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
    pub(crate) fn new(
        engine: &Engine,
        weights: Arc<Weights>,
        resources: Resources,
    ) -> Result<Self> {
        let Resources { num_pages, rows, isa, pool } = resources;
        let manifest = engine.manifest();
        let config = manifest.model.clone();
        if weights.decoder().is_none() {
            return Err(Error::Unsupported("a head on hidden states as a model".into()));
        }
        let kv = KvCache::new(
            manifest.precision.kv,
            config.num_layers,
            num_pages,
            config.num_kv_heads,
            config.head_dim,
        )?
        .with_scales(manifest.kv_scales.as_ref());
        let max_rows = rows.clamp(1, MAX_ROWS);
        Ok(Self {
            rope: Arc::new(RopeTable::new(&config, manifest.limits.max_seq_len)),
            weights,
            kv: Arc::new(kv),
            turn: Arc::default(),
            branches: None,
            taps: Taps::default(),
            scratch: Scratch::new(&config, &manifest.precision, isa, max_rows),
            config,
            precision: manifest.precision.clone(),
            compute: Compute { isa, pool },
            max_rows,
            skip: LayerSkip::default(),
        })
    }

    /// A model of the same weights, on the same cache, that goes without some layers. What the part stores is to be of
    /// positions that the whole has not computed yet, and computes later. The two run one after the other.
    pub fn without(&self, skip: LayerSkip, rows: usize) -> Self {
        let max_rows = rows.clamp(1, MAX_ROWS);
        let Self { config, precision, compute, .. } = self;
        Self {
            config: config.clone(),
            precision: precision.clone(),
            rope: Arc::clone(&self.rope),
            weights: Arc::clone(&self.weights),
            kv: Arc::clone(&self.kv),
            turn: Arc::clone(&self.turn),
            branches: None,
            taps: Taps::default(),
            scratch: Scratch::new(config, precision, compute.isa, max_rows),
            compute: Compute { isa: compute.isa, pool: Arc::clone(&compute.pool) },
            max_rows,
            skip,
        }
    }

    /// Bytes that a model takes besides weights and cache, where its steps have up to `rows` rows; logits are their
    /// reader's.
    pub(crate) fn working_bytes(manifest: &Manifest, isa: Isa, rows: usize) -> usize {
        let Manifest { model, precision, limits, .. } = manifest;
        let rope = limits.max_seq_len * model.head_dim * size_of::<f32>();
        rope + Scratch::bytes(model, precision, isa, rows.clamp(1, MAX_ROWS))
    }

    /// What one [`without`](Self::without) some layers takes beside the whole.
    pub(crate) fn part_bytes(manifest: &Manifest, isa: Isa, rows: usize) -> usize {
        Scratch::bytes(&manifest.model, &manifest.precision, isa, rows.clamp(1, MAX_ROWS))
    }

    pub(crate) fn kv(&self) -> &KvCache {
        &self.kv
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
        let Self { config, rope, weights, kv, branches, taps, compute, scratch, skip, .. } = self;
        let branches = branches.as_ref().map(|own| (all, own));
        let rows = all.attended(inputs);
        let tasks = attention_tasks(config, kv, compute.isa, &rows);
        let decoder = weights.decoder().expect("checked when it was made");
        let (width, first) = (config.hidden_size, first_row);
        embed(&decoder.embed, inputs, &mut scratch.residual);
        taps.keep(0, first, &scratch.residual, width);
        for (idx, layer) in decoder.layers.iter().enumerate() {
            let stage = Stage {
                config,
                rope,
                kv,
                branches,
                compute,
                attention: &layer.attention,
                mlp: &layer.mlp,
                layer_idx: idx,
                inputs,
                rows: &rows,
                tasks: &tasks,
            };
            if unwanted() {
                return false;
            }
            if !skip.skips_attention(idx) {
                stage.attend(&layer.input_norm, scratch);
            }
            if unwanted() {
                return false;
            }
            if !skip.skips_mlp(idx) {
                stage.mlp(scratch);
            }
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
        let _turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        for (from, to) in tree::moves(first_draft, path) {
            for layer in 0..self.config.num_layers {
                // SAFETY: it is this model's turn.
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
        let num_pages = inputs.place(self.kv.num_pages());
        self.kv.reserve_branches(num_pages, &mut self.branches)?;
        let num_logits = inputs.rows.iter().filter(|input| input.has_logits).count();
        let width = self.config.num_logits();
        let values = Vec::with_capacity(num_logits * width);
        let mut logits = Logits { vocab_size: width, values };
        self.taps.values.clear();
        let turn = Arc::clone(&self.turn);
        let _turn = turn.lock().unwrap_or_else(PoisonError::into_inner);
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
