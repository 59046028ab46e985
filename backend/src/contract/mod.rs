//! What clients say and hear: tensors and request parameters in, calls of the core out, and back.
//!
//! A profile is a set of names. Each has one table of inputs and one of outputs, and everything that knows
//! names comes from them: the model's configuration, the parser, the responses and the users' reference.
//! All of it is pure; nothing a client sends makes it panic.

mod answer;
mod brief;
mod config;
mod differences;
mod form;
mod options;
mod parse;
mod reference;
mod reply;
mod sequences;
mod table;
#[cfg(test)]
mod tests;
mod text;
mod token;
mod value;
mod vllm;

use crate::parameters::Settings;
use spec_core::engine::Limits;
use spec_core::runtime::{Request, TextRules};
use spec_core::tokenizer::Tokenizer;
use std::sync::Arc;
use std::time::Duration;
use triton_backend::{Code, Error, Result};
use triton_backend::{Parameter, Tensor};

pub use answer::FanOut;
pub use brief::Brief;
pub use reference::reference;
pub use reply::{PromptLogProbs, Reply, RowReply, Times};
pub use sequences::StopSequences;

/// Tokens to generate where neither a request nor the configuration says.
const MAX_TOKENS: usize = 256;
/// The same as vLLM has it.
const VLLM_MAX_TOKENS: usize = 16;
/// The temperature of vLLM where nobody says.
const VLLM_TEMPERATURE: f32 = 1.0;

/// Outputs that tell whether somebody has sent the beginning of a prompt before.
const TELL_OF_REUSE: [&str; 2] = ["kv_cache_alloc_new_blocks", "kv_cache_reused_blocks"];

/// A set of names of inputs and outputs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Profile {
    /// Text in, text out, as TensorRT-LLM's `tensorrt_llm_bls`.
    #[default]
    Text,
    /// Token ids in, token ids out, as TensorRT-LLM's `tensorrt_llm`.
    Token,
    /// Text in, text out, as Triton's vLLM backend.
    Vllm,
}

/// What a model takes and gives.
#[derive(Clone, Debug)]
pub struct Contract {
    /// The names.
    pub profile: Profile,
    settings: Settings,
    limits: Limits,
    vocab_size: usize,
}

/// One Triton request.
#[derive(Clone, Debug, Default)]
pub struct Call {
    /// What to generate, a row of the batch each.
    pub rows: Vec<Row>,
    /// How many texts each row gets.
    pub fan_out: FanOut,
    /// Whether each new piece of text is a response of its own.
    pub streams: bool,
    /// What responses carry beside the text.
    pub report: Report,
    /// How long its client waits, where it said so in the parameters.
    pub timeout: Option<Duration>,
}

/// One row of a request.
#[derive(Clone, Debug)]
pub struct Row {
    /// For the runtime.
    pub request: Request,
    /// What of the tokens is text; `None` where the tokens alone are wanted.
    pub rules: Option<TextRules>,
    /// Sequences of several tokens that end the output, which keeps them. Those of one token are in `request`.
    pub stop_sequences: Arc<[Vec<u32>]>,
    /// `stop_sequences` that end with one of so many first tokens do not count.
    pub min_tokens: usize,
    /// What comes before the output.
    pub echo: Echo,
    /// How many alternatives clients see with each token, if they see log-probabilities at all.
    pub logprobs: Option<usize>,
    /// Tokens of the prompt.
    pub prompt_len: usize,
    /// Fills up rows that are shorter than others.
    pub pad_id: i32,
}

/// The prompt, as part of the output.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Echo {
    /// Left out.
    #[default]
    None,
    /// As text.
    Text(String),
    /// As tokens.
    Ids(Arc<Vec<u32>>),
}

/// What responses carry beside the text; the same for all rows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// Log-probabilities of the tokens.
    pub log_probs: bool,
    /// The likeliest tokens in each token's place, in JSON.
    pub top_log_probs: bool,
    /// Their sum.
    pub cum_log_probs: bool,
    /// Log-probabilities of the prompt's tokens, in JSON.
    pub prompt_log_probs: bool,
    /// Counts of speculation and the KV cache, and times.
    pub perf_metrics: bool,
    /// The length of the prompt.
    pub num_input_tokens: bool,
    /// The number of tokens in each response.
    pub num_output_tokens: bool,
    /// Why the text ended.
    pub finish_reason: bool,
}

impl Call {
    /// Whether there are several texts that responses have to tell apart.
    fn has_several(&self) -> bool {
        self.rows.len() > 1 || self.fan_out.returned > 1
    }
}

impl Contract {
    /// The contract of a model: `limits` are the loaded engine's, `vocab_size` the target's.
    pub fn new(settings: &Settings, limits: &Limits, vocab_size: usize) -> Self {
        let (settings, limits) = (settings.clone(), limits.clone());
        Self { profile: settings.profile, settings, limits, vocab_size }
    }

    /// Adds what a model configuration (Triton's JSON) leaves out: inputs, outputs, `max_batch_size` and the
    /// transaction policy. What it says must agree with the profile.
    pub fn complete(&self, config: &mut serde_json::Value) -> Result<()> {
        config::complete(self.profile, self.limits.max_batch_size, config)
    }

    /// Checks a configuration that nobody completes.
    pub fn check(&self, config: &serde_json::Value) -> Result<()> {
        config::check(self.profile, config)
    }

    /// Reads a request.
    pub fn parse(
        &self,
        inputs: &[Tensor],
        parameters: &[(String, Parameter)],
        tokenizer: &Tokenizer,
    ) -> Result<Call> {
        parse::parse(self, inputs, parameters, tokenizer)
    }

    /// Whether each sequence of a call has responses of its own. Else a response holds all of them.
    pub fn answers_each(&self, call: &Call) -> bool {
        self.profile.batches() && (call.streams || self.settings.decoupled)
    }

    /// The output tensors of one response.
    pub fn outputs(&self, call: &Call, reply: &Reply, tokenizer: &Tokenizer) -> Vec<Tensor> {
        let mut outputs = reply::outputs(self.profile, call, reply, tokenizer);
        if !self.settings.report_reuse {
            outputs.retain(|output| !TELL_OF_REUSE.contains(&output.name.as_str()));
        }
        outputs
    }

    /// What the client is told of an error of the core, with its own name of the field.
    pub fn error(&self, error: spec_core::Error) -> Error {
        match error {
            spec_core::Error::BadRequest { field, message } => {
                Error::invalid_arg(format!("{}: {message}", self.profile.spell(field)))
            }
            error @ spec_core::Error::Unsupported(_) => Error::unsupported(error.to_string()),
            error @ spec_core::Error::Capacity(_) => Error::unavailable(error.to_string()),
            error => Error::new(Code::Internal, error.to_string()),
        }
    }
}
