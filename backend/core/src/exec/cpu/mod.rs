//! The CPU executor: memory-bound work on few rows, one file a stage.

mod arena;
pub(crate) mod attention;
mod calibrate;
mod eagle;
mod float_mode;
mod isa;
pub(crate) mod kv;
mod layer;
mod linear;
mod mapping;
mod medusa;
mod model;
pub(crate) mod ops;
mod pool;
pub(crate) mod roofline;
mod scratch;
mod simd;
mod skip_trial;
mod tree;
mod weights;

pub use arena::Arena;
pub(crate) use arena::ArenaSlice;
pub use calibrate::kv_peaks;
pub use eagle::Eagle;
pub(crate) use float_mode::FloatMode;
pub use isa::Isa;
pub use linear::{Prepared, Weight, linear, prepare};
pub use medusa::Medusa;
pub use model::{Model, Resources};
pub use pool::{Pinned, Pinning, Pool};
pub use skip_trial::{Agreement, SkipTrial, Written};
pub use weights::Weights;
