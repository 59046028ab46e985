//! Passes of many rows whose products a library computes: prompts, or chunks of them.
//!
//! Each matrix is unpacked, multiplied as it is with rows that were written for it, and its plain sums go on through
//! the kernels here. FP8 weights meet rows in FP8, each with a scale of its own, where the GPU multiplies FP8; else both
//! are widened to FP16. The head stays with the few-row products. A pass has rows of one segment alone and is padded to
//! one of a few sizes, so its bits do not depend on what else is computed; they differ from those of few-row products,
//! and from one library or GPU to another. Which rows come here depends on the length of their chunk alone.

use super::arrays;
use super::code::ManyCode;
use super::device::{
    Address, Description, Device, Kernel, Launch, PRODUCT_BYTES, Product, ProductShape,
};
use super::many_params::{FinishParams, NormaliseParams, Operand, QuantiseParams, UnpackParams};
use super::model::{Model, Pass, format_code};
use super::params::Scaling;
use super::pass::Launches;
use super::plain::Plain;
use super::shape;
use super::weights::{Layer, Matrix};
use super::workspace::Workspace;
use crate::Result;
use crate::engine::{self, Engine, Manifest};
use crate::model::image::{TILE, unit_len};
use crate::model::{Dtype, ModelConfig};

/// Who multiplies the rows of long chunks of prompts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ManyRows {
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
#[derive(Clone, Copy, Debug)]
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

/// The matrices that are multiplied here.
const MATRICES: [engine::Matrix; 4] =
    [engine::Matrix::Qkv, engine::Matrix::Out, engine::Matrix::GateUp, engine::Matrix::Down];

/// What FP8 weights are multiplied as, on this device; others are FP16.
fn product_format(packed: Dtype, device: &Description) -> Dtype {
    if packed == Dtype::Fp8 && device.multiplies_fp8() { Dtype::Fp8 } else { Dtype::Fp16 }
}

/// Bytes of the buffers, in the order of the fields.
fn sizes(model: &ModelConfig, packed: Dtype, format: Dtype, rows: usize) -> [usize; 5] {
    let shapes = || MATRICES.map(|matrix| padded(matrix.shape(model), packed)).into_iter();
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
    let matrices = MATRICES.map(|matrix| padded(matrix.shape(model), packed));
    let of_matrix =
        |[n, k]: [usize; 2]| shape::many_rows(rows).map(move |m| ProductShape { format, m, n, k });
    matrices.into_iter().flat_map(of_matrix).collect()
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

    /// Bytes that [`load`](Self::load) takes.
    pub(super) fn bytes(manifest: &Manifest, rows: usize, device: &Description) -> usize {
        let packed = manifest.precision.weights;
        let format = product_format(packed, device);
        PRODUCT_BYTES + arrays::total(&sizes(&manifest.model, packed, format, rows))
    }

    /// Runs a pass; does not wait.
    pub(super) fn issue(&self, model: &Model, pass: &Pass, device: &mut dyn Device) -> Result<()> {
        let mut stages = Stages { many: self, launches: Launches::new(model, pass), done: vec![] };
        stages.launches.embed();
        for (idx, layer) in model.weights.layers.iter().enumerate() {
            stages.attend(layer, model.layer_cache(idx));
            stages.mlp(layer);
        }
        stages.launches.head();
        for (launches, product) in &stages.done {
            launches.iter().try_for_each(|launch| device.launch(launch))?;
            device.product(product)?;
        }
        stages.launches.launches.iter().try_for_each(|launch| device.launch(launch))
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

/// A pass in the making: launches that end with a product, again and again, and what follows the last.
struct Stages<'a> {
    many: &'a Many,
    launches: Launches<'a>,
    done: Vec<(Vec<Launch>, Product)>,
}

impl Stages<'_> {
    /// `residual += out(attention(qkv(norm(residual))))`
    fn attend(&mut self, layer: &Layer, cache: Address) {
        let Many { buffers, .. } = self.many;
        self.normalise(layer.input_norm, &layer.qkv);
        self.multiply(&layer.qkv, buffers.input);
        let scaling = self.many.scaling(&layer.qkv, buffers.scales);
        self.launches.rotate(layer, cache, buffers.sums, scaling);
        self.launches.attention(cache);
        let attended = self.attended(&layer.out);
        self.multiply(&layer.out, attended);
        self.add(&layer.out, buffers.scales);
    }

    /// `residual += down(silu(gate) * up)`
    fn mlp(&mut self, layer: &Layer) {
        let Many { buffers, .. } = self.many;
        self.normalise(layer.post_norm, &layer.gate_up);
        self.multiply(&layer.gate_up, buffers.input);
        self.activate(&layer.gate_up, &layer.down);
        self.multiply(&layer.down, buffers.input);
        self.add(&layer.down, buffers.activated_scales);
    }

    /// The normed residual stream becomes the input of a product.
    fn normalise(&mut self, weight: Address, matrix: &Matrix) {
        let params = NormaliseParams {
            input: self.launches.model.workspace.residual,
            squares: self.launches.model.workspace.squares,
            weight,
            output: self.many.operand(matrix, self.many.buffers.scales),
            eps: self.launches.model.config.rms_norm_eps,
            num_rows: self.num_rows(),
            k: matrix.k as u32,
            unused: 0,
        };
        self.by_row(self.many.code.normalise, params);
    }

    /// The attention's output as the input of a product: where that is.
    fn attended(&mut self, matrix: &Matrix) -> Address {
        let attended = self.launches.model.workspace.attended;
        // FP16 weights are multiplied with what there is.
        let Some(quantise) = self.many.code.quantise else { return attended };
        let output = self.many.operand(matrix, self.many.buffers.scales);
        let (num_rows, k) = (self.num_rows(), matrix.k as u32);
        self.by_row(quantise, QuantiseParams { input: attended, output, num_rows, k });
        self.many.buffers.input
    }

    /// The sums of gate and up become the input of the product with `down`.
    fn activate(&mut self, gate_up: &Matrix, down: &Matrix) {
        let Buffers { scales, activated_scales, .. } = self.many.buffers;
        let output = self.many.operand(down, activated_scales);
        let params = FinishParams { output, ..self.finish(gate_up, scales) };
        self.by_row(self.many.code.swiglu, params);
    }

    /// The sums, of an input of these scales, go to the residual stream.
    fn add(&mut self, matrix: &Matrix, scales: Address) {
        let Workspace { residual, squares, .. } = self.launches.model.workspace;
        let params = FinishParams { residual, squares, ..self.finish(matrix, scales) };
        self.by_row(self.many.code.residual, params);
    }

    fn finish(&self, matrix: &Matrix, scales: Address) -> FinishParams {
        FinishParams {
            sums: self.many.buffers.sums,
            scaling: self.many.scaling(matrix, scales),
            residual: 0,
            squares: 0,
            output: Operand::default(),
            num_rows: self.num_rows(),
            n: matrix.n as u32,
        }
    }

    /// Unpacks a matrix and multiplies. Rows beyond the pass hold what they held: nobody reads their sums.
    fn multiply(&mut self, matrix: &Matrix, input: Address) {
        let Many { code, format, packed, buffers } = self.many;
        let [n, k] = padded([matrix.n, matrix.k], *packed);
        let k_units = k / unit_len(*packed);
        let num_units = n / TILE * k_units;
        let params = UnpackParams {
            weights: matrix.weights,
            output: buffers.weights,
            num_units: num_units as u32,
            k_units: k_units as u32,
            format: format_code(*format),
            unused: 0,
        };
        let grid = (self.launches.model.num_sms * shape::UNPACK_BLOCKS).min(num_units as u32);
        self.launches.push(code.unpack, grid, shape::ROW_THREADS, 0, params);
        let m = shape::padded_rows(self.launches.pass.num_rows);
        let product = Product {
            shape: ProductShape { format: *format, m, n, k },
            weights: buffers.weights,
            input,
            output: buffers.sums,
        };
        self.done.push((std::mem::take(&mut self.launches.launches), product));
    }

    fn by_row<P: Plain>(&mut self, kernel: Kernel, params: P) {
        let shared_bytes = shape::OPERAND_SHARED_BYTES;
        self.launches.push(kernel, self.num_rows(), shape::ROW_THREADS, shared_bytes, params);
    }

    fn num_rows(&self) -> u32 {
        self.launches.pass.num_rows as u32
    }
}
