//! The packed form of a matrix by its definition, byte by byte, and random numbers to fill it with.

use half::f16;
use spec_kernels::{Epilogue, Format};

/// Outputs of a unit.
pub(crate) const TILE: usize = 64;
const UNIT_ROW_BYTES: usize = 128;

/// The usual mixer of a counter (splitmix64).
#[derive(Clone)]
pub(crate) struct Random(pub u64);

impl Random {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut x = self.0;
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ (x >> 31)
    }

    pub(crate) fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound as u64) as usize
    }

    /// In -1 .. 1.
    pub(crate) fn signed(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1 << 23) as f32 - 1.0
    }

    pub(crate) fn floats(&mut self, len: usize, of: impl Fn(f32) -> f32) -> Vec<f32> {
        (0..len).map(|_| of(self.signed())).collect()
    }
}

pub(crate) fn e4m3_value(code: u8) -> f64 {
    let mantissa = f64::from(code & 7) / 8.0;
    let magnitude = match code >> 3 & 15 {
        _ if code & 0x7f == 0x7f => f64::NAN,
        0 => mantissa * 2f64.powi(-6),
        exponent => (1.0 + mantissa) * 2f64.powi(i32::from(exponent) - 7),
    };
    if code & 0x80 == 0 { magnitude } else { -magnitude }
}

/// A matrix `[n][k]` of codes in natural order.
pub(crate) struct Matrix {
    format: Format,
    k: usize,
    codes: Vec<u16>,
}

impl Matrix {
    /// Numbers of very different size, subnormals among them.
    pub(crate) fn random(format: Format, n: usize, k: usize, random: &mut Random) -> Self {
        let code = |random: &mut Random| match format {
            Format::Fp8 => (random.below(2) << 7 | random.below(11 * 8)) as u16,
            Format::Fp16 => f16::from_f32(random.signed() * random.signed()).to_bits(),
        };
        Self { format, k, codes: (0..n * k).map(|_| code(random)).collect() }
    }

    pub(crate) fn value(&self, n: usize, k: usize) -> f64 {
        let code = self.codes[n * self.k + k];
        match self.format {
            Format::Fp8 => e4m3_value(code as u8),
            Format::Fp16 => f16::from_bits(code).to_f64(),
        }
    }

    /// The image whose row `i` is row `order[i]` of the matrix.
    pub(crate) fn pack(&self, order: &[usize]) -> Vec<u8> {
        let bytes = bytes_of(self.format);
        let k_units = self.k.div_ceil(UNIT_ROW_BYTES / bytes);
        let mut image = vec![0; order.len().div_ceil(TILE) * k_units * TILE * UNIT_ROW_BYTES];
        for (i, &row) in order.iter().enumerate() {
            for k in 0..self.k {
                let to = place_in_image(self.format, k_units, i, k);
                let code = self.codes[row * self.k + k].to_le_bytes();
                image[to..to + bytes].copy_from_slice(&code[..bytes]);
            }
        }
        image
    }
}

/// Byte of an image of so many units a tile at which element `k` of a row begins.
pub(crate) fn place_in_image(format: Format, k_units: usize, row: usize, k: usize) -> usize {
    let bytes = bytes_of(format);
    let unit_k = UNIT_ROW_BYTES / bytes;
    let unit = row / TILE * k_units + k / unit_k;
    let (line, byte) = (row % TILE, k % unit_k * bytes);
    // Word t of a chunk of FP8 has elements 2t, 2t + 1, 2t + 8 and 2t + 9.
    let in_chunk = match format {
        Format::Fp8 => k % 8 / 2 * 4 + k % 16 / 8 * 2 + k % 2,
        Format::Fp16 => byte % 16,
    };
    let place = ((byte / 16) ^ (line % 8)) * 16 + in_chunk;
    (unit * TILE + line) * UNIT_ROW_BYTES + place
}

/// Halves of rows in units as warpgroups read them, of which a row always has those that a unit of FP8 weights meets.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HalfUnits {
    pub(crate) len: usize,
}

impl HalfUnits {
    /// Units of 64 rows.
    pub(crate) fn of_tile(self) -> usize {
        self.len.div_ceil(128) * 2
    }

    /// Bytes of so many rows.
    pub(crate) fn bytes(self, rows: usize) -> usize {
        rows.div_ceil(TILE) * self.of_tile() * TILE * UNIT_ROW_BYTES
    }

    fn place(self, row: usize, k: usize) -> usize {
        place_in_image(Format::Fp16, self.of_tile(), row, k)
    }

    /// Rows that follow each other become units.
    pub(crate) fn pack(self, rows: &[u8], padding: u8) -> Vec<u8> {
        let count = rows.len() / (2 * self.len);
        let mut units = vec![padding; self.bytes(count)];
        for (i, half) in rows.chunks(2).enumerate() {
            units[self.place(i / self.len, i % self.len)..][..2].copy_from_slice(half);
        }
        units
    }

    /// So many rows of units, one after the other. What lies between them is as it was.
    pub(crate) fn unpack(self, units: &[u8], count: usize, padding: u8) -> Vec<u8> {
        let halves = (0..count * self.len).map(|i| self.place(i / self.len, i % self.len));
        let rows: Vec<u8> = halves.flat_map(|place| [units[place], units[place + 1]]).collect();
        assert!(self.pack(&rows, padding) == units, "written beyond the rows");
        rows
    }
}

pub(crate) fn bytes_of(format: Format) -> usize {
    match format {
        Format::Fp8 => 1,
        Format::Fp16 => 2,
    }
}

/// Which row of the matrix each row of its image is. A QKV matrix has `rotated` query and key heads, then
/// value heads.
pub(crate) fn image_order(epilogue: Epilogue, n: usize, rotated: usize) -> Vec<usize> {
    match epilogue {
        Epilogue::Qkv { head_dim } => (0..n).map(|i| head_order(i, head_dim, rotated)).collect(),
        Epilogue::SwiGlu => {
            (0..n).map(|i| i / 64 * 32 + i % 32 + if i % 64 < 32 { 0 } else { n / 2 }).collect()
        }
        _ => (0..n).collect(),
    }
}

fn head_order(i: usize, head_dim: usize, rotated: usize) -> usize {
    let (head, tile, line) = (i / head_dim, i % head_dim / TILE, i % TILE);
    if head >= rotated {
        return i;
    }
    head * head_dim + tile * 32 + line % 32 + if line < 32 { 0 } else { head_dim / 2 }
}

/// `values` in image order, padded with zeros to whole tiles.
pub(crate) fn reorder(values: &[f32], order: &[usize]) -> Vec<f32> {
    let mut image: Vec<f32> = order.iter().map(|&row| values[row]).collect();
    image.resize(order.len().next_multiple_of(TILE), 0.0);
    image
}
