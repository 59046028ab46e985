//! The executor for NVIDIA GPUs: what its kernels are told and what they answer.

pub mod plain;
pub mod step_input;
pub mod step_params;
