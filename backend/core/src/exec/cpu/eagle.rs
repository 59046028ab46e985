//! An EAGLE head on the CPU: its weights, its KV cache, and passes over ragged rows of tokens and states.
//!
//! As with a model, a row's result does not depend on the rows beside it.

use super::attention::Attention;
use super::kv::KvCache;
use super::layer::{Compute, Stage};
use super::linear::Weight;
use super::model::Resources;
use super::ops;
use super::scratch::Scratch;
use super::tree::{Input, Inputs};
use super::weights::Weights;
use crate::batch::Logits;
use crate::draft::{Head, HeadPass, HeadSegment, MaskRow};
use crate::engine::Engine;
use crate::exec::vocab_map;
use crate::model::eagle;
use crate::model::{EagleConfig, EagleKind, ModelConfig, RopeTable, TapNorms};
use crate::{Error, Result};
use std::sync::Arc;

type Parts = eagle::Eagle<Weight, Vec<f32>>;

/// Rows that go through the layers together at most.
const MAX_ROWS: usize = 512;

/// A head ready to run.
pub struct Eagle {
    config: ModelConfig,
    eagle: EagleConfig,
    rope: RopeTable,
    weights: Arc<Weights>,
    /// The target's: for what the head has not of its own.
    target: Option<Arc<Weights>>,
    vocab_map: Option<Vec<u32>>,
    mask: Option<MaskRow>,
    kv: KvCache,
    /// Pages for the branches of trees, of one layer: as many as a pass needed at most.
    branches: Option<KvCache>,
    compute: Compute,
    scratch: Scratch,
    max_rows: usize,
}

impl Eagle {
    /// A head with the engine's weights, on the hidden states of a target whose weights are there, or else one that
    /// needs none of these.
    pub fn new(
        engine: &Engine,
        weights: Arc<Weights>,
        target: Option<Arc<Weights>>,
        resources: Resources,
    ) -> Result<Self> {
        let Resources { num_pages, rows, isa, pool } = resources;
        let manifest = engine.manifest();
        let config = manifest.model.clone();
        let (Some(eagle), Some(parts)) = (config.eagle().cloned(), weights.eagle()) else {
            return Err(bad(engine, "it is no EAGLE head"));
        };
        let target = target.filter(|target| target.decoder().is_some());
        if (parts.embed.is_none() || parts.head.is_none()) && target.is_none() {
            return Err(bad(engine, "it lacks matrices that its target has on another device"));
        }
        let vocab_map = parts.vocab_map.as_deref().map(|map| vocab_map::tokens(engine, map));
        let kv = KvCache::new(
            manifest.precision.kv,
            config.num_layers,
            num_pages,
            config.num_kv_heads,
            config.head_dim,
        )?
        .with_scales(manifest.kv_scales.as_ref());
        let max_rows = rows.clamp(1, MAX_ROWS);
        let mask = eagle.mask_token.zip(parts.mask_hidden.clone());
        let mut head = Self {
            rope: RopeTable::new(&config, manifest.limits.max_seq_len),
            vocab_map: vocab_map.transpose()?,
            mask: None,
            scratch: Scratch::new(&config, &manifest.precision, isa, max_rows),
            compute: Compute { isa, pool },
            weights,
            target,
            eagle,
            kv,
            branches: None,
            config,
            max_rows,
        };
        if let Some((token, taps)) = mask {
            let state = head.states(&taps)?;
            head.mask = Some(MaskRow { token, state });
        }
        Ok(head)
    }

    /// Bytes of its state behind a page, beside the page of its cache.
    pub fn page_end_bytes(model: &ModelConfig) -> usize {
        model.hidden_size * size_of::<f32>()
    }

    /// The KV cache.
    pub fn kv(&self) -> &KvCache {
        &self.kv
    }

    /// Runs at most `max_rows` rows through all layers, and keeps what comes of those that have logits.
    fn pass(&mut self, all: &Inputs<'_>, inputs: &[Input<'_>], states: &[f32], out: &mut HeadPass) {
        let Self { config, eagle, rope, weights, target, kv, branches, compute, scratch, .. } =
            self;
        let branches = branches.as_ref().map(|own| (all, own));
        let parts = weights.eagle().expect("checked when it was made");
        let shared = target.as_ref().and_then(|target| target.decoder());
        let embed = parts.embed.as_ref().or(shared.map(|target| &target.embed));
        let mut rows = all.attended(inputs);
        for row in &mut rows {
            row.first = eagle.first_seen(row.position);
        }
        let num_heads = config.num_heads;
        let attention = Attention {
            isa: compute.isa,
            kv,
            layer: 0,
            branches: None,
            num_heads,
            scale: 1.0,
            q: &[],
            rows: &rows,
        };
        let tasks = attention.tasks();
        let first = &parts.first;
        let mut stage = Stage {
            config,
            rope,
            kv,
            branches,
            compute,
            attention: &first.attention,
            mlp: &first.mlp,
            layer_idx: 0,
            inputs,
            rows: &rows,
            tasks: &tasks,
        };
        let entry = Entry { config, eagle, parts, compute };
        entry.embed(embed.expect("checked when it was made"), inputs, &mut scratch.projected);
        entry.join(states, scratch);
        stage.attend_normed(scratch);
        stage.mlp(scratch);
        for (idx, layer) in parts.layers.iter().enumerate() {
            (stage.attention, stage.mlp, stage.layer_idx) = (&layer.attention, &layer.mlp, idx + 1);
            stage.attend(&layer.input_norm, scratch);
            stage.mlp(scratch);
        }
        let head = parts.head.as_ref().or(shared.map(|target| target.head()));
        entry.head(head.expect("checked when it was made"), inputs, scratch, out);
    }
}

fn bad(engine: &Engine, what: &str) -> Error {
    Error::BadEngine(format!("engine {}: {what}", engine.path().display()))
}

/// Both ends of a pass.
struct Entry<'a> {
    config: &'a ModelConfig,
    eagle: &'a EagleConfig,
    parts: &'a Parts,
    compute: &'a Compute,
}

impl Entry<'_> {
    /// The rows' token vectors.
    fn embed(&self, embed: &Weight, inputs: &[Input<'_>], out: &mut Vec<f32>) {
        let width = embed.k();
        out.resize(inputs.len() * width, 0.0);
        for (input, x) in inputs.iter().zip(out.chunks_exact_mut(width)) {
            embed.row(input.token as usize, x);
        }
    }

    /// Brings token vectors, in `projected`, and states together: the residual stream, and the input of the first
    /// layer's attention.
    fn join(&self, states: &[f32], s: &mut Scratch) {
        let (compute, width) = (self.compute, self.config.hidden_size);
        let rows = states.len() / width;
        match self.eagle.kind {
            EagleKind::Eagle1 => {
                pair(&s.projected, states, width, &mut s.normed);
                let fc = &self.parts.fc;
                compute.multiply(fc, &s.normed, rows, &mut s.prepared, &mut s.residual);
                s.normed.clone_from(&s.residual);
            }
            EagleKind::Eagle3 => {
                let eps = self.config.rms_norm_eps;
                let first = &self.parts.first;
                let norm = |norm: &Option<Vec<f32>>, x: &[f32], out: &mut Vec<f32>| {
                    compute.norm(x, norm.as_ref().expect("EAGLE-3 has it"), eps, out);
                };
                norm(&first.token_norm, &s.projected, &mut s.activated);
                norm(&first.hidden_norm, states, &mut s.residual);
                pair(&s.activated, &s.residual, width, &mut s.normed);
                if !self.eagle.norm_before_residual {
                    s.residual.copy_from_slice(states);
                }
            }
        }
    }

    /// Logits and states of the rows that have logits.
    fn head(&self, head: &Weight, inputs: &[Input<'_>], s: &mut Scratch, out: &mut HeadPass) {
        let width = self.config.hidden_size;
        let wanted = inputs.iter().zip(s.residual.chunks_exact(width));
        s.activated.clear();
        for (_, x) in wanted.filter(|(input, _)| input.has_logits) {
            s.activated.extend_from_slice(x);
        }
        let rows = s.activated.len() / width;
        if rows == 0 {
            return;
        }
        match &self.parts.final_norm {
            Some(norm) => {
                let eps = self.config.rms_norm_eps;
                self.compute.norm(&s.activated, norm, eps, &mut s.normed);
            }
            None => s.normed.clone_from(&s.activated),
        }
        let state = if self.eagle.norm_output { &s.normed } else { &s.activated };
        out.states.extend_from_slice(&state[..rows * width]);
        self.compute.multiply(head, &s.normed, rows, &mut s.prepared, &mut s.projected);
        out.logits.values.extend_from_slice(&s.projected);
    }
}

/// `[row][a b]`
fn pair(a: &[f32], b: &[f32], width: usize, out: &mut Vec<f32>) {
    out.clear();
    for (a, b) in a.chunks_exact(width).zip(b.chunks_exact(width)) {
        out.extend_from_slice(a);
        out.extend_from_slice(b);
    }
}

impl Head for Eagle {
    fn taps(&self) -> &[usize] {
        &self.eagle.taps
    }

    fn width(&self) -> usize {
        self.config.hidden_size
    }

    fn vocab_map(&self) -> Option<&[u32]> {
        self.vocab_map.as_deref()
    }

    fn mask(&self) -> Option<&MaskRow> {
        self.mask.as_ref()
    }

    fn states(&mut self, taps: &[f32]) -> Result<Vec<f32>> {
        let Self { config, eagle, weights, compute, scratch, .. } = self;
        let parts = weights.eagle().expect("checked when it was made");
        let (eps, width) = (config.rms_norm_eps, eagle.target_hidden);
        let row_len = eagle.taps.len() * width;
        let mut normed = taps.to_vec();
        let norms = match eagle.tap_norms {
            TapNorms::None => 0,
            TapNorms::Together => row_len,
            TapNorms::Each => width,
        };
        if norms > 0 {
            for (idx, (out, x)) in normed.chunks_mut(norms).zip(taps.chunks(norms)).enumerate() {
                let norm = &parts.tap_norms[idx % parts.tap_norms.len()];
                ops::rms_norm(compute.isa, x, norm, eps, out);
            }
        }
        if eagle.kind == EagleKind::Eagle1 {
            return Ok(normed);
        }
        let mut states = Vec::with_capacity(taps.len() / row_len * config.hidden_size);
        for rows in normed.chunks(self.max_rows * row_len) {
            let (prepared, out) = (&mut scratch.prepared, &mut scratch.projected);
            compute.multiply(&parts.fc, rows, rows.len() / row_len, prepared, out);
            states.extend_from_slice(out);
        }
        Ok(states)
    }

    fn forward(&mut self, segments: &[HeadSegment<'_>]) -> Result<HeadPass> {
        let width = self.config.hidden_size;
        let plain = HeadSegment::without_states(segments, width, self.config.vocab_size)?;
        let mut inputs = Inputs::new(&plain);
        let num_pages = inputs.place(self.kv.num_pages());
        self.kv.reserve_branches(num_pages, &mut self.branches)?;
        let states: Vec<f32> = segments.iter().flat_map(|each| each.states).copied().collect();
        let logits = Logits { vocab_size: self.eagle.draft_vocab, values: Vec::new() };
        let mut out = HeadPass { logits, states: Vec::new() };
        let passes = inputs.rows.chunks(self.max_rows).zip(states.chunks(self.max_rows * width));
        for (rows, states) in passes {
            self.pass(&inputs, rows, states, &mut out);
        }
        Ok(out)
    }
}
