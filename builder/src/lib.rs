//! Checkpoint in, engine out: everything behind the `spec-build` command.

pub mod calibrate;
pub mod check;
pub mod checkpoint;
pub mod cli;
pub mod collect;
pub mod compile;
mod copy;
pub mod cuda;
pub mod device;
pub mod draft;
pub mod draft_vocab;
pub mod export;
pub mod folder;
pub mod generate;
pub mod inspect;
pub mod pair;
pub mod pbtxt;
pub mod plan;
pub mod profile;
pub mod progress;
pub mod prompts;
pub mod roofline;
pub mod sizes;
pub mod skip;
pub mod staging;
pub mod table;
pub mod tokenizer;
