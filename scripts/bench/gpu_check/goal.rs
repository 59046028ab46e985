//! What is aimed at, against the measured ceilings: one table, so that a result says of each figure whether it is met.

use crate::random_engine::Model;
use serde_json::{Value, json};
use spec_core::model::Dtype;

/// A product of few rows: of so many bytes of weights, at least this share of the copy's rate.
const FEW_ROWS: [(f64, f64); 2] = [(50e6, 0.88), (16e6, 0.75)];
/// The most rows that those hold for.
const FEW: usize = 8;
/// 64 rows, from 30 MB on.
const MANY_ROWS: (usize, f64, f64) = (64, 30e6, 0.70);
/// Attention, from so many bytes of keys and values on.
const ATTENTION: (f64, f64) = (50e6, 0.75);
/// Time of 32 rows to that of one, from 16 MB on.
const ROWS_32: (f64, f64) = (16e6, 1.15);
/// Time of a step that verifies up to 8 rows to that of one that decodes one.
pub(crate) const VERIFY_RATIO: f64 = 1.10;
/// Microseconds between what the GPU does in a step and all of the step.
pub(crate) const HOST_GAP_US: f64 = 20.0;
/// Milliseconds of a token of one sequence without speculation, by model: on an H100, and on an H200, for which all but
/// the first are in proportion to what the two copy.
const TOKEN_MS: [(&str, Dtype, f64, f64); 4] = [
    ("Llama-3.1-8B", Dtype::Fp8, 3.6, 2.6),
    ("Llama-3.1-8B", Dtype::Fp16, 6.0, 4.2),
    ("Llama-3.2-1B", Dtype::Fp16, 1.25, 0.90),
    ("Llama-3.2-1B", Dtype::Fp8, 0.80, 0.56),
];

/// The least share of the copy's rate for a product.
pub(crate) fn product_share(rows: usize, bytes: f64) -> Option<f64> {
    if rows <= FEW {
        return FEW_ROWS.iter().find(|(least, _)| bytes >= *least).map(|&(_, share)| share);
    }
    let (many, least, share) = MANY_ROWS;
    (rows == many && bytes >= least).then_some(share)
}

/// The least share of the copy's rate for an attention.
pub(crate) fn attention_share(bytes: f64) -> Option<f64> {
    (bytes >= ATTENTION.0).then_some(ATTENTION.1)
}

/// The most that 32 rows may take of the time of one.
pub(crate) fn rows_ratio(rows: usize, bytes: f64) -> Option<f64> {
    (rows == 32 && bytes >= ROWS_32.0).then_some(ROWS_32.1)
}

/// The most milliseconds of a token on this GPU; none is set for others.
pub(crate) fn token_ms(model: &Model, gpu: &str) -> Option<f64> {
    let found = TOKEN_MS
        .iter()
        .find(|(name, dtype, ..)| (*name, *dtype) == (model.shape.name, model.dtype));
    let &(_, _, h100, h200) = found?;
    let is_h200 = gpu.contains("H200");
    (is_h200 || gpu.contains("H100")).then_some(if is_h200 { h200 } else { h100 })
}

/// A goal in a result: null where there is none.
pub(crate) fn json(what: &str, goal: Option<f64>, is_met: impl Fn(f64) -> bool) -> Value {
    goal.map_or(Value::Null, |goal| json!({ "what": what, "goal": goal, "met": is_met(goal) }))
}
