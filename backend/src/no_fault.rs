//! What stands in the place of `fault.rs` in a backend that is not built for tests: nothing ever breaks or is held.

use spec_core::runtime::Runtime;
use triton_backend::Result;

pub(crate) fn inject(_model: &str, runtime: Runtime) -> Result<Runtime> {
    Ok(runtime)
}

pub(crate) struct Gate;

impl Gate {
    pub(crate) fn new(_model: &str) -> Self {
        Self
    }

    pub(crate) fn lets_pass(&mut self) -> bool {
        true
    }
}

pub(crate) fn hold_load(_model: &str) {}
