//! How a profile is written down: rows of names, types and meanings.

use super::form::Form;
use super::reply::Cell;
use super::{Call, Profile, Row, RowReply, text};
use crate::triton::DataType;

/// What a setter makes of a value: an error says what is wrong with it.
pub(super) type Checked<T = ()> = Result<T, String>;

/// An input tensor, and the request parameter of the same name.
pub(super) struct Input {
    pub(super) name: &'static str,
    pub(super) option: Opt,
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
            Self::Text(_) | Self::Texts(_) => DataType::Bytes,
            Self::Refused(datatype, _) => *datatype,
        }
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

/// An output tensor.
pub(super) struct Output {
    pub(super) name: &'static str,
    pub(super) datatype: DataType,
    pub(super) dims: &'static [i64],
    pub(super) cell: fn(&Call, &Row, &RowReply) -> Option<Cell>,
    pub(super) help: &'static str,
}

impl Profile {
    /// Its inputs.
    pub(super) fn inputs(self) -> &'static [Input] {
        match self {
            Self::Text => text::INPUTS,
            Self::Token => text::INPUTS,
            Self::Vllm => text::INPUTS,
        }
    }

    /// Its outputs.
    pub(super) fn outputs(self) -> &'static [Output] {
        text::OUTPUTS
    }

    /// Whether tensors have a batch dimension in front.
    pub(super) fn batches(self) -> bool {
        self != Self::Vllm
    }

    /// The client's name of a field of the core.
    pub(super) fn spell(self, field: &'static str) -> &'static str {
        let names = match self {
            Self::Text => text::SPELLING,
            Self::Token => text::SPELLING,
            Self::Vllm => text::SPELLING,
        };
        names.iter().find(|(core, _)| *core == field).map_or(field, |(_, client)| client)
    }
}
