//! Log-probabilities as vLLM's clients read them: in JSON, an object for each token.

use crate::contract::table::OutputSource;
use serde_json::{Value as Json, json};
use spec_core::runtime::Emitted;
use spec_core::tokenizer::Tokenizer;

/// Those of a prompt's tokens, a list that grows with the steps that bring them. Nothing precedes the first token: its
/// entry is null.
#[derive(Debug, Default)]
pub struct PromptLogProbs(String);

impl PromptLogProbs {
    /// Takes the next tokens of the prompt behind the first.
    pub fn push(&mut self, tokens: &[Emitted], tokenizer: &Tokenizer) {
        for token in tokens {
            self.0.push(',');
            self.0.push_str(&of_token(token, tokenizer).to_string());
        }
    }

    /// The list as it is by now.
    pub fn json(&self) -> String {
        format!("[null{}]", self.0)
    }
}

/// Those of a response's tokens.
pub(crate) fn logprobs(source: &OutputSource) -> String {
    if source.row.logprobs.is_none() {
        return "null".into();
    }
    let tokens = source.reply.emitted.iter().map(|token| of_token(token, source.tokenizer));
    Json::Array(tokens.collect()).to_string()
}

/// The token itself comes first, as vLLM has it, then the likeliest others.
fn of_token(emitted: &Emitted, tokenizer: &Tokenizer) -> Json {
    let own = (emitted.token, emitted.logprob, emitted.rank);
    let top = (1u32..).zip(&emitted.top_logprobs);
    let top = top.map(|(rank, &(token, logprob))| (token, Some(logprob), Some(rank)));
    let others = top.filter(|&(token, ..)| token != emitted.token);
    let entries = std::iter::once(own).chain(others).map(|(token, logprob, rank)| {
        let text = tokenizer.decode(&[token], false).unwrap_or_default();
        // JSON has no infinities: what cannot be is null.
        (token.to_string(), json!({ "logprob": logprob, "rank": rank, "decoded_token": text }))
    });
    Json::Object(entries.collect())
}
