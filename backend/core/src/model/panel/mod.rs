//! Packed weights: the one file that knows their bytes.
//!
//! A matrix [n outputs][k inputs] is cut into panels of 64 outputs, one after the other, the last padded
//! with zeros. A panel is a run of 256-byte groups, k ascending, each holding 4 bytes of every output: one
//! k of fp32, two of fp16 / bf16, four of fp8 / int8, eight of int4; k is padded to whole groups. So a kernel
//! streams a panel front to back, with outputs in its lanes. Inside a group the four bytes of an output
//! lie together, except where `halves` says otherwise.
//!
//! Where [`BLOCK`] inputs of an output share a scale, the groups of each block are followed by the scales of
//! the 64 outputs, then by their offsets where there are, and k is padded to whole blocks: a unit of such a panel is a
//! block, of others a group.

mod blocks;
mod fit;

pub(crate) use super::e4m3::e4m3_to_f32;
pub use super::e4m3::{E4M3_MAX, f32_to_e4m3};
use super::{Dtype, Scale};
use half::f16;
use half::slice::HalfFloatSliceExt;

/// Outputs in a panel.
pub const PANEL: usize = 64;

/// Bytes of a group: 4 for each output of the panel.
pub(crate) const GROUP_BYTES: usize = 4 * PANEL;

/// Inputs of an output that share a scale in the formats that have scales within a row.
pub const BLOCK: usize = 32;

/// Bytes of a bfloat16 for each output of the panel: a block's scales, or its offsets.
pub(crate) const SCALES_BYTES: usize = 2 * PANEL;

/// Groups that are packed at a time: 64 outputs of them stay in L1 while they are transposed.
const TILE: usize = 16;

/// Inputs of one output in a group.
pub(crate) const fn group_len(dtype: Dtype) -> usize {
    32 / dtype.format().bits
}

/// Groups of a block.
pub(crate) const fn block_groups(dtype: Dtype) -> usize {
    BLOCK / group_len(dtype)
}

/// Inputs of one output in a unit.
const fn unit_len(dtype: Dtype) -> usize {
    match dtype.format().scale {
        Scale::PerBlock { .. } => BLOCK,
        Scale::None | Scale::PerOutput => group_len(dtype),
    }
}

pub(crate) const fn unit_bytes(dtype: Dtype) -> usize {
    match dtype.format().scale {
        Scale::PerBlock { has_offset } => {
            block_groups(dtype) * GROUP_BYTES + (1 + has_offset as usize) * SCALES_BYTES
        }
        Scale::None | Scale::PerOutput => GROUP_BYTES,
    }
}

/// Bytes of one panel. Panels are contiguous.
pub const fn panel_bytes(dtype: Dtype, k: usize) -> usize {
    k.div_ceil(unit_len(dtype)) * unit_bytes(dtype)
}

/// Bytes of a whole matrix of `n` outputs and `k` inputs.
pub const fn packed_bytes(dtype: Dtype, n: usize, k: usize) -> usize {
    n.div_ceil(PANEL) * panel_bytes(dtype, k)
}

/// Where in a group the first and the last two bytes of an output lie.
#[inline(always)]
const fn halves(dtype: Dtype, output: usize) -> [usize; 2] {
    match dtype {
        Dtype::Fp32 | Dtype::Bf16 | Dtype::Int8 | Dtype::Int4 => [4 * output, 4 * output + 2],
        // [k][64]: two full vectors for a widening load.
        Dtype::Fp16 => [2 * output, GROUP_BYTES / 2 + 2 * output],
        // 64 bytes hold 16 outputs; in each 16 of them stand (k0, k1) of four outputs, then (k2, k3).
        // Interleaving the low and high halves of the expanded values lane by lane then yields the
        // pairs of 16 outputs in order.
        Dtype::Fp8 => {
            let first = output / 4 * 16 + output % 4 * 2;
            [first, first + 8]
        }
    }
}

/// Packs up to 64 outputs, `rows` being `[outputs][k]`, into one panel. For formats with a scale an output
/// `scales` gets them, otherwise it is empty. `out` is written in full.
pub fn pack_panel(dtype: Dtype, rows: &[f32], k: usize, out: &mut [u8], scales: &mut [f32]) {
    let num_rows = rows.len() / k;
    assert_eq!(scales.len(), if dtype.has_output_scales() { num_rows } else { 0 });
    let mut inverse = [1.0_f32; PANEL];
    for (row, (scale, inverse)) in rows.chunks_exact(k).zip(scales.iter_mut().zip(&mut inverse)) {
        (*scale, *inverse) = row_scale(row, E4M3_MAX);
    }
    match dtype {
        Dtype::Fp32 => pack::<f32, _>(dtype, rows, k, out, |_, v, words| {
            for (word, v) in words.iter_mut().zip(v) {
                *word = v.to_bits();
            }
        }),
        Dtype::Fp16 => pack::<f32, _>(dtype, rows, k, out, |_, v, words| {
            let mut narrow = [f16::ZERO; 2 * TILE];
            narrow.convert_from_f32_slice(v);
            for (word, v) in words.iter_mut().zip(narrow.as_chunks::<2>().0) {
                *word = u32::from(v[0].to_bits()) | u32::from(v[1].to_bits()) << 16;
            }
        }),
        Dtype::Bf16 => pack::<f32, _>(dtype, rows, k, out, |_, v, words| {
            for (word, v) in words.iter_mut().zip(v.as_chunks::<2>().0) {
                *word = bf16_bits(v[0]) | bf16_bits(v[1]) << 16;
            }
        }),
        Dtype::Fp8 => pack::<f32, _>(dtype, rows, k, out, |row, v, words| {
            let codes: [u8; 4 * TILE] = std::array::from_fn(|i| f32_to_e4m3(v[i] * inverse[row]));
            join_bytes(&codes, words);
        }),
        Dtype::Int8 => blocks::pack(dtype, rows, k, out, blocks::int8),
        Dtype::Int4 => blocks::pack(dtype, rows, k, out, blocks::int4),
    }
}

/// Packs up to 64 outputs that are e4m3 already, `rows` being `[outputs][k]`, into one panel; their scales
/// stay with the caller.
pub fn pack_panel_fp8(rows: &[u8], k: usize, out: &mut [u8]) {
    pack::<u8, _>(Dtype::Fp8, rows, k, out, |_, v, words| join_bytes(v, words));
}

/// One output of a packed matrix as f32, padding left off: the embedding lookup. `scale` is the row's
/// factor in formats with a scale an output.
pub(crate) fn unpack_row(
    dtype: Dtype,
    packed: &[u8],
    k: usize,
    row: usize,
    scale: Option<f32>,
    out: &mut [f32],
) {
    assert_eq!(out.len(), k, "output of {} values for a row of {k}", out.len());
    let panel = &packed[row / PANEL * panel_bytes(dtype, k)..][..panel_bytes(dtype, k)];
    let units = panel.chunks_exact(unit_bytes(dtype));
    for (values, unit) in out.chunks_mut(unit_len(dtype)).zip(units) {
        let groups = match dtype.format().scale {
            Scale::PerBlock { .. } => block_groups(dtype),
            Scale::None | Scale::PerOutput => 1,
        };
        let (groups, scales) = unit.split_at(groups * GROUP_BYTES);
        let mut scales = scales.chunks_exact(SCALES_BYTES).map(|of_outputs| {
            let at = 2 * (row % PANEL);
            bf16_value([of_outputs[at], of_outputs[at + 1]])
        });
        let scale = scales.next().or(scale).unwrap_or(1.0);
        let offset = scales.next();
        let groups = groups.as_chunks::<GROUP_BYTES>().0;
        for (values, group) in values.chunks_mut(group_len(dtype)).zip(groups) {
            let decoded = group_values(dtype, group, row % PANEL);
            for (value, decoded) in values.iter_mut().zip(decoded) {
                *value = decoded * scale;
                if let Some(offset) = offset {
                    *value += offset;
                }
            }
        }
    }
}

/// A block's scale or offset of one output.
#[inline(always)]
pub(crate) fn bf16_value(bytes: [u8; 2]) -> f32 {
    f32::from_bits(u32::from(u16::from_le_bytes(bytes)) << 16)
}

/// The values of one output in a group; those beyond `group_len` mean nothing.
#[inline(always)]
pub(crate) fn group_values(dtype: Dtype, group: &[u8; GROUP_BYTES], output: usize) -> [f32; 8] {
    let [low, high] = halves(dtype, output);
    decode(dtype, [group[low], group[low + 1], group[high], group[high + 1]])
}

#[inline(always)]
fn decode(dtype: Dtype, word: [u8; 4]) -> [f32; 8] {
    let half = |i: usize| u16::from_le_bytes([word[i], word[i + 1]]);
    let mut values = [0.0; 8];
    match dtype {
        Dtype::Fp32 => values[0] = f32::from_le_bytes(word),
        Dtype::Fp16 => {
            values[..2].copy_from_slice(&[0, 2].map(|i| f16::from_bits(half(i)).to_f32()))
        }
        Dtype::Bf16 => {
            values[..2].copy_from_slice(&[0, 2].map(|i| bf16_value([word[i], word[i + 1]])))
        }
        Dtype::Fp8 => values[..4].copy_from_slice(&word.map(e4m3_to_f32)),
        Dtype::Int8 => values[..4].copy_from_slice(&word.map(blocks::int8_value)),
        Dtype::Int4 => values = blocks::int4_values(word),
    }
    values
}

/// The factor that brings the largest magnitude of a row to `largest`, and its inverse.
pub(super) fn row_scale(row: &[f32], largest: f32) -> (f32, f32) {
    let mut lanes = [0.0_f32; 16];
    let (chunks, rest) = row.as_chunks::<16>();
    for chunk in chunks {
        for (lane, v) in lanes.iter_mut().zip(chunk) {
            *lane = lane.max(v.abs());
        }
    }
    let absmax = lanes.iter().chain(rest).fold(0.0_f32, |max, v| max.max(v.abs()));
    // Below this the inverse would overflow; the row is zero for every purpose.
    if absmax < 1e-30 { (0.0, 0.0) } else { (absmax / largest, largest / absmax) }
}

/// The nearest integer within ±127, ties to even.
#[inline(always)]
pub(crate) fn round_i8(x: f32) -> i8 {
    // Adding 1.5 * 2^23 leaves the rounded integer in the low bits.
    (x.clamp(-127.0, 127.0) + 12_582_912.0).to_bits() as i8
}

/// The bits of the nearest bfloat16, ties to even.
#[inline(always)]
pub(crate) fn bf16_bits(x: f32) -> u32 {
    let bits = x.to_bits();
    let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16;
    if x.is_nan() { bits >> 16 | 0x40 } else { rounded }
}

#[inline(always)]
fn join_bytes(bytes: &[u8], words: &mut [u32; TILE]) {
    for (word, bytes) in words.iter_mut().zip(bytes.as_chunks::<4>().0) {
        *word = u32::from_le_bytes(*bytes);
    }
}

/// Blocked transpose: `encode(row, values, words)` turns 16 groups of a row into their words, then each
/// group of the tile is written in one piece. Padding is encoded from `T::default()`.
fn pack<T: Copy + Default, F>(dtype: Dtype, rows: &[T], k: usize, out: &mut [u8], encode: F)
where
    F: Fn(usize, &[T], &mut [u32; TILE]),
{
    let num_rows = rows.len() / k;
    assert!(num_rows <= PANEL && num_rows * k == rows.len(), "{} values, k {k}", rows.len());
    assert_eq!(out.len(), panel_bytes(dtype, k), "bytes of a panel of {dtype}, k {k}");
    let len = TILE * group_len(dtype);
    let mut padded = [T::default(); 4 * TILE];
    let mut tile = [[0_u32; TILE]; PANEL];
    for words in &mut tile[num_rows..] {
        encode(0, &padded[..len], words);
    }
    for (tile_idx, out) in out.chunks_mut(TILE * GROUP_BYTES).enumerate() {
        let first = tile_idx * len;
        for (row, words) in tile[..num_rows].iter_mut().enumerate() {
            let values = &rows[row * k + first..(row + 1) * k];
            if values.len() >= len {
                encode(row, &values[..len], words);
            } else {
                padded[..values.len()].copy_from_slice(values);
                padded[values.len()..].fill(T::default());
                encode(row, &padded[..len], words);
            }
        }
        for (group_idx, group) in out.as_chunks_mut::<GROUP_BYTES>().0.iter_mut().enumerate() {
            write_group(dtype, &tile, group_idx, group);
        }
    }
}

#[inline(always)]
fn write_group(
    dtype: Dtype,
    tile: &[[u32; TILE]; PANEL],
    group_idx: usize,
    group: &mut [u8; GROUP_BYTES],
) {
    for (output, words) in tile.iter().enumerate() {
        let word = words[group_idx].to_le_bytes();
        let [low, high] = halves(dtype, output);
        group[low..low + 2].copy_from_slice(&word[..2]);
        group[high..high + 2].copy_from_slice(&word[2..]);
    }
}

#[cfg(test)]
mod tests;
