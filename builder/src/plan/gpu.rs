//! GPUs, from a table: nothing is measured, because the build may run on a machine without one.

use super::{Machine, MachineMemory, Model};
use crate::roofline::{Passes, Product, Roofline};
use anyhow::Result;
use spec_kernels::GEMM_ROWS;

/// Bytes a second that copies on the device were measured to move, read and written (the data sheets have a tenth more), and
/// GiB that the driver leaves to programs.
const TABLE: [(&str, f64, u64); 2] = [("H100", 3.0e12, 79), ("H200", 4.3e12, 139)];

/// Streaming multiprocessors of these.
const NUM_SMS: u32 = 132;

/// Multiply-adds a second of half-precision tensor cores through `mma.sync`, on Hopper: 60 % of what the data sheet
/// gives, 989 TFLOPS, which takes other instructions.
const MULTIPLY_RATE: f64 = 0.6 * 989e12 / 2.0;

/// Kernels of a layer, and those before and after all layers.
const LAYER_KERNELS: usize = 5;
const OTHER_KERNELS: usize = 2;

/// From the end of one kernel of a graph to the start of the next.
const KERNEL_GAP_MS: f64 = 1.3e-3;

pub(super) struct Gpu {
    name: &'static str,
    bandwidth: f64,
    memory: Option<u64>,
}

impl Gpu {
    /// Those of the table, or one of a given bandwidth.
    pub(super) fn of_table(given: Option<f64>) -> Vec<Box<dyn Machine>> {
        let gpu = |name, bandwidth, memory| {
            Box::new(Self { name, bandwidth, memory }) as Box<dyn Machine>
        };
        match given {
            Some(bandwidth) => vec![gpu("a GPU", bandwidth, None)],
            None => {
                TABLE.map(|(name, bandwidth, gib)| gpu(name, bandwidth, Some(gib << 30))).into()
            }
        }
    }
}

impl Machine for Gpu {
    fn bandwidth(&self) -> f64 {
        self.bandwidth
    }

    fn describe(&self) -> String {
        format!("{} at {:.0} GB/s, not measured here", self.name, self.bandwidth / 1e9)
    }

    fn memory(&self) -> Option<MachineMemory> {
        self.memory.map(|bytes| MachineMemory { bytes, num_sms: NUM_SMS })
    }

    fn passes(&self, model: &Model<'_>, rows: usize) -> Result<Box<dyn Passes>> {
        let [.., most] = GEMM_ROWS;
        // A product computes as many rows as it was compiled for, whether they are there or not.
        let compiled = |rows: usize| {
            let left = (rows - 1) % most + 1;
            rows - left + GEMM_ROWS.into_iter().find(|&size| size >= left).unwrap_or(most)
        };
        let rates: Vec<f64> = (1..=rows.max(most))
            .map(|rows| MULTIPLY_RATE * rows as f64 / compiled(rows) as f64)
            .collect();
        let product = |macs: u64| Product { macs: macs as f64, rates: rates.clone() };
        let num_kernels = LAYER_KERNELS * model.config.num_layers + OTHER_KERNELS;
        Ok(Box::new(Roofline {
            bytes: model.sizes.step_bytes as f64,
            rows_a_read: most,
            bandwidth: self.bandwidth,
            overhead_ms: num_kernels as f64 * KERNEL_GAP_MS,
            products: vec![product(model.sizes.layer_macs + model.sizes.head_macs)],
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpoint::testing::{model, tiny_config};
    use crate::sizes::Sizes;
    use spec_core::engine::{Device, Precision};
    use spec_core::model::Dtype;

    #[test]
    fn rows_that_a_product_pads_take_the_time_of_full_ones() {
        let config = model(&tiny_config("llama", "LlamaForCausalLM"));
        let precision = Precision { weights: Dtype::Fp8, head: Dtype::Fp16, kv: Dtype::Fp16 };
        let sizes = Sizes::new(&config, &precision, &Device::Cpu);
        let macs = (sizes.layer_macs + sizes.head_macs) as f64;
        let model = Model { sizes, precision: &precision, config: &config };
        // Memory that is never waited for.
        let gpu = Gpu { name: "a GPU", bandwidth: f64::INFINITY, memory: None };
        let passes = gpu.passes(&model, 72).unwrap();
        let gaps = 12.0 * KERNEL_GAP_MS;
        for (rows, padded) in [(1, 8.0), (8, 8.0), (9, 16.0), (17, 32.0), (33, 64.0), (65, 72.0)] {
            let expected = gaps + 1e3 * padded * macs / MULTIPLY_RATE;
            let ms = passes.ms(rows);
            assert!((ms / expected - 1.0).abs() < 1e-9, "{rows} rows: {ms}, not {expected}");
        }
    }
}
