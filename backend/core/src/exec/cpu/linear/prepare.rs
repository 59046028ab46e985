//! Activations in the form that the kernels broadcast: rounded or quantised once for all products that
//! they enter.
#![allow(unsafe_code)]

use super::blocks::block_words;
use super::kernel;
use crate::exec::cpu::isa::Level;
use crate::exec::cpu::{Isa, Pool};
use crate::model::Dtype;
use crate::model::panel::{BLOCK, bf16_bits, round_i8};

/// Below this many values a region of the pool costs more than it saves.
const PARALLEL: usize = 16 << 10;

/// Half of the power of two that fp8 weights lack where they are read as f32: a product of both is far from the ends of
/// f32's range.
pub(super) const FP8_SCALE_BITS: u32 = 60;

/// What a word of prepared activations holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Form {
    /// One f32 as it was.
    F32,
    /// One f32, rounded to bfloat16.
    RoundedF32,
    /// The same times 2^[`FP8_SCALE_BITS`].
    ScaledF32,
    /// Two bfloat16.
    Bf16Pair,
    /// Four signed bytes, and behind each block's words what `blocks` says.
    Int8Block,
    /// Two signed bytes as 16 bits each: of four the even ones, then the odd ones. Behind a block as above.
    Int8PairBlock,
}

impl Form {
    fn of(isa: Isa, dtype: Dtype) -> Self {
        match (dtype, isa.level()) {
            (Dtype::Fp32 | Dtype::Fp16, _) => Form::F32,
            (Dtype::Bf16 | Dtype::Fp8, Level::Avx512 | Level::Amx) => Form::Bf16Pair,
            (Dtype::Fp8, Level::Avx2 | Level::AvxVnni) => Form::ScaledF32,
            (Dtype::Bf16 | Dtype::Fp8, _) => Form::RoundedF32,
            (Dtype::Int8, Level::Avx2) => Form::Int8PairBlock,
            (Dtype::Int8 | Dtype::Int4, _) => Form::Int8Block,
        }
    }

    /// Words from a row of `k` values to the next: whole quads of k for any format, and an odd number of cache lines,
    /// so that the rows of a tile do not fall into one cache set.
    fn stride(self, k: usize) -> usize {
        let quads = k.div_ceil(4);
        let words = match self {
            Form::F32 | Form::RoundedF32 | Form::ScaledF32 => 4 * quads,
            Form::Bf16Pair => 2 * quads,
            Form::Int8Block => k.div_ceil(BLOCK) * block_words(1),
            Form::Int8PairBlock => k.div_ceil(BLOCK) * block_words(2),
        };
        LINE_WORDS * (words.div_ceil(LINE_WORDS) | 1)
    }
}

/// Words of a cache line.
const LINE_WORDS: usize = 16;

/// A cache line, which rows begin with: a register that is loaded from two takes twice as long.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(64))]
struct Line([u32; LINE_WORDS]);

/// Prepared rows; keep one for reuse. What is prepared for fp32 serves fp16 and the reverse.
#[derive(Debug)]
pub struct Prepared {
    form: Form,
    rows: usize,
    k: usize,
    stride: usize,
    /// `[rows][stride]` words: k padded with zeros.
    lines: Vec<Line>,
}

impl Default for Prepared {
    fn default() -> Self {
        Self { form: Form::F32, rows: 0, k: 0, stride: 0, lines: Vec::new() }
    }
}

/// Prepares `x`, `[rows][k]`, for products with weights of `dtype`. Int8 and int4: each block is quantised symmetrically
/// by its own largest magnitude; a row with an infinity or NaN gives NaN throughout.
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
    *out = Prepared { form, rows, k, stride, lines: std::mem::take(&mut out.lines) };
    let lines = stride / LINE_WORDS;
    out.lines.resize(rows * lines, Line([0; LINE_WORDS]));
    let encode = kernel::encoder(isa);
    let encode = |row: usize, lines: &mut [Line]| {
        let words = lines.as_mut_ptr().cast::<u32>();
        // SAFETY: a line is so many words, and nothing else.
        let words = unsafe { std::slice::from_raw_parts_mut(words, LINE_WORDS * lines.len()) };
        // SAFETY: the encoder is of a level that the `Isa` vouches for.
        unsafe { encode(form, &x[row * k..(row + 1) * k], words) };
    };
    if x.len() < PARALLEL {
        out.lines.chunks_exact_mut(lines).enumerate().for_each(|(row, lines)| encode(row, lines));
    } else {
        pool.for_each_chunk(&mut out.lines, lines, encode);
    }
}

impl Prepared {
    /// With room for so many words: rows are prepared without moving it.
    pub(crate) fn with_capacity(words: usize) -> Self {
        Self { lines: Vec::with_capacity(words.div_ceil(LINE_WORDS)), ..Self::default() }
    }

    /// Words that `rows` rows of `k` values take, prepared for `dtype`.
    pub(crate) fn num_words(isa: Isa, dtype: Dtype, rows: usize, k: usize) -> usize {
        rows * Form::of(isa, dtype).stride(k)
    }

    /// Panics unless the first `rows` rows can be multiplied by a `dtype` matrix of `k` inputs.
    pub(super) fn check(&self, isa: Isa, dtype: Dtype, k: usize, rows: usize) {
        let form = Form::of(isa, dtype);
        assert_eq!(self.form, form, "prepared for another format than {dtype} at {isa}");
        assert_eq!(self.k, k, "prepared rows of {}, weights of {k} inputs", self.k);
        assert!(rows <= self.rows, "{rows} rows of {}", self.rows);
    }

    /// The first word of a row.
    pub(super) fn row(&self, row: usize) -> *const u32 {
        self.lines[row * self.stride / LINE_WORDS..].as_ptr().cast()
    }

    /// Words from a row to the next.
    pub(super) fn stride(&self) -> usize {
        self.stride
    }
}

/// Inlined into functions compiled for each level; the results are the same at all.
#[inline(always)]
pub(super) fn encode(form: Form, x: &[f32], words: &mut [u32]) {
    match form {
        Form::F32 => {
            words.iter_mut().zip(x).for_each(|(word, x)| *word = x.to_bits());
            words[x.len()..].fill(0);
        }
        Form::RoundedF32 => {
            words.iter_mut().zip(x).for_each(|(word, x)| *word = bf16_bits(*x) << 16);
            words[x.len()..].fill(0);
        }
        Form::ScaledF32 => {
            let scale = (1_u64 << FP8_SCALE_BITS) as f32;
            let scaled = |x: f32| f32::from_bits(bf16_bits(x) << 16) * scale;
            words.iter_mut().zip(x).for_each(|(word, x)| *word = scaled(*x).to_bits());
            words[x.len()..].fill(0);
        }
        Form::Bf16Pair => {
            let (pairs, rest) = x.as_chunks::<2>();
            for (word, x) in words.iter_mut().zip(pairs) {
                *word = bf16_bits(x[0]) | bf16_bits(x[1]) << 16;
            }
            words[pairs.len()..].fill(0);
            if let Some(last) = rest.first() {
                words[pairs.len()] = bf16_bits(*last);
            }
        }
        Form::Int8Block => quantise_blocks::<1>(x, words),
        Form::Int8PairBlock => quantise_blocks::<2>(x, words),
    }
}

/// Quantises a row in blocks, `WORDS` words for four values.
#[inline(always)]
fn quantise_blocks<const WORDS: usize>(x: &[f32], words: &mut [u32]) {
    let words = words.chunks_exact_mut(block_words(WORDS));
    let (blocks, rest) = x.as_chunks::<BLOCK>();
    let mut padded = [0.0; BLOCK];
    padded[..rest.len()].copy_from_slice(rest);
    let last = (!rest.is_empty()).then_some(&padded);
    for (words, x) in words.zip(blocks.iter().chain(last)) {
        quantise::<WORDS>(x, words);
    }
}

/// Quantises a block.
#[inline(always)]
fn quantise<const WORDS: usize>(x: &[f32; BLOCK], words: &mut [u32]) {
    // As integers magnitudes order like the numbers, with infinity and NaN on top.
    let largest = x.iter().fold(0, |max, x| max.max(x.to_bits() & 0x7fff_ffff));
    let (largest, finite) = (f32::from_bits(largest), largest < f32::INFINITY.to_bits());
    // A block too small to invert is zero for every purpose.
    let (scale, inverse) = match largest {
        _ if !finite => (f32::NAN, 0.0),
        _ if largest < 1e-30 => (0.0, 0.0),
        _ => (largest / 127.0, 127.0 / largest),
    };
    let mut sum = 0;
    let (fours, ends) = words.split_at_mut(WORDS * (BLOCK / 4));
    for (words, x) in fours.as_chunks_mut::<WORDS>().0.iter_mut().zip(x.as_chunks::<4>().0) {
        let codes = x.map(|x| round_i8(x * inverse));
        sum += codes.iter().map(|&code| i32::from(code)).sum::<i32>();
        // With one word the four bytes; with two the even ones and the odd ones.
        for (i, word) in words.iter_mut().enumerate() {
            *word = match WORDS {
                1 => u32::from_le_bytes(codes.map(|code| code as u8)),
                _ => {
                    u32::from(codes[i] as i16 as u16) | u32::from(codes[i + 2] as i16 as u16) << 16
                }
            };
        }
    }
    ends[0] = scale.to_bits();
    ends[1] = (-128 * sum) as u32;
}
