//! Everything between an engine file and text, without Triton and without the builder.
//!
//! To generate text: a [`ModelFolder`](runtime::ModelFolder) is what `spec-build` has written, a
//! [`Runtime`](runtime::Runtime) loads its engines and runs [`Request`](runtime::Request)s step by step, and a
//! [`TextStream`](runtime::TextStream) makes text of the tokens that each brings. `examples/generate.rs` is all of it in 30
//! lines. Prompts come from the folder's [`Tokenizer`](tokenizer::Tokenizer), chats too, and how tokens are drawn is said by
//! [`SamplingParams`](sampling::SamplingParams).
//!
//! To write engines: [`decoder::walk`](model::decoder::walk) names the parts of a model in order, [`model::panel`] and
//! [`model::image`] know how matrices lie for CPUs and for GPUs, and an [`EngineWriter`](engine::EngineWriter) takes them;
//! an [`Engine`](engine::Engine) is such a file, opened and checked.

// Imports go one way: a file uses what stands left of its bar, and files between the same two bars:
// `error | engine, machine, model, tokenizer, sampling | sequence, pages, draft_source, batch | draft_len, scheduler, draft, verify | exec | runtime`.

#![cfg_attr(
    not(feature = "testing"),
    allow(
        dead_code,
        unreachable_pub,
        unused_imports,
        reason = "what only `testing` opens; lints run with it"
    )
)]

mod batch;
mod draft;
mod draft_len;
mod draft_source;
pub mod engine;
mod error;
pub mod exec;
pub mod machine;
pub mod model;
mod pages;
pub mod runtime;
pub mod sampling;
mod scheduler;
mod sequence;
#[cfg(feature = "testing")]
pub mod testing;
pub mod tokenizer;
mod verify;

pub use error::{Error, Result};
