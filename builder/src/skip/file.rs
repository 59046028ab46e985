//! Files that name layers to skip: `{"attention": [..], "mlp": [..]}`, or an object with one such entry a model, as SWIFT and
//! its forerunner publish them.

use anyhow::{Context, Error, Result, bail};
use serde::Deserialize;
use spec_core::model::{LayerSkip, ModelConfig};
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

#[derive(Deserialize)]
#[serde(untagged)]
enum File {
    One(LayerSkip),
    Several(BTreeMap<String, LayerSkip>),
}

/// The layers of a file, or of the entry with this name, for a model that has such. They are in order, and each is there
/// once.
pub(super) fn read(path: &Path, entry: Option<&str>, model: &ModelConfig) -> Result<LayerSkip> {
    let text = fs::read(path).with_context(|| format!("reading {}", path.display()))?;
    let file = serde_json::from_slice(&text).with_context(|| {
        format!(
            "{}: expected {{\"attention\": [..], \"mlp\": [..]}}, or an object of such entries",
            path.display()
        )
    })?;
    let mut skip = chosen(file, entry).with_context(|| path.display().to_string())?;
    for layers in [&mut skip.attention, &mut skip.mlp] {
        layers.sort_unstable();
        layers.dedup();
    }
    skip.check(model).map_err(Error::msg).with_context(|| path.display().to_string())?;
    Ok(skip)
}

fn chosen(file: File, entry: Option<&str>) -> Result<LayerSkip> {
    let mut entries = match (file, entry) {
        (File::One(skip), None) => return Ok(skip),
        (File::One(_), Some(name)) => bail!("--skip-entry {name}: the file has no entries"),
        (File::Several(entries), _) => entries,
    };
    let names = || entries.keys().cloned().collect::<Vec<_>>().join(", ");
    match entry {
        Some(name) => {
            let known = names();
            entries.remove(name).with_context(|| format!("--skip-entry {name}: it has {known}"))
        }
        None if entries.len() == 1 => Ok(entries.pop_first().expect("one").1),
        None => bail!("choose one with --skip-entry: it has {}", names()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpoint::testing::{model, tiny_config};

    fn read(text: &str, entry: Option<&str>) -> Result<LayerSkip, String> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("skip_layers.json");
        fs::write(&path, text).unwrap();
        let model = model(&tiny_config("llama", "LlamaForCausalLM"));
        let model = ModelConfig { num_layers: 10, ..model };
        super::read(&path, entry, &model).map_err(|error| format!("{error:#}"))
    }

    #[test]
    fn published_files_are_read_by_entry() {
        let two =
            r#"{"a": {"attention": [5, 2, 2], "mlp": [9]}, "b": {"attention": [1], "mlp": []}}"#;
        let skip = LayerSkip { attention: vec![2, 5], mlp: vec![9] };
        assert_eq!(read(two, Some("a")), Ok(skip.clone()), "in order, each once");
        assert_eq!(read(r#"{"attention": [2, 5], "mlp": [9]}"#, None), Ok(skip.clone()));
        assert_eq!(read(r#"{"x": {"attention": [2, 5], "mlp": [9]}}"#, None), Ok(skip));
        assert!(read(two, None).unwrap_err().contains("it has a, b"));
        assert!(read(two, Some("c")).unwrap_err().contains("--skip-entry c: it has a, b"));
        let one = r#"{"attention": [], "mlp": [1]}"#;
        assert!(read(one, Some("c")).unwrap_err().contains("has no entries"));
    }

    #[test]
    fn other_files_are_refused() {
        for text in ["", "[1]", r#"{"attention": [-1], "mlp": []}"#, r#"{"a": {"mlp": [1]}}"#, "{}"]
        {
            let refusal = read(text, None).unwrap_err();
            assert!(refusal.contains("skip_layers.json"), "{text}: {refusal}");
        }
        let beyond = read(r#"{"attention": [2], "mlp": [10]}"#, None).unwrap_err();
        assert!(beyond.contains("mlp of layer 10, expected numbers below 10"), "{beyond}");
    }
}
