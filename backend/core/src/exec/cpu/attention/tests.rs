//! Attention against a naive twin in f64, and what its results must not depend on.
#![allow(unsafe_code)]

use super::*;
use crate::model::KvScales;
use half::f16;

/// Scores are sums of `head_dim` f32 products and weights are exponentials of them.
const TOLERANCE: f64 = 2e-5;

/// Query heads, key and value heads, elements of a head: groups of 1, 2, 6, 7, 9 and 13.
const SHAPES: [(usize, usize, usize); 7] =
    [(2, 2, 64), (4, 2, 128), (12, 2, 128), (7, 1, 80), (6, 3, 18), (9, 1, 96), (13, 1, 2)];

/// First position and number of rows of each segment: contexts of 1, 15, 16, 17 and 100, prefills,
/// verifications, and rows on both sides of a chunk's end.
const SEGMENTS: [(usize, usize); 9] =
    [(0, 1), (14, 1), (15, 1), (16, 1), (99, 1), (0, 21), (91, 9), (249, 12), (600, 2)];

const DTYPES: [Dtype; 3] = [Dtype::Fp32, Dtype::Fp16, Dtype::Fp8];

const LAYER: usize = 1;

/// Numbers in -1..1 that depend on `seed` and `idx` only.
fn noise(seed: usize, idx: usize) -> f32 {
    let mut x = (seed as u64) << 32 | idx as u64;
    for _ in 0..3 {
        x = (x ^ x >> 31).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }
    (x >> 40) as f32 / (1 << 23) as f32 - 1.0
}

/// The number that the format stores exactly.
fn stored(dtype: Dtype, x: f32) -> f32 {
    match dtype {
        Dtype::Fp32 => x,
        Dtype::Fp16 => f16::from_f32(x).to_f32(),
        _ => (x * 15.0).round() / 8.0,
    }
}

/// One sequence with the keys and values of its positions.
struct Sequence {
    pages: Vec<PageId>,
    first_position: usize,
    num_rows: usize,
    keys: Vec<Vec<f32>>,
    values: Vec<Vec<f32>>,
}

/// A cache with sequences in it.
struct World {
    kv: KvCache,
    num_heads: usize,
    sequences: Vec<Sequence>,
    q: Vec<f32>,
    /// The first position that a row at this one sees.
    first: fn(usize) -> usize,
}

/// Windows of 1, 8, 30 and 300 positions, and all positions but the first.
const FIRST: [fn(usize) -> usize; 5] = [
    |position| position,
    |position| position.saturating_sub(7),
    |position| position.saturating_sub(29),
    |position| position.saturating_sub(299),
    |position| position.min(1),
];

impl World {
    /// Every position of every page holds `stale` before the sequences are written.
    fn new(dtype: Dtype, shape: (usize, usize, usize), stale: f32) -> Self {
        Self::scaled(dtype, shape, stale, None)
    }

    /// The same with scales of an FP8 cache.
    fn scaled(
        dtype: Dtype,
        (num_heads, num_kv_heads, head_dim): (usize, usize, usize),
        stale: f32,
        scales: Option<&KvScales>,
    ) -> Self {
        let counts = SEGMENTS.map(|(first, rows)| (first + rows).div_ceil(PAGE_TOKENS));
        let num_pages = counts.iter().sum::<usize>();
        let kv = KvCache::new(dtype, 2, num_pages, num_kv_heads, head_dim).unwrap();
        let kv = kv.with_scales(scales);
        let row = num_kv_heads * head_dim;
        let everything: Vec<PageId> = (0..num_pages as PageId).collect();
        for position in 0..num_pages * PAGE_TOKENS {
            write(&kv, &everything, position, &vec![stale; row], &vec![stale; row]);
        }
        // Pages from the last to the first, every second one first: no two in a row are neighbours.
        let mut free = everything.into_iter().rev().collect::<Vec<_>>();
        free.sort_by_key(|page| page % 2);
        let mut free = free.into_iter();
        let mut sequences = Vec::new();
        for (idx, (first_position, num_rows)) in SEGMENTS.into_iter().enumerate() {
            let pages: Vec<PageId> = free.by_ref().take(counts[idx]).collect();
            let vector = |seed: usize| -> Vec<f32> {
                (0..row).map(|element| stored(dtype, noise(seed, element))).collect()
            };
            let context = first_position + num_rows;
            let keys = (0..context).map(|at| vector(idx * 10_000 + at)).collect();
            let values = (0..context).map(|at| vector(idx * 10_000 + 5_000 + at)).collect();
            sequences.push(Sequence { pages, first_position, num_rows, keys, values });
        }
        for sequence in &sequences {
            for position in 0..sequence.keys.len() {
                let (key, value) = (&sequence.keys[position], &sequence.values[position]);
                write(&kv, &sequence.pages, position, key, value);
            }
        }
        let num_rows: usize = SEGMENTS.iter().map(|(_, rows)| rows).sum();
        let q = (0..num_rows * num_heads * head_dim).map(|idx| 3.0 * noise(99, idx)).collect();
        Self { kv, num_heads, sequences, q, first: |_| 0 }
    }

    /// The same where rows do not see everything before them; what none of a sequence sees is NaN.
    fn seeing(self, first: fn(usize) -> usize) -> Self {
        for Sequence { pages, first_position, keys, .. } in &self.sequences {
            for (position, key) in keys[..first(*first_position)].iter().enumerate() {
                let nan = vec![f32::NAN; key.len()];
                write(&self.kv, pages, position, &nan, &nan);
            }
        }
        Self { first, ..self }
    }

    fn rows(&self) -> Vec<Row<'_>> {
        let rows = |sequence| {
            let &Sequence { ref pages, first_position, num_rows, .. } = sequence;
            let first = self.first;
            let row = move |position| Row { pages, first: first(position), position };
            (first_position..first_position + num_rows).map(row)
        };
        self.sequences.iter().flat_map(rows).collect()
    }

    /// Elements of a row of `q`.
    fn row_len(&self) -> usize {
        self.num_heads * self.kv.head_dim()
    }

    fn attention<'a>(&'a self, isa: Isa, q: &'a [f32], rows: &'a [Row<'a>]) -> Attention<'a> {
        let scale = 1.0 / (self.kv.head_dim() as f32).sqrt();
        Attention {
            isa,
            kv: &self.kv,
            layer: LAYER,
            branches: None,
            num_heads: self.num_heads,
            scale,
            q,
            rows,
        }
    }

    fn run(&self, isa: Isa) -> Vec<f32> {
        let mut out = vec![f32::NAN; self.q.len()];
        self.attention(isa, &self.q, &self.rows()).run(&mut out);
        out
    }

    /// Softmax over all scores at once, in f64.
    fn naive(&self) -> Vec<f64> {
        let (head_dim, group) = (self.kv.head_dim(), self.num_heads / self.kv.num_kv_heads());
        let mut queries = self.q.chunks(head_dim);
        let mut out = Vec::new();
        for sequence in &self.sequences {
            for row in 0..sequence.num_rows {
                let position = sequence.first_position + row;
                let context = (self.first)(position)..position + 1;
                for head in 0..self.num_heads {
                    let part = head / group * head_dim..(head / group + 1) * head_dim;
                    let query = queries.next().unwrap();
                    let score = |key: &Vec<f32>| -> f64 {
                        let key = &key[part.clone()];
                        let dot: f64 =
                            query.iter().zip(key).map(|(q, k)| f64::from(*q) * f64::from(*k)).sum();
                        dot / (head_dim as f64).sqrt()
                    };
                    let scores: Vec<f64> =
                        sequence.keys[context.clone()].iter().map(score).collect();
                    let max = scores.iter().copied().fold(f64::MIN, f64::max);
                    let weights: Vec<f64> = scores.iter().map(|x| (x - max).exp()).collect();
                    let total: f64 = weights.iter().sum();
                    out.extend(part.map(|element| {
                        let values = &sequence.values[context.clone()];
                        let values = values.iter().map(|value| f64::from(value[element]));
                        weights.iter().zip(values).map(|(w, v)| w * v).sum::<f64>() / total
                    }));
                }
            }
        }
        out
    }
}

fn write(kv: &KvCache, pages: &[PageId], position: usize, key: &[f32], value: &[f32]) {
    // SAFETY: the tests write from one thread, and attend after that only.
    unsafe { kv.write(LAYER, pages, position, key, value) };
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|x| x.to_bits()).collect()
}

fn assert_exact(world: &World, name: &str) {
    let exact = world.naive();
    for isa in Isa::supported() {
        for (idx, (&found, &exact)) in world.run(isa).iter().zip(&exact).enumerate() {
            let error = (f64::from(found) - exact).abs();
            let row = idx / world.row_len();
            assert!(
                error <= TOLERANCE,
                "{isa:?} {name} row {row} element {idx}: {found}, not {exact}"
            );
        }
    }
}

#[test]
fn every_level_and_format_matches_the_naive_twin() {
    for shape in SHAPES {
        for dtype in DTYPES {
            assert_exact(&World::new(dtype, shape, f32::NAN), &format!("{dtype} {shape:?}"));
        }
    }
}

/// Scales are powers of two: where everything is stored whole under them, what is read is what was written.
#[test]
fn scales_change_no_bit_of_what_fits() {
    for shape in SHAPES {
        let exponents = |first: usize| {
            let of_layer =
                |layer: usize| (0..shape.1).map(move |head| exponent(first + 5 * layer + head));
            (0..2).map(|layer| of_layer(layer).collect()).collect()
        };
        let scales = KvScales { keys: exponents(0), values: exponents(3) };
        let plain = World::new(Dtype::Fp8, shape, 0.0);
        let scaled = World::scaled(Dtype::Fp8, shape, 0.0, Some(&scales));
        for isa in Isa::supported() {
            assert_eq!(bits(&scaled.run(isa)), bits(&plain.run(isa)), "{isa:?} {shape:?}");
        }
    }
}

/// Exponents under which e4m3 still has all multiples of an eighth up to two.
fn exponent(idx: usize) -> i8 {
    [-7, 6, 0, -3, 2, 5, -1][idx % 7]
}

#[test]
fn a_row_sees_nothing_before_its_first_position() {
    for shape in SHAPES {
        for (idx, first) in FIRST.into_iter().enumerate() {
            let world = World::new(Dtype::Fp16, shape, f32::NAN).seeing(first);
            assert_exact(&world, &format!("{shape:?}, the {idx}. window"));
        }
    }
}

#[test]
fn a_row_has_the_same_bits_alone_and_in_any_company() {
    for (idx, shape) in SHAPES.into_iter().enumerate() {
        for dtype in DTYPES {
            let world = World::new(dtype, shape, 0.5);
            let world = if idx % 2 == 0 { world } else { world.seeing(FIRST[idx % FIRST.len()]) };
            let (rows, len) = (world.rows(), world.row_len());
            for isa in Isa::supported() {
                let together = bits(&world.run(isa));
                for (idx, row) in rows.iter().enumerate() {
                    let part = idx * len..(idx + 1) * len;
                    let mut alone = vec![0.0; len];
                    world
                        .attention(isa, &world.q[part.clone()], std::slice::from_ref(row))
                        .run(&mut alone);
                    assert_eq!(bits(&alone), together[part], "{isa:?} {dtype} {shape:?} row {idx}");
                }
                // Other cuts of the segments: all but the first five rows, and every third row.
                let mut late = vec![0.0; world.q.len() - 5 * len];
                world.attention(isa, &world.q[5 * len..], &rows[5..]).run(&mut late);
                assert_eq!(bits(&late), together[5 * len..], "{isa:?} {dtype} {shape:?}");
            }
        }
    }
}

#[test]
fn tasks_on_threads_in_any_order_give_the_same_bits() {
    /// A pointer that threads may share: their tasks write to different elements.
    struct Out(*mut f32);
    // SAFETY: see above.
    unsafe impl Sync for Out {}

    let world = World::new(Dtype::Fp16, (12, 2, 128), f32::NAN);
    let rows = world.rows();
    let attention = world.attention(Isa::detect(), &world.q, &rows);
    let mut found = vec![0.0; world.q.len()];
    let tasks = attention.tasks();
    let out = Out(found.as_mut_ptr());
    std::thread::scope(|scope| {
        for worker in 0..3 {
            let (out, tasks) = (&out, &tasks);
            scope.spawn(move || {
                for task in tasks.iter().rev().skip(worker).step_by(3) {
                    // SAFETY: tasks have rows and heads of their own; nobody writes to the cache.
                    unsafe { attention.run_task(task, out.0) };
                }
            });
        }
    });
    assert_eq!(bits(&found), bits(&world.run(Isa::detect())));
}

#[test]
fn tasks_cover_every_row_and_head_once_and_never_two_sequences() {
    for shape in SHAPES {
        let world = World::new(Dtype::Fp32, shape, 0.0);
        let rows = world.rows();
        let tasks = world.attention(Isa::PORTABLE, &world.q, &rows).tasks();
        let mut seen = vec![0; rows.len() * shape.1];
        for task in tasks {
            for row in task.rows.clone() {
                seen[row * shape.1 + task.kv_head] += 1;
                assert!(std::ptr::eq(rows[row].pages, rows[task.rows.start].pages));
            }
        }
        assert!(seen.iter().all(|&count| count == 1), "{shape:?}: {seen:?}");
    }
}

#[test]
fn what_lies_behind_a_row_has_no_part_in_it() {
    for dtype in DTYPES {
        for stale in [f32::NAN, 1e30, -1e30] {
            let clean = World::new(dtype, (7, 1, 80), 0.0);
            let dirty = World::new(dtype, (7, 1, 80), stale);
            for isa in Isa::supported() {
                assert_eq!(bits(&clean.run(isa)), bits(&dirty.run(isa)), "{isa:?} {dtype} {stale}");
            }
        }
    }
}

#[test]
fn nan_reaches_the_rows_that_see_it_and_no_earlier_ones() {
    let (sequence, poisoned) = (7, 252);
    for dtype in [Dtype::Fp32, Dtype::Fp16] {
        for key in [true, false] {
            let world = World::new(dtype, (6, 3, 18), 0.0);
            for isa in Isa::supported() {
                let before = world.run(isa);
                let Sequence { pages, first_position, num_rows, keys, values } =
                    &world.sequences[sequence];
                let nan = vec![f32::NAN; keys[poisoned].len()];
                let (good_key, good_value) = (&keys[poisoned], &values[poisoned]);
                let (bad_key, bad_value) = if key { (&nan, good_value) } else { (good_key, &nan) };
                write(&world.kv, pages, poisoned, bad_key, bad_value);
                let after = world.run(isa);
                write(&world.kv, pages, poisoned, good_key, good_value);

                let start: usize = SEGMENTS[..sequence].iter().map(|(_, rows)| rows).sum();
                let first_hit = (start + poisoned - first_position) * world.row_len();
                let end = (start + num_rows) * world.row_len();
                assert_eq!(bits(&after[..first_hit]), bits(&before[..first_hit]), "{isa:?}");
                assert!(after[first_hit..end].iter().all(|x| x.is_nan()), "{isa:?} {dtype} {key}");
                assert_eq!(bits(&after[end..]), bits(&before[end..]), "{isa:?}");
            }
        }
    }
}

#[test]
fn extreme_scores_neither_overflow_nor_vanish() {
    let mut world = World::new(Dtype::Fp32, (2, 2, 64), f32::NAN);
    for q in &mut world.q {
        *q *= 300.0;
    }
    let exact = world.naive();
    for isa in Isa::supported() {
        for (&found, &exact) in world.run(isa).iter().zip(&exact) {
            // A score of 1000 has an f32 error of 1e-4, which is the relative error of its weight.
            assert!((f64::from(found) - exact).abs() <= 2e-3, "{isa:?}: {found}, not {exact}");
        }
    }
}
