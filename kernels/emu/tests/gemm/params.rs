//! The params structs of the kernels, field by field, and what the host must know to launch them.

use spec_kernels::Format;

/// Threads of the embedding, and of head norms and rotation.
pub(crate) const ROW_THREADS: u32 = 256;
/// `GemmParams` of `gemm.cu`.
#[derive(Clone, Debug, Default)]
pub(crate) struct GemmParams {
    pub(crate) weights: u64,
    pub(crate) scales: u64,
    pub(crate) bias: u64,
    pub(crate) input: u64,
    pub(crate) norm: u64,
    pub(crate) squares: u64,
    pub(crate) rows: u64,
    pub(crate) row_index: u64,
    pub(crate) partials: u64,
    pub(crate) arrivals: u64,
    pub(crate) output: u64,
    pub(crate) cache: u64,
    pub(crate) rope: u64,
    pub(crate) pages: u64,
    pub(crate) kv_scales: u64,
    pub(crate) best: u64,
    pub(crate) eps: f32,
    pub(crate) num_rows: usize,
    pub(crate) n: usize,
    pub(crate) k: usize,
    pub(crate) num_heads: usize,
    pub(crate) num_kv_heads: usize,
    pub(crate) max_pages: usize,
    pub(crate) kv: usize,
    pub(crate) sharing_distance: usize,
}

impl GemmParams {
    pub(crate) fn bytes(&self) -> Vec<u8> {
        let Self { weights, scales, bias, input, norm, squares, rows, row_index, .. } = *self;
        let Self { partials, arrivals, output, cache, rope, pages, kv_scales, best, .. } = *self;
        let Self { num_rows, n, k, num_heads, num_kv_heads, max_pages, kv, .. } = *self;
        let Self { sharing_distance, .. } = *self;
        let unused = 0;
        Fields::default()
            .pointers(&[weights, scales, bias, input, norm, squares, rows, row_index])
            .pointers(&[partials, arrivals, output, cache, rope, pages, kv_scales, best])
            .floats(&[self.eps])
            .words(&[num_rows, n, k, num_heads, num_kv_heads, max_pages, kv])
            .words(&[sharing_distance, unused])
            .0
    }
}

/// `NormaliseParams` of `normalise.cu`, whose output is halves in units.
#[derive(Clone, Debug)]
pub(crate) struct NormaliseParams {
    input: u64,
    squares: u64,
    weight: u64,
    pub(crate) values: u64,
    row_index: u64,
    eps: f32,
    num_rows: usize,
    k: usize,
}

impl NormaliseParams {
    /// What a product would do with its input itself; to where.
    pub(crate) fn of(product: &GemmParams, values: u64) -> Self {
        let GemmParams { input, squares, norm, row_index, eps, num_rows, k, .. } = *product;
        Self { input, squares, weight: norm, values, row_index, eps, num_rows, k }
    }

    pub(crate) fn bytes(&self) -> Vec<u8> {
        let Self { input, squares, weight, values, row_index, eps, num_rows, k } = *self;
        let (scales, unused) = (0, 0);
        let (first, in_units) = (0, 1);
        Fields::default()
            .pointers(&[input, squares, weight, values, scales])
            .words(&[k.next_multiple_of(128), format_code(Format::Fp16), first, in_units])
            .pointers(&[row_index])
            .floats(&[eps])
            .words(&[num_rows, k, unused])
            .0
    }
}

/// `EmbedParams` of `embed.cu`.
#[derive(Clone, Debug)]
pub(crate) struct EmbedParams {
    pub(crate) weights: u64,
    pub(crate) scales: u64,
    pub(crate) rows: u64,
    pub(crate) residual: u64,
    pub(crate) squares: u64,
    pub(crate) num_rows: usize,
    pub(crate) k: usize,
}

impl EmbedParams {
    pub(crate) fn bytes(&self) -> Vec<u8> {
        let Self { weights, scales, rows, residual, squares, num_rows, k } = *self;
        let pointers = [weights, scales, rows, residual, squares];
        Fields::default().pointers(&pointers).words(&[num_rows, k]).0
    }
}

/// `RopeParams` of `rope.cu`.
#[derive(Clone, Debug)]
pub(crate) struct RopeParams {
    pub(crate) input: u64,
    /// Of outputs, of rows, and the bias.
    pub(crate) scaling: [u64; 3],
    pub(crate) q_norm: u64,
    pub(crate) k_norm: u64,
    pub(crate) rope: u64,
    pub(crate) rows: u64,
    pub(crate) pages: u64,
    pub(crate) queries: u64,
    pub(crate) cache: u64,
    pub(crate) kv_scales: u64,
    pub(crate) eps: f32,
    pub(crate) num_rows: usize,
    pub(crate) num_heads: usize,
    pub(crate) num_kv_heads: usize,
    pub(crate) max_pages: usize,
}

impl RopeParams {
    pub(crate) fn bytes(&self) -> Vec<u8> {
        let Self { input, scaling, q_norm, k_norm, rope, rows, pages, queries, .. } = *self;
        let Self { cache, kv_scales, .. } = *self;
        let Self { num_rows, num_heads, num_kv_heads, max_pages, .. } = *self;
        let unused = 0;
        Fields::default()
            .pointers(&[input])
            .pointers(&scaling)
            .pointers(&[q_norm, k_norm, rope, rows, pages, queries, cache, kv_scales])
            .floats(&[self.eps])
            .words(&[num_rows, num_heads, num_kv_heads, max_pages, unused])
            .0
    }
}

/// Appends fields as a C++ struct has them.
#[derive(Default)]
struct Fields(Vec<u8>);

impl Fields {
    fn pointers(mut self, pointers: &[u64]) -> Self {
        self.0.extend(pointers.iter().flat_map(|x| x.to_le_bytes()));
        self
    }

    fn floats(mut self, floats: &[f32]) -> Self {
        self.0.extend(float_bytes(floats));
        self
    }

    fn words(mut self, words: &[usize]) -> Self {
        self.0.extend(words.iter().flat_map(|&x| (x as u32).to_le_bytes()));
        self
    }
}

pub(crate) fn float_bytes(floats: &[f32]) -> Vec<u8> {
    floats.iter().flat_map(|x| x.to_le_bytes()).collect()
}

pub(crate) fn word_bytes(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|x| x.to_le_bytes()).collect()
}

/// As `types.cuh` numbers them.
pub(crate) fn format_code(format: Format) -> usize {
    match format {
        Format::Fp8 => 1,
        Format::Fp16 => 2,
    }
}
