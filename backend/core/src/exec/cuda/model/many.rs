//! Products of many rows, which a library computes: those of prompts, or chunks of them.
//!
//! Each matrix is unpacked, multiplied as it is with rows that were written for it, and its plain sums go on through
//! the kernels here. FP8 weights meet rows in FP8, each with a scale of its own, where the GPU multiplies FP8; else both
//! are widened to FP16. The head stays with the few-row products. A pass has rows of one segment alone and is padded to
//! one of a few sizes, so its bits do not depend on what else is computed; they differ from those of few-row products,
//! and from one library or GPU to another. Which rows come here depends on the length of their chunk alone.

use super::code::ManyCode;
use super::format_code;
use super::many_params::{FinishParams, NormaliseParams, Operand, QuantiseParams, UnpackParams};
use super::params::Scaling;
use super::pass::{Input, Output, PassOps};
use super::shape;
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

/// Who multiplies the rows of long chunks of prompts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Prefill {
    /// The few-row products, a few rows at a time: a row has the same bits in any chunk.
    #[default]
    Exact,
    /// cuBLASLt: faster, and a row's bits depend on how its prompt was cut.
    CublasLt,
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

/// Of all products that passes of up to `rows` rows have.
fn shapes(model: &ModelConfig, packed: Dtype, format: Dtype, rows: usize) -> Vec<ProductShape> {
    let of_matrix =
        |[n, k]: [usize; 2]| shape::many_rows(rows).map(move |m| ProductShape { format, m, n, k });
    matrices(model, packed).into_iter().flat_map(of_matrix).collect()
}

/// Outputs and inputs as the image has them.
fn padded([n, k]: [usize; 2], packed: Dtype) -> [usize; 2] {
    [n.next_multiple_of(TILE), k.next_multiple_of(unit_len(packed))]
}

impl Many {
    /// Loads the kernels and allocates for passes of up to `rows` rows, one of the padded numbers.
    pub(super) fn load(engine: &Engine, rows: usize, device: &mut dyn Device) -> Result<Self> {
        let manifest = engine.manifest();
        let packed = manifest.precision.weights;
        let format = product_format(packed, device.describe());
        // Who serves does not find out on the way that there is no way to compute something.
        device.enable_products(&shapes(&manifest.model, packed, format, rows))?;
        let sizes = sizes(&manifest.model, packed, format, rows);
        let [weights, input, scales, activated_scales, sums] = arrays::alloc(sizes, device)?;
        let buffers = Buffers { weights, input, scales, activated_scales, sums };
        Ok(Self { code: ManyCode::load(engine, device)?, format, packed, buffers })
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

    /// Multiplies all rows of a pass.
    pub(super) fn multiply(
        &self,
        ops: &mut PassOps<'_>,
        matrix: &Matrix,
        input: Input,
        output: Output<'_>,
    ) {
        let (rows, scales) = self.prepare(ops, matrix, input);
        self.unpack(ops, matrix);
        let [n, k] = padded([matrix.n, matrix.k], self.packed);
        let m = shape::padded_rows(ops.pass.num_rows);
        // Rows beyond the pass hold what they held: nobody reads their sums.
        ops.push(Op::Product(Product {
            shape: ProductShape { format: self.format, m, n, k },
            weights: self.buffers.weights,
            input: rows,
            output: self.buffers.sums,
        }));
        self.finish(ops, matrix, scales, output);
    }

    /// The rows in the format that is multiplied: where they are, and where their scales.
    fn prepare(&self, ops: &mut PassOps<'_>, matrix: &Matrix, input: Input) -> (Address, Address) {
        let Buffers { input: rows, scales, activated_scales, .. } = self.buffers;
        let (work, num_rows, k) = (ops.model.workspace, num_rows(ops), matrix.k as u32);
        match (input, self.code.quantise) {
            (Input::Normed(weight), _) => {
                let params = NormaliseParams {
                    input: work.residual,
                    squares: work.squares,
                    weight,
                    output: self.operand(matrix, scales),
                    eps: ops.model.config.rms_norm_eps,
                    num_rows,
                    k,
                    unused: 0,
                };
                by_row(ops, self.code.normalise, params);
                (rows, scales)
            }
            // FP16 weights are multiplied with what there is.
            (Input::Attended, None) => (work.attended, scales),
            (Input::Attended, Some(quantise)) => {
                let output = self.operand(matrix, scales);
                let input = work.attended;
                by_row(ops, quantise, QuantiseParams { input, output, num_rows, k });
                (rows, scales)
            }
            // Written so by the product before.
            (Input::Activated, _) => (rows, activated_scales),
        }
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
        let grid = (ops.model.num_sms * shape::UNPACK_BLOCKS).min(num_units as u32);
        ops.launch(self.code.unpack, grid, shape::ROW_THREADS, 0, params);
    }

    /// What comes behind the sums of rows that have these scales.
    fn finish(&self, ops: &mut PassOps<'_>, matrix: &Matrix, scales: Address, output: Output<'_>) {
        let Workspace { residual, squares, .. } = ops.model.workspace;
        let params = FinishParams {
            sums: self.buffers.sums,
            scaling: self.scaling(matrix, scales),
            residual: 0,
            squares: 0,
            output: Operand::default(),
            num_rows: num_rows(ops),
            n: matrix.n as u32,
        };
        match output {
            Output::Heads { part, cache } => {
                ops.rotate(part, cache, self.buffers.sums, params.scaling);
            }
            Output::Residual => {
                by_row(ops, self.code.residual, FinishParams { residual, squares, ..params });
            }
            Output::Activated { next } => {
                let output = self.operand(next, self.buffers.activated_scales);
                by_row(ops, self.code.swiglu, FinishParams { output, ..params });
            }
            Output::Logits => unreachable!("few rows want logits"),
        }
    }

    /// Rows of `k` elements as a product with this matrix reads them.
    fn operand(&self, matrix: &Matrix, scales: Address) -> Operand {
        let [_, stride] = padded([matrix.n, matrix.k], self.packed);
        Operand {
            values: self.buffers.input,
            scales,
            stride: stride as u32,
            format: format_code(self.format),
        }
    }

    /// What the sums of a product with this matrix lack.
    fn scaling(&self, matrix: &Matrix, scales: Address) -> Scaling {
        let rows = if self.format == Dtype::Fp8 { scales } else { 0 };
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
