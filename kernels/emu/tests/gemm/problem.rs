//! The data of one product, row by row: what a row holds does not depend on how many run beside it.

use crate::image::{Matrix, Random, bytes_of, image_order};
use half::f16;
use spec_kernels::{Epilogue, Format};

/// Rows that a problem has; a run picks some of them.
pub(crate) const ALL_ROWS: usize = 321;
pub(crate) const NO_SEQUENCE: u32 = u32::MAX;
pub(crate) const PAGE_TOKENS: usize = 16;
const SEQUENCES: usize = 3;
const MAX_PAGES: usize = 27;
const NUM_PAGES: usize = 84;
const POSITIONS: usize = 50;

/// A matrix and what follows its product.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Plan {
    pub(crate) weight: Format,
    pub(crate) epilogue: Epilogue,
    pub(crate) n: usize,
    pub(crate) k: usize,
    pub(crate) has_bias: bool,
    /// QKV: format of the cache.
    pub(crate) kv: Format,
    /// QKV: the rest of n is value heads, as many as key heads.
    pub(crate) num_heads: usize,
}

impl Plan {
    pub(crate) fn new(weight: Format, epilogue: Epilogue, n: usize, k: usize) -> Self {
        Self { weight, epilogue, n, k, has_bias: false, kv: Format::Fp16, num_heads: 0 }
    }

    pub(crate) fn qkv(
        weight: Format,
        head_dim: usize,
        heads: [usize; 2],
        k: usize,
        kv: Format,
    ) -> Self {
        let n = (heads[0] + 2 * heads[1]) * head_dim;
        let epilogue = Epilogue::Qkv { head_dim };
        Self { num_heads: heads[0], kv, ..Self::new(weight, epilogue, n, k) }
    }

    pub(crate) fn with_bias(self) -> Self {
        Self { has_bias: true, ..self }
    }

    /// 64 where there are no heads.
    pub(crate) fn head_dim(&self) -> usize {
        if let Epilogue::Qkv { head_dim } = self.epilogue { head_dim } else { 64 }
    }

    pub(crate) fn num_kv_heads(&self) -> usize {
        (self.n / self.head_dim() - self.num_heads) / 2
    }

    /// Elements of a row of the output, and the bytes of one.
    pub(crate) fn output_row(&self) -> (usize, usize) {
        match self.epilogue {
            Epilogue::Qkv { head_dim } => (self.num_heads * head_dim, 2),
            Epilogue::SwiGlu => (self.n / 2, 2),
            Epilogue::Raw | Epilogue::Residual | Epilogue::Head => (self.n, 4),
        }
    }
}

/// `Row` of `types.cuh`.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Row {
    pub(crate) token: u32,
    pub(crate) position: u32,
    pub(crate) slot: u32,
    pub(crate) sequence: u32,
}

impl Row {
    pub(crate) fn is_active(&self) -> bool {
        self.sequence != NO_SEQUENCE
    }

    pub(crate) fn bytes(&self) -> Vec<u8> {
        let (base, ancestors, unused) = (self.slot + 1, 0, 0);
        let Self { token, position, slot, sequence } = *self;
        let words = [token, position, slot, base, ancestors, ancestors, sequence, unused];
        words.iter().flat_map(|word| word.to_le_bytes()).collect()
    }
}

pub(crate) struct Problem {
    pub(crate) plan: Plan,
    pub(crate) matrix: Matrix,
    /// Row of the matrix that each row of its image is.
    pub(crate) order: Vec<usize>,
    /// In natural order; ones for FP16.
    pub(crate) scales: Vec<f32>,
    /// In natural order.
    pub(crate) bias: Vec<f32>,
    pub(crate) norm: Vec<f32>,
    /// `[ALL_ROWS][k]`; halves where the kernel reads halves.
    pub(crate) input: Vec<f32>,
    pub(crate) rows: Vec<Row>,
    pub(crate) rope: Vec<f32>,
    /// `[SEQUENCES][MAX_PAGES]`
    pub(crate) pages: Vec<u32>,
    /// What stands in the output before: `[ALL_ROWS][n]`.
    pub(crate) residual: Vec<f32>,
    pub(crate) eps: f32,
    /// Of the keys of each head in an FP8 cache: what stands there is multiplied by them.
    pub(crate) key_scales: Vec<f32>,
    /// The same of the values.
    pub(crate) value_scales: Vec<f32>,
}

impl Problem {
    pub(crate) fn random(plan: Plan, seed: u64) -> Self {
        let random = &mut Random(seed);
        let Plan { weight, n, k, .. } = plan;
        let rotated = plan.num_heads + plan.num_kv_heads();
        Self {
            plan,
            matrix: Matrix::random(weight, n, k, random),
            order: image_order(plan.epilogue, n, rotated),
            scales: random.floats(n, |x| if weight == Format::Fp8 { 0.02 + 0.01 * x } else { 1.0 }),
            bias: random.floats(n, |x| if plan.has_bias { x } else { 0.0 }),
            norm: random.floats(k, |x| 1.0 + 0.5 * x),
            input: inputs(plan, random),
            rows: (0..ALL_ROWS).map(row).collect(),
            rope: rope_table(plan.head_dim()),
            pages: pages(random),
            residual: random.floats(ALL_ROWS * n, |x| x),
            eps: 1e-3,
            key_scales: (0..plan.num_kv_heads()).map(|head| [0.5, 4.0, 1.0][head % 3]).collect(),
            value_scales: (0..plan.num_kv_heads()).map(|head| [2.0, 0.25][head % 2]).collect(),
        }
    }

    /// As the kernels take them.
    pub(crate) fn kv_scales(&self) -> Vec<f32> {
        [&self.key_scales[..], &self.value_scales].concat()
    }

    pub(crate) fn max_pages(&self) -> usize {
        MAX_PAGES
    }

    /// Bytes of the layer's cache.
    pub(crate) fn cache_bytes(&self) -> usize {
        let heads = self.plan.num_kv_heads().max(1);
        NUM_PAGES * heads * 2 * PAGE_TOKENS * self.plan.head_dim() * bytes_of(self.plan.kv)
    }

    /// Where elements of a row stand in the cache, in elements: `[K | V][kv head][element]`.
    pub(crate) fn cache_places(&self, row: &Row) -> [Vec<usize>; 2] {
        let (d, heads) = (self.plan.head_dim(), self.plan.num_kv_heads());
        let (slot, sequence) = (row.slot as usize, row.sequence as usize);
        let page = self.pages[sequence * MAX_PAGES + slot / PAGE_TOKENS] as usize;
        let token = slot % PAGE_TOKENS;
        let block = |head: usize| (page * heads + head) * 2 * PAGE_TOKENS * d;
        let elements = (0..heads * d).map(|i| (block(i / d), i % d));
        let keys = elements.clone().map(|(block, e)| block + token * d + e).collect();
        let values = elements.map(|(block, e)| block + PAGE_TOKENS * d + e * PAGE_TOKENS + token);
        [keys, values.collect()]
    }
}

/// Residuals of very different size, or halves.
fn inputs(plan: Plan, random: &mut Random) -> Vec<f32> {
    let scale = |row: usize| [1.0, 30.0, 1e-3, 0.5, 1e3][row % 5];
    let is_half = plan.epilogue == Epilogue::Residual;
    let of = |i: usize, x: f32| {
        if is_half { f16::from_f32(x).to_f32() } else { x * scale(i / plan.k) }
    };
    (0..ALL_ROWS * plan.k).map(|i| of(i, random.signed())).collect()
}

/// Slots of three sequences, positions that are not the slots; every fifth row is nobody's and full of
/// numbers that must not be used.
fn row(idx: usize) -> Row {
    if idx % 5 == 4 {
        let wild = 0xdead_beef;
        return Row { token: wild, position: wild, slot: wild, sequence: NO_SEQUENCE };
    }
    let slot = idx / SEQUENCES * 4 + idx % SEQUENCES;
    Row {
        token: 0,
        position: (idx * 13 % POSITIONS) as u32,
        slot: slot as u32,
        sequence: (idx % SEQUENCES) as u32,
    }
}

fn rope_table(head_dim: usize) -> Vec<f32> {
    let half = head_dim / 2;
    let angle = |position: usize, i: usize| {
        position as f64 * 100f64.powf(-((i % half) as f64) / half as f64)
    };
    let value = |position: usize, i: usize| {
        let angle = angle(position, i);
        (if i < half { angle.cos() } else { angle.sin() }) as f32
    };
    (0..POSITIONS * head_dim).map(|i| value(i / head_dim, i % head_dim)).collect()
}

/// Every sequence has pages of its own, scattered.
fn pages(random: &mut Random) -> Vec<u32> {
    let mut pages: Vec<u32> = (0..NUM_PAGES as u32).collect();
    for i in (1..pages.len()).rev() {
        pages.swap(i, random.below(i + 1));
    }
    pages.truncate(SEQUENCES * MAX_PAGES);
    pages
}
