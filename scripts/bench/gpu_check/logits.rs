//! Logits of whole models: near those of the CPU executor at every position, and the same bits however the rows are
//! spread over passes, whatever runs beside them, and in every run.

use crate::case::{self, Case, Pair, tokens};
use crate::common::golden;
use crate::gpu::Bed;
use crate::report::{Outcome, Report, Verdict};
use spec_core::batch::{Forward, Logits, Segment};
use spec_core::engine::Engine;
use spec_core::exec::cuda::{Gpu, Model, OnHost};
use spec_core::model::Dtype;
use spec_core::pages::{PAGE_TOKENS, PageId};
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

/// Sequences that run beside each other.
const BATCH: usize = 5;

/// Checks all cases.
pub(crate) fn run(report: &mut Report, bed: Bed) {
    for case in &case::all(bed.small) {
        let name = case.name();
        let mut built = None;
        report.check(&format!("logits against the CPU executor: {name}"), |_| {
            let pair = built.insert(Pair::build(case, bed.arch));
            near_the_cpu(pair, case, bed)
        });
        let Some(pair) = &built else { continue };
        report.check(&format!("bits of a row, any passes: {name}"), |_| {
            the_same_in_any_passes(&pair.cuda, bed)
        });
        report.check(&format!("bits of a row, beside others: {name}"), |_| {
            the_same_beside_others(&pair.cuda, bed)
        });
        report.check(&format!("bits of two runs: {name}"), |_| the_same_again(&pair.cuda, bed));
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
    let num_pages = tokens.len().div_ceil(PAGE_TOKENS);
    let expected = golden::all_logits(&mut golden::model(&pair.cpu, num_pages), &tokens);
    let tolerance = tolerance(case);
    let (mut worst, mut squares, mut count) = (0f32, 0f64, 0usize);
    for parts in [splits(tokens.len())[0].clone(), splits(tokens.len())[2].clone()] {
        let found = in_parts(&pair.cuda, bed, &tokens, &parts)?;
        for (position, row) in found.iter().enumerate() {
            let pairs = row.iter().zip(expected.row(position));
            // NaN counts as far off.
            let off = pairs
                .map(|(a, b)| (a - b).abs())
                .fold(0.0, |most: f32, off| if off <= most { most } else { off });
            if off.is_nan() || off > tolerance {
                let message =
                    format!("position {position} is off by {off}, at most {tolerance}, {parts:?}");
                return Err(message.into());
            }
            worst = worst.max(off);
            let squared = |(a, b): (&f32, &f32)| f64::from(a - b).powi(2);
            squares += row.iter().zip(expected.row(position)).map(squared).sum::<f64>();
            count += row.len();
        }
    }
    let mean = (squares / count as f64).sqrt();
    let allowed = f64::from(tolerance) * MEAN_SHARE;
    if mean > allowed {
        return Err(format!("logits are off by {mean} on average, at most {allowed}").into());
    }
    let len = tokens.len();
    Ok(Verdict::Passed(format!(
        "{len} positions off by {worst:.4} at most, of {tolerance}, by {mean:.4} on average"
    )))
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
            num_logits: tokens.len(),
        })
        .collect();
    let mut model = load(engine, bed, most_pages * BATCH)?;
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

fn load(engine: &Engine, bed: Bed, num_pages: usize) -> spec_core::Result<OnHost> {
    let gpu = Gpu::new(Box::new(bed.machine.open()?));
    let model = Model::load(engine, num_pages, &mut **gpu.lock())?;
    Ok(OnHost::new(Arc::new(model), gpu))
}

/// Logits of all rows of a fresh model, computed in parts; pages in descending order.
fn in_parts(
    engine: &Engine,
    bed: Bed,
    tokens: &[u32],
    parts: &[usize],
) -> spec_core::Result<Vec<Vec<f32>>> {
    let num_pages = tokens.len().div_ceil(PAGE_TOKENS);
    let mut model = load(engine, bed, num_pages)?;
    let pages: Vec<PageId> = (0..num_pages as PageId).rev().collect();
    let (mut first, mut found) = (0, Vec::new());
    for &len in parts {
        let tokens = &tokens[first..first + len];
        let segment = Segment { tokens, first_position: first, pages: &pages, num_logits: len };
        found.extend(rows(&model.forward(&[segment])?));
        first += len;
    }
    Ok(found)
}

fn rows(logits: &Logits) -> Vec<Vec<f32>> {
    logits.values.chunks_exact(logits.vocab_size).map(<[f32]>::to_vec).collect()
}
