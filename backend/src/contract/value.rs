//! Bytes of tensors and values of parameters, as typed values. Nothing about either is trusted.

use super::form::{Form, excerpt};
use super::table::{Action, Checked, Wrong};
use serde_json::Value as Json;
use std::borrow::Cow;
use triton_backend::{DataType, Parameter, Tensor};
use triton_backend::{Error, Result};

/// Most bytes of JSON that are read: in memory they take dozens of times as many. Prompts are no JSON here.
const MAX_JSON_BYTES: usize = 4 << 20;

/// The elements of one row of an input.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Value {
    Flags(Vec<bool>),
    Ints(Vec<i64>),
    Uints(Vec<u64>),
    Floats(Vec<f32>),
    Texts(Vec<String>),
    Json(Json),
}

impl Value {
    /// Gives it to the form.
    pub(super) fn apply(self, action: &Action, form: &mut Form) -> Checked {
        match (action, self) {
            (Action::Flag(set), Self::Flags(v)) => set(form, one(v)?),
            (Action::Int(set), Self::Ints(v)) => set(form, one(v)?),
            (Action::Uint(set), Self::Uints(v)) => set(form, one(v)?),
            (Action::Float(set), Self::Floats(v)) => set(form, one(v)?),
            (Action::Text(set), Self::Texts(v)) => set(form, one(v)?),
            (Action::Ints(set), Self::Ints(v)) => set(form, v),
            (Action::Floats(set), Self::Floats(v)) => set(form, v),
            (Action::Texts(set), Self::Texts(v)) => set(form, v),
            (Action::Words(set), Self::Ints(v)) => set(form, words(&v)?),
            (Action::Json(set), Self::Texts(v)) => set(form, &json(&one(v)?)?),
            (Action::Json(set), Self::Json(json)) => set(form, &json),
            (action, _) => Err(format!("is no {}", action.datatype().config_name()).into()),
        }
    }

    /// A parameter, or a field of a JSON object, as what `action` takes. Strings may hold numbers and lists.
    pub(super) fn from_json(json: &Json, action: &Action) -> Checked<Self> {
        Ok(match action {
            Action::Flag(_) => Self::Flags(vec![flag(json)?]),
            Action::Int(_) => Self::Ints(vec![number(json, "a whole number", Json::as_i64)?]),
            Action::Uint(_) => {
                Self::Uints(vec![number(json, "a whole number of at least 0", Json::as_u64)?])
            }
            Action::Float(_) => Self::Floats(vec![float(json)?]),
            Action::Text(_) => Self::Texts(vec![text(json)?]),
            Action::Ints(_) | Action::Words(_) => {
                Self::Ints(list(json, |json| number(json, "a whole number", Json::as_i64))?)
            }
            Action::Floats(_) => Self::Floats(list(json, float)?),
            Action::Texts(_) => Self::Texts(texts(json)?),
            Action::Json(_) => match json {
                Json::String(text) => Self::Json(self::json(text)?),
                other => Self::Json(other.clone()),
            },
            Action::Refused(..) => return Err(Wrong::NotBuilt(String::new())),
        })
    }
}

/// A parameter in JSON's terms.
pub(super) fn parameter_json(parameter: &Parameter) -> Checked<Json> {
    Ok(match parameter {
        Parameter::String(text) => Json::from(text.as_str()),
        Parameter::Int(int) => Json::from(*int),
        Parameter::Bool(flag) => Json::from(*flag),
        Parameter::Double(double) => serde_json::Number::from_f64(*double)
            .map(Json::Number)
            .ok_or_else(|| format!("{double} is not a finite number"))?,
    })
}

fn json(text: &str) -> Checked<Json> {
    check_size(text)?;
    serde_json::from_str(text).map_err(|error| format!("not JSON: {error}").into())
}

fn check_size(text: &str) -> Checked {
    match text.len() {
        bytes if bytes <= MAX_JSON_BYTES => Ok(()),
        bytes => Err(format!("{bytes} bytes, at most {MAX_JSON_BYTES} are read").into()),
    }
}

/// What a string holds, if it holds JSON, or the value itself.
fn unquoted(json: &Json) -> Checked<Cow<'_, Json>> {
    let Json::String(text) = json else { return Ok(Cow::Borrowed(json)) };
    check_size(text)?;
    Ok(Cow::Owned(serde_json::from_str(text.trim()).unwrap_or(Json::Null)))
}

fn one<T>(values: Vec<T>) -> Checked<T> {
    let len = values.len();
    let mut values = values.into_iter();
    match (values.next(), values.next()) {
        (Some(value), None) => Ok(value),
        _ => Err(format!("has {len} values, expected 1").into()),
    }
}

fn flag(json: &Json) -> Checked<bool> {
    match json {
        Json::Bool(flag) => Ok(*flag),
        Json::String(text) if matches!(text.trim(), "true" | "True" | "TRUE" | "1") => Ok(true),
        Json::String(text) if matches!(text.trim(), "false" | "False" | "FALSE" | "0") => Ok(false),
        Json::Number(number) if number.as_i64() == Some(1) => Ok(true),
        Json::Number(number) if number.as_i64() == Some(0) => Ok(false),
        other => Err(format!("{} is not true or false", shown(other)).into()),
    }
}

fn number<T>(json: &Json, expected: &str, read: fn(&Json) -> Option<T>) -> Checked<T> {
    let parsed = unquoted(json)?;
    let number = Some(&*parsed).filter(|json| json.is_number());
    number
        .and_then(|json| read(json).or_else(|| read(&whole(json)?)))
        .ok_or_else(|| format!("{} is not {expected}", shown(json)).into())
}

/// 256.0 as 256: some clients have one type of numbers.
fn whole(json: &Json) -> Option<Json> {
    let float = json.as_f64()?;
    (float.fract() == 0.0 && float.abs() < (1u64 << 53) as f64).then(|| Json::from(float as i64))
}

fn float(json: &Json) -> Checked<f32> {
    let float = match json {
        Json::String(text) => text.trim().parse().ok(),
        other => other.as_f64().map(|float| float as f32),
    };
    float.ok_or_else(|| format!("{} is not a number", shown(json)).into())
}

fn text(json: &Json) -> Checked<String> {
    let text = json.as_str().map(str::to_string);
    text.ok_or_else(|| format!("{} is not a string", shown(json)).into())
}

/// A string is a list of strings in JSON, or itself the one entry.
fn texts(json: &Json) -> Checked<Vec<String>> {
    match json {
        Json::String(text) => {
            check_size(text)?;
            Ok(serde_json::from_str(text).unwrap_or_else(|_| vec![text.clone()]))
        }
        Json::Array(items) => items.iter().map(text).collect(),
        other => Err(format!("{} is not a list of strings", shown(other)).into()),
    }
}

fn list<T>(json: &Json, read: impl Fn(&Json) -> Checked<T>) -> Checked<Vec<T>> {
    let parsed = unquoted(json)?;
    let items = parsed.as_array().ok_or_else(|| format!("{} is not a list", shown(json)))?;
    items.iter().map(read).collect()
}

/// The beginning of a client's value, for a message.
pub(super) fn shown(json: &Json) -> String {
    excerpt(&json.to_string())
}

/// Splits ids at the offsets that follow them.
fn words(flat: &[i64]) -> Checked<Vec<Vec<i64>>> {
    if !flat.len().is_multiple_of(2) {
        return Err(format!("{} values, expected ids and as many offsets", flat.len()).into());
    }
    let (ids, ends) = flat.split_at(flat.len() / 2);
    let mut words = Vec::new();
    let mut start = 0;
    for &end in ends.iter().take_while(|&&end| end >= 0) {
        let end = usize::try_from(end).unwrap_or(usize::MAX);
        if end < start || end > ids.len() {
            return Err(format!("offset {end} after {start} in {} ids", ids.len()).into());
        }
        words.push(ids[start..end].to_vec());
        start = end;
    }
    Ok(words)
}

/// The rows of an input: as many as the batch dimension says, or one where there is none.
pub(super) fn rows(tensor: &Tensor, action: &Action, batched: bool) -> Result<Vec<Value>> {
    if !action.reads(tensor.datatype) {
        return Err(Error::invalid_arg(format!(
            "{}: data type {}, expected {}",
            tensor.name,
            tensor.datatype.config_name(),
            action.datatype().config_name()
        )));
    }
    let num_rows = num_rows(tensor, action.dims(), batched)?;
    let len = tensor.num_elements()? / num_rows;
    let wrong = |wrong: Wrong| wrong.into_error(&tensor.name);
    let values = elements(tensor, len * num_rows).map_err(wrong)?;
    Ok((0..num_rows).map(|row_idx| values.slice(row_idx * len, len)).collect())
}

/// A row with no elements still takes this many bytes of a response: batches are bounded.
const MAX_ROWS: usize = 4096;

fn num_rows(tensor: &Tensor, dims: &[i64], batched: bool) -> Result<usize> {
    let shape = tensor.shape.as_slice();
    let (batch, rest) = match (batched, shape) {
        (true, [batch, rest @ ..]) => (usize::try_from(*batch).unwrap_or(0), rest),
        (true, []) => (0, shape),
        (false, rest) => (1, rest),
    };
    // A scalar may come without its dimension: templates of TensorRT-LLM reshape it away.
    let fits = rest.len() == dims.len()
        && rest
            .iter()
            .zip(dims)
            .all(|(&given, &dim)| if dim < 0 { given >= 0 } else { given == dim });
    if (fits || (dims == [1] && rest.is_empty())) && (1..=MAX_ROWS).contains(&batch) {
        return Ok(batch);
    }
    let mut expected = if batched { vec![-1] } else { Vec::new() };
    expected.extend_from_slice(dims);
    Err(Error::invalid_arg(format!("{}: shape {shape:?}, expected {expected:?}", tensor.name)))
}

fn elements(tensor: &Tensor, count: usize) -> Checked<Value> {
    let data = tensor.data.as_slice();
    Ok(match tensor.datatype {
        DataType::Bool => Value::Flags(fixed(data, count, |[byte]: [u8; 1]| byte != 0)?),
        DataType::Int32 => {
            Value::Ints(fixed(data, count, |bytes| i64::from(i32::from_le_bytes(bytes)))?)
        }
        DataType::Uint32 => {
            Value::Ints(fixed(data, count, |bytes| i64::from(u32::from_le_bytes(bytes)))?)
        }
        DataType::Uint64 => Value::Uints(fixed(data, count, u64::from_le_bytes)?),
        DataType::Fp32 => Value::Floats(fixed(data, count, f32::from_le_bytes)?),
        DataType::Bytes => Value::Texts(strings(data, count)?),
        other => return Err(format!("data type {} is not read", other.config_name()).into()),
    })
}

fn fixed<const N: usize, T>(data: &[u8], count: usize, read: fn([u8; N]) -> T) -> Checked<Vec<T>> {
    if count.checked_mul(N) != Some(data.len()) {
        return Err(format!("{} bytes for {count} elements of {N}", data.len()).into());
    }
    let (elements, _) = data.as_chunks::<N>();
    Ok(elements.iter().map(|&bytes| read(bytes)).collect())
}

fn strings(mut data: &[u8], count: usize) -> Checked<Vec<String>> {
    let mut strings = Vec::new();
    for idx in 0..count {
        let cut = || Wrong::from(format!("element {idx} of {count} is cut off"));
        let (len, rest) = data.split_first_chunk().ok_or_else(cut)?;
        let len = usize::try_from(u32::from_le_bytes(*len)).unwrap_or(usize::MAX);
        let (bytes, rest) = rest.split_at_checked(len).ok_or_else(cut)?;
        let text = std::str::from_utf8(bytes)
            .map_err(|error| format!("element {idx} is not UTF-8: {error}"))?;
        strings.push(text.to_string());
        data = rest;
    }
    if !data.is_empty() {
        return Err(format!("{} bytes follow the {count} elements", data.len()).into());
    }
    Ok(strings)
}

impl Value {
    fn slice(&self, start: usize, len: usize) -> Self {
        let range = start..start + len;
        match self {
            Self::Flags(v) => Self::Flags(v[range].to_vec()),
            Self::Ints(v) => Self::Ints(v[range].to_vec()),
            Self::Uints(v) => Self::Uints(v[range].to_vec()),
            Self::Floats(v) => Self::Floats(v[range].to_vec()),
            Self::Texts(v) => Self::Texts(v[range].to_vec()),
            Self::Json(json) => Self::Json(json.clone()),
        }
    }
}
