//! Everything between an engine file and text, without Triton and without the builder.
//!
//! Imports go one way, left to right:
//! `error | engine, model, tokenizer | sequence, pages, batch | adapt, scheduler, sampling, draft, verify | exec | runtime`.

pub mod adapt;
pub mod batch;
pub mod draft;
pub mod engine;
pub mod error;
pub mod exec;
pub mod model;
pub mod pages;
pub mod runtime;
pub mod sampling;
pub mod scheduler;
pub mod sequence;
pub mod tokenizer;
pub mod verify;

pub use error::{Error, Result};
