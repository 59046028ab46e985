//! A speculative step on the device, from logits to accepted tokens, against the executor of the host.
#![allow(clippy::unwrap_used)]

#[path = "../../../../backend/core/tests/lossless/chi_square.rs"]
mod chi_square;
mod device;
mod exact;
#[allow(dead_code)] // the host's tests use all of it
#[path = "../../../../backend/core/tests/lossless/game.rs"]
mod game;
mod given;
mod host;
mod lossless;
mod mutation;
mod ptx;
mod world;
