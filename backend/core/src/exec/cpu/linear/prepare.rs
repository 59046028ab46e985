//! Activations in the form that the kernels broadcast: rounded or quantised once for all products that
//! they enter.
#![allow(unsafe_code)]

use super::kernel;
use crate::exec::cpu::isa::Level;
use crate::exec::cpu::{Isa, Pool};
use crate::model::Dtype;
use crate::model::panel::{bf16_bits, round_i8};

/// Below this many values a region of the pool costs more than it saves.
const PARALLEL: usize = 16 << 10;

/// What a word of prepared activations holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Form {
    /// One f32 as it was.
    F32,
    /// One f32, rounded to bfloat16.
    RoundedF32,
    /// Two bfloat16.
    Bf16Pair,
    /// Four signed bytes.
    Int8Quad,
}

impl Form {
    fn of(isa: Isa, dtype: Dtype) -> Self {
        match (dtype, isa.level()) {
            (Dtype::Fp32 | Dtype::Fp16, _) => Form::F32,
            (Dtype::Bf16 | Dtype::Fp8, Level::Avx512) => Form::Bf16Pair,
            (Dtype::Bf16 | Dtype::Fp8, _) => Form::RoundedF32,
            (Dtype::Int8, _) => Form::Int8Quad,
        }
    }

    /// Words from a row of `k` values to the next: whole quads of k for any format, two words for the scale and the
    /// sum, and an odd number of cache lines, so that the rows of a block do not fall into one cache set.
    fn stride(self, k: usize) -> usize {
        16 * ((k.next_multiple_of(4) / self.len() + 2).div_ceil(16) | 1)
    }

    /// Values in a word.
    fn len(self) -> usize {
        match self {
            Form::F32 | Form::RoundedF32 => 1,
            Form::Bf16Pair => 2,
            Form::Int8Quad => 4,
        }
    }
}

/// Prepared rows; keep one for reuse. What is prepared for fp32 serves fp16 and the reverse, likewise bf16
/// and fp8.
#[derive(Debug)]
pub struct Prepared {
    form: Form,
    rows: usize,
    k: usize,
    stride: usize,
    /// `[rows][stride]`: the row's words, k padded with zeros; for int8 the last two are the row's scale
    /// and the sum of its quantised values.
    words: Vec<u32>,
}

impl Default for Prepared {
    fn default() -> Self {
        Self { form: Form::F32, rows: 0, k: 0, stride: 0, words: Vec::new() }
    }
}

/// Prepares `x`, `[rows][k]`, for products with weights of `dtype`. Int8: each row is quantised
/// symmetrically by its own largest magnitude; a row with an infinity or NaN gives NaN throughout.
pub fn prepare(
    isa: Isa,
    dtype: Dtype,
    x: &[f32],
    rows: usize,
    k: usize,
    out: &mut Prepared,
    pool: &Pool,
) {
    assert_eq!(x.len(), rows * k, "activations of {rows} rows of {k}");
    let form = Form::of(isa, dtype);
    let stride = form.stride(k);
    *out = Prepared { form, rows, k, stride, words: std::mem::take(&mut out.words) };
    out.words.resize(rows * out.stride, 0);
    let encode = kernel::encoder(isa);
    let encode = |row: usize, words: &mut [u32]| {
        // SAFETY: the encoder is of a level that the `Isa` vouches for.
        unsafe { encode(form, &x[row * k..(row + 1) * k], words) };
    };
    if x.len() < PARALLEL {
        out.words.chunks_exact_mut(out.stride).enumerate().for_each(|(row, w)| encode(row, w));
    } else {
        pool.for_each_chunk(&mut out.words, out.stride, encode);
    }
}

impl Prepared {
    /// With room for so many words: rows are prepared without moving it.
    pub fn with_capacity(words: usize) -> Self {
        Self { words: Vec::with_capacity(words), ..Self::default() }
    }

    /// Words that `rows` rows of `k` values take, prepared for `dtype`.
    pub fn num_words(isa: Isa, dtype: Dtype, rows: usize, k: usize) -> usize {
        rows * Form::of(isa, dtype).stride(k)
    }

    /// Panics unless the first `rows` rows can be multiplied by a `dtype` matrix of `k` inputs.
    pub(super) fn check(&self, isa: Isa, dtype: Dtype, k: usize, rows: usize) {
        let form = Form::of(isa, dtype);
        assert_eq!(self.form, form, "prepared for another format than {dtype} at {isa}");
        assert_eq!(self.k, k, "prepared rows of {}, weights of {k} inputs", self.k);
        assert!(rows <= self.rows, "{rows} rows of {}", self.rows);
    }

    pub(super) fn words(&self) -> &[u32] {
        &self.words
    }

    /// Words from a row to the next.
    pub(super) fn stride(&self) -> usize {
        self.stride
    }

    /// The scale of a quantised row and the sum of its values.
    pub(super) fn quantised(&self, row: usize) -> (f32, i32) {
        let last = (row + 1) * self.stride - 1;
        (f32::from_bits(self.words[last - 1]), self.words[last] as i32)
    }
}

/// Inlined into functions compiled for each level; the results are the same at all.
#[inline(always)]
pub(super) fn encode(form: Form, x: &[f32], words: &mut [u32]) {
    let used = x.len().div_ceil(form.len());
    words[used..].fill(0);
    match form {
        Form::F32 => words.iter_mut().zip(x).for_each(|(word, x)| *word = x.to_bits()),
        Form::RoundedF32 => {
            words.iter_mut().zip(x).for_each(|(word, x)| *word = bf16_bits(*x) << 16);
        }
        Form::Bf16Pair => {
            let (pairs, rest) = x.as_chunks::<2>();
            for (word, x) in words.iter_mut().zip(pairs) {
                *word = bf16_bits(x[0]) | bf16_bits(x[1]) << 16;
            }
            if let Some(last) = rest.first() {
                words[used - 1] = bf16_bits(*last);
            }
        }
        Form::Int8Quad => {
            let (scale, sum) = quantise(x, words);
            let last = words.len() - 1;
            words[last - 1] = scale.to_bits();
            words[last] = sum as u32;
        }
    }
}

/// Quantises a row and returns its scale and the sum of its quantised values.
#[inline(always)]
fn quantise(x: &[f32], words: &mut [u32]) -> (f32, i32) {
    let (largest, finite) = magnitude(x);
    let used = x.len().div_ceil(4);
    // A row too small to invert is zero for every purpose.
    if !finite || largest < 1e-30 {
        words[..used].fill(0);
        return (if finite { 0.0 } else { f32::NAN }, 0);
    }
    let inverse = 127.0 / largest;
    let code = |x: f32| round_i8(x * inverse);
    let (quads, rest) = x.as_chunks::<4>();
    let mut sum = 0;
    for (word, x) in words.iter_mut().zip(quads) {
        let codes = x.map(code);
        sum += codes.iter().map(|&c| i32::from(c)).sum::<i32>();
        *word = u32::from_le_bytes(codes.map(|c| c as u8));
    }
    if !rest.is_empty() {
        let mut codes = [0_i8; 4];
        codes.iter_mut().zip(rest).for_each(|(code_, x)| *code_ = code(*x));
        sum += codes.iter().map(|&c| i32::from(c)).sum::<i32>();
        words[used - 1] = u32::from_le_bytes(codes.map(|c| c as u8));
    }
    (largest / 127.0, sum)
}

/// The largest magnitude, and whether all values are finite.
#[inline(always)]
fn magnitude(x: &[f32]) -> (f32, bool) {
    // As integers magnitudes order like the numbers, with infinity and NaN on top.
    let largest = x.iter().fold(0, |max, x| max.max(x.to_bits() & 0x7fff_ffff));
    (f32::from_bits(largest), largest < f32::INFINITY.to_bits())
}
