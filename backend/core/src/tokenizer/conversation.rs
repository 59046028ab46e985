//! Conversations as clients of OpenAI's chat interface write them, in the shape that chat templates expect:
//! content is one string, arguments of tool calls are objects, and what says nothing is left out.

use crate::{Error, Result};
use serde_json::{Map, Value, json};

/// What is said in a conversation, and what its template may be told besides.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Conversation {
    /// An object each, with `role` and `content`.
    pub(super) messages: Vec<Value>,
    /// Functions that the model may call.
    pub(super) tools: Vec<Value>,
    /// Further variables of the template, `enable_thinking` or the like.
    pub(super) variables: Map<String, Value>,
}

const MESSAGES: &str = "messages";
const TOOLS: &str = "tools";
const VARIABLES: &str = "chat_template_kwargs";

/// What templates are told by the server alone.
const SERVERS: [&str; 2] = [MESSAGES, TOOLS];

impl Conversation {
    /// A conversation of roles and what they say.
    pub fn new<'a>(turns: impl IntoIterator<Item = (&'a str, &'a str)>) -> Self {
        let message = |(role, content)| json!({ "role": role, "content": content });
        Self { messages: turns.into_iter().map(message).collect(), ..Self::default() }
    }

    /// Reads a JSON list of messages.
    pub fn parse(json: &str) -> Result<Self> {
        let messages = objects(MESSAGES, json)?;
        if messages.is_empty() {
            return Err(wrong(MESSAGES, "an empty list, at least 1 message is needed"));
        }
        let messages = messages.into_iter().enumerate();
        let messages = messages.map(|(idx, message)| read(message, &format!("[{idx}]")));
        Ok(Self { messages: messages.collect::<Result<_>>()?, ..Self::default() })
    }

    /// Adds what a JSON list of tools describes.
    pub fn set_tools(&mut self, json: &str) -> Result<()> {
        self.tools = objects(TOOLS, json)?.into_iter().map(Value::Object).collect();
        Ok(())
    }

    /// Adds the variables of a JSON object.
    pub fn set_variables(&mut self, json: &str) -> Result<()> {
        let variables: Map<String, Value> = serde_json::from_str(json)
            .map_err(|error| wrong(VARIABLES, format!("not a JSON object: {error}")))?;
        if let Some(name) = SERVERS.iter().find(|name| variables.contains_key(**name)) {
            return Err(wrong(VARIABLES, format!("'{name}' is an input of its own")));
        }
        self.variables = variables;
        Ok(())
    }

    /// Looks at every string in it.
    pub(super) fn each_text(&self, look: &mut impl FnMut(Place, &str)) {
        for (name, value) in self.messages.iter().filter_map(Value::as_object).flatten() {
            look(Place::Field, name);
            match (name.as_str(), value) {
                ("role", Value::String(role)) => look(Place::Role, role),
                _ => each_text(value, look),
            }
        }
        self.tools.iter().for_each(|tool| each_text(tool, look));
        each_of_fields(&self.variables, look);
    }

    /// Changes every string in it.
    pub(super) fn map_texts(&mut self, change: &mut impl FnMut(Place, &str) -> String) {
        for message in &mut self.messages {
            let role = message["role"].take();
            map_texts(message, change);
            message["role"] = role.as_str().map(|role| change(Place::Role, role)).into();
        }
        self.tools.iter_mut().for_each(|tool| map_texts(tool, change));
        map_fields(&mut self.variables, change);
    }

    /// A conversation in which `developer` is `system`, which it took the place of.
    pub(super) fn without_developer(&self) -> Self {
        let mut other = self.clone();
        for message in other.messages.iter_mut().filter(|message| message["role"] == "developer") {
            message["role"] = json!("system");
        }
        other
    }
}

/// Where a string of a conversation stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Place {
    /// Who speaks.
    Role,
    /// The name of a field.
    Field,
    /// Anything else.
    Value,
}

fn each_text(value: &Value, look: &mut impl FnMut(Place, &str)) {
    match value {
        Value::String(text) => look(Place::Value, text),
        Value::Array(values) => values.iter().for_each(|value| each_text(value, look)),
        Value::Object(fields) => each_of_fields(fields, look),
        Value::Null | Value::Bool(_) | Value::Number(_) => {}
    }
}

fn each_of_fields(fields: &Map<String, Value>, look: &mut impl FnMut(Place, &str)) {
    for (name, value) in fields {
        look(Place::Field, name);
        each_text(value, look);
    }
}

fn map_texts(value: &mut Value, change: &mut impl FnMut(Place, &str) -> String) {
    match value {
        Value::String(text) => *text = change(Place::Value, text),
        Value::Array(values) => values.iter_mut().for_each(|value| map_texts(value, change)),
        Value::Object(fields) => map_fields(fields, change),
        Value::Null | Value::Bool(_) | Value::Number(_) => {}
    }
}

fn map_fields(fields: &mut Map<String, Value>, change: &mut impl FnMut(Place, &str) -> String) {
    let changed = std::mem::take(fields).into_iter().map(|(name, mut value)| {
        map_texts(&mut value, change);
        (change(Place::Field, &name), value)
    });
    *fields = changed.collect();
}

fn objects(field: &'static str, json: &str) -> Result<Vec<Map<String, Value>>> {
    serde_json::from_str(json)
        .map_err(|error| wrong(field, format!("not a JSON list of objects: {error}")))
}

/// One message. `place` names it in errors.
fn read(mut fields: Map<String, Value>, place: &str) -> Result<Value> {
    let mut message = Map::new();
    let role = string(take(&mut fields, "role"), &format!("{place}.role"))?;
    let refusal = take(&mut fields, "refusal").map(|text| string(Some(text), place)).transpose()?;
    let content = match fields.contains_key("content") {
        true => content(take(&mut fields, "content"), place)?,
        false if role == "assistant" => None,
        false => return Err(wrong(MESSAGES, format!("{place} has no content"))),
    };
    message.insert("role".into(), role.into());
    message.insert("content".into(), content.or(refusal).unwrap_or_default().into());
    for name in ["name", "tool_call_id", "reasoning_content"] {
        if let Some(text) = take(&mut fields, name) {
            let text = string(Some(text), &format!("{place}.{name}"))?;
            message.insert(name.into(), text.into());
        }
    }
    // Templates ask whether there are calls at all; some servers say of an answer without any that it has none.
    let calls = take(&mut fields, "tool_calls").filter(|calls| *calls != Value::Array(Vec::new()));
    if let Some(calls) = calls {
        message.insert("tool_calls".into(), tool_calls(calls, &format!("{place}.tool_calls"))?);
    }
    // Where the answer took its quotations from, for people to look up.
    fields.remove("annotations");
    for name in ["audio", "function_call"] {
        if take(&mut fields, name).is_some() {
            return Err(Error::Unsupported(format!("{MESSAGES}: {place}.{name}")));
        }
    }
    match fields.into_iter().next() {
        None => Ok(Value::Object(message)),
        Some((name, _)) => {
            Err(wrong(MESSAGES, format!("{place}: field '{}' is not known", excerpt(&name))))
        }
    }
}

/// A field with a value; null is as good as left out.
fn take(fields: &mut Map<String, Value>, name: &str) -> Option<Value> {
    fields.remove(name).filter(|value| !value.is_null())
}

fn string(value: Option<Value>, place: &str) -> Result<String> {
    match value {
        Some(Value::String(text)) => Ok(text),
        Some(_) => Err(wrong(MESSAGES, format!("{place} is no string"))),
        None => Err(wrong(MESSAGES, format!("{place} is missing"))),
    }
}

/// Text, or parts of it, which become lines.
fn content(value: Option<Value>, place: &str) -> Result<Option<String>> {
    let parts = match value {
        None => return Ok(None),
        Some(Value::Array(parts)) => parts,
        Some(value) => return string(Some(value), &format!("{place}.content")).map(Some),
    };
    let parts = parts.into_iter().enumerate().map(|(idx, mut part)| {
        let place = format!("{place}.content[{idx}]");
        let kind = string(part.get("type").cloned(), &format!("{place}.type"))?;
        match kind.as_str() {
            "text" | "refusal" => {
                let text = part.get_mut(&kind).map(Value::take);
                string(text, &format!("{place}.{kind}"))
            }
            _ => Err(Error::Unsupported(format!(
                "{MESSAGES}: {place} of type '{}'; text alone",
                excerpt(&kind)
            ))),
        }
    });
    Ok(Some(parts.collect::<Result<Vec<_>>>()?.join("\n")))
}

/// Calls with their arguments as JSON, which is what templates write down.
fn tool_calls(calls: Value, place: &str) -> Result<Value> {
    let Value::Array(mut calls) = calls else {
        return Err(wrong(MESSAGES, format!("{place} is no list")));
    };
    for (idx, call) in calls.iter_mut().enumerate() {
        let place = format!("{place}[{idx}].function");
        let Some(function) = call.get_mut("function").and_then(Value::as_object_mut) else {
            return Err(wrong(MESSAGES, format!("{place} is no object")));
        };
        string(function.get("name").cloned(), &format!("{place}.name"))?;
        let arguments = match function.get("arguments") {
            Some(Value::String(json)) if !json.trim().is_empty() => serde_json::from_str(json)
                .map_err(|e| wrong(MESSAGES, format!("{place}.arguments is not JSON: {e}")))?,
            Some(Value::String(_) | Value::Null) | None => json!({}),
            Some(_) => continue,
        };
        function.insert("arguments".into(), arguments);
    }
    Ok(Value::Array(calls))
}

fn wrong(field: &'static str, message: impl Into<String>) -> Error {
    Error::bad_request(field, message)
}

fn excerpt(text: &str) -> String {
    text.chars().take(40).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn one(message: Value) -> Result<Value> {
        Conversation::parse(&json!([message]).to_string()).map(|mut read| read.messages.remove(0))
    }

    fn refusal(message: Value) -> String {
        one(message).expect_err("is refused").to_string()
    }

    #[test]
    fn content_is_text_or_parts_of_it_or_nothing() {
        let content = |content: Value| {
            let read = one(json!({ "role": "user", "content": content })).expect("is read");
            read["content"].as_str().expect("text").to_string()
        };
        assert_eq!(content(json!("a\nb")), "a\nb");
        let part = |text: &str| json!({ "type": "text", "text": text });
        assert_eq!(content(json!([part("a"), part(" b")])), "a\n b");
        assert_eq!([content(json!(null)), content(json!([]))], ["", ""]);
        let refused = json!([{ "type": "refusal", "refusal": "No." }]);
        assert_eq!(content(refused), "No.");
    }

    #[test]
    fn an_answer_may_come_back_as_it_was_given() {
        let arguments = r#"{"city": "Paris", "days": [1]}"#;
        let read = one(json!({
            "role": "assistant", "content": null, "refusal": null, "audio": null, "annotations": [],
            "function_call": null,
            "tool_calls": [{ "id": "c1", "type": "function",
                "function": { "name": "weather", "arguments": arguments } },
                { "id": "c2", "type": "function", "function": { "name": "now", "arguments": "" } }],
        }));
        let call = |id, name, arguments| {
            json!({ "id": id, "type": "function",
                "function": { "name": name, "arguments": arguments } })
        };
        let first = call("c1", "weather", json!({ "city": "Paris", "days": [1] }));
        let calls = json!([first, call("c2", "now", json!({}))]);
        let expected = json!({ "role": "assistant", "content": "", "tool_calls": calls });
        assert_eq!(read.expect("is read"), expected);
        let refused = one(json!({ "role": "assistant", "refusal": "No." })).expect("is read");
        assert_eq!(refused, json!({ "role": "assistant", "content": "No." }));
        // Templates ask for `tool_calls`, not for how many.
        let none = one(json!({ "role": "assistant", "content": "Hi", "tool_calls": [] }));
        assert_eq!(none.expect("is read"), json!({ "role": "assistant", "content": "Hi" }));
    }

    #[test]
    fn names_and_answers_of_tools_are_kept() {
        for message in [
            json!({ "role": "tool", "content": "21", "tool_call_id": "c1" }),
            json!({ "role": "user", "content": "hi", "name": "Ada" }),
            json!({ "role": "developer", "content": "be brief" }),
        ] {
            assert_eq!(one(message.clone()).expect("is read"), message);
        }
    }

    #[test]
    fn what_is_wrong_is_named_with_its_place() {
        let user = |content: Value| json!({ "role": "user", "content": content });
        for (message, expected) in [
            (json!({ "role": "user" }), "messages: [0] has no content"),
            (json!({ "content": "x" }), "messages: [0].role is missing"),
            (user(json!(7)), "messages: [0].content is no string"),
            (user(json!([{ "type": "text" }])), "messages: [0].content[0].text is missing"),
            (user(json!(["x"])), "messages: [0].content[0].type is missing"),
            (
                user(json!([{ "type": "image_url", "image_url": {} }])),
                "messages: [0].content[0] of type 'image_url'; text alone is not supported",
            ),
            (
                json!({ "role": "user", "content": "x", "contnet": "y" }),
                "messages: [0]: field 'contnet' is not known",
            ),
            (
                json!({ "role": "assistant", "tool_calls": [{ "type": "custom" }] }),
                "messages: [0].tool_calls[0].function is no object",
            ),
            (
                json!({ "role": "assistant", "audio": { "id": "a" } }),
                "messages: [0].audio is not supported",
            ),
        ] {
            assert_eq!(refusal(message), expected);
        }
        let call = json!({ "function": { "name": "f", "arguments": "{" } });
        let message = refusal(json!({ "role": "assistant", "tool_calls": [call] }));
        let expected = "messages: [0].tool_calls[0].function.arguments is not JSON: ";
        assert!(message.starts_with(expected), "{message}");
        assert!(Conversation::parse("[]").is_err() && Conversation::parse("{}").is_err());
    }

    #[test]
    fn variables_take_the_place_of_no_input() {
        let mut conversation = Conversation::new([("user", "x")]);
        conversation.set_variables(r#"{"enable_thinking": false}"#).expect("is read");
        let message = conversation.set_variables(r#"{"tools": []}"#).expect_err("is refused");
        assert_eq!(message.to_string(), "chat_template_kwargs: 'tools' is an input of its own");
        assert!(conversation.set_tools("[1]").is_err());
    }

    #[test]
    fn every_string_is_changed() {
        let mut conversation = Conversation::parse(
            &json!([{ "role": "r", "content": "c", "tool_calls": [
                { "id": "i", "function": { "name": "n", "arguments": "{\"k\": [\"v\", 1]}" } }] }])
            .to_string(),
        )
        .expect("is read");
        conversation.set_tools(r#"[{"t": {"u": "w"}}]"#).expect("is read");
        conversation.set_variables(r#"{"x": "y"}"#).expect("is read");
        let mut looked_at = Vec::new();
        conversation.each_text(&mut |place, text| looked_at.push((place, text.to_string())));
        let mut seen = Vec::new();
        conversation.map_texts(&mut |place, text| {
            seen.push((place, text.to_string()));
            format!("{text}!")
        });
        for (place, texts) in [
            (Place::Role, &["r"][..]),
            (Place::Value, &["c", "i", "n", "v", "w", "y"]),
            (Place::Field, &["k", "t", "u", "x", "content"]),
        ] {
            for text in texts {
                assert!(seen.contains(&(place, text.to_string())), "{place:?} {text}");
            }
        }
        assert_eq!(seen.iter().filter(|(place, _)| *place == Place::Role).count(), 1);
        seen.sort_unstable();
        looked_at.sort_unstable();
        assert_eq!(looked_at, seen);
        assert_eq!(conversation.tools, [json!({ "t!": { "u!": "w!" } })]);
    }
}
