//! The table of configuration parameters.

use super::Settings;
use super::value::{
    batching, boolean, branches, count, draft_len, fraction, gpus, isa, lookup, milliseconds,
    number, one_beam, only_true, parsed, policy, positive, prefill, profile, put, statistics,
    temperature_alone, when_full, when_too_long, write,
};

/// A parameter of the model configuration.
pub(crate) struct Key {
    pub(crate) name: &'static str,
    pub(crate) meaning: Meaning,
    pub(crate) values: &'static str,
    pub(crate) default: &'static str,
    pub(crate) help: &'static str,
}

/// What a key does.
pub(crate) enum Meaning {
    /// Changes the settings; an error says what is expected.
    Set(fn(&mut Settings, &str) -> Result<(), &'static str>),
    /// Known from TensorRT-LLM; why it cannot be honoured.
    Refused(&'static str),
}

const fn key(
    name: &'static str,
    values: &'static str,
    default: &'static str,
    set: fn(&mut Settings, &str) -> Result<(), &'static str>,
    help: &'static str,
) -> Key {
    Key { name, meaning: Meaning::Set(set), values, default, help }
}

const fn refused(name: &'static str, why: &'static str) -> Key {
    Key { name, meaning: Meaning::Refused(why), values: "", default: "", help: "" }
}

const NOT_TENSORRT: &str =
    "the engine lies in the model's version folder and is no TensorRT engine";
const ONE_DEVICE: &str = "an instance runs on one device, chosen by instance_group";
const NO_LORA: &str = "LoRA adapters are not built in";
const DRAFTER: &str = "how drafts are made is decided when the engine is built, see draft_len";
const TREES: &str = "a tree is of the likeliest tokens, see draft_branches and draft_tree_tokens";
const NO_WINDOW: &str = "attention always sees the whole sequence";
const NO_GUIDE: &str = "guided decoding is not built in";
const NO_HOST_CACHE: &str = "there is no second level of KV cache";
const NO_ENCODER: &str = "only decoder models are served";
const NOT_POLLED: &str = "nothing is polled on a timer: cancellation is seen at the next step";
const METRICS: &str = "statistics are Triton metrics";

/// Every known key.
pub(crate) static KEYS: &[Key] = &[
    key("profile", "`text`, `token`, `vllm`", "`text`", profile, "names of inputs and outputs"),
    key(
        "threads",
        "number",
        "physical cores / instances",
        |s, v| put(&mut s.threads, positive(v)),
        "threads of an instance on the CPU; without it the processors that the server may use and the time that its \
         control groups leave are shared out among the model's instances",
    ),
    key(
        "pin_threads",
        "`auto`, `on`, `off`",
        "`auto`",
        |s, v| write(&mut s.pin_threads, v.parse()),
        "bind each of those threads to a core of its own, where the CPU threads of all models and instances of the server \
         share none: `auto` if they leave no core over and there are several last caches, `on` always. On machines with \
         several memory nodes threads stay at theirs unless it is `off`",
    ),
    key(
        "isa",
        "`auto`, `portable`, `avx2`, `avx-vnni`, `avx512`, `amx`",
        "`auto`",
        isa,
        "instruction set of those threads: the best that the machine has, or one of the plainer ones",
    ),
    key(
        "draft_len",
        "`auto`, number",
        "`auto`",
        draft_len,
        "draft tokens in a step: chosen from acceptance and cost, or always this many; 0 decodes plainly",
    ),
    key(
        "lookup",
        "`off`, `ngram`, `suffix`",
        "as built; ahead of a model, a head or `skip` `ngram` where `draft_len` is `auto`, and `off` where it is a number",
        lookup,
        "where drafts are looked up, alone or ahead of the drafter that the engine was built with: in the text itself, or \
         also in what was lately read and written for requests with the same `cache_salt`, of which an instance keeps \
         524288 tokens, some 50 MB, unless the engine was built with another number; without `enable_kv_cache_reuse` nobody \
         looks at the texts of others",
    ),
    key(
        "ngram_branches",
        "number",
        "`1`",
        |s, v| write(&mut s.ngram_branches, positive(v)),
        "continuations that the look-up drafts side by side where the same tokens went on in several ways: the draft tokens \
         of a step are then a tree",
    ),
    key(
        "draft_branches",
        "1 to 16",
        "`1`",
        |s, v| write(&mut s.draft_branches, branches(v)),
        "branches that the drafts of a model or a head have at most, where it and its target are on the CPU or on one GPU: up to so \
         many times `num_draft_tokens` are verified. On the CPU drafts branch at every position, on a GPU up to so many chains part at \
         one position each, where that has brought the most so far; with `draft_len` at `auto` only where that is likely enough \
         to pay",
    ),
    key(
        "draft_tree_tokens",
        "number",
        "as many as the branches have",
        |s, v| put(&mut s.draft_tree_tokens, positive(v)),
        "tokens that a draft of a model or a head has at most in all of its branches: on the CPU the likeliest of all that was drafted, \
         on a GPU as many branches as that is enough for. A draft that is no shorter than that without branches has none",
    ),
    key(
        "kv_cache_free_gpu_mem_fraction",
        "0 to 1",
        "a quarter, on a GPU nine tenths",
        fraction,
        "part of the memory that weights and workspace leave free, for the KV cache",
    ),
    key(
        "max_tokens_in_paged_kv_cache",
        "number",
        "no limit",
        |s, v| put(&mut s.max_kv_tokens, positive(v)),
        "tokens that the KV cache holds at most",
    ),
    key(
        "batch_scheduler_policy",
        "`guaranteed_no_evict`, `max_utilization`",
        "`guaranteed_no_evict`",
        policy,
        "whether a request waits until all of it fits, or may be paused and computed again",
    ),
    key(
        "max_queue_size",
        "number",
        "`1024`",
        |s, v| write(&mut s.max_queue_size, positive(v)),
        "requests that may wait; `dynamic_batching` may bound them by priority too",
    ),
    key(
        "when_full",
        "`refuse`, `hold_back`",
        "`refuse`",
        when_full,
        "what becomes of more requests than may wait: they are answered with UNAVAILABLE; or Triton is held back, so that \
         they wait in its queue and are refused by that, which the generate endpoint tells with status 503 in place of \
         400. Stop requests and priorities then have no effect on what is in Triton's queue",
    ),
    key(
        "max_running",
        "number",
        "the engine's `max_batch_size`",
        |s, v| put(&mut s.max_running, positive(v)),
        "sequences that an instance runs at once; `max_batch_size` of the configuration bounds the rows of one request",
    ),
    key(
        "enable_kv_cache_reuse",
        "boolean",
        "`true`",
        |s, v| write(&mut s.kv_reuse, boolean(v)),
        "share the KV cache of equal prompt beginnings",
    ),
    key(
        "enable_chunked_context",
        "`true`",
        "`true`",
        only_true,
        "prompts are always computed in chunks",
    ),
    key(
        "max_num_tokens",
        "number",
        "128, or twice what runs at once (`max_running`) if that is more; on a GPU what the engine was built for",
        |s, v| put(&mut s.max_num_tokens, positive(v)),
        "rows of a step at most",
    ),
    key(
        "gpu_device_ids",
        "numbers separated by `;`",
        "the first GPU",
        |s, v| write(&mut s.gpus, gpus(v)),
        "GPUs of the instances that `instance_group` does not place on one (`KIND_CPU`, `KIND_MODEL`), in turn, where \
         the engine is built for GPUs",
    ),
    key(
        "draft_gpu",
        "number",
        "that of the instance",
        |s, v| put(&mut s.draft_gpu, count(v)),
        "GPU of a drafter that was built for GPUs, for Medusa heads that of the target; one that was built for the CPU \
         (`spec-build --draft-device cpu`) runs there",
    ),
    key(
        "prefill",
        "`auto`, `exact`, `blocks`, `cublaslt`",
        "`auto`",
        prefill,
        "how long prompts are computed on a GPU: `exact`, as in decoding; `blocks`, faster, in blocks of 512 positions, on GPUs \
         of compute capability 9.0; `cublaslt`, in such blocks by cuBLASLt of CUDA 13; `auto`, in blocks where one of the two \
         is there and a step has 512 rows. A text is the same whatever else is computed or cached; the three ways may give \
         different ones",
    ),
    key(
        "launch_ahead",
        "boolean",
        "`true`",
        |s, v| write(&mut s.launch_ahead, boolean(v)),
        "on a GPU, begin the next step before the host has seen what the last one brought; has no effect where \
         look-up is the only drafter, beside heads, and where drafts branch",
    ),
    key(
        "exclude_input_in_output",
        "boolean",
        "`true`, token `false`",
        |s, v| put(&mut s.exclude_prompt, boolean(v)),
        "leave the prompt out of the output where a request does not say (text and token profile); it is never streamed",
    ),
    key(
        "when_too_long",
        "`clamp`, `refuse`",
        "`clamp`",
        when_too_long,
        "what becomes of a request for more tokens than fit behind its prompt: it gets those that fit, and `length` as \
         its finish reason; or it is refused",
    ),
    key(
        "temperature_alone",
        "`draws`, `greedy`",
        "`draws`",
        temperature_alone,
        "what a temperature means where neither top-k nor top-p nor min-p is given: tokens are drawn from all, or the \
         likeliest is taken, as TensorRT-LLM does (text and token profile)",
    ),
    key(
        "report_kv_cache_reuse",
        "boolean",
        "`true`",
        |s, v| write(&mut s.report_reuse, boolean(v)),
        "whether `return_perf_metrics` tells how many KV pages were found computed, by which a client may learn what \
         others have sent; see `cache_salt` too, which also keeps it from being told by the time that a prompt takes",
    ),
    key(
        "default_max_tokens",
        "number",
        "`256`, vllm `16`",
        |s, v| put(&mut s.default_max_tokens, positive(v)),
        "tokens to generate where a request does not say; cut to what fits after the prompt",
    ),
    key(
        "default_temperature",
        "0 to 100",
        "`0`, vllm `1`",
        |s, v| put(&mut s.sampling.temperature, number(v)),
        "temperature where a request does not say",
    ),
    key(
        "default_top_k",
        "number",
        "`0`",
        |s, v| put(&mut s.sampling.top_k, count(v)),
        "top-k where a request does not say",
    ),
    key(
        "default_top_p",
        "above 0, at most 1",
        "`1`",
        |s, v| put(&mut s.sampling.top_p, number(v)),
        "top-p where a request does not say",
    ),
    key(
        "default_min_p",
        "0 to 1",
        "`0`",
        |s, v| put(&mut s.sampling.min_p, number(v)),
        "min-p where a request does not say",
    ),
    key(
        "default_repetition_penalty",
        "above 0, at most 100",
        "`1`",
        |s, v| put(&mut s.sampling.repetition_penalty, number(v)),
        "repetition penalty where a request does not say",
    ),
    key(
        "default_presence_penalty",
        "-2 to 2",
        "`0`",
        |s, v| put(&mut s.sampling.presence_penalty, number(v)),
        "presence penalty where a request does not say",
    ),
    key(
        "default_frequency_penalty",
        "-2 to 2",
        "`0`",
        |s, v| put(&mut s.sampling.frequency_penalty, number(v)),
        "frequency penalty where a request does not say",
    ),
    key(
        "default_seed",
        "number",
        "none",
        |s, v| {
            put(&mut s.sampling.seed, parsed(v, "a whole number from 0 to 18446744073709551615"))
        },
        "seed where a request does not say",
    ),
    key(
        "request_timeout_ms",
        "number",
        "`0`",
        |s, v| write(&mut s.request_timeout_ms, milliseconds(v)),
        "longest time of any request in milliseconds; 0 sets no limit",
    ),
    key(
        "response_statistics",
        "`off`, `ends`, `all`",
        "`ends`",
        statistics,
        "responses that Triton counts by index: none, the first and last of a request, or every one",
    ),
    key(
        "verify_engine",
        "boolean",
        "`false`",
        |s, v| write(&mut s.verify_engine, boolean(v)),
        "check the hashes of the engine's sections when it is loaded",
    ),
    key(
        "drain_timeout_ms",
        "number",
        "`10000`",
        |s, v| write(&mut s.drain_timeout_ms, milliseconds(v)),
        "how long an instance that is taken away, or whose server ends, may finish its requests; of a server's \
         `--exit-timeout-secs` at most half",
    ),
    key(
        "gpt_model_type",
        "`inflight_batching`, `inflight_fused_batching`",
        "`inflight_fused_batching`",
        batching,
        "accepted from TensorRT-LLM's configurations; batching is always in flight",
    ),
    key("max_beam_width", "`1`", "`1`", one_beam, "accepted from TensorRT-LLM's configurations"),
    key(
        "FORCE_CPU_ONLY_INPUT_TENSORS",
        "any",
        "",
        |_, _| Ok(()),
        "accepted from TensorRT-LLM's configurations; inputs are always read on the host",
    ),
    refused(
        "normalize_log_probs",
        "log-probabilities are the model's own, never divided by the length",
    ),
    refused("gpt_model_path", NOT_TENSORRT),
    refused("encoder_model_path", NO_ENCODER),
    refused("executor_worker_path", NOT_TENSORRT),
    refused("tokenizer_dir", "the tokenizer lies in the model's version folder"),
    refused("participant_ids", ONE_DEVICE),
    refused("num_nodes", ONE_DEVICE),
    refused("gpu_weights_percent", "all weights are held on the device"),
    refused("max_attention_window_size", NO_WINDOW),
    refused("sink_token_length", NO_WINDOW),
    refused("cross_kv_cache_fraction", NO_ENCODER),
    refused("kv_cache_host_memory_bytes", NO_HOST_CACHE),
    refused("kv_cache_onboard_blocks", NO_HOST_CACHE),
    refused("enable_trt_overlap", NOT_TENSORRT),
    refused("enable_context_fmha_fp32_acc", "attention always sums in FP32"),
    refused("multi_block_mode", NOT_TENSORRT),
    refused("cuda_graph_mode", NOT_TENSORRT),
    refused("cuda_graph_cache_size", NOT_TENSORRT),
    refused("cancellation_check_period_ms", NOT_POLLED),
    refused("stats_check_period_ms", METRICS),
    refused("recv_poll_period_ms", NOT_POLLED),
    refused("iter_stats_max_iterations", METRICS),
    refused("request_stats_max_iterations", METRICS),
    refused("lora_cache_optimal_adapter_size", NO_LORA),
    refused("lora_cache_max_adapter_size", NO_LORA),
    refused("lora_cache_gpu_memory_fraction", NO_LORA),
    refused("lora_cache_host_memory_bytes", NO_LORA),
    refused("lora_prefetch_dir", NO_LORA),
    refused("decoding_mode", "sampling is chosen by each request, drafts when the engine is built"),
    refused("lookahead_window_size", DRAFTER),
    refused("lookahead_ngram_size", DRAFTER),
    refused("lookahead_verification_set_size", DRAFTER),
    refused("medusa_choices", TREES),
    refused("eagle_choices", TREES),
    refused("speculative_decoding_fast_logits", "drafts never leave the engine"),
    refused("guided_decoding_backend", NO_GUIDE),
    refused("xgrammar_tokenizer_info_path", NO_GUIDE),
    refused("accumulate_tokens", "each streamed response holds what is new"),
    refused("tensorrt_llm_model_name", "there is one model, not an ensemble"),
    refused("tensorrt_llm_draft_model_name", DRAFTER),
    refused("multimodal_encoders_name", NO_ENCODER),
];
