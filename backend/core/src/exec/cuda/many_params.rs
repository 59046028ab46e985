//! The structs that the kernels around products of many rows take: those of `kernels/{operand.cuh,unpack.cu,normalise.cu,
//! quantise.cu,finish.cu}`, field by field.

use super::device::Address;
use super::params::{Scaling, plain};

plain! {
    Operand: 24, UnpackParams: 32, NormaliseParams: 56, QuantiseParams: 40, FinishParams: 72,
}

/// Rows that a product reads.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct Operand {
    /// `[rows][stride]`.
    pub values: Address,
    /// f32 a row, in FP8.
    pub scales: Address,
    /// Elements.
    pub stride: u32,
    /// 1 for FP8, 2 for FP16.
    pub format: u32,
}

/// Of `unpack.cu`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct UnpackParams {
    /// Image of a matrix.
    pub weights: Address,
    /// `[outputs][k]`, both padded as the image is.
    pub output: Address,
    /// Of the image.
    pub num_units: u32,
    /// Of a tile.
    pub k_units: u32,
    /// Of the output: 1 for FP8, 2 for FP16.
    pub format: u32,
    /// Zero.
    pub unused: u32,
}

/// Of `normalise.cu`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct NormaliseParams {
    /// f32 `[rows][k]`.
    pub input: Address,
    /// Weights of the norm.
    pub weight: Address,
    /// What is written.
    pub output: Operand,
    /// Of the norm.
    pub eps: f32,
    /// Rows.
    pub num_rows: u32,
    /// Width.
    pub k: u32,
    /// Zero.
    pub unused: u32,
}

/// Of `quantise.cu`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct QuantiseParams {
    /// f16 `[rows][k]`.
    pub input: Address,
    /// What is written.
    pub output: Operand,
    /// Rows.
    pub num_rows: u32,
    /// Width.
    pub k: u32,
}

/// Of `finish.cu`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct FinishParams {
    /// f32 `[rows][n]`, n padded as the image is.
    pub sums: Address,
    /// Of the sums.
    pub scaling: Scaling,
    /// f32 `[rows][n]`, that is added to.
    pub residual: Address,
    /// Of `n / 2` elements a row.
    pub output: Operand,
    /// Rows.
    pub num_rows: u32,
    /// Outputs.
    pub n: u32,
}
