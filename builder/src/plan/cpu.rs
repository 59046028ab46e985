//! This machine's processor, measured.

use super::{Machine, MachineMemory, Model};
use crate::roofline::{Product, Roofline};
use anyhow::Result;
use spec_core::exec::{Pool, multiply_rates, read_bandwidth};
use spec_core::machine::free_memory;
use spec_core::model::Dtype;
use spec_core::runtime::{Isa, Pinning};

/// Rows up to which the rate of the products is measured.
const MAX_RATED_ROWS: usize = 17;

pub(super) struct Cpu {
    pool: Pool,
    isa: Isa,
    bandwidth: f64,
    source: &'static str,
}

impl Cpu {
    /// With the bandwidth given, or measured, and the best instruction set where none is given.
    pub(super) fn new(given: Option<f64>, isa: Option<Isa>) -> Result<Self> {
        let pool = Pool::on_machine(None, Pinning::Auto);
        let _pinned = pool.pin_caller();
        let (bandwidth, source) = match given {
            Some(bandwidth) => (bandwidth, "given"),
            None => (read_bandwidth(&pool)?, "measured"),
        };
        Ok(Self { pool, isa: isa.unwrap_or_else(Isa::detect), bandwidth, source })
    }
}

impl Machine for Cpu {
    fn bandwidth(&self) -> f64 {
        self.bandwidth
    }

    fn describe(&self) -> String {
        let Self { pool, isa, bandwidth, source } = self;
        format!("{:.1} GB/s ({source}), {} threads, {isa}", bandwidth / 1e9, pool.threads())
    }

    fn memory(&self) -> Option<MachineMemory> {
        free_memory().map(|bytes| MachineMemory { bytes: bytes as u64, num_sms: 0 })
    }

    fn roofline(&self, model: &Model<'_>, rows: usize) -> Result<Roofline> {
        let _pinned = self.pool.pin_caller();
        let product = |dtype: Dtype, macs: u64| -> Result<Product> {
            let rows = rows.min(MAX_RATED_ROWS);
            let rates = multiply_rates(&self.pool, self.isa, dtype, rows)?;
            Ok(Product { macs: macs as f64, rates })
        };
        let Model { sizes, precision, .. } = model;
        Ok(Roofline {
            bytes: sizes.step_bytes as f64,
            rows_a_read: usize::MAX,
            bandwidth: self.bandwidth,
            overhead_ms: 0.0,
            products: vec![
                product(precision.weights, sizes.layer_macs)?,
                product(precision.head, sizes.head_macs)?,
            ],
        })
    }
}
