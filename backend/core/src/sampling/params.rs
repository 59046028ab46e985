//! What a request asks of sampling, checked once when it is admitted.

use crate::{Error, Result};
use std::sync::Arc;

/// Highest temperature; above it every distribution is flat for practical purposes.
const MAX_TEMPERATURE: f32 = 100.0;
const MAX_REPETITION_PENALTY: f32 = 100.0;
/// Largest presence or frequency penalty, either way.
const MAX_PENALTY: f32 = 2.0;
/// Largest magnitude of a logit bias: far beyond any logit, far from overflow.
const MAX_BIAS: f32 = 1e6;
/// Most entries of `logit_bias`.
const MAX_BIASED: usize = 4096;
const MAX_BAD_WORDS: usize = 1024;
/// Most tokens of one entry of `bad_words`.
const MAX_BAD_WORD_LEN: usize = 64;
/// Most alternatives reported with each token.
const MAX_LOGPROBS: usize = 20;

/// The sampling surface of a request. Requests that say the same share their lists.
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
    /// Added to the logits of these tokens; entries for the same token add up.
    pub logit_bias: Arc<[(u32, f32)]>,
    /// Token sequences that must not be completed, wherever in prompt or output they begin.
    pub bad_words: Arc<[Vec<u32>]>,
    /// The only tokens that may be drawn, ascending and each once.
    pub allowed_tokens: Option<Arc<[u32]>>,
    /// Tokens that end the text cannot be drawn before this many were generated.
    pub min_tokens: usize,
    /// With a seed the text is a function of target, prompt, parameters and seed alone.
    pub seed: Option<u64>,
    /// Report the log-probability of each token, and this many of the likeliest.
    pub logprobs: Option<usize>,
    /// Report those of the prompt's tokens too, but for the first one, and this many of the likeliest.
    pub prompt_logprobs: Option<usize>,
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
            logit_bias: Arc::default(),
            bad_words: Arc::default(),
            allowed_tokens: None,
            min_tokens: 0,
            seed: None,
            logprobs: None,
            prompt_logprobs: None,
        }
    }
}

impl SamplingParams {
    /// Whether the likeliest token is always taken.
    pub fn is_greedy(&self) -> bool {
        self.temperature == 0.0
    }

    /// Whether tokens that occurred before are made less likely, or more.
    pub(crate) fn penalises(&self) -> bool {
        self.repetition_penalty != 1.0
            || self.presence_penalty != 0.0
            || self.frequency_penalty != 0.0
    }

    /// Checks every field against its limits, for a model of `vocab_size` tokens. The sampler relies on it.
    pub fn validate(&self, vocab_size: usize) -> Result<()> {
        in_range("temperature", self.temperature, 0.0, MAX_TEMPERATURE)?;
        above_zero("top_p", self.top_p, 1.0)?;
        in_range("min_p", self.min_p, 0.0, 1.0)?;
        above_zero("repetition_penalty", self.repetition_penalty, MAX_REPETITION_PENALTY)?;
        in_range("presence_penalty", self.presence_penalty, -MAX_PENALTY, MAX_PENALTY)?;
        in_range("frequency_penalty", self.frequency_penalty, -MAX_PENALTY, MAX_PENALTY)?;
        at_most("logit_bias", "entries", self.logit_bias.len(), MAX_BIASED)?;
        for &(token, bias) in &*self.logit_bias {
            in_vocabulary("logit_bias", token, vocab_size)?;
            in_range("logit_bias", bias, -MAX_BIAS, MAX_BIAS)?;
        }
        at_most("bad_words", "entries", self.bad_words.len(), MAX_BAD_WORDS)?;
        for word in &*self.bad_words {
            if word.is_empty() {
                return Err(Error::bad_request("bad_words", "an entry is empty"));
            }
            at_most("bad_words", "tokens in an entry", word.len(), MAX_BAD_WORD_LEN)?;
            word.iter().try_for_each(|&token| in_vocabulary("bad_words", token, vocab_size))?;
        }
        if let Some(allowed) = self.allowed_tokens.as_deref() {
            if !allowed.is_sorted_by(|a, b| a < b) || allowed.is_empty() {
                let message = "an empty list, or one that is not ascending";
                return Err(Error::bad_request("allowed_tokens", message));
            }
            allowed.iter().try_for_each(|&t| in_vocabulary("allowed_tokens", t, vocab_size))?;
        }
        at_most("logprobs", "alternatives", self.logprobs.unwrap_or(0), MAX_LOGPROBS)?;
        let of_prompt = self.prompt_logprobs.unwrap_or(0);
        at_most("prompt_logprobs", "alternatives", of_prompt, MAX_LOGPROBS)
    }
}

/// NaN is in no range.
fn in_range(field: &'static str, value: f32, low: f32, high: f32) -> Result<()> {
    if (low..=high).contains(&value) {
        return Ok(());
    }
    Err(Error::bad_request(field, format!("{value} is not in {low} to {high}")))
}

fn above_zero(field: &'static str, value: f32, high: f32) -> Result<()> {
    if value > 0.0 && value <= high {
        return Ok(());
    }
    Err(Error::bad_request(field, format!("{value} is not above 0 and at most {high}")))
}

fn at_most(field: &'static str, what: &str, value: usize, limit: usize) -> Result<()> {
    if value <= limit {
        return Ok(());
    }
    Err(Error::bad_request(field, format!("{value} {what}, at most {limit} are allowed")))
}

fn in_vocabulary(field: &'static str, token: u32, vocab_size: usize) -> Result<()> {
    if (token as usize) < vocab_size {
        return Ok(());
    }
    Err(Error::bad_request(
        field,
        format!("token {token} is outside the vocabulary of {vocab_size} tokens"),
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    const VOCAB: usize = 100;

    fn with(change: impl Fn(&mut SamplingParams)) -> SamplingParams {
        let mut params = SamplingParams::default();
        change(&mut params);
        params
    }

    #[test]
    fn the_ends_of_every_range_are_allowed() {
        let allowed = [
            with(|_| ()),
            with(|p| p.temperature = 100.0),
            with(|p| p.top_k = usize::MAX),
            with(|p| p.top_p = f32::MIN_POSITIVE),
            with(|p| p.min_p = 1.0),
            with(|p| p.repetition_penalty = 0.01),
            with(|p| (p.presence_penalty, p.frequency_penalty) = (-2.0, 2.0)),
            with(|p| p.logit_bias = [(99, -1e6)].into()),
            with(|p| p.bad_words = [vec![1, 2], vec![99; 64]].into()),
            with(|p| p.allowed_tokens = Some([0, 99].into())),
            with(|p| (p.logprobs, p.prompt_logprobs) = (Some(20), Some(20))),
        ];
        for params in allowed {
            params.validate(VOCAB).unwrap();
        }
    }

    #[test]
    fn every_field_out_of_its_limits_is_refused_by_name() {
        let refused = [
            ("temperature", with(|p| p.temperature = f32::NAN)),
            ("temperature", with(|p| p.temperature = -0.1)),
            ("temperature", with(|p| p.temperature = f32::INFINITY)),
            ("top_p", with(|p| p.top_p = 0.0)),
            ("top_p", with(|p| p.top_p = 2.0)),
            ("top_p", with(|p| p.top_p = f32::NAN)),
            ("min_p", with(|p| p.min_p = -0.1)),
            ("min_p", with(|p| p.min_p = 1.1)),
            ("repetition_penalty", with(|p| p.repetition_penalty = 0.0)),
            ("repetition_penalty", with(|p| p.repetition_penalty = f32::INFINITY)),
            ("presence_penalty", with(|p| p.presence_penalty = 2.1)),
            ("frequency_penalty", with(|p| p.frequency_penalty = f32::NAN)),
            ("logit_bias", with(|p| p.logit_bias = vec![(100, 1.0)].into())),
            ("logit_bias", with(|p| p.logit_bias = vec![(0, f32::NEG_INFINITY)].into())),
            ("logit_bias", with(|p| p.logit_bias = vec![(0, 1.0); 4097].into())),
            ("bad_words", with(|p| p.bad_words = vec![vec![]].into())),
            ("bad_words", with(|p| p.bad_words = vec![vec![100]].into())),
            ("bad_words", with(|p| p.bad_words = vec![vec![1; 65]].into())),
            ("bad_words", with(|p| p.bad_words = vec![vec![1]; 1025].into())),
            ("allowed_tokens", with(|p| p.allowed_tokens = Some([].into()))),
            ("allowed_tokens", with(|p| p.allowed_tokens = Some([1, 1].into()))),
            ("allowed_tokens", with(|p| p.allowed_tokens = Some([1, 100].into()))),
            ("logprobs", with(|p| p.logprobs = Some(21))),
            ("prompt_logprobs", with(|p| p.prompt_logprobs = Some(21))),
        ];
        for (expected, params) in refused {
            match params.validate(VOCAB) {
                Err(Error::BadRequest { field, .. }) => assert_eq!(field, expected),
                other => panic!("{expected}: {other:?}"),
            }
        }
    }

    #[test]
    fn a_refusal_names_the_value_and_the_limits() {
        let message = with(|p| p.top_p = 2.0).validate(VOCAB).unwrap_err().to_string();
        assert_eq!(message, "top_p: 2 is not above 0 and at most 1");
    }
}
