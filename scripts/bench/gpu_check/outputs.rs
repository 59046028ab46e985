//! What each kernel writes and of what kind, and whether two GPUs wrote the same: bit for bit what is counted or chosen,
//! and numbers as near as the order of additions and the units' own roundings leave them.

use half::f16;
use spec_core::testing::cuda::model::many_params::{
    FinishParams, MultiplyParams, NormaliseParams, Operand, QuantiseParams, UnpackParams,
};
use spec_core::testing::cuda::model::params::{
    AttentionParams, EmbedParams, GemmParams, JoinParams, RopeParams, SpreadParams,
};
use spec_core::testing::cuda::step::params::{AcceptParams, RowsParams, SampleParams};
use std::mem::offset_of;

/// A word of an array of structs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Word {
    Count,
    Float,
    /// Undefined, or checked by what comes of it.
    Any,
}

/// What an array holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Structs of words.
    Words(&'static [Word]),
    Half,
    E4m3,
}

const COUNTS: Kind = Kind::Words(&[Word::Count]);
const FLOATS: Kind = Kind::Words(&[Word::Float]);
const SCRATCH: Kind = Kind::Words(&[Word::Any]);
const BESTS: Kind = Kind::Words(&[Word::Float, Word::Count]);
const DRAFTINGS: Kind = Kind::Words(&[Word::Count, Word::Count, Word::Float, Word::Any]);
const DISTRIBUTIONS: Kind = Kind::Words(&[Word::Any, Word::Any, Word::Count, Word::Any]);

/// An array that a kernel writes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Written {
    pub(crate) name: &'static str,
    /// Where its address is in the kernel's struct.
    pub(crate) at: usize,
    pub(crate) kind: Kind,
}

/// Name, place of the address, and kind.
type Array = (&'static str, usize, Kind);

/// What a variant writes, given the struct that it takes.
pub(crate) fn written(variant: &str, params: &[u8]) -> Vec<Written> {
    let kernel = variant.split('.').next().unwrap_or(variant);
    let arrays = of_pass(kernel, variant, params)
        .or_else(|| of_step(kernel))
        .or_else(|| of_many_rows(kernel, variant, params));
    let written = |(name, at, kind)| Written { name, at, kind };
    arrays.unwrap_or_default().into_iter().map(written).collect()
}

fn of_pass(kernel: &str, variant: &str, params: &[u8]) -> Option<Vec<Array>> {
    let epilogue = |name: &str| variant.contains(&format!(".EPILOGUE={name}"));
    let is_half = epilogue("QKV") || epilogue("SWIGLU");
    let rope_cache = if variant.contains(".KV=FP8") { Kind::E4m3 } else { Kind::Half };
    Some(match kernel {
        "embed" => vec![
            ("residual", offset_of!(EmbedParams, residual), FLOATS),
            ("squares", offset_of!(EmbedParams, squares), FLOATS),
        ],
        "gemm" => vec![
            ("output", offset_of!(GemmParams, output), if is_half { Kind::Half } else { FLOATS }),
            ("squares", offset_of!(GemmParams, squares), FLOATS),
            ("cache", offset_of!(GemmParams, cache), format(params, offset_of!(GemmParams, kv))),
            ("best", offset_of!(GemmParams, best), BESTS),
            ("partials", offset_of!(GemmParams, partials), SCRATCH),
            ("arrivals", offset_of!(GemmParams, arrivals), COUNTS),
        ],
        "rope" => vec![
            ("queries", offset_of!(RopeParams, queries), Kind::Half),
            ("cache", offset_of!(RopeParams, cache), rope_cache),
        ],
        "join" => vec![
            ("joined", offset_of!(JoinParams, joined), Kind::Half),
            ("kept", offset_of!(JoinParams, kept), FLOATS),
            ("cleared", offset_of!(JoinParams, cleared), FLOATS),
        ],
        "spread" => vec![
            ("output", offset_of!(SpreadParams, output), FLOATS),
            ("best", offset_of!(SpreadParams, best), BESTS),
        ],
        "attention" => vec![
            ("output", offset_of!(AttentionParams, output), Kind::Half),
            ("partials", offset_of!(AttentionParams, partials), SCRATCH),
            ("arrivals", offset_of!(AttentionParams, arrivals), COUNTS),
        ],
        _ => return None,
    })
}

fn of_step(kernel: &str) -> Option<Vec<Array>> {
    Some(match kernel {
        "rows" => vec![
            ("rows", offset_of!(RowsParams, rows), COUNTS),
            ("tiles", offset_of!(RowsParams, tiles), COUNTS),
            ("head_rows", offset_of!(RowsParams, head_rows), COUNTS),
            ("drafting", offset_of!(RowsParams, drafting), DRAFTINGS),
        ],
        "sample" => vec![
            ("scores", offset_of!(SampleParams, scores), SCRATCH),
            ("draft_weights", offset_of!(SampleParams, draft_weights), FLOATS),
            ("draft_distributions", offset_of!(SampleParams, draft_distributions), DISTRIBUTIONS),
            ("target_weights", offset_of!(SampleParams, target_weights), SCRATCH),
            ("drafting", offset_of!(SampleParams, drafting), DRAFTINGS),
            ("drafts", offset_of!(SampleParams, drafts), COUNTS),
            ("choices", offset_of!(SampleParams, choices), COUNTS),
            ("parts", offset_of!(SampleParams, parts), SCRATCH),
        ],
        "accept" => vec![
            ("sequences", offset_of!(AcceptParams, sequences), COUNTS),
            ("last_tokens", offset_of!(AcceptParams, last_tokens), COUNTS),
            ("drafting", offset_of!(AcceptParams, drafting), DRAFTINGS),
            ("step", offset_of!(AcceptParams, step), COUNTS),
            ("answers", offset_of!(AcceptParams, answers), COUNTS),
        ],
        _ => return None,
    })
}

fn of_many_rows(kernel: &str, variant: &str, params: &[u8]) -> Option<Vec<Array>> {
    let operand = |at: usize| {
        let values = format(params, at + offset_of!(Operand, format));
        [("output", at, values), ("scales", at + offset_of!(Operand, scales), FLOATS)]
    };
    let unpacked = format(params, offset_of!(UnpackParams, format));
    Some(match kernel {
        "multiply" => {
            let is_half = variant.contains(".EPILOGUE=SWIGLU");
            let output = if is_half { Kind::Half } else { FLOATS };
            vec![
                ("output", offset_of!(MultiplyParams, output), output),
                ("squares", offset_of!(MultiplyParams, squares), FLOATS),
            ]
        }
        "unpack" => vec![("output", offset_of!(UnpackParams, output), unpacked)],
        "normalise" => operand(offset_of!(NormaliseParams, output)).into(),
        "quantise" => operand(offset_of!(QuantiseParams, output)).into(),
        "finish" => {
            let [output, scales] = operand(offset_of!(FinishParams, output));
            let residual = ("residual", offset_of!(FinishParams, residual), FLOATS);
            vec![output, scales, residual, ("squares", offset_of!(FinishParams, squares), FLOATS)]
        }
        _ => return None,
    })
}

/// The kind of number whose code is at this byte of a struct.
fn format(params: &[u8], at: usize) -> Kind {
    let word = params.get(at..at + 4).and_then(|bytes| bytes.try_into().ok());
    if word.map(u32::from_le_bytes) == Some(1) { Kind::E4m3 } else { Kind::Half }
}

/// Of the largest number thereabouts: sums of thousands of products in another order, rounded to f32.
const FLOAT_TOLERANCE: f32 = 1e-3;
/// A few steps of 11 bits.
const HALF_TOLERANCE: f32 = 4e-3;
/// One step of 4 bits.
const E4M3_TOLERANCE: f32 = 0.13;

/// How far numbers are apart.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Distance {
    /// The largest difference as a share of the largest number among those that differ and their neighbours.
    pub(crate) share: f32,
    /// Of that difference: the element, what was found and what was expected.
    at: (usize, f32, f32),
    differing: usize,
}

/// Bytes of neighbours on each side: a lone number that differs may be a small one of large ones.
const NEIGHBOURS: usize = 256;
/// What every kind of element and of struct is a part of.
const PERIOD: usize = 16;

/// Compares an array of a kind; what is wrong is the error.
pub(crate) fn compare(kind: Kind, found: &[u8], expected: &[u8]) -> Result<Distance, String> {
    let differs = |(a, b)| a != b;
    let Some(first) = found.iter().zip(expected).position(differs) else {
        return Ok(Distance::default());
    };
    let last = found.iter().zip(expected).rposition(differs).unwrap_or(first);
    let first = first.saturating_sub(NEIGHBOURS) / PERIOD * PERIOD;
    let end = (last + 1 + NEIGHBOURS).next_multiple_of(PERIOD).min(found.len());
    compare_from(first, kind, &found[first..end], &expected[first..end])
}

/// Compares the part of an array that begins with this byte.
fn compare_from(
    first: usize,
    kind: Kind,
    found: &[u8],
    expected: &[u8],
) -> Result<Distance, String> {
    let (distance, tolerance) = match kind {
        Kind::Words(words) => {
            let (found, expected) = (words_of(found), words_of(expected));
            let pairs = || found.iter().copied().zip(expected.iter().copied()).enumerate();
            let is = |idx: usize, word| words[idx % words.len()] == word;
            if let Some((idx, (a, b))) = pairs().find(|&(i, (a, b))| is(i, Word::Count) && a != b) {
                let idx = first / 4 + idx;
                return Err(format!("word {idx} is {a:#x}, expected {b:#x}"));
            }
            let floats = pairs().filter(|&(idx, _)| is(idx, Word::Float));
            let float = |(idx, (a, b))| (idx, f32::from_bits(a), f32::from_bits(b));
            (distance(first / 4, floats.map(float)), FLOAT_TOLERANCE)
        }
        Kind::Half => {
            let (found, expected) = (found.as_chunks::<2>().0, expected.as_chunks::<2>().0);
            let half = |bytes: &[u8; 2]| f16::from_le_bytes(*bytes).to_f32();
            let pairs = found.iter().map(half).zip(expected.iter().map(half));
            let pairs = pairs.enumerate().map(|(idx, (a, b))| (idx, a, b));
            (distance(first / 2, pairs), HALF_TOLERANCE)
        }
        Kind::E4m3 => {
            let pairs = found.iter().map(|&a| e4m3(a)).zip(expected.iter().map(|&b| e4m3(b)));
            let pairs = pairs.enumerate().map(|(idx, (a, b))| (idx, a, b));
            (distance(first, pairs), E4M3_TOLERANCE)
        }
    };
    if distance.share <= tolerance {
        return Ok(distance);
    }
    let Distance { share, at: (idx, a, b), differing } = distance;
    Err(format!(
        "element {idx} is {a}, expected {b}: off by {share:.1e} of the largest, {tolerance} is allowed; {differing} differ"
    ))
}

/// Of elements with their indices, which count from `first` on.
fn distance(first: usize, pairs: impl Iterator<Item = (usize, f32, f32)>) -> Distance {
    let (mut all, mut largest) = (Distance::default(), 0f32);
    let mut differ = Vec::new();
    for (idx, a, b) in pairs {
        if b.is_finite() {
            largest = largest.max(b.abs());
        }
        if a.to_bits() != b.to_bits() {
            differ.push((first + idx, a, b));
        }
    }
    all.differing = differ.len();
    for (idx, a, b) in differ {
        // What is not a number is as far off as can be, and a zero may have any sign.
        let share = if a == b { 0.0 } else { (a - b).abs() / largest };
        let share = if share.is_nan() { f32::INFINITY } else { share };
        if share > all.share {
            (all.share, all.at) = (share, (idx, a, b));
        }
    }
    all
}

fn words_of(bytes: &[u8]) -> Vec<u32> {
    bytes.as_chunks::<4>().0.iter().map(|&word| u32::from_le_bytes(word)).collect()
}

fn e4m3(code: u8) -> f32 {
    let sign = if code & 0x80 == 0 { 1.0 } else { -1.0 };
    let (exponent, mantissa) = (i32::from(code >> 3 & 15), f32::from(code & 7));
    match (exponent, code & 7) {
        (15, 7) => f32::NAN,
        (0, _) => sign * mantissa * 2f32.powi(-9),
        _ => sign * (8.0 + mantissa) * 2f32.powi(exponent - 10),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn floats(values: &[f32]) -> Vec<u8> {
        values.iter().flat_map(|value| value.to_le_bytes()).collect()
    }

    #[test]
    fn numbers_may_be_near_and_counts_may_not() {
        let expected = floats(&[1.0, 100.0, 0.0]);
        let near = floats(&[1.01, 100.05, -0.0]);
        assert!(compare(FLOATS, &near, &expected).unwrap().share > 4e-4);
        let error = compare(FLOATS, &floats(&[1.5, 100.05, 0.0]), &expected).unwrap_err();
        assert!(error.starts_with("element 0 is 1.5, expected 1:"), "{error}");
        assert!(compare(FLOATS, &floats(&[f32::NAN, 100.0, 0.0]), &expected).is_err());
        assert!(compare(COUNTS, &near, &expected).unwrap_err().starts_with("word 0 is 0x3f81"));
        assert!(compare(SCRATCH, &floats(&[7.0, 8.0, 9.0]), &expected).is_ok());
        let best = |value: f32, idx: u32| [value.to_le_bytes(), idx.to_le_bytes()].concat();
        assert!(compare(BESTS, &best(2.0001, 4), &best(2.0, 4)).is_ok());
        assert!(compare(BESTS, &best(2.0, 5), &best(2.0, 4)).is_err());
    }

    #[test]
    fn a_small_number_may_differ_as_its_neighbours_do_and_is_told_by_its_index() {
        let mut expected = vec![3.0; 1000];
        expected[700] = 1e-4;
        let mut found = expected.clone();
        found[700] = 3e-4;
        assert!(compare(FLOATS, &floats(&found), &floats(&expected)).is_ok());
        found[700] = 0.1;
        let error = compare(FLOATS, &floats(&found), &floats(&expected)).unwrap_err();
        assert!(error.starts_with("element 700 is 0.1, expected 0.0001:"), "{error}");
        let error = compare(COUNTS, &floats(&found), &floats(&expected)).unwrap_err();
        assert!(error.starts_with("word 700 is "), "{error}");
    }

    #[test]
    fn steps_of_narrow_numbers_are_as_wide_as_they_are() {
        assert_eq!([0x38, 0xb8, 0x7e, 0x01].map(e4m3), [1.0, -1.0, 448.0, 2f32.powi(-9)]);
        assert!(e4m3(0x7f).is_nan());
        assert!(compare(Kind::E4m3, &[0x39], &[0x38]).is_ok());
        assert!(compare(Kind::E4m3, &[0x3a], &[0x38]).is_err());
        let half = |value: f32| f16::from_f32(value).to_le_bytes();
        assert!(compare(Kind::Half, &half(1.001), &half(1.0)).is_ok());
        assert!(compare(Kind::Half, &half(1.01), &half(1.0)).is_err());
    }
}
