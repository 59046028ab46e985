//! Products of blocks by kernels here: matrices and rows as they are packed, and what follows at once, but for the rotation of
//! heads.

use super::operands::{Operands, of_place};
use super::{InBlocks, matrices};
use crate::Result;
use crate::engine::Kernels;
use crate::exec::cuda::device::arrays;
use crate::exec::cuda::device::{Address, Device, Kernel};
use crate::exec::cuda::model::code::LoadKernel;
use crate::exec::cuda::model::many_params::MultiplyParams;
use crate::exec::cuda::model::pass::{Input, Output, PassOps};
use crate::exec::cuda::model::shape::{self, MultiplyTiles};
use crate::exec::cuda::model::weights::Matrix;
use crate::exec::cuda::model::workspace::Workspace;
use crate::model::image::unit_len;
use crate::model::{Dtype, ModelConfig};
use spec_kernels::{Epilogue, MULTIPLY_EPILOGUES, MULTIPLY_ROWS};

/// The kernels, and plain sums of queries, keys and values.
#[derive(Clone, Copy, Debug)]
pub(super) struct ByKernels {
    quantise: Kernel,
    raw: ByTile,
    residual: ByTile,
    swiglu: ByTile,
    /// f32 `[rows][n]`.
    sums: Address,
}

/// A product compiled for each number of rows of a tile, in the order of [`MULTIPLY_ROWS`].
#[derive(Clone, Copy, Debug)]
struct ByTile([Kernel; MULTIPLY_ROWS.len()]);

impl ByTile {
    fn of(kernels: &Kernels<'_>, epilogue: Epilogue, loader: &mut impl LoadKernel) -> Result<Self> {
        let mut code = [Kernel(0); MULTIPLY_ROWS.len()];
        for (code, rows) in code.iter_mut().zip(MULTIPLY_ROWS) {
            *code = loader.load(&kernels.multiply(rows, epilogue), shape::MULTIPLY_SHARED_BYTES)?;
        }
        Ok(Self(code))
    }

    /// For tiles of so many rows, one of the list.
    fn get(&self, rows: usize) -> Kernel {
        self.0[MULTIPLY_ROWS.partition_point(|&each| each < rows)]
    }
}

impl ByKernels {
    /// Without memory.
    pub(super) fn outline(kernels: &Kernels<'_>, loader: &mut impl LoadKernel) -> Result<Self> {
        let [raw, residual, swiglu] =
            MULTIPLY_EPILOGUES.map(|epilogue| ByTile::of(kernels, epilogue, loader));
        let quantise = loader.load(&kernels.quantise(), shape::OPERAND_SHARED_BYTES)?;
        Ok(Self { quantise, raw: raw?, residual: residual?, swiglu: swiglu?, sums: 0 })
    }

    pub(super) fn with_buffers(
        self,
        model: &ModelConfig,
        operands: &Operands,
        rows: usize,
        device: &mut dyn Device,
    ) -> Result<Self> {
        let [sums] = arrays::alloc([sums_bytes(model, operands.packed, rows)], device)?;
        Ok(Self { sums, ..self })
    }

    pub(super) fn bytes(model: &ModelConfig, packed: Dtype, rows: usize) -> usize {
        arrays::total(&[sums_bytes(model, packed, rows)])
    }

    pub(super) fn multiply(
        &self,
        blocks: InBlocks<'_>,
        ops: &mut PassOps<'_>,
        matrix: &Matrix,
        input: Input,
        output: Output<'_>,
    ) {
        let (operands, first) = (&blocks.many.operands, blocks.first);
        match input {
            Input::Normed(norm) => operands.normalise(ops, matrix, norm, first),
            Input::Attended => {
                let attended = ops.attended();
                operands.quantise(ops, self.quantise, matrix, attended, first);
            }
            Input::Activated => {
                let activated = ops.layers.workspace.block_activated;
                operands.quantise(ops, self.quantise, matrix, activated, first);
            }
            Input::Halves(_) | Input::Rows { .. } => unreachable!("of heads, which have no blocks"),
        }
        let Workspace { residual, squares, block_activated, .. } = ops.layers.workspace;
        let params = MultiplyParams {
            weights: matrix.weights,
            rows: operands.values,
            scaling: operands.scaling(matrix, operands.scales),
            output: 0,
            squares: 0,
            n: matrix.n as u32,
            k_units: matrix.k.div_ceil(unit_len(operands.packed)) as u32,
            first: first as u32,
            num_rows: ops.pass.num_rows as u32,
        };
        match output {
            Output::Heads { part, cache } => {
                launch(ops, &self.raw, MultiplyParams { output: self.sums, ..params });
                let scaling = operands.scaling(matrix, of_place(operands.scales, first));
                ops.rotate(part, cache, self.sums, scaling);
            }
            Output::Residual => {
                launch(ops, &self.residual, MultiplyParams { output: residual, squares, ..params });
            }
            Output::Activated { .. } => {
                launch(ops, &self.swiglu, MultiplyParams { output: block_activated, ..params });
            }
            Output::Logits(_) => unreachable!("few rows want logits"),
            Output::Sums { .. } => unreachable!("of heads, which have no blocks"),
        }
    }
}

fn launch(ops: &mut PassOps<'_>, code: &ByTile, params: MultiplyParams) {
    let places = params.first as usize..(params.first + params.num_rows) as usize;
    let tiles = MultiplyTiles::of(params.n as usize, places, ops.layers.num_sms);
    let kernel = code.get(tiles.rows);
    let shared_bytes = shape::MULTIPLY_SHARED_BYTES;
    ops.launch(kernel, tiles.grid, shape::MULTIPLY_THREADS, shared_bytes, params);
}

fn sums_bytes(model: &ModelConfig, packed: Dtype, rows: usize) -> usize {
    let [[heads, _], ..] = matrices(model, packed);
    rows * heads * size_of::<f32>()
}
