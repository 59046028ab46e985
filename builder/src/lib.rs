//! Checkpoint in, engine out.
pub mod checkpoint;
pub mod pair;
pub mod tokenizer;
