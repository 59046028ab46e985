//! The memory that a pass works in.

use super::Isa;
use super::linear::Prepared;
use crate::engine::Precision;
use crate::model::ModelConfig;

/// Activations of one pass, `[rows][width]` each. All have their room from the start: a pass allocates nothing, and
/// what is not used takes no memory.
pub(super) struct Scratch {
    pub(super) residual: Vec<f32>,
    pub(super) normed: Vec<f32>,
    pub(super) qkv: Vec<f32>,
    pub(super) queries: Vec<f32>,
    pub(super) attended: Vec<f32>,
    pub(super) projected: Vec<f32>,
    pub(super) gate_up: Vec<f32>,
    pub(super) activated: Vec<f32>,
    pub(super) prepared: Prepared,
}

/// Values in a row of each array, in the order of the fields; of the last one, words.
fn widths(config: &ModelConfig, precision: &Precision, isa: Isa) -> [usize; 9] {
    let (hidden, ff, q) = (config.hidden_size, config.intermediate_size, config.q_size());
    let words = |dtype, k| Prepared::num_words(isa, dtype, 1, k);
    if config.medusa().is_some() {
        let prepared = words(precision.weights, hidden).max(words(precision.head, hidden));
        return [hidden, 0, 0, 0, 0, hidden, 2 * hidden, hidden, prepared];
    }
    let (first, fc) = config
        .eagle()
        .map_or((hidden, hidden), |eagle| (eagle.first_inputs(hidden), eagle.fc_inputs(hidden)));
    let products = [first, q, ff, fc].map(|k| words(precision.weights, k));
    let prepared = products.into_iter().fold(words(precision.head, hidden), usize::max);
    let normed = first.max(fc);
    [hidden, normed, config.qkv_size(), q, q, hidden, 2 * ff, hidden.max(ff), prepared]
}

impl Scratch {
    /// For passes of up to `rows` rows.
    pub(super) fn new(config: &ModelConfig, precision: &Precision, isa: Isa, rows: usize) -> Self {
        let widths = widths(config, precision, isa);
        let [residual, normed, qkv, queries, attended, projected, gate_up, activated, prepared] =
            widths.map(|width| rows * width);
        let room = Vec::with_capacity;
        Self {
            residual: room(residual),
            normed: room(normed),
            qkv: room(qkv),
            queries: room(queries),
            attended: room(attended),
            projected: room(projected),
            gate_up: room(gate_up),
            activated: room(activated),
            prepared: Prepared::with_capacity(prepared),
        }
    }

    /// Bytes that [`new`](Self::new) reserves.
    pub(super) fn bytes(
        config: &ModelConfig,
        precision: &Precision,
        isa: Isa,
        rows: usize,
    ) -> usize {
        4 * rows * widths(config, precision, isa).iter().sum::<usize>()
    }
}
