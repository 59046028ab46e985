//! A speculative step on the device, from logits to accepted tokens, against the executor of the host.
#![allow(clippy::unwrap_used)]

mod device;
mod exact;
mod host;
mod world;
