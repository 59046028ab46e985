//! Weights as the CUDA kernels read them: the one file that knows these bytes and the order of the rows.
//!
//! A matrix [n outputs][k inputs] is cut into units of 64 outputs by 128 bytes of k; n is padded to whole
//! tiles of 64 outputs and k to whole units, with zeros. The units of a tile follow each other, k ascending;
//! tile follows tile. A unit is 64 rows of 128 bytes, and in row r the 16-byte chunk c stands at c ^ (r & 7):
//! it is copied into shared memory as it is and read from there without bank conflicts. Of FP8 inputs a chunk has 16: its
//! word t, which a lane of the tensor cores takes, has inputs 2t, 2t + 1, 2t + 8 and 2t + 9 of them.
//! What belongs to an output, its scale and its bias, stands in the order of the rows too.

use super::decoder::MatrixKind;
use super::panel::{E4M3_MAX, e4m3_to_f32, f32_to_e4m3, row_scale};
use super::{Dtype, ModelConfig};
use half::f16;
use half::slice::HalfFloatSliceExt;

/// Outputs in a tile.
pub const TILE: usize = 64;

/// Rows of an image that follow each other in the source too, whatever the order.
pub const RUN: usize = TILE / 2;

/// Bytes of a row of a unit.
const ROW_BYTES: usize = 128;

pub(crate) const UNIT_BYTES: usize = TILE * ROW_BYTES;

/// Bytes that keep together when a row is swizzled.
const CHUNK_BYTES: usize = 16;

/// Inputs in a unit.
pub(crate) const fn unit_len(dtype: Dtype) -> usize {
    ROW_BYTES / dtype.bytes()
}

/// Bytes of one tile of outputs.
pub const fn tile_bytes(dtype: Dtype, k: usize) -> usize {
    k.div_ceil(unit_len(dtype)) * UNIT_BYTES
}

/// Bytes of a whole matrix of `n` outputs and `k` inputs.
pub(crate) const fn image_bytes(dtype: Dtype, n: usize, k: usize) -> usize {
    n.div_ceil(TILE) * tile_bytes(dtype, k)
}

/// Scales and biases of `n` outputs, padding counted.
pub(crate) const fn padded_len(n: usize) -> usize {
    n.next_multiple_of(TILE)
}

/// Which row of the fused matrix stands where.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowOrder {
    /// As they are.
    Natural,
    /// q, k and v heads: in the first `rotated_heads`, those of q and k, each tile holds 32 elements of a
    /// head's first half and then the 32 that they are rotated with; v is as it is.
    Qkv {
        /// Heads of q and k.
        rotated_heads: usize,
        /// 64 or 128.
        head_dim: usize,
    },
    /// Each tile holds 32 rows of the gate and then the same 32 of up.
    GateUp {
        /// Rows of each; a multiple of 32.
        intermediate_size: usize,
    },
}

impl RowOrder {
    /// That of a matrix of the model.
    pub fn of(kind: MatrixKind, model: &ModelConfig) -> Self {
        match kind {
            MatrixKind::Qkv => Self::Qkv {
                rotated_heads: model.num_heads + model.num_kv_heads,
                head_dim: model.head_dim,
            },
            MatrixKind::GateUp => Self::GateUp { intermediate_size: model.intermediate_size },
            MatrixKind::Embed
            | MatrixKind::Out
            | MatrixKind::Down
            | MatrixKind::Head
            | MatrixKind::Fc => Self::Natural,
        }
    }

    /// The row of the source, of `n` rows, that stands at `row`; none in the padding.
    pub fn source(self, row: usize, n: usize) -> Option<usize> {
        if row >= n {
            return None;
        }
        let (tile, within) = (row / TILE, row % TILE);
        let (half, idx) = (within / RUN, within % RUN);
        Some(match self {
            Self::Qkv { rotated_heads, head_dim } if row < rotated_heads * head_dim => {
                let tiles = head_dim / TILE;
                let (head, tile) = (tile / tiles, tile % tiles);
                head * head_dim + half * (head_dim / 2) + tile * RUN + idx
            }
            Self::Natural | Self::Qkv { .. } => row,
            Self::GateUp { intermediate_size } => half * intermediate_size + tile * RUN + idx,
        })
    }
}

/// Packs up to 64 outputs, `rows` being `[outputs][k]`, into one tile. For FP8 `scales` gets one factor a row,
/// for FP16 it is empty. `out` is written in full. Panics for other formats.
pub fn pack_tile(dtype: Dtype, rows: &[f32], k: usize, out: &mut [u8], scales: &mut [f32]) {
    let num_rows = rows.len() / k;
    assert_eq!(scales.len(), if dtype.has_output_scales() { num_rows } else { 0 });
    match dtype {
        Dtype::Fp8 => {
            let mut inverse = [0.0_f32; TILE];
            for ((row, scale), inverse) in
                rows.chunks_exact(k).zip(scales.iter_mut()).zip(&mut inverse)
            {
                (*scale, *inverse) = row_scale(row, E4M3_MAX);
            }
            pack(rows, k, out, |row, values: &[f32; 128], bytes| {
                *bytes = in_lane_order(&values.map(|value| f32_to_e4m3(value * inverse[row])));
            });
        }
        Dtype::Fp16 => pack(rows, k, out, |_, values: &[f32; 64], bytes| {
            let mut narrow = [f16::ZERO; 64];
            narrow.convert_from_f32_slice(values);
            for (bytes, value) in bytes.as_chunks_mut::<2>().0.iter_mut().zip(narrow) {
                *bytes = value.to_le_bytes();
            }
        }),
        other => panic!("there is no CUDA image of {other}"),
    }
}

/// Packs up to 64 outputs that are e4m3 already, `rows` being `[outputs][k]`, into one tile; their scales stay
/// with the caller.
pub fn pack_tile_fp8(rows: &[u8], k: usize, out: &mut [u8]) {
    pack(rows, k, out, |_, values: &[u8; 128], bytes| *bytes = in_lane_order(values));
}

/// One row of an image as f32, padding left off; `row` counts in the order of the image. `scale` is the row's
/// factor for FP8.
pub fn unpack_row(
    dtype: Dtype,
    image: &[u8],
    k: usize,
    row: usize,
    scale: Option<f32>,
    out: &mut [f32],
) {
    assert_eq!(out.len(), k, "output of {} values for a row of {k}", out.len());
    let tile = &image[row / TILE * tile_bytes(dtype, k)..][..tile_bytes(dtype, k)];
    let row = row % TILE;
    let scale = scale.unwrap_or(1.0);
    let units = tile.as_chunks::<UNIT_BYTES>().0;
    for (values, unit) in out.chunks_mut(unit_len(dtype)).zip(units) {
        for (idx, value) in values.iter_mut().enumerate() {
            *value = scale
                * match dtype {
                    Dtype::Fp8 => e4m3_to_f32(unit[place(row, e4m3_byte(idx))]),
                    Dtype::Fp16 => {
                        let at = place(row, idx * dtype.bytes());
                        f16::from_le_bytes([unit[at], unit[at + 1]]).to_f32()
                    }
                    other => panic!("there is no CUDA image of {other}"),
                };
        }
    }
}

/// Which byte of a row of a unit an FP8 input is.
const fn e4m3_byte(input: usize) -> usize {
    let pair = input % CHUNK_BYTES / 2;
    input / CHUNK_BYTES * CHUNK_BYTES + pair % 4 * 4 + pair / 4 * 2 + input % 2
}

/// A row of a unit of FP8 inputs.
fn in_lane_order(values: &[u8; ROW_BYTES]) -> [u8; ROW_BYTES] {
    let mut bytes = [0; ROW_BYTES];
    for (input, value) in values.iter().enumerate() {
        bytes[e4m3_byte(input)] = *value;
    }
    bytes
}

/// Where in a unit a byte of a row stands.
const fn place(row: usize, byte: usize) -> usize {
    let chunk = (byte / CHUNK_BYTES) ^ (row & 7);
    row * ROW_BYTES + chunk * CHUNK_BYTES + byte % CHUNK_BYTES
}

/// Writes unit after unit: `encode(row, values, bytes)` turns the `LEN` values of a row that lie in a unit
/// into its 128 bytes. Padding is `T::default()`, which must be encoded as zeros.
fn pack<T: Copy + Default, const LEN: usize>(
    rows: &[T],
    k: usize,
    out: &mut [u8],
    encode: impl Fn(usize, &[T; LEN], &mut [u8; ROW_BYTES]),
) {
    let num_rows = rows.len() / k;
    assert!(num_rows <= TILE && num_rows * k == rows.len(), "{} values, k {k}", rows.len());
    assert_eq!(out.len(), k.div_ceil(LEN) * UNIT_BYTES, "bytes of a tile, k {k}");
    for (unit_idx, unit) in out.as_chunks_mut::<UNIT_BYTES>().0.iter_mut().enumerate() {
        let inputs = unit_idx * LEN..k.min((unit_idx + 1) * LEN);
        unit[num_rows * ROW_BYTES..].fill(0);
        for (row, values) in rows.chunks_exact(k).enumerate() {
            let mut padded = [T::default(); LEN];
            padded[..inputs.len()].copy_from_slice(&values[inputs.clone()]);
            let mut bytes = [0; ROW_BYTES];
            encode(row, &padded, &mut bytes);
            for (chunk, bytes) in bytes.as_chunks::<CHUNK_BYTES>().0.iter().enumerate() {
                let at = place(row, chunk * CHUNK_BYTES);
                unit[at..at + CHUNK_BYTES].copy_from_slice(bytes);
            }
        }
    }
}

#[cfg(test)]
mod tests;
