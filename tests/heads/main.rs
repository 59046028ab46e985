//! Heads that draft from a target's hidden states: tiny random ones of `tests/data/heads`, against what their reference says.
#![allow(clippy::unwrap_used)]

mod at_once;
#[path = "../common/mod.rs"]
mod common;
mod eagle;
mod gpu;
mod medusa;
mod rounds;
mod support;
mod widened;
