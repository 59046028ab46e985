//! Runs the CUDA kernels on a CPU: right here means right up to timing and registers. Each CUDA thread
//! is a fiber; a seeded schedule decides what a GPU leaves open; errors of a kernel are messages.

mod arena;
mod compile;
mod device;
mod machine;
mod product;
mod program;
mod variants;

pub use arena::Arena;
pub use device::Emulator;
pub use machine::{Landing, Launch, Schedule, has_variant, launch, run, variant_for};
pub use program::{Mutation, Options, Program};
