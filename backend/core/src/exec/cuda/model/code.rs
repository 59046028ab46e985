//! The kernels of one model, loaded from its engine.

use super::shape::{self, Tiling};
use crate::Result;
use crate::engine::{Engine, EngineReader, Kernels, code_section};
use crate::exec::cuda::device::{Device, Kernel};
use crate::model::ModelConfig;
use crate::model::decoder::{Decoder, Linear, MatrixKind};
use spec_kernels::{Epilogue, GEMM_ROWS, Variant};

/// A product compiled for each number of rows.
pub(super) type ByRows = [Kernel; GEMM_ROWS.len()];

/// The kernels of a pass.
#[derive(Clone, Copy, Debug)]
pub(super) struct Code {
    /// Token rows.
    pub(super) embed: Kernel,
    /// Queries, keys and values: with the rotation, or plain where `rope` follows.
    qkv: ByRows,
    /// Head norms and rotation, where the product does not rotate.
    pub(super) rope: Kernel,
    /// Attention, in narrow tiles.
    attention: Kernel,
    /// In wide ones.
    attention_wide: Kernel,
    /// Output of the attention.
    out: ByRows,
    gate_up: ByRows,
    down: ByRows,
    head: ByRows,
}

/// Where kernels come from.
pub(super) trait LoadKernel {
    /// Compute capability that they are launched on.
    fn capability(&self) -> (u32, u32);

    /// A variant that uses up to `shared_bytes`.
    fn load(&mut self, variant: &Variant, shared_bytes: u32) -> Result<Kernel>;
}

impl Code {
    /// Loads what a pass of the engine's model needs.
    pub(super) fn load(engine: &Engine, device: &mut dyn Device) -> Result<Self> {
        let reader = engine.reader()?;
        let mut loader = Loader::new(engine, &reader, device)?;
        let code = Self::of(&Kernels::of(engine.manifest()), &mut loader)?;
        reader.finish()?;
        Ok(code)
    }

    /// What a pass of a model needs.
    pub(super) fn of(kernels: &Kernels<'_>, loader: &mut impl LoadKernel) -> Result<Self> {
        let Kernels { model, precision } = *kernels;
        let shared_bytes = |tiling: Tiling| tiling.shared_bytes(precision.kv, model.head_dim);
        let [narrow, wide] = kernels.attention();
        // All layers are alike.
        let decoder = Decoder::of(&ModelConfig { num_layers: 1, ..model.clone() });
        let layer = &decoder.layers[0];
        Ok(Self {
            embed: loader.load(&kernels.embed(), 0)?,
            qkv: by_rows(loader, kernels, &layer.attention.qkv)?,
            rope: loader.load(&kernels.rope(), 0)?,
            attention: loader.load(&narrow, shared_bytes(Tiling::Narrow))?,
            attention_wide: loader.load(&wide, shared_bytes(Tiling::Wide))?,
            out: by_rows(loader, kernels, &layer.attention.out)?,
            gate_up: by_rows(loader, kernels, &layer.mlp.gate_up)?,
            down: by_rows(loader, kernels, &layer.mlp.down)?,
            head: by_rows(loader, kernels, decoder.head())?,
        })
    }

    /// The product with a matrix of this kind.
    pub(super) fn gemm(&self, kind: MatrixKind) -> &ByRows {
        match kind {
            MatrixKind::Qkv => &self.qkv,
            MatrixKind::Out => &self.out,
            MatrixKind::GateUp => &self.gate_up,
            MatrixKind::Down => &self.down,
            MatrixKind::Embed | MatrixKind::Head => &self.head,
            MatrixKind::Fc => {
                unreachable!("no engine for a GPU has one: `engine::code` refuses it")
            }
        }
    }

    /// Attention in tiles of this width.
    pub(super) fn attention(&self, tiling: Tiling) -> Kernel {
        match tiling {
            Tiling::Narrow => self.attention,
            Tiling::Wide => self.attention_wide,
        }
    }
}

/// The kernels around products of many rows.
#[derive(Clone, Copy, Debug)]
pub(super) struct ManyCode {
    /// Packed matrices row by row.
    pub(super) unpack: Kernel,
    pub(super) normalise: Kernel,
    /// From the attention to the product, where the weights are FP8.
    pub(super) quantise: Option<Kernel>,
    /// Adds to the residual stream.
    pub(super) residual: Kernel,
    /// silu(gate) * up.
    pub(super) swiglu: Kernel,
}

impl ManyCode {
    pub(super) fn load(engine: &Engine, device: &mut dyn Device) -> Result<Self> {
        let reader = engine.reader()?;
        let mut loader = Loader::new(engine, &reader, device)?;
        let code = Self::of(&Kernels::of(engine.manifest()), &mut loader)?;
        reader.finish()?;
        Ok(code)
    }

    pub(super) fn of(kernels: &Kernels<'_>, loader: &mut impl LoadKernel) -> Result<Self> {
        let shared_bytes = shape::OPERAND_SHARED_BYTES;
        let quantise = kernels.quantise();
        Ok(Self {
            unpack: loader.load(&kernels.unpack(), 0)?,
            normalise: loader.load(&Variant::plain("normalise"), shared_bytes)?,
            quantise: quantise.map(|code| loader.load(&code, shared_bytes)).transpose()?,
            residual: loader.load(&Variant::finish(Epilogue::Residual), shared_bytes)?,
            swiglu: loader.load(&Variant::finish(Epilogue::SwiGlu), shared_bytes)?,
        })
    }
}

/// Loads code sections of one architecture.
pub(in crate::exec::cuda) struct Loader<'a> {
    reader: &'a EngineReader<'a>,
    arch: &'a str,
    device: &'a mut dyn Device,
}

impl<'a> Loader<'a> {
    /// Finds the architecture that suits the device.
    pub(in crate::exec::cuda) fn new(
        engine: &'a Engine,
        reader: &'a EngineReader<'a>,
        device: &'a mut dyn Device,
    ) -> Result<Self> {
        let description = device.describe();
        let (major, minor) = description.capability;
        let arch = engine.require_cuda(major, minor, description.driver)?;
        Ok(Self { reader, arch, device })
    }

    /// Loads a variant that uses up to `shared_bytes`.
    pub(in crate::exec::cuda) fn load(
        &mut self,
        variant: &Variant,
        shared_bytes: u32,
    ) -> Result<Kernel> {
        let code = self.reader.section(&code_section(self.arch, variant)).bytes()?;
        self.device.load(&variant.to_string(), variant.kernel, &code, shared_bytes)
    }
}

impl LoadKernel for Loader<'_> {
    fn capability(&self) -> (u32, u32) {
        self.device.describe().capability
    }

    fn load(&mut self, variant: &Variant, shared_bytes: u32) -> Result<Kernel> {
        Loader::load(self, variant, shared_bytes)
    }
}

/// The product with a matrix, for each number of rows.
fn by_rows(loader: &mut impl LoadKernel, kernels: &Kernels<'_>, linear: &Linear) -> Result<ByRows> {
    let mut loaded = [Kernel(0); GEMM_ROWS.len()];
    for (kernel, rows) in loaded.iter_mut().zip(GEMM_ROWS) {
        let shared_bytes = shape::gemm_shared_bytes(rows, loader.capability());
        *kernel = loader.load(&kernels.gemm(linear, rows), shared_bytes)?;
    }
    Ok(loaded)
}
