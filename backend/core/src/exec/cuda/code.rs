//! The kernels of one model, loaded from its engine.

use super::device::{Device, Kernel};
use super::shape;
use super::step_params::SAMPLE_SHARED_BYTES;
use crate::Result;
use crate::engine::{Engine, Kernels, Matrix, code_section};
use spec_kernels::{GEMM_ROWS, Variant};

/// A product compiled for each number of rows.
pub(super) type ByRows = [Kernel; GEMM_ROWS.len()];

/// The kernels of a pass.
#[derive(Clone, Copy, Debug)]
pub(super) struct Code {
    /// Token rows.
    pub(super) embed: Kernel,
    /// Queries, keys and values: with the rotation, or plain where `rope` follows.
    pub(super) qkv: ByRows,
    /// Head norms and rotation, for models that have head norms.
    pub(super) rope: Option<Kernel>,
    /// Attention.
    pub(super) attention: Kernel,
    /// Output of the attention.
    pub(super) out: ByRows,
    /// Gate and up.
    pub(super) gate_up: ByRows,
    /// Down.
    pub(super) down: ByRows,
    /// The head.
    pub(super) head: ByRows,
}

impl Code {
    /// Loads what a pass of the engine's model needs.
    pub(super) fn load(engine: &Engine, device: &mut dyn Device) -> Result<Self> {
        let mut loader = Loader::new(engine, device)?;
        let (model, precision) = (&engine.manifest().model, &engine.manifest().precision);
        let kernels = Kernels { model, precision };
        let attention = shape::attention_shared_bytes(precision.kv, model.head_dim);
        Ok(Self {
            embed: loader.load(&kernels.embed(), 0)?,
            qkv: loader.by_rows(&kernels, Matrix::Qkv)?,
            rope: kernels.rope().map(|rope| loader.load(&rope, 0)).transpose()?,
            attention: loader.load(&kernels.attention(), attention)?,
            out: loader.by_rows(&kernels, Matrix::Out)?,
            gate_up: loader.by_rows(&kernels, Matrix::GateUp)?,
            down: loader.by_rows(&kernels, Matrix::Down)?,
            head: loader.by_rows(&kernels, Matrix::Head)?,
        })
    }
}

/// The kernels that turn passes into steps.
#[derive(Clone, Copy, Debug)]
pub(super) struct StepCode {
    /// Tables of a pass.
    pub(super) rows: Kernel,
    /// From logits to decisions.
    pub(super) sample: Kernel,
    /// From decisions to tokens.
    pub(super) accept: Kernel,
}

impl StepCode {
    /// Loads them.
    pub(super) fn load(engine: &Engine, device: &mut dyn Device) -> Result<Self> {
        let mut loader = Loader::new(engine, device)?;
        Ok(Self {
            rows: loader.load(&Variant::plain("rows"), 0)?,
            sample: loader.load(&Variant::plain("sample"), SAMPLE_SHARED_BYTES)?,
            accept: loader.load(&Variant::plain("accept"), 0)?,
        })
    }
}

/// Loads code sections of one architecture.
struct Loader<'a> {
    engine: &'a Engine,
    arch: &'a str,
    device: &'a mut dyn Device,
}

impl<'a> Loader<'a> {
    /// Finds the architecture that suits the device.
    fn new(engine: &'a Engine, device: &'a mut dyn Device) -> Result<Self> {
        let description = device.describe();
        let (major, minor) = description.capability;
        let arch = engine.require_cuda(major, minor, description.driver)?;
        Ok(Self { engine, arch, device })
    }

    /// Loads a variant that uses up to `shared_bytes`.
    fn load(&mut self, variant: &Variant, shared_bytes: u32) -> Result<Kernel> {
        let code = self.engine.section(&code_section(self.arch, variant));
        self.device.load(&variant.to_string(), variant.kernel, code, shared_bytes)
    }

    fn by_rows(&mut self, kernels: &Kernels<'_>, matrix: Matrix) -> Result<ByRows> {
        let mut loaded = [Kernel(0); GEMM_ROWS.len()];
        for (kernel, rows) in loaded.iter_mut().zip(GEMM_ROWS) {
            let shared_bytes = shape::gemm_shared_bytes(rows);
            *kernel = self.load(&kernels.gemm(matrix, rows), shared_bytes)?;
        }
        Ok(loaded)
    }
}
