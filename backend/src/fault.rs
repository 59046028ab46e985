//! Faults on demand, for tests of what becomes of requests and server: SPEC_FAULT=panic:N panics in the executor's
//! Nth step, error:N has it fail.

use crate::triton::{Error, Result};
use spec_core::batch::{Entry, Executor, Outcome, Timing};
use spec_core::runtime::Runtime;
use spec_core::sequence::SequenceId;

/// An executor that breaks once.
struct Faulty {
    inner: Box<dyn Executor>,
    panics: bool,
    /// Steps until then.
    steps_left: u64,
}

impl Executor for Faulty {
    fn step(&mut self, entries: &[Entry<'_>]) -> spec_core::Result<Vec<Outcome>> {
        self.steps_left = self.steps_left.wrapping_sub(1);
        match (self.steps_left, self.panics) {
            (0, true) => panic!("injected by SPEC_FAULT"),
            (0, false) => Err(spec_core::Error::Device("injected by SPEC_FAULT".into())),
            _ => self.inner.step(entries),
        }
    }

    fn forget(&mut self, id: SequenceId) {
        self.inner.forget(id);
    }

    fn reach(&self) -> usize {
        self.inner.reach()
    }

    fn timing(&self) -> Timing {
        self.inner.timing()
    }
}

/// Breaks a runtime as the environment says.
pub(crate) fn inject(runtime: Runtime) -> Result<Runtime> {
    let Ok(fault) = std::env::var("SPEC_FAULT") else { return Ok(runtime) };
    let parsed = match fault.split_once(':') {
        Some(("panic", step)) => step.parse().ok().map(|step| (true, step)),
        Some(("error", step)) => step.parse().ok().map(|step| (false, step)),
        _ => None,
    };
    let Some((panics, steps_left)) = parsed else {
        let message = format!("SPEC_FAULT is '{fault}', panic:STEP or error:STEP are known");
        return Err(Error::invalid_arg(message));
    };
    Ok(runtime.wrap_executor(|inner| Box::new(Faulty { inner, panics, steps_left })))
}
