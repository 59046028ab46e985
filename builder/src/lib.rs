//! Checkpoint in, engine out.
pub mod checkpoint;
pub mod export;
