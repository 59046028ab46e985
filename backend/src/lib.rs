//! `libtriton_spec.so`: serves the engines of `spec-build` from NVIDIA Triton.

pub mod contract;
pub mod parameters;
pub mod triton;
