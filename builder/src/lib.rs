//! Checkpoint in, engine out.

pub mod checkpoint;
pub mod export;
pub mod pair;
pub mod tokenizer;
