//! The kernels of one model, loaded from its engine.

use super::device::{Device, Kernel};
use super::shape;
use crate::Result;
use crate::engine::{Engine, Manifest};
use crate::model::Dtype;
use spec_kernels::{Epilogue, Format, GEMM_ROWS, Variant};

/// A product compiled for each number of rows.
pub(super) type ByRows = [Kernel; GEMM_ROWS.len()];

/// The kernels of a pass.
#[derive(Clone, Copy, Debug)]
pub(super) struct Code {
    /// Token rows.
    pub embed: Kernel,
    /// Queries, keys and values: with the rotation, or plain where `rope` follows.
    pub qkv: ByRows,
    /// Head norms and rotation, for models that have head norms.
    pub rope: Option<Kernel>,
    /// Attention.
    pub attention: Kernel,
    /// Output of the attention, and down.
    pub residual: ByRows,
    /// Gate and up.
    pub gate_up: ByRows,
    /// The head.
    pub head: ByRows,
}

impl Code {
    /// Loads what a pass of the engine's model needs.
    pub(super) fn load(engine: &Engine, device: &mut dyn Device) -> Result<Self> {
        let mut loader = Loader::new(engine, device)?;
        let manifest = engine.manifest();
        let (model, precision) = (&manifest.model, &manifest.precision);
        let weights = format(precision.weights);
        let qkv = qkv_epilogue(manifest);
        let rope = Variant::rope(format(precision.kv), model.head_dim);
        let group = model.num_heads / model.num_kv_heads;
        Ok(Self {
            embed: loader.load(&Variant::embed(format(precision.head)), 0)?,
            qkv: loader.by_rows(weights, qkv)?,
            rope: model.qk_norm.then(|| loader.load(&rope, 0)).transpose()?,
            attention: loader.load(
                &Variant::attention(format(precision.kv), model.head_dim, group),
                shape::attention_shared_bytes(format(precision.kv), model.head_dim),
            )?,
            residual: loader.by_rows(weights, Epilogue::Residual)?,
            gate_up: loader.by_rows(weights, Epilogue::SwiGlu)?,
            head: loader.by_rows(format(precision.head), Epilogue::Head)?,
        })
    }
}

fn qkv_epilogue(manifest: &Manifest) -> Epilogue {
    match manifest.model.qk_norm {
        true => Epilogue::Raw,
        false => Epilogue::Qkv { head_dim: manifest.model.head_dim },
    }
}

/// A number format of a CUDA engine, which has only these.
pub(super) fn format(dtype: Dtype) -> Format {
    match dtype {
        Dtype::Fp8 => Format::Fp8,
        Dtype::Fp16 => Format::Fp16,
        other => unreachable!("a CUDA engine has no {}", other.name()),
    }
}

/// Loads code sections of one architecture.
pub(super) struct Loader<'a> {
    engine: &'a Engine,
    arch: &'a str,
    device: &'a mut dyn Device,
}

impl<'a> Loader<'a> {
    /// Finds the architecture that suits the device.
    pub(super) fn new(engine: &'a Engine, device: &'a mut dyn Device) -> Result<Self> {
        let description = device.describe();
        let arch = engine.cuda_arch(description.capability, description.driver)?;
        Ok(Self { engine, arch, device })
    }

    /// Loads a variant that uses up to `shared_bytes`.
    pub(super) fn load(&mut self, variant: &Variant, shared_bytes: u32) -> Result<Kernel> {
        let name = variant.to_string();
        let code = self.engine.section(&format!("code.{}.{name}", self.arch));
        self.device.load(&name, variant.kernel, code, shared_bytes)
    }

    fn by_rows(&mut self, weight: Format, epilogue: Epilogue) -> Result<ByRows> {
        let mut kernels = [Kernel(0); GEMM_ROWS.len()];
        for (kernel, rows) in kernels.iter_mut().zip(GEMM_ROWS) {
            let variant = Variant::gemm(weight, rows, epilogue);
            *kernel = self.load(&variant, shape::gemm_shared_bytes(rows))?;
        }
        Ok(kernels)
    }
}
