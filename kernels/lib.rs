//! The CUDA sources of the project as text, and one hash over them.
//!
//! `spec-build` compiles them; an engine records [`HASH`], so that an engine and a server which
//! disagree about the kernels say so.

mod variant;

mod sources {
    #![allow(missing_docs, unreachable_pub)]
    include!(concat!(env!("OUT_DIR"), "/sources.rs"));
}

/// Every kernel source as (file name, text), sorted by name.
pub use sources::SOURCES;

/// A short hash over the names and texts of all sources.
pub use sources::HASH;

pub use variant::{ARCHS, Epilogue, Format, GEMM_ROWS, MAX_GROUP, Variant};
