//! The token profile: the names of TensorRT-LLM's `tensorrt_llm`. Tensors have a batch dimension in front.

use super::Echo;
use super::options::*;
use super::reply::{Cell, outputs::*};
use super::table::{Action, Checked, Input, Opt, Output, Wrong, input};
use triton_backend::DataType::{Bool, Bytes, Fp16, Fp32, Int32, Int64, Uint8, Uint64};

/// Most token sequences of one list.
const MAX_SEQUENCES: usize = 1024;
/// Most tokens of one sequence.
const MAX_SEQUENCE_LEN: usize = 64;

const NO_TOP_P_DECAY: &str = "top-p does not change while a text grows";
const NO_BEAMS: &str = "there is no beam search";
const NO_SPLIT: &str = "a request is computed whole, in one place";
const NO_RETENTION: &str = "how long pages are kept is not for requests to say";
const NO_IMAGES: &str = "only text models are served";
const LOSSLESS: &str = "drafts are verified by the target alone, without loss";
const DRAFTER: &str = "how drafts are made is decided when the engine is built";

const INPUT_IDS: Opt = Opt {
    action: Action::Ints(|form, ids| put(&mut form.ids, ids.into())),
    help: "the prompt's tokens",
};
const INPUT_LENGTHS: Opt = Opt {
    action: Action::Int(|form, len| put(&mut form.input_len, at_least(1, len)?)),
    help: "how many of `input_ids` are the prompt. Absent: all",
};
const DRAFT_INPUT_IDS: Opt = Opt {
    action: Action::Ints(|form, ids| write(&mut form.given_draft, tokens(&ids)?.into())),
    help: "draft tokens that the first step verifies, at most the engine's `max_draft_len`, 16 where it has no drafter",
};
const STOP_WORDS_LIST: Opt = Opt {
    action: Action::Words(|form, words| {
        let sequences = sequences(words)?;
        let (long, single): (Vec<_>, Vec<_>) =
            sequences.into_iter().partition(|sequence| sequence.len() > 1);
        form.stop_tokens = single.into_iter().flatten().collect();
        write(&mut form.stop_sequences, long.into())
    }),
    help: "token sequences that end the output, which keeps them: ids one after the other, below them the offset behind each sequence, then -1",
};
const BAD_WORDS_LIST: Opt = Opt {
    action: Action::Words(|form, words| write(&mut form.bad_sequences, sequences(words)?.into())),
    help: "token sequences that never come, written like `stop_words_list`",
};
const EMBEDDING_BIAS: Opt = Opt {
    action: Action::Floats(|form, weights| {
        form.bias_len = Some(weights.len());
        let biases = (0u32..).zip(weights).filter(|&(_, weight)| weight != 0.0);
        write(&mut form.logit_bias, biases.collect())
    }),
    help: "added to the logits: one value for each token of the model, at most 4096 of them not 0",
};
const STOP: Opt = Opt {
    // Whoever sends true is answered before the request is read.
    action: Action::Flag(|_, _| Ok(())),
    help: "ends the requests with the same id, wherever they are; this one gets an empty response, and nothing else of it is read. Whoever knows an id can end its request, so ids should be hard to guess. A request without an id cannot be ended so",
};
const REQUEST_TYPE: Opt = Opt {
    action: Action::Text(|_, kind| match kind.as_str() {
        "context_and_generation" => Ok(()),
        _ => Err(Wrong::NotBuilt(format!("not supported, {NO_SPLIT}"))),
    }),
    help: "only `context_and_generation`",
};

pub(super) static INPUTS: &[Input] = &[
    input("input_ids", INPUT_IDS),
    input("input_lengths", INPUT_LENGTHS),
    input("request_output_len", MAX_TOKENS),
    input("streaming", STREAM),
    input("stop", STOP),
    input("priority", PRIORITY),
    input("cache_salt", CACHE_SALT),
    input("draft_input_ids", DRAFT_INPUT_IDS),
    input("num_draft_tokens", NUM_DRAFT_TOKENS),
    input("fixed_draft_tokens", FIXED_DRAFT_TOKENS),
    input("stop_words_list", STOP_WORDS_LIST),
    input("bad_words_list", BAD_WORDS_LIST),
    input("embedding_bias", EMBEDDING_BIAS),
    input("exclude_input_in_output", EXCLUDE_INPUT),
    input("temperature", TEMPERATURE),
    input("runtime_top_k", TOP_K),
    input("runtime_top_p", TOP_P),
    input("min_p", MIN_P),
    input("repetition_penalty", REPETITION_PENALTY),
    input("presence_penalty", PRESENCE_PENALTY),
    input("frequency_penalty", FREQUENCY_PENALTY),
    input("len_penalty", LENGTH_PENALTY),
    input("seed", SEED),
    input("random_seed", RANDOM_SEED),
    input("min_tokens", MIN_TOKENS),
    input("min_length", MIN_LENGTH),
    input("ignore_eos", IGNORE_EOS),
    input("end_id", END_ID),
    input("pad_id", PAD_ID),
    input("num_return_sequences", NUM_SEQUENCES),
    input("beam_width", ONE_ONLY),
    input("return_log_probs", RETURN_LOG_PROBS),
    input("return_context_logits", RETURN_LOGITS),
    input("return_generation_logits", RETURN_LOGITS),
    input("return_perf_metrics", RETURN_PERF_METRICS),
    input("return_num_input_tokens", RETURN_NUM_INPUT_TOKENS),
    input("return_num_output_tokens", RETURN_NUM_OUTPUT_TOKENS),
    input("return_finish_reason", RETURN_FINISH_REASON),
    input("draft_logits", refused(Fp32, &[-1, -1], LOSSLESS)),
    input("draft_acceptance_threshold", refused(Fp32, &[1], LOSSLESS)),
    input("runtime_top_p_min", refused(Fp32, &[1], NO_TOP_P_DECAY)),
    input("runtime_top_p_decay", refused(Fp32, &[1], NO_TOP_P_DECAY)),
    input("runtime_top_p_reset_ids", refused(Int32, &[1], NO_TOP_P_DECAY)),
    input("beam_search_diversity_rate", refused(Fp32, &[1], NO_BEAMS)),
    input("early_stopping", refused(Bool, &[1], NO_BEAMS)),
    input("lookahead_window_size", refused(Int32, &[1], DRAFTER)),
    input("lookahead_ngram_size", refused(Int32, &[1], DRAFTER)),
    input("lookahead_verification_set_size", refused(Int32, &[1], DRAFTER)),
    input("encoder_input_features", refused(Fp16, &[-1, -1], NO_ENCODER)),
    input("encoder_output_lengths", refused(Int32, &[1], NO_ENCODER)),
    input("decoder_input_ids", refused(Int32, &[-1], NO_ENCODER)),
    input("decoder_input_lengths", refused(Int32, &[1], NO_ENCODER)),
    input("cross_attention_mask", refused(Bool, &[-1, -1], NO_ENCODER)),
    input("skip_cross_attn_blocks", refused(Bool, &[1], NO_ENCODER)),
    input("prompt_embedding_table", refused(Fp16, &[-1, -1], NO_EMBEDDINGS)),
    input("prompt_table_extra_ids", refused(Uint64, &[-1], NO_EMBEDDINGS)),
    input("prompt_vocab_size", refused(Int32, &[1], NO_EMBEDDINGS)),
    input("mrope_rotary_cos_sin", refused(Fp32, &[-1], NO_IMAGES)),
    input("mrope_position_deltas", refused(Int64, &[1], NO_IMAGES)),
    input("lora_task_id", refused(Uint64, &[1], NO_LORA)),
    input("lora_weights", refused(Fp16, &[-1, -1], NO_LORA)),
    input("lora_config", refused(Int32, &[-1, 3], NO_LORA)),
    input("context_phase_params", refused(Uint8, &[-1], NO_SPLIT)),
    input("retention_token_range_starts", refused(Int32, &[-1], NO_RETENTION)),
    input("retention_token_range_ends", refused(Int32, &[-1], NO_RETENTION)),
    input("retention_token_range_priorities", refused(Int32, &[-1], NO_RETENTION)),
    input("retention_token_range_durations_ms", refused(Int32, &[-1], NO_RETENTION)),
    input("retention_decode_priority", refused(Int32, &[1], NO_RETENTION)),
    input("retention_decode_duration_ms", refused(Int32, &[1], NO_RETENTION)),
    input("guided_decoding_guide_type", refused(Bytes, &[1], NO_GUIDE)),
    input("guided_decoding_guide", refused(Bytes, &[1], NO_GUIDE)),
];

pub(super) static PARAMETERS: &[Input] = &[input("request_type", REQUEST_TYPE)];

const OUTPUT_IDS: Output = lists(
    "output_ids",
    Int32,
    &[-1, -1],
    |scene| {
        let prompt: &[u32] = match &scene.row.echo {
            Echo::Ids(ids) if scene.reply.is_first => ids,
            _ => &[],
        };
        let generated = scene.reply.emitted.iter().map(|emitted| emitted.token);
        let ids = prompt.iter().copied().chain(generated).map(i64::from);
        Some(Cell::Ints(ids.collect(), i64::from(scene.row.pad_id)))
    },
    "the prompt's tokens, unless they are excluded, and those behind them; of a streamed response what is new. Shorter rows are filled up with `pad_id`",
);
const SEQUENCE_LENGTH: Output = output(
    "sequence_length",
    Int32,
    &[-1],
    |scene| {
        let prompt_len = match &scene.row.echo {
            Echo::Ids(ids) if scene.reply.is_first => ids.len(),
            _ => 0,
        };
        count(prompt_len + scene.reply.emitted.len())
    },
    "how many of `output_ids` are tokens",
);

pub(super) static OUTPUTS: &[Output] = &[
    OUTPUT_IDS,
    SEQUENCE_LENGTH,
    CUM_LOG_PROBS,
    OUTPUT_LOG_PROBS,
    FINISH_REASON,
    NUM_INPUT_TOKENS,
    NUM_OUTPUT_TOKENS,
    BATCH_INDEX,
    SEQUENCE_INDEX,
    ACCEPTANCE_RATE,
    TOTAL_ACCEPTED_DRAFT_TOKENS,
    TOTAL_DRAFT_TOKENS,
    NUM_SPEC_STEPS,
    ACCEPTANCE_HISTOGRAM,
    KV_CACHE_ALLOC_NEW_BLOCKS,
    KV_CACHE_REUSED_BLOCKS,
    KV_CACHE_ALLOC_TOTAL_BLOCKS,
    ARRIVAL_TIME_NS,
    FIRST_SCHEDULED_TIME_NS,
    FIRST_TOKEN_TIME_NS,
    LAST_TOKEN_TIME_NS,
];

/// Names of the core's fields in this profile.
pub(super) static SPELLING: &[(&str, &str)] = &[
    ("prompt", "input_ids"),
    ("max_tokens", "request_output_len"),
    ("top_k", "runtime_top_k"),
    ("top_p", "runtime_top_p"),
    ("bad_words", "bad_words_list"),
    ("stop_tokens", "stop_words_list"),
    ("logit_bias", "embedding_bias"),
    ("given_draft", "draft_input_ids"),
    ("draft_len", "num_draft_tokens"),
    ("num_sequences", "num_return_sequences"),
];

pub(super) fn tokens(ids: &[i64]) -> Checked<Vec<u32>> {
    ids.iter().map(|&id| token(id)).collect()
}

/// Sequences of at least one token each.
fn sequences(words: Vec<Vec<i64>>) -> Checked<Vec<Vec<u32>>> {
    if words.len() > MAX_SEQUENCES {
        let len = words.len();
        return Err(format!("{len} sequences, at most {MAX_SEQUENCES} are allowed").into());
    }
    if let Some(len) = words.iter().map(Vec::len).find(|&len| len > MAX_SEQUENCE_LEN) {
        return Err(format!("{len} tokens in one, at most {MAX_SEQUENCE_LEN} are allowed").into());
    }
    words.iter().filter(|word| !word.is_empty()).map(|word| tokens(word)).collect()
}
