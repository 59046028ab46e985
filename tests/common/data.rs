//! Prompts and recorded outputs, in `$SPEC_DATA` or `../shared/data` beside the repository; tests say
//! that they skip where they are not.

use super::cache::root;
use serde_json::Value;
use std::path::PathBuf;

/// Where a file of the recorded data is, if it is there.
pub(crate) fn path(name: &str) -> Option<PathBuf> {
    let folder =
        std::env::var_os("SPEC_DATA").map_or_else(|| root().join("../shared/data"), PathBuf::from);
    let path = folder.join(name);
    if !path.is_file() {
        eprintln!("skipped: there is no {}", path.display());
        return None;
    }
    Some(path)
}

/// A JSON file.
pub(crate) fn json(name: &str) -> Option<Value> {
    let bytes = std::fs::read(path(name)?).expect("a readable file");
    Some(serde_json::from_slice(&bytes).expect("JSON"))
}

/// A file with one JSON object a line.
pub(crate) fn json_lines(name: &str) -> Option<Vec<Value>> {
    let text = std::fs::read_to_string(path(name)?).expect("a readable file");
    Some(text.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect())
}

/// A list of token ids.
pub(crate) fn ids(json: &Value) -> Vec<u32> {
    serde_json::from_value(json.clone()).expect("a list of ids")
}

/// The six chat prompts as ids of a model: short to long.
pub(crate) fn six_prompts(model: &str) -> Option<Vec<(String, Vec<u32>)>> {
    let prompts = json("six_prompts.json")?;
    let prompts = prompts[model].as_array().expect("a list of prompts");
    let prompt = |p: &Value| (p["name"].as_str().expect("a name").to_string(), ids(&p["ids"]));
    Some(prompts.iter().map(prompt).collect())
}
