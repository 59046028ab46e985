//! Products of blocks by a library: each matrix is unpacked, multiplied as it is with each block's rows, and its plain sums go
//! on through kernels here.

use super::operands::{Operands, of_place};
use super::{InBlocks, by_row, matrices, num_rows, padded, product_format};
use crate::Result;
use crate::engine::{Kernels, Manifest};
use crate::exec::cuda::device::arrays;
use crate::exec::cuda::device::{
    Address, Device, Kernel, Op, PRODUCT_BYTES, Product, ProductShape,
};
use crate::exec::cuda::model::code::LoadKernel;
use crate::exec::cuda::model::format_code;
use crate::exec::cuda::model::many_params::{FinishParams, Operand, UnpackParams};
use crate::exec::cuda::model::pass::{Input, Output, PassOps};
use crate::exec::cuda::model::shape::{self, BLOCK_LEN};
use crate::exec::cuda::model::weights::Matrix;
use crate::exec::cuda::model::workspace::Workspace;
use crate::model::image::{TILE, unit_len};
use crate::model::{Dtype, ModelConfig};
use spec_kernels::{Epilogue, Variant};

/// What is in front of a library's products and behind them.
#[derive(Clone, Copy, Debug)]
pub(super) struct ByLibrary {
    /// Packed matrices row by row.
    unpack: Kernel,
    /// From halves to FP8, where that is multiplied.
    quantise: Option<Kernel>,
    /// Adds to the residual stream.
    residual: Kernel,
    /// silu(gate) * up.
    swiglu: Kernel,
    buffers: Buffers,
}

/// Where the arrays of a product are, but for its rows.
#[derive(Clone, Copy, Debug, Default)]
struct Buffers {
    /// One matrix, `[n][k]`, padded as its image is.
    weights: Address,
    /// f32 `[places]`: scales of the activations, which are written while the scales before them are read.
    activated_scales: Address,
    /// f32 `[places][n]`.
    sums: Address,
}

/// Gets the library, and a way to compute each product.
pub(super) fn enable(manifest: &Manifest, device: &mut dyn Device) -> Result<()> {
    let packed = manifest.precision.weights;
    let format = product_format(packed, device.describe());
    let shapes = matrices(&manifest.model, packed);
    device.enable_products(&shapes.map(|[n, k]| ProductShape { format, m: BLOCK_LEN, n, k }))
}

impl ByLibrary {
    /// Without memory.
    pub(super) fn outline(kernels: &Kernels<'_>, loader: &mut impl LoadKernel) -> Result<Self> {
        let unpack = loader.load(&kernels.unpack(), 0)?;
        let mut of_rows = |variant| loader.load(&variant, shape::OPERAND_SHARED_BYTES);
        let [residual, swiglu] = [Epilogue::Residual, Epilogue::SwiGlu]
            .map(|epilogue| of_rows(Variant::finish(epilogue)));
        let quantise = kernels.quantise_for_library().map(of_rows).transpose()?;
        let (residual, swiglu) = (residual?, swiglu?);
        Ok(Self { unpack, quantise, residual, swiglu, buffers: Buffers::default() })
    }

    pub(super) fn with_buffers(
        self,
        model: &ModelConfig,
        operands: &Operands,
        rows: usize,
        device: &mut dyn Device,
    ) -> Result<Self> {
        let sizes = sizes(model, operands.packed, operands.format, rows);
        let [weights, activated_scales, sums] = arrays::alloc(sizes, device)?;
        Ok(Self { buffers: Buffers { weights, activated_scales, sums }, ..self })
    }

    pub(super) fn bytes(model: &ModelConfig, packed: Dtype, format: Dtype, rows: usize) -> usize {
        PRODUCT_BYTES + arrays::total(&sizes(model, packed, format, rows))
    }

    pub(super) fn multiply(
        &self,
        blocks: InBlocks<'_>,
        ops: &mut PassOps<'_>,
        matrix: &Matrix,
        input: Input,
        output: Output<'_>,
    ) {
        let (rows, scales) = self.prepare(blocks, ops, matrix, input);
        let operands = &blocks.many.operands;
        self.unpack(operands, ops, matrix);
        let [n, k] = padded([matrix.n, matrix.k], operands.packed);
        let shape = ProductShape { format: operands.format, m: BLOCK_LEN, n, k };
        // Rows of the blocks that are not of this pass hold what they held: nobody reads their sums.
        for first in (0..blocks.first + ops.pass.num_rows).step_by(BLOCK_LEN) {
            ops.push(Op::Product(Product {
                shape,
                weights: self.buffers.weights,
                input: rows + (first * k * operands.format.bytes()) as Address,
                output: self.buffers.sums + (first * n * size_of::<f32>()) as Address,
            }));
        }
        self.finish(blocks, ops, matrix, scales, output);
    }

    /// The blocks' rows in the format that is multiplied: where they are, and where their scales.
    fn prepare(
        &self,
        blocks: InBlocks<'_>,
        ops: &mut PassOps<'_>,
        matrix: &Matrix,
        input: Input,
    ) -> (Address, Address) {
        let (operands, first) = (&blocks.many.operands, blocks.first);
        match (input, self.quantise) {
            (Input::Normed(norm), _) => operands.normalise(ops, matrix, norm, first),
            // FP16 weights are multiplied with what there is.
            (Input::Attended, None) => {
                return (ops.layers.workspace.block_attended, operands.scales);
            }
            (Input::Attended, Some(quantise)) => {
                let attended = ops.attended();
                operands.quantise(ops, quantise, matrix, attended, first);
            }
            // Written so by the product before.
            (Input::Activated, _) => return (operands.values, self.buffers.activated_scales),
            (Input::Halves(_) | Input::Rows { .. }, _) => {
                unreachable!("of heads, which have no blocks")
            }
        }
        (operands.values, operands.scales)
    }

    /// The matrix, row by row.
    fn unpack(&self, operands: &Operands, ops: &mut PassOps<'_>, matrix: &Matrix) {
        let [n, k] = padded([matrix.n, matrix.k], operands.packed);
        let k_units = k / unit_len(operands.packed);
        let num_units = n / TILE * k_units;
        let params = UnpackParams {
            weights: matrix.weights,
            output: self.buffers.weights,
            num_units: num_units as u32,
            k_units: k_units as u32,
            format: format_code(operands.format),
            unused: 0,
        };
        let grid = (ops.layers.num_sms * shape::UNPACK_BLOCKS).min(num_units as u32);
        ops.launch(self.unpack, grid, shape::ROW_THREADS, 0, params);
    }

    /// What comes behind the sums of rows that have these scales.
    fn finish(
        &self,
        blocks: InBlocks<'_>,
        ops: &mut PassOps<'_>,
        matrix: &Matrix,
        scales: Address,
        output: Output<'_>,
    ) {
        let InBlocks { many, first } = blocks;
        let Workspace { residual, squares, .. } = ops.layers.workspace;
        let [n, _] = padded([matrix.n, matrix.k], many.operands.packed);
        let params = FinishParams {
            sums: self.buffers.sums + (first * n * size_of::<f32>()) as Address,
            scaling: many.operands.scaling(matrix, of_place(scales, first)),
            residual: 0,
            squares: 0,
            output: Operand::default(),
            num_rows: num_rows(ops),
            n: matrix.n as u32,
        };
        match output {
            Output::Heads { part, cache } => {
                ops.rotate(part, cache, params.sums, params.scaling);
            }
            Output::Residual => {
                by_row(ops, self.residual, FinishParams { residual, squares, ..params });
            }
            Output::Activated { next } => {
                let output = many.operands.of(next, self.buffers.activated_scales, first);
                by_row(ops, self.swiglu, FinishParams { output, ..params });
            }
            Output::Logits(_) => unreachable!("few rows want logits"),
            Output::Sums { .. } => unreachable!("of heads, which have no blocks"),
        }
    }
}

fn sizes(model: &ModelConfig, packed: Dtype, format: Dtype, rows: usize) -> [usize; 3] {
    let shapes = || matrices(model, packed).into_iter();
    let largest = shapes().map(|[n, k]| n * k).max().unwrap_or(0);
    let widest = shapes().map(|[n, _]| n).max().unwrap_or(0);
    [largest * format.bytes(), rows * size_of::<f32>(), rows * widest * size_of::<f32>()]
}
