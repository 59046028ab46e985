//! The executor for NVIDIA GPUs: what its kernels are told, what they answer, and the room they need.

pub mod kv;
pub mod plain;
pub mod step_input;
pub mod step_params;
