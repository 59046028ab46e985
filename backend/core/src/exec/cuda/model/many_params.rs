//! The structs that the kernels around products of many rows take: those of `kernels/prefill/`, field by field.
#![allow(unsafe_code)]

use super::params::Scaling;
use crate::exec::cuda::device::Address;
use crate::exec::cuda::device::pod::device_structs;

device_structs! {
    /// Rows that a product reads.
    Operand is 32 bytes {
        /// `[places][stride]`, or units of 64 places.
        values: Address,
        /// f32 a row, in FP8.
        scales: Address,
        /// Elements.
        stride: u32,
        /// 1 for FP8, 2 for FP16.
        format: u32,
        /// Place of the first row.
        first: u32,
        /// 1 where a kernel of this project multiplies.
        in_units: u32,
    }

    /// Of `multiply.cu`.
    MultiplyParams is 72 bytes {
        /// Image of a matrix.
        weights: Address,
        /// The same of rows at their places.
        rows: Address,
        /// Of the sums: of places, in FP8.
        scaling: Scaling,
        /// `[rows][n]`, as the kernel says.
        output: Address,
        /// f32 `[rows][tiles of n]`: sums of its squares, where the residual stream grows.
        squares: Address,
        /// Outputs.
        n: u32,
        /// Of a tile.
        k_units: u32,
        /// Place of the first row.
        first: u32,
        /// Rows.
        num_rows: u32,
    }

    /// Of `unpack.cu`.
    UnpackParams is 32 bytes {
        /// Image of a matrix.
        weights: Address,
        /// `[outputs][k]`, both padded as the image is.
        output: Address,
        /// Of the image.
        num_units: u32,
        /// Of a tile.
        k_units: u32,
        /// Of the output: 1 for FP8, 2 for FP16.
        format: u32,
        /// Zero.
        unused: u32,
    }

    /// Of `normalise.cu`.
    NormaliseParams is 80 bytes {
        /// f32 `[rows][k]`.
        input: Address,
        /// f32 `[rows][tiles of k]`: sums of its squares.
        squares: Address,
        /// Weights of the norm.
        weight: Address,
        /// What is written.
        output: Operand,
        /// u32 `[rows]`: which of the input's they are; 0 where these are as many.
        row_index: Address,
        /// Of the norm.
        eps: f32,
        /// Rows.
        num_rows: u32,
        /// Width.
        k: u32,
        /// Zero.
        unused: u32,
    }

    /// Of `quantise.cu`.
    QuantiseParams is 48 bytes {
        /// f16 `[rows][k]`.
        input: Address,
        /// What is written.
        output: Operand,
        /// Rows.
        num_rows: u32,
        /// Width.
        k: u32,
    }

    /// Of `finish.cu`.
    FinishParams is 88 bytes {
        /// f32 `[rows][n]`, n padded as the image is.
        sums: Address,
        /// Of the sums.
        scaling: Scaling,
        /// f32 `[rows][n]`, that is added to.
        residual: Address,
        /// f32 `[rows][tiles of n]`: sums of its squares.
        squares: Address,
        /// Of `n / 2` elements a row.
        output: Operand,
        /// Rows.
        num_rows: u32,
        /// Outputs.
        n: u32,
    }
}
