//! What a row of a request says, before it is put together: every option as given, or not.

use super::{Contract, Echo, MAX_TOKENS, Profile, Report, Row, VLLM_MAX_TOKENS, VLLM_TEMPERATURE};
use crate::triton::{Error, Result};
use spec_core::runtime::Request;
use spec_core::sampling::SamplingParams;
use spec_core::tokenizer::{ChatPrompt, Conversation, Tokenizer, check_stops};

/// Most bytes of a prompt for each position of the engine: few tokens are longer.
const MAX_TOKEN_BYTES: usize = 128;
/// Most single tokens that end a text.
const MAX_STOP_TOKENS: usize = 1024;

/// The options of a row.
#[derive(Clone, Debug, Default)]
pub(super) struct Form {
    pub(super) text: Option<String>,
    pub(super) messages: Option<String>,
    pub(super) ids: Option<Vec<u32>>,
    pub(super) input_len: Option<usize>,
    pub(super) max_tokens: Option<usize>,
    pub(super) min_tokens: usize,
    pub(super) min_length: usize,
    pub(super) stops: Vec<String>,
    pub(super) stop_tokens: Vec<u32>,
    pub(super) stop_sequences: Vec<Vec<u32>>,
    pub(super) given_draft: Vec<u32>,
    pub(super) bad_words: Vec<String>,
    pub(super) bad_sequences: Vec<Vec<u32>>,
    pub(super) bias_words: Vec<String>,
    pub(super) bias_weights: Vec<f32>,
    pub(super) logit_bias: Vec<(u32, f32)>,
    pub(super) bias_len: Option<usize>,
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
    pub(super) draft_len: Option<usize>,
    pub(super) pad_id: Option<i32>,
    pub(super) num_sequences: Option<usize>,
    pub(super) best_of: Option<usize>,
    pub(super) includes_stop: bool,
    pub(super) shows_special: bool,
    pub(super) hides_text: bool,
    pub(super) report: Report,
    pub(super) streams: bool,
    pub(super) stop: bool,
}

impl Form {
    /// Puts the row together. Everything that the runtime will ask of it is checked here.
    pub(super) fn into_row(self, contract: &Contract, tokenizer: &Tokenizer) -> Result<Row> {
        let excludes = self.excludes_prompt(contract)?;
        let (prompt, text) = self.prompt(contract, tokenizer)?;
        let (prompt_len, logprobs) = (prompt.len(), self.alternatives());
        check_stops(&self.stops).map_err(|error| contract.error(error))?;
        self.check_tokens(contract)?;
        self.check_prompt_logprobs(prompt_len)?;
        let (rules, min_tokens) = (self.text_rules(contract)?, self.num_held_back());
        let request = Request {
            max_tokens: self.max_tokens(contract, prompt_len)?,
            draft_len: self.draft_len(contract)?,
            sampling: self.sampling(contract, tokenizer)?,
            ignore_eos: self.ignore_eos,
            stop_tokens: self.stop_tokens,
            priority: 0,
            row: 0,
            num_rows: 1,
            cache_salt: String::new(),
            given_draft: self.given_draft,
            prompt,
        };
        let echo = match text {
            _ if excludes => Echo::None,
            Some(text) => Echo::Text(text),
            None => Echo::Ids(request.prompt.clone()),
        };
        Ok(Row {
            request,
            rules,
            stop_sequences: self.stop_sequences,
            min_tokens,
            echo,
            logprobs,
            prompt_len,
            pad_id: self.pad_id.unwrap_or(-1),
        })
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

    /// The prompt's tokens, and its text where it is a text.
    fn prompt(
        &self,
        contract: &Contract,
        tokenizer: &Tokenizer,
    ) -> Result<(Vec<u32>, Option<String>)> {
        let (ids, text) = match (&self.ids, &self.text, &self.messages) {
            (Some(ids), None, None) => (self.cut(ids)?, None),
            (None, Some(text), None) => {
                at_most_bytes("text_input", text, contract)?;
                let ids = tokenizer.encode_prompt(text).map_err(|error| contract.error(error))?;
                (ids, Some(text.clone()))
            }
            (None, None, Some(messages)) => {
                let prompt = render(messages, contract, tokenizer)?;
                let ids = tokenizer.encode_chat(&prompt).map_err(|error| contract.error(error))?;
                (ids, Some(prompt.text()))
            }
            (None, None, None) => return Err(Error::invalid_arg(contract.profile.no_prompt())),
            _ => return Err(Error::invalid_arg("text_input and messages are both given")),
        };
        let name =
            if self.messages.is_some() { "messages" } else { contract.profile.spell("prompt") };
        check_len(name, ids.len(), contract)?;
        Ok((ids, text))
    }

    /// The ids without what fills up their row.
    fn cut(&self, ids: &[u32]) -> Result<Vec<u32>> {
        let len = self.input_len.unwrap_or(ids.len());
        let cut = ids.get(..len).ok_or_else(|| {
            Error::invalid_arg(format!("input_lengths: {len}, input_ids has {} tokens", ids.len()))
        });
        cut.map(<[u32]>::to_vec)
    }

    /// As asked, if it fits; else what fits of the default.
    fn max_tokens(&self, contract: &Contract, prompt_len: usize) -> Result<usize> {
        let max_seq_len = contract.limits.max_seq_len;
        let room = max_seq_len - prompt_len;
        match self.max_tokens {
            Some(asked) if asked > room => Err(Error::invalid_arg(format!(
                "{}: {asked} after a prompt of {prompt_len} tokens is {}, max_seq_len is {max_seq_len}",
                contract.profile.spell("max_tokens"),
                asked.saturating_add(prompt_len),
            ))),
            Some(asked) => Ok(asked),
            None => {
                let of_profile =
                    if contract.profile == Profile::Vllm { VLLM_MAX_TOKENS } else { MAX_TOKENS };
                Ok(contract.settings.default_max_tokens.unwrap_or(of_profile).min(room))
            }
        }
    }

    /// Everything that is a list of tokens: ids and lengths.
    fn check_tokens(&self, contract: &Contract) -> Result<()> {
        let stop_sequences = self.stop_sequences.concat();
        let (max_draft_len, any) = (contract.limits.max_draft_len, usize::MAX);
        for (field, ids, max_len) in [
            ("prompt", self.ids.as_deref().unwrap_or_default(), any),
            ("given_draft", &self.given_draft, max_draft_len),
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

    fn sampling(&self, contract: &Contract, tokenizer: &Tokenizer) -> Result<SamplingParams> {
        let mut params = SamplingParams::default();
        let defaults = &contract.settings.sampling;
        defaults.apply(&mut params);
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
        params.temperature = match (self.temperature, defaults.temperature) {
            (Some(given), _) | (None, Some(given)) => given,
            (None, None) if contract.profile == Profile::Vllm => VLLM_TEMPERATURE,
            (None, None) if self.wants_draws() => 1.0,
            (None, None) => params.temperature,
        };
        params.logit_bias = self.biases(tokenizer)?.into();
        params.bad_words = self.banned(contract, tokenizer)?.into();
        params.validate(contract.vocab_size).map_err(|error| contract.error(error))?;
        self.fan_out().check_draws(contract, &params)?;
        Ok(params)
    }

    /// How many of the likeliest tokens clients see with each token: chats count them apart.
    fn alternatives(&self) -> Option<usize> {
        self.logprobs.max(self.top_logprobs)
    }

    /// Options that mean something only where tokens are drawn.
    fn wants_draws(&self) -> bool {
        self.top_k.is_some_and(|k| k > 1)
            || self.top_p.is_some_and(|p| p < 1.0)
            || self.min_p.is_some_and(|p| p > 0.0)
    }

    fn banned(&self, contract: &Contract, tokenizer: &Tokenizer) -> Result<Vec<Vec<u32>>> {
        let words = self.bad_words.iter().filter(|word| !word.is_empty());
        let encoded: spec_core::Result<Vec<_>> =
            words.map(|word| tokenizer.encode(word, false)).collect();
        let mut banned = encoded.map_err(|error| contract.error(error))?;
        banned.extend(self.bad_sequences.iter().cloned());
        Ok(banned)
    }

    fn biases(&self, tokenizer: &Tokenizer) -> Result<Vec<(u32, f32)>> {
        let (words, weights) = (&self.bias_words, &self.bias_weights);
        if words.len() != weights.len() {
            return Err(Error::invalid_arg(format!(
                "embedding_bias_words has {} entries, embedding_bias_weights {}",
                words.len(),
                weights.len()
            )));
        }
        let mut biases = self.logit_bias.clone();
        for (word, &weight) in words.iter().zip(weights) {
            match tokenizer.encode(word, false).as_deref() {
                Ok(&[token]) => biases.push((token, weight)),
                Ok(tokens) => {
                    return Err(Error::invalid_arg(format!(
                        "embedding_bias_words: '{}' is {} tokens, only words of 1 can be biased",
                        excerpt(word),
                        tokens.len()
                    )));
                }
                Err(error) => {
                    return Err(Error::invalid_arg(format!("embedding_bias_words: {error}")));
                }
            }
        }
        Ok(biases)
    }
}

impl Report {
    fn any_log_probs(&self) -> bool {
        self.log_probs || self.cum_log_probs
    }
}

fn render(messages: &str, contract: &Contract, tokenizer: &Tokenizer) -> Result<ChatPrompt> {
    at_most_bytes("messages", messages, contract)?;
    let conversation = Conversation::parse(messages).map_err(|error| contract.error(error))?;
    if tokenizer.chat_template().is_none() {
        return Err(Error::unsupported("messages: the model has no chat template"));
    }
    let prompt = tokenizer.render_chat(&conversation).map_err(|error| contract.error(error))?;
    at_most_bytes("messages", &prompt.text(), contract)?;
    Ok(prompt)
}

fn check_ids(name: &str, ids: &[u32], vocab_size: usize) -> Result<()> {
    match ids.iter().find(|&&id| id as usize >= vocab_size) {
        Some(id) => Err(Error::invalid_arg(format!(
            "{name}: token {id} is outside the vocabulary of {vocab_size} tokens"
        ))),
        None => Ok(()),
    }
}

fn check_len(name: &str, len: usize, contract: &Contract) -> Result<()> {
    let max_seq_len = contract.limits.max_seq_len;
    if len == 0 {
        return Err(Error::invalid_arg(format!("{name}: 0 tokens, at least 1 is needed")));
    }
    if len >= max_seq_len {
        return Err(Error::invalid_arg(format!(
            "{name}: {len} tokens, max_seq_len is {max_seq_len} with at least 1 to generate"
        )));
    }
    Ok(())
}

/// A prompt of more bytes cannot fit, and is not worth splitting into tokens.
fn at_most_bytes(name: &str, text: &str, contract: &Contract) -> Result<()> {
    let (bytes, max_seq_len) = (text.len(), contract.limits.max_seq_len);
    let max_bytes = max_seq_len.saturating_mul(MAX_TOKEN_BYTES);
    if bytes <= max_bytes {
        return Ok(());
    }
    Err(Error::invalid_arg(format!(
        "{name}: {bytes} bytes, at most {max_bytes} are allowed for a max_seq_len of {max_seq_len}"
    )))
}

impl Profile {
    fn no_prompt(self) -> &'static str {
        match self {
            Self::Text => "neither text_input nor messages is given",
            Self::Token => "input_ids is not given",
            Self::Vllm => "text_input is not given",
        }
    }
}

/// The beginning of a client's text, for a message.
pub(super) fn excerpt(text: &str) -> String {
    text.chars().take(40).collect()
}
