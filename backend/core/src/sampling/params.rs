//! What a request asks of sampling, checked once when it is admitted.

/// The sampling surface of a request.
#[derive(Clone, Debug, PartialEq)]
pub struct SamplingParams {
    /// 0 is greedy.
    pub temperature: f32,
    /// Keep the k most likely tokens; 0 keeps all.
    pub top_k: usize,
    /// Keep the smallest set of most likely tokens whose probability reaches this; 1 keeps all.
    pub top_p: f32,
    /// Keep tokens at least this fraction as likely as the likeliest; 0 keeps all.
    pub min_p: f32,
    /// Divides positive and multiplies negative logits of tokens seen in prompt or output; 1 is off.
    pub repetition_penalty: f32,
    /// Subtracted from the logits of tokens seen in the output; 0 is off.
    pub presence_penalty: f32,
    /// Subtracted per occurrence in the output; 0 is off.
    pub frequency_penalty: f32,
    /// Added to the logits of these tokens.
    pub logit_bias: Vec<(u32, f32)>,
    /// Token sequences that must not be completed.
    pub bad_words: Vec<Vec<u32>>,
    /// The end tokens cannot be drawn before this many tokens were generated.
    pub min_tokens: usize,
    /// With a seed the text is a function of target, prompt, parameters and seed alone.
    pub seed: Option<u64>,
    /// Report the log-probability of each token, and this many of the likeliest.
    pub logprobs: Option<usize>,
}

impl Default for SamplingParams {
    fn default() -> Self {
        Self {
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            logit_bias: Vec::new(),
            bad_words: Vec::new(),
            min_tokens: 0,
            seed: None,
            logprobs: None,
        }
    }
}
