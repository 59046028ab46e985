//! What a row of a request says, before it is put together: every option as given, or not.

mod prompt;
mod sampling;

pub(super) use sampling::Words;

use super::{Contract, Echo, MAX_TOKENS, Profile, Report, Row, VLLM_MAX_TOKENS};
use crate::parameters::WhenTooLong;
use spec_core::runtime::{Request, max_given_len};
use spec_core::tokenizer::check_stops;
use std::sync::Arc;
use triton_backend::{Error, Result};

/// Most single tokens that end a text.
const MAX_STOP_TOKENS: usize = 1024;
/// Most bytes of a salt.
const MAX_SALT_BYTES: usize = 1024;

/// The options of a row. Rows share the lists that are given for all of them.
#[derive(Clone, Debug, Default)]
pub(super) struct Form {
    pub(super) text: Option<Arc<str>>,
    pub(super) messages: Option<Arc<str>>,
    pub(super) tools: Option<Arc<str>>,
    pub(super) template_variables: Option<Arc<str>>,
    /// As they came: what fills up a row behind `input_len` need not be tokens.
    pub(super) ids: Option<Arc<[i64]>>,
    pub(super) input_len: Option<usize>,
    pub(super) truncate_prompt: Option<PromptEnd>,
    pub(super) max_tokens: Option<usize>,
    pub(super) min_tokens: usize,
    pub(super) min_length: usize,
    pub(super) stops: Arc<[String]>,
    pub(super) end_id: Option<u32>,
    pub(super) stop_tokens: Arc<[u32]>,
    pub(super) stop_sequences: Arc<[Vec<u32>]>,
    pub(super) given_draft: Arc<[u32]>,
    pub(super) bad_words: Arc<[String]>,
    pub(super) bad_sequences: Arc<[Vec<u32>]>,
    pub(super) bias_words: Arc<[String]>,
    pub(super) bias_weights: Arc<[f32]>,
    pub(super) logit_bias: Arc<[(u32, f32)]>,
    pub(super) bias_len: Option<usize>,
    pub(super) allowed_tokens: Option<Arc<[u32]>>,
    pub(super) exclude_prompt: Option<bool>,
    pub(super) temperature: Option<f32>,
    pub(super) top_k: Option<usize>,
    pub(super) top_p: Option<f32>,
    pub(super) min_p: Option<f32>,
    pub(super) repetition_penalty: Option<f32>,
    pub(super) presence_penalty: Option<f32>,
    pub(super) frequency_penalty: Option<f32>,
    pub(super) seed: Option<u64>,
    pub(super) logprobs: Option<usize>,
    pub(super) prompt_logprobs: Option<usize>,
    pub(super) top_logprobs: Option<usize>,
    pub(super) ignore_eos: bool,
    /// The same, said by an `end_id` of -1.
    pub(super) has_no_end: bool,
    pub(super) draft_len: Option<usize>,
    pub(super) fixed_draft_len: bool,
    pub(super) cache_salt: Arc<str>,
    pub(super) pad_id: Option<i32>,
    pub(super) num_sequences: Option<usize>,
    pub(super) best_of: Option<usize>,
    pub(super) includes_stop: bool,
    pub(super) shows_special: bool,
    pub(super) hides_text: bool,
    pub(super) report: Report,
    pub(super) streams: bool,
}

/// How much of the end of a prompt is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PromptEnd {
    /// So many tokens.
    Tokens(usize),
    /// As many as leave room for one to be generated.
    Longest,
}

impl Form {
    /// Checks what can be checked without splitting a text into tokens, which may take long.
    pub(super) fn check(&self, contract: &Contract) -> Result<()> {
        self.excludes_prompt(contract)?;
        self.check_prompt(contract)?;
        check_stops(&self.stops).map_err(|error| contract.error(error))?;
        self.check_tokens(contract)?;
        self.text_rules(contract)?;
        self.draft_len(contract)?;
        at_most_bytes("cache_salt", &self.cache_salt, MAX_SALT_BYTES)?;
        self.check_words()?;
        let numbers = self.numbers(contract);
        self.fan_out().check_draws(contract, &numbers)?;
        numbers.validate(contract.vocab_size).map_err(|error| contract.error(error))
    }

    /// Puts the row together. Everything that the runtime will ask of it is checked here.
    pub(super) fn into_row(self, contract: &Contract, words: &mut Words) -> Result<Row> {
        let excludes = self.excludes_prompt(contract)?;
        let (prompt, text) = self.prompt(contract, words.tokenizer())?;
        let (prompt_len, logprobs) = (prompt.len(), self.alternatives());
        self.check_prompt_logprobs(prompt_len)?;
        let (rules, min_tokens) = (self.text_rules(contract)?, self.num_held_back());
        let request = Request {
            max_tokens: self.max_tokens(contract, prompt_len)?,
            draft_len: self.draft_len(contract)?,
            fixed_draft_len: self.fixed_draft_len,
            sampling: self.sampling(contract, words)?,
            ignore_eos: self.ignore_eos || self.has_no_end,
            stop_tokens: self.stop_tokens(contract),
            priority: 0,
            row: 0,
            num_rows: 1,
            cache_salt: self.cache_salt.to_string(),
            given_draft: self.given_draft.to_vec(),
            prompt: prompt.into(),
        };
        let echo = match text {
            _ if excludes => Echo::None,
            Some(text) => Echo::Text(text),
            None => Echo::Ids(request.prompt.clone()),
        };
        Ok(Row {
            request,
            rules,
            stop_sequences: Arc::clone(&self.stop_sequences),
            min_tokens,
            echo,
            logprobs,
            prompt_len,
            pad_id: self.pad_id.unwrap_or(-1),
        })
    }

    /// Tokens that end the text. One that the vocabulary does not have can never come, and ends nothing: clients of
    /// other models send theirs.
    fn stop_tokens(&self, contract: &Contract) -> Vec<u32> {
        let end_id = self.end_id.filter(|&id| (id as usize) < contract.vocab_size);
        self.stop_tokens.iter().copied().chain(end_id).collect()
    }

    /// Whether the output leaves out the prompt. vLLM's rule is its own.
    fn excludes_prompt(&self, contract: &Contract) -> Result<bool> {
        match (contract.profile, self.exclude_prompt) {
            (Profile::Vllm, Some(false)) if self.streams => Err(Error::invalid_arg(
                "When streaming, `exclude_input_in_output` = False is not allowed.",
            )),
            (Profile::Vllm, given) => Ok(given.unwrap_or(self.streams)),
            // TensorRT-LLM never streams the prompt, whatever is asked.
            _ if self.streams => Ok(true),
            (profile, given) => {
                let given = given.or(contract.settings.exclude_prompt);
                Ok(given.unwrap_or(profile == Profile::Text))
            }
        }
    }

    /// What fits of what is asked for, or of the default.
    fn max_tokens(&self, contract: &Contract, prompt_len: usize) -> Result<usize> {
        let max_seq_len = contract.limits.max_seq_len;
        let room = max_seq_len - prompt_len;
        match self.max_tokens {
            Some(asked)
                if asked > room && contract.settings.when_too_long == WhenTooLong::Refuse =>
            {
                Err(Error::invalid_arg(format!(
                    "{}: {asked} after a prompt of {prompt_len} tokens is {}, max_seq_len is {max_seq_len}",
                    contract.profile.spell("max_tokens"),
                    asked.saturating_add(prompt_len),
                )))
            }
            Some(asked) => Ok(asked.min(room)),
            None => {
                let of_profile =
                    if contract.profile == Profile::Vllm { VLLM_MAX_TOKENS } else { MAX_TOKENS };
                Ok(contract.settings.default_max_tokens.unwrap_or(of_profile).min(room))
            }
        }
    }

    /// Everything that is a list of tokens: ids and lengths.
    fn check_tokens(&self, contract: &Contract) -> Result<()> {
        let (prompt, stop_sequences) = (self.prompt_ids()?, self.stop_sequences.concat());
        let (max_given_len, any) = (max_given_len(contract.limits.max_draft_len), usize::MAX);
        for (field, ids, max_len) in [
            ("prompt", &prompt[..], any),
            ("given_draft", &self.given_draft, max_given_len),
            ("stop_tokens", &self.stop_tokens, MAX_STOP_TOKENS),
            ("stop_tokens", &stop_sequences, any),
        ] {
            let name = contract.profile.spell(field);
            check_ids(name, ids, contract.vocab_size)?;
            if ids.len() > max_len {
                return Err(Error::invalid_arg(format!(
                    "{name}: {} tokens, at most {max_len} are allowed",
                    ids.len()
                )));
            }
        }
        let vocab_size = contract.vocab_size;
        match self.bias_len {
            Some(len) if len != vocab_size => Err(Error::invalid_arg(format!(
                "{}: {len} values, the vocabulary has {vocab_size} tokens",
                contract.profile.spell("logit_bias")
            ))),
            _ => Ok(()),
        }
    }

    fn draft_len(&self, contract: &Contract) -> Result<Option<usize>> {
        let max_draft_len = contract.limits.max_draft_len;
        match self.draft_len.or(contract.settings.draft_len) {
            Some(len) if len > max_draft_len => Err(Error::invalid_arg(format!(
                "num_draft_tokens: {len} exceeds max_draft_len {max_draft_len}"
            ))),
            len => Ok(len),
        }
    }
}

impl Report {
    fn any_log_probs(&self) -> bool {
        self.log_probs || self.cum_log_probs
    }
}

fn check_ids(name: &str, ids: &[u32], vocab_size: usize) -> Result<()> {
    match ids.iter().find(|&&id| id as usize >= vocab_size) {
        Some(id) => Err(Error::invalid_arg(format!(
            "{name}: token {id} is outside the vocabulary of {vocab_size} tokens"
        ))),
        None => Ok(()),
    }
}

fn at_most_bytes(name: &str, text: &str, limit: usize) -> Result<()> {
    match text.len() {
        bytes if bytes <= limit => Ok(()),
        bytes => {
            Err(Error::invalid_arg(format!("{name}: {bytes} bytes, at most {limit} are allowed")))
        }
    }
}

/// The beginning of a client's text, for a message.
pub(super) fn excerpt(text: &str) -> String {
    text.chars().take(40).collect()
}
