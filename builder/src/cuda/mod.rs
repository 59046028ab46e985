//! Kernels to machine code, on a machine with or without a GPU: finds NVRTC, compiles variants of the kernels for
//! the architectures of an engine, and keeps what was compiled.

mod cache;
mod compiler;
mod cubin;
mod nvrtc;

pub use cache::Cache;
pub use compiler::{Code, Compiler};
pub use cubin::{Cubin, Kernel};
pub use spec_core::exec::SearchPath;
