//! The outputs that profiles share.

use super::{Cell, RowReply};
use crate::contract::Echo;
use crate::contract::table::{Fill, Layout, Output, OutputSource};
use spec_core::runtime::FinishReason;
use triton_backend::DataType;

/// How a text ended, as clients know it.
pub(crate) fn reason(finish: FinishReason) -> &'static str {
    match finish {
        FinishReason::Stop(_) | FinishReason::StopWord => "stop",
        FinishReason::Length => "length",
        FinishReason::Cancelled => "cancelled",
        // Told to clients as errors.
        FinishReason::Deadline | FinishReason::Failed => "error",
    }
}

pub(crate) fn ints(values: Vec<i64>) -> Option<Cell> {
    Some(Cell::Ints(values, 0))
}

pub(crate) fn float(value: f32) -> Option<Cell> {
    Some(Cell::Floats(vec![value]))
}

pub(crate) fn count(value: impl TryInto<i64>) -> Option<Cell> {
    // What is counted is bounded by the tokens of a sequence; times last until the year 2262.
    ints(vec![value.try_into().unwrap_or(i64::MAX)])
}

/// What was counted and measured so far, where perf metrics are wanted.
fn perf<'a>(source: &OutputSource<'a>) -> Option<&'a RowReply> {
    source.call.report.perf_metrics.then_some(source.reply)
}

pub(crate) const fn output(
    name: &'static str,
    datatype: DataType,
    dims: &'static [i64],
    cell: Fill,
    help: &'static str,
) -> Output {
    Output { name, datatype, dims, layout: Layout::Sequences, cell, help }
}

pub(crate) const fn lists(
    name: &'static str,
    datatype: DataType,
    dims: &'static [i64],
    cell: Fill,
    help: &'static str,
) -> Output {
    Output { layout: Layout::Lists, ..output(name, datatype, dims, cell, help) }
}

pub(crate) const fn one_int(name: &'static str, cell: Fill, help: &'static str) -> Output {
    output(name, DataType::Int32, &[1], cell, help)
}

const fn time(name: &'static str, cell: Fill, help: &'static str) -> Output {
    output(name, DataType::Int64, &[1], cell, help)
}

pub(crate) const TEXT_OUTPUT: Output = Output {
    name: "text_output",
    datatype: DataType::Bytes,
    dims: &[-1],
    layout: Layout::Flat,
    cell: |source| {
        let text = source.reply.text.as_str();
        Some(Cell::Text(match &source.row.echo {
            Echo::Text(prompt) if source.reply.is_first => format!("{prompt}{text}"),
            _ => text.to_string(),
        }))
    },
    help: "the text; of a streamed response what is new. Its shape is the number of texts alone",
};
pub(crate) const CUM_LOG_PROBS: Output = output(
    "cum_log_probs",
    DataType::Fp32,
    &[-1],
    |source| source.call.report.cum_log_probs.then(|| float(source.reply.cum_log_prob as f32))?,
    "`return_log_probs`: sum of the log-probabilities of all tokens so far",
);
pub(crate) const OUTPUT_LOG_PROBS: Output = lists(
    "output_log_probs",
    DataType::Fp32,
    &[-1, -1],
    |source| {
        let log_probs = source.reply.emitted.iter().map(|emitted| emitted.logprob.unwrap_or(0.0));
        source.call.report.log_probs.then(|| Cell::Floats(log_probs.collect()))
    },
    "`return_log_probs`: log-probabilities of this response's tokens; shorter rows are filled up with 0",
);
pub(crate) const FINISH_REASON: Output = output(
    "finish_reason",
    DataType::Bytes,
    &[-1],
    |source| {
        let finish = source.reply.finish.filter(|_| source.call.report.finish_reason)?;
        Some(Cell::Text(reason(finish).into()))
    },
    "`return_finish_reason`: `stop`, `length` or `cancelled`, on the last response",
);
pub(crate) const NUM_INPUT_TOKENS: Output = Output {
    layout: Layout::Rows,
    ..one_int(
        "num_input_tokens",
        |source| source.call.report.num_input_tokens.then(|| count(source.row.prompt_len))?,
        "`return_num_input_tokens`: tokens of the prompt",
    )
};
pub(crate) const NUM_OUTPUT_TOKENS: Output = one_int(
    "num_output_tokens",
    |source| source.call.report.num_output_tokens.then(|| count(source.reply.emitted.len()))?,
    "`return_num_output_tokens`: tokens of this response",
);
pub(crate) const BATCH_INDEX: Output = one_int(
    "batch_index",
    |source| (source.call.rows.len() > 1).then(|| count(source.reply.row_idx))?,
    "the row that the response belongs to, from 0, where the request has several",
);
pub(crate) const SEQUENCE_INDEX: Output = one_int(
    "sequence_index",
    |source| source.call.has_several().then(|| count(source.reply.sequence_idx))?,
    "which of the row's texts the response holds, from 0, where the request has several rows or texts",
);
pub(crate) const ACCEPTANCE_RATE: Output = output(
    "acceptance_rate",
    DataType::Fp32,
    &[1],
    |source| {
        let counters = &perf(source)?.counters;
        float(counters.accepted as f32 / counters.drafted.max(1) as f32)
    },
    "`return_perf_metrics`: accepted of the draft tokens, 0 to 1; 0 where there were none",
);
pub(crate) const TOTAL_ACCEPTED_DRAFT_TOKENS: Output = one_int(
    "total_accepted_draft_tokens",
    |source| count(perf(source)?.counters.accepted),
    "`return_perf_metrics`: draft tokens that were accepted",
);
pub(crate) const TOTAL_DRAFT_TOKENS: Output = one_int(
    "total_draft_tokens",
    |source| count(perf(source)?.counters.drafted),
    "`return_perf_metrics`: draft tokens that were verified",
);
pub(crate) const NUM_SPEC_STEPS: Output = one_int(
    "num_spec_steps",
    |source| count(perf(source)?.counters.steps),
    "`return_perf_metrics`: steps that gave tokens, the prompt's included",
);
pub(crate) const ACCEPTANCE_HISTOGRAM: Output = lists(
    "acceptance_histogram",
    DataType::Int32,
    &[-1],
    |source| {
        let histogram = perf(source)?.counters.histogram();
        ints(histogram.into_iter().map(|count| count as i64).collect())
    },
    "`return_perf_metrics`: steps that accepted exactly 0, 1, 2, ... draft tokens; they add up to `num_spec_steps`",
);
pub(crate) const KV_CACHE_ALLOC_NEW_BLOCKS: Output = one_int(
    "kv_cache_alloc_new_blocks",
    |source| count(perf(source)?.counters.new_pages),
    "`return_perf_metrics`: KV pages taken from the free ones",
);
pub(crate) const KV_CACHE_REUSED_BLOCKS: Output = one_int(
    "kv_cache_reused_blocks",
    |source| count(perf(source)?.counters.reused_pages),
    "`return_perf_metrics`: KV pages shared with earlier prompts",
);
pub(crate) const KV_CACHE_ALLOC_TOTAL_BLOCKS: Output = one_int(
    "kv_cache_alloc_total_blocks",
    |source| {
        let counters = &perf(source)?.counters;
        count(counters.new_pages + counters.reused_pages)
    },
    "`return_perf_metrics`: KV pages, new and shared",
);
pub(crate) const ARRIVAL_TIME_NS: Output = time(
    "arrival_time_ns",
    |source| count(perf(source)?.times.arrival_ns),
    "`return_perf_metrics`: when the request came, in nanoseconds",
);
pub(crate) const FIRST_SCHEDULED_TIME_NS: Output = time(
    "first_scheduled_time_ns",
    |source| count(perf(source)?.times.first_scheduled_ns),
    "`return_perf_metrics`: when the first step took part of it",
);
pub(crate) const FIRST_TOKEN_TIME_NS: Output = time(
    "first_token_time_ns",
    |source| count(perf(source)?.times.first_token_ns),
    "`return_perf_metrics`: when its first token came",
);
pub(crate) const LAST_TOKEN_TIME_NS: Output = time(
    "last_token_time_ns",
    |source| count(perf(source)?.times.last_token_ns),
    "`return_perf_metrics`: when its last token came",
);
