//! Everything between an engine file and text, without Triton and without the builder.
//!
//! Imports go one way: a file uses what stands left of its bar, and files between the same two bars:
//! `error | engine, machine, model, tokenizer, sampling | sequence, pages, batch | draft_len, scheduler, draft, verify | exec | runtime`.

pub mod batch;
pub mod draft;
pub mod draft_len;
pub mod engine;
pub mod error;
pub mod exec;
pub mod machine;
pub mod model;
pub mod pages;
pub mod runtime;
pub mod sampling;
pub mod scheduler;
pub mod sequence;
pub mod tokenizer;
pub mod verify;

pub use error::{Error, Result};
