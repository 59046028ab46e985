//! One model on the CPU: its weights in memory, its KV cache, and the forward pass over ragged rows.
//!
//! Every stage works row by row or in kernels whose reduction order is fixed per row, so the result
//! of a row does not depend on the rows beside it.

use super::attention::{self, Attention};
use super::kv::KvCache;
use super::linear::{Prepared, Weight, linear};
use super::weights::{Layer, Weights};
use super::{Isa, Pool, ops};
use crate::batch::{Forward, Logits, Segment};
use crate::engine::Engine;
use crate::model::{ModelConfig, RopeTable};
use crate::Result;
use std::sync::Arc;

/// Rows that go through the layers together; longer passes are cut, which bounds the scratch memory.
const MAX_ROWS: usize = 512;

/// A model ready to run.
pub struct Model {
    config: ModelConfig,
    isa: Isa,
    pool: Arc<Pool>,
    rope: RopeTable,
    weights: Weights,
    kv: KvCache,
    scratch: Scratch,
}

/// Activations of one pass, [rows][width] each.
#[derive(Default)]
struct Scratch {
    residual: Vec<f32>,
    normed: Vec<f32>,
    qkv: Vec<f32>,
    attended: Vec<f32>,
    projected: Vec<f32>,
    gate_up: Vec<f32>,
    activated: Vec<f32>,
    prepared: Prepared,
}
