//! The vLLM profile: the names of Triton's vLLM backend. There is no batch dimension; sampling options come
//! as one JSON object, or as request parameters.

use super::form::{Form, PromptEnd, excerpt};
use super::options::*;
use super::reply::{Cell, logprobs, outputs::*};
use super::table::{Action, Checked, Input, Layout, Opt, Output, Wrong, input};
use super::value::shown;
use serde_json::{Value as Json, json};
use std::borrow::Cow;
use std::collections::BTreeSet;
use triton_backend::DataType::{Bytes, Uint32};

const NO_IMAGES: &str = "only text models are served";
const NO_EMBEDDINGS_OUT: &str = "embeddings are not built in";
const NO_BEAMS: &str = "there is no beam search";

const SAMPLING_PARAMETERS: Opt = Opt {
    action: Action::Json(sampling),
    help: "the sampling options below, as a JSON object; they win over request parameters",
};
const RETURN_CUMULATIVE_LOGPROB: Opt = Opt {
    action: Action::Flag(|form, flag| write(&mut form.report.cum_log_probs, flag)),
    help: "send `cumulative_logprob`",
};
const RETURN_LOGPROBS: Opt = Opt {
    action: Action::Flag(|form, flag| write(&mut form.report.top_log_probs, flag)),
    help: "send `logprobs`, as many as the sampling option `logprobs` says",
};
const EXCLUDE: Opt = Opt {
    action: EXCLUDE_INPUT.action,
    help: "leave the prompt out of the output. Absent: it is left out where the output is streamed, and only there; false cannot be streamed",
};

pub(super) static INPUTS: &[Input] = &[
    Input { required: true, ..input("text_input", TEXT_INPUT) },
    input("stream", STREAM),
    input("sampling_parameters", SAMPLING_PARAMETERS),
    input("exclude_input_in_output", EXCLUDE),
    input("return_finish_reason", RETURN_FINISH_REASON),
    input("return_cumulative_logprob", RETURN_CUMULATIVE_LOGPROB),
    input("return_logprobs", RETURN_LOGPROBS),
    input("return_num_input_tokens", RETURN_NUM_INPUT_TOKENS),
    input("return_num_output_tokens", RETURN_NUM_OUTPUT_TOKENS),
    input("return_perf_metrics", RETURN_SPECULATION),
    input("priority", PRIORITY),
    input("cache_salt", CACHE_SALT),
    input("image", refused(Bytes, &[-1], NO_IMAGES)),
    input("embedding_request", refused(Bytes, &[1], NO_EMBEDDINGS_OUT)),
];

const RETURN_SPECULATION: Opt = Opt {
    action: RETURN_PERF_METRICS.action,
    help: "send the counts of speculation, as they are by then, on every response",
};
const VLLM_TEMPERATURE: Opt = Opt {
    action: TEMPERATURE.action,
    help: "0 to 100; 0 takes the likeliest token. Absent: parameter `default_temperature`, 1 without it",
};
const VLLM_TOP_P: Opt = Opt {
    action: Action::Float(|form, p| put(&mut form.top_p, p)),
    help: "draw from the likeliest tokens that together are this probable; above 0, at most 1",
};
const VLLM_TOP_K: Opt = Opt {
    action: Action::Int(|form, k| put(&mut form.top_k, if k == -1 { 0 } else { at_least(0, k)? })),
    help: "draw from this many of the likeliest tokens; 0 or -1: from all",
};
const VLLM_SEED: Opt = Opt {
    action: Action::Json(|form, json| match json.as_str().map(str::trim) {
        Some("-1") => Ok(()),
        Some(text) => put(&mut form.seed, text.parse().map_err(|_| no_seed(json))?),
        None if json.as_i64() == Some(-1) => Ok(()),
        None => put(&mut form.seed, json.as_u64().ok_or_else(|| no_seed(json))?),
    }),
    help: "the same seed gives the same text. Absent or -1: every request draws anew",
};
const LOGPROBS: Opt = Opt {
    action: Action::Json(|form, json| write(&mut form.logprobs, alternatives(json)?)),
    help: "log-probabilities of each token and this many of the likeliest, at most 20; true: of the token alone",
};
const TOP_LOGPROBS: Opt = Opt {
    action: Action::Json(|form, json| write(&mut form.top_logprobs, alternatives(json)?)),
    help: "the same as `logprobs`; the larger one holds",
};
const STOP_TOKEN_IDS: Opt = Opt {
    action: Action::Ints(|form, ids| {
        let ids: Checked<Vec<u32>> = ids.into_iter().map(token).collect();
        write(&mut form.stop_tokens, ids?.into())
    }),
    help: "the text also ends at these tokens",
};
const LOGIT_BIAS: Opt = Opt {
    action: Action::Json(|form, json| {
        let object = json.as_object().ok_or_else(|| format!("{} is not an object", shown(json)))?;
        let biases: Checked<Vec<_>> = object.iter().map(bias).collect();
        write(&mut form.logit_bias, biases?.into())
    }),
    help: "an object of token ids and what is added to their logits",
};
const ALLOWED_TOKEN_IDS: Opt = Opt {
    action: Action::Ints(|form, ids| {
        let ids: Checked<BTreeSet<u32>> = ids.into_iter().map(token).collect();
        put(&mut form.allowed_tokens, ids?.into_iter().collect())
    }),
    help: "the only tokens that can come",
};
const TRUNCATE_PROMPT_TOKENS: Opt = Opt {
    action: Action::Int(|form, n| {
        let kept = match n {
            -1 => PromptEnd::Longest,
            _ => PromptEnd::Tokens(at_least(1, n)?),
        };
        put(&mut form.truncate_prompt, kept)
    }),
    help: "only so many tokens of the prompt's end are read; -1: as many as leave room for one to be generated. A text that is sure to be more than 65536 tokens and 4 for each that is kept is refused",
};

const BEST_OF: Opt = Opt {
    action: Action::Int(|form, count| put(&mut form.best_of, at_least(1, count)?)),
    help: "texts that are generated, at least `n` and at most 128, of which the `n` likeliest are answered, the likeliest first; more than `n` cannot be streamed. Absent: `n`",
};
const INCLUDE_STOP: Opt = Opt {
    action: Action::Flag(|form, flag| write(&mut form.includes_stop, flag)),
    help: "the text ends with the stop string or token that ended it. Absent: before it",
};
const SKIP_SPECIAL: Opt = Opt {
    action: Action::Flag(|form, flag| write(&mut form.shows_special, !flag)),
    help: "special tokens are no text. Absent: true",
};
const DETOKENIZE: Opt = Opt {
    action: Action::Flag(|form, flag| write(&mut form.hides_text, !flag)),
    help: "false: the text is empty, and `stop` cannot be given. Absent: true",
};
const PROMPT_LOGPROBS: Opt = Opt {
    action: Action::Json(|form, json| {
        let alternatives = alternatives(json)?;
        form.report.prompt_log_probs = alternatives.is_some();
        write(&mut form.prompt_logprobs, alternatives)
    }),
    help: "send the output `prompt_logprobs`: log-probabilities of the prompt's tokens and of this many of the likeliest in their places, at most 20; tokens times one more than these at most 262144. Not where the output is streamed",
};

pub(super) static SAMPLING: &[Input] = &[
    input("max_tokens", MAX_TOKENS),
    input("min_tokens", MIN_TOKENS),
    input("temperature", VLLM_TEMPERATURE),
    input("top_p", VLLM_TOP_P),
    input("top_k", VLLM_TOP_K),
    input("min_p", MIN_P),
    input("presence_penalty", PRESENCE_PENALTY),
    input("frequency_penalty", FREQUENCY_PENALTY),
    input("repetition_penalty", REPETITION_PENALTY),
    input("length_penalty", LENGTH_PENALTY),
    input("seed", VLLM_SEED),
    input("stop", STOP_WORDS),
    input("stop_token_ids", STOP_TOKEN_IDS),
    input("bad_words", BAD_WORDS),
    input("ignore_eos", IGNORE_EOS),
    input("logprobs", LOGPROBS),
    input("top_logprobs", TOP_LOGPROBS),
    input("logit_bias", LOGIT_BIAS),
    input("allowed_token_ids", ALLOWED_TOKEN_IDS),
    input("truncate_prompt_tokens", TRUNCATE_PROMPT_TOKENS),
    input("num_draft_tokens", NUM_DRAFT_TOKENS),
    input("fixed_draft_tokens", FIXED_DRAFT_TOKENS),
    input("n", NUM_SEQUENCES),
    input("best_of", BEST_OF),
    input("use_beam_search", only("false", NO_BEAMS_ACTION)),
    input("include_stop_str_in_output", INCLUDE_STOP),
    input("skip_special_tokens", SKIP_SPECIAL),
    input("spaces_between_special_tokens", only("true", SPACES_ACTION)),
    input("detokenize", DETOKENIZE),
    input("early_stopping", only("false", NO_BEAMS_ACTION)),
    input("prompt_logprobs", PROMPT_LOGPROBS),
    input("guided_decoding", refused(Bytes, &[1], NO_GUIDE)),
    input("structured_outputs", refused(Bytes, &[1], NO_GUIDE)),
    input("lora_name", refused(Bytes, &[1], NO_LORA)),
];

const NO_BEAMS_ACTION: Action = Action::Flag(|_, flag| not_built(flag, NO_BEAMS));
const SPACES_ACTION: Action =
    Action::Flag(|_, flag| not_built(!flag, "special tokens that are shown are shown as they are"));

pub(super) static OUTPUTS: &[Output] = &[
    TEXT_OUTPUT,
    VLLM_FINISH_REASON,
    CUMULATIVE_LOGPROB,
    VLLM_LOGPROBS,
    PROMPT_LOG_PROBS,
    Output { datatype: Uint32, ..NUM_INPUT_TOKENS },
    Output { datatype: Uint32, dims: &[-1], ..NUM_OUTPUT_TOKENS },
    ACCEPTANCE_RATE,
    TOTAL_ACCEPTED_DRAFT_TOKENS,
    TOTAL_DRAFT_TOKENS,
    NUM_SPEC_STEPS,
    ACCEPTANCE_HISTOGRAM,
];

const VLLM_FINISH_REASON: Output = output(
    "finish_reason",
    Bytes,
    &[-1],
    |scene| {
        let finish = scene.reply.finish;
        scene.call.report.finish_reason.then(|| Cell::Text(finish.map_or("None", reason).into()))
    },
    "`return_finish_reason`: `stop`, `length` or `cancelled`; `None` before the last response",
);
const CUMULATIVE_LOGPROB: Output = Output {
    name: "cumulative_logprob",
    help: "`return_cumulative_logprob`: sum of the log-probabilities of all tokens so far",
    ..CUM_LOG_PROBS
};
const VLLM_LOGPROBS: Output = output(
    "logprobs",
    Bytes,
    &[-1],
    |scene| scene.call.report.top_log_probs.then(|| Cell::Text(logprobs(scene))),
    "`return_logprobs`: for each token of this response a JSON object of token ids with `logprob`, `rank` and `decoded_token`; `null` where the sampling option `logprobs` is absent",
);

const PROMPT_LOG_PROBS: Output = Output {
    layout: Layout::Rows,
    ..output(
        "prompt_logprobs",
        Bytes,
        &[-1],
        |scene| {
            let wanted = scene.call.report.prompt_log_probs;
            wanted.then(|| Cell::Text(scene.prompt_log_probs.to_string()))
        },
        "sampling option `prompt_logprobs`: a JSON list as `logprobs` for the prompt's tokens, the first of them null",
    )
};

/// Names of the core's fields in this profile.
pub(super) static SPELLING: &[(&str, &str)] = &[
    ("prompt", "text_input"),
    ("text", "text_input"),
    ("input_ids", "text_input"),
    ("stop_tokens", "stop_token_ids"),
    ("allowed_tokens", "allowed_token_ids"),
    ("draft_len", "num_draft_tokens"),
    ("num_sequences", "n"),
];

/// Reads the JSON object of sampling options.
fn sampling(form: &mut Form, json: &Json) -> Checked {
    let object = json.as_object().ok_or_else(|| Wrong::from("not a JSON object".to_string()))?;
    for (name, value) in object.iter().filter(|(_, value)| !value.is_null()) {
        let option = SAMPLING.iter().find(|option| option.name == name);
        let option = option.ok_or_else(|| format!("option '{}' is not known", excerpt(name)))?;
        // Lists are lists here: a string that looks like one is a string.
        let value = match (&option.option.action, value) {
            (Action::Texts(_), Json::String(_)) => Cow::Owned(json!([value])),
            _ => Cow::Borrowed(value),
        };
        option.set(form, &value).map_err(|wrong| wrong.of(name))?;
    }
    Ok(())
}

const fn only(help: &'static str, action: Action) -> Opt {
    Opt { action, help }
}

fn not_built(asked: bool, why: &str) -> Checked {
    if asked { Err(Wrong::NotBuilt(format!("not supported, {why}"))) } else { Ok(()) }
}

fn no_seed(json: &Json) -> Wrong {
    format!("{} is not -1 or a whole number of at least 0", shown(json)).into()
}

fn alternatives(json: &Json) -> Checked<Option<usize>> {
    let count = match json {
        Json::Bool(wanted) => return Ok(wanted.then_some(0)),
        Json::String(text) => text.trim().parse().ok(),
        other => other.as_i64(),
    };
    let count = count.ok_or_else(|| format!("{} is not a whole number", shown(json)))?;
    at_least(0, count).map(Some)
}

fn bias((id, weight): (&String, &Json)) -> Checked<(u32, f32)> {
    let id = id.parse().map_err(|_| format!("'{}' is no token", excerpt(id)))?;
    let weight = weight.as_f64().ok_or_else(|| format!("{} is not a number", shown(weight)))?;
    Ok((id, weight as f32))
}
