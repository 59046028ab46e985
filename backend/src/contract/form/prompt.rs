//! The prompt of a row: text, a conversation or tokens, as tokens that fit the engine.

use super::{Form, PromptEnd};
use crate::contract::token::tokens;
use crate::contract::{Contract, Profile};
use spec_core::tokenizer::{ChatPrompt, Conversation, Tokenizer};
use triton_backend::{Error, Result};

/// Most bytes of a prompt for each position of the engine: few tokens are longer.
const MAX_TOKEN_BYTES: usize = 128;
/// Most tokens of a text of which only the end is read: so many for each that is kept, and more where few are. All of
/// them are found, since where a token begins may depend on everything before it.
const CUT_TOKENS: [usize; 2] = [4, 1 << 16];

impl Form {
    /// Checks that there is one prompt, and that it is not far too long.
    pub(super) fn check_prompt(&self, contract: &Contract) -> Result<()> {
        match (&self.ids, &self.text, &self.messages) {
            (Some(_), None, None) => self.prompt_ids().map(drop),
            (None, Some(text), None) => at_most_bytes("text_input", text.len(), contract),
            (None, None, Some(_)) => self.check_conversation(contract),
            (None, None, None) => Err(Error::invalid_arg(contract.profile.no_prompt())),
            _ => Err(Error::invalid_arg("text_input and messages are both given")),
        }?;
        match (&self.messages, &self.tools, &self.template_variables) {
            (None, Some(_), _) => Err(Error::invalid_arg("tools: given without messages")),
            (None, _, Some(_)) => {
                Err(Error::invalid_arg("chat_template_kwargs: given without messages"))
            }
            _ => Ok(()),
        }
    }

    /// Checks that what a conversation is made of is not far too long, all of it together.
    fn check_conversation(&self, contract: &Contract) -> Result<()> {
        let given = [
            ("messages", &self.messages),
            ("tools", &self.tools),
            ("chat_template_kwargs", &self.template_variables),
        ];
        let given = given.iter().filter_map(|(name, text)| Some((*name, text.as_ref()?.len())));
        let (names, bytes): (Vec<_>, Vec<_>) = given.unzip();
        at_most_bytes(&names.join(", "), bytes.iter().sum(), contract)
    }

    /// The prompt's tokens, and its text where it is a text.
    pub(super) fn prompt(
        &self,
        contract: &Contract,
        tokenizer: &Tokenizer,
    ) -> Result<(Vec<u32>, Option<String>)> {
        let name = match self.messages {
            Some(_) => "messages",
            None => contract.profile.spell("prompt"),
        };
        let (ids, text) = match (&self.ids, &self.text, &self.messages) {
            (Some(_), ..) => (self.prompt_ids()?, None),
            (_, Some(text), _) => {
                self.may_fit(name, text, contract, tokenizer)?;
                let ids = tokenizer.encode_prompt(text).map_err(|error| contract.error(error))?;
                (ids, Some(text.to_string()))
            }
            (.., Some(messages)) => {
                let prompt = self.render(messages, contract, tokenizer)?;
                let text = prompt.text();
                at_most_bytes(name, text.len(), contract)?;
                self.may_fit(name, &text, contract, tokenizer)?;
                let ids = tokenizer.encode_chat(&prompt).map_err(|error| contract.error(error))?;
                (ids, Some(text))
            }
            (None, None, None) => return Err(Error::invalid_arg(contract.profile.no_prompt())),
        };
        let ids = self.end_of(ids, contract);
        check_len(name, ids.len(), contract)?;
        Ok((ids, text))
    }

    /// The ids that are given, without what fills up their row.
    pub(super) fn prompt_ids(&self) -> Result<Vec<u32>> {
        let ids = self.ids.as_deref().unwrap_or_default();
        let len = self.input_len.unwrap_or(ids.len());
        let Some(ids) = ids.get(..len) else {
            let message = format!("input_lengths: {len}, input_ids has {} tokens", ids.len());
            return Err(Error::invalid_arg(message));
        };
        tokens(ids).map_err(|wrong| wrong.into_error("input_ids"))
    }

    /// The part of the prompt that is kept.
    fn end_of(&self, mut ids: Vec<u32>, contract: &Contract) -> Vec<u32> {
        let kept = self.num_kept(contract).unwrap_or(ids.len());
        ids.split_off(ids.len().saturating_sub(kept))
    }

    /// How many tokens of the prompt's end are kept, unless all are.
    fn num_kept(&self, contract: &Contract) -> Option<usize> {
        self.truncate_prompt.map(|end| match end {
            PromptEnd::Tokens(kept) => kept,
            PromptEnd::Longest => contract.limits.max_seq_len.saturating_sub(1),
        })
    }

    /// Refuses most texts that are too long after a fraction of the time that splitting them takes.
    fn may_fit(
        &self,
        name: &str,
        text: &str,
        contract: &Contract,
        tokenizer: &Tokenizer,
    ) -> Result<()> {
        let max_seq_len = contract.limits.max_seq_len;
        let kept = self.num_kept(contract);
        let [for_each, more] = CUT_TOKENS;
        let limit = match kept {
            None => max_seq_len.saturating_sub(1),
            Some(kept) => kept.saturating_mul(for_each).saturating_add(more),
        };
        if tokenizer.fewest_tokens(text, limit) <= limit {
            return Ok(());
        }
        let why = match kept {
            None => format!("max_seq_len is {max_seq_len} with at least 1 to generate"),
            Some(kept) => format!("too many to find the last {kept} of them"),
        };
        Err(Error::invalid_arg(format!(
            "{name}: {} bytes are more than {limit} tokens, {why}",
            text.len()
        )))
    }

    fn render(
        &self,
        messages: &str,
        contract: &Contract,
        tokenizer: &Tokenizer,
    ) -> Result<ChatPrompt> {
        if !tokenizer.has_chat_template() {
            return Err(Error::unsupported("messages: the model has no chat template"));
        }
        let read = || {
            let mut conversation = Conversation::parse(messages)?;
            self.tools.as_deref().map_or(Ok(()), |tools| conversation.set_tools(tools))?;
            let variables = self.template_variables.as_deref();
            variables.map_or(Ok(()), |variables| conversation.set_variables(variables))?;
            tokenizer.render_chat(&conversation)
        };
        read().map_err(|error| contract.error(error))
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
fn at_most_bytes(name: &str, bytes: usize, contract: &Contract) -> Result<()> {
    let max_seq_len = contract.limits.max_seq_len;
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
