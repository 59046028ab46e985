//! Writes `config.pbtxt`, the protobuf text that tells Triton about a model folder.
//!
//! Inputs and outputs are left out: the backend completes them from the engine when Triton asks.

use std::fmt::Write as _;

/// What a model folder's configuration says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelConfigText {
    /// Name of the folder.
    pub name: String,
    /// Sequences that the engine runs at once.
    pub max_batch_size: usize,
    /// How many instances there are and where they run, such as `count: 1 kind: KIND_CPU`.
    pub instances: &'static str,
    /// Serving options.
    pub parameters: Vec<(String, String)>,
}

impl ModelConfigText {
    /// The text of the file.
    pub fn render(&self) -> String {
        let mut text = String::new();
        // Writing to a string cannot fail.
        let _ = writeln!(text, "name: {}", quoted(&self.name));
        let _ = writeln!(text, "backend: \"spec\"");
        let _ = writeln!(text, "max_batch_size: {}", self.max_batch_size);
        let _ = writeln!(text, "model_transaction_policy {{ decoupled: true }}");
        let _ = writeln!(text, "instance_group [ {{ {} }} ]", self.instances);
        for (key, value) in &self.parameters {
            let _ = writeln!(
                text,
                "parameters {{ key: {} value {{ string_value: {} }} }}",
                quoted(key),
                quoted(value)
            );
        }
        text
    }
}

/// A protobuf text string: bytes outside printable ASCII as octal escapes.
fn quoted(text: &str) -> String {
    let mut out = String::from('"');
    for byte in text.bytes() {
        match byte {
            b'"' => out.push_str("\\\""),
            b'\\' => out.push_str("\\\\"),
            b'\n' => out.push_str("\\n"),
            0x20..=0x7e => out.push(byte as char),
            _ => {
                let _ = write!(out, "\\{byte:03o}");
            }
        }
    }
    out.push('"');
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_is_described() {
        let config = ModelConfigText {
            name: "smollm2".into(),
            max_batch_size: 8,
            instances: "count: 1 kind: KIND_CPU",
            parameters: vec![("draft_len".into(), "auto".into())],
        };
        assert_eq!(
            config.render(),
            "name: \"smollm2\"\nbackend: \"spec\"\nmax_batch_size: 8\n\
             model_transaction_policy { decoupled: true }\n\
             instance_group [ { count: 1 kind: KIND_CPU } ]\n\
             parameters { key: \"draft_len\" value { string_value: \"auto\" } }\n"
        );
    }

    #[test]
    fn strings_are_escaped() {
        assert_eq!(quoted("a\"b\\c\nd\u{e9}"), r#""a\"b\\c\nd\303\251""#);
    }
}
