//! Checkpoint in, engine out.
pub mod checkpoint;
