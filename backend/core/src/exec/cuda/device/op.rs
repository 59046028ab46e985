//! What can be issued to a device, and recorded: kernels of this project, products of a library, and copies.

use super::pod::{Pod, bytes_of};
use super::{Address, Kernel};
use crate::model::Dtype;

/// One operation; the next one sees what it wrote.
#[derive(Clone, Debug)]
pub enum Op {
    /// A kernel.
    Launch(Launch),
    /// A product of a library.
    Product(Product),
    /// A copy within the device's memory, between ranges that do not overlap.
    Copy {
        /// Where it begins.
        from: Address,
        /// Where it goes.
        to: Address,
        /// How much.
        bytes: usize,
        /// How many such ranges.
        rows: usize,
        /// From the beginning of one to that of the next, on either side.
        pitch: usize,
    },
}

impl Op {
    /// The kernel, if it is one.
    pub fn as_launch(&self) -> Option<&Launch> {
        match self {
            Self::Launch(launch) => Some(launch),
            Self::Product(_) | Self::Copy { .. } => None,
        }
    }
}

/// One kernel over a grid.
#[derive(Clone, Debug)]
pub struct Launch {
    /// What runs.
    pub kernel: Kernel,
    /// Thread blocks.
    pub grid: u32,
    /// Threads in a block.
    pub block: u32,
    /// Dynamic shared memory of a block.
    pub shared_bytes: u32,
    /// The kernel's one parameter, a struct passed by value.
    pub params: Vec<u8>,
    /// May start before the launch ahead of it has ended: the kernel itself waits where it must.
    pub overlap: bool,
}

impl Launch {
    /// A kernel of this project, all of which wait where they must.
    pub(in crate::exec::cuda) fn new<P: Pod>(
        kernel: Kernel,
        grid: u32,
        block: u32,
        shared_bytes: u32,
        params: P,
    ) -> Self {
        let params = bytes_of(&[params]).to_vec();
        Self { kernel, grid, block, shared_bytes, params, overlap: true }
    }
}

/// The product of many rows with a matrix, by a library: `output[m][n] = sum over k of input[m][k] * weights[n][k]`, f32
/// from elements of one format as they are. Rows follow each other; arrays are aligned to 256.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Product {
    /// What is multiplied.
    pub shape: ProductShape,
    /// `[n][k]`.
    pub weights: Address,
    /// `[m][k]`.
    pub input: Address,
    /// f32 `[m][n]`.
    pub output: Address,
}

/// What the way to compute a product depends on. `n` and `k` are multiples of 64.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ProductShape {
    /// Of weights and input: FP16, or FP8 where [a device multiplies it](super::Description::multiplies_fp8).
    pub format: Dtype,
    /// Rows.
    pub m: usize,
    /// Outputs.
    pub n: usize,
    /// Inputs.
    pub k: usize,
}
