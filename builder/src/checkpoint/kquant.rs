//! Decoders of ggml's K-quants: blocks of 256 values whose sub-blocks have small integer scales
//! under one or two half-precision ones. Roundings are in the order of the reference: first the
//! sub-block's scale as f32, then the product, then the difference.

use super::dequant::{each_block, half_at};

/// `u8 scales[16]; u8 qs[64]; f16 d, dmin`. A scale byte is (minimum << 4 | scale) of 16 values.
pub(super) fn q2_k(bytes: &[u8], out: &mut [f32]) {
    each_block::<84, 256>(bytes, out, |b, y| {
        let (d, dmin) = (half_at(b, 80), half_at(b, 82));
        for (sub, y) in y.as_chunks_mut::<16>().0.iter_mut().enumerate() {
            let scale = d * f32::from(b[sub] & 15);
            let min = dmin * f32::from(b[sub] >> 4);
            let (half, shift) = (sub / 8, sub % 8 / 2 * 2);
            let qs = &b[16 + 32 * half + 16 * (sub % 2)..][..16];
            for (q, y) in qs.iter().zip(y) {
                *y = scale * f32::from(q >> shift & 3) - min;
            }
        }
    });
}

/// `u8 hmask[32]; u8 qs[64]; u8 scales[12]; f16 d`. The third bit comes from `hmask`; when it is
/// clear, 4 is subtracted. Scales have 6 bits, offset 32.
pub(super) fn q3_k(bytes: &[u8], out: &mut [f32]) {
    each_block::<110, 256>(bytes, out, |b, y| {
        let d = half_at(b, 108);
        for (sub, y) in y.as_chunks_mut::<16>().0.iter_mut().enumerate() {
            let low = b[96 + sub % 8] >> (sub / 8 * 4) & 15;
            let high = b[104 + sub % 4] >> (sub / 4 * 2) & 3;
            let scale = d * (f32::from(high << 4 | low) - 32.0);
            let (half, shift, lane) = (sub / 8, sub % 8 / 2 * 2, 16 * (sub % 2));
            let bit = sub / 2;
            let (qs, hmask) = (&b[32 + 32 * half + lane..][..16], &b[lane..][..16]);
            for ((q, h), y) in qs.iter().zip(hmask).zip(y) {
                let q = (q >> shift & 3) | (h >> bit & 1) << 2;
                *y = scale * (f32::from(q) - 4.0);
            }
        }
    });
}

/// The scale and minimum, 6 bits each, of sub-block `sub` of a Q4_K or Q5_K block.
#[inline(always)]
fn scale_and_min(scales: &[u8], sub: usize) -> (f32, f32) {
    let (scale, min) = if sub < 4 {
        (scales[sub] & 63, scales[sub + 4] & 63)
    } else {
        let packed = scales[sub + 4];
        (packed & 15 | scales[sub - 4] >> 6 << 4, packed >> 4 | scales[sub] >> 6 << 4)
    };
    (f32::from(scale), f32::from(min))
}

/// `f16 d, dmin; u8 scales[12]; u8 qs[128]`. 32 bytes hold two sub-blocks: low nibbles, then high.
pub(super) fn q4_k(bytes: &[u8], out: &mut [f32]) {
    each_block::<144, 256>(bytes, out, |b, y| {
        let (d, dmin) = (half_at(b, 0), half_at(b, 2));
        for (sub, y) in y.as_chunks_mut::<32>().0.iter_mut().enumerate() {
            let (scale, min) = scale_and_min(&b[4..16], sub);
            let (scale, min) = (d * scale, dmin * min);
            let (qs, shift) = (&b[16 + sub / 2 * 32..][..32], sub % 2 * 4);
            for (q, y) in qs.iter().zip(y) {
                *y = scale * f32::from(q >> shift & 15) - min;
            }
        }
    });
}

/// `f16 d, dmin; u8 scales[12]; u8 qh[32]; u8 qs[128]`: Q4_K with a fifth bit, bit `sub` of `qh`.
pub(super) fn q5_k(bytes: &[u8], out: &mut [f32]) {
    each_block::<176, 256>(bytes, out, |b, y| {
        let (d, dmin) = (half_at(b, 0), half_at(b, 2));
        for (sub, y) in y.as_chunks_mut::<32>().0.iter_mut().enumerate() {
            let (scale, min) = scale_and_min(&b[4..16], sub);
            let (scale, min) = (d * scale, dmin * min);
            let (qs, shift) = (&b[48 + sub / 2 * 32..][..32], sub % 2 * 4);
            for ((q, h), y) in qs.iter().zip(&b[16..48]).zip(y) {
                let q = (q >> shift & 15) | (h >> sub & 1) << 4;
                *y = scale * f32::from(q) - min;
            }
        }
    });
}

/// `u8 ql[128]; u8 qh[64]; i8 scales[16]; f16 d`. Each half of 128 values takes 64 bytes of `ql`
/// (low nibbles of 64 values, then high) and 32 of `qh` (two bits for each run of 32 values).
pub(super) fn q6_k(bytes: &[u8], out: &mut [f32]) {
    each_block::<210, 256>(bytes, out, |b, y| {
        let d = half_at(b, 208);
        for (sub, y) in y.as_chunks_mut::<16>().0.iter_mut().enumerate() {
            let scale = d * f32::from(b[192 + sub] as i8);
            let (half, run, lane) = (sub / 8, sub % 8 / 2, 16 * (sub % 2));
            let ql = &b[64 * half + run % 2 * 32 + lane..][..16];
            let qh = &b[128 + 32 * half + lane..][..16];
            let (low_shift, high_shift) = (run / 2 * 4, run * 2);
            for ((l, h), y) in ql.iter().zip(qh).zip(y) {
                let q = (l >> low_shift & 15) | (h >> high_shift & 3) << 4;
                *y = scale * (f32::from(q) - 32.0);
            }
        }
    });
}
