//! The outputs that profiles share.

use super::{Cell, Finish, RowReply};
use crate::contract::table::Output;
use crate::contract::{Call, Echo, Row};
use crate::triton::DataType;
use spec_core::sequence::FinishReason;

/// The text of a response, the prompt in front of the first where it is wanted.
pub(crate) fn text(row: &Row, reply: &RowReply) -> String {
    match &row.echo {
        Echo::Text(prompt) if reply.is_first => format!("{prompt}{}", reply.text),
        _ => reply.text.clone(),
    }
}

/// How a text ended, as clients know it.
pub(crate) fn reason(finish: &Finish) -> &'static str {
    match finish.reason {
        FinishReason::Stop(_) | FinishReason::StopWord => "stop",
        FinishReason::Length => "length",
        FinishReason::Cancelled => "cancelled",
        // Told to clients as errors.
        FinishReason::Deadline | FinishReason::Failed => "error",
    }
}

fn ints(values: Vec<i64>) -> Option<Cell> {
    Some(Cell::Ints(values, 0))
}

fn float(value: f32) -> Option<Cell> {
    Some(Cell::Floats(vec![value]))
}

fn count(value: impl TryInto<i64>) -> Option<Cell> {
    // What is counted is bounded by the tokens of a sequence; times last until the year 2262.
    ints(vec![value.try_into().unwrap_or(i64::MAX)])
}

/// How it ended, where perf metrics are wanted.
fn perf<'a>(call: &Call, reply: &'a RowReply) -> Option<&'a Finish> {
    reply.finish.as_ref().filter(|_| call.report.perf_metrics)
}

/// Steps by the number of draft tokens that they accepted.
fn histogram(finish: &Finish) -> Vec<i64> {
    let counters = &finish.counters;
    let reached: Vec<u64> = std::iter::once(counters.steps)
        .chain(counters.accepted_per_position.iter().copied())
        .collect();
    let further = reached[1..].iter().copied().chain([0]);
    reached.iter().zip(further).map(|(at, next)| at.saturating_sub(next) as i64).collect()
}

type Fill = fn(&Call, &Row, &RowReply) -> Option<Cell>;

const fn output(
    name: &'static str,
    datatype: DataType,
    dims: &'static [i64],
    cell: Fill,
    help: &'static str,
) -> Output {
    Output { name, datatype, dims, cell, help }
}

const fn one_int(name: &'static str, cell: Fill, help: &'static str) -> Output {
    output(name, DataType::Int32, &[1], cell, help)
}

const fn time(name: &'static str, cell: Fill, help: &'static str) -> Output {
    output(name, DataType::Int64, &[1], cell, help)
}

pub(crate) const CUM_LOG_PROBS: Output = output(
    "cum_log_probs",
    DataType::Fp32,
    &[-1],
    |call, _, reply| call.report.cum_log_probs.then(|| float(reply.cum_log_prob as f32))?,
    "`return_log_probs`: sum of the log-probabilities of all tokens so far",
);
pub(crate) const OUTPUT_LOG_PROBS: Output = output(
    "output_log_probs",
    DataType::Fp32,
    &[-1, -1],
    |call, _, reply| {
        let log_probs = reply.emitted.iter().map(|emitted| emitted.logprob.unwrap_or(0.0));
        call.report.log_probs.then(|| Cell::Floats(log_probs.collect()))
    },
    "`return_log_probs`: log-probabilities of this response's tokens; shorter rows are filled up with 0",
);
pub(crate) const FINISH_REASON: Output = output(
    "finish_reason",
    DataType::Bytes,
    &[-1],
    |call, _, reply| {
        let finish = reply.finish.as_ref().filter(|_| call.report.finish_reason)?;
        Some(Cell::Text(reason(finish).into()))
    },
    "`return_finish_reason`: `stop`, `length` or `cancelled`, on the last response",
);
pub(crate) const NUM_INPUT_TOKENS: Output = one_int(
    "num_input_tokens",
    |call, row, _| call.report.num_input_tokens.then(|| count(row.prompt_len))?,
    "`return_num_input_tokens`: tokens of the prompt",
);
pub(crate) const NUM_OUTPUT_TOKENS: Output = one_int(
    "num_output_tokens",
    |call, _, reply| call.report.num_output_tokens.then(|| count(reply.emitted.len()))?,
    "`return_num_output_tokens`: tokens of this response",
);
pub(crate) const BATCH_INDEX: Output = one_int(
    "batch_index",
    |call, _, reply| (call.rows.len() > 1).then(|| count(reply.row_idx))?,
    "the row that the response belongs to, where the request has several",
);
pub(crate) const SEQUENCE_INDEX: Output = one_int(
    "sequence_index",
    |call, _, _| (call.rows.len() > 1).then(|| count(0))?,
    "0, where the request has several rows",
);
pub(crate) const ACCEPTANCE_RATE: Output = output(
    "acceptance_rate",
    DataType::Fp32,
    &[1],
    |call, _, reply| {
        let counters = &perf(call, reply)?.counters;
        float(counters.accepted as f32 / counters.drafted.max(1) as f32)
    },
    "accepted of the draft tokens, 0 to 1; 0 where there were none",
);
pub(crate) const TOTAL_ACCEPTED_DRAFT_TOKENS: Output = one_int(
    "total_accepted_draft_tokens",
    |call, _, reply| count(perf(call, reply)?.counters.accepted),
    "draft tokens that were accepted",
);
pub(crate) const TOTAL_DRAFT_TOKENS: Output = one_int(
    "total_draft_tokens",
    |call, _, reply| count(perf(call, reply)?.counters.drafted),
    "draft tokens that were verified",
);
pub(crate) const NUM_SPEC_STEPS: Output = one_int(
    "num_spec_steps",
    |call, _, reply| count(perf(call, reply)?.counters.steps),
    "steps that gave tokens, the prompt's included",
);
pub(crate) const ACCEPTANCE_HISTOGRAM: Output = output(
    "acceptance_histogram",
    DataType::Int32,
    &[-1],
    |call, _, reply| ints(histogram(perf(call, reply)?)),
    "steps that accepted exactly 0, 1, 2, ... draft tokens; they add up to `num_spec_steps`",
);
pub(crate) const KV_CACHE_ALLOC_NEW_BLOCKS: Output = one_int(
    "kv_cache_alloc_new_blocks",
    |call, _, reply| count(perf(call, reply)?.pages_new),
    "KV pages taken from the free ones",
);
pub(crate) const KV_CACHE_REUSED_BLOCKS: Output = one_int(
    "kv_cache_reused_blocks",
    |call, _, reply| count(perf(call, reply)?.pages_reused),
    "KV pages shared with earlier prompts",
);
pub(crate) const KV_CACHE_ALLOC_TOTAL_BLOCKS: Output = one_int(
    "kv_cache_alloc_total_blocks",
    |call, _, reply| {
        let finish = perf(call, reply)?;
        count(finish.pages_new.saturating_add(finish.pages_reused))
    },
    "KV pages, new and shared",
);
pub(crate) const ARRIVAL_TIME_NS: Output = time(
    "arrival_time_ns",
    |call, _, reply| count(perf(call, reply)?.times.arrival_ns),
    "when the request came, in nanoseconds",
);
pub(crate) const FIRST_SCHEDULED_TIME_NS: Output = time(
    "first_scheduled_time_ns",
    |call, _, reply| count(perf(call, reply)?.times.first_scheduled_ns),
    "when the first step took part of it",
);
pub(crate) const FIRST_TOKEN_TIME_NS: Output = time(
    "first_token_time_ns",
    |call, _, reply| count(perf(call, reply)?.times.first_token_ns),
    "when its first token came",
);
pub(crate) const LAST_TOKEN_TIME_NS: Output = time(
    "last_token_time_ns",
    |call, _, reply| count(perf(call, reply)?.times.last_token_ns),
    "when its last token came",
);
