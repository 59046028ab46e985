//! The `spec-build` command as its users meet it: a child process, its exit status and what it prints.
// All of it is test code, helpers included.
#![allow(clippy::unwrap_used)]

mod bad_engine;
mod bad_input;
mod collect;
mod commands;
mod cuda;
mod draft;
mod killed;
mod profile;
mod support;
