//! Rows as products of many rows read them, written by kernels here.

use super::{by_row, matrices, num_rows, padded, product_format};
use crate::Result;
use crate::engine::Kernels;
use crate::exec::cuda::device::arrays;
use crate::exec::cuda::device::{Address, Description, Device, Kernel};
use crate::exec::cuda::model::code::LoadKernel;
use crate::exec::cuda::model::format_code;
use crate::exec::cuda::model::many_params::{NormaliseParams, Operand, QuantiseParams};
use crate::exec::cuda::model::params::Scaling;
use crate::exec::cuda::model::pass::PassOps;
use crate::exec::cuda::model::shape;
use crate::exec::cuda::model::weights::Matrix;
use crate::model::{Dtype, ModelConfig};
use spec_kernels::Variant;

/// The rows of one product at a time, and who writes them.
#[derive(Clone, Copy, Debug)]
pub(super) struct Operands {
    normalise: Kernel,
    /// What is multiplied.
    pub(super) format: Dtype,
    /// Format of the packed weights.
    pub(super) packed: Dtype,
    /// Whether rows are packed as matrices are.
    in_units: bool,
    /// `[places][k]`.
    pub(super) values: Address,
    /// f32 `[places]`, in FP8.
    pub(super) scales: Address,
}

impl Operands {
    /// Without memory.
    pub(super) fn outline(
        kernels: &Kernels<'_>,
        by_library: bool,
        device: &Description,
        loader: &mut impl LoadKernel,
    ) -> Result<Self> {
        let packed = kernels.precision.weights;
        Ok(Self {
            normalise: loader.load(&Variant::plain("normalise"), shape::OPERAND_SHARED_BYTES)?,
            format: product_format(packed, device),
            packed,
            in_units: !by_library,
            values: 0,
            scales: 0,
        })
    }

    /// For passes of up to `rows` rows.
    pub(super) fn with_buffers(
        self,
        model: &ModelConfig,
        rows: usize,
        device: &mut dyn Device,
    ) -> Result<Self> {
        let [values, scales] = arrays::alloc(sizes(model, self.packed, self.format, rows), device)?;
        Ok(Self { values, scales, ..self })
    }

    pub(super) fn bytes(model: &ModelConfig, packed: Dtype, format: Dtype, rows: usize) -> usize {
        arrays::total(&sizes(model, packed, format, rows))
    }

    /// Writes the residual stream behind a norm for a product with this matrix; the pass's first row has this place.
    pub(super) fn normalise(
        &self,
        ops: &mut PassOps<'_>,
        matrix: &Matrix,
        norm: Address,
        first: usize,
    ) {
        let work = ops.layers.workspace;
        let params = NormaliseParams {
            input: work.residual,
            squares: work.squares,
            weight: norm,
            output: self.of(matrix, self.scales, first),
            row_index: 0,
            eps: ops.layers.config.rms_norm_eps,
            num_rows: num_rows(ops),
            k: matrix.k as u32,
            unused: 0,
        };
        by_row(ops, self.normalise, params);
    }

    /// Writes halves for it, by the kernel that the product's multiplier has for that.
    pub(super) fn quantise(
        &self,
        ops: &mut PassOps<'_>,
        code: Kernel,
        matrix: &Matrix,
        input: Address,
        first: usize,
    ) {
        let output = self.of(matrix, self.scales, first);
        let params = QuantiseParams { input, output, num_rows: num_rows(ops), k: matrix.k as u32 };
        by_row(ops, code, params);
    }

    /// The pass's rows of `k` elements as a product with this matrix reads them.
    pub(super) fn of(&self, matrix: &Matrix, scales: Address, first: usize) -> Operand {
        let [_, stride] = padded([matrix.n, matrix.k], self.packed);
        Operand {
            values: self.values,
            scales: of_place(scales, first),
            stride: stride as u32,
            format: format_code(self.format),
            first: first as u32,
            in_units: self.in_units.into(),
        }
    }

    /// What the sums of a product with this matrix lack, of rows that have these scales.
    pub(super) fn scaling(&self, matrix: &Matrix, scales: Address) -> Scaling {
        let rows = if self.format == Dtype::Fp8 { scales } else { 0 };
        Scaling { outputs: matrix.scales, rows, bias: matrix.bias }
    }
}

/// Where the scale of a place is.
pub(super) fn of_place(scales: Address, place: usize) -> Address {
    scales + (place * size_of::<f32>()) as Address
}

fn sizes(model: &ModelConfig, packed: Dtype, format: Dtype, rows: usize) -> [usize; 2] {
    let deepest = matrices(model, packed).into_iter().map(|[_, k]| k).max().unwrap_or(0);
    [rows * deepest * format.bytes(), rows * size_of::<f32>()]
}
