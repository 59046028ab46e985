//! A profile's inputs and outputs in a model configuration, which Triton gives and takes as JSON.

use super::Profile;
use serde_json::{Value, json};
use triton_backend::DataType;
use triton_backend::{Error, Result};

/// One tensor as a profile declares it.
struct Declared {
    name: &'static str,
    datatype: DataType,
    /// What it may be declared as instead.
    also: Option<DataType>,
    dims: &'static [i64],
    required: bool,
}

/// Fills in what is missing.
pub(super) fn complete(profile: Profile, max_batch_size: usize, config: &mut Value) -> Result<()> {
    agree(profile, config)?;
    let Some(object) = config.as_object_mut() else {
        return Err(Error::internal("the model configuration is no JSON object"));
    };
    if profile.batches() && batch_size(object.get("max_batch_size")) == 0 {
        object.insert("max_batch_size".into(), json!(max_batch_size));
    }
    object.entry("model_transaction_policy").or_insert(json!({ "decoupled": true }));
    add(
        object,
        "input",
        inputs(profile),
        |tensor| json!({ "name": tensor.name, "data_type": type_name(tensor.datatype), "dims": tensor.dims, "optional": !tensor.required }),
    )?;
    add(
        object,
        "output",
        outputs(profile),
        |tensor| json!({ "name": tensor.name, "data_type": type_name(tensor.datatype), "dims": tensor.dims }),
    )
}

/// Checks that a configuration has what no request can do without, and nothing that is not known.
pub(super) fn check(profile: Profile, config: &Value) -> Result<()> {
    agree(profile, config)?;
    if profile.batches() && batch_size(config.get("max_batch_size")) == 0 {
        return Err(Error::invalid_arg("max_batch_size is 0, at least 1 is needed"));
    }
    let controls = config["sequence_batching"]["control_input"].as_array();
    if controls.is_some_and(|controls| !controls.is_empty()) {
        return Err(Error::invalid_arg(
            "sequence_batching: control inputs are not read, requests have nothing to do with each other",
        ));
    }
    for (list, needed) in profile.needed() {
        if !needed.iter().any(|name| entries(config, list).any(|entry| entry["name"] == **name)) {
            let needed = needed.join("' or '");
            return Err(Error::invalid_arg(format!("{list} '{needed}' is not declared")));
        }
    }
    Ok(())
}

impl Profile {
    /// Of each group one must be declared.
    fn needed(self) -> &'static [(&'static str, &'static [&'static str])] {
        match self {
            Self::Text => &[("input", &["text_input", "messages"]), ("output", &["text_output"])],
            Self::Vllm => &[("input", &["text_input"]), ("output", &["text_output"])],
            Self::Token => &[
                ("input", &["input_ids"]),
                ("output", &["output_ids"]),
                ("output", &["sequence_length"]),
            ],
        }
    }
}

/// What is declared must be known and of the same type and dimensions.
fn agree(profile: Profile, config: &Value) -> Result<()> {
    let max_batch_size = batch_size(config.get("max_batch_size"));
    if !profile.batches() && max_batch_size != 0 {
        return Err(Error::invalid_arg(format!(
            "max_batch_size is {max_batch_size}, profile vllm needs 0"
        )));
    }
    for (list, known) in [("input", inputs(profile)), ("output", outputs(profile))] {
        for entry in entries(config, list) {
            let name = entry["name"].as_str().unwrap_or_default();
            let Some(tensor) = known.iter().find(|tensor| tensor.name == name) else {
                return Err(Error::invalid_arg(format!("{list} '{name}' is not known")));
            };
            tensor.agrees(list, entry)?;
        }
    }
    Ok(())
}

impl Declared {
    fn agrees(&self, list: &str, entry: &Value) -> Result<()> {
        let declares = |datatype| entry["data_type"] == type_name(datatype).as_str();
        if !declares(self.datatype) && !self.also.is_some_and(declares) {
            return Err(Error::invalid_arg(format!(
                "{list} '{}' is declared as {}, expected {}",
                self.name,
                entry["data_type"],
                type_name(self.datatype)
            )));
        }
        let dims: Option<Vec<i64>> =
            entry["dims"].as_array().and_then(|dims| dims.iter().map(dim).collect());
        if dims.as_deref() != Some(self.dims) {
            return Err(Error::invalid_arg(format!(
                "{list} '{}' has dims {}, expected {:?}",
                self.name, entry["dims"], self.dims
            )));
        }
        let reshape = &entry["reshape"]["shape"];
        let reshaped =
            reshape.as_array().is_some_and(|shape| !shape.is_empty() || dims != Some(vec![1]));
        if reshaped {
            return Err(Error::invalid_arg(format!(
                "{list} '{}' is reshaped to {reshape}, only dims [1] to [] are read",
                self.name
            )));
        }
        Ok(())
    }
}

/// Protobuf's JSON may write 64-bit numbers as strings.
fn dim(value: &Value) -> Option<i64> {
    value.as_i64().or_else(|| value.as_str()?.parse().ok())
}

fn batch_size(value: Option<&Value>) -> i64 {
    value.and_then(dim).unwrap_or(0)
}

fn entries<'a>(config: &'a Value, list: &str) -> impl Iterator<Item = &'a Value> {
    config.get(list).and_then(Value::as_array).into_iter().flatten()
}

fn add(
    config: &mut serde_json::Map<String, Value>,
    list: &str,
    tensors: Vec<Declared>,
    entry: impl Fn(&Declared) -> Value,
) -> Result<()> {
    let declared = config.entry(list).or_insert(json!([]));
    let Some(declared) = declared.as_array_mut() else {
        return Err(Error::invalid_arg(format!("{list} of the model configuration is no list")));
    };
    for tensor in tensors {
        if !declared.iter().any(|known| known["name"] == tensor.name) {
            declared.push(entry(&tensor));
        }
    }
    Ok(())
}

fn type_name(datatype: DataType) -> String {
    format!("TYPE_{}", datatype.config_name())
}

fn inputs(profile: Profile) -> Vec<Declared> {
    let declared = profile.inputs().iter().map(|input| {
        let action = &input.option.action;
        Declared {
            name: input.name,
            datatype: action.datatype(),
            also: action.reads(DataType::Uint32).then_some(DataType::Uint32),
            dims: action.dims(),
            required: input.required,
        }
    });
    declared.collect()
}

fn outputs(profile: Profile) -> Vec<Declared> {
    let declared = profile.outputs().iter().map(|output| Declared {
        name: output.name,
        datatype: output.datatype,
        also: None,
        dims: output.dims,
        required: false,
    });
    declared.collect()
}
