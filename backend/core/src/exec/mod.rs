//! The executors: where steps run.

pub mod cpu;
pub mod cuda;
mod host;

pub use host::{Host, StepBounds};
