//! Every primitive against a naive twin: all inputs where there are few, random ones where there are many.

#![allow(clippy::unwrap_used)]

mod common;

use common::{longs, read_words, words};
use half::f16;
use spec_emu::{Arena, Landing, Launch, Schedule, launch};

const POISON: u32 = u32::MAX;

/// Runs one probe over `num_threads` threads, a multiple of 64, and returns its output.
fn probe(number: u32, argument: u32, input: &[u32], num_threads: usize, by: Schedule) -> Vec<u32> {
    probe_by("probe", number, argument, input, num_threads, by)
}

fn probe_by(
    variant: &str,
    number: u32,
    argument: u32,
    input: &[u32],
    num_threads: usize,
    schedule: Schedule,
) -> Vec<u32> {
    let per_thread = if (20..23).contains(&number) { 4 } else { input.len() / num_threads };
    let arena = Arena::new(1 << 24);
    let (from, to) = (arena.put(&words(input)), arena.alloc(num_threads * per_thread * 4));
    let params = [longs(&[from, to]), words(&[number, argument])].concat();
    let launched = Launch {
        variant,
        grid: (num_threads / 64) as u32,
        block: 64,
        shared_bytes: 4096,
        params: &params,
        overlap: false,
        max_resident: 4,
    };
    launch(&launched, &schedule).unwrap();
    read_words(&arena, to, num_threads * per_thread)
}

/// One word in, one word out, without any lane minding another.
fn convert(number: u32, input: &[u32]) -> Vec<u32> {
    convert_by("probe", number, input)
}

fn convert_by(variant: &str, number: u32, input: &[u32]) -> Vec<u32> {
    let mut padded = input.to_vec();
    padded.resize(input.len().next_multiple_of(64), 0);
    let mut output = probe_by(variant, number, 0, &padded, padded.len(), Schedule::PLAIN);
    output.truncate(input.len());
    output
}

/// Words that look random.
fn noise(seed: u32, count: usize) -> Vec<u32> {
    let mut state = u64::from(seed) + 1;
    let mut next = || {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 32) as u32
    };
    (0..count).map(|_| next()).collect()
}

/// Floats of all magnitudes, and those on which rounding turns.
fn floats() -> Vec<f32> {
    let special =
        [0.0, f32::INFINITY, f32::NAN, 65504.0, 65519.99, 65520.0, 448.0, 464.0, 464.1, 1e30];
    let halves = (0..0x7c00).step_by(7).map(|h| f16::from_bits(h).to_f32());
    // Half way between two halves and between two e4m3, and beside.
    let ties =
        halves.flat_map(|x| [x, x * (1.0 + 0.5f32.powi(11)), x + 0.5f32.powi(25), x * 1.0625]);
    let random = noise(5, 20_000).into_iter().map(|w| f32::from_bits(w & 0x7fff_ffff));
    let all: Vec<f32> = special.into_iter().chain(ties).chain(random).collect();
    all.iter().flat_map(|x| [*x, -*x, x.next_up(), x.next_down()]).collect()
}

fn e4m3(byte: u32) -> f64 {
    let (exponent, fraction) = (byte >> 3 & 15, f64::from(byte & 7));
    let magnitude = match (exponent, byte & 7) {
        (15, 7) => f64::NAN,
        (0, _) => fraction * 0.5f64.powi(9),
        _ => (8.0 + fraction) * 2f64.powi(exponent as i32 - 10),
    };
    if byte & 0x80 == 0 { magnitude } else { -magnitude }
}

/// The nearest e4m3 by looking at all of them; of two the one whose last bit is 0.
fn nearest_e4m3(x: f32) -> u32 {
    if x.is_nan() {
        return 0x7f;
    }
    let magnitude = f64::from(x.abs()).min(448.0);
    let distance = |byte: u32| (e4m3(byte) - magnitude).abs();
    let better = |a: u32, b: u32| {
        let order = distance(a).total_cmp(&distance(b)).then((a & 1).cmp(&(b & 1)));
        if order.is_le() { a } else { b }
    };
    (0..0x7f).reduce(better).unwrap() | u32::from(x.is_sign_negative()) << 7
}

#[test]
fn all_halves_become_the_floats_they_are() {
    let input: Vec<u32> = (0..1 << 16).collect();
    for (bits, output) in input.iter().zip(convert(0, &input)) {
        let expected = f16::from_bits(*bits as u16).to_f32();
        let output = f32::from_bits(output);
        let same = output.to_bits() == expected.to_bits() || output.is_nan() && expected.is_nan();
        assert!(same, "{bits:#x}: {output} is not {expected}");
    }
}

#[test]
fn floats_become_the_nearest_halves() {
    let input = floats();
    let bits: Vec<u32> = input.iter().map(|x| x.to_bits()).collect();
    let saturated = convert(2, &bits);
    for ((x, half), saturated) in input.iter().zip(convert(1, &bits)).zip(saturated) {
        let expected = f16::from_f32(*x);
        if x.is_nan() {
            assert_eq!((half, saturated), (0x7fff, 0x7fff));
            continue;
        }
        assert_eq!(half, u32::from(expected.to_bits()), "{x:e}");
        let clamped = f16::from_f32(x.clamp(-65504.0, 65504.0));
        assert_eq!(saturated, u32::from(clamped.to_bits()), "{x:e}");
    }
}

#[test]
fn all_e4m3_become_the_halves_they_are() {
    let input: Vec<u32> = (0..1 << 16).collect();
    let older = convert_by("probe@sm_80", 3, &input);
    for (pair, output) in input.iter().zip(convert(3, &input)).chain(input.iter().zip(older)) {
        for (byte, half) in [(pair & 0xff, output & 0xffff), (pair >> 8, output >> 16)] {
            let (value, expected) = (f16::from_bits(half as u16).to_f64(), e4m3(byte));
            let same = value.to_bits() == expected.to_bits() || value.is_nan() && expected.is_nan();
            assert!(same, "{byte:#x}: {value} is not {expected}");
        }
    }
}

#[test]
fn floats_become_the_nearest_e4m3() {
    let input = floats();
    let bits: Vec<u32> = input.iter().map(|x| x.to_bits()).collect();
    for (x, byte) in input.iter().zip(convert(4, &bits)) {
        assert_eq!(byte, nearest_e4m3(*x), "{x:e}");
    }
}

#[test]
fn reciprocals_know_no_subnormals() {
    let cases = [
        (3.0, 1.0 / 3.0),
        (-f32::INFINITY, -0.0),
        (f32::MAX, 0.0),
        (-0.0, f32::NEG_INFINITY),
        (f32::from_bits(0x007f_ffff), f32::INFINITY),
    ];
    let bits = cases.map(|(x, _)| x.to_bits());
    for ((x, expected), y) in cases.into_iter().zip(convert(8, &bits)) {
        assert_eq!(y, expected.to_bits(), "1 / {x}");
    }
}

#[test]
fn powers_of_two_and_bit_counts_are_right() {
    // The host's exp2f is within one unit in the last place.
    const TOLERANCE: f64 = 1.2e-7;
    let input: Vec<f32> =
        (-1400..1300).map(|i| i as f32 * 0.093).chain([f32::NEG_INFINITY]).collect();
    let bits: Vec<u32> = input.iter().map(|x| x.to_bits()).collect();
    for (x, y) in input.iter().zip(convert(5, &bits)) {
        let (y, expected) = (f64::from(f32::from_bits(y)), f64::from(*x).exp2());
        let flushed = expected < f64::from(f32::MIN_POSITIVE);
        let right = if flushed { y == 0.0 } else { (y / expected - 1.0).abs() < TOLERANCE };
        assert!(right, "2^{x}: {y}");
    }
    let input = [noise(1, 1000), vec![0, 1, u32::MAX]].concat();
    for ((word, counts), high) in input.iter().zip(convert(6, &input)).zip(convert(7, &input)) {
        let expected = word.leading_zeros() | (word.count_ones() * 0x1_0100);
        assert_eq!(counts, expected);
        assert_eq!(high, ((u64::from(*word) * 0xd251_1f53) >> 32) as u32);
    }
}

#[test]
fn lanes_get_each_others_values() {
    let input = noise(2, 128);
    let lane = |i: usize, from: usize| input[i / 32 * 32 + from];
    for argument in 0..32 {
        let run =
            |number| probe(number, argument as u32, &input, 128, Schedule::seeded(argument as u64));
        let (xor, from, up, ballot) = (run(10), run(11), run(12), run(13));
        for i in 0..128 {
            let own = i % 32;
            assert_eq!(xor[i], lane(i, own ^ argument));
            assert_eq!(from[i], lane(i, (own * 7 + argument) % 32));
            assert_eq!(up[i], lane(i, own.checked_sub(argument).unwrap_or(own)));
            let votes = (0..32).map(|l| (lane(i, l) >> argument & 1) << l).sum::<u32>();
            assert_eq!(ballot[i], votes);
        }
    }
}

/// Sums as a tree of pairs `mask` apart adds them.
fn tree<T: Copy>(values: &[T], add: impl Fn(T, T) -> T) -> T {
    let mut values = values.to_vec();
    for mask in [16, 8, 4, 2, 1] {
        values = (0..32).map(|i| add(values[i], values[i ^ mask])).collect();
    }
    values[0]
}

#[test]
fn sums_and_maxima_reach_all_lanes_in_a_fixed_order() {
    let input: Vec<f32> = noise(3, 64).iter().map(|w| *w as f32 / 3.0e8 - 7.0).collect();
    let bits: Vec<u32> = input.iter().map(|x| x.to_bits()).collect();
    let doubles: Vec<u32> =
        input.iter().flat_map(|x| (f64::from(*x) / 3.0).to_bits().to_le_words()).collect();
    for seed in 0..6 {
        let run = |number, input: &[u32]| probe(number, 0, input, 64, Schedule::seeded(seed));
        let (wrapping, max, sum, double) =
            (run(14, &bits), run(15, &bits), run(16, &bits), run(23, &doubles));
        for (warp, values) in input.chunks(32).enumerate() {
            let exact = bits[warp * 32..][..32].iter().fold(0u32, |a, b| a.wrapping_add(*b));
            let largest = values.iter().copied().fold(f32::MIN, f32::max);
            let total = tree(values, |a, b| a + b);
            let thirds: Vec<f64> = values.iter().map(|x| f64::from(*x) / 3.0).collect();
            let precise = tree(&thirds, |a, b| a + b).to_bits().to_le_words();
            for i in warp * 32..warp * 32 + 32 {
                assert_eq!((wrapping[i], max[i]), (exact, largest.to_bits()));
                assert_eq!(sum[i], total.to_bits());
                assert_eq!(double[i * 2..][..2], precise);
            }
        }
    }
}

/// The two words of a double.
trait Words {
    fn to_le_words(self) -> [u32; 2];
}

impl Words for u64 {
    fn to_le_words(self) -> [u32; 2] {
        [self as u32, (self >> 32) as u32]
    }
}

#[test]
fn products_are_those_of_the_matrices() {
    // Sixteen roundings to 24 bits, of sums below 16 * 4 + 8.
    const TOLERANCE: f64 = 16.0 * 72.0 * 6.0e-8;
    for seed in 0..8 {
        let value = |w: u32| f16::from_f32((w >> 8) as f32 / 4_194_304.0 - 2.0);
        let random = noise(seed, 16 * 16 + 16 * 8);
        let (a, b) = random.split_at(256);
        let c: Vec<f32> = noise(seed + 100, 128).iter().map(|w| *w as f32 / 2.7e8 - 8.0).collect();
        let pair = |low: u32, high: u32| {
            u32::from(value(low).to_bits()) | u32::from(value(high).to_bits()) << 16
        };
        let mut input = Vec::new();
        for lane in 0..32 {
            let (g, t) = (lane / 4, lane % 4 * 2);
            for (row, column) in [(g, t), (g + 8, t), (g, t + 8), (g + 8, t + 8)] {
                input.push(pair(a[row * 16 + column], a[row * 16 + column + 1]));
            }
            for k in [t, t + 8] {
                input.push(pair(b[k * 8 + g], b[(k + 1) * 8 + g]));
            }
            for (row, column) in [(g, t), (g, t + 1), (g + 8, t), (g + 8, t + 1)] {
                input.push(c[row * 8 + column].to_bits());
            }
        }
        let input = [input.clone(), input].concat();
        let output = probe(20, 0, &input, 64, Schedule::seeded(seed.into()));
        for (i, bits) in output.iter().enumerate() {
            let (lane, e) = (i / 4 % 32, i % 4);
            let (row, column) = (lane / 4 + e / 2 * 8, lane % 4 * 2 + e % 2);
            let products = (0..16)
                .map(|k| value(a[row * 16 + k]).to_f64() * value(b[k * 8 + column]).to_f64());
            let expected = f64::from(c[row * 8 + column]) + products.sum::<f64>();
            let difference = f64::from(f32::from_bits(*bits)) - expected;
            assert!(difference.abs() < TOLERANCE, "row {row} column {column}: off by {difference}");
        }
    }
}

#[test]
fn matrices_reach_the_lanes_that_multiply_them() {
    for argument in 0..32 {
        let input = noise(argument, 64 * 4);
        let output = probe(21, argument, &input, 64, Schedule::seeded(argument.into()));
        for (i, word) in output.iter().enumerate() {
            let (warp, lane, matrix) = (i / 128, i / 4 % 32, i % 4);
            let source = warp * 32 + matrix * 8 + lane / 4;
            assert_eq!(*word, input[source * 4 + lane % 4], "lane {lane} matrix {matrix}");
        }
    }
}

#[test]
fn a_wait_is_for_the_older_groups_of_copies() {
    let input: Vec<u32> = (0..64 * 16).map(|i| i + 7).collect();
    let mut early = 0;
    for landing in [Landing::AtOnce, Landing::AnyTime, Landing::AtTheEnd] {
        let schedule = Schedule { seed: 3, landing, disturbed: true };
        let output = probe(22, 0, &input, 64, schedule);
        for (thread, words) in output.chunks(4).enumerate() {
            let word = |group: usize, i: usize| input[thread * 16 + group * 4 + i];
            assert_eq!([words[0], words[1], words[3]], [word(0, 1), word(1, 2), word(3, 0)]);
            assert!(words[2] == POISON || words[2] == word(3, 0));
            early += usize::from(words[2] != POISON);
        }
        let range = match landing {
            Landing::AtOnce => 64..=64,
            Landing::AnyTime => 65..=127,
            Landing::AtTheEnd => 64..=127,
        };
        assert!(range.contains(&early), "{landing:?}: {early} landed before they were waited for");
    }
}

#[test]
fn atomics_count_every_thread() {
    let input = noise(9, 64 * 8);
    for seed in 0..6 {
        let arena = Arena::new(1 << 20);
        let (from, to) = (arena.put(&words(&input)), arena.put(&words(&[0; 4])));
        let params = [longs(&[from, to]), words(&[24, 0])].concat();
        let launched =
            Launch { variant: "probe", grid: 8, block: 64, params: &params, ..Launch::default() };
        launch(&launched, &Schedule::seeded(seed)).unwrap();
        let bits = input.iter().enumerate().fold(0, |all, (i, word)| all | word & 1 << (i % 32));
        let expected = [
            input.iter().fold(0u32, |a, b| a.wrapping_add(*b)),
            *input.iter().max().unwrap(),
            bits,
            64 * 8,
        ];
        assert_eq!(read_words(&arena, to, 4), expected);
    }
}
