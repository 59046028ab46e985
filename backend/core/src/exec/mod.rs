//! The executors: where steps run.

pub mod cpu;
mod host;

pub use host::Host;
