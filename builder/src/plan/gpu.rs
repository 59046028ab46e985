//! GPUs, from a table: nothing is measured, because the build may run on a machine without one. What an engine would launch is
//! the executor's own account; what a launch takes was predicted from its machine code.

use super::{Machine, MachineMemory, Model};
use crate::roofline::{Passes, Points};
use anyhow::{Context, Result};
use serde::Deserialize;
use spec_core::exec::{HeadOutline, Outline, Planned};
use spec_core::runtime::Prefill;
use spec_kernels::Variant;
use std::collections::BTreeMap;

/// Written by `scripts/gpu-predict --table`, which says in it how.
const TABLE: &str = include_str!("gpu.json");

/// Of units of a packed matrix those of two tiles go together: their bytes, outputs, and bytes of each.
const UNIT_BYTES: usize = 2 * 8192;
const UNIT_OUTPUTS: usize = 2 * 64;
const UNIT_ROW_BYTES: usize = 128;

/// What the table says, in clocks.
#[derive(Debug, Deserialize)]
struct Table {
    gpus: Vec<Product>,
    /// Shares of a predicted time by which it may be off, down and up.
    range: [f64; 2],
    /// Ascending rows of each format and epilogue.
    products: Vec<Entry>,
    /// Ascending rows.
    attention: Vec<Point>,
    /// A kernel that works row by row, from the end of the one ahead to its own.
    row_kernel: f64,
    /// What comes before all layers, and behind the head.
    around: f64,
}

/// A GPU that one can buy.
#[derive(Clone, Debug, Deserialize)]
struct Product {
    name: String,
    /// Bytes a second that copies on the device were measured to move, read and written; the data sheets have a tenth more.
    bandwidth: f64,
    /// GiB that the driver leaves to programs.
    memory_gib: u64,
    num_sms: u32,
    hertz: f64,
}

/// A product with so many rows.
#[derive(Debug, Deserialize)]
struct Entry {
    weight: String,
    epilogue: String,
    rows: usize,
    /// Of each unit, its share of what follows some of them included, by the name of the GPU.
    unit: BTreeMap<String, f64>,
    /// What a launch takes besides, likewise.
    boundary: BTreeMap<String, f64>,
}

#[derive(Debug, Deserialize)]
struct Point {
    rows: usize,
    clocks: f64,
}

pub(super) struct Gpu {
    /// One of the table: the nearest one, where a bandwidth is given.
    product: Product,
    /// Bytes a second.
    bandwidth: f64,
    /// Whether it is not the product's own.
    given: bool,
    /// Shares by which predicted times may be off, down and up.
    range: [f64; 2],
}

impl Gpu {
    /// Those of the table, or one of a given bandwidth.
    pub(super) fn of_table(given: Option<f64>) -> Result<Vec<Box<dyn Machine>>> {
        let Table { gpus, range, .. } = table()?;
        let gpu = |product: Product, bandwidth| {
            let given = given.is_some();
            Box::new(Self { product, bandwidth, given, range }) as Box<dyn Machine>
        };
        let Some(bandwidth) = given else {
            let own = |product: Product| (product.bandwidth, product);
            return Ok(gpus.into_iter().map(own).map(|(own, product)| gpu(product, own)).collect());
        };
        let distance = |product: &Product| (product.bandwidth / bandwidth).ln().abs();
        let nearest = gpus.into_iter().min_by(|a, b| distance(a).total_cmp(&distance(b)));
        Ok(vec![gpu(nearest.context("the table of GPUs is empty")?, bandwidth)])
    }
}

impl Machine for Gpu {
    fn bandwidth(&self) -> f64 {
        self.bandwidth
    }

    fn describe(&self) -> String {
        let Self { product, bandwidth, given, range: [less, more] } = self;
        let name = if *given { "a GPU" } else { product.name.as_str() };
        format!(
            "{name} at {:.0} GB/s, predicted from machine code, not measured (-{:.0} to +{:.0} %)",
            bandwidth / 1e9,
            100.0 * less,
            100.0 * more
        )
    }

    fn memory(&self) -> Option<MachineMemory> {
        let Product { memory_gib, num_sms, .. } = self.product;
        (!self.given).then_some(MachineMemory { bytes: memory_gib << 30, num_sms })
    }

    fn passes(&self, model: &Model<'_>, rows: usize) -> Result<Box<dyn Passes>> {
        let table = table()?;
        let Model { config, precision, limits, .. } = model;
        // What the table was made for.
        let capability = (9, 0);
        let num_sms = self.product.num_sms;
        let operations: Box<dyn Fn(usize) -> Vec<Planned>> = match &config.draft_head {
            None => {
                let way = Prefill::Exact;
                let outline = Outline::new(config, precision, limits, num_sms, capability, way)?;
                Box::new(move |rows| outline.step(1, rows - 1))
            }
            Some(_) => {
                let outline = HeadOutline::new(config, precision, num_sms, capability)?;
                match config.drafts_at_once() {
                    true => Box::new(move |drafts| outline.draft_at_once(1, drafts)),
                    false => Box::new(move |known| outline.first_draft(1, known)),
                }
            }
        };
        let points = (1..=rows).map(|rows| {
            let operations = operations(rows);
            let clocks = operations.iter().map(|planned| self.clocks(&table, planned));
            let clocks: f64 = clocks.sum::<Result<f64>>()? + table.around;
            Ok((rows, 1e3 * clocks / self.product.hertz))
        });
        Ok(Box::new(Points { points: points.collect::<Result<_>>()? }))
    }
}

impl Gpu {
    /// From the end of what is ahead to its own.
    fn clocks(&self, table: &Table, planned: &Planned) -> Result<f64> {
        let Planned::Kernel { variant, grid, rows, .. } = planned else { return Ok(0.0) };
        match variant.kernel {
            "gemm" => self.product_clocks(table, variant, *grid, *rows),
            "attention" => {
                let points = table.attention.iter().map(|point| (point.rows, point.clocks));
                Ok(between(points.collect(), *rows))
            }
            "rope" | "normalise" => Ok(table.row_kernel),
            // Those around the layers are in `around`.
            _ => Ok(0.0),
        }
    }

    fn product_clocks(
        &self,
        table: &Table,
        variant: &Variant,
        grid: u32,
        rows: usize,
    ) -> Result<f64> {
        let define = |name: &str| -> Result<&str> {
            let found = variant.defines.iter().find(|(define, _)| *define == name);
            Ok(found.with_context(|| format!("{variant} has no {name}"))?.1.as_str())
        };
        let (weight, epilogue) = (define("WEIGHT")?, define("EPILOGUE")?);
        let [n, k]: [usize; 2] = [define("SHAPE_N")?.parse()?, define("SHAPE_K")?.parse()?];
        // Plain sums for the rotation take what rotating takes, and a little less.
        let alike = if epilogue == "RAW" { "QKV" } else { epilogue };
        let entries: Vec<&Entry> = table
            .products
            .iter()
            .filter(|entry| entry.weight == weight && entry.epilogue == alike)
            .collect();
        let figure = |of: fn(&Entry) -> &BTreeMap<String, f64>| -> Result<f64> {
            let clocks = |entry: &&Entry| of(entry).get(&self.product.name).copied();
            let points = entries.iter().map(|entry| Some((entry.rows, clocks(entry)?)));
            let points = points.collect::<Option<Vec<_>>>().filter(|points| !points.is_empty());
            let points = points.with_context(|| format!("no figures of {weight} {epilogue}"))?;
            Ok(between(points, rows))
        };
        let (unit, boundary) = (figure(|entry| &entry.unit)?, figure(|entry| &entry.boundary)?);
        let weight_bytes = if weight == "FP8" { 1 } else { 2 };
        let k_units = k.div_ceil(UNIT_ROW_BYTES / weight_bytes);
        let (pairs, grid) = (n.div_ceil(UNIT_OUTPUTS), grid as usize);
        // The head's blocks have whole tiles.
        let units = match epilogue {
            "HEAD" => pairs.div_ceil(grid) * k_units,
            _ => (pairs * k_units).div_ceil(grid),
        };
        let Product { num_sms, hertz, .. } = self.product;
        let memory = UNIT_BYTES as f64 * f64::from(num_sms) * hertz / self.bandwidth;
        // Less is lost at a boundary than what was loaded before it, but all is loaded.
        let units = units as f64;
        Ok((units * memory.max(unit) + boundary).max(units * memory))
    }
}

/// A figure for so many rows, of those for ascending ones.
fn between(points: Vec<(usize, f64)>, rows: usize) -> f64 {
    Points { points }.ms(rows)
}

fn table() -> Result<Table> {
    serde_json::from_str(TABLE).context("the table of GPUs")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sizes::Sizes;
    use spec_core::engine::{Device, Limits, Precision};
    use spec_core::model::{DraftHead, Dtype, MedusaConfig, ModelConfig};

    /// What `scripts/gpu-predict` predicts of a model that the table was not made from.
    #[derive(Deserialize)]
    struct Check {
        model: String,
        config: ModelConfig,
        precision: Precision,
        gpu: String,
        rows: usize,
        ms: f64,
    }

    #[derive(Deserialize)]
    struct Checks {
        checks: Vec<Check>,
    }

    const LIMITS: Limits =
        Limits { max_draft_len: 8, max_batch_size: 8, max_seq_len: 4096, max_num_tokens: 512 };

    /// A table of few numbers stands for a simulation: it does not know that sums of a small model are in more parts.
    const TOLERANCE: f64 = 0.25;

    fn of_table() -> Vec<Gpu> {
        let Table { gpus, range, .. } = table().unwrap();
        let gpu =
            |product: Product| Gpu { bandwidth: product.bandwidth, product, given: false, range };
        gpus.into_iter().map(gpu).collect()
    }

    fn ms(gpu: &Gpu, config: &ModelConfig, precision: &Precision, rows: usize) -> f64 {
        let sizes = Sizes::new(config, precision, &Device::Cpu);
        let model = Model { sizes, precision, config, limits: &LIMITS };
        gpu.passes(&model, rows).unwrap().ms(rows)
    }

    #[test]
    fn other_models_take_what_the_simulation_says() {
        let Checks { checks } = serde_json::from_str(TABLE).unwrap();
        assert!(checks.len() >= 8, "{} checks", checks.len());
        let gpus = of_table();
        for Check { model, config, precision, gpu, rows, ms: expected } in &checks {
            let gpu = gpus.iter().find(|each| each.product.name == *gpu).unwrap();
            let took = ms(gpu, config, precision, *rows);
            let error = took / expected - 1.0;
            assert!(
                error.abs() < TOLERANCE,
                "{model}, {rows} rows on {}: {took:.3} ms, the simulation says {expected:.3}",
                gpu.product.name
            );
        }
    }

    #[test]
    fn more_rows_and_less_bandwidth_take_longer() {
        let Checks { checks } = serde_json::from_str(TABLE).unwrap();
        let Check { config, precision, .. } = &checks[0];
        let gpus = of_table();
        for gpu in &gpus {
            let times = [1, 9, 33, 65].map(|rows| ms(gpu, config, precision, rows));
            assert!(times.is_sorted(), "{times:?} on {}", gpu.product.name);
            let product = gpu.product.clone();
            let slow =
                Gpu { bandwidth: gpu.bandwidth / 4.0, product, given: true, range: gpu.range };
            let ratio = ms(&slow, config, precision, 1) / times[0];
            assert!(ratio > 2.0 && ratio < 4.0, "{ratio} times as long with a quarter of it");
        }
    }

    #[test]
    fn what_a_head_multiplies_besides_layers_is_counted() {
        let Checks { checks } = serde_json::from_str(TABLE).unwrap();
        let Check { config, precision, .. } = &checks[0];
        let gpu = &of_table()[0];
        let medusa = |num_blocks, own| {
            let own_heads = vec![own; 3];
            let medusa = MedusaConfig { tap: 2, num_blocks, block_bias: false, own_heads };
            let draft_head = Some(DraftHead::Medusa(medusa));
            let head = ModelConfig { num_layers: 0, draft_head, ..config.clone() };
            ms(gpu, &head, precision, 1)
        };
        let hidden = config.hidden_size as f64;
        let bytes = if precision.weights == Dtype::Fp8 { 1.0 } else { 2.0 };
        let block = 1e3 * hidden * hidden * bytes / gpu.bandwidth;
        let [none, one, three] = [0, 1, 3].map(|blocks| medusa(blocks, true));
        let more = one - none;
        assert!(more > block && more < block + 0.02, "{more} ms of a block, {block} from memory");
        assert!((three - none - 3.0 * more).abs() < 1e-9, "{none}, {one}, {three}");
        assert_eq!(medusa(1, false), one, "the target's matrix is as large");
    }

    #[test]
    fn every_format_has_figures() {
        let Checks { checks } = serde_json::from_str(TABLE).unwrap();
        let config = &checks[0].config;
        for weights in [Dtype::Fp8, Dtype::Fp16] {
            for head in [Dtype::Fp8, Dtype::Fp16] {
                for qk_norm in [false, true] {
                    let precision = Precision { weights, head, kv: Dtype::Fp8 };
                    let config = ModelConfig { qk_norm, ..config.clone() };
                    let took = ms(&of_table()[0], &config, &precision, 9);
                    assert!(took.is_finite() && took > 0.0, "{precision:?}: {took}");
                }
            }
        }
    }
}
