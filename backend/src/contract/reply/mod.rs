//! What a response carries, and its tensors.

mod logprobs;
pub(super) mod outputs;

use super::table::{Layout, Output, OutputSource};
use super::{Call, Profile};
use spec_core::runtime::{Counters, Emitted, FinishReason};
use spec_core::tokenizer::Tokenizer;
use triton_backend::{DataType, Tensor};

pub use logprobs::PromptLogProbs;
pub(super) use logprobs::logprobs;

/// One response: what is new in one sequence, or in all of them, those of a row one after the other.
#[derive(Clone, Debug, Default)]
pub struct Reply {
    /// The sequences.
    pub rows: Vec<RowReply>,
    /// Log-probabilities of the prompt's tokens, in JSON, where they are wanted.
    pub prompt_log_probs: String,
}

/// What is new in a sequence.
#[derive(Clone, Debug, Default)]
pub struct RowReply {
    /// Index of its row in the call.
    pub row_idx: usize,
    /// Its index among the row's sequences.
    pub sequence_idx: usize,
    /// Text that became final.
    pub text: String,
    /// Tokens that came.
    pub emitted: Vec<Emitted>,
    /// Sum of the log-probabilities of all its tokens so far.
    pub cum_log_prob: f64,
    /// Whether it is the sequence's first: the prompt goes in front, where it is wanted.
    pub is_first: bool,
    /// Steps, drafts and pages so far.
    pub counters: Counters,
    /// What happened when, so far.
    pub times: Times,
    /// Why it ended, if it did, with this response or before it.
    pub finish: Option<FinishReason>,
}

/// Nanoseconds of one clock.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Times {
    /// The request came.
    pub arrival_ns: u64,
    /// A step took part of it.
    pub first_scheduled_ns: u64,
    /// Its first token came.
    pub first_token_ns: u64,
    /// Its last token came.
    pub last_token_ns: u64,
}

/// One output's value for one row.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Cell {
    Text(String),
    /// Values, and what fills up shorter rows.
    Ints(Vec<i64>, i64),
    Floats(Vec<f32>),
}

impl Cell {
    fn len(&self) -> usize {
        match self {
            Self::Text(_) => 1,
            Self::Ints(values, _) => values.len(),
            Self::Floats(values) => values.len(),
        }
    }

    /// Its elements in the bytes of `datatype`, filled up to `len`.
    fn write(&self, datatype: DataType, len: usize, data: &mut Vec<u8>) {
        match self {
            Self::Text(text) => {
                // A text is bounded by the tokens of a sequence, far below 4 GiB.
                data.extend_from_slice(&(text.len() as u32).to_le_bytes());
                data.extend_from_slice(text.as_bytes());
            }
            Self::Ints(values, pad) => {
                let padding = std::iter::repeat_n(pad, len - values.len());
                for value in values.iter().chain(padding) {
                    let bytes = value.to_le_bytes();
                    let width = if datatype == DataType::Int64 { 8 } else { 4 };
                    data.extend_from_slice(&bytes[..width]);
                }
            }
            Self::Floats(values) => {
                let padding = std::iter::repeat_n(&0.0, len - values.len());
                values
                    .iter()
                    .chain(padding)
                    .for_each(|value| data.extend_from_slice(&value.to_le_bytes()));
            }
        }
    }
}

/// The tensors of a response.
pub(super) fn outputs(
    profile: Profile,
    call: &Call,
    reply: &Reply,
    tokenizer: &Tokenizer,
) -> Vec<Tensor> {
    let prompt_log_probs = reply.prompt_log_probs.as_str();
    let sources = reply.rows.iter().map(|row_reply| {
        let row = call.rows.get(row_reply.row_idx)?;
        Some(OutputSource { call, row, reply: row_reply, prompt_log_probs, tokenizer })
    });
    let Some(sources) = sources.collect::<Option<Vec<_>>>() else {
        return Vec::new();
    };
    let tensors = profile.outputs().iter();
    tensors.filter_map(|output| tensor(profile, output, &sources)).collect()
}

/// An output is there when all sequences have it.
fn tensor(profile: Profile, output: &Output, sources: &[OutputSource]) -> Option<Tensor> {
    let rows: Vec<&[OutputSource]> =
        sources.chunk_by(|a, b| a.reply.row_idx == b.reply.row_idx).collect();
    let cells: Vec<Cell> = match output.layout {
        Layout::Rows => {
            rows.iter().map(|row| (output.cell)(row.first()?)).collect::<Option<_>>()?
        }
        Layout::Sequences | Layout::Lists | Layout::Flat => {
            sources.iter().map(output.cell).collect::<Option<_>>()?
        }
    };
    let len = cells.iter().map(Cell::len).max()?;
    let mut data = Vec::new();
    cells.iter().for_each(|cell| cell.write(output.datatype, len, &mut data));
    let shape = shape(profile, output, rows.len(), cells.len(), len);
    Some(Tensor { name: output.name.into(), datatype: output.datatype, shape, data })
}

/// Of `count` values of `len` elements each: rows, where there is a batch dimension; sequences of a row; elements.
fn shape(profile: Profile, output: &Output, rows: usize, count: usize, len: usize) -> Vec<i64> {
    let per_row = count / rows;
    let mut shape = match output.layout {
        Layout::Flat => vec![count],
        Layout::Sequences | Layout::Rows => vec![per_row],
        // Declared with one dimension: there are several lists only where there are several sequences.
        Layout::Lists if output.dims.len() == 1 && per_row == 1 => vec![len],
        Layout::Lists => vec![per_row, len],
    };
    if profile.batches() && output.layout != Layout::Flat {
        shape.insert(0, rows);
    }
    shape.into_iter().map(|dim| dim as i64).collect()
}
