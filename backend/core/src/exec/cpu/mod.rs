//! The CPU executor.

pub mod attention;
pub mod isa;
pub mod kv;
pub mod ops;

mod simd;
