//! One layer of a decoder on the CPU, and the steps that it is made of.
#![allow(unsafe_code)]

use super::attention::{Attention, Row, Task};
use super::kv::KvCache;
use super::linear::{Prepared, Weight, linear, prepare};
use super::pool::SyncPtr;
use super::scratch::Scratch;
use super::tree::{Input, Inputs};
use super::{Isa, Pool, ops};
use crate::model::decoder;
use crate::model::{ModelConfig, RopeTable};
use std::sync::Arc;

/// Who computes, and how.
pub(super) struct Compute {
    pub(super) isa: Isa,
    pub(super) pool: Arc<Pool>,
}

/// One layer of one pass.
pub(super) struct Stage<'a> {
    pub(super) config: &'a ModelConfig,
    pub(super) rope: &'a RopeTable,
    pub(super) kv: &'a KvCache,
    /// The pass, and the pages of its branches.
    pub(super) branches: Option<(&'a Inputs<'a>, &'a KvCache)>,
    pub(super) compute: &'a Compute,
    pub(super) attention: &'a decoder::Attention<Weight, Vec<f32>>,
    pub(super) mlp: &'a decoder::Mlp<Weight, Vec<f32>>,
    pub(super) layer_idx: usize,
    pub(super) inputs: &'a [Input<'a>],
    /// What each row attends to.
    pub(super) rows: &'a [Row<'a>],
    /// The attention of the rows, cut up.
    pub(super) tasks: &'a [Task],
}

impl Stage<'_> {
    /// `residual += out(attention(qkv(norm(residual))))`
    pub(super) fn attend(&self, norm: &[f32], s: &mut Scratch) {
        let eps = self.config.rms_norm_eps;
        self.compute.norm(&s.residual, norm, eps, &mut s.normed);
        self.attend_normed(s);
    }

    /// `residual += out(attention(qkv(normed)))`
    pub(super) fn attend_normed(&self, s: &mut Scratch) {
        let (compute, part, rows) = (self.compute, self.attention, self.rows.len());
        compute.multiply(&part.qkv, &s.normed, rows, &mut s.prepared, &mut s.qkv);
        self.rotate_and_store(s);
        self.copy_branches();
        self.run_attention(s);
        compute.multiply(&part.out, &s.attended, rows, &mut s.prepared, &mut s.projected);
        compute.add(&mut s.residual, &s.projected, self.config.hidden_size);
    }

    /// `residual += down(silu(gate) * up)`
    pub(super) fn mlp(&self, s: &mut Scratch) {
        let (compute, part, rows) = (self.compute, self.mlp, self.rows.len());
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
        let (config, part, isa) = (self.config, self.attention, self.compute.isa);
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

    fn run_attention(&self, s: &mut Scratch) {
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
        self.compute.pool.for_each(self.tasks.len(), |idx| {
            // SAFETY: `out` is as long as `q`; tasks differ in rows or heads and each is run once; the
            // layer's keys and values are stored already.
            unsafe { attention.run_task(&self.tasks[idx], out.get()) };
        });
    }
}

impl Compute {
    /// Runs `task(row, values)` for every row of `width` values, on all threads if there are several.
    pub(super) fn rows(
        &self,
        values: &mut [f32],
        width: usize,
        task: impl Fn(usize, &mut [f32]) + Sync,
    ) {
        self.pool.for_each_chunk(values, width, task);
    }

    pub(super) fn norm(&self, x: &[f32], weight: &[f32], eps: f32, out: &mut Vec<f32>) {
        let width = weight.len();
        out.resize(x.len(), 0.0);
        self.rows(out, width, |row, out| {
            ops::rms_norm(self.isa, &x[row * width..][..width], weight, eps, out);
        });
    }

    pub(super) fn add(&self, x: &mut [f32], y: &[f32], width: usize) {
        self.rows(x, width, |row, x| ops::add(self.isa, x, &y[row * width..][..width]));
    }

    pub(super) fn multiply(
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
    pub(super) fn head(
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
