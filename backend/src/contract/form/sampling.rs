//! The sampling options of a row, and the words in them as tokens.

use super::{Form, excerpt};
use crate::contract::{Contract, Profile, VLLM_TEMPERATURE};
use crate::parameters::TemperatureAlone;
use spec_core::sampling::SamplingParams;
use spec_core::tokenizer::Tokenizer;
use std::sync::Arc;
use triton_backend::{Error, Result};

/// Most bytes of words that are split, or looked for, for a request, those of equal lists counted once: a fraction of a second.
const MAX_BYTES: usize = 256 << 10;

/// The last list of words, and what was made of it.
type Last<T> = Option<(Arc<[String]>, Arc<T>)>;

/// One of a row's lists of words.
type List = fn(&Form) -> &Arc<[String]>;

/// Splits words into tokens, those of equal lists of a request once.
pub(in crate::contract) struct Words<'a> {
    tokenizer: &'a Tokenizer,
    banned: Last<[Vec<u32>]>,
    biased: Last<[u32]>,
}

impl<'a> Words<'a> {
    pub(in crate::contract) fn new(tokenizer: &'a Tokenizer) -> Self {
        Self { tokenizer, banned: None, biased: None }
    }

    /// Checks that the words of all rows are not too many to be split.
    pub(in crate::contract) fn check(forms: &[Form]) -> Result<()> {
        let lists: [List; 3] =
            [|form| &form.bad_words, |form| &form.stops, |form| &form.bias_words];
        let bytes: usize = lists.map(|list| bytes_of(forms, list)).iter().sum();
        if bytes > MAX_BYTES {
            return Err(Error::invalid_arg(format!(
                "bad_words, stop_words and embedding_bias_words: {bytes} bytes in all rows, at most {MAX_BYTES} are allowed"
            )));
        }
        Ok(())
    }

    pub(super) fn tokenizer(&self) -> &'a Tokenizer {
        self.tokenizer
    }

    /// The tokens of each word that is not empty.
    fn banned(&mut self, list: &Arc<[String]>) -> spec_core::Result<Arc<[Vec<u32>]>> {
        known(&mut self.banned, list, || {
            let words = list.iter().filter(|word| !word.is_empty());
            words.map(|word| self.tokenizer.encode(word, false)).collect()
        })
    }

    /// The one token of each word.
    fn biased(&mut self, list: &Arc<[String]>) -> Result<Arc<[u32]>> {
        known(&mut self.biased, list, || {
            list.iter().map(|word| one_token(word, self.tokenizer)).collect()
        })
    }
}

/// Bytes of the lists that differ from that of the row before.
fn bytes_of(forms: &[Form], list: List) -> usize {
    let before = std::iter::once(None).chain(forms.iter().map(|form| Some(list(form))));
    let new = forms.iter().map(list).zip(before).filter(|&(list, before)| Some(list) != before);
    new.flat_map(|(list, _)| list.iter()).map(String::len).sum()
}

/// What was made of the last list, if this is the same.
fn known<T: ?Sized, E>(
    last: &mut Last<T>,
    list: &Arc<[String]>,
    make: impl FnOnce() -> std::result::Result<Arc<T>, E>,
) -> std::result::Result<Arc<T>, E> {
    match last {
        Some((words, tokens)) if words == list => Ok(Arc::clone(tokens)),
        _ => {
            let tokens = make()?;
            *last = Some((Arc::clone(list), Arc::clone(&tokens)));
            Ok(tokens)
        }
    }
}

fn one_token(word: &str, tokenizer: &Tokenizer) -> Result<u32> {
    match tokenizer.encode(word, false).as_deref() {
        Ok(&[token]) => Ok(token),
        Ok(tokens) => Err(Error::invalid_arg(format!(
            "embedding_bias_words: '{}' is {} tokens, only words of 1 can be biased",
            excerpt(word),
            tokens.len()
        ))),
        Err(error) => Err(Error::invalid_arg(format!("embedding_bias_words: {error}"))),
    }
}

impl Form {
    pub(super) fn sampling(
        &self,
        contract: &Contract,
        words: &mut Words,
    ) -> Result<SamplingParams> {
        let mut params = self.numbers(contract);
        if !self.bias_words.is_empty() {
            let tokens = words.biased(&self.bias_words)?;
            let biased = tokens.iter().copied().zip(self.bias_weights.iter().copied());
            params.logit_bias = self.logit_bias.iter().copied().chain(biased).collect();
        }
        if !self.bad_words.is_empty() {
            let banned = words.banned(&self.bad_words).map_err(|error| contract.error(error))?;
            params.bad_words = match self.bad_sequences.is_empty() {
                true => banned,
                false => banned.iter().chain(&*self.bad_sequences).cloned().collect(),
            };
        }
        params.validate(contract.vocab_size).map_err(|error| contract.error(error))?;
        Ok(params)
    }

    /// All but what words say.
    pub(super) fn numbers(&self, contract: &Contract) -> SamplingParams {
        let mut params = SamplingParams::default();
        contract.settings.sampling.apply(&mut params);
        let write = |slot: &mut f32, given: Option<f32>| *slot = given.unwrap_or(*slot);
        write(&mut params.top_p, self.top_p);
        write(&mut params.min_p, self.min_p);
        write(&mut params.repetition_penalty, self.repetition_penalty);
        write(&mut params.presence_penalty, self.presence_penalty);
        write(&mut params.frequency_penalty, self.frequency_penalty);
        params.top_k = self.top_k.unwrap_or(params.top_k);
        params.seed = self.seed.or(params.seed);
        params.min_tokens = self.num_held_back();
        let weighs = self.report.any_log_probs() || self.fan_out().chooses();
        params.logprobs = self.alternatives().or(weighs.then_some(0));
        params.prompt_logprobs = self.prompt_logprobs;
        params.temperature = self.temperature(contract, &params);
        params.logit_bias = Arc::clone(&self.logit_bias);
        params.bad_words = Arc::clone(&self.bad_sequences);
        params.allowed_tokens = self.allowed_tokens.clone();
        params
    }

    fn temperature(&self, contract: &Contract, params: &SamplingParams) -> f32 {
        let defaults = &contract.settings.sampling;
        let is_alone = params.top_k == 0
            && self.top_p.or(defaults.top_p).is_none()
            && params.min_p == 0.0
            && contract.profile != Profile::Vllm;
        match (self.temperature, defaults.temperature) {
            _ if is_alone && contract.settings.temperature_alone == TemperatureAlone::Greedy => 0.0,
            (Some(given), _) | (None, Some(given)) => given,
            (None, None) if contract.profile == Profile::Vllm => VLLM_TEMPERATURE,
            (None, None) if self.wants_draws() => 1.0,
            (None, None) => params.temperature,
        }
    }

    /// How many of the likeliest tokens clients see with each token: chats count them apart.
    pub(super) fn alternatives(&self) -> Option<usize> {
        self.logprobs.max(self.top_logprobs)
    }

    /// Options that mean something only where tokens are drawn.
    fn wants_draws(&self) -> bool {
        self.top_k.is_some_and(|k| k > 1)
            || self.top_p.is_some_and(|p| p < 1.0)
            || self.min_p.is_some_and(|p| p > 0.0)
    }

    /// Checks that words and weights go together.
    pub(super) fn check_words(&self) -> Result<()> {
        let (words, weights) = (self.bias_words.len(), self.bias_weights.len());
        if words != weights {
            return Err(Error::invalid_arg(format!(
                "embedding_bias_words has {words} entries, embedding_bias_weights {weights}"
            )));
        }
        Ok(())
    }
}
