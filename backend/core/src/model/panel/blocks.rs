//! Blocks of inputs that share a scale: their codes, and how a block's values become them.

use super::{
    BLOCK, Dtype, GROUP_BYTES, PANEL, SCALES_BYTES, bf16_bits, block_groups, fit, panel_bytes,
    round_i8, unit_bytes,
};

/// The codes of a block's values, four a word, and what they are multiplied by and what is added then.
pub(super) struct Block {
    /// Those of int4 fill half of them.
    words: [[u8; 4]; BLOCK / 4],
    scale: f32,
    offset: f32,
}

/// Packs up to 64 outputs, `rows` being `[outputs][k]`; `encode` is given the values of a block, of which there are fewer at
/// the end of k, and none in outputs that only fill up the panel.
pub(super) fn pack(
    dtype: Dtype,
    rows: &[f32],
    k: usize,
    out: &mut [u8],
    encode: impl Fn(&[f32]) -> Block,
) {
    let num_rows = rows.len() / k;
    assert!(num_rows <= PANEL && num_rows * k == rows.len(), "{} values, k {k}", rows.len());
    assert_eq!(out.len(), panel_bytes(dtype, k), "bytes of a panel of {dtype}, k {k}");
    for (block_idx, unit) in out.chunks_exact_mut(unit_bytes(dtype)).enumerate() {
        let (groups, scales) = unit.split_at_mut(block_groups(dtype) * GROUP_BYTES);
        let groups = groups.as_chunks_mut::<GROUP_BYTES>().0;
        for output in 0..PANEL {
            let values = match output < num_rows {
                true => &rows[output * k..(output + 1) * k][block_idx * BLOCK..],
                false => &[],
            };
            let Block { words, scale, offset } = encode(&values[..BLOCK.min(values.len())]);
            for (group, word) in groups.iter_mut().zip(words) {
                group[4 * output..4 * output + 4].copy_from_slice(&word);
            }
            for (of_outputs, value) in scales.chunks_exact_mut(SCALES_BYTES).zip([scale, offset]) {
                of_outputs[2 * output..2 * output + 2].copy_from_slice(&bf16_bytes(value));
            }
        }
    }
}

/// Of a value that is a bfloat16.
fn bf16_bytes(value: f32) -> [u8; 2] {
    (bf16_bits(value) as u16).to_le_bytes()
}

fn filled_up(values: &[f32], with: f32) -> [f32; BLOCK] {
    let mut block = [with; BLOCK];
    block[..values.len()].copy_from_slice(values);
    block
}

/// By the largest magnitude.
pub(super) fn int8(values: &[f32]) -> Block {
    let values = filled_up(values, 0.0);
    let (scale, inverse) = int8_scale(&values);
    let mut words = [[0; 4]; BLOCK / 4];
    for (word, values) in words.iter_mut().zip(values.as_chunks::<4>().0) {
        *word = values.map(|v| int8_code(v * inverse));
    }
    Block { words, scale, offset: 0.0 }
}

/// The bfloat16 that the values of a block are multiples of, rounded up so that none exceeds 127 of it, and
/// its inverse.
#[inline(always)]
fn int8_scale(values: &[f32; BLOCK]) -> (f32, f32) {
    let largest = values.iter().fold(0.0_f32, |max, v| max.max(v.abs()));
    // Below this the inverse would overflow; the block is zero for every purpose.
    if largest < 1e-30 {
        return (0.0, 0.0);
    }
    let bits = ((largest / 127.0).to_bits() + 0xffff) >> 16;
    let scale = f32::from_bits(bits << 16);
    (scale, 1.0 / scale)
}

/// int8 is stored with 128 added: the byte dot product takes one unsigned side, and this way the
/// correction is a property of the activations alone.
#[inline(always)]
fn int8_code(x: f32) -> u8 {
    round_i8(x) as u8 ^ 0x80
}

#[inline(always)]
pub(super) fn int8_value(code: u8) -> f32 {
    f32::from(i16::from(code) - 128)
}

/// By the scale and the offset that lose least. A word has the codes of eight inputs: of the first four in the low halves of
/// its bytes, so that a mask and a shift give words of four codes each.
pub(super) fn int4(values: &[f32]) -> Block {
    // No scale has to be stretched for another value that is there already.
    let values = filled_up(values, values.last().copied().unwrap_or(0.0));
    let fit::Fit { codes, scale, offset } = fit::fit(&values);
    let mut words = [[0; 4]; BLOCK / 4];
    for (word, codes) in words.iter_mut().zip(codes.as_chunks::<8>().0) {
        *word = std::array::from_fn(|i| codes[i] | codes[i + 4] << 4);
    }
    Block { words, scale, offset }
}

#[inline(always)]
pub(super) fn int4_values(word: [u8; 4]) -> [f32; 8] {
    std::array::from_fn(|i| f32::from(word[i % 4] >> (4 * (i / 4)) & 0xf))
}
