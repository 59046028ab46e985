//! The engine file: what is in it, and its bytes.

mod manifest;

pub use manifest::{
    CostTable, Device, DrafterKind, Limits, Manifest, Peer, Precision, Role, Section, SectionKind,
};
