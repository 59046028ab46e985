//! The structs that kernels take: those of `kernels/*.cu` and `kernels/types.cuh`, field by field. Addresses are those
//! of the device; 0 is none.

use super::device::Address;

/// [`Row::sequence`] of a row whose results nobody wants.
pub const NO_SEQUENCE: u32 = u32::MAX;

/// A struct that a kernel takes, or an element of an array that it reads or writes.
///
/// # Safety
/// `repr(C)`, without padding, and valid for any bytes.
#[allow(unsafe_code)]
pub unsafe trait Plain: Copy {}

/// The bytes of values, as the device reads them.
#[allow(unsafe_code)]
pub fn bytes_of<T: Plain>(values: &[T]) -> &[u8] {
    // SAFETY: `Plain` values have no padding, so that all their bytes are initialised.
    unsafe { std::slice::from_raw_parts(values.as_ptr().cast(), size_of_val(values)) }
}

macro_rules! plain {
    ($($type:ty: $bytes:literal),* $(,)?) => {$(
        // SAFETY: integers and floats in `repr(C)`; the sizes below are the sums of the fields' sizes.
        #[allow(unsafe_code)]
        unsafe impl $crate::exec::cuda::params::Plain for $type {}
        const _: () = assert!(size_of::<$type>() == $bytes);
    )*};
}
pub(super) use plain;

plain! {
    u8: 1, u16: 2, u32: 4, f32: 4,
    Row: 32, Tile: 8, Best: 8,
    EmbedParams: 40, GemmParams: 152, Scaling: 24, RopeParams: 120, AttentionParams: 96,
}

/// One row of a forward pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct Row {
    /// What it embeds.
    pub token: u32,
    /// For the rotation.
    pub position: u32,
    /// Where its key and value go, counted from the start of its sequence.
    pub slot: u32,
    /// It sees the slots below this.
    pub base: u32,
    /// And slot `base + j` for each set bit j.
    pub ancestors: u64,
    /// Row of the page table, or [`NO_SEQUENCE`].
    pub sequence: u32,
    /// Zero.
    pub unused: u32,
}

impl Row {
    /// A row that writes nothing and is not read.
    pub const NONE: Self = Self {
        token: 0,
        position: 0,
        slot: 0,
        base: 0,
        ancestors: 0,
        sequence: NO_SEQUENCE,
        unused: 0,
    };

    /// A row of a chain: it sees everything up to itself.
    pub fn chain(token: u32, position: usize, sequence: usize) -> Self {
        let slot = position as u32;
        let sequence = sequence as u32;
        Self { token, position: slot, slot, base: slot + 1, ancestors: 0, sequence, unused: 0 }
    }
}

/// Consecutive rows of one sequence that attend together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct Tile {
    /// The first of them.
    pub first_row: u32,
    /// 0 in an empty place.
    pub num_rows: u32,
}

/// The largest of some logits.
#[derive(Clone, Copy, Debug, PartialEq)]
#[repr(C)]
pub struct Best {
    /// Its value.
    pub value: f32,
    /// Lowest index that has it.
    pub index: u32,
}

/// Of `embed.cu`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct EmbedParams {
    /// Image of the embedding.
    pub weights: Address,
    /// Scale of each token, or none.
    pub scales: Address,
    /// [`Row`]s.
    pub rows: Address,
    /// f32 `[rows][k]`.
    pub residual: Address,
    /// Rows.
    pub num_rows: u32,
    /// Width.
    pub k: u32,
}

/// Of `gemm.cu`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct GemmParams {
    /// Image of the matrix.
    pub weights: Address,
    /// f32 a channel, in image order, or none.
    pub scales: Address,
    /// f32 a channel, in image order, or none.
    pub bias: Address,
    /// What is multiplied: f32 before a norm, else f16; `[rows][k]`.
    pub input: Address,
    /// Weights of the norm.
    pub norm: Address,
    /// [`Row`]s.
    pub rows: Address,
    /// Input row of each row, or none: the same.
    pub row_index: Address,
    /// Workspace: sums of columns that several blocks share.
    pub partials: Address,
    /// Workspace: a counter for each 64 outputs, 0 between launches.
    pub arrivals: Address,
    /// What the epilogue writes.
    pub output: Address,
    /// The layer's KV cache.
    pub cache: Address,
    /// f32 `[positions][head_dim]`: cosines, then sines.
    pub rope: Address,
    /// u32 `[sequences][max_pages]`.
    pub pages: Address,
    /// [`Best`] `[rows][tiles]` of logits.
    pub best: Address,
    /// Of the norm.
    pub eps: f32,
    /// Keys are multiplied by it before they are stored in FP8.
    pub k_scale: f32,
    /// Values likewise.
    pub v_scale: f32,
    /// Rows.
    pub num_rows: u32,
    /// Outputs.
    pub n: u32,
    /// Inputs.
    pub k: u32,
    /// Query heads.
    pub num_heads: u32,
    /// Key heads.
    pub num_kv_heads: u32,
    /// Width of the page table.
    pub max_pages: u32,
    /// 1 for an FP8 cache, 2 for FP16.
    pub kv: u32,
}

/// What turns plain sums into the outputs of a product; none of it is none.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct Scaling {
    /// f32 an output, in image order.
    pub outputs: Address,
    /// f32 a row.
    pub rows: Address,
    /// f32 an output, in image order.
    pub bias: Address,
}

/// Of `rope.cu`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct RopeParams {
    /// f32 `[rows][qkv]` in image order.
    pub input: Address,
    /// Of the input.
    pub scaling: Scaling,
    /// Weights of the norm of each query head, or none.
    pub q_norm: Address,
    /// Weights of the norm of each key head, or none.
    pub k_norm: Address,
    /// f32 `[positions][head_dim]`: cosines, then sines.
    pub rope: Address,
    /// [`Row`]s.
    pub rows: Address,
    /// u32 `[sequences][max_pages]`.
    pub pages: Address,
    /// f16 `[rows][queries]`.
    pub queries: Address,
    /// The layer's KV cache.
    pub cache: Address,
    /// Of the norm.
    pub eps: f32,
    /// Keys are multiplied by it before they are stored in FP8.
    pub k_scale: f32,
    /// Values likewise.
    pub v_scale: f32,
    /// Rows.
    pub num_rows: u32,
    /// Query heads.
    pub num_heads: u32,
    /// Key heads.
    pub num_kv_heads: u32,
    /// Width of the page table.
    pub max_pages: u32,
    /// Zero.
    pub unused: u32,
}

/// Of `attention.cu`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct AttentionParams {
    /// f16 `[rows][heads][head_dim]`.
    pub queries: Address,
    /// The layer's KV cache.
    pub cache: Address,
    /// [`Row`]s.
    pub rows: Address,
    /// [`Tile`]s.
    pub tiles: Address,
    /// u32 `[sequences][max_pages]`.
    pub pages: Address,
    /// f16 `[rows][heads][head_dim]`.
    pub output: Address,
    /// Workspace: f32 `[tiles][key heads][splits][16][head_dim + 2]`.
    pub partials: Address,
    /// Workspace: counters `[tiles][key heads]`, 0 between launches.
    pub arrivals: Address,
    /// Of the scores.
    pub scale: f32,
    /// Of the results.
    pub v_scale: f32,
    /// Places for tiles.
    pub num_tiles: u32,
    /// Key heads.
    pub num_kv_heads: u32,
    /// Width of the page table.
    pub max_pages: u32,
    /// Positions of a split.
    pub split_tokens: u32,
    /// Splits that a sequence has at most.
    pub max_splits: u32,
    /// Zero.
    pub unused: u32,
}
