//! The CPU executor.

mod arena;
mod isa;
mod linear;
mod pool;

pub use arena::{Arena, ArenaSlice};
pub use isa::Isa;
pub use linear::{Prepared, Weight, linear, prepare};
pub use pool::Pool;
