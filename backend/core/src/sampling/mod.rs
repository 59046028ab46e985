//! From logits to tokens.

mod params;

pub use params::SamplingParams;

/// A probability distribution over tokens.
#[derive(Clone, Debug)]
pub struct Distribution;

/// Turns logits into tokens for one request.
#[derive(Clone, Debug)]
pub struct Sampler;
