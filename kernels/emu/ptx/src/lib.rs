//! Runs the assembly text that NVRTC makes of the kernels: what a GPU would be given, inline assembly and all, on a CPU.
//! It knows the instructions that this text has, after NVIDIA's PTX ISA, and refuses every other one with its line.

mod arithmetic;
mod cluster;
mod compare;
mod copy;
mod decode;
mod device;
mod memory;
mod number;
mod operation;
mod parse;
mod peers;
mod thread;
mod together;
mod warpgroup;

pub use cluster::{Launch, run};
pub use compare::compare;
pub use device::{Device, Kernels};
pub use memory::Memory;
pub use parse::Kernel;
