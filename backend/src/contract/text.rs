//! The text profile: the names of TensorRT-LLM's `tensorrt_llm_bls`, which Triton's OpenAI frontend and
//! GenAI-Perf speak. Tensors have a batch dimension in front.

use super::options::*;
use super::reply::outputs::*;
use super::table::{Input, Output, input};
use crate::triton::DataType::{Bytes, Fp16, Int32, Uint64};

pub(super) static INPUTS: &[Input] = &[
    input("text_input", TEXT_INPUT),
    input("messages", MESSAGES),
    input("max_tokens", MAX_TOKENS),
    input("stream", STREAM),
    input("stop_words", STOP_WORDS),
    input("bad_words", BAD_WORDS),
    input("exclude_input_in_output", EXCLUDE_INPUT),
    input("temperature", TEMPERATURE),
    input("top_k", TOP_K),
    input("top_p", TOP_P),
    input("min_p", MIN_P),
    input("repetition_penalty", REPETITION_PENALTY),
    input("presence_penalty", PRESENCE_PENALTY),
    input("frequency_penalty", FREQUENCY_PENALTY),
    input("length_penalty", LENGTH_PENALTY),
    input("seed", SEED),
    input("min_tokens", MIN_TOKENS),
    input("min_length", MIN_LENGTH),
    input("ignore_eos", IGNORE_EOS),
    input("end_id", END_ID),
    input("pad_id", PAD_ID),
    input("embedding_bias_words", BIAS_WORDS),
    input("embedding_bias_weights", BIAS_WEIGHTS),
    input("num_draft_tokens", NUM_DRAFT_TOKENS),
    input("use_draft_logits", USE_DRAFT_LOGITS),
    input("num_return_sequences", NUM_SEQUENCES),
    input("beam_width", ONE_ONLY),
    input("return_log_probs", RETURN_LOG_PROBS),
    input("return_context_logits", RETURN_LOGITS),
    input("return_generation_logits", RETURN_LOGITS),
    input("return_perf_metrics", RETURN_PERF_METRICS),
    input("return_num_input_tokens", RETURN_NUM_INPUT_TOKENS),
    input("return_num_output_tokens", RETURN_NUM_OUTPUT_TOKENS),
    input("return_finish_reason", RETURN_FINISH_REASON),
    input("guided_decoding_guide_type", refused(Bytes, &[1], NO_GUIDE)),
    input("guided_decoding_guide", refused(Bytes, &[1], NO_GUIDE)),
    input("lora_task_id", refused(Uint64, &[1], NO_LORA)),
    input("lora_weights", refused(Fp16, &[-1, -1], NO_LORA)),
    input("lora_config", refused(Int32, &[-1, 3], NO_LORA)),
    input("decoder_text_input", refused(Bytes, &[1], NO_ENCODER)),
    input("prompt_embedding_table", refused(Fp16, &[-1, -1], NO_EMBEDDINGS)),
    input("prompt_vocab_size", refused(Int32, &[1], NO_EMBEDDINGS)),
    input("prompt_table_extra_id", refused(Uint64, &[-1], NO_EMBEDDINGS)),
];

pub(super) static OUTPUTS: &[Output] = &[
    TEXT_OUTPUT,
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
    ("prompt", "text_input"),
    ("text", "text_input"),
    ("input_ids", "text_input"),
    ("stop", "stop_words"),
    ("stop_tokens", "end_id"),
    ("logit_bias", "embedding_bias_words"),
    ("draft_len", "num_draft_tokens"),
    ("num_sequences", "num_return_sequences"),
];
