//! Checkpoint in, engine out: everything behind the `spec-build` command.

pub mod checkpoint;
pub mod cli;
pub mod compile;
pub mod export;
pub mod folder;
pub mod generate;
pub mod pair;
pub mod pbtxt;
pub mod progress;
pub mod staging;
pub mod tokenizer;
