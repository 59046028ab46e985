//! Scales, head norms and rotation after a plain qkv product, against the twin.

use crate::image::{Random, image_order, reorder};
use crate::params::{ROW_THREADS, RopeParams, float_bytes, word_bytes};
use crate::problem::{Plan, Problem};
use crate::run::{UNTOUCHED, check_rest, check_stored, read, values};
use crate::twin::{Near, rotate, some_rows, stored};
use spec_emu::{Arena, Launch, Schedule, launch};
use spec_kernels::{Format, Variant};

/// What sums and factors in f32 may lose.
const NORM_ERROR: f64 = 1e-6;

/// What the product has left undone.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Left {
    /// Norms of the heads.
    Norms,
    /// Scales and bias.
    Scales,
}

struct Twin<'a> {
    problem: &'a Problem,
    /// Of query and key heads.
    norms: Option<[&'a [f32]; 2]>,
    /// A row of the product's outputs, in natural order.
    qkv: Vec<f32>,
}

impl Twin<'_> {
    fn heads(&self, range: std::ops::Range<usize>) -> &[f32] {
        let d = self.problem.plan.head_dim();
        &self.qkv[range.start * d..range.end * d]
    }

    fn norm(&self, head: &[f32], weight: &[f32]) -> Vec<Near> {
        let squares: f64 = head.iter().map(|&x| f64::from(x).powi(2)).sum();
        let mean = squares / head.len() as f64 + f64::from(self.problem.eps);
        let scaled = |(&x, &w): (&f32, &f32)| f64::from(x) / mean.sqrt() * f64::from(w);
        let values = head.iter().zip(weight).map(scaled);
        values.map(|value| Near { value, error: value.abs() * NORM_ERROR }).collect()
    }

    /// Query heads are kind 0, key heads 1.
    fn turned(&self, heads: &[f32], kind: usize, position: u32) -> Vec<Near> {
        let d = self.problem.plan.head_dim();
        let table = &self.problem.rope[position as usize * d..][..d];
        let plain = |&x: &f32| Near { value: x.into(), error: f64::from(x.abs()) * NORM_ERROR };
        let normed = |head: &[f32]| match self.norms {
            Some(norms) => self.norm(head, norms[kind]),
            None => head.iter().map(plain).collect(),
        };
        heads.chunks(d).flat_map(|head| rotate(&normed(head), table)).collect()
    }
}

/// The scales of outputs and rows and the bias that turn sums into outputs.
struct Scales {
    outputs: Vec<f32>,
    rows: Vec<f32>,
    bias: Vec<f32>,
}

impl Scales {
    fn random(n: usize, count: usize, random: &mut Random) -> Self {
        Self {
            outputs: random.floats(n, |x| 1.5 + x),
            rows: random.floats(count, |x| 0.1 + 0.05 * x),
            bias: random.floats(n, |x| x),
        }
    }

    fn apply(&self, row: usize, sums: &[f32]) -> Vec<f32> {
        let factors = self.outputs.iter().zip(&self.bias);
        let scaled = |(&sum, (&of_output, &bias)): (&f32, (&f32, &f32))| {
            (f64::from(sum) * f64::from(self.rows[row]) * f64::from(of_output) + f64::from(bias))
                as f32
        };
        sums.iter().zip(factors).map(scaled).collect()
    }
}

fn is_right(left: Left, kv: Format, head_dim: usize, heads: [usize; 2], count: usize, grid: u32) {
    let problem = Problem::random(Plan::qkv(Format::Fp16, head_dim, heads, 64, kv), 90);
    let plan = problem.plan;
    let random = &mut Random(91);
    let picks = some_rows(count, random);
    let order = image_order(plan.epilogue, plan.n, heads[0] + heads[1]);
    let input: Vec<Vec<f32>> =
        (0..count).map(|i| random.floats(plan.n, |x| x * [1.0, 100.0, 0.01][i % 3])).collect();
    let (q_norm, k_norm) =
        (random.floats(head_dim, |x| 1.0 + 0.5 * x), random.floats(head_dim, |x| 2.0 + x));
    let scales = Scales::random(plan.n, count, random);

    let arena = Arena::new(1 << 26);
    let image: Vec<u8> = input.iter().flat_map(|row| float_bytes(&reorder(row, &order))).collect();
    let rows: Vec<u8> = picks.iter().flat_map(|&row| problem.rows[row].bytes()).collect();
    let queries_len = count * heads[0] * head_dim * 2;
    let put = |wanted: Left, values: &[f32]| {
        if left == wanted { arena.put(&float_bytes(values)) } else { 0 }
    };
    let params = RopeParams {
        input: arena.put(&image),
        scaling: [
            put(Left::Scales, &reorder(&scales.outputs, &order)),
            put(Left::Scales, &scales.rows),
            put(Left::Scales, &reorder(&scales.bias, &order)),
        ],
        q_norm: put(Left::Norms, &q_norm),
        k_norm: put(Left::Norms, &k_norm),
        rope: arena.put(&float_bytes(&problem.rope)),
        rows: arena.put(&rows),
        pages: arena.put(&word_bytes(&problem.pages)),
        queries: arena.put(&vec![UNTOUCHED; queries_len]),
        cache: arena.put(&vec![UNTOUCHED; problem.cache_bytes()]),
        kv_scales: arena.put(&float_bytes(&problem.kv_scales())),
        eps: problem.eps,
        num_rows: count,
        num_heads: heads[0],
        num_kv_heads: heads[1],
        max_pages: problem.max_pages(),
    };
    let variant = Variant::rope(kv, head_dim).to_string();
    let bytes = params.bytes();
    let launched =
        Launch { variant: &variant, grid, block: ROW_THREADS, params: &bytes, ..Launch::default() };
    launch(&launched, &Schedule::seeded(count as u64)).unwrap();

    let queries = read(&arena, params.queries, queries_len);
    let cache = read(&arena, params.cache, problem.cache_bytes());
    let mut seen = vec![false; cache.len()];
    for (i, (qkv, found)) in input.into_iter().zip(queries.chunks(queries_len / count)).enumerate()
    {
        let row = &problem.rows[picks[i]];
        if !row.is_active() {
            assert!(found.iter().all(|&byte| byte == UNTOUCHED), "row {i} is nobody's");
            continue;
        }
        let (norms, qkv) = match left {
            Left::Norms => (Some([&q_norm[..], &k_norm]), qkv),
            Left::Scales => (None, scales.apply(i, &qkv)),
        };
        let twin = Twin { problem: &problem, norms, qkv };
        let [q, kv_heads] = heads;
        let expected = twin.turned(twin.heads(0..q), 0, row.position);
        for (near, found) in expected.iter().zip(values(found, 2)) {
            assert!(near.to_half().has(found), "row {i}: {found} for {near:?}");
        }
        let keys = twin.turned(twin.heads(q..q + kv_heads), 1, row.position);
        let values = twin.heads(q + kv_heads..q + 2 * kv_heads).iter();
        let values =
            values.map(|&x| Near { value: x.into(), error: f64::from(x.abs()) * NORM_ERROR });
        let in_cache = [
            stored(&problem, &keys, &problem.key_scales),
            stored(&problem, &values.collect::<Vec<_>>(), &problem.value_scales),
        ];
        for (stored, places) in in_cache.iter().zip(problem.cache_places(row)) {
            check_stored(kv, stored, &places, &cache, &mut seen);
        }
    }
    check_rest(&cache, &seen);
}

fn is_right_in_every_shape(left: Left) {
    for kv in [Format::Fp8, Format::Fp16] {
        for (count, grid) in [(1, 1), (7, 3), (32, 2), (20, 100)] {
            is_right(left, kv, 64, [3, 1], count, grid);
            is_right(left, kv, 128, [4, 2], count, grid);
        }
    }
}

#[test]
fn heads_are_normed_turned_and_stored() {
    is_right_in_every_shape(Left::Norms);
}

#[test]
fn sums_are_scaled_turned_and_stored() {
    is_right_in_every_shape(Left::Scales);
}
