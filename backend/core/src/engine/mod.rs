//! The engine file: what is in it, and its bytes.
//!
//! A file is written once by [`EngineWriter`] and renamed into place. [`Engine`] is what it says about itself, all
//! checked; [`EngineReader`] reads the sections, and refuses a file that somebody changed all the same.

mod check;
mod code;
mod format;
mod identity;
mod manifest;
mod opened;
mod reader;
mod sections;
mod temp;
#[cfg(test)]
mod tests;
mod writer;

pub(crate) use check::MAX_DRAFT_LEN;
pub use check::MAX_SUFFIX_TOKENS;
pub(crate) use code::Kernels;
pub use code::{code_section, needed_variants};
pub use manifest::{
    CostTable, Device, DrafterKind, Limits, Manifest, Peer, Precision, Role, Section, SectionKind,
};
pub use opened::Engine;
pub use reader::{EngineReader, SectionReader};
pub use sections::{SectionSpec, expected_sections, pass_share};
pub use writer::{EngineWriter, Sealed, SectionWriter, commit_pair};
