//! From logits to tokens: what a request asks for, the distribution that makes of a row of logits, and how
//! a token is drawn from it.
//!
//! All of it is pure. A sampler's randomness is a function of its key, the absolute position and who draws.

pub(crate) mod context;
pub(crate) mod distribution;
mod exp;
pub(crate) mod logprob;
mod noise;
mod params;
mod race;
pub(crate) mod sampler;
mod select;
mod truncate;

pub(crate) use context::Context;
pub(crate) use distribution::Distribution;
pub(crate) use logprob::{likeliest, rank, report};
pub use params::SamplingParams;
pub(crate) use sampler::{Coupling, Sampler, Stream};
