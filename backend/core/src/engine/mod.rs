//! The engine file: what is in it, and its bytes.
//!
//! A file is written once by [`EngineWriter`], renamed into place and never changed; [`Engine`] maps
//! it, checks everything but the weights' own hashes, and cannot fail after that.

mod check;
mod code;
mod format;
mod identity;
mod manifest;
mod reader;
mod sections;
mod temp;
#[cfg(test)]
mod tests;
mod writer;

pub use code::{Kernels, Matrix, code_section, needed_variants};
pub use manifest::{
    CostTable, Device, DrafterKind, Limits, Manifest, Peer, Precision, Role, Section, SectionKind,
};
pub use reader::Engine;
pub use sections::{SectionSpec, expected_sections};
pub use writer::{EngineWriter, Sealed, SectionWriter, commit_pair};
