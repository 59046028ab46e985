//! The CUDA executor: engines with compiled kernels, run on a GPU, or in the tests on an emulator of one.
//!
//! `device` is what it needs of a GPU, `driver` the real one. `model` makes the launches of a pass; `forward` runs
//! passes for the executor on the host.

mod code;
pub mod device;
mod driver;
mod forward;
mod model;
pub mod params;
pub mod shape;
mod tables;
mod weights;
mod workspace;

pub use driver::{Driver, is_present};
pub use forward::{Gpu, OnHost};
pub use model::{Model, Pass, page_bytes};
pub use weights::Weights;
pub use workspace::{Capacity, Workspace};
