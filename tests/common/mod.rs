//! What the tests on whole models share: where models and recorded outputs are, engines that are built
//! once and kept under `target/`, tiny models that need no download, and running requests to their end.
// Every test program uses a part of it.
#![allow(dead_code)]

pub(crate) mod cache;
pub(crate) mod data;
pub(crate) mod golden;
pub(crate) mod models;
pub(crate) mod running;
pub(crate) mod small;
pub(crate) mod tiny;

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Held by a test while it runs a real model on all processors: several at once would only take them from each other.
pub(crate) fn turn() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}
