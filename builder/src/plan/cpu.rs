//! This machine's processor, measured.

use super::{Machine, MachineMemory, Model};
use crate::roofline::{Passes, Points, Product, Roofline};
use anyhow::Result;
use spec_core::engine::{Device, SectionKind, expected_sections};
use spec_core::exec::{Pool, multiply_rates, product_seconds, read_bandwidth};
use spec_core::machine::free_memory;
use spec_core::model::Dtype;
use spec_core::model::decoder::MatrixKind;
use spec_core::runtime::{Isa, Pinning};
use std::collections::BTreeMap;

/// Rows up to which the rate of the products is measured.
const MAX_RATED_ROWS: usize = 17;

pub(super) struct Cpu {
    pool: Pool,
    isa: Isa,
    bandwidth: f64,
    /// Whether it is not this machine's.
    given: bool,
}

impl Cpu {
    /// With the bandwidth given, or measured, and the best instruction set where none is given.
    pub(super) fn new(given: Option<f64>, isa: Option<Isa>) -> Result<Self> {
        let pool = Pool::on_machine(None, Pinning::Auto);
        let _pinned = pool.pin_caller();
        let bandwidth = given.map_or_else(|| read_bandwidth(&pool), Ok)?;
        let isa = isa.unwrap_or_else(Isa::detect);
        Ok(Self { pool, isa, bandwidth, given: given.is_some() })
    }
}

impl Machine for Cpu {
    fn bandwidth(&self) -> f64 {
        self.bandwidth
    }

    fn describe(&self) -> String {
        let Self { pool, isa, bandwidth, given } = self;
        let source = if *given { "given" } else { "measured" };
        format!("{:.1} GB/s ({source}), {} threads, {isa}", bandwidth / 1e9, pool.threads())
    }

    fn memory(&self) -> Option<MachineMemory> {
        free_memory().map(|bytes| MachineMemory { bytes: bytes as u64, num_sms: 0 })
    }

    fn passes(&self, model: &Model<'_>, rows: usize) -> Result<Box<dyn Passes>> {
        let _pinned = self.pool.pin_caller();
        match self.given {
            true => Ok(Box::new(self.bounded(model, rows)?)),
            false => Ok(Box::new(self.measured(model, rows)?)),
        }
    }
}

impl Cpu {
    /// By the matrices of a pass, each measured in its shape as it comes from memory.
    fn measured(&self, model: &Model<'_>, most_rows: usize) -> Result<Points> {
        let rows: Vec<usize> = (1..=most_rows.min(MAX_RATED_ROWS)).collect();
        // One of Medusa heads runs one of them.
        let num_passes = model.config.most_drafts().unwrap_or(1) as f64;
        let mut points: Vec<(usize, f64)> = rows.iter().map(|&rows| (rows, 0.0)).collect();
        for ((dtype, shape), count) in matrices(model) {
            let seconds = product_seconds(&self.pool, self.isa, dtype, shape, &rows)?;
            for ((_, ms), seconds) in points.iter_mut().zip(seconds) {
                *ms += 1e3 * seconds * count as f64 / num_passes;
            }
        }
        Ok(Points { points })
    }

    /// By a bandwidth that is not this machine's, and what its processor multiplies.
    fn bounded(&self, model: &Model<'_>, rows: usize) -> Result<Roofline> {
        let product = |dtype: Dtype, macs: u64| -> Result<Product> {
            let rows = rows.min(MAX_RATED_ROWS);
            let rates = multiply_rates(&self.pool, self.isa, dtype, rows)?;
            Ok(Product { macs: macs as f64, rates })
        };
        let Model { sizes, precision, .. } = model;
        Ok(Roofline {
            bytes: sizes.step_bytes as f64,
            bandwidth: self.bandwidth,
            products: vec![
                product(precision.weights, sizes.layer_macs)?,
                product(precision.head, sizes.head_macs)?,
            ],
        })
    }
}

/// The matrices that a pass multiplies with, by format and shape, and how many there are of each.
fn matrices(model: &Model<'_>) -> BTreeMap<(Dtype, [usize; 2]), usize> {
    let Model { config, precision, .. } = model;
    let is_multiplied = |kind: MatrixKind| kind != MatrixKind::Embed || config.tied_head;
    let mut matrices = BTreeMap::new();
    for section in expected_sections(config, precision, &Device::Cpu) {
        let is_weight = section.kind == SectionKind::Weight;
        if let (true, Some(kind), Some(dtype), &[n, k]) =
            (is_weight, section.matrix, section.dtype, &section.shape[..])
            && is_multiplied(kind)
        {
            *matrices.entry((dtype, [n, k])).or_insert(0) += 1;
        }
    }
    matrices
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpoint::testing::{model, tiny_config};
    use crate::sizes::Sizes;
    use spec_core::engine::{Limits, Precision};

    #[test]
    fn every_matrix_of_a_pass_is_counted() {
        let config = model(&tiny_config("llama", "LlamaForCausalLM"));
        let precision = Precision { weights: Dtype::Int8, head: Dtype::Bf16, kv: Dtype::Fp16 };
        let sizes = Sizes::new(&config, &precision, &Device::Cpu);
        let macs = sizes.layer_macs + sizes.head_macs;
        let limits =
            Limits { max_draft_len: 4, max_batch_size: 1, max_seq_len: 64, max_num_tokens: 64 };
        let model = Model { sizes, precision: &precision, config: &config, limits: &limits };
        let matrices = matrices(&model);
        let counted = matrices.iter().map(|((_, [n, k]), count)| n * k * count).sum::<usize>();
        assert_eq!(counted as u64, macs);
        assert_eq!(matrices[&(Dtype::Bf16, [48, 32])], 1, "the head, and not the embedding");
        assert_eq!(matrices[&(Dtype::Int8, [128, 32])], 2, "one of each of two layers");
    }
}
