//! The executors: where steps run. Outside of this crate nobody calls them: a [`Runtime`](crate::runtime::Runtime) does. Open
//! are the threads of the CPU and what they reach, how large keys and values become, what drafts without some layers are
//! worth, what passes launch on a GPU, for predictions, and where libraries of CUDA are looked for.

pub(crate) mod cpu;
pub(crate) mod cuda;
pub(crate) mod host;
pub(crate) mod vocab_map;

pub use cpu::roofline::{multiply_rates, product_seconds, read_bandwidth};
pub use cpu::{Agreement, Pool, SkipTrial, Written, kv_peaks};
pub use cuda::{HeadOutline, Outline, Planned, PlannedPass, SearchPath};
pub(crate) use host::{Host, StepBounds};
