//! The CUDA executor: engines with compiled kernels, run on a GPU, or in the tests on an emulator of one.
//!
//! `device` is what it needs of a GPU, `driver` the real one. `model` makes the launches of a forward pass; `forward`
//! runs passes for the executor on the host, `step` whole speculative steps as one graph.

mod code;
pub mod device;
mod driver;
mod forward;
pub mod kv;
mod model;
pub mod params;
pub mod plain;
pub mod shape;
mod step;
mod step_buffers;
mod step_graph;
pub mod step_input;
pub mod step_params;
mod tables;
mod weights;
mod workspace;

pub use driver::{Driver, is_present};
pub use forward::{Gpu, OnHost};
pub use model::{Model, Pass};
pub use step::{DraftModel, OnGpu, Steps};
pub use weights::Weights;
pub use workspace::{Capacity, Workspace};
