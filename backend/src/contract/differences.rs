//! Where a profile does otherwise than the backend whose names it takes, for the users' reference.

/// What, here, there, why.
type Difference = [&'static str; 4];

/// From TensorRT-LLM's backend, in the text and token profiles.
pub(super) const FROM_TENSORRT_LLM: &[Difference] = &[
    [
        "a temperature without top-k, top-p and min-p",
        "tokens are drawn from all",
        "the likeliest token is taken",
        "a temperature asks for draws; `temperature_alone = greedy` does as there",
    ],
    [
        "`end_id`",
        "one more token that ends the text",
        "takes the place of the model's end token",
        "clients send that of another model (50256), and the text would not end; `-1` and `ignore_eos` do as there",
    ],
    [
        "`min_tokens`, `min_length`",
        "hold back end tokens, `end_id` and stop words",
        "hold back `end_id`",
        "whatever ends a text counts",
    ],
    [
        "prompt in the output, text profile",
        "left out unless asked for (parameter `exclude_input_in_output`)",
        "included unless said",
        "what Triton's OpenAI frontend and load generators expect; the token profile does as there",
    ],
    [
        "`stop_words`",
        "the text ends before them, also across tokens",
        "the text ends with them, where they are split into the same tokens",
        "no text of a stop word is ever sent; the token profile's `stop_words_list` does as there",
    ],
    [
        "`bad_words`, `stop_words`, biased words",
        "at most 1024 (stop words 256) of 1024 bytes, 256 KiB in all rows",
        "no limits",
        "splitting them takes time that other requests wait for",
    ],
    [
        "`presence_penalty`, `frequency_penalty`",
        "count the output",
        "count the prompt too",
        "as OpenAI defines them, and vLLM does",
    ],
    [
        "`temperature` and the penalties",
        "penalties change the model's scores, and the temperature divides what comes of it",
        "the temperature divides the scores first",
        "as in vLLM: a penalty means the same at any temperature",
    ],
    [
        "log-probabilities",
        "of the model, before temperature and penalties",
        "after temperature and penalties",
        "they say what the model thinks, and speculation does not change them",
    ],
    [
        "a draft (`draft_input_ids`)",
        "at most `max_draft_len`, 16 without a drafter; without loss, `draft_logits` and thresholds are refused",
        "as many as the engine takes; with logits, or a threshold",
        "the output's distribution is the target's",
    ],
    [
        "rows of a request",
        "as many as `max_batch_size`, decoupled or not; rows with the same beginning share its KV cache",
        "several only where the model is decoupled",
        "nothing stands against it",
    ],
    [
        "performance metrics",
        "speculation's histogram and steps too; counts of found pages can be hidden",
        "acceptance rate, draft tokens, KV pages, times",
        "operators want to see what speculation does, and may not want tenants to see each other",
    ],
    [
        "errors",
        "INVALID_ARG, UNSUPPORTED, UNAVAILABLE, CANCELLED, with the name of what is at fault",
        "INTERNAL, and none for what was cancelled",
        "clients can tell their own faults from the server's. Triton's generate endpoint answers each with status 400",
    ],
    [
        "unknown inputs and request parameters",
        "refused by name, but for a list of those that clients of TensorRT-LLM send",
        "parameters are not looked at",
        "a misspelt option is an error",
    ],
    [
        "`priority`, deadlines, cancellation",
        "hold from arrival to the last token",
        "hold in Triton's queue; cancellation is looked at every 100 ms",
        "a request that nobody waits for costs nothing",
    ],
    [
        "beams, LoRA, guided decoding, embeddings, encoders",
        "declared, and refused when given",
        "built in",
        "not built in",
    ],
];

/// From Triton's vLLM backend.
pub(super) const FROM_VLLM: &[Difference] = &[
    [
        "a seed",
        "the same text whatever else runs, with any drafter",
        "the same text under the same load",
        "drafter and target share their noise",
    ],
    [
        "request parameters beside `sampling_parameters`",
        "hold where that does not say otherwise",
        "are not looked at",
        "nothing that a client says is dropped in silence",
    ],
    [
        "a request that fails",
        "an error alone",
        "an error, and `N/A` as its text",
        "an error has no text",
    ],
    [
        "`prompt_logprobs`",
        "output `prompt_logprobs`, JSON",
        "asked for by the sampling option, and not sent",
        "what is asked for is sent",
    ],
    [
        "`bad_words`",
        "token sequences as the words are split",
        "also as they are split behind a space",
        "what is banned is what is written; name both where both are meant",
    ],
    [
        "`min_p` beside `top_k` and `top_p`",
        "cuts what these leave",
        "cuts first, and these cut what it leaves",
        "one order for all profiles",
    ],
    [
        "`priority` (sampling option there: none)",
        "input and request parameter, in all profiles",
        "of the engine's scheduler, not of requests of Triton",
        "levels of `dynamic_batching`",
    ],
    [
        "beam search, LoRA, guided decoding, images, embeddings",
        "declared, and refused when given",
        "built in",
        "not built in",
    ],
];
