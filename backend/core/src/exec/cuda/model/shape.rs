//! Launch shapes of the kernels: what `kernels/*.cu` assume about grids, blocks, shared memory and workspaces.

use crate::batch::PromptBlocks;
use crate::model::Dtype;
use crate::model::image::unit_len;
use crate::pages::PAGE_TOKENS;
use spec_kernels::{GEMM_ROWS, MAX_GROUP, MULTIPLY_ROWS, WGMMA_ROWS};
use std::ops::Range;

/// Outputs in a tile of a matrix.
pub(crate) const TILE_OUTPUTS: usize = 64;

/// How many packed query rows (rows times heads of a group) attend together. A row's bits are the same in both.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Tiling {
    /// 16: a few rows of each sequence.
    #[default]
    Narrow,
    /// 64 that share the pages which a block reads.
    Wide,
}

impl Tiling {
    /// What suits so many sequences that have up to `rows` rows each, for `group` query heads a key head.
    pub fn of(sequences: usize, rows: usize, group: usize) -> Self {
        // A few narrow tiles read the same pages again, but out of the L2 cache, and their warps share the work.
        let most = if sequences < MANY_SEQUENCES { 3 } else { 2 };
        if rows > most * Self::Narrow.rows(group) { Self::Wide } else { Self::Narrow }
    }

    /// Packed rows of a tile.
    fn packed_rows(self) -> usize {
        match self {
            Self::Narrow => 16,
            Self::Wide => 64,
        }
    }

    /// Query rows of a tile.
    pub fn rows(self, group: usize) -> usize {
        assert!(group <= MAX_GROUP, "{group} heads share a key head");
        self.packed_rows() / group
    }

    /// Shared memory of a block.
    pub(crate) fn shared_bytes(self, kv: Dtype, head_dim: usize) -> u32 {
        let page = 2 * PAGE_TOKENS * head_dim * kv.bytes();
        let (rings, stages) = match self {
            Self::Narrow if page > 4096 => (4, 2),
            Self::Narrow => (4, 4),
            Self::Wide => (1, 4),
        };
        let sums = size_of::<f32>() * self.packed_rows() * (head_dim + 8);
        (rings * (stages * page).max(sums) + PLAN_BYTES) as u32
    }

    /// Blocks of a GPU: as many as registers allow.
    pub(crate) fn blocks(num_sms: usize) -> usize {
        ATTENTION_BLOCKS * num_sms
    }

    /// Items that `blocks` have at most, if their sums are to be added to others': some each, so that none of the blocks
    /// waits long for another, and not many, since what an item takes besides its pages is most of it where it is one
    /// split. Where there is more to do, items are larger. The bits of a row do not depend on it.
    pub(crate) fn max_items(blocks: usize) -> usize {
        3 * blocks
    }

    /// f32 values of the workspace for sums: a partial of each item, and of a node of each level for each block.
    pub(crate) fn partials(self, head_dim: usize, blocks: usize) -> usize {
        let partial = self.packed_rows() * (head_dim + 4);
        (Self::max_items(blocks) + ATTENTION_LEVELS * blocks) * partial
    }
}

/// Sequences of which a wide tile takes less time than three narrow ones. On an H100 the three took 172 us of a layer for
/// 64 sequences of 1000 positions, a wide one 154, but 11 and 21 for one sequence; steps of 16 sequences were 5 % slower
/// with wide ones.
const MANY_SEQUENCES: usize = 32;

/// What an attention block notes about the tiles, and of what it works at.
const PLAN_BYTES: usize = 3288;

/// Levels above the splits of a row's positions.
const ATTENTION_LEVELS: usize = 3;

/// Positions of a split, four pages for each warp: few, so that short contexts have work for many blocks. A constant,
/// so that a row's positions are split in the same places whatever else is in the batch.
pub(crate) const SPLIT_TOKENS: usize = 256;

/// Threads of a product of `rows` rows, one of [`gemm_rows`]: warps that multiply, one that loads, one that counts parts,
/// and where warpgroups multiply those that bring rows; with most rows one that leaves its registers.
pub fn gemm_threads(rows: usize, capability: (u32, u32)) -> u32 {
    let warps = match (has_warpgroups(capability), rows) {
        (true, 64 | 193..) => 12,
        (true, _) => 11,
        (false, _) => 10,
    };
    warps * 32
}
pub(crate) const ATTENTION_THREADS: u32 = 128;
/// Threads of the kernels that work row by row.
pub const ROW_THREADS: u32 = 256;

/// Positions of a block of a prompt, whose rows are multiplied together.
pub(crate) const BLOCK_LEN: usize = 512;
/// Rows of a prompt that are computed as fast as a block by products of few rows, which take a time each that a block takes
/// at once. Kernels here multiply a part of a block in less: 256 rows of an 8B model in FP8 were predicted to take half of
/// what few-row products take on an H100, and 128 as long, before blocks of threads shared rows. Without warpgroups a library's
/// block was predicted to be faster than three launches of 64 rows.
const FEW_OF_PROMPT: usize = 128;
/// The same where a library multiplies whole blocks and warpgroups few rows. On an H100 2048 tokens took 110 ms by few-row
/// products, so 256 take 14; a block took 14 of four together, and more alone (`scripts/bench/results`, 2026-11-26T1109).
const FEW_BESIDE_LIBRARY: usize = 256;

/// What of a prompt is multiplied in blocks, by a library or by kernels here, on a GPU of this compute capability.
pub(crate) fn prompt_blocks(by_library: bool, capability: (u32, u32)) -> PromptBlocks {
    let is_late = by_library && has_warpgroups(capability);
    let few = if is_late { FEW_BESIDE_LIBRARY } else { FEW_OF_PROMPT };
    PromptBlocks { len: BLOCK_LEN, least: few + 1 }
}
/// Blocks of a prompt in a pass, at most: weights are read, or unpacked, for all of them together. More would cost memory and
/// save little.
const BLOCKS_AT_ONCE: usize = 4;

/// Rows of a pass through blocks where steps have up to so many rows: those of whole blocks.
pub(crate) fn block_rows(step_rows: usize) -> usize {
    (step_rows / BLOCK_LEN).clamp(1, BLOCKS_AT_ONCE) * BLOCK_LEN
}

/// Shared memory of the kernels that write rows of blocks.
pub const OPERAND_SHARED_BYTES: u32 = ROW_THREADS / 32 * 4;
/// Unpacking blocks of a multiprocessor.
pub(crate) const UNPACK_BLOCKS: u32 = 4;

/// Whether a kernel here multiplies whole blocks of prompts on a GPU of this compute capability.
pub(crate) fn multiplies_blocks(capability: (u32, u32)) -> bool {
    has_warpgroups(capability)
}

/// Threads of a product with whole blocks of a prompt: two warpgroups that multiply, and one that loads.
pub const MULTIPLY_THREADS: u32 = 3 * 128;
/// Blocks of a cluster, which share rows. Multiprocessors are taken to come in pairs that can hold one.
pub const MULTIPLY_CLUSTER: u32 = 2;
/// Its shared memory: barriers, a ring, scales, and what warps tell each other.
pub const MULTIPLY_SHARED_BYTES: u32 = 214 << 10;

/// How a product with whole blocks of a prompt is cut into tiles.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct MultiplyTiles {
    /// Rows of a tile, one of [`MULTIPLY_ROWS`].
    pub(crate) rows: usize,
    /// Blocks of threads.
    pub(crate) grid: u32,
}

impl MultiplyTiles {
    /// For `n` outputs of rows at these places. A tile of so many rows is two tiles of outputs wide for each block of a cluster.
    /// The bits of a sum do not depend on it.
    pub(crate) fn of(n: usize, places: Range<usize>, num_sms: u32) -> Self {
        const CLUSTER: usize = MULTIPLY_CLUSTER as usize;
        let wide = n.div_ceil(CLUSTER * 2 * TILE_OUTPUTS);
        let at_once = (num_sms / MULTIPLY_CLUSTER).max(1);
        let tiles = MULTIPLY_ROWS.map(|rows| {
            let row_tiles = places.end.div_ceil(rows) - places.start / rows;
            let count = (wide * row_tiles) as u32;
            let grid = count.min(at_once) * MULTIPLY_CLUSTER;
            (Self { rows, grid }, count.div_ceil(at_once))
        });
        // What a tile takes is loading units out of the L2 cache: of 128 outputs, and of a block's share of its rows.
        let takes = |(tile, rounds): &(Self, u32)| {
            *rounds as usize * (tile.rows / CLUSTER + 2 * TILE_OUTPUTS)
        };
        let [(small, _), (large, _)] = tiles;
        if takes(&tiles[0]) < takes(&tiles[1]) { small } else { large }
    }
}

/// Attention blocks of a multiprocessor.
const ATTENTION_BLOCKS: usize = 2;

/// Bytes of a unit of weights.
const UNIT_BYTES: usize = 8192;
/// Inputs of a segment of a product by single warps.
const SEGMENT_INPUTS: usize = 1024;

/// What streams through the shared memory of a product of warpgroups, and most stages of it.
const WGMMA_RING_BYTES: usize = 200 << 10;
const WGMMA_STAGES: usize = 11;

/// Rows that warpgroups multiply in the time that weights take to come from memory, and in what a launch takes besides:
/// predicted, of an 8B model in FP8 on an H100.
const ROWS_OF_WEIGHTS: usize = 176;
const ROWS_OF_A_LAUNCH: usize = 64;

/// The compute capability whose products are made by warpgroups.
const HOPPER: (u32, u32) = (9, 0);

/// Whether warpgroups make products.
pub(crate) fn has_warpgroups(capability: (u32, u32)) -> bool {
    capability == HOPPER
}

/// Compute capabilities whose blocks may have up to 227 KB of shared memory; other blocks have 99 KB.
const LARGE: std::ops::Range<(u32, u32)> = (9, 0)..(12, 0);

/// Rows that products are compiled for on a GPU of this compute capability.
pub fn gemm_rows(capability: (u32, u32)) -> &'static [usize] {
    if has_warpgroups(capability) { &WGMMA_ROWS } else { &GEMM_ROWS }
}

/// Most rows of one product.
pub(crate) fn most_gemm_rows(capability: (u32, u32)) -> usize {
    gemm_rows(capability).last().copied().unwrap_or(0)
}

/// Blocks of a product of few rows: a multiprocessor's each. With many rows, where warpgroups multiply, two are a cluster; the
/// bits of a row depend on how many there are, so there are as many with few.
pub(crate) fn gemm_grid(num_sms: u32, capability: (u32, u32)) -> u32 {
    if has_warpgroups(capability) { (num_sms & !1).max(2) } else { num_sms }
}

/// Whether two blocks load the rows of a product of so many for each other.
pub(crate) fn gemm_shares_rows(rows: usize, capability: (u32, u32)) -> bool {
    has_warpgroups(capability) && rows > TILE_OUTPUTS
}

/// Blocks from one to that which multiplies the same inputs at the same time, with other weights: so far apart their units begin
/// at the same place of k. 0 where none are, and for products whose blocks share nothing.
pub fn gemm_sharing_distance(
    [n, k]: [usize; 2],
    format: Dtype,
    rows: usize,
    grid: usize,
    capability: (u32, u32),
) -> usize {
    if !gemm_shares_rows(rows, capability) {
        return 0;
    }
    let k_units = k.div_ceil(unit_len(format));
    let units = n.div_ceil(2 * TILE_OUTPUTS) * k_units;
    let each = units.div_ceil(grid);
    let distance = (1..=grid / 2).find(|distance| distance * each % k_units == 0);
    distance.unwrap_or(0)
}

/// Rows of each launch of a product of so many, but for the last. Where warpgroups multiply as many as one of the larger
/// products is for, by which all launches together take least.
pub(crate) fn gemm_launch_rows(rows: usize, capability: (u32, u32)) -> usize {
    let launches = rows.div_ceil(most_gemm_rows(capability)).max(1);
    if launches == 1 || !has_warpgroups(capability) {
        return rows.div_ceil(launches).max(1);
    }
    let takes = |rows| {
        let rows = gemm_rows(capability)[gemm_rows_idx(rows, capability)];
        rows.max(ROWS_OF_WEIGHTS) + ROWS_OF_A_LAUNCH
    };
    let whole_units = gemm_rows(capability).iter().copied().filter(|each| each % TILE_OUTPUTS == 0);
    let all_take = |each: &usize| {
        let last = rows - (rows - 1) / each * each;
        (rows - last) / each * takes(*each) + takes(last)
    };
    whole_units.min_by_key(all_take).unwrap_or(rows)
}

/// Place of the smallest compiled number of rows that holds `rows`, which is at most the largest.
pub(crate) fn gemm_rows_idx(rows: usize, capability: (u32, u32)) -> usize {
    gemm_rows(capability).partition_point(|&most| most < rows)
}

/// Shared memory of a product of warpgroups before its ring, which begins at a multiple of a swizzled atom.
fn wgmma_fixed_bytes(rows: usize) -> usize {
    let finished = match rows {
        0..=32 => rows,
        33..=192 => 16,
        _ => 32,
    };
    let sums = 2 * finished * (TILE_OUTPUTS + 4) * size_of::<f32>();
    let barriers = (3 * WGMMA_STAGES + 2) * size_of::<u64>();
    (sums + barriers + size_of::<u32>()).next_multiple_of(1024)
}

/// What the ring of a product of warpgroups takes if each of `grid` blocks has its share of a matrix: no more stages than
/// a block has units. The rest of the multiprocessor is left to the kernel in front.
fn wgmma_ring_bytes([n, k]: [usize; 2], format: Dtype, rows: usize, grid: usize) -> usize {
    let unit_k = unit_len(format);
    let stage = 2 * UNIT_BYTES + rows * unit_k * size_of::<u16>();
    let units = n.div_ceil(2 * TILE_OUTPUTS) * k.div_ceil(unit_k);
    let stages = (WGMMA_RING_BYTES / stage).min(WGMMA_STAGES);
    units.div_ceil(grid).min(stages) * stage
}

/// Stages of the ring of weights, and the inputs that a product of `rows` rows by single warps stages at a time.
fn gemm_stages(rows: usize, is_large: bool) -> (usize, usize) {
    match (rows, is_large) {
        (8, true) => (10, SEGMENT_INPUTS),
        (16, true) => (8, SEGMENT_INPUTS),
        (32, true) => (12, SEGMENT_INPUTS),
        (64, true) => (6, SEGMENT_INPUTS),
        (8 | 16, false) => (6, SEGMENT_INPUTS),
        (32, false) => (6, SEGMENT_INPUTS / 2),
        (64, false) => (3, SEGMENT_INPUTS / 4),
        _ => panic!("no product is compiled for {rows} rows"),
    }
}

/// Shared memory that a launch takes whose blocks share a matrix evenly: all that a product has, or less where it is small.
pub fn gemm_launch_bytes(
    shape: [usize; 2],
    format: Dtype,
    rows: usize,
    grid: usize,
    capability: (u32, u32),
) -> u32 {
    if has_warpgroups(capability) {
        let ring = wgmma_ring_bytes(shape, format, rows, grid);
        return (wgmma_fixed_bytes(rows) + ring) as u32;
    }
    gemm_shared_bytes(rows, capability)
}

/// Shared memory of a product of `rows` rows, one of [`gemm_rows`], on a GPU of this compute capability.
pub fn gemm_shared_bytes(rows: usize, capability: (u32, u32)) -> u32 {
    if has_warpgroups(capability) {
        return (wgmma_fixed_bytes(rows) + WGMMA_RING_BYTES) as u32;
    }
    let (stages, staged) = gemm_stages(rows, LARGE.contains(&capability));
    let ring = stages * UNIT_BYTES;
    let inputs = rows * (staged + 16) * size_of::<u16>();
    let sums = 2 * rows * (TILE_OUTPUTS + 4) * size_of::<f32>();
    let factors = rows * size_of::<f32>();
    let barriers = 2 * (stages + 1) * size_of::<u64>();
    (ring + inputs + sums + factors + barriers + 16) as u32
}

/// Of that, what the ring takes, of the product that `rows` rows go to.
pub(crate) fn gemm_ring_bytes(rows: usize, capability: (u32, u32)) -> u32 {
    let rows = gemm_rows(capability)[gemm_rows_idx(rows, capability)];
    if has_warpgroups(capability) {
        return WGMMA_RING_BYTES as u32;
    }
    let (stages, _) = gemm_stages(rows, LARGE.contains(&capability));
    (stages * UNIT_BYTES) as u32
}

/// f32 values of the workspace of a product of up to `rows` rows, for sums that blocks share: a slot for each block,
/// and one for each tile in each segment; where warpgroups multiply, two tiles for each block and for each pair.
pub fn gemm_partials(
    [n, k]: [usize; 2],
    grid: usize,
    rows: usize,
    capability: (u32, u32),
) -> usize {
    let tiles = n.div_ceil(TILE_OUTPUTS);
    let slots = match capability {
        HOPPER => 2 * (grid + tiles.div_ceil(2)),
        _ => grid + tiles * k.div_ceil(SEGMENT_INPUTS),
    };
    slots * TILE_OUTPUTS * rows
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pass_has_as_many_blocks_as_a_step_has_room_for_up_to_four() {
        let rows = [1, 512, 1023, 1024, 2047, 8192].map(block_rows);
        assert_eq!(rows, [512, 512, 512, 1024, 1536, 2048]);
    }

    /// Of an 8B model on an H100.
    #[test]
    fn tiles_of_prompts_are_those_that_keep_multiprocessors_busy() {
        let tiles = |n, rows| {
            let MultiplyTiles { rows, grid, .. } = MultiplyTiles::of(n, 0..rows, 132);
            (rows, grid)
        };
        // A block by itself: 16 times 256 outputs by four tiles or two.
        assert_eq!(tiles(4096, 512), (128, 128));
        assert_eq!(tiles(6144, 512), (256, 96));
        assert_eq!(tiles(28672, 512), (256, 132));
        // Four blocks.
        assert_eq!(tiles(4096, 2048), (256, 132));
    }

    #[test]
    fn launches_of_many_rows_take_whole_units() {
        let each = |rows| gemm_launch_rows(rows, (9, 0));
        assert_eq!([0, 1, 193, 320].map(each), [1, 1, 193, 320], "one launch");
        assert_eq!([321, 384, 385, 512, 640, 704].map(each), [192, 192, 320, 320, 320, 192]);
        assert!((321..2000).all(|rows| each(rows) % TILE_OUTPUTS == 0), "rows lie in units");
        assert_eq!([64, 65, 100].map(|rows| gemm_launch_rows(rows, (8, 0))), [64, 33, 50]);
    }

    /// Of an 8B model on an H100: units of k of two such blocks begin at the same place.
    #[test]
    fn blocks_share_rows_where_their_units_begin_alike() {
        let of = |shape, rows, grid| gemm_sharing_distance(shape, Dtype::Fp8, rows, grid, (9, 0));
        assert_eq!(of([6144, 4096], 192, 132), 8);
        assert_eq!(of([4096, 4096], 192, 132), 4);
        assert_eq!(of([28672, 4096], 128, 132), 32);
        assert_eq!(of([4096, 14336], 192, 132), 4);
        assert_eq!(of([4096, 4096], 64, 132), 0, "few rows");
        // 20 units of k, four to a block: a fifth block would begin alike.
        assert_eq!(of([128, 2560], 128, 6), 0);
    }

    #[test]
    fn only_tiles_that_have_rows_are_multiplied() {
        let grid = |places| MultiplyTiles::of(64, places, 132);
        assert_eq!(grid(0..1), MultiplyTiles { rows: 128, grid: 2 });
        assert_eq!(grid(500..512), MultiplyTiles { rows: 128, grid: 2 });
        assert_eq!(grid(300..1030), MultiplyTiles { rows: 128, grid: 14 });
    }

    #[test]
    fn sums_of_attention_take_less_than_64_mib_of_an_h100_at_any_length() {
        for tiling in [Tiling::Narrow, Tiling::Wide] {
            let bytes = tiling.partials(128, Tiling::blocks(132)) * size_of::<f32>();
            assert!(bytes < 64 << 20, "{bytes} bytes in {tiling:?} tiles");
        }
    }
    #[test]
    fn three_narrow_tiles_become_a_wide_one_where_there_are_many_sequences() {
        let tiling = |sequences, rows| Tiling::of(sequences, rows, 4);
        assert_eq!([4, 5, 8, 9, 12].map(|rows| tiling(1, rows)), [Tiling::Narrow; 5]);
        assert_eq!(tiling(1, 13), Tiling::Wide);
        let many = [4, 8, 9, 13].map(|rows| tiling(MANY_SEQUENCES, rows));
        assert_eq!(many, [Tiling::Narrow, Tiling::Narrow, Tiling::Wide, Tiling::Wide]);
        assert_eq!(tiling(MANY_SEQUENCES - 1, 12), Tiling::Narrow);
    }

    #[test]
    fn all_attention_blocks_of_a_multiprocessor_fit_in_its_shared_memory() {
        const RESERVED: usize = 1024;
        for tiling in [Tiling::Narrow, Tiling::Wide] {
            for kv in [Dtype::Fp8, Dtype::Fp16] {
                let bytes = tiling.shared_bytes(kv, 128) as usize + RESERVED;
                assert!(ATTENTION_BLOCKS * bytes <= 228 << 10, "{tiling:?} {kv:?}: {bytes} bytes");
                assert!(bytes <= 100 << 10, "{tiling:?} {kv:?}: {bytes} bytes of a small GPU");
            }
        }
    }
}
