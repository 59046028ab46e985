//! What a request wants to be answered with: how many texts for a prompt, and what of the tokens is text.

use super::form::Form;
use super::{Contract, Profile, RowReply};
use spec_core::runtime::{Request, TextRules};
use spec_core::sampling::SamplingParams;
use std::sync::Arc;
use triton_backend::{Error, Result};

/// Most texts that one request generates, where it wants several for a prompt.
pub(super) const MAX_SEQUENCES: usize = 128;
/// Most log-probabilities of a prompt: its tokens, times one more than the alternatives to each.
pub(super) const MAX_PROMPT_LOGPROBS: usize = 1 << 18;

/// How many texts a prompt gets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FanOut {
    /// So many are generated, each with a seed of its own.
    pub drawn: usize,
    /// So many are answered: the likeliest, where they are fewer.
    pub returned: usize,
}

impl Default for FanOut {
    fn default() -> Self {
        Self { drawn: 1, returned: 1 }
    }
}

impl FanOut {
    /// Whether the client gets the likeliest texts alone.
    pub(super) fn chooses(self) -> bool {
        self.returned < self.drawn
    }

    /// A request for each text, of which the first alone asks about the prompt.
    pub fn requests(self, request: Request) -> Vec<Request> {
        let mut requests = vec![request; self.drawn];
        for (idx, request) in requests.iter_mut().enumerate().skip(1) {
            let sampling = &mut request.sampling;
            sampling.seed = sampling.seed.map(|seed| seed.wrapping_add(idx as u64));
            sampling.prompt_logprobs = None;
        }
        requests
    }

    /// What is answered of all texts of a row.
    pub fn choose(self, mut replies: Vec<RowReply>) -> Vec<RowReply> {
        if self.chooses() {
            replies.sort_by(|a, b| b.cum_log_prob.total_cmp(&a.cum_log_prob));
            replies.truncate(self.returned);
            replies.iter_mut().enumerate().for_each(|(idx, reply)| reply.sequence_idx = idx);
        }
        replies
    }

    /// Checks what can be said before prompts are looked at.
    pub(super) fn check(self, contract: &Contract, num_rows: usize, streams: bool) -> Result<()> {
        let Self { drawn, returned } = self;
        if drawn < returned {
            return Err(Error::invalid_arg(format!(
                "best_of: {drawn} is less than the {returned} of n"
            )));
        }
        if self.chooses() && streams {
            return Err(Error::invalid_arg(format!(
                "best_of: {drawn} must be the {returned} of n where the output is streamed"
            )));
        }
        let total = num_rows.saturating_mul(drawn);
        if drawn > 1 && total > MAX_SEQUENCES {
            return Err(Error::invalid_arg(format!(
                "{}: {drawn} for each of {num_rows} prompts, at most {MAX_SEQUENCES} in all are allowed",
                self.spell(contract)
            )));
        }
        Ok(())
    }

    /// vLLM's rule: without draws all texts would be the same.
    pub(super) fn check_draws(self, contract: &Contract, sampling: &SamplingParams) -> Result<()> {
        if contract.profile == Profile::Vllm && self.drawn > 1 && sampling.is_greedy() {
            return Err(Error::invalid_arg(format!(
                "{}: {} must be 1 where temperature is 0",
                self.spell(contract),
                self.drawn
            )));
        }
        Ok(())
    }

    fn spell(self, contract: &Contract) -> &'static str {
        if self.chooses() { "best_of" } else { contract.profile.spell("num_sequences") }
    }
}

impl Form {
    pub(super) fn fan_out(&self) -> FanOut {
        let returned = self.num_sequences.unwrap_or(1);
        FanOut { returned, drawn: self.best_of.unwrap_or(returned) }
    }

    /// What of the tokens is text, if any of it is wanted.
    pub(super) fn text_rules(&self, contract: &Contract) -> Result<Option<TextRules>> {
        let stops = self.stops.iter().filter(|stop| !stop.is_empty());
        if contract.profile == Profile::Token {
            return Ok(None);
        }
        if self.hides_text {
            return match stops.count() {
                0 => Ok(None),
                count => Err(Error::invalid_arg(format!(
                    "{}: {count} strings, but detokenize is false: they are looked for in the text",
                    contract.profile.spell("stop")
                ))),
            };
        }
        Ok(Some(TextRules {
            stops: match self.stops.iter().any(String::is_empty) {
                true => stops.cloned().collect(),
                false => Arc::clone(&self.stops),
            },
            includes_stop: self.includes_stop,
            skips_special: !self.shows_special,
            min_tokens: self.num_held_back(),
            // What answers a conversation begins.
            goes_on: self.messages.is_none(),
        }))
    }

    /// Tokens before which nothing but the length ends a text.
    pub(super) fn num_held_back(&self) -> usize {
        self.min_tokens.max(self.min_length)
    }

    /// Checks what is asked about the prompt.
    pub(super) fn check_prompt_logprobs(&self, prompt_len: usize) -> Result<()> {
        let Some(alternatives) = self.prompt_logprobs else { return Ok(()) };
        if self.streams {
            return Err(Error::invalid_arg(
                "prompt_logprobs: not available where the output is streamed",
            ));
        }
        let count = prompt_len.saturating_mul(alternatives.saturating_add(1));
        if count > MAX_PROMPT_LOGPROBS {
            return Err(Error::invalid_arg(format!(
                "prompt_logprobs: {alternatives} alternatives to each of {prompt_len} tokens are {count} log-probabilities with their own, at most {MAX_PROMPT_LOGPROBS} are allowed"
            )));
        }
        Ok(())
    }
}
