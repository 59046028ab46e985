//! A request in the runtime.

/// Names a sequence for as long as the runtime lives.
pub type SequenceId = u64;
