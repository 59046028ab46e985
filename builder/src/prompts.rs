//! Prompt files: one prompt a line, as JSON or as text.

use anyhow::{Context, Result, ensure};
use serde::Deserialize;
use spec_core::tokenizer::{Conversation, Tokenizer};
use std::fs;
use std::path::Path;

/// Questions of several kinds, for those who have none at hand.
pub const BUILT_IN: &str = include_str!("../data/prompts.jsonl");

/// A line that is a JSON object. Others of its fields are not looked at.
#[derive(Deserialize)]
#[serde(untagged)]
enum Line {
    Ids { prompt_ids: Vec<u32> },
    Messages { messages: Vec<Message> },
    Turns { turns: Vec<String> },
    Prompt { prompt: String },
}

#[derive(Deserialize)]
struct Message {
    role: String,
    content: String,
}

/// Reads the prompts of several files, one after the other, as tokens. `{"prompt_ids"}` are that already. All others go
/// through the model's chat template, if it has one and `chat` says so: `{"messages": [{"role", "content"}]}`, the first of
/// `{"turns"}`, `{"prompt"}` and lines of text as what a user says.
pub fn read(
    files: &[impl AsRef<Path>],
    tokenizer: &Tokenizer,
    chat: bool,
) -> Result<Vec<Vec<u32>>> {
    let chat = chat && tokenizer.has_chat_template();
    let mut prompts = Vec::new();
    for file in files {
        let file = file.as_ref();
        let text =
            fs::read_to_string(file).with_context(|| format!("reading {}", file.display()))?;
        for (idx, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
            let tokens = tokens(line, tokenizer, chat);
            prompts.push(tokens.with_context(|| format!("{} line {}", file.display(), idx + 1))?);
        }
        ensure!(!prompts.is_empty(), "{} has no prompt", file.display());
    }
    Ok(prompts)
}

/// The built-in prompts as tokens, through the model's chat template if it has one; those that it does not take are left
/// out.
pub(crate) fn built_in(tokenizer: &Tokenizer) -> Vec<Vec<u32>> {
    let chat = tokenizer.has_chat_template();
    BUILT_IN.lines().filter_map(|line| tokens(line, tokenizer, chat).ok()).collect()
}

fn tokens(line: &str, tokenizer: &Tokenizer, chat: bool) -> Result<Vec<u32>> {
    let line = match line.trim_start().starts_with('{') {
        true => serde_json::from_str(line).context(
            "none of `messages`, `turns`, `prompt` and `prompt_ids` is there as expected",
        )?,
        false => Line::Prompt { prompt: line.to_string() },
    };
    let messages = match line {
        Line::Ids { prompt_ids } => {
            ensure!(!prompt_ids.is_empty(), "`prompt_ids` is empty");
            return Ok(prompt_ids);
        }
        Line::Messages { messages } => messages,
        Line::Turns { turns } => {
            let first = turns.into_iter().next().context("`turns` is empty")?;
            vec![Message { role: "user".into(), content: first }]
        }
        Line::Prompt { prompt } => vec![Message { role: "user".into(), content: prompt }],
    };
    let tokens = if chat {
        let turns = messages.iter().map(|m| (m.role.as_str(), m.content.as_str()));
        tokenizer.encode_chat(&tokenizer.render_chat(&Conversation::new(turns))?)?
    } else {
        let texts: Vec<&str> = messages.iter().map(|message| message.content.as_str()).collect();
        tokenizer.encode_prompt(&texts.join("\n"))?
    };
    ensure!(!tokens.is_empty(), "the prompt has no token");
    Ok(tokens)
}
