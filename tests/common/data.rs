//! Prompts and recorded outputs, in `tests/data`.

use super::cache::root;
use serde_json::Value;

/// The bytes of a file of the recorded data.
pub(crate) fn bytes(name: &str) -> Vec<u8> {
    let path = root().join("tests/data").join(name);
    std::fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// A JSON file.
pub(crate) fn json(name: &str) -> Value {
    serde_json::from_slice(&bytes(name)).expect("JSON")
}

/// A file with one JSON object a line.
pub(crate) fn json_lines(name: &str) -> Vec<Value> {
    let text = String::from_utf8(bytes(name)).expect("UTF-8");
    text.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect()
}

/// A list of token ids.
pub(crate) fn ids(json: &Value) -> Vec<u32> {
    serde_json::from_value(json.clone()).expect("a list of ids")
}

/// The six chat prompts as ids of a model: short to long.
pub(crate) fn six_prompts(model: &str) -> Vec<(String, Vec<u32>)> {
    let prompts = json("six_prompts.json");
    let prompts = prompts[model].as_array().expect("a list of prompts");
    let prompt = |p: &Value| (p["name"].as_str().expect("a name").to_string(), ids(&p["ids"]));
    prompts.iter().map(prompt).collect()
}
