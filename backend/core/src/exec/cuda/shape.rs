//! Launch shapes of the kernels: what `kernels/*.cu` assume about grids, blocks, shared memory and workspaces.

use crate::model::Dtype;
use crate::pages::PAGE_TOKENS;
use spec_kernels::{GEMM_ROWS, MAX_GROUP};

/// Outputs in a tile of a matrix.
pub const TILE_OUTPUTS: usize = 64;

/// Packed query rows (rows times heads of a group) that attend together.
pub const TILE_ROWS: usize = 16;

/// Warps that multiply, and one that loads.
pub const GEMM_THREADS: u32 = 9 * 32;
/// Threads of an attention block.
pub const ATTENTION_THREADS: u32 = 128;
/// Threads of the kernels that work row by row.
pub const ROW_THREADS: u32 = 256;

/// Attention blocks of a multiprocessor.
pub const ATTENTION_BLOCKS: u32 = 2;

/// Stages of the ring of weights.
const STAGES: usize = 6;
/// Bytes of a stage.
const UNIT_BYTES: usize = 8192;

/// The smallest compiled number of rows that holds `rows`, which is at most the largest.
pub fn gemm_rows_idx(rows: usize) -> usize {
    GEMM_ROWS.partition_point(|&most| most < rows)
}

/// Inputs that a few-row product stages at a time.
fn staged_inputs(rows: usize) -> usize {
    match rows {
        8 => 2048,
        16 => 1024,
        _ => 512,
    }
}

/// Shared memory of a few-row product of `rows` rows, one of [`GEMM_ROWS`].
pub fn gemm_shared_bytes(rows: usize) -> u32 {
    let ring = STAGES * UNIT_BYTES;
    let inputs = rows * (staged_inputs(rows) + 16) * size_of::<u16>();
    let sums = 2 * rows * (TILE_OUTPUTS + 4) * size_of::<f32>();
    let factors = rows * size_of::<f32>();
    let barriers = 2 * STAGES * size_of::<u64>();
    (ring + inputs + sums + factors + barriers + 16) as u32
}

/// f32 values of a product's workspace for columns that blocks share: two a block.
pub fn gemm_partials(grid: usize) -> usize {
    grid * 2 * TILE_OUTPUTS * GEMM_ROWS[GEMM_ROWS.len() - 1]
}

/// Query rows of a tile, for `group` query heads a key head.
pub fn tile_rows(group: usize) -> usize {
    debug_assert!(group <= MAX_GROUP, "{group} heads share a key head");
    TILE_ROWS / group
}

/// Positions that one block attends to: a function of the engine alone, so that the sums of a row are split in the
/// same places whatever else is in the batch. At most [`MAX_SPLITS`] of them cover a sequence.
pub fn split_tokens(max_seq_len: usize) -> usize {
    max_seq_len.div_ceil(MAX_SPLITS).max(MIN_SPLIT_TOKENS).next_multiple_of(MIN_SPLIT_TOKENS)
}

/// Splits of a sequence of the full length.
pub fn max_splits(max_seq_len: usize) -> usize {
    max_seq_len.div_ceil(split_tokens(max_seq_len))
}

/// Bounds the workspace of long contexts.
const MAX_SPLITS: usize = 16;
/// Four pages for each warp.
const MIN_SPLIT_TOKENS: usize = 256;

/// Shared memory of an attention block.
pub fn attention_shared_bytes(kv: Dtype, head_dim: usize) -> u32 {
    let page = 2 * PAGE_TOKENS * head_dim * kv.bytes();
    let stages = if page > 4096 { 2 } else { 4 };
    (4 * stages * page + 8192) as u32
}

/// f32 values of a tile's partial results in one split.
pub fn attention_partial(head_dim: usize) -> usize {
    TILE_ROWS * (head_dim + 2)
}
