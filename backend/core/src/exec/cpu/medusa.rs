//! Medusa heads on the CPU: their weights, and passes of one head over rows of states.

use super::layer::Compute;
use super::linear::Weight;
use super::model::Resources;
use super::ops;
use super::scratch::Scratch;
use super::weights::Weights;
use crate::batch::Logits;
use crate::draft::Heads;
use crate::engine::Engine;
use crate::model::{MedusaConfig, ModelConfig};
use crate::{Error, Result};
use std::sync::Arc;

/// Rows that go through a head together at most.
const MAX_ROWS: usize = 512;

/// Heads ready to run.
pub struct Medusa {
    config: ModelConfig,
    medusa: MedusaConfig,
    weights: Arc<Weights>,
    /// The target's: for what the heads have not of their own.
    target: Option<Arc<Weights>>,
    compute: Compute,
    scratch: Scratch,
    max_rows: usize,
}

impl Medusa {
    /// Heads with the engine's weights, on the hidden states of a target whose weights are there, or else such as need none
    /// of these.
    pub fn new(
        engine: &Engine,
        weights: Arc<Weights>,
        target: Option<Arc<Weights>>,
        resources: Resources,
    ) -> Result<Self> {
        let Resources { num_pages: _, rows, isa, pool } = resources;
        let manifest = engine.manifest();
        let config = manifest.model.clone();
        let bad = |what: &str| {
            Err(Error::BadEngine(format!("engine {}: {what}", engine.path().display())))
        };
        let (Some(medusa), Some(_)) = (config.medusa().cloned(), weights.medusa()) else {
            return bad("it has no Medusa heads");
        };
        let target = target.filter(|target| target.decoder().is_some());
        if medusa.own_heads.contains(&false) && target.is_none() {
            return bad("it lacks matrices that its target has on another device");
        }
        let max_rows = rows.clamp(1, MAX_ROWS);
        Ok(Self {
            scratch: Scratch::new(&config, &manifest.precision, isa, max_rows),
            compute: Compute { isa, pool },
            config,
            medusa,
            weights,
            target,
            max_rows,
        })
    }
}

/// `x += silu(block x)`, row by row.
fn run_block(compute: &Compute, block: &Weight, s: &mut Scratch) {
    let width = block.k();
    let rows = s.residual.len() / width;
    compute.multiply(block, &s.residual, rows, &mut s.prepared, &mut s.projected);
    // The product of an MLP without its second factor.
    s.gate_up.clear();
    for x in s.projected.chunks_exact(width) {
        s.gate_up.extend_from_slice(x);
        s.gate_up.resize(s.gate_up.len() + width, 1.0);
    }
    s.activated.resize(rows * width, 0.0);
    compute.rows(&mut s.activated, width, |row, out| {
        ops::silu_mul(compute.isa, &s.gate_up[row * 2 * width..][..2 * width], out);
    });
    compute.add(&mut s.residual, &s.activated, width);
}

impl Heads for Medusa {
    fn taps(&self) -> &[usize] {
        std::slice::from_ref(&self.medusa.tap)
    }

    fn num_heads(&self) -> usize {
        self.medusa.num_heads()
    }

    fn width(&self) -> usize {
        self.config.hidden_size
    }

    fn states(&mut self, taps: &[f32]) -> Result<Vec<f32>> {
        let parts = self.weights.medusa().expect("checked when it was made");
        let mut states = Vec::new();
        self.compute.norm(taps, &parts.norm, self.config.rms_norm_eps, &mut states);
        Ok(states)
    }

    fn logits(&mut self, head: usize, states: &[f32]) -> Result<Logits> {
        let Self { config, weights, target, compute, scratch: s, .. } = self;
        let parts = weights.medusa().expect("checked when it was made");
        let head = &parts.heads[head];
        let shared = target.as_ref().and_then(|target| target.decoder());
        let to_logits = head.head.as_ref().or(shared.map(|target| target.head()));
        let to_logits = to_logits.expect("checked when it was made");
        let mut logits = Logits { vocab_size: config.vocab_size, values: Vec::new() };
        for states in states.chunks(self.max_rows * config.hidden_size) {
            s.residual.clear();
            s.residual.extend_from_slice(states);
            head.blocks.iter().for_each(|block| run_block(compute, block, s));
            let rows = states.len() / config.hidden_size;
            compute.multiply(to_logits, &s.residual, rows, &mut s.prepared, &mut s.projected);
            logits.values.extend_from_slice(&s.projected);
        }
        Ok(logits)
    }
}
