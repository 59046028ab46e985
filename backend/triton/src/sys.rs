//! The C types and the function table, made by scripts/bindings.
#![allow(
    dead_code,
    missing_docs,
    missing_debug_implementations,
    non_camel_case_types,
    non_snake_case,
    unreachable_pub,
    unsafe_code,
    unsafe_op_in_unsafe_fn,
    unused_imports,
    clippy::all,
    clippy::undocumented_unsafe_blocks
)]

include!("bindings.rs");

/// Every function of the table.
pub(crate) const NAMES: &[&str] = include!(concat!(env!("OUT_DIR"), "/functions.rs"));
