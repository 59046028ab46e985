//! How a profile is written down: rows of names, types and meanings.

use super::form::Form;
use super::reply::Cell;
use super::{Call, Profile, Row, RowReply, text, token, vllm};
use spec_core::tokenizer::Tokenizer;
use triton_backend::{DataType, Error};

/// What a setter makes of a value.
pub(super) type Checked<T = ()> = Result<T, Wrong>;

/// What is wrong with a value; who found it puts the name in front.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Wrong {
    /// The value must be another one.
    Value(String),
    /// It is understood, and not built.
    NotBuilt(String),
}

impl From<String> for Wrong {
    fn from(message: String) -> Self {
        Self::Value(message)
    }
}

impl Wrong {
    /// The same, of the field `name` of what is at fault.
    pub(super) fn of(self, name: &str) -> Self {
        match self {
            Self::Value(message) => Self::Value(format!("{name}: {message}")),
            Self::NotBuilt(why) => Self::NotBuilt(format!("{name}: {why}")),
        }
    }

    /// What the client is told of input `name`.
    pub(super) fn into_error(self, name: &str) -> Error {
        match self.of(name) {
            Self::Value(message) => Error::invalid_arg(message),
            Self::NotBuilt(message) => Error::unsupported(message),
        }
    }
}

/// An input tensor, and the request parameter of the same name.
pub(super) struct Input {
    pub(super) name: &'static str,
    pub(super) option: Opt,
    /// Whether every request must have it.
    pub(super) required: bool,
}

pub(super) const fn input(name: &'static str, option: Opt) -> Input {
    Input { name, option, required: false }
}

/// An option of a request, whatever a profile calls it.
#[derive(Clone, Copy)]
pub(super) struct Opt {
    pub(super) action: Action,
    pub(super) help: &'static str,
}

/// What is done with a value, and so what type it has.
#[derive(Clone, Copy)]
pub(super) enum Action {
    Flag(fn(&mut Form, bool) -> Checked),
    Int(fn(&mut Form, i64) -> Checked),
    Uint(fn(&mut Form, u64) -> Checked),
    Float(fn(&mut Form, f32) -> Checked),
    Text(fn(&mut Form, String) -> Checked),
    Ints(fn(&mut Form, Vec<i64>) -> Checked),
    Floats(fn(&mut Form, Vec<f32>) -> Checked),
    Texts(fn(&mut Form, Vec<String>) -> Checked),
    /// Token sequences: ids one after the other, then the offset behind each, -1 for none.
    Words(fn(&mut Form, Vec<Vec<i64>>) -> Checked),
    /// Any JSON; as a tensor or a parameter, its text.
    Json(fn(&mut Form, &serde_json::Value) -> Checked),
    /// Declared, so that clients hear of it, and refused when it is given.
    Refused(DataType, &'static [i64]),
}

impl Action {
    pub(super) fn datatype(&self) -> DataType {
        match self {
            Self::Flag(_) => DataType::Bool,
            Self::Int(_) | Self::Ints(_) | Self::Words(_) => DataType::Int32,
            Self::Uint(_) => DataType::Uint64,
            Self::Float(_) | Self::Floats(_) => DataType::Fp32,
            Self::Text(_) | Self::Texts(_) | Self::Json(_) => DataType::Bytes,
            Self::Refused(datatype, _) => *datatype,
        }
    }

    /// Whether tensors of a type are read, if a configuration declares it so: in TensorRT-LLM's templates of 2023, and
    /// clients of that time, token ids and counts have no sign.
    pub(super) fn reads(&self, datatype: DataType) -> bool {
        let unsigned = datatype == DataType::Uint32 && matches!(self, Self::Int(_) | Self::Ints(_));
        datatype == self.datatype() || unsigned
    }

    pub(super) fn dims(&self) -> &'static [i64] {
        match self {
            Self::Ints(_) | Self::Floats(_) | Self::Texts(_) => &[-1],
            Self::Words(_) => &[2, -1],
            Self::Refused(_, dims) => dims,
            _ => &[1],
        }
    }
}

/// The value of an output for a row of a response, if the response has it.
pub(super) type Fill = fn(&OutputSource) -> Option<Cell>;

/// What an output is made from.
pub(super) struct OutputSource<'a> {
    pub(super) call: &'a Call,
    pub(super) row: &'a Row,
    pub(super) reply: &'a RowReply,
    /// Of the prompt, as JSON.
    pub(super) prompt_log_probs: &'a str,
    pub(super) tokenizer: &'a Tokenizer,
}

/// How an output's values are laid out where a response holds several texts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Layout {
    /// One for each, by rows and sequences.
    Sequences,
    /// A list for each, by rows and sequences.
    Lists,
    /// One for each, however they belong together.
    Flat,
    /// One for each row, whose sequences have it in common.
    Rows,
}

/// An output tensor.
pub(super) struct Output {
    pub(super) name: &'static str,
    pub(super) datatype: DataType,
    /// As declared, without the batch dimension.
    pub(super) dims: &'static [i64],
    pub(super) layout: Layout,
    pub(super) cell: Fill,
    pub(super) help: &'static str,
}

impl Profile {
    /// Its inputs; each is a request parameter too.
    pub(super) fn inputs(self) -> &'static [Input] {
        match self {
            Self::Text => text::INPUTS,
            Self::Token => token::INPUTS,
            Self::Vllm => vllm::INPUTS,
        }
    }

    /// What is a request parameter only.
    pub(super) fn parameters(self) -> &'static [Input] {
        match self {
            Self::Text => &[],
            Self::Token => token::PARAMETERS,
            Self::Vllm => vllm::SAMPLING,
        }
    }

    /// Its outputs.
    pub(super) fn outputs(self) -> &'static [Output] {
        match self {
            Self::Text => text::OUTPUTS,
            Self::Token => token::OUTPUTS,
            Self::Vllm => vllm::OUTPUTS,
        }
    }

    /// Whether tensors have a batch dimension in front.
    pub(super) fn batches(self) -> bool {
        self != Self::Vllm
    }

    /// The client's name of a field of the core.
    pub(super) fn spell(self, field: &'static str) -> &'static str {
        let names = match self {
            Self::Text => text::SPELLING,
            Self::Token => token::SPELLING,
            Self::Vllm => vllm::SPELLING,
        };
        names.iter().find(|(core, _)| *core == field).map_or(field, |(_, client)| client)
    }
}
