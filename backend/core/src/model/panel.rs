//! Packed weights: the one file that knows their bytes.
//!
//! A matrix [n outputs][k inputs] is cut into panels of 64 outputs, one after the other, the last padded
//! with zeros. A panel is a run of 256-byte groups, k ascending, each holding 4 bytes of every output: one
//! k of fp32, two of fp16 / bf16, four of fp8 / int8; k is padded with zeros to whole groups. So a kernel
//! streams a panel front to back, with outputs in its lanes. Inside a group the four bytes of an output
//! lie together, except where `halves` says otherwise.
//!
//! Where [`BLOCK`] inputs of an output share a scale, the groups of each block are followed by the scales of
//! the 64 outputs, and k is padded to whole blocks: a unit of such a panel is a block, of others a group.

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

pub(crate) const BLOCK_GROUPS: usize = BLOCK / group_len(Dtype::Int8);

/// Bytes of a block's groups and its scales, one bfloat16 an output.
pub(crate) const BLOCK_BYTES: usize = BLOCK_GROUPS * GROUP_BYTES + 2 * PANEL;

/// Groups that are packed at a time: 64 outputs of them stay in L1 while they are transposed.
const TILE: usize = 16;

/// Inputs of one output in a group.
pub(crate) const fn group_len(dtype: Dtype) -> usize {
    4 / dtype.bytes()
}

/// Inputs of one output in a unit.
const fn unit_len(dtype: Dtype) -> usize {
    match dtype.format().scale {
        Scale::PerBlock => BLOCK,
        Scale::None | Scale::PerOutput => group_len(dtype),
    }
}

pub(crate) const fn unit_bytes(dtype: Dtype) -> usize {
    match dtype.format().scale {
        Scale::PerBlock => BLOCK_BYTES,
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
        Dtype::Fp32 | Dtype::Bf16 | Dtype::Int8 => [4 * output, 4 * output + 2],
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
        Dtype::Int8 => pack_blocks(rows, k, out),
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
        let (groups, scales) = unit.as_chunks::<GROUP_BYTES>();
        let scale = match scales.as_chunks::<2>().0.get(row % PANEL) {
            Some(scale) => bf16_value(*scale),
            None => scale.unwrap_or(1.0),
        };
        for (values, group) in values.chunks_mut(group_len(dtype)).zip(groups) {
            let decoded = group_values(dtype, group, row % PANEL);
            for (value, decoded) in values.iter_mut().zip(decoded) {
                *value = decoded * scale;
            }
        }
    }
}

/// A block's scale of one output.
#[inline(always)]
pub(crate) fn bf16_value(bytes: [u8; 2]) -> f32 {
    f32::from_bits(u32::from(u16::from_le_bytes(bytes)) << 16)
}

/// The values of one output in a group; those beyond `group_len` mean nothing.
#[inline(always)]
pub(crate) fn group_values(dtype: Dtype, group: &[u8; GROUP_BYTES], output: usize) -> [f32; 4] {
    let [low, high] = halves(dtype, output);
    decode(dtype, [group[low], group[low + 1], group[high], group[high + 1]])
}

#[inline(always)]
fn decode(dtype: Dtype, word: [u8; 4]) -> [f32; 4] {
    let [low, high] =
        [u16::from_le_bytes([word[0], word[1]]), u16::from_le_bytes([word[2], word[3]])];
    match dtype {
        Dtype::Fp32 => [f32::from_le_bytes(word), 0.0, 0.0, 0.0],
        Dtype::Fp16 => [f16::from_bits(low).to_f32(), f16::from_bits(high).to_f32(), 0.0, 0.0],
        Dtype::Bf16 => {
            [f32::from_bits(u32::from(low) << 16), f32::from_bits(u32::from(high) << 16), 0.0, 0.0]
        }
        Dtype::Fp8 => word.map(e4m3_to_f32),
        Dtype::Int8 => word.map(|b| f32::from(i16::from(b) - 128)),
    }
}

/// Packs the blocks of int8.
fn pack_blocks(rows: &[f32], k: usize, out: &mut [u8]) {
    let num_rows = rows.len() / k;
    assert!(num_rows <= PANEL && num_rows * k == rows.len(), "{} values, k {k}", rows.len());
    assert_eq!(out.len(), panel_bytes(Dtype::Int8, k), "bytes of a panel of int8, k {k}");
    for (block_idx, unit) in out.as_chunks_mut::<BLOCK_BYTES>().0.iter_mut().enumerate() {
        let (groups, scales) = unit.as_chunks_mut::<GROUP_BYTES>();
        for (output, scale_out) in scales.as_chunks_mut::<2>().0.iter_mut().enumerate() {
            let mut values = [0.0; BLOCK];
            if output < num_rows {
                let values_of_row = &rows[output * k..(output + 1) * k][block_idx * BLOCK..];
                let len = BLOCK.min(values_of_row.len());
                values[..len].copy_from_slice(&values_of_row[..len]);
            }
            let (scale, inverse) = block_scale(&values);
            *scale_out = scale;
            for (group, values) in groups.iter_mut().zip(values.as_chunks::<4>().0) {
                group[4 * output..4 * output + 4]
                    .copy_from_slice(&values.map(|v| int8_code(v * inverse)));
            }
        }
    }
}

/// The bfloat16 that the values of a block are multiples of, rounded up so that none exceeds 127 of it, and
/// its inverse.
#[inline(always)]
fn block_scale(values: &[f32; BLOCK]) -> ([u8; 2], f32) {
    let largest = values.iter().fold(0.0_f32, |max, v| max.max(v.abs()));
    // Below this the inverse would overflow; the block is zero for every purpose.
    if largest < 1e-30 {
        return ([0; 2], 0.0);
    }
    let bits = ((largest / 127.0).to_bits() + 0xffff) >> 16;
    ((bits as u16).to_le_bytes(), 1.0 / f32::from_bits(bits << 16))
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

/// int8 is stored with 128 added: the byte dot product takes one unsigned side, and this way the
/// correction is a property of the activations alone.
#[inline(always)]
fn int8_code(x: f32) -> u8 {
    round_i8(x) as u8 ^ 0x80
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
mod tests {
    use super::*;
    use half::bf16;
    use proptest::prelude::*;

    /// What storing a value in a format makes of it, from the definitions; `absmax` is of all values that share
    /// the scale.
    fn stored(dtype: Dtype, x: f32, absmax: f32) -> f32 {
        match dtype {
            Dtype::Fp32 => x,
            Dtype::Fp16 => f16::from_f32(x).to_f32(),
            Dtype::Bf16 => bf16::from_f32(x).to_f32(),
            Dtype::Fp8 => e4m3_to_f32(f32_to_e4m3(x * (448.0 / absmax))) * (absmax / 448.0),
            Dtype::Int8 => {
                let nearest = bf16::from_f32(absmax / 127.0);
                let is_short = nearest.to_f32() < absmax / 127.0;
                let scale = bf16::from_bits(nearest.to_bits() + u16::from(is_short)).to_f32();
                (x * (1.0 / scale)).round_ties_even() * scale
            }
        }
    }

    fn pack_matrix(dtype: Dtype, rows: &[f32], k: usize) -> (Vec<u8>, Vec<f32>) {
        let n = rows.len() / k;
        let mut packed = vec![0xaa; packed_bytes(dtype, n, k)];
        let mut scales = vec![0.0; n];
        let panels = packed.chunks_exact_mut(panel_bytes(dtype, k));
        for ((rows, out), scales) in
            rows.chunks(PANEL * k).zip(panels).zip(scales.chunks_mut(PANEL))
        {
            let scales = if dtype.has_output_scales() { scales } else { &mut [][..] };
            pack_panel(dtype, rows, k, out, scales);
        }
        (packed, scales)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(40))]
        #[test]
        fn what_was_packed_comes_back_rounded(
            n in 1_usize..150,
            k in 1_usize..140,
            seed in any::<u32>(),
        ) {
            let value = |i: usize| {
                let mixed = (i as u32 ^ seed).wrapping_mul(2654435761).rotate_left(15);
                mixed.wrapping_mul(2246822519) as i32 as f32 / 2e9
            };
            let rows: Vec<f32> = (0..n * k).map(value).collect();
            for dtype in Dtype::ALL {
                let (packed, scales) = pack_matrix(dtype, &rows, k);
                for (o, row) in rows.chunks(k).enumerate() {
                    let sharing = if dtype == Dtype::Int8 { BLOCK } else { k };
                    let stored_run = |run: &[f32]| {
                        let absmax = run.iter().fold(0.0_f32, |m, v| m.max(v.abs()));
                        run.iter().map(|&x| stored(dtype, x, absmax)).collect::<Vec<f32>>()
                    };
                    let expected: Vec<f32> = row.chunks(sharing).flat_map(stored_run).collect();
                    let mut out = vec![0.0; k];
                    let scale = dtype.has_output_scales().then_some(scales[o]);
                    unpack_row(dtype, &packed, k, o, scale, &mut out);
                    prop_assert_eq!(out, expected, "{} output {}", dtype, o);
                }
            }
        }
    }

    #[test]
    fn fp8_bytes_come_back_as_they_were() {
        let (n, k) = (70, 37);
        let rows: Vec<u8> = (0..n * k).map(|i| (i % 251) as u8 & 0xfe).collect();
        let mut packed = vec![0xaa; packed_bytes(Dtype::Fp8, n, k)];
        let panels = packed.chunks_exact_mut(panel_bytes(Dtype::Fp8, k));
        rows.chunks(PANEL * k).zip(panels).for_each(|(rows, out)| pack_panel_fp8(rows, k, out));
        for (o, row) in rows.chunks(k).enumerate() {
            let mut out = vec![0.0; k];
            unpack_row(Dtype::Fp8, &packed, k, o, None, &mut out);
            let expected: Vec<f32> = row.iter().map(|&b| e4m3_to_f32(b)).collect();
            assert_eq!(out, expected);
        }
    }

    #[test]
    fn a_zero_row_has_scale_zero_and_stays_zero() {
        for dtype in [Dtype::Fp8, Dtype::Int8] {
            let (packed, scales) = pack_matrix(dtype, &[0.0; 3 * 10], 10);
            assert_eq!(scales, [0.0; 3]);
            let mut out = [1.0; 10];
            let scale = dtype.has_output_scales().then_some(scales[1]);
            unpack_row(dtype, &packed, 10, 1, scale, &mut out);
            assert_eq!(out, [0.0; 10]);
        }
    }

    #[test]
    fn sizes_count_the_padding() {
        assert_eq!(packed_bytes(Dtype::Bf16, 1, 1), 256);
        assert_eq!(packed_bytes(Dtype::Bf16, 65, 3), 2 * 2 * 256);
        assert_eq!(packed_bytes(Dtype::Fp8, 64, 896), 64 * 896);
        assert_eq!(packed_bytes(Dtype::Fp32, 128, 5), 128 * 5 * 4);
        assert_eq!(packed_bytes(Dtype::Int8, 65, 33), 128 * 2 * (32 + 2));
    }

    #[test]
    fn bf16_rounds_like_the_half_crate() {
        for high in 0..=u16::MAX {
            for low in [0, 1, 0x7fff, 0x8000, 0x8001, 0xffff_u32] {
                let x = f32::from_bits(u32::from(high) << 16 | low);
                assert_eq!(bf16_bits(x) as u16, bf16::from_f32(x).to_bits(), "{x:e}");
            }
        }
    }

    #[test]
    fn integers_round_to_even_and_saturate() {
        for (x, code) in
            [(0.5, 0), (1.5, 2), (2.5, 2), (-0.5, 0), (-1.5, -2), (1e9, 127), (-1e9, -127)]
        {
            assert_eq!(round_i8(x), code);
        }
    }
}
