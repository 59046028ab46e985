//! From logits to tokens: what a request asks for, the distribution that makes of a row of logits, and how
//! a token is drawn from it.
//!
//! All of it is pure. A sampler's randomness is a function of its key, the absolute position and who draws.

mod context;
mod distribution;
mod exp;
mod logprob;
mod noise;
mod params;
mod race;
mod sampler;
mod select;
mod truncate;

pub use context::Context;
pub use distribution::Distribution;
pub use logprob::{confidence, rank, report};
pub use params::SamplingParams;
pub use sampler::{Coupling, Sampler, Stream};
