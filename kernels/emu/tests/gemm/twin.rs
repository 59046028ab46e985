//! The product and its epilogues by their definitions, in f64 and in the matrix's natural order.

use crate::image::{Random, e4m3_value};
use crate::problem::{Plan, Problem, Row};
use half::f16;
use spec_kernels::{Epilogue, Format};

/// What sums of a few thousand f32 products may lose, of the sum of their magnitudes.
const SUM_ERROR: f64 = 3e-5;
/// A normalised activation may round to the other neighbour in f16; a few of a row do.
const FLIP_ERROR: f64 = 1.0 / 1024.0;
/// Half a unit in the last place, and half the smallest step.
const F16_ERROR: (f64, f64) = (1.0 / 2048.0, 3e-8);
const E4M3_ERROR: (f64, f64) = (1.0 / 16.0, 1.0 / 1024.0);
const E4M3_MOST: f64 = 448.0;

/// A value and how far off a result may be.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Near {
    pub(crate) value: f64,
    pub(crate) error: f64,
}

impl Near {
    fn exact(value: f64) -> Self {
        Self { value, error: 0.0 }
    }

    fn plus(self, other: Self) -> Self {
        Self { value: self.value + other.value, error: self.error + other.error }
    }

    fn times(self, factor: f64) -> Self {
        Self { value: self.value * factor, error: self.error * factor.abs() }
    }

    fn rounded(self, (relative, absolute): (f64, f64)) -> Self {
        let error = self.error + self.value.abs() * relative + absolute;
        Self { value: self.value, error }
    }

    pub(crate) fn to_half(self) -> Self {
        Self { value: self.value.clamp(-65504.0, 65504.0), ..self.rounded(F16_ERROR) }
    }

    fn to_e4m3(self) -> Self {
        Self { value: self.value.clamp(-E4M3_MOST, E4M3_MOST), ..self.rounded(E4M3_ERROR) }
    }

    pub(crate) fn has(&self, found: f64) -> bool {
        (found - self.value).abs() <= self.error
    }
}

/// What a row of a problem becomes.
pub(crate) struct Expected {
    pub(crate) output: Vec<Near>,
    /// QKV: keys and values `[kv head][element]`, as stored.
    pub(crate) stored: [Vec<Near>; 2],
}

pub(crate) fn expect(problem: &Problem, row_idx: usize) -> Expected {
    let x = activations(problem, row_idx);
    let sums: Vec<Near> = (0..problem.plan.n).map(|n| product(problem, &x, n)).collect();
    let mut expected = Expected { output: Vec::new(), stored: [Vec::new(), Vec::new()] };
    let n = problem.plan.n;
    expected.output = match problem.plan.epilogue {
        Epilogue::Raw | Epilogue::Head => sums,
        Epilogue::Residual => {
            let old = &problem.residual[row_idx * n..][..n];
            sums.iter().zip(old).map(|(v, &old)| v.plus(Near::exact(old.into()))).collect()
        }
        Epilogue::SwiGlu => {
            let (gate, up) = sums.split_at(n / 2);
            gate.iter().zip(up).map(|(&gate, &up)| swiglu(gate, up).to_half()).collect()
        }
        Epilogue::Qkv { .. } => {
            let (queries, stored) = heads(problem, &problem.rows[row_idx], &sums);
            expected.stored = stored;
            queries
        }
    };
    for v in &mut expected.output {
        // The last addition and multiplication in f32.
        v.error += v.value.abs() * 3e-7;
    }
    expected
}

/// A row as the product reads it: f16.
fn activations(problem: &Problem, row: usize) -> Vec<f64> {
    let k = problem.plan.k;
    let input = &problem.input[row * k..][..k];
    if problem.plan.epilogue == Epilogue::Residual {
        return input.iter().map(|&x| x.into()).collect();
    }
    let squares: f64 = input.iter().map(|&x| f64::from(x).powi(2)).sum();
    let factor = 1.0 / (squares / k as f64 + f64::from(problem.eps)).sqrt();
    let half = |(&x, &w): (&f32, &f32)| f16::from_f64(f64::from(x) * factor * f64::from(w));
    input.iter().zip(&problem.norm).map(|pair| half(pair).to_f64()).collect()
}

fn product(problem: &Problem, x: &[f64], n: usize) -> Near {
    let (mut sum, mut magnitude, mut most) = (0.0, 0.0, 0f64);
    for (k, x) in x.iter().enumerate() {
        let term = x * problem.matrix.value(n, k);
        sum += term;
        magnitude += term.abs();
        most = most.max(term.abs());
    }
    let error = magnitude * SUM_ERROR + most * FLIP_ERROR;
    let (scale, bias) = (problem.scales[n].into(), problem.bias[n].into());
    Near { value: sum, error }.times(scale).plus(Near::exact(bias))
}

fn swiglu(gate: Near, up: Near) -> Near {
    let silu = gate.value / (1.0 + (-gate.value).exp());
    // The slope of silu is at most 1.1; its exponential is good to some millionths.
    let silu = Near { value: silu, error: 1.1 * gate.error + silu.abs() * 1e-5 };
    let error = silu.error * (up.value.abs() + up.error) + silu.value.abs() * up.error;
    Near { value: silu.value * up.value, error }
}

fn heads(problem: &Problem, row: &Row, sums: &[Near]) -> (Vec<Near>, [Vec<Near>; 2]) {
    let Plan { num_heads, .. } = problem.plan;
    let d = problem.plan.head_dim();
    let (queries, rest) = sums.split_at(num_heads * d);
    let (keys, values) = rest.split_at(problem.plan.num_kv_heads() * d);
    if !row.is_active() {
        return (Vec::new(), [Vec::new(), Vec::new()]);
    }
    let table = &problem.rope[row.position as usize * d..][..d];
    let turn = |heads: &[Near]| heads.chunks(d).flat_map(|head| rotate(head, table)).collect();
    let queries: Vec<Near> = turn(queries);
    let keys: Vec<Near> = turn(keys);
    let stored = [
        stored(problem, &keys, &problem.key_scales),
        stored(problem, values, &problem.value_scales),
    ];
    (queries.iter().map(|v| v.to_half()).collect(), stored)
}

pub(crate) fn rotate(head: &[Near], table: &[f32]) -> Vec<Near> {
    let half = head.len() / 2;
    let turned = |e: usize| {
        let (cos, sin) = (f64::from(table[e % half]), f64::from(table[half + e % half]));
        let partner = if e < half { head[e + half].times(-1.0) } else { head[e - half] };
        head[e].times(cos).plus(partner.times(sin)).rounded((1e-6, 1e-7))
    };
    (0..head.len()).map(turned).collect()
}

/// The sum of squares of each 64 elements of a row.
pub(crate) fn squares_of_tiles(row: &[f32]) -> Vec<f64> {
    row.chunks(64).map(|tile| tile.iter().map(|&x| f64::from(x).powi(2)).sum()).collect()
}

/// Heads of which each has one of these scales, as the cache has them.
pub(crate) fn stored(problem: &Problem, heads: &[Near], scales: &[f32]) -> Vec<Near> {
    let store = |v: Near, scale: f32| match problem.plan.kv {
        Format::Fp16 => v.to_half(),
        Format::Fp8 => v.times(1.0 / f64::from(scale)).to_e4m3(),
    };
    let heads = heads.chunks(problem.plan.head_dim()).zip(scales);
    heads.flat_map(|(head, &scale)| head.iter().map(move |&v| store(v, scale))).collect()
}

/// The value of an element of the cache.
pub(crate) fn load(bytes: &[u8], kv: Format, place: usize) -> f64 {
    match kv {
        Format::Fp8 => e4m3_value(bytes[place]),
        Format::Fp16 => f16::from_le_bytes([bytes[2 * place], bytes[2 * place + 1]]).to_f64(),
    }
}

/// The best of each 64 logits by the definition: the largest, and of equals the first.
pub(crate) fn best_of_tiles(logits: &[f32]) -> Vec<(f32, u32)> {
    let best = |(tile, logits): (usize, &[f32])| {
        let mut best = (f32::NEG_INFINITY, tile * 64);
        for (i, &logit) in logits.iter().enumerate() {
            if logit > best.0 {
                best = (logit, tile * 64 + i);
            }
        }
        (best.0, best.1 as u32)
    };
    logits.chunks(64).enumerate().map(best).collect()
}

/// `count` of the problem's rows, in some order.
pub(crate) fn some_rows(count: usize, random: &mut Random) -> Vec<usize> {
    let mut rows: Vec<usize> = (0..crate::problem::ALL_ROWS).collect();
    for i in 0..count {
        let other = i + random.below(rows.len() - i);
        rows.swap(i, other);
    }
    rows.truncate(count);
    rows
}
