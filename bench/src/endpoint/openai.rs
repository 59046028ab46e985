//! A server with OpenAI's completions over HTTP, streamed as server-sent events.

use super::{Common, Remote};
use crate::answer::{Answer, Ask};
use crate::prompts::Content;
use crate::setting::Setting;
use anyhow::{Context, Result, bail};
use reqwest::header::{AUTHORIZATION, HeaderMap, HeaderValue};
use serde::Deserialize;
use serde_json::{Value, json};
use std::env;
use std::time::Instant;

/// Where OpenAI's own clients find the key that a server asks for.
const API_KEY: &str = "OPENAI_API_KEY";

/// A model that is asked in one way.
pub struct OpenAiEndpoint {
    client: reqwest::Client,
    base: String,
    model: String,
    temperature: f32,
    common: Common,
}

/// A part of an answer.
#[derive(Deserialize)]
struct Chunk {
    #[serde(default)]
    choices: Vec<Choice>,
    usage: Option<Usage>,
    error: Option<Value>,
}

#[derive(Deserialize)]
struct Choice {
    text: Option<String>,
    delta: Option<Delta>,
}

/// What servers that tell reasoning apart send has two names.
#[derive(Deserialize)]
struct Delta {
    content: Option<String>,
    reasoning: Option<String>,
    reasoning_content: Option<String>,
}

impl Delta {
    fn text(self) -> Option<String> {
        let parts = [self.reasoning_content.or(self.reasoning), self.content];
        parts.into_iter().flatten().reduce(|all, part| all + &part)
    }
}

#[derive(Deserialize)]
struct Usage {
    #[serde(default)]
    prompt_tokens: usize,
    #[serde(default)]
    completion_tokens: usize,
}

impl OpenAiEndpoint {
    /// Nothing is sent yet.
    pub fn new(remote: &Remote, setting: &Setting, common: &Common) -> Result<Self> {
        let mut headers = HeaderMap::new();
        if let Some(key) = env::var(API_KEY).ok().filter(|key| !key.is_empty()) {
            let mut value = HeaderValue::from_str(&format!("Bearer {key}"))
                .with_context(|| format!("{API_KEY} is not text for an HTTP header"))?;
            value.set_sensitive(true);
            headers.insert(AUTHORIZATION, value);
        }
        Ok(Self {
            client: reqwest::Client::builder().default_headers(headers).build()?,
            base: format!("{}/v1", remote.url()),
            model: remote.model.clone(),
            temperature: setting.temperature,
            common: common.clone(),
        })
    }

    fn request(&self, ask: &Ask) -> (&'static str, Value) {
        let mut body = json!({
            "model": self.model,
            "max_tokens": self.common.max_tokens,
            "temperature": self.temperature,
            "seed": ask.seed,
            "stream": true,
            "stream_options": {"include_usage": true},
        });
        // Servers that do not know it refuse it.
        if self.common.ignore_eos {
            body["ignore_eos"] = json!(true);
        }
        let (path, field, prompt) = match &self.common.prompts[ask.prompt].content {
            Content::Chat(messages) => ("chat/completions", "messages", json!(messages)),
            Content::Text(text) => ("completions", "prompt", json!(text)),
            Content::Tokens(tokens) => ("completions", "prompt", json!(tokens)),
        };
        body[field] = prompt;
        (path, body)
    }

    /// Asks and waits.
    pub async fn ask(&self, ask: Ask) -> Answer {
        let mut answer = Answer::new(&ask);
        let mut text = String::new();
        if let Err(error) = self.stream(&ask, &mut answer, &mut text).await {
            answer.failure = Some(format!("{error:#}"));
        } else if answer.came.is_empty() {
            answer.failure = Some("an end without a token".into());
        }
        answer.text_hash = super::hash(std::iter::once(&text));
        answer
    }

    async fn stream(&self, ask: &Ask, answer: &mut Answer, text: &mut String) -> Result<()> {
        let (path, body) = self.request(ask);
        answer.sent = Instant::now();
        let mut reply =
            self.client.post(format!("{}/{path}", self.base)).json(&body).send().await?;
        if !reply.status().is_success() {
            bail!("HTTP {}: {}", reply.status(), reply.text().await?.trim());
        }
        let mut lines = Lines::default();
        while let Some(bytes) = reply.chunk().await? {
            let now = Instant::now();
            for data in lines.push(&bytes) {
                take_in(&data, now, answer, text)?;
            }
        }
        Ok(())
    }
}

/// Takes in the data of one event.
fn take_in(data: &str, now: Instant, answer: &mut Answer, text: &mut String) -> Result<()> {
    if data == "[DONE]" {
        return Ok(());
    }
    let chunk: Chunk = serde_json::from_str(data)?;
    if let Some(error) = chunk.error {
        bail!("{error}");
    }
    let said = |choice: Choice| choice.text.or(choice.delta.and_then(Delta::text));
    let new: String = chunk.choices.into_iter().filter_map(said).collect();
    if !new.is_empty() {
        text.push_str(&new);
        answer.came.push((now, 1));
    }
    if let Some(usage) = chunk.usage {
        answer.input_tokens = usage.prompt_tokens;
        share_out(usage.completion_tokens, &mut answer.came);
    }
    Ok(())
}

/// The server tells at the end how many tokens there were, or with each part how many there are so far. What parts of the answer
/// brought more than one is not known in the first case, so the last one counts for the rest. Parts without a whole character
/// come late, so there may be fewer parts than tokens.
fn share_out(tokens: usize, came: &mut [(Instant, usize)]) {
    if let Some(((_, last), earlier)) = came.split_last_mut() {
        let before: usize = earlier.iter().map(|(_, tokens)| tokens).sum();
        *last = tokens.saturating_sub(before).max(1);
    }
}

/// The data of server-sent events, from bytes as they come.
#[derive(Default)]
struct Lines(Vec<u8>);

impl Lines {
    fn push(&mut self, bytes: &[u8]) -> Vec<String> {
        self.0.extend_from_slice(bytes);
        let Some(end) = self.0.iter().rposition(|&byte| byte == b'\n') else { return Vec::new() };
        let whole: Vec<u8> = self.0.drain(..=end).collect();
        let text = String::from_utf8_lossy(&whole).into_owned();
        let data = |line: &str| Some(line.strip_prefix("data:")?.trim().to_string());
        text.lines().filter_map(data).filter(|data| !data.is_empty()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_are_found_however_they_are_cut() {
        let sent = "data: {\"a\": \"é\"}\n\n: comment\ndata:[DONE]\r\n\n".as_bytes();
        for cut in 0..sent.len() {
            let mut lines = Lines::default();
            let mut found = lines.push(&sent[..cut]);
            found.extend(lines.push(&sent[cut..]));
            assert_eq!(found, ["{\"a\": \"é\"}", "[DONE]"], "cut at {cut}");
        }
    }

    #[test]
    fn parts_are_counted_as_the_server_says() {
        let ask = Ask { prompt: 0, seed: 0, cache_salt: String::new() };
        let (mut answer, mut text) = (Answer::new(&ask), String::new());
        let now = answer.sent;
        for data in [
            r#"{"choices": [{"delta": {"role": "assistant"}}]}"#,
            r#"{"choices": [{"delta": {"content": "Hello"}}]}"#,
            r#"{"choices": [{"text": " there"}]}"#,
            r#"{"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 5}}"#,
            "[DONE]",
        ] {
            take_in(data, now, &mut answer, &mut text).unwrap();
        }
        assert_eq!((text.as_str(), answer.tokens(), answer.input_tokens), ("Hello there", 5, 9));
        assert!(take_in(r#"{"error": "full"}"#, now, &mut answer, &mut text).is_err());
    }

    #[test]
    fn parts_that_say_how_many_there_are_so_far_are_counted_once() {
        let ask = Ask { prompt: 0, seed: 0, cache_salt: String::new() };
        let (mut answer, mut text) = (Answer::new(&ask), String::new());
        let now = answer.sent;
        for (content, so_far) in [("a", 1), ("b c", 4), ("", 5), ("d", 8)] {
            let data = json!({
                "choices": [{ "delta": { "content": content } }],
                "usage": { "prompt_tokens": 9, "completion_tokens": so_far },
            });
            take_in(&data.to_string(), now, &mut answer, &mut text).unwrap();
        }
        let tokens: Vec<usize> = answer.came.iter().map(|&(_, tokens)| tokens).collect();
        assert_eq!(tokens, [1, 4, 3], "what has no text counts with the part before it");
    }

    #[test]
    fn reasoning_is_part_of_the_answer_by_either_name() {
        let ask = Ask { prompt: 0, seed: 0, cache_salt: String::new() };
        let (mut answer, mut text) = (Answer::new(&ask), String::new());
        let now = answer.sent;
        for data in [
            r#"{"choices": [{"delta": {"reasoning_content": "So"}}]}"#,
            r#"{"choices": [{"delta": {"reasoning": " then", "content": null}}]}"#,
            r#"{"choices": [{"delta": {"content": ": 7"}}]}"#,
        ] {
            take_in(data, now, &mut answer, &mut text).unwrap();
        }
        assert_eq!((text.as_str(), answer.came.len()), ("So then: 7", 3));
    }
}
