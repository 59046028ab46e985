//! What this machine can do at most: bytes read a second and multiply-adds a second. Measured with the
//! pool, the memory and the kernels that inference uses, each in well under a second.

use super::{Arena, ArenaSlice, Isa, Pool, Prepared, Weight, linear, prepare};
use crate::Result;
use crate::model::Dtype;
use crate::model::panel::packed_bytes;
use std::hint::black_box;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Bytes of a sample: short enough to fit between the doings of others on a shared machine.
const SAMPLE_BYTES: usize = 16 << 20;
/// Samples in memory, read in turns: far more bytes than caches hold.
const NUM_SAMPLES: usize = 24;
/// Reads of all samples.
const ROUNDS: usize = 4;

/// Outputs and inputs of the matrix that the rate is measured with: it stays in a cache.
const MATRIX: (usize, usize) = (512, 1024);
/// Copies of a matrix are that many bytes together: far more than caches hold, so that each comes from memory.
const COLD_BYTES: usize = 128 << 20;
/// Times that all of them are read, at least.
const MIN_COLD_SAMPLES: usize = 3;
/// How long the rates of a format are measured.
const RATE_TIME: Duration = Duration::from_millis(200);

/// Bytes a second that all threads of the pool read from memory together.
pub fn read_bandwidth(pool: &Pool) -> Result<f64> {
    let mut arena = Arena::new(NUM_SAMPLES * SAMPLE_BYTES)?;
    let source = vec![1; SAMPLE_BYTES];
    let samples: Vec<ArenaSlice> = (0..NUM_SAMPLES).map(|_| arena.push(pool, &source)).collect();
    let rounds = (0..ROUNDS).flat_map(|_| &samples);
    let mut seconds: Vec<f64> = rounds.map(|sample| time(|| read_all(pool, sample))).collect();
    Ok(SAMPLE_BYTES as f64 / quiet(&mut seconds))
}

/// Reads every byte, each thread its part.
pub fn read_all(pool: &Pool, data: &[u8]) {
    let words = data.as_chunks::<8>().0;
    let part = words.len().div_ceil(pool.threads()).max(1);
    let total = AtomicU64::new(0);
    pool.run(|worker| {
        let part = words.chunks(part).nth(worker).unwrap_or_default();
        let sum = part.iter().fold(0_u64, |sum, v| sum.wrapping_add(u64::from_ne_bytes(*v)));
        total.fetch_add(sum, Ordering::Relaxed);
    });
    black_box(total);
}

/// Multiply-adds a second of products with weights of `dtype` that are in a cache: of 1 row, of 2, up to
/// `max_rows`.
pub fn multiply_rates(pool: &Pool, isa: Isa, dtype: Dtype, max_rows: usize) -> Result<Vec<f64>> {
    let (n, k) = MATRIX;
    // Ordinary numbers in every format.
    let packed = vec![0x3c; packed_bytes(dtype, n, k)];
    let bytes = Arena::new(packed.len())?.push(pool, &packed);
    let scales = vec![1e-3; if dtype.has_output_scales() { n } else { 0 }];
    let weight = Weight::new(dtype, n, k, bytes, scales, None);
    let x: Vec<f32> = (0..max_rows * k).map(|i| (i % 97) as f32 / 97.0 - 0.5).collect();
    let (mut prepared, mut out) = (Prepared::default(), vec![0.0; max_rows * n]);
    let mut seconds = vec![Vec::new(); max_rows];
    let start = Instant::now();
    // The row counts take turns, so that none of them has all of a bad moment.
    while seconds[0].len() < 2 || start.elapsed() < RATE_TIME {
        for (idx, seconds) in seconds.iter_mut().enumerate() {
            let rows = idx + 1;
            prepare(isa, dtype, &x[..rows * k], rows, k, &mut prepared, pool);
            let out = &mut out[..rows * n];
            seconds.push(time(|| linear(isa, pool, &weight, &prepared, rows, out)));
        }
    }
    let mut seconds: Vec<f64> = seconds.iter_mut().map(|seconds| quiet(seconds)).collect();
    at_most_what_follows(&mut seconds);
    let rate = |(idx, seconds)| ((idx + 1) * n * k) as f64 / seconds;
    Ok(seconds.into_iter().enumerate().map(rate).collect())
}

/// Seconds that a pass takes for one matrix of `n` outputs and `k` inputs, of each of these numbers of rows: with weights that
/// come from memory, rows that have to be prepared, and threads that wait for each other at its end.
pub fn product_seconds(
    pool: &Pool,
    isa: Isa,
    dtype: Dtype,
    [n, k]: [usize; 2],
    rows: &[usize],
) -> Result<Vec<f64>> {
    let packed = vec![0x3c; packed_bytes(dtype, n, k)];
    let num_copies = COLD_BYTES.div_ceil(packed.len());
    let mut arena = Arena::new(num_copies * Arena::room(packed.len()))?;
    let weights: Vec<Weight> = (0..num_copies)
        .map(|_| {
            let scales = vec![1e-3; if dtype.has_output_scales() { n } else { 0 }];
            Weight::new(dtype, n, k, arena.push(pool, &packed), scales, None)
        })
        .collect();
    let most = rows.iter().copied().max().unwrap_or(0);
    let x: Vec<f32> = (0..most * k).map(|i| (i % 97) as f32 / 97.0 - 0.5).collect();
    let (mut prepared, mut out) = (Prepared::default(), vec![0.0; most * n]);
    let mut seconds = vec![Vec::new(); rows.len()];
    let start = Instant::now();
    // The row counts take turns, so that none of them has all of a bad moment.
    while seconds.first().is_some_and(|all| all.len() < MIN_COLD_SAMPLES)
        || start.elapsed() < RATE_TIME
    {
        for (&rows, seconds) in rows.iter().zip(&mut seconds) {
            let out = &mut out[..rows * n];
            let all = time(|| {
                for weight in &weights {
                    prepare(isa, dtype, &x[..rows * k], rows, k, &mut prepared, pool);
                    linear(isa, pool, weight, &prepared, rows, out);
                }
            });
            seconds.push(all / num_copies as f64);
        }
    }
    Ok(seconds.iter_mut().map(|seconds| median(seconds)).collect())
}

/// The one in the middle. Panics without samples.
fn median(seconds: &mut [f64]) -> f64 {
    seconds.sort_by(f64::total_cmp);
    seconds[seconds.len() / 2]
}

/// Fewer rows take no longer than more: what says otherwise was disturbed.
fn at_most_what_follows(seconds: &mut [f64]) {
    let mut least = f64::INFINITY;
    for seconds in seconds.iter_mut().rev() {
        least = least.min(*seconds);
        *seconds = least;
    }
}

/// Seconds that `work` takes.
pub fn time(work: impl FnOnce()) -> f64 {
    let start = Instant::now();
    work();
    start.elapsed().as_secs_f64()
}

/// The fastest tenth: what a sample takes when nothing else runs. Panics without samples.
pub fn quiet(seconds: &mut [f64]) -> f64 {
    seconds.sort_by(f64::total_cmp);
    seconds[seconds.len() / 10]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_measurements_are_of_a_possible_machine() {
        let pool = Pool::new(2);
        let bandwidth = read_bandwidth(&pool).unwrap();
        assert!((1e8..1e14).contains(&bandwidth), "{bandwidth} bytes a second");
        for dtype in Dtype::ALL {
            let rates = multiply_rates(&pool, Isa::detect(), dtype, 3).unwrap();
            assert_eq!(rates.len(), 3);
            for rate in rates {
                assert!((1e6..1e15).contains(&rate), "{rate} multiply-adds a second in {dtype}");
            }
        }
    }

    #[test]
    fn more_rows_of_a_cold_matrix_take_longer() {
        let pool = Pool::new(2);
        let rows = [1, 64];
        let seconds =
            product_seconds(&pool, Isa::detect(), Dtype::Int8, [1024, 512], &rows).unwrap();
        assert!(seconds[0] > 0.0 && seconds[1] > seconds[0], "{seconds:?}");
    }

    #[test]
    fn the_fastest_tenth_is_neither_the_best_nor_the_worst() {
        let mut seconds: Vec<f64> = (0..20).rev().map(f64::from).collect();
        assert_eq!(quiet(&mut seconds), 2.0);
        assert_eq!(quiet(&mut [5.0]), 5.0);
    }

    #[test]
    fn a_time_above_one_of_more_rows_is_lowered_to_it() {
        let mut seconds = [3.0, 1.0, 5.0, 2.0, 4.0];
        at_most_what_follows(&mut seconds);
        assert_eq!(seconds, [1.0, 1.0, 2.0, 2.0, 4.0]);
    }
}
