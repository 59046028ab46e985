//! Logits of whole models: near those of the CPU executor at every position, and the same bits however the rows are
//! spread over passes, whatever runs beside them, and in every run.

use crate::case::{self, Case, Pair, tokens};
use crate::common::golden;
use crate::gpu::Bed;
use crate::launches;
use crate::prefill;
use crate::report::{Outcome, Report, Verdict};
use spec_core::engine::Engine;
use spec_core::model::Dtype;
use spec_core::runtime::{PAGE_TOKENS, Prefill};
use spec_core::testing::PageId;
use spec_core::testing::batch::{Forward, Logits, Segment};
use spec_core::testing::cuda::device::Device;
use spec_core::testing::cuda::{Gpu, Model, OnHost};
use std::cell::LazyCell;
use std::sync::Arc;

/// Logits of the tiny models have a standard deviation of 1.5. With fp16 weights the CPU executor's activations stay
/// f32, those of the kernels have 11 bits.
const FP16_TOLERANCE: f32 = 0.02;
/// With fp8 weights the CPU executor's activations are bf16, with 8 bits: most of the difference is its own.
const FP8_TOLERANCE: f32 = 0.08;
/// Keys and values that differ in the last of their bits before rounding may be a whole step of e4m3 apart, a sixteenth
/// of their size.
const FP8_KV_TOLERANCE: f32 = 0.2;
/// The root of the mean square of all differences is that far below what the worst of thousands may be.
const MEAN_SHARE: f64 = 0.25;

/// Where blocks' rows are multiplied in e4m3 too, with 4 bits, each of a few products a layer adds its share.
const FP8_ROWS_TOLERANCE: f32 = 0.5;

/// So many tokens of a prompt are computed in blocks; fewer behind them are not.
const LONG: usize = 300;

/// Passes in which a wrong kernel is looked for: an emulator takes seconds for each.
const FEW_ROWS: [usize; 2] = [2, 1];

/// Sequences that run beside each other.
const BATCH: usize = 5;

/// Checks all cases.
pub(crate) fn run(report: &mut Report, bed: Bed) {
    for case in &case::all(bed.small) {
        let name = case.name();
        // Built by the first check that runs.
        let pair = LazyCell::new(|| Pair::build(case, bed.arch));
        let against = format!("logits against the CPU executor: {name}");
        report.check(&against, |_| near_the_cpu(&pair, case, bed));
        report.check(&format!("bits of a row, any passes: {name}"), |_| {
            the_same_in_any_passes(&pair.cuda, bed)
        });
        report.check(&format!("bits of a row, beside others: {name}"), |_| {
            the_same_beside_others(&pair.cuda, bed)
        });
        report.check(&format!("bits of two runs: {name}"), |_| the_same_again(&pair.cuda, bed));
        for (way, called) in prefill::BLOCKS {
            report.check(&format!("logits of a prompt by {called}: {name}"), |_| {
                near_the_cpu_in_blocks(&pair, case, way, bed)
            });
            report.check(&format!("bits of a row by {called}, any passes: {name}"), |_| {
                the_same_in_any_passes_of_blocks(&pair.cuda, way, bed)
            });
        }
        if report.has_failed(&against) {
            report.check_within(
                launches::LIMIT,
                &format!("launches behind those logits: {name}"),
                |_| launches::passes(&pair.cuda, bed, Prefill::Exact, &FEW_ROWS),
            );
        }
    }
}

fn length(bed: Bed) -> usize {
    if bed.small { 45 } else { 300 }
}

fn tolerance(case: &Case) -> f32 {
    match (case.dtype, case.kv) {
        (_, Dtype::Fp8) => FP8_KV_TOLERANCE,
        (Dtype::Fp8, _) => FP8_TOLERANCE,
        _ => FP16_TOLERANCE,
    }
}

fn near_the_cpu(pair: &Pair, case: &Case, bed: Bed) -> Outcome {
    let tokens = tokens(length(bed));
    let expected = by_the_cpu(pair, &tokens);
    let mut distance = Distance::default();
    for parts in [&splits(tokens.len())[0], &splits(tokens.len())[2]] {
        distance.add(&in_parts(&pair.cuda, bed, &tokens, parts)?, &expected);
    }
    distance.verdict(tolerance(case))
}

/// A block and rows behind it, twice.
fn near_the_cpu_in_blocks(pair: &Pair, case: &Case, way: Prefill, bed: Bed) -> Outcome {
    if let Some(missing) = prefill::missing(way, bed.machine) {
        return Ok(Verdict::Skipped(missing));
    }
    let tokens = tokens(LONG + length(bed));
    let parts = [LONG, length(bed)];
    let run = || in_parts_by(&pair.cuda, bed, way, &tokens, &parts);
    let found = run()?;
    same(&run()?, &found, "the second run")?;
    let mut distance = Distance::default();
    distance.add(&found, &by_the_cpu(pair, &tokens));
    let is_fp8 = case.dtype == Dtype::Fp8;
    distance.verdict(if is_fp8 { FP8_ROWS_TOLERANCE } else { tolerance(case) })
}

fn by_the_cpu(pair: &Pair, tokens: &[u32]) -> Logits {
    golden::all_logits(&mut golden::model(&pair.cpu, tokens.len().div_ceil(PAGE_TOKENS)), tokens)
}

/// How far logits are from those of the CPU executor.
#[derive(Default)]
struct Distance {
    worst: f32,
    /// Row of the worst.
    position: usize,
    squares: f64,
    count: usize,
    positions: usize,
}

impl Distance {
    fn add(&mut self, found: &[Vec<f32>], expected: &Logits) {
        for (position, row) in found.iter().enumerate() {
            for (a, b) in row.iter().zip(expected.row(position)) {
                let off = (a - b).abs();
                // What is not a number is as far off as can be.
                let off = if off.is_nan() { f32::INFINITY } else { off };
                if off > self.worst {
                    (self.worst, self.position) = (off, position);
                }
                self.squares += f64::from(off).powi(2);
            }
            self.count += row.len();
            self.positions += 1;
        }
    }

    fn verdict(&self, tolerance: f32) -> Outcome {
        let Self { worst, position, positions, .. } = *self;
        let mean = (self.squares / self.count as f64).sqrt();
        let allowed = f64::from(tolerance) * MEAN_SHARE;
        let text = format!(
            "{positions} rows off by {worst:.4} at most (position {position}), of {tolerance}, by {mean:.4} of \
             {allowed:.4} on average"
        );
        if worst > tolerance || mean > allowed {
            Err(text.into())
        } else {
            Ok(Verdict::Passed(text))
        }
    }
}

/// Ways to spread rows over passes: all at once, one by one, and uneven ones.
fn splits(len: usize) -> Vec<Vec<usize>> {
    let of = |pattern: &[usize]| {
        let mut parts = Vec::new();
        let mut left = len;
        for &part in pattern.iter().cycle() {
            if left == 0 {
                break;
            }
            parts.push(part.min(left));
            left -= part.min(left);
        }
        parts
    };
    vec![of(&[len]), of(&[1]), of(&[7, 9, 1, 28]), of(&[33, 12])]
}

fn the_same_in_any_passes(engine: &Engine, bed: Bed) -> Outcome {
    let tokens = tokens(length(bed));
    let splits = splits(tokens.len());
    let whole = in_parts(engine, bed, &tokens, &splits[0])?;
    for parts in &splits[1..] {
        same(&in_parts(engine, bed, &tokens, parts)?, &whole, &format!("passes of {parts:?}"))?;
    }
    Ok(Verdict::Passed(format!("{} rows, {} ways", tokens.len(), splits.len())))
}

/// The tokens of sequence `idx` of a batch.
fn sequence(idx: usize, bed: Bed) -> Vec<u32> {
    tokens(9 + 7 * idx + length(bed) / 8).split_off(idx)
}

/// A row of a block has its bits from its place there, and those behind it too.
fn the_same_in_any_passes_of_blocks(engine: &Engine, way: Prefill, bed: Bed) -> Outcome {
    if let Some(missing) = prefill::missing(way, bed.machine) {
        return Ok(Verdict::Skipped(missing));
    }
    let tokens = tokens(LONG + length(bed));
    let run = |parts: &[usize]| in_parts_by(engine, bed, way, &tokens, parts);
    let whole = run(&[LONG, length(bed)])?;
    for cut in [1, 50, 129] {
        let parts = [cut, LONG - cut, length(bed)];
        same(&run(&parts)?, &whole, &format!("passes of {parts:?}"))?;
    }
    Ok(Verdict::Passed(format!("{} rows in 4 ways", tokens.len())))
}

fn the_same_beside_others(engine: &Engine, bed: Bed) -> Outcome {
    let sequences: Vec<Vec<u32>> = (0..BATCH).map(|idx| sequence(idx, bed)).collect();
    let most_pages = sequences.iter().map(|tokens| tokens.len().div_ceil(PAGE_TOKENS)).max();
    let most_pages = most_pages.unwrap_or(0);
    let pages: Vec<Vec<PageId>> = (0..BATCH)
        .map(|idx| (0..most_pages).map(|page| (page * BATCH + idx) as PageId).collect())
        .collect();
    let segments: Vec<Segment<'_>> = sequences
        .iter()
        .zip(&pages)
        .map(|(tokens, pages)| Segment {
            tokens,
            first_position: 0,
            pages,
            prompt_len: 0,
            num_logits: tokens.len(),
            tree: &[],
        })
        .collect();
    let device = Box::new(bed.machine.open()?);
    let mut model = load(engine, device, Prefill::Exact, most_pages * BATCH)?;
    let together = rows(&model.forward(&segments)?);
    let mut first = 0;
    for (idx, tokens) in sequences.iter().enumerate() {
        let alone = in_parts(engine, bed, tokens, &[tokens.len()])?;
        same(&together[first..first + tokens.len()], &alone, &format!("sequence {idx}"))?;
        first += tokens.len();
    }
    Ok(Verdict::Passed(format!("{first} rows of {BATCH} sequences")))
}

fn the_same_again(engine: &Engine, bed: Bed) -> Outcome {
    let tokens = tokens(length(bed));
    let once = in_parts(engine, bed, &tokens, &[tokens.len()])?;
    let again = in_parts(engine, bed, &tokens, &[tokens.len()])?;
    same(&again, &once, "the second run")?;
    Ok(Verdict::Passed(format!("{} rows", tokens.len())))
}

fn same(found: &[Vec<f32>], expected: &[Vec<f32>], what: &str) -> Result<(), String> {
    if found.len() != expected.len() {
        return Err(format!("{what}: {} rows, expected {}", found.len(), expected.len()));
    }
    for (row, (found, expected)) in found.iter().zip(expected).enumerate() {
        let mut pairs = found.iter().zip(expected).enumerate();
        if let Some((idx, (a, b))) = pairs.find(|(_, (a, b))| a.to_bits() != b.to_bits()) {
            return Err(format!("{what}: logit {idx} of row {row} is {a}, expected {b}"));
        }
    }
    Ok(())
}

fn load(
    engine: &Engine,
    device: Box<dyn Device>,
    prefill: Prefill,
    num_pages: usize,
) -> spec_core::Result<OnHost> {
    let gpu = Gpu::new(device);
    let model = Model::load_with(engine, num_pages, prefill, &mut **gpu.lock())?;
    Ok(OnHost::new(Arc::new(model), gpu))
}

fn in_parts(
    engine: &Engine,
    bed: Bed,
    tokens: &[u32],
    parts: &[usize],
) -> spec_core::Result<Vec<Vec<f32>>> {
    in_parts_by(engine, bed, Prefill::Exact, tokens, parts)
}

/// Logits of all rows of a fresh model, computed in parts; pages in descending order.
fn in_parts_by(
    engine: &Engine,
    bed: Bed,
    prefill: Prefill,
    tokens: &[u32],
    parts: &[usize],
) -> spec_core::Result<Vec<Vec<f32>>> {
    on(Box::new(bed.machine.open()?), engine, prefill, tokens, parts)
}

/// The same on a device. The prompt ends behind [`LONG`] tokens.
pub(crate) fn on(
    device: Box<dyn Device>,
    engine: &Engine,
    prefill: Prefill,
    tokens: &[u32],
    parts: &[usize],
) -> spec_core::Result<Vec<Vec<f32>>> {
    let num_pages = tokens.len().div_ceil(PAGE_TOKENS);
    let mut model = load(engine, device, prefill, num_pages)?;
    let pages: Vec<PageId> = (0..num_pages as PageId).rev().collect();
    let (mut first, mut found) = (0, Vec::new());
    for &len in parts {
        let tokens = &tokens[first..first + len];
        let segment = Segment {
            tokens,
            first_position: first,
            pages: &pages,
            prompt_len: LONG + 1,
            num_logits: len,
            tree: &[],
        };
        found.extend(rows(&model.forward(&[segment])?));
        first += len;
    }
    Ok(found)
}

fn rows(logits: &Logits) -> Vec<Vec<f32>> {
    logits.values.chunks_exact(logits.vocab_size).map(<[f32]>::to_vec).collect()
}
