//! The executor for NVIDIA GPUs.

pub mod kv;
