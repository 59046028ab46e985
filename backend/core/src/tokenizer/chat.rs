//! Chat templates: the Jinja of Hugging Face tokenizers, rendered as `transformers` renders it.
//!
//! A template comes with the checkpoint, so it is bounded in steps and in what it writes: one that does
//! not end gives an error, not a server that hangs. Strings that it builds up inside are not bounded.

mod python;

use super::files::{self, SpecialTokens};
use crate::{Error, Result};
use minijinja::syntax::SyntaxConfig;
use minijinja::value::Serde;
use minijinja::{Environment, ErrorKind, Value, context};
use serde::{Deserialize, Serialize};
use std::io;
use std::path::Path;

/// Instructions of one rendering. Real templates take some hundreds a message.
const FUEL: u64 = 5_000_000;
/// Most bytes of a prompt: what a loop writes is bounded without waiting for the fuel to run out.
const PROMPT_BYTES: usize = 16 << 20;
/// The name that template errors give.
const NAME: &str = "chat_template";

/// One turn of a conversation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Message {
    /// Who speaks: `system`, `user`, `assistant` or what else the template knows.
    pub role: String,
    /// What is said.
    pub content: String,
}

/// A compiled chat template with the special tokens that it may name.
pub struct ChatTemplate {
    environment: Environment<'static>,
    specials: Value,
}

impl ChatTemplate {
    /// The template in `dir`: `chat_template.jinja` if there is one, else the one in
    /// `tokenizer_config.json` (the one named `default` where it holds several).
    pub(super) fn open(dir: &Path, specials: &SpecialTokens) -> Result<Option<Self>> {
        let path = dir.join("chat_template.jinja");
        let (source, path) = match files::read_if_there(&path, files::TEMPLATE_BYTES)? {
            Some(bytes) => {
                let source = String::from_utf8(bytes).map_err(|e| files::bad(&path, e))?;
                (source, path.as_path())
            }
            None => match default_template(&specials.chat_template) {
                Some(source) => (source.to_string(), specials.config_path.as_path()),
                None => return Ok(None),
            },
        };
        let mut variables = specials.by_role.clone();
        variables.sort();
        let mut variables: Vec<(String, Value)> =
            variables.into_iter().map(|(role, token)| (role, Value::from(token))).collect();
        if !specials.additional.is_empty() {
            let list = Value::from(specials.additional.clone());
            variables.push(("additional_special_tokens".to_string(), list));
        }
        let template = Self::new(source, Value::from_pairs(variables));
        template.map(Some).map_err(|e| files::bad(path, format!("chat template: {e}")))
    }

    /// Compiles `source`; `specials` maps variable names (`bos_token`, ...) to token texts.
    fn new(source: String, specials: Value) -> Result<Self, minijinja::Error> {
        let mut environment = Environment::new();
        environment
            .set_syntax(SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build()?);
        environment.set_fuel(Some(FUEL));
        environment
            .set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.add_function("raise_exception", raise_exception);
        environment.add_function("strftime_now", python::strftime_now);
        environment.add_filter("tojson", python::tojson);
        environment.add_template_owned(NAME, without_generation_tags(&source))?;
        Ok(Self { environment, specials })
    }

    /// The prompt for a conversation, with special tokens spelled out; encode it without adding
    /// any. With `add_generation_prompt` it ends where the assistant's answer begins.
    pub fn render(&self, messages: &[Message], add_generation_prompt: bool) -> Result<String> {
        let variables = context! {
            messages => Value::from(Serde(messages)),
            add_generation_prompt,
            tools => (),
            documents => (),
            ..self.specials.clone()
        };
        let mut prompt = Prompt(Vec::new());
        self.environment
            .get_template(NAME)
            .and_then(|template| template.render_captured_to(variables, &mut prompt).map(drop))
            .map_err(|e| Error::bad_request("messages", message(&e)))?;
        String::from_utf8(prompt.0)
            .map_err(|e| Error::bad_request("messages", format!("the chat template gave {e}")))
    }
}

/// Takes what a template writes, up to the limit.
struct Prompt(Vec<u8>);

impl io::Write for Prompt {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if bytes.len() > PROMPT_BYTES - self.0.len() {
            return Err(io::ErrorKind::FileTooLarge.into());
        }
        self.0.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// What the client is told. What a template raises is meant for it as it is; other errors name
/// their place.
fn message(error: &minijinja::Error) -> String {
    match (error.kind(), error.detail()) {
        (ErrorKind::OutOfFuel, _) => format!("the chat template took more than {FUEL} steps"),
        (ErrorKind::WriteFailure, _) => {
            format!("the chat template wrote more than {PROMPT_BYTES} bytes")
        }
        (ErrorKind::InvalidOperation, Some(detail)) => {
            format!("refused by the chat template: {detail}")
        }
        _ => format!("the chat template failed: {error}"),
    }
}

fn raise_exception(message: String) -> Result<Value, minijinja::Error> {
    Err(minijinja::Error::new(ErrorKind::InvalidOperation, message))
}

/// A template is a string, or a list of named ones.
fn default_template(json: &serde_json::Value) -> Option<&str> {
    let named = || {
        let list = json.as_array()?;
        list.iter().find(|entry| entry["name"] == "default")?["template"].as_str()
    };
    json.as_str().or_else(named)
}

/// Turns `{% generation %}` blocks, which mark the assistant's tokens for training, into plain
/// blocks: minijinja does not know the tag.
fn without_generation_tags(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(open) = rest.find("{%") {
        // From behind the opening: in `{%}` the percent sign does not close.
        let start = open + 2;
        let Some(len) = rest[start..].find("%}") else { break };
        let inner = &rest[start..start + len];
        let name = inner.trim_start_matches(['-', '+']).trim_end_matches(['-', '+']).trim();
        let replacement = match name {
            "generation" => Some("if true"),
            "endgeneration" => Some("endif"),
            _ => None,
        };
        out.push_str(&rest[..start]);
        match replacement {
            Some(tag) => out.push_str(&inner.replacen(name, tag, 1)),
            None => out.push_str(inner),
        }
        out.push_str("%}");
        rest = &rest[start + len + 2..];
    }
    out.push_str(rest);
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn messages(turns: &[(&str, &str)]) -> Vec<Message> {
        turns
            .iter()
            .map(|(role, content)| Message { role: role.to_string(), content: content.to_string() })
            .collect()
    }

    fn render(source: &str) -> Result<String> {
        let specials = Value::from_pairs([("bos_token", "<s>"), ("eos_token", "</s>")]);
        let template = ChatTemplate::new(source.to_string(), specials).expect("compiles");
        template.render(&messages(&[("user", " hi "), ("assistant", "<é & 'q'>")]), true)
    }

    #[test]
    fn the_variables_and_methods_of_transformers_are_there() {
        let source = "{{ bos_token }}{% for m in messages %}\n  {% if loop.index0 == 1 %}\n\
            [{{ m['role'].upper() }}]{{ m.content | tojson }}{{ eos_token }}\n  {% continue %}\n  \
            {% endif %}\n[{{ m.role }}]{{ m['content'].strip() }}{{ pad_token }}\n{% endfor %}\n\
            {% if add_generation_prompt and not tools %}>{% endif %}\n";
        assert_eq!(
            render(source).expect("renders"),
            "<s>[user]hi\n[ASSISTANT]\"<é & 'q'>\"</s>\n>"
        );
    }

    #[test]
    fn generation_tags_are_plain_blocks() {
        let source = "a {%- generation -%} b {% if true %}c{% endif %}{%- endgeneration %} d{% x";
        let expected = "a {%- if true -%} b {% if true %}c{% endif %}{%- endif %} d{% x";
        assert_eq!(without_generation_tags(source), expected);
        assert_eq!(without_generation_tags("{%} {% generation %}"), "{%} {% generation %}");
        assert_eq!(without_generation_tags("{%}{%%}{%}"), "{%}{%%}{%}");
    }

    #[test]
    fn what_a_template_raises_is_a_bad_request_with_its_words() {
        let error = render("{{ raise_exception('roles must alternate') }}").expect_err("raises");
        let Error::BadRequest { field, message } = error else { panic!("{error}") };
        assert_eq!(field, "messages");
        assert_eq!(message, "refused by the chat template: roles must alternate");
    }

    #[test]
    fn a_template_that_would_run_for_ever_is_stopped() {
        let source = "{% set r = range(10000) %}{% for a in r %}{% for b in r %}\
            {% for c in r %}{% endfor %}{% endfor %}{% endfor %}";
        let error = render(source).expect_err("stops").to_string();
        assert!(error.ends_with("took more than 5000000 steps"), "{error}");
    }

    #[test]
    fn a_template_that_writes_without_end_is_stopped() {
        let source = "{% set s = 'x' * 1000000 %}{% for a in range(10000) %}{{ s }}{% endfor %}";
        let error = render(source).expect_err("stops").to_string();
        assert!(error.ends_with("wrote more than 16777216 bytes"), "{error}");
        let error = render("{{ 'x' * 100000001 }}").expect_err("is refused").to_string();
        assert!(error.ends_with("repeated string is too large"), "{error}");
    }

    #[test]
    fn the_default_of_several_templates_is_taken() {
        let list = serde_json::json!([
            { "name": "tool_use", "template": "t" },
            { "name": "default", "template": "d" },
        ]);
        assert_eq!(default_template(&list), Some("d"));
        assert_eq!(default_template(&serde_json::json!("s")), Some("s"));
        assert_eq!(default_template(&serde_json::Value::Null), None);
    }
}
