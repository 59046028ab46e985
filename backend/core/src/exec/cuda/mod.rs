//! The CUDA executor: engines with compiled kernels, run on a GPU, or in the tests on an emulator of one.
//!
//! `device` is what it needs of a GPU, `driver` the real one. `pass` makes the launches of a forward pass, `many` those of
//! one whose products a library computes; `forward` runs passes for the executor on the host, `step` whole speculative
//! steps as one graph.

mod arrays;
mod code;
mod cublas;
mod cublas_calls;
mod cublas_descriptors;
pub mod device;
mod driver;
mod driver_calls;
mod driver_describe;
mod flight;
mod forward;
pub mod kv;
mod library;
mod many;
pub mod many_params;
mod model;
mod page_table;
pub mod params;
mod pass;
mod places;
pub mod plain;
pub mod shape;
mod staging;
mod step;
mod step_answers;
mod step_buffers;
mod step_graph;
pub mod step_input;
mod step_issue;
pub mod step_params;
mod step_part;
mod step_upload;
mod tables;
mod weights;
mod workspace;

pub use driver::Driver;
pub use driver_calls::is_present;
pub use forward::{Gpu, OnHost};
pub use many::ManyRows;
pub use model::{Model, Pass};
pub use places::Places;
pub use step::{DraftModel, OnGpu, Steps};
pub use weights::{Uploaded, Weights};
pub use workspace::{Capacity, Workspace};
