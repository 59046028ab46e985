//! How fast prompts are computed: by the few-row products alone, and in blocks, which kernels multiply or a library does.

use crate::gpu::Machine;
use crate::kind;
use crate::noise::random_words;
use crate::random_engine::Model as Shape;
use crate::report::Report;
use crate::timing::{Timing, rounded};
use serde_json::json;
use spec_core::engine::Engine;
use spec_core::runtime::{PAGE_TOKENS, Prefill};
use spec_core::testing::PageId;
use spec_core::testing::batch::Segment;
use spec_core::testing::cuda::Model;
use spec_core::testing::cuda::device::Device;
use std::error::Error;
use std::time::Instant;

/// Rows of a prompt, on a GPU and on an emulator.
const ROWS: usize = 2048;
const FEW_ROWS: usize = 300;
/// Measurements behind a median.
const SAMPLES: usize = 5;

/// All ways, by the names of the serving parameter.
const WAYS: [(Prefill, &str); 3] = [(Prefill::Exact, "exact"), BLOCKS[0], BLOCKS[1]];

/// Those in blocks.
pub(crate) const BLOCKS: [(Prefill, &str); 2] =
    [(Prefill::Blocks, "blocks"), (Prefill::CublasLt, "cublaslt")];

/// What a way lacks here, if it lacks anything.
pub(crate) fn missing(prefill: Prefill, machine: Machine) -> Option<String> {
    match prefill {
        Prefill::Exact => None,
        Prefill::Blocks => match machine.open() {
            Ok(device) if device.describe().capability == (9, 0) => None,
            Ok(_) => Some("kernels multiply blocks on compute capability 9.0".into()),
            Err(error) => Some(error.to_string()),
        },
        Prefill::CublasLt if machine == Machine::EmulatedDriver => {
            Some("the library would ask the emulated driver for more than it has".into())
        }
        Prefill::CublasLt => {
            let enabled = machine.open().and_then(|mut device| device.enable_products(&[]));
            enabled.err().map(|error| error.to_string())
        }
    }
}

/// Times a prompt in all ways that are there; gives how many figures went into the report.
pub(crate) fn run(
    engine: &Engine,
    shape: &Shape,
    machine: Machine,
    report: &mut Report,
) -> Result<usize, Box<dyn Error>> {
    let before = report.count("prefill");
    for (prefill, way) in WAYS {
        if missing(prefill, machine).is_some() {
            continue;
        }
        let num_rows = if machine.is_emulated() { FEW_ROWS } else { ROWS };
        let timing = time(engine, prefill, num_rows, machine)?;
        let manifest = engine.manifest();
        let weights = manifest.model.num_layers
            * kind::LAYER.into_iter().map(|kind| kind::weights(kind, manifest)).sum::<usize>();
        let flops = 2.0 * weights as f64 * num_rows as f64;
        let us = timing.median();
        let entry = json!({
            "model": shape.name(), "way": way, "rows": num_rows, "time": timing.json(),
            "tokens_per_s": rounded(num_rows as f64 / us * 1e6),
            "tflops": rounded(flops / us / 1e6),
        });
        report.push("prefill", entry);
    }
    Ok(report.count("prefill") - before)
}

fn time(
    engine: &Engine,
    prefill: Prefill,
    num_rows: usize,
    machine: Machine,
) -> Result<Timing, Box<dyn Error>> {
    let mut device = machine.open()?;
    let num_pages = num_rows.div_ceil(PAGE_TOKENS);
    let model = Model::load_with(engine, num_pages, prefill, &mut device)?;
    let pages: Vec<PageId> = (0..num_pages as PageId).collect();
    let vocab_size = model.config().vocab_size as u32;
    let tokens: Vec<u32> = random_words(num_rows).iter().map(|word| word % vocab_size).collect();
    let segment = Segment {
        tokens: &tokens,
        first_position: 0,
        pages: &pages,
        prompt_len: num_rows,
        num_logits: 0,
        tree: &[],
    };
    let mut run = || -> spec_core::Result<f64> {
        let start = Instant::now();
        model.run_without_logits(&[segment], &mut device)?;
        device.wait()?;
        Ok(start.elapsed().as_secs_f64() * 1e6)
    };
    // Loads the library's code.
    run()?;
    let samples = if machine.is_emulated() { 1 } else { SAMPLES };
    Ok(Timing::new((0..samples).map(|_| run()).collect::<spec_core::Result<_>>()?, 1))
}
