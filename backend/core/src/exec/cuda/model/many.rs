//! Products of many rows, which a library computes: those of prompts' blocks.
//!
//! Each matrix is unpacked, multiplied as it is with rows that were written for it, and its plain sums go on through
//! the kernels here. FP8 weights meet rows in FP8, each with a scale of its own, where the GPU multiplies FP8; else both
//! are widened to FP16. The head stays with the few-row products. A pass has rows of one prompt, each at its place in its
//! block, whether the others are there or not. Each block is multiplied by itself, so all products with a matrix have one
//! shape, and the bits of a row depend on nothing but its input and its place. They differ from those of few-row
//! products, and from one library or GPU to another.

use super::code::{self, ManyCode};
use super::format_code;
use super::many_params::{FinishParams, NormaliseParams, Operand, QuantiseParams, UnpackParams};
use super::params::Scaling;
use super::pass::{Input, Output, PassOps};
use super::shape::{self, BLOCK_LEN};
use super::weights::Matrix;
use super::workspace::Workspace;
use crate::Result;
use crate::engine::{Engine, Manifest};
use crate::exec::cuda::device::arrays;
use crate::exec::cuda::device::pod::Pod;
use crate::exec::cuda::device::{
    Address, Description, Device, Kernel, Op, PRODUCT_BYTES, Product, ProductShape,
};
use crate::model::decoder::Layer;
use crate::model::image::{TILE, unit_len};
use crate::model::{Dtype, ModelConfig};

/// Who multiplies the rows of long prompts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Prefill {
    /// The few-row products, a few rows at a time: a row has the same bits as in decoding.
    Exact,
    /// cuBLASLt, in blocks of 512 positions: faster.
    CublasLt,
}

/// A pass over rows of blocks that follow each other in a prompt.
#[derive(Clone, Copy, Debug)]
pub(super) struct InBlocks<'a> {
    pub(super) many: &'a Many,
    /// Place of the pass's first row in its block.
    pub(super) first: usize,
}

/// What passes of many rows take besides the workspace of all passes.
#[derive(Debug)]
pub(super) struct Many {
    code: ManyCode,
    /// What is multiplied.
    format: Dtype,
    /// Format of the packed weights.
    packed: Dtype,
    buffers: Buffers,
}

/// Where the arrays of a product are.
#[derive(Clone, Copy, Debug, Default)]
struct Buffers {
    /// One matrix, `[n][k]`, padded as its image is.
    weights: Address,
    /// `[rows][k]`.
    input: Address,
    /// f32 `[rows]`: scales of the input.
    scales: Address,
    /// f32 `[rows]`: those of the activations, which are written while the scales before them are read.
    activated_scales: Address,
    /// f32 `[rows][n]`.
    sums: Address,
}

/// What FP8 weights are multiplied as, on this device; others are FP16.
fn product_format(packed: Dtype, device: &Description) -> Dtype {
    if packed == Dtype::Fp8 && device.multiplies_fp8() { Dtype::Fp8 } else { Dtype::Fp16 }
}

/// Outputs and inputs of the matrices that are multiplied here: all layers are alike.
fn matrices(model: &ModelConfig, packed: Dtype) -> [[usize; 2]; 4] {
    Layer::of(model, 0).matrices().map(|linear| padded(linear.shape(), packed))
}

/// Bytes of the buffers, in the order of the fields.
fn sizes(model: &ModelConfig, packed: Dtype, format: Dtype, rows: usize) -> [usize; 5] {
    let shapes = || matrices(model, packed).into_iter();
    let largest = shapes().map(|[n, k]| n * k).max().unwrap_or(0);
    let [widest, deepest] = [0, 1].map(|side| shapes().map(|shape| shape[side]).max().unwrap_or(0));
    [
        largest * format.bytes(),
        rows * deepest * format.bytes(),
        rows * size_of::<f32>(),
        rows * size_of::<f32>(),
        rows * widest * size_of::<f32>(),
    ]
}

/// Of all products.
fn shapes(model: &ModelConfig, packed: Dtype, format: Dtype) -> [ProductShape; 4] {
    matrices(model, packed).map(|[n, k]| ProductShape { format, m: BLOCK_LEN, n, k })
}

/// Outputs and inputs as the image has them.
fn padded([n, k]: [usize; 2], packed: Dtype) -> [usize; 2] {
    [n.next_multiple_of(TILE), k.next_multiple_of(unit_len(packed))]
}

impl Many {
    /// Gets the library, and a way to compute each product: who serves does not find out later that there is none.
    pub(super) fn enable(manifest: &Manifest, device: &mut dyn Device) -> Result<()> {
        let packed = manifest.precision.weights;
        let format = product_format(packed, device.describe());
        device.enable_products(&shapes(&manifest.model, packed, format))
    }

    /// Loads the kernels, and allocates for passes of up to `rows` rows, those of whole blocks.
    pub(super) fn load(engine: &Engine, rows: usize, device: &mut dyn Device) -> Result<Self> {
        let manifest = engine.manifest();
        Self::enable(manifest, device)?;
        let packed = manifest.precision.weights;
        let format = product_format(packed, device.describe());
        let sizes = sizes(&manifest.model, packed, format, rows);
        let [weights, input, scales, activated_scales, sums] = arrays::alloc(sizes, device)?;
        let buffers = Buffers { weights, input, scales, activated_scales, sums };
        Ok(Self {
            code: code::load(engine, device, |kernels, loader| ManyCode::of(kernels, loader))?,
            format,
            packed,
            buffers,
        })
    }

    /// With kernels from elsewhere, and memory nowhere.
    pub(super) fn outline(code: ManyCode, packed: Dtype, device: &Description) -> Self {
        let format = product_format(packed, device);
        Self { code, format, packed, buffers: Buffers::default() }
    }

    /// Bytes that [`load`](Self::load) takes.
    pub(super) fn bytes(manifest: &Manifest, rows: usize, device: &Description) -> usize {
        let packed = manifest.precision.weights;
        let format = product_format(packed, device);
        PRODUCT_BYTES + arrays::total(&sizes(&manifest.model, packed, format, rows))
    }

    /// The matrix, row by row.
    fn unpack(&self, ops: &mut PassOps<'_>, matrix: &Matrix) {
        let [n, k] = padded([matrix.n, matrix.k], self.packed);
        let k_units = k / unit_len(self.packed);
        let num_units = n / TILE * k_units;
        let params = UnpackParams {
            weights: matrix.weights,
            output: self.buffers.weights,
            num_units: num_units as u32,
            k_units: k_units as u32,
            format: format_code(self.format),
            unused: 0,
        };
        let grid = (ops.layers.num_sms * shape::UNPACK_BLOCKS).min(num_units as u32);
        ops.launch(self.code.unpack, grid, shape::ROW_THREADS, 0, params);
    }
}

impl InBlocks<'_> {
    /// Multiplies all rows of a pass.
    pub(super) fn multiply(
        self,
        ops: &mut PassOps<'_>,
        matrix: &Matrix,
        input: Input,
        output: Output<'_>,
    ) {
        let (rows, scales) = self.prepare(ops, matrix, input);
        let Many { format, packed, buffers, .. } = self.many;
        self.many.unpack(ops, matrix);
        let [n, k] = padded([matrix.n, matrix.k], *packed);
        let shape = ProductShape { format: *format, m: BLOCK_LEN, n, k };
        // Rows of the blocks that are not of this pass hold what they held: nobody reads their sums.
        for first in (0..self.first + ops.pass.num_rows).step_by(BLOCK_LEN) {
            ops.push(Op::Product(Product {
                shape,
                weights: buffers.weights,
                input: rows + (first * k * format.bytes()) as Address,
                output: buffers.sums + (first * n * size_of::<f32>()) as Address,
            }));
        }
        self.finish(ops, matrix, scales, output);
    }

    /// The blocks' rows in the format that is multiplied: where they are, and where the scales of those of the pass.
    fn prepare(self, ops: &mut PassOps<'_>, matrix: &Matrix, input: Input) -> (Address, Address) {
        let Buffers { input: rows, scales, activated_scales, .. } = self.many.buffers;
        let (work, num_rows, k) = (ops.layers.workspace, num_rows(ops), matrix.k as u32);
        match (input, self.many.code.quantise) {
            (Input::Normed(weight), _) => {
                let params = NormaliseParams {
                    input: work.residual,
                    squares: work.squares,
                    weight,
                    output: self.operand(matrix, scales),
                    row_index: 0,
                    eps: ops.layers.config.rms_norm_eps,
                    num_rows,
                    k,
                    unused: 0,
                };
                by_row(ops, self.many.code.normalise, params);
                (rows, scales)
            }
            // FP16 weights are multiplied with what there is.
            (Input::Attended, None) => (work.attended, scales),
            (Input::Attended, Some(quantise)) => {
                let output = self.operand(matrix, scales);
                let input = ops.attended();
                by_row(ops, quantise, QuantiseParams { input, output, num_rows, k });
                (rows, scales)
            }
            // Written so by the product before.
            (Input::Activated, _) => (rows, activated_scales),
            (Input::Halves(_) | Input::Rows { .. }, _) => {
                unreachable!("of heads, which have no blocks")
            }
        }
    }

    /// What comes behind the sums of rows that have these scales.
    fn finish(self, ops: &mut PassOps<'_>, matrix: &Matrix, scales: Address, output: Output<'_>) {
        let Workspace { residual, squares, .. } = ops.layers.workspace;
        let [n, _] = padded([matrix.n, matrix.k], self.many.packed);
        let params = FinishParams {
            sums: self.placed(self.many.buffers.sums, n * size_of::<f32>()),
            scaling: self.scaling(matrix, scales),
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
                by_row(ops, self.many.code.residual, FinishParams { residual, squares, ..params });
            }
            Output::Activated { next } => {
                let output = self.operand(next, self.many.buffers.activated_scales);
                by_row(ops, self.many.code.swiglu, FinishParams { output, ..params });
            }
            Output::Logits(_) => unreachable!("few rows want logits"),
            Output::Sums { .. } => unreachable!("of heads, which have no blocks"),
        }
    }

    /// The pass's rows of `k` elements as a product with this matrix reads them.
    fn operand(self, matrix: &Matrix, scales: Address) -> Operand {
        let Many { format, packed, buffers, .. } = self.many;
        let [_, stride] = padded([matrix.n, matrix.k], *packed);
        Operand {
            values: self.placed(buffers.input, stride * format.bytes()),
            scales,
            stride: stride as u32,
            format: format_code(*format),
        }
    }

    /// Where the pass's rows begin among the blocks'.
    fn placed(self, rows: Address, row_bytes: usize) -> Address {
        rows + (self.first * row_bytes) as Address
    }

    /// What the sums of a product with this matrix lack.
    fn scaling(self, matrix: &Matrix, scales: Address) -> Scaling {
        let rows = if self.many.format == Dtype::Fp8 { scales } else { 0 };
        Scaling { outputs: matrix.scales, rows, bias: matrix.bias }
    }
}

fn by_row<P: Pod>(ops: &mut PassOps<'_>, kernel: Kernel, params: P) {
    let shared_bytes = shape::OPERAND_SHARED_BYTES;
    ops.launch(kernel, num_rows(ops), shape::ROW_THREADS, shared_bytes, params);
}

fn num_rows(ops: &PassOps<'_>) -> u32 {
    ops.pass.num_rows as u32
}
