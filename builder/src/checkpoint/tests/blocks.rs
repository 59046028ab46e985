//! Block decoders against naive twins that follow ggml's definitions loop by loop, and against
//! hashes of what gguf-py 0.19 makes of the same bytes.

use super::super::encoding::Encoding;

/// Format, where its block has half-precision numbers, its twin, and the FNV-1a hash of gguf-py's
/// values of `blocks(format)`.
type Case = (Encoding, &'static [usize], fn(&[u8]) -> Vec<f32>, u64);

const CASES: [Case; 10] = [
    (Encoding::Q4_0, &[0], naive_q4_0, 0x4e83_680b_7e10_e461),
    (Encoding::Q4_1, &[0, 2], naive_q4_1, 0x088f_347a_1052_b406),
    (Encoding::Q5_0, &[0], naive_q5_0, 0x8735_a0a7_dfea_66e1),
    (Encoding::Q5_1, &[0, 2], naive_q5_1, 0x9e07_0f4c_0f65_d91e),
    (Encoding::Q8_0, &[0], naive_q8_0, 0xb8d6_22f5_f45c_7733),
    (Encoding::Q2K, &[80, 82], naive_q2_k, 0xb3af_11c8_f24c_f787),
    (Encoding::Q3K, &[108], naive_q3_k, 0x3c18_e19b_fb19_c52d),
    (Encoding::Q4K, &[0, 2], naive_q4_k, 0xb742_7b29_ce74_aed7),
    (Encoding::Q5K, &[0, 2], naive_q5_k, 0x5dce_7201_e034_d99b),
    (Encoding::Q6K, &[208], naive_q6_k, 0x5a22_e652_bb05_5a5a),
];

/// 16 blocks of reproducible bytes whose half-precision numbers are of moderate size.
fn blocks(encoding: Encoding, halves: &[usize]) -> Vec<u8> {
    let size = encoding.block_bytes();
    let mut state = size as u32;
    let mut bytes: Vec<u8> = (0..16 * size)
        .map(|_| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 24) as u8
        })
        .collect();
    for block in bytes.chunks_mut(size) {
        for half in halves {
            block[half + 1] = block[half + 1] & 0x83 | 0x20;
        }
    }
    bytes
}

fn decode(encoding: Encoding, bytes: &[u8]) -> Vec<f32> {
    let blocks = bytes.len() / encoding.block_bytes();
    let mut out = vec![f32::NAN; blocks * encoding.block_len()];
    encoding.decode(bytes, &mut out);
    out
}

#[test]
fn blocks_decode_as_their_definitions_say() {
    for (encoding, halves, naive, _) in CASES {
        let bytes = blocks(encoding, halves);
        let want: Vec<f32> = bytes.chunks(encoding.block_bytes()).flat_map(naive).collect();
        let found = decode(encoding, &bytes);
        let differs = (0..want.len()).find(|at| want[*at].to_bits() != found[*at].to_bits());
        assert_eq!(differs, None, "{}", encoding.name());
    }
}

#[test]
fn blocks_decode_to_the_reference_implementations_bits() {
    for (encoding, halves, _, want) in CASES {
        let values = decode(encoding, &blocks(encoding, halves));
        let bytes = values.iter().flat_map(|value| value.to_le_bytes());
        let hash = bytes.fold(0xcbf2_9ce4_8422_2325u64, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3)
        });
        assert_eq!(hash, want, "{}", encoding.name());
    }
}

fn half(b: &[u8], at: usize) -> f32 {
    half::f16::from_le_bytes([b[at], b[at + 1]]).to_f32()
}

fn naive_q4_0(b: &[u8]) -> Vec<f32> {
    let nibble = |i: usize| if i < 16 { b[2 + i] & 15 } else { b[2 + i - 16] >> 4 };
    (0..32).map(|i| (i32::from(nibble(i)) - 8) as f32 * half(b, 0)).collect()
}

fn naive_q4_1(b: &[u8]) -> Vec<f32> {
    let nibble = |i: usize| if i < 16 { b[4 + i] & 15 } else { b[4 + i - 16] >> 4 };
    (0..32).map(|i| f32::from(nibble(i)) * half(b, 0) + half(b, 2)).collect()
}

/// The five-bit value `i`: nibbles from byte `qs`, fifth bits from byte `qh`.
fn five(b: &[u8], qh: usize, qs: usize, i: usize) -> i32 {
    let nibble = if i < 16 { b[qs + i] & 15 } else { b[qs + i - 16] >> 4 };
    let fifth = b[qh + i / 8] >> (i % 8) & 1;
    i32::from(nibble) + 16 * i32::from(fifth)
}

fn naive_q5_0(b: &[u8]) -> Vec<f32> {
    (0..32).map(|i| (five(b, 2, 6, i) - 16) as f32 * half(b, 0)).collect()
}

fn naive_q5_1(b: &[u8]) -> Vec<f32> {
    (0..32).map(|i| five(b, 4, 8, i) as f32 * half(b, 0) + half(b, 2)).collect()
}

fn naive_q8_0(b: &[u8]) -> Vec<f32> {
    (0..32).map(|i| f32::from(b[2 + i] as i8) * half(b, 0)).collect()
}

fn naive_q2_k(b: &[u8]) -> Vec<f32> {
    let (d, dmin) = (half(b, 80), half(b, 82));
    let (mut y, mut is, mut q) = (Vec::new(), 0, 16);
    for _ in [0, 128] {
        for shift in [0, 2, 4, 6] {
            for first in [0, 16] {
                let sc = b[is];
                is += 1;
                let (dl, ml) = (d * f32::from(sc & 15), dmin * f32::from(sc >> 4));
                y.extend((0..16).map(|l| dl * f32::from(b[q + first + l] >> shift & 3) - ml));
            }
        }
        q += 32;
    }
    y
}

fn naive_q3_k(b: &[u8]) -> Vec<f32> {
    let word = |at: usize| u32::from_le_bytes([b[at], b[at + 1], b[at + 2], b[at + 3]]);
    let (low, high) = (0x0f0f_0f0f, 0x0303_0303);
    let (a0, a1, tmp) = (word(96), word(100), word(104));
    let scales: Vec<u8> = [
        a0 & low | (tmp & high) << 4,
        a1 & low | (tmp >> 2 & high) << 4,
        a0 >> 4 & low | (tmp >> 4 & high) << 4,
        a1 >> 4 & low | (tmp >> 6 & high) << 4,
    ]
    .iter()
    .flat_map(|word| word.to_le_bytes())
    .collect();
    let (mut y, mut is, mut q, mut m) = (Vec::new(), 0, 32, 1u8);
    for _ in [0, 128] {
        for shift in [0, 2, 4, 6] {
            for first in [0, 16] {
                let dl = half(b, 108) * (i32::from(scales[is]) - 32) as f32;
                is += 1;
                y.extend((first..first + 16).map(|l| {
                    let less = if b[l] & m != 0 { 0 } else { 4 };
                    dl * (i32::from(b[q + l] >> shift & 3) - less) as f32
                }));
            }
            m = m.rotate_left(1);
        }
        q += 32;
    }
    y
}

/// ggml's `get_scale_min_k4`.
fn scale_min(j: usize, q: &[u8]) -> (f32, f32) {
    let (d, m) = if j < 4 {
        (q[j] & 63, q[j + 4] & 63)
    } else {
        ((q[j + 4] & 0xf) | ((q[j - 4] >> 6) << 4), (q[j + 4] >> 4) | ((q[j] >> 6) << 4))
    };
    (f32::from(d), f32::from(m))
}

fn naive_q4_k(b: &[u8]) -> Vec<f32> {
    let (d, min) = (half(b, 0), half(b, 2));
    let (mut y, mut is, mut q) = (Vec::new(), 0, 16);
    for _ in [0, 64, 128, 192] {
        let ((s1, m1), (s2, m2)) = (scale_min(is, &b[4..]), scale_min(is + 1, &b[4..]));
        let ((d1, m1), (d2, m2)) = ((d * s1, min * m1), (d * s2, min * m2));
        y.extend((0..32).map(|l| d1 * f32::from(b[q + l] & 15) - m1));
        y.extend((0..32).map(|l| d2 * f32::from(b[q + l] >> 4) - m2));
        q += 32;
        is += 2;
    }
    y
}

fn naive_q5_k(b: &[u8]) -> Vec<f32> {
    let (d, min) = (half(b, 0), half(b, 2));
    let (mut y, mut is, mut ql) = (Vec::new(), 0, 48);
    for (u1, u2) in [(1, 2), (4, 8), (16, 32), (64, 128)] {
        let ((s1, m1), (s2, m2)) = (scale_min(is, &b[4..]), scale_min(is + 1, &b[4..]));
        let ((d1, m1), (d2, m2)) = ((d * s1, min * m1), (d * s2, min * m2));
        let fifth = |l: usize, u: u8| if b[16 + l] & u != 0 { 16 } else { 0 };
        y.extend((0..32).map(|l| d1 * f32::from((b[ql + l] & 15) + fifth(l, u1)) - m1));
        y.extend((0..32).map(|l| d2 * f32::from((b[ql + l] >> 4) + fifth(l, u2)) - m2));
        ql += 32;
        is += 2;
    }
    y
}

fn naive_q6_k(b: &[u8]) -> Vec<f32> {
    let d = half(b, 208);
    let mut y = vec![0.0; 256];
    for n in 0..2 {
        let (ql, qh, sc) = (64 * n, 128 + 32 * n, 192 + 8 * n);
        for l in 0..32 {
            let scale = |is: usize| d * f32::from(b[sc + l / 16 + is] as i8);
            let (low, next, high) = (b[ql + l], b[ql + l + 32], b[qh + l]);
            let q1 = i32::from((low & 15) | (high & 3) << 4) - 32;
            let q2 = i32::from((next & 15) | (high >> 2 & 3) << 4) - 32;
            let q3 = i32::from((low >> 4) | (high >> 4 & 3) << 4) - 32;
            let q4 = i32::from((next >> 4) | (high >> 6 & 3) << 4) - 32;
            for (run, q) in [q1, q2, q3, q4].into_iter().enumerate() {
                y[128 * n + 32 * run + l] = scale(2 * run) * q as f32;
            }
        }
    }
    y
}
