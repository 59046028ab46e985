//! The kernels that turn passes into steps, loaded from an engine.

use super::params::SAMPLE_SHARED_BYTES;
use crate::Result;
use crate::engine::Engine;
use crate::exec::cuda::device::{Device, Kernel};
use crate::exec::cuda::model::code::Loader;
use spec_kernels::Variant;

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
    pub(super) fn load(engine: &Engine, device: &mut dyn Device) -> Result<Self> {
        let reader = engine.reader()?;
        let mut loader = Loader::new(engine, &reader, device)?;
        let code = Self {
            rows: loader.load(&Variant::plain("rows"), 0)?,
            sample: loader.load(&Variant::plain("sample"), SAMPLE_SHARED_BYTES)?,
            accept: loader.load(&Variant::plain("accept"), 0)?,
        };
        reader.finish()?;
        Ok(code)
    }
}
