//! The structs that kernels take, field by field: those of the sources that are named here. Addresses are those
//! of the device; 0 is none.
#![allow(unsafe_code)]

use crate::exec::cuda::device::Address;
use crate::exec::cuda::device::pod::device_structs;
use crate::model::eagle::MOST_TAPS;

/// [`Row::sequence`] of a row whose results nobody wants.
pub const NO_SEQUENCE: u32 = u32::MAX;

device_structs! {
    /// One row of a forward pass.
    Row is 32 bytes {
        /// What it embeds.
        token: u32,
        /// For the rotation.
        position: u32,
        /// Where its key and value go, counted from the start of its sequence.
        slot: u32,
        /// It sees the slots below this.
        base: u32,
        /// And slot `base + j` for each set bit j.
        ancestors: u64,
        /// Row of the page table, or [`NO_SEQUENCE`].
        sequence: u32,
        /// Of a head on hidden states: the first slot that it sees.
        first: u32,
    }

    /// Consecutive rows of one sequence that attend together.
    Tile is 12 bytes {
        /// The first of them.
        first_row: u32,
        /// 0 in an empty place.
        num_rows: u32,
        /// Positions of the sequence, from its first on, whose keys and values are older than the pass; it may have more.
        num_old: u32,
    }

    /// The largest of some logits.
    Best is 8 bytes {
        /// Its value.
        value: f32,
        /// Lowest index that has it.
        index: u32,
    }

    /// Of `embed.cu`.
    EmbedParams is 48 bytes {
        /// Image of the embedding.
        weights: Address,
        /// Scale of each token, or none.
        scales: Address,
        /// [`Row`]s.
        rows: Address,
        /// f32 `[rows][k]`.
        residual: Address,
        /// f32 `[rows][tiles of k]`: sums of its squares.
        squares: Address,
        /// Rows.
        num_rows: u32,
        /// Width.
        k: u32,
    }

    /// Of `gemm.cu`.
    GemmParams is 168 bytes {
        /// Image of the matrix.
        weights: Address,
        /// f32 a channel, in image order, or none.
        scales: Address,
        /// f32 a channel, in image order, or none.
        bias: Address,
        /// What is multiplied: f32 `[rows][k]` before a norm, else f16, as rows of halves lie (`half_rows.rs`).
        input: Address,
        /// Weights of the norm.
        norm: Address,
        /// f32 `[rows][tiles]`: sums of squares of the input of a norm, or of the residual stream that is added to.
        squares: Address,
        /// [`Row`]s.
        rows: Address,
        /// Input row of each row, or none: the same.
        row_index: Address,
        /// Workspace: sums of columns that several blocks share.
        partials: Address,
        /// Workspace: a counter for each 64 outputs, 0 between launches.
        arrivals: Address,
        /// What the epilogue writes.
        output: Address,
        /// The layer's KV cache.
        cache: Address,
        /// f32 `[positions][head_dim]`: cosines, then sines.
        rope: Address,
        /// u32 `[sequences][max_pages]`.
        pages: Address,
        /// f32 `[2][key heads]`: scales of keys and of values in FP8, powers of two.
        kv_scales: Address,
        /// [`Best`] `[rows][tiles]` of logits.
        best: Address,
        /// Of the norm.
        eps: f32,
        /// Rows.
        num_rows: u32,
        /// Outputs.
        n: u32,
        /// Inputs.
        k: u32,
        /// Query heads.
        num_heads: u32,
        /// Key heads.
        num_kv_heads: u32,
        /// Width of the page table.
        max_pages: u32,
        /// 1 for an FP8 cache, 2 for FP16.
        kv: u32,
        /// Blocks, in the order of their units, from one to that with which it shares rows, where clusters do; 0: none has one.
        sharing_distance: u32,
        /// Zero.
        unused: u32,
    }

    /// What turns plain sums into the outputs of a product; none of it is none.
    Scaling is 24 bytes {
        /// f32 an output, in image order.
        outputs: Address,
        /// f32 a row.
        rows: Address,
        /// f32 an output, in image order.
        bias: Address,
    }

    /// Of `rope.cu`.
    RopeParams is 120 bytes {
        /// f32 `[rows][qkv]` in image order.
        input: Address,
        /// Of the input.
        scaling: Scaling,
        /// Weights of the norm of each query head, or none.
        q_norm: Address,
        /// Weights of the norm of each key head, or none.
        k_norm: Address,
        /// f32 `[positions][head_dim]`: cosines, then sines.
        rope: Address,
        /// [`Row`]s.
        rows: Address,
        /// u32 `[sequences][max_pages]`.
        pages: Address,
        /// f16 `[rows][queries]`.
        queries: Address,
        /// The layer's KV cache.
        cache: Address,
        /// f32 `[2][key heads]`: scales of keys and of values in FP8, powers of two.
        kv_scales: Address,
        /// Of the norm.
        eps: f32,
        /// Rows.
        num_rows: u32,
        /// Query heads.
        num_heads: u32,
        /// Key heads.
        num_kv_heads: u32,
        /// Width of the page table.
        max_pages: u32,
        /// Zero.
        unused: u32,
    }

    /// Of `attention.cu`.
    AttentionParams is 104 bytes {
        /// f16 `[rows][heads][head_dim]`.
        queries: Address,
        /// The layer's KV cache.
        cache: Address,
        /// [`Row`]s.
        rows: Address,
        /// [`Tile`]s.
        tiles: Address,
        /// u32 `[sequences][max_pages]`.
        pages: Address,
        /// f16 `[rows][heads][head_dim]`, or in units.
        output: Address,
        /// Workspace: f32 `[items and 3 places a block][rows of a tile][head_dim + 4]`.
        partials: Address,
        /// Workspace: counters `[items]`, 0 between launches.
        arrivals: Address,
        /// f32 `[2][key heads]`: scales of keys and of values in FP8, powers of two.
        kv_scales: Address,
        /// Of the scores.
        scale: f32,
        /// Places for tiles.
        num_tiles: u32,
        /// Key heads.
        num_kv_heads: u32,
        /// Width of the page table.
        max_pages: u32,
        /// Positions of a split.
        split_tokens: u32,
        /// Items that have a partial each.
        max_items: u32,
        /// Of 64 rows of the output; 0 where they follow each other.
        output_units: u32,
        /// Zero.
        unused: u32,
    }
}

/// [`JoinParams::pieces`] at most: the hidden states of all layers that a head reads.
pub const MOST_PIECES: usize = MOST_TAPS;

device_structs! {
    /// A part of each row that is put together.
    Piece is 24 bytes {
        /// f32 `[rows][stride]`.
        rows: Address,
        /// f32 `[len]`: weights of its norm, or none.
        norm: Address,
        /// Elements from a row to the next one.
        stride: u32,
        /// A multiple of 4.
        len: u32,
    }

    /// Of `join.cu`.
    JoinParams is 456 bytes {
        /// From left to right.
        pieces: [Piece; MOST_PIECES],
        /// Row of the pieces for each row, or none: its own.
        row_index: Address,
        /// f16 `[rows][all pieces]`, or in units; or none.
        joined: Address,
        /// f32 `[rows][last piece]`, or none: the last piece grows by their silu, and has no norm.
        sums: Address,
        /// f32 `[rows][last piece]`, or none: the last piece; may be where the first one comes from.
        kept: Address,
        /// f32 `[rows][cleared_len]`: becomes zero.
        cleared: Address,
        /// Rows.
        num_rows: u32,
        /// Pieces.
        num_pieces: u32,
        /// One norm over all of them, not one each.
        is_together: u32,
        /// What is kept is behind the norm.
        keeps_normed: u32,
        /// A multiple of 4.
        cleared_len: u32,
        /// Of the norms.
        eps: f32,
        /// Of 64 joined rows; 0 where they follow each other.
        joined_units: u32,
        /// Zero.
        unused: u32,
    }
}

/// [`SpreadParams::row_of`] a token that is not drafted.
pub const NOT_DRAFTED: u32 = u32::MAX;

device_structs! {
    /// Of `spread.cu`.
    SpreadParams is 48 bytes {
        /// f32 `[rows][drafted]`.
        logits: Address,
        /// u32 `[vocab]`: which of the drafted tokens each token is, or [`NOT_DRAFTED`].
        row_of: Address,
        /// f32 `[rows][vocab]`.
        output: Address,
        /// [`Best`] `[rows][tiles]`.
        best: Address,
        /// Rows.
        num_rows: u32,
        /// Tokens that are drafted.
        drafted: u32,
        /// All tokens.
        vocab: u32,
        /// Zero.
        unused: u32,
    }
}

impl Row {
    /// A row of a chain: it sees everything up to itself.
    pub fn chain(token: u32, position: usize, sequence: usize) -> Self {
        let slot = position as u32;
        let sequence = sequence as u32;
        Self { token, position: slot, slot, base: slot + 1, ancestors: 0, sequence, first: 0 }
    }
}
