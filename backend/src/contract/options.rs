//! The options of a request, each once: profiles give them names.

use super::form::Form;
use super::table::{Action, Checked, Opt, Wrong};
use triton_backend::DataType;

/// Most words of a list, as many as sampling takes.
const MAX_WORDS: usize = 1024;
/// Most bytes of a word.
const MAX_WORD_BYTES: usize = 1024;

pub(super) const TEXT_INPUT: Opt =
    Opt { action: Action::Text(|form, text| put(&mut form.text, text.into())), help: "the prompt" };
pub(super) const MESSAGES: Opt = Opt {
    action: Action::Text(|form, json| put(&mut form.messages, json.into())),
    help: "a conversation, as a JSON list of messages in OpenAI's schema, which the model's chat template makes the prompt of. What they spell is never a control token",
};
pub(super) const TOOLS: Opt = Opt {
    action: Action::Text(|form, json| put(&mut form.tools, json.into())),
    help: "functions that the model may call, as a JSON list in OpenAI's schema, for the chat template",
};
pub(super) const TEMPLATE_VARIABLES: Opt = Opt {
    action: Action::Text(|form, json| put(&mut form.template_variables, json.into())),
    help: "further variables of the chat template, as a JSON object: `{\"enable_thinking\": false}`",
};
pub(super) const MAX_TOKENS: Opt = Opt {
    action: Action::Int(|form, n| put(&mut form.max_tokens, at_least(1, n)?)),
    help: "tokens to generate at most; what does not fit behind the prompt in the engine's `max_seq_len` is left away (parameter `when_too_long`). Absent: parameter `default_max_tokens`",
};
pub(super) const MIN_TOKENS: Opt = Opt {
    action: Action::Int(|form, n| write(&mut form.min_tokens, at_least(0, n)?)),
    help: "nothing but the length ends the text before this many tokens",
};
pub(super) const MIN_LENGTH: Opt = Opt {
    action: Action::Int(|form, n| write(&mut form.min_length, at_least(0, n)?)),
    help: "the same as `min_tokens`; the larger one holds",
};
pub(super) const STOP_WORDS: Opt = Opt {
    action: Action::Texts(|form, words| write(&mut form.stops, words.into())),
    help: "the text ends before the first of these; empty ones are ignored",
};
pub(super) const BAD_WORDS: Opt = Opt {
    action: Action::Texts(|form, list| write(&mut form.bad_words, words(list)?.into())),
    help: "the tokens of these never come; empty ones are ignored",
};
pub(super) const EXCLUDE_INPUT: Opt = Opt {
    action: Action::Flag(|form, flag| put(&mut form.exclude_prompt, flag)),
    help: "leave the prompt out of the output. Absent: parameter `exclude_input_in_output`. Where the output is streamed it never comes",
};
pub(super) const END_ID: Opt = Opt {
    action: Action::Int(|form, id| match id {
        -1 => write(&mut form.has_no_end, true),
        _ => write(&mut form.end_id, u32::try_from(id).ok()),
    }),
    help: "the text also ends at this token, if the vocabulary has it; -1: it does not end at the model's end tokens",
};
pub(super) const PAD_ID: Opt = Opt {
    action: Action::Int(|form, id| {
        put(&mut form.pad_id, i32::try_from(id).map_err(|_| format!("{id} is no token"))?)
    }),
    help: "fills up rows of token ids that are shorter than others. Absent: -1",
};
pub(super) const TOP_K: Opt = Opt {
    action: Action::Int(|form, k| put(&mut form.top_k, at_least(0, k)?)),
    help: "draw from this many of the likeliest tokens; 0: from all",
};
pub(super) const TOP_P: Opt = Opt {
    // TensorRT-LLM's rule: nothing or less means not set. NaN goes on, to be refused.
    action: Action::Float(|form, p| write(&mut form.top_p, (p > 0.0 || p.is_nan()).then_some(p))),
    help: "draw from the likeliest tokens that together are this probable; 0 or less: not set",
};
pub(super) const MIN_P: Opt = Opt {
    action: Action::Float(|form, p| put(&mut form.min_p, p)),
    help: "draw from tokens at least this fraction as likely as the likeliest",
};
pub(super) const TEMPERATURE: Opt = Opt {
    action: Action::Float(|form, t| put(&mut form.temperature, t)),
    help: "0 to 100; 0 takes the likeliest token. Absent: parameter `default_temperature`; without that 1 where a top-k above 1, a top-p below 1 or a min-p above 0 is given, else 0. Given alone it draws from all tokens (parameter `temperature_alone`)",
};
pub(super) const LENGTH_PENALTY: Opt = Opt {
    action: Action::Float(|_, penalty| match penalty {
        0.0 | 1.0 => Ok(()),
        _ => Err(Wrong::NotBuilt(format!("{penalty}, only 0 and 1: there is no beam search"))),
    }),
    help: "0 or 1, which do nothing",
};
pub(super) const REPETITION_PENALTY: Opt = Opt {
    action: Action::Float(|form, penalty| put(&mut form.repetition_penalty, penalty)),
    help: "above 0, at most 100; above 1 makes tokens of prompt and output less likely",
};
pub(super) const PRESENCE_PENALTY: Opt = Opt {
    action: Action::Float(|form, penalty| put(&mut form.presence_penalty, penalty)),
    help: "-2 to 2, taken once from the logits of tokens in the output",
};
pub(super) const FREQUENCY_PENALTY: Opt = Opt {
    action: Action::Float(|form, penalty| put(&mut form.frequency_penalty, penalty)),
    help: "-2 to 2, taken from the logits of tokens in the output as often as they occur",
};
pub(super) const SEED: Opt = Opt {
    action: Action::Uint(the_seed),
    help: "the same seed gives the same text. Absent: every request draws anew",
};
pub(super) const RANDOM_SEED: Opt =
    Opt { action: Action::Uint(the_seed), help: "the same as `seed`, by its older name" };
pub(super) const PRIORITY: Opt = Opt {
    // It is looked at before a request is read; here it only has to be a level.
    action: Action::Int(|_, level| at_least(0, level).map(drop)),
    help: "level of the whole request in the model's `dynamic_batching`, the first row's: lower is served first, 0 is the default level. Wins over the priority that Triton's clients send beside the inputs",
};
pub(super) const CACHE_SALT: Opt = Opt {
    action: Action::Text(|form, salt| write(&mut form.cache_salt, salt.into())),
    help: "only requests with the same salt share the KV cache of equal beginnings, and can learn of each other by it",
};
pub(super) const IGNORE_EOS: Opt = Opt {
    action: Action::Flag(|form, flag| write(&mut form.ignore_eos, flag)),
    help: "go on after the model's end tokens",
};
pub(super) const RETURN_LOG_PROBS: Opt = Opt {
    action: Action::Flag(|form, flag| {
        (form.report.log_probs, form.report.cum_log_probs) = (flag, flag);
        Ok(())
    }),
    help: "send `output_log_probs` and `cum_log_probs`",
};
pub(super) const RETURN_LOGITS: Opt = Opt {
    action: Action::Flag(|_, flag| match flag {
        true => Err(Wrong::NotBuilt("logits are not sent".into())),
        false => Ok(()),
    }),
    help: "only false: logits are not sent",
};
pub(super) const ONE_ONLY: Opt = Opt {
    action: Action::Int(|_, n| match n {
        1 => Ok(()),
        _ => Err(Wrong::NotBuilt(format!("{n}, only 1 is supported"))),
    }),
    help: "only 1",
};
pub(super) const NUM_SEQUENCES: Opt = Opt {
    action: Action::Int(|form, n| put(&mut form.num_sequences, at_least(1, n)?)),
    help: "texts for each prompt, at most 128 for all prompts of a request together; of seed s the n-th has s + n, without one each draws anew. Absent: 1",
};
pub(super) const STREAM: Opt = Opt {
    action: Action::Flag(|form, flag| write(&mut form.streams, flag)),
    help: "send the output as it comes; needs a decoupled model",
};
pub(super) const BIAS_WORDS: Opt = Opt {
    action: Action::Texts(|form, list| write(&mut form.bias_words, words(list)?.into())),
    help: "words of one token whose logits `embedding_bias_weights` are added to",
};
pub(super) const BIAS_WEIGHTS: Opt = Opt {
    action: Action::Floats(|form, weights| write(&mut form.bias_weights, weights.into())),
    help: "one for each of `embedding_bias_words`",
};
pub(super) const NUM_DRAFT_TOKENS: Opt = Opt {
    action: Action::Int(|form, n| put(&mut form.draft_len, at_least(0, n)?)),
    help: "draft tokens in a step at most, up to the engine's `max_draft_len`; 0 decodes plainly",
};
pub(super) const FIXED_DRAFT_TOKENS: Opt = Opt {
    action: Action::Flag(|form, flag| write(&mut form.fixed_draft_len, flag)),
    help: "draft `num_draft_tokens` in every step, whatever that is worth; absent or false: as many as pay, where the model's `draft_len` is `auto`",
};
pub(super) const USE_DRAFT_LOGITS: Opt = Opt {
    action: Action::Flag(|_, _| Ok(())),
    help: "accepted; the output has the target's distribution either way",
};
pub(super) const RETURN_PERF_METRICS: Opt = Opt {
    action: Action::Flag(|form, flag| write(&mut form.report.perf_metrics, flag)),
    help: "send the counts of speculation and KV cache and the times, as they are by then, on every response",
};
pub(super) const RETURN_NUM_INPUT_TOKENS: Opt = Opt {
    action: Action::Flag(|form, flag| write(&mut form.report.num_input_tokens, flag)),
    help: "send `num_input_tokens`",
};
pub(super) const RETURN_NUM_OUTPUT_TOKENS: Opt = Opt {
    action: Action::Flag(|form, flag| write(&mut form.report.num_output_tokens, flag)),
    help: "send `num_output_tokens`",
};
pub(super) const RETURN_FINISH_REASON: Opt = Opt {
    action: Action::Flag(|form, flag| write(&mut form.report.finish_reason, flag)),
    help: "send `finish_reason`",
};

pub(super) const NO_LORA: &str = "LoRA adapters are not built in";
pub(super) const NO_GUIDE: &str = "guided decoding is not built in";
pub(super) const NO_EMBEDDINGS: &str = "prompts of embeddings are not built in";
pub(super) const NO_ENCODER: &str = "only decoder models are served";

/// An input that is declared so that a client who sends it hears why not.
pub(super) const fn refused(datatype: DataType, dims: &'static [i64], why: &'static str) -> Opt {
    Opt { action: Action::Refused(datatype, dims), help: why }
}

/// It has two names.
fn the_seed(form: &mut Form, seed: u64) -> Checked {
    match form.seed {
        Some(other) if other != seed => Err(format!("{seed}, the other name has {other}").into()),
        _ => put(&mut form.seed, seed),
    }
}

/// Words are split into tokens one by one: no more of them, and no longer ones, than that is worth.
fn words(list: Vec<String>) -> Checked<Vec<String>> {
    if list.len() > MAX_WORDS {
        return Err(format!("{} entries, at most {MAX_WORDS} are allowed", list.len()).into());
    }
    match list.iter().map(String::len).find(|&bytes| bytes > MAX_WORD_BYTES) {
        Some(bytes) => {
            Err(format!("{bytes} bytes in an entry, at most {MAX_WORD_BYTES} are allowed").into())
        }
        None => Ok(list),
    }
}

pub(super) fn write<T>(slot: &mut T, value: T) -> Checked {
    *slot = value;
    Ok(())
}

pub(super) fn put<T>(slot: &mut Option<T>, value: T) -> Checked {
    write(slot, Some(value))
}

pub(super) fn at_least(low: i64, value: i64) -> Checked<usize> {
    let allowed = if value >= low { usize::try_from(value).ok() } else { None };
    allowed.ok_or_else(|| format!("{value}, at least {low} is needed").into())
}

/// Whether the vocabulary has it is checked where the vocabulary is known.
pub(super) fn token(id: i64) -> Checked<u32> {
    u32::try_from(id).map_err(|_| format!("{id} is no token").into())
}
