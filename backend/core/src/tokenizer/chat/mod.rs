//! Chat templates: the Jinja of Hugging Face tokenizers, rendered as `transformers` renders it.
//!
//! A template comes with the checkpoint, so it is bounded in steps, in what it writes and in the JSON that it
//! makes: one that does not end gives an error, not a server that hangs. Strings that it joins inside are not bounded.

mod python;

use super::conversation::Conversation;
use super::files::{self, SpecialTokens};
use crate::{Error, Result};
use minijinja::syntax::SyntaxConfig;
use minijinja::value::Serde;
use minijinja::{Environment, ErrorKind, Value, context};
use serde_json::Value as Json;
use std::io;
use std::path::Path;

/// Instructions of one rendering. Real templates take some hundreds a message.
const FUEL: u64 = 5_000_000;
/// Most bytes of a prompt: what a loop writes is bounded without waiting for the fuel to run out.
const PROMPT_BYTES: usize = 16 << 20;
/// The name that template errors give.
const NAME: &str = "chat_template";
/// The name of the template for conversations with tools, where there is one of its own.
const TOOL_NAME: &str = "tool_use";

/// A compiled chat template with the special tokens that it may name.
pub(crate) struct ChatTemplate {
    environment: Environment<'static>,
    specials: Value,
    /// Whether it has a template of its own for tools.
    has_tool_template: bool,
    /// Whether it says anything of tools.
    knows_tools: bool,
    /// Whether it tells developers from the system.
    knows_developer: bool,
}

impl ChatTemplate {
    /// The template in `dir`: `chat_template.jinja` if there is one, else the one in
    /// `tokenizer_config.json` (those named `default` and `tool_use` where it holds several).
    pub(super) fn open(dir: &Path, specials: &SpecialTokens) -> Result<Option<Self>> {
        let path = dir.join("chat_template.jinja");
        let in_config = &specials.chat_template;
        let (source, for_tools, path) = match files::read_if_there(&path, files::TEMPLATE_BYTES)? {
            Some(bytes) => {
                let source = String::from_utf8(bytes).map_err(|e| files::bad(&path, e))?;
                (source, None, path.as_path())
            }
            None => match in_config.as_str().or_else(|| named_template(in_config, "default")) {
                Some(source) => {
                    let for_tools = named_template(in_config, TOOL_NAME);
                    (source.to_string(), for_tools, specials.config_path.as_path())
                }
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
        let template = Self::new(source, for_tools, Value::from_pairs(variables));
        template.map(Some).map_err(|e| files::bad(path, format!("chat template: {e}")))
    }

    /// Compiles `source`, and `for_tools` to take its place where there are tools; `specials` maps variable names
    /// (`bos_token`, ...) to token texts.
    pub(super) fn new(
        source: String,
        for_tools: Option<&str>,
        specials: Value,
    ) -> Result<Self, minijinja::Error> {
        let mut environment = Environment::new();
        environment
            .set_syntax(SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build()?);
        environment.set_fuel(Some(FUEL));
        environment
            .set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.add_function("raise_exception", raise_exception);
        environment.add_function("strftime_now", python::strftime_now);
        environment.add_test("iterable", python::is_iterable);
        environment.add_filter("tojson", python::tojson);
        environment.add_template_owned(NAME, without_generation_tags(&source))?;
        if let Some(source) = for_tools {
            environment.add_template_owned(TOOL_NAME, without_generation_tags(source))?;
        }
        Ok(Self {
            environment,
            specials,
            has_tool_template: for_tools.is_some(),
            knows_tools: for_tools.is_some() || source.contains("tools"),
            knows_developer: source.contains("developer"),
        })
    }

    /// The prompt for a conversation, with special tokens spelled out; encode it without adding
    /// any. It ends where the assistant's answer begins, unless a variable of the conversation says otherwise.
    pub(super) fn render(&self, conversation: &Conversation) -> Result<String> {
        let has_tools = !conversation.tools.is_empty();
        if has_tools && !self.knows_tools {
            return Err(Error::Unsupported(
                "tools: the model's chat template has no place for them".into(),
            ));
        }
        let system_only;
        let Conversation { messages, tools, variables } = match self.knows_developer {
            true => conversation,
            false => {
                system_only = conversation.without_developer();
                &system_only
            }
        };
        let said = context! {
            messages => Value::from(Serde(messages)),
            tools => has_tools.then(|| Value::from(Serde(tools))),
        };
        let unless_said = context! { add_generation_prompt => true, documents => () };
        let variables = Value::from(Serde(variables));
        // The first that has a variable counts: special tokens are the model's alone.
        let variables = context! { ..said, ..self.specials.clone(), ..variables, ..unless_said };
        let mut prompt = Prompt::default();
        self.environment
            .get_template(if has_tools && self.has_tool_template { TOOL_NAME } else { NAME })
            .and_then(|template| template.render_captured_to(variables, &mut prompt).map(drop))
            .map_err(|e| Error::bad_request("messages", message(&e)))?;
        let prompt = String::from_utf8(prompt.0)
            .map_err(|e| Error::bad_request("messages", format!("the chat template gave {e}")))?;
        // Some leave out calls whose message has no `content` of null: the model would read answers to nothing.
        if let Some(name) = called(messages).find(|name| !prompt.contains(name)) {
            let message =
                format!("messages: the model's chat template leaves out the call of {name}");
            return Err(Error::Unsupported(message));
        }
        Ok(prompt)
    }
}

/// The names of functions that were called, but for those that JSON would write otherwise.
fn called(messages: &[Json]) -> impl Iterator<Item = &str> {
    let calls = messages.iter().filter_map(|message| message["tool_calls"].as_array()).flatten();
    let names = calls.filter_map(|call| call["function"]["name"].as_str());
    names.filter(|name| !name.contains(['"', '\\']) && !name.contains(char::is_control))
}

/// Takes what a template or one of its filters writes, up to the limit.
#[derive(Default)]
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

/// One of a list of named templates.
fn named_template<'a>(json: &'a serde_json::Value, name: &str) -> Option<&'a str> {
    json.as_array()?.iter().find(|entry| entry["name"] == name)?["template"].as_str()
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

    fn template(source: &str, for_tools: Option<&str>) -> ChatTemplate {
        let specials = Value::from_pairs([("bos_token", "<s>"), ("eos_token", "</s>")]);
        ChatTemplate::new(source.to_string(), for_tools, specials).expect("compiles")
    }

    fn render(source: &str) -> Result<String> {
        let turns = [("user", " hi "), ("assistant", "<é & 'q'>")];
        template(source, None).render(&Conversation::new(turns))
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
    fn what_is_not_there_is_not_iterable() {
        let source = "{% for x in [tools, messages, messages[0].content, 1] %}{{ x is iterable }} {% endfor %}";
        assert_eq!(render(source).expect("renders"), "False True True False ");
    }

    /// As DeepSeek-R1's distilled models do where `content` is not null.
    #[test]
    fn calls_that_a_template_leaves_out_are_refused() {
        let call =
            r#"{"id": "c1", "type": "function", "function": {"name": "now", "arguments": "{}"}}"#;
        let said = format!(r#"[{{"role": "assistant", "content": null, "tool_calls": [{call}]}}]"#);
        let conversation = Conversation::parse(&said).expect("is read");
        let with = "{% for m in messages %}{{ m.tool_calls[0].function.name }}{% endfor %}";
        assert_eq!(template(with, None).render(&conversation).expect("renders"), "now");
        let without = "{% for m in messages %}{{ m.content }}{% endfor %}";
        let error = template(without, None).render(&conversation).expect_err("is refused");
        assert!(error.to_string().contains("leaves out the call of now"), "{error}");
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

    /// Each of the numbers is a line of 6 KB: 40 KB of tools would be 120 MB, 16 MB of them 50 GB.
    #[test]
    fn json_that_is_indented_without_end_is_stopped_before_it_is_written() {
        let depth = 100;
        let (open, close) = ("[".repeat(depth), "]".repeat(depth));
        let variables = format!(r#"{{"x": {open}{}0{close}}}"#, "1,".repeat(20_000));
        let mut conversation = Conversation::new([("user", "x")]);
        conversation.set_variables(&variables).expect("is read");
        // What is not put into the prompt is bounded too.
        let source = "{% set json = x | tojson(indent=60) %}";
        let error = template(source, None).render(&conversation).expect_err("stops").to_string();
        assert!(error.ends_with("wrote more than 16777216 bytes"), "{error}");
    }

    #[test]
    fn of_several_templates_there_is_one_for_tools() {
        let mut conversation = Conversation::new([("user", "x")]);
        let both = template("d", Some("t {{ tools[0].name }}"));
        assert_eq!(both.render(&conversation).expect("renders"), "d");
        conversation.set_tools(r#"[{"name": "f"}]"#).expect("is read");
        assert_eq!(both.render(&conversation).expect("renders"), "t f");
        let one = template("{% if tools %}{{ tools | tojson }}{% endif %}", None);
        assert_eq!(one.render(&conversation).expect("renders"), r#"[{"name": "f"}]"#);
        let message = template("d", None).render(&conversation).expect_err("refused").to_string();
        assert_eq!(
            message,
            "tools: the model's chat template has no place for them is not supported"
        );
        let list = serde_json::json!([{ "name": "tool_use", "template": "t" }]);
        assert_eq!(named_template(&list, "tool_use"), Some("t"));
        assert_eq!(named_template(&list, "default"), None);
    }

    #[test]
    fn a_template_that_knows_no_developer_hears_the_system() {
        let conversation = Conversation::new([("developer", "x"), ("user", "y")]);
        let roles = "{% for m in messages %}{{ m.role }} {% endfor %}";
        let told = |source: &str| template(source, None).render(&conversation).expect("renders");
        assert_eq!(told(roles), "system user ");
        assert_eq!(told(&format!("{roles}{{# developer #}}")), "developer user ");
    }

    #[test]
    fn variables_of_the_conversation_reach_the_template_but_not_its_special_tokens() {
        let mut conversation = Conversation::new([("user", "x")]);
        let variables =
            r#"{"enable_thinking": false, "eos_token": "!", "add_generation_prompt": false}"#;
        conversation.set_variables(variables).expect("is read");
        let source =
            "{{ enable_thinking }} {{ eos_token }} {{ add_generation_prompt }} {{ other }}";
        let rendered = template(source, None).render(&conversation);
        assert_eq!(rendered.expect("renders"), "False </s> False ");
    }
}
