//! The executors: where steps run.

pub mod cpu;
