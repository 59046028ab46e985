//! What a response carries, and its tensors.

pub(super) mod outputs;

use super::table::{Output, Scene};
use super::{Call, Profile};
use crate::triton::{DataType, Tensor};
use spec_core::batch::Emitted;
use spec_core::sequence::{Counters, FinishReason};
use spec_core::tokenizer::Tokenizer;

/// One response: where nothing is streamed every row once, with all it has; else what is new in one row.
#[derive(Clone, Debug, Default)]
pub struct Reply {
    /// Its rows.
    pub rows: Vec<RowReply>,
}

/// What is new in a row.
#[derive(Clone, Debug, Default)]
pub struct RowReply {
    /// Its index in the call.
    pub row_idx: usize,
    /// Text that became final.
    pub text: String,
    /// Tokens that came.
    pub emitted: Vec<Emitted>,
    /// Sum of the log-probabilities of all the row's tokens so far.
    pub cum_log_prob: f64,
    /// Whether it is the row's first: the prompt goes in front, where it is wanted.
    pub is_first: bool,
    /// How it ended, if it did.
    pub finish: Option<Finish>,
}

/// How a row ended.
#[derive(Clone, Debug, PartialEq)]
pub struct Finish {
    /// Why.
    pub reason: FinishReason,
    /// Steps and drafts.
    pub counters: Counters,
    /// When what happened.
    pub times: Times,
    /// KV pages that were taken from the free ones.
    pub pages_new: usize,
    /// KV pages that were shared with earlier prompts.
    pub pages_reused: usize,
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
    let scenes = reply.rows.iter().map(|row_reply| {
        let row = call.rows.get(row_reply.row_idx)?;
        Some(Scene { call, row, reply: row_reply, tokenizer })
    });
    let Some(scenes) = scenes.collect::<Option<Vec<_>>>() else {
        return Vec::new();
    };
    let tensors = profile.outputs().iter();
    tensors.filter_map(|output| tensor(profile, output, &scenes)).collect()
}

/// An output is there when all rows have it.
fn tensor(profile: Profile, output: &Output, scenes: &[Scene]) -> Option<Tensor> {
    let cells: Vec<Cell> = scenes.iter().map(output.cell).collect::<Option<_>>()?;
    let len = cells.iter().map(Cell::len).max()?;
    let mut data = Vec::new();
    cells.iter().for_each(|cell| cell.write(output.datatype, len, &mut data));
    let mut shape = vec![1; output.dims.len()];
    // One sequence a row: only the last dimension grows.
    *shape.last_mut()? = len as i64;
    if profile.batches() {
        shape.insert(0, cells.len() as i64);
    }
    Some(Tensor { name: output.name.into(), datatype: output.datatype, shape, data })
}
