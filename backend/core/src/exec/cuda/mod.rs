//! The CUDA executor: engines with compiled kernels, run on a GPU, or in the tests on an emulator of one.
//!
//! `device` is what it needs of a GPU, and the real one behind it. `model` is one model there: its weights, its cache and
//! the launches of its forward passes. `step` is whole speculative steps, each one graph.
//! Imports go one way: `device | model | step`.

pub(crate) mod device;
pub(crate) mod model;
pub(crate) mod step;

pub use device::{Driver, Gpu, SearchPath, is_present};
pub(crate) use model::{BLOCK_LEN, Held, Uploaded, Weights, multiplies_blocks};
pub use model::{
    Eagle, HeadOnHost, HeadOutline, Medusa, MedusaOnHost, Model, OnHost, Outline, Pass, Planned,
    PlannedPass, Prefill,
};
pub(crate) use step::{
    DraftModel, GraphDrafter, HeadDrafter, MedusaDrafter, OnGpu, PartOfTarget, Steps, branch_pages,
    step_limits,
};
