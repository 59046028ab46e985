//! Every kernel of a pass, timed as the executor launches it: its launches of all layers in one graph, so that each
//! finds the weights of its layer cold, over random weights and keys.

use crate::ceiling::Ceilings;
use crate::goal;
use crate::gpu::{Machine, Watched};
use crate::kind;
use crate::noise::{random_e4m3, random_halves};
use crate::random_engine::Model as Shape;
use crate::report::Report;
use crate::timing::{Timing, rounded};
use serde_json::{Value, json};
use spec_core::engine::{Engine, Manifest};
use spec_core::model::Dtype;
use spec_core::runtime::{PAGE_TOKENS, page_bytes};
use spec_core::testing::cuda::device::{Address, Device, Launch, bytes_of};
use spec_core::testing::cuda::model::Tiling;
use spec_core::testing::cuda::model::params::{Row, Tile};
use spec_core::testing::cuda::{Model, Pass};
use std::collections::{BTreeMap, HashMap};
use std::error::Error;

/// Rows of the timed products: of so many sequences, each.
const ROWS: [[usize; 2]; 7] = [[1, 1], [4, 1], [8, 1], [16, 1], [32, 1], [64, 1], [32, 5]];
/// The same on an emulator.
const FEW_ROWS: [[usize; 2]; 2] = [[1, 1], [11, 3]];
/// Positions in the cache; what is longer than that together is left out.
const CACHE_TOKENS: usize = 64 * 1024;
/// Sequences, rows of each, and positions that these see.
const ATTENTIONS: [Sight; 9] = [
    Sight { sequences: 1, rows: 1, context: 1024 },
    Sight { sequences: 1, rows: 1, context: 8000 },
    Sight { sequences: 1, rows: 5, context: 1024 },
    Sight { sequences: 1, rows: 9, context: 8000 },
    Sight { sequences: 16, rows: 1, context: 1024 },
    Sight { sequences: 16, rows: 5, context: 4000 },
    Sight { sequences: 64, rows: 1, context: 1000 },
    Sight { sequences: 64, rows: 5, context: 1000 },
    Sight { sequences: 64, rows: 9, context: 1000 },
];
/// The same on an emulator.
const FEW_ATTENTIONS: [Sight; 1] = [Sight { sequences: 2, rows: 5, context: 40 }];

/// What the rows of a pass see.
#[derive(Clone, Copy, Debug)]
struct Sight {
    sequences: usize,
    rows: usize,
    context: usize,
}

/// One model on a device, and what its times are compared with.
pub(crate) struct Bench<'a> {
    pub(crate) engine: &'a Engine,
    pub(crate) shape: &'a Shape,
    pub(crate) machine: Machine,
    pub(crate) ceilings: Option<Ceilings>,
}

impl Bench<'_> {
    /// Times everything; gives how many figures went into the report.
    pub(crate) fn run(&self, report: &mut Report) -> Result<usize, Box<dyn Error>> {
        let mut device = self.machine.open()?;
        let is_emulated = self.machine.is_emulated();
        let num_pages = if is_emulated { 64 } else { CACHE_TOKENS / PAGE_TOKENS };
        let model = Model::load(self.engine, num_pages, &mut device)?;
        fill_cache(self.manifest(), num_pages, &mut device)?;
        let before = report.count("kernels");
        let rows: &[_] = if is_emulated { &FEW_ROWS } else { &ROWS };
        self.products(&model, rows, &mut device, report)?;
        let sights: &[Sight] = if is_emulated { &FEW_ATTENTIONS } else { &ATTENTIONS };
        for sight in sights {
            report.push("kernels", self.attention(&model, sight, &mut device)?);
        }
        Ok(report.count("kernels") - before)
    }

    fn manifest(&self) -> &Manifest {
        self.engine.manifest()
    }

    fn products(
        &self,
        model: &Model,
        all_rows: &[[usize; 2]],
        device: &mut Watched,
        report: &mut Report,
    ) -> Result<(), Box<dyn Error>> {
        let mut of_one_row = HashMap::new();
        for &[sequences, each] in all_rows {
            let rows = sequences * each;
            let sight = Sight { sequences, rows: each, context: PAGE_TOKENS };
            for (kind, launches) in self.launches(model, &sight, device)? {
                if kind == "attention" {
                    continue;
                }
                let timing = self.time(&kind, launches, device)?;
                let one = *of_one_row.entry(kind.clone()).or_insert(timing.median());
                report.push("kernels", self.product(&kind, rows, &timing, timing.median() / one));
            }
        }
        Ok(())
    }

    /// A product, or a small kernel between products.
    fn product(&self, kind: &str, rows: usize, timing: &Timing, to_one_row: f64) -> Value {
        let mut entry = json!({
            "model": self.shape.name(), "kernel": kind, "rows": rows, "time": timing.json(),
        });
        let Some(([n, k], bytes)) = kind::matrix(kind, self.manifest()) else { return entry };
        let copies = if kind == "head" { 1 } else { self.manifest().model.num_layers };
        entry["n"] = json!(n);
        entry["k"] = json!(k);
        entry["to_one_row"] = json!(rounded(to_one_row));
        entry["rotated_over_mb"] = json!(rounded((copies * bytes) as f64 / 1e6));
        self.add_rate(&mut entry, bytes, timing, goal::product_share(rows, bytes as f64));
        let most = goal::rows_ratio(rows, bytes as f64);
        entry["rows_goal"] = goal::json("times one row", most, |most| to_one_row <= most);
        entry
    }

    fn attention(
        &self,
        model: &Model,
        sight: &Sight,
        device: &mut Watched,
    ) -> Result<Value, Box<dyn Error>> {
        let launches = self.launches(model, sight, device)?.remove("attention");
        let timing = self.time("attention", launches.unwrap_or_default(), device)?;
        let Sight { sequences, rows, context } = *sight;
        let bytes = sequences * context * kind::kv_bytes(self.manifest());
        let mut entry = json!({
            "model": self.shape.name(), "kernel": "attention", "rows": sequences * rows,
            "sequences": sequences, "context": context, "time": timing.json(),
        });
        self.add_rate(&mut entry, bytes, &timing, goal::attention_share(bytes as f64));
        Ok(entry)
    }

    fn add_rate(&self, entry: &mut Value, bytes: usize, timing: &Timing, goal: Option<f64>) {
        let rate = bytes as f64 / timing.median();
        entry["mb"] = json!(rounded(bytes as f64 / 1e6));
        entry["gb_per_s"] = json!(rounded(rate / 1e3));
        let share = self.ceilings.map(|ceilings| (rate / ceilings.copy, rate / ceilings.read));
        entry["share_of_copy"] = json!(share.map(|share| rounded(share.0)));
        entry["share_of_read"] = json!(share.map(|share| rounded(share.1)));
        let goal = share.and(goal);
        entry["goal"] = goal::json("share of the copy", goal, |least| {
            share.is_some_and(|share| share.0 >= least)
        });
    }

    /// The time of one layer's share of the launches, or of all where there is one a pass.
    fn time(
        &self,
        kind: &str,
        launches: Vec<Launch>,
        device: &mut Watched,
    ) -> Result<Timing, Box<dyn Error>> {
        if launches.is_empty() {
            return Err(format!("a pass has no {kind}").into());
        }
        let timing = Timing::of_kernel(kind, launches, self.machine.is_emulated(), device)?;
        let is_of_layers = kind::LAYER.contains(&kind);
        Ok(timing.of_each(if is_of_layers { self.manifest().model.num_layers } else { 1 }))
    }

    /// Writes the tables of a pass; gives its launches by kind.
    fn launches(
        &self,
        model: &Model,
        sight: &Sight,
        device: &mut Watched,
    ) -> Result<BTreeMap<String, Vec<Launch>>, Box<dyn Error>> {
        let pass = write_tables(model, sight, self.manifest().model.vocab_size, device)?;
        let mut by_kind = BTreeMap::<String, Vec<Launch>>::new();
        for op in model.pass(&pass) {
            // Run once, each kernel finds what the one before it makes, and not zeros.
            device.issue(&op)?;
            let launch = op.as_launch().expect("products of few rows are kernels").clone();
            let variant = device.watch().variant(launch.kernel);
            by_kind.entry(kind::of(&variant, self.manifest())).or_default().push(launch);
        }
        Ok(by_kind)
    }
}

/// Random keys and values in the memory that the model allocated last.
fn fill_cache(
    manifest: &Manifest,
    num_pages: usize,
    device: &mut Watched,
) -> Result<(), Box<dyn Error>> {
    let (cache, bytes) = device.watch().last_alloc();
    let expected = num_pages * page_bytes(&manifest.model, &manifest.precision, &manifest.device);
    if bytes != expected {
        return Err(format!("the last memory has {bytes} bytes, a cache {expected}").into());
    }
    let block: Vec<u8> = match manifest.precision.kv {
        Dtype::Fp8 => random_e4m3(4 << 20),
        _ => random_halves(2 << 20, 1.0),
    };
    for offset in (0..bytes).step_by(block.len()) {
        let len = block.len().min(bytes - offset);
        device.write(cache + offset as Address, &block[..len])?;
    }
    Ok(())
}

/// The last rows of sequences of which each has pages of its own.
fn write_tables(
    model: &Model,
    sight: &Sight,
    vocab_size: usize,
    device: &mut dyn Device,
) -> spec_core::Result<Pass> {
    let Sight { sequences, rows, context } = *sight;
    let config = model.config();
    let group = config.num_heads / config.num_kv_heads;
    let tiling = Tiling::of(sequences, rows, group);
    let tile_rows = tiling.rows(group);
    let max_pages = context.div_ceil(PAGE_TOKENS);
    let (mut all, mut tiles) = (Vec::new(), Vec::new());
    for sequence in 0..sequences {
        for first in (0..rows).step_by(tile_rows) {
            let num_rows = tile_rows.min(rows - first) as u32;
            let num_old = (context - rows) as u32;
            tiles.push(Tile { first_row: (all.len() + first) as u32, num_rows, num_old });
        }
        let row = |row: usize| {
            let token = (sequence * rows + row) * 7919 % vocab_size;
            Row::chain(token as u32, context - rows + row, sequence)
        };
        all.extend((0..rows).map(row));
    }
    let pages: Vec<u32> = (0..(sequences * max_pages) as u32).collect();
    let logit_rows: Vec<u32> = (0..all.len() as u32).collect();
    let work = model.workspace();
    device.write(work.rows, bytes_of(&all))?;
    device.write(work.tiles, bytes_of(&tiles))?;
    device.write(work.logit_rows, bytes_of(&logit_rows))?;
    device.write(work.pages, bytes_of(&pages))?;
    let (num_rows, num_tiles) = (all.len(), tiles.len());
    let pages = work.pages;
    Ok(Pass { num_rows, num_tiles, tiling, num_logits: num_rows, pages, max_pages })
}
