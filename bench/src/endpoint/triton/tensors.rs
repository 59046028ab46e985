//! Values of tensors as bytes, as the protocol writes them.

use super::proto::{ModelInferResponse, Tensor};
use anyhow::{Context, Result, bail};

/// A value of one element.
#[derive(Clone, Debug)]
pub(super) enum Value {
    Bool(bool),
    Integer(i64),
    Float(f64),
    Text(String),
    /// Several elements: the tokens of a prompt.
    Tokens(Vec<u32>),
}

/// The input that a server declares, with this value. Dimensions that it leaves open are 1, or the number of tokens.
pub(super) fn input(declared: &Tensor, value: &Value) -> Result<(Tensor, Vec<u8>)> {
    let bytes = bytes(&declared.datatype, value)
        .with_context(|| format!("input {} of type {}", declared.name, declared.datatype))?;
    let len = match value {
        Value::Tokens(tokens) => tokens.len() as i64,
        _ => 1,
    };
    let mut shape: Vec<i64> = declared.shape.iter().map(|&dim| dim.max(1)).collect();
    if let Some(last) = shape.last_mut() {
        *last = len;
    }
    Ok((Tensor { shape, ..declared.clone() }, bytes))
}

fn bytes(datatype: &str, value: &Value) -> Result<Vec<u8>> {
    Ok(match (datatype, value) {
        ("BOOL", Value::Bool(value)) => vec![u8::from(*value)],
        ("INT32", Value::Integer(value)) => i32::try_from(*value)?.to_le_bytes().to_vec(),
        ("UINT32", Value::Integer(value)) => u32::try_from(*value)?.to_le_bytes().to_vec(),
        ("INT64", Value::Integer(value)) => value.to_le_bytes().to_vec(),
        ("UINT64", Value::Integer(value)) => u64::try_from(*value)?.to_le_bytes().to_vec(),
        ("FP32", Value::Float(value)) => (*value as f32).to_le_bytes().to_vec(),
        ("BYTES", Value::Text(text)) => {
            let len = u32::try_from(text.len())?;
            [&len.to_le_bytes(), text.as_bytes()].concat()
        }
        ("INT32" | "UINT32", Value::Tokens(tokens)) => {
            tokens.iter().flat_map(|token| token.to_le_bytes()).collect()
        }
        _ => bail!("cannot be {value:?}"),
    })
}

/// Outputs of a response, by name.
pub(super) struct Outputs<'a>(pub(super) &'a ModelInferResponse);

impl<'a> Outputs<'a> {
    fn raw(&self, name: &str) -> Option<(&'a str, &'a [u8])> {
        let idx = self.0.outputs.iter().position(|output| output.name == name)?;
        let raw = self.0.raw_output_contents.get(idx)?;
        Some((self.0.outputs[idx].datatype.as_str(), raw))
    }

    /// Whole numbers; nothing where the output is not there.
    pub(super) fn integers(&self, name: &str) -> Vec<i64> {
        let Some((datatype, raw)) = self.raw(name) else { return Vec::new() };
        match datatype {
            "INT32" => {
                raw.as_chunks().0.iter().map(|&bytes| i32::from_le_bytes(bytes).into()).collect()
            }
            "UINT32" => {
                raw.as_chunks().0.iter().map(|&bytes| u32::from_le_bytes(bytes).into()).collect()
            }
            "INT64" => raw.as_chunks().0.iter().map(|&bytes| i64::from_le_bytes(bytes)).collect(),
            _ => Vec::new(),
        }
    }

    /// The texts of an output, one after the other.
    pub(super) fn text(&self, name: &str) -> Vec<u8> {
        let mut text = Vec::new();
        let mut rest = self.raw(name).map_or(&[][..], |(_, raw)| raw);
        while let Some((len, after)) = rest.split_first_chunk() {
            let len = (u32::from_le_bytes(*len) as usize).min(after.len());
            text.extend_from_slice(&after[..len]);
            rest = &after[len..];
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn declared(datatype: &str, shape: &[i64]) -> Tensor {
        Tensor { name: "x".into(), datatype: datatype.into(), shape: shape.to_vec() }
    }

    #[test]
    fn values_take_the_type_and_shape_that_is_declared() {
        let (tensor, raw) = input(&declared("BYTES", &[-1, 1]), &Value::Text("hé".into())).unwrap();
        assert_eq!((tensor.shape, raw), (vec![1, 1], vec![3, 0, 0, 0, b'h', 0xc3, 0xa9]));
        let (tensor, raw) = input(&declared("UINT32", &[1]), &Value::Integer(258)).unwrap();
        assert_eq!((tensor.shape, raw), (vec![1], vec![2, 1, 0, 0]));
        let (tensor, raw) =
            input(&declared("INT32", &[-1, -1]), &Value::Tokens(vec![1, 2])).unwrap();
        assert_eq!((tensor.shape, raw.len()), (vec![1, 2], 8));
        let error = input(&declared("BOOL", &[1]), &Value::Float(1.0)).unwrap_err();
        assert_eq!(format!("{error:#}"), "input x of type BOOL: cannot be Float(1.0)");
    }

    #[test]
    fn outputs_are_read_back_and_cut_ones_end() {
        let tensor = |name: &str, datatype: &str| Tensor {
            name: name.into(),
            datatype: datatype.into(),
            shape: vec![1],
        };
        let response = ModelInferResponse {
            outputs: vec![tensor("n", "INT32"), tensor("text", "BYTES")],
            raw_output_contents: vec![
                vec![7, 0, 0, 0, 9, 0, 0, 0, 1],
                vec![2, 0, 0, 0, b'a', b'b', 9, 0, 0, 0, b'c'],
            ],
        };
        let outputs = Outputs(&response);
        assert_eq!(outputs.integers("n"), [7, 9]);
        assert_eq!((outputs.text("text"), outputs.integers("none")), (b"abc".to_vec(), vec![]));
    }
}
