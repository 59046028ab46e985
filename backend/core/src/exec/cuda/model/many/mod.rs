//! Products of many rows: those of prompts' blocks.
//!
//! Matrices are multiplied with rows that were written for them (`operands`). FP8 weights meet rows in FP8, each with a scale
//! of its own, where the GPU multiplies FP8; else both are FP16. The head stays with the few-row products. A pass has rows of
//! one prompt, each at its place in its block, whether the others are there or not.
//!
//! On Hopper kernels here multiply matrices as they are packed (`kernels`), each sum from end to end. Elsewhere a library does
//! (`library`), block by block, so that all products with a matrix have one shape. In both ways the bits of a row depend on
//! nothing but its input and its place. They differ from those of few-row products, from each other, and from one library or
//! GPU to another.

mod kernels;
mod library;
mod operands;

use super::code::{LoadKernel, load};
use super::pass::{Input, Output, PassOps};
use super::weights::Matrix;
use crate::Result;
use crate::engine::{self, Engine, Manifest};
use crate::exec::cuda::device::pod::Pod;
use crate::exec::cuda::device::{Description, Device, Kernel};
use crate::model::decoder::Layer;
use crate::model::image::{TILE, unit_len};
use crate::model::{Dtype, ModelConfig};
use kernels::ByKernels;
use library::ByLibrary;
use operands::Operands;

/// Who multiplies the rows of long prompts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Prefill {
    /// The few-row products, a few rows at a time: a row has the same bits as in decoding.
    Exact,
    /// Kernels of this project, in blocks of 512 positions: faster. Where warpgroups multiply.
    Blocks,
    /// cuBLASLt, in such blocks.
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
    operands: Operands,
    multiplier: Multiplier,
}

#[derive(Debug)]
enum Multiplier {
    Kernels(ByKernels),
    Library(ByLibrary),
}

/// What FP8 weights are multiplied as, on this device; others are FP16.
fn product_format(packed: Dtype, device: &Description) -> Dtype {
    if packed == Dtype::Fp8 && device.multiplies_fp8() { Dtype::Fp8 } else { Dtype::Fp16 }
}

/// Outputs and inputs of the matrices that are multiplied here, as their images have them: all layers are alike.
fn matrices(model: &ModelConfig, packed: Dtype) -> [[usize; 2]; 4] {
    Layer::of(model, 0).matrices().map(|linear| padded(linear.shape(), packed))
}

fn padded([n, k]: [usize; 2], packed: Dtype) -> [usize; 2] {
    [n.next_multiple_of(TILE), k.next_multiple_of(unit_len(packed))]
}

impl Many {
    /// Gets the library, and a way to compute each product: who serves does not find out later that there is none.
    pub(super) fn enable_library(manifest: &Manifest, device: &mut dyn Device) -> Result<()> {
        library::enable(manifest, device)
    }

    /// Loads the kernels, and allocates for passes of up to `rows` rows, those of whole blocks; nothing where there are none.
    pub(super) fn load(
        engine: &Engine,
        prefill: Prefill,
        rows: usize,
        device: &mut dyn Device,
    ) -> Result<Option<Self>> {
        let manifest = engine.manifest();
        match prefill {
            Prefill::Exact => return Ok(None),
            Prefill::Blocks => (),
            Prefill::CublasLt => library::enable(manifest, device)?,
        }
        let description = device.describe().clone();
        let many = load(engine, device, |kernels, loader| {
            Self::outline(kernels, prefill, &description, loader)
        })?;
        many.map(|many| many.with_buffers(&manifest.model, rows, device)).transpose()
    }

    /// Without memory.
    pub(super) fn outline(
        kernels: &engine::Kernels<'_>,
        prefill: Prefill,
        device: &Description,
        loader: &mut impl LoadKernel,
    ) -> Result<Option<Self>> {
        let multiplier = match prefill {
            Prefill::Exact => return Ok(None),
            Prefill::Blocks => Multiplier::Kernels(ByKernels::outline(kernels, loader)?),
            Prefill::CublasLt => Multiplier::Library(ByLibrary::outline(kernels, loader)?),
        };
        let by_library = prefill == Prefill::CublasLt;
        let operands = Operands::outline(kernels, by_library, device, loader)?;
        Ok(Some(Self { operands, multiplier }))
    }

    fn with_buffers(
        self,
        model: &ModelConfig,
        rows: usize,
        device: &mut dyn Device,
    ) -> Result<Self> {
        let operands = self.operands.with_buffers(model, rows, device)?;
        let multiplier = match self.multiplier {
            Multiplier::Kernels(kernels) => {
                Multiplier::Kernels(kernels.with_buffers(model, &operands, rows, device)?)
            }
            Multiplier::Library(library) => {
                Multiplier::Library(library.with_buffers(model, &operands, rows, device)?)
            }
        };
        Ok(Self { operands, multiplier })
    }

    pub(super) fn is_by_library(&self) -> bool {
        matches!(self.multiplier, Multiplier::Library(_))
    }

    /// Bytes that [`load`](Self::load) takes.
    pub(super) fn bytes(
        manifest: &Manifest,
        prefill: Prefill,
        rows: usize,
        device: &Description,
    ) -> usize {
        let (model, packed) = (&manifest.model, manifest.precision.weights);
        let format = product_format(packed, device);
        let multiplier = match prefill {
            Prefill::Exact => return 0,
            Prefill::Blocks => ByKernels::bytes(model, packed, rows),
            Prefill::CublasLt => ByLibrary::bytes(model, packed, format, rows),
        };
        Operands::bytes(model, packed, format, rows) + multiplier
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
        match &self.many.multiplier {
            Multiplier::Kernels(kernels) => kernels.multiply(self, ops, matrix, input, output),
            Multiplier::Library(library) => library.multiply(self, ops, matrix, input, output),
        }
    }
}

fn by_row<P: Pod>(ops: &mut PassOps<'_>, kernel: Kernel, params: P) {
    let shared_bytes = super::shape::OPERAND_SHARED_BYTES;
    ops.launch(kernel, num_rows(ops), super::shape::ROW_THREADS, shared_bytes, params);
}

fn num_rows(ops: &PassOps<'_>) -> u32 {
    ops.pass.num_rows as u32
}
