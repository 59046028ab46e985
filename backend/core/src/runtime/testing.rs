//! What only tests ask of a runtime: other devices, another executor, and a turn for the worse.

use super::placement::OpenGpu;
use super::{Options, Runtime, SharedWeights};
use crate::Result;
use crate::batch::Executor;
use crate::engine::Engine;
use crate::sequence::SequenceId;

impl Runtime {
    /// As `load`, with GPUs that `open` gives for their numbers.
    pub fn load_on(target: &Engine, options: &Options, open: OpenGpu<'_>) -> Result<Self> {
        Self::load_with(target, options, open, &SharedWeights::default(), None)
    }

    /// Puts something around the executor: a recorder, or a fault.
    pub fn wrap_executor(
        mut self,
        wrap: impl FnOnce(Box<dyn Executor>) -> Box<dyn Executor>,
    ) -> Self {
        self.executor = wrap(self.executor);
        self
    }

    /// Takes a running sequence's pages away, as if they were wanted for others; it is computed again when its turn comes.
    pub fn preempt(&mut self, id: SequenceId) -> bool {
        self.scheduler.preempt(id)
    }
}
