//! Products of rows with packed matrices, each a kernel that also does what comes before and after: every row has the same
//! bits in any pass. Where warpgroups multiply, rows are normed by a kernel of its own, once for all CTAs.

use super::code::ByRows;
use super::format_code;
use super::kv::LayerCache;
use super::many_params::{NormaliseParams, Operand};
use super::params::{GemmParams, Scaling};
use super::pass::{Input, Output, PassOps};
use super::shape;
use super::weights::Matrix;
use crate::exec::cuda::device::{Address, Kernel};
use crate::model::Dtype;

/// Bytes of an element.
const F32: usize = 4;

/// Where the rows of a product come from and go to; 0 is nowhere.
#[derive(Default)]
struct Places {
    input: Address,
    /// Bytes of an input row.
    input_bytes: usize,
    norm: Address,
    row_index: Address,
    output: Address,
    /// Bytes of an output row.
    output_bytes: usize,
    /// Of the input of a norm, or of the output.
    squares: Address,
    /// Bytes of a row of them.
    squares_bytes: usize,
    cache: LayerCache,
    best: Address,
}

/// Multiplies all rows of a pass, or those that want logits: as many launches as it takes.
pub(super) fn multiply(ops: &mut PassOps<'_>, matrix: &Matrix, input: Input, output: Output<'_>) {
    let mut places = places(ops, matrix, input, output);
    let num_rows = match output {
        Output::Logits(_) => ops.pass.num_logits,
        _ => ops.pass.num_rows,
    };
    let capability = ops.layers.capability;
    let has_norm = places.norm != 0 && num_rows > 0;
    if let Some(code) = ops.layers.code.normalise.filter(|_| has_norm) {
        places = normed(ops, code, matrix, places, num_rows);
    }
    let code = code(ops, matrix, output);
    let each = shape::gemm_launch_rows(num_rows, capability);
    for first in (0..num_rows).step_by(each) {
        let rows = (num_rows - first).min(each);
        let idx = shape::gemm_rows_idx(rows, capability);
        let most_rows = shape::gemm_rows(capability)[idx];
        let mut params = params(ops, matrix, &places, first, rows);
        params.sharing_distance = sharing_distance(ops, matrix, output, most_rows) as u32;
        let shared_bytes = shared_bytes(ops, matrix, output, most_rows);
        let threads = shape::gemm_threads(most_rows, capability);
        ops.launch(code.get(idx), grid(ops), threads, shared_bytes, params);
    }
    if let Output::Heads { part, cache } = output
        && ops.layers.config.qk_norm
    {
        ops.rotate(part, cache, places.output, Scaling::default());
    }
}

/// Norms the rows of a product; where it then finds them, as halves.
fn normed(
    ops: &mut PassOps<'_>,
    code: Kernel,
    matrix: &Matrix,
    from: Places,
    num_rows: usize,
) -> Places {
    let layers = ops.layers;
    assert_eq!(matrix.k, layers.config.hidden_size, "what there is room for");
    let (to, halves) = (layers.workspace.normed, ops.half_rows(matrix.k));
    let params = NormaliseParams {
        input: from.input,
        squares: from.squares,
        weight: from.norm,
        output: Operand {
            values: to,
            scales: 0,
            stride: halves.stride() as u32,
            format: format_code(Dtype::Fp16),
            first: 0,
            in_units: (halves.units() > 0).into(),
        },
        row_index: from.row_index,
        eps: layers.config.rms_norm_eps,
        num_rows: num_rows as u32,
        k: matrix.k as u32,
        unused: 0,
    };
    let shared_bytes = shape::OPERAND_SHARED_BYTES;
    ops.launch(code, num_rows as u32, shape::ROW_THREADS, shared_bytes, params);
    Places { input: to, input_bytes: halves.bytes_before(1), norm: 0, row_index: 0, ..from }
}

/// The product with a matrix, for each number of rows.
fn code<'a>(ops: &PassOps<'a>, matrix: &Matrix, output: Output<'a>) -> &'a ByRows {
    match output {
        Output::Heads { .. } | Output::Residual | Output::Activated { .. } => {
            ops.layers.code.gemm(matrix.kind)
        }
        Output::Logits(code) | Output::Sums { code, .. } => code,
    }
}

fn places(ops: &PassOps<'_>, matrix: &Matrix, input: Input, output: Output<'_>) -> Places {
    let (config, work) = (&ops.layers.config, &ops.layers.workspace);
    let row_bytes = |len| ops.half_rows(len).bytes_before(1);
    let halves = |rows| (rows, row_bytes(matrix.k), 0, work.squares);
    let floats = matrix.k * F32;
    // Of the residual stream the rows that want logits are picked.
    let is_residual = matches!(input, Input::Normed(_));
    let (rows, input_bytes, norm, squares) = match input {
        Input::Normed(norm) => (work.residual, floats, norm, work.squares),
        Input::Attended => halves(work.attended),
        Input::Activated => halves(work.activated),
        Input::Halves(rows) => halves(rows),
        Input::Rows { rows, norm, squares } => (rows, floats, norm, squares),
    };
    let from = Places {
        input: rows,
        input_bytes,
        norm,
        squares,
        squares_bytes: ops.layers.squares_bytes(),
        ..Places::default()
    };
    match output {
        // The norms of the heads come before the rotation, and need whole heads.
        Output::Heads { cache, .. } if config.qk_norm => {
            Places { output: work.raw, output_bytes: matrix.n * F32, cache, ..from }
        }
        Output::Heads { cache, .. } => {
            let output_bytes = config.q_size() * size_of::<u16>();
            Places { output: work.queries, output_bytes, cache, ..from }
        }
        Output::Residual => Places { output: work.residual, output_bytes: matrix.n * F32, ..from },
        Output::Activated { next } => {
            Places { output: work.activated, output_bytes: row_bytes(next.k), ..from }
        }
        Output::Sums { to, squares, .. } => Places {
            output: to,
            output_bytes: matrix.n * F32,
            squares,
            squares_bytes: matrix.n.div_ceil(shape::TILE_OUTPUTS) * F32,
            ..from
        },
        Output::Logits(_) => Places {
            output: work.logits,
            output_bytes: matrix.n * F32,
            row_index: if is_residual { work.logit_rows } else { 0 },
            best: work.best,
            ..from
        },
    }
}

fn grid(ops: &PassOps<'_>) -> u32 {
    shape::gemm_grid(ops.layers.num_sms, ops.layers.capability)
}

/// What a launch takes that is compiled for so many rows.
fn shared_bytes(ops: &PassOps<'_>, matrix: &Matrix, output: Output<'_>, rows: usize) -> u32 {
    let capability = ops.layers.capability;
    match output {
        // Its blocks have whole tiles.
        Output::Logits(_) => shape::gemm_shared_bytes(rows, capability),
        _ => {
            let format = ops.layers.precision.of(matrix.kind);
            let grid = grid(ops) as usize;
            shape::gemm_launch_bytes([matrix.n, matrix.k], format, rows, grid, capability)
        }
    }
}

/// Of a launch that is compiled for so many rows.
fn sharing_distance(ops: &PassOps<'_>, matrix: &Matrix, output: Output<'_>, rows: usize) -> usize {
    let capability = ops.layers.capability;
    match output {
        // All begin at the first of k.
        Output::Logits(_) => usize::from(shape::gemm_shares_rows(rows, capability)),
        _ => {
            let format = ops.layers.precision.of(matrix.kind);
            let grid = grid(ops) as usize;
            shape::gemm_sharing_distance([matrix.n, matrix.k], format, rows, grid, capability)
        }
    }
}

fn params(
    ops: &PassOps<'_>,
    matrix: &Matrix,
    places: &Places,
    first: usize,
    num_rows: usize,
) -> GemmParams {
    let (layers, work) = (ops.layers, &ops.layers.workspace);
    let Matrix { weights, scales, bias, n, k, .. } = *matrix;
    let vocab_tiles = n.div_ceil(shape::TILE_OUTPUTS);
    // With an index the input stays whole: the index says which of its rows.
    let is_indexed = places.row_index != 0;
    let skipped = if is_indexed { 0 } else { first };
    GemmParams {
        weights,
        scales,
        bias,
        input: at(places.input, skipped, places.input_bytes),
        norm: places.norm,
        squares: at(places.squares, skipped, places.squares_bytes),
        rows: at(work.rows, first, 32),
        row_index: at(places.row_index, first, if is_indexed { 4 } else { 0 }),
        partials: work.gemm_partials,
        arrivals: work.gemm_arrivals,
        output: at(places.output, first, places.output_bytes),
        cache: places.cache.memory,
        rope: layers.rope,
        pages: ops.pass.pages,
        kv_scales: places.cache.scales,
        best: at(places.best, first, if places.best == 0 { 0 } else { 8 * vocab_tiles }),
        eps: layers.config.rms_norm_eps,
        num_rows: num_rows as u32,
        n: n as u32,
        k: k as u32,
        num_heads: layers.config.num_heads as u32,
        num_kv_heads: layers.config.num_kv_heads as u32,
        max_pages: ops.pass.max_pages as u32,
        kv: layers.kv_format(),
        sharing_distance: 0,
        unused: 0,
    }
}

/// The address of an element of an array.
fn at(array: Address, idx: usize, element_bytes: usize) -> Address {
    array + (idx * element_bytes) as Address
}
