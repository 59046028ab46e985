//! What is asked: prompts with their categories, from files or built in.

use anyhow::{Context, Result, ensure};
use serde::Deserialize;
use std::fs;
use std::path::{Path, PathBuf};

/// The category of prompts that name none.
const NO_CATEGORY: &str = "all";

/// One prompt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Prompt {
    /// What it is about, as its file says.
    pub category: String,
    /// What is asked.
    pub content: Content,
}

/// What is asked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Content {
    /// A conversation: the model's chat template makes the prompt of it.
    Chat(Vec<Message>),
    /// The prompt as it is.
    Text(String),
    /// The prompt's tokens.
    Tokens(Vec<u32>),
}

/// One message of a conversation.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, serde::Serialize)]
pub struct Message {
    /// `system`, `user` or `assistant`.
    pub role: String,
    /// What it says.
    pub content: String,
}

/// A line of a JSONL file. Others of its fields are not looked at.
#[derive(Deserialize)]
struct Line {
    category: Option<String>,
    /// HumanEval: its prompts are code to complete, and have no category.
    task_id: Option<String>,
    #[serde(flatten)]
    content: LineContent,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum LineContent {
    Tokens { prompt_ids: Vec<u32> },
    Messages { messages: Vec<Message> },
    Turns { turns: Vec<String> },
    Prompt { prompt: String },
}

/// Reads the prompts of several files; the built-in ones where there are none. `{"prompt_ids"}` are tokens and are asked as
/// they are; `{"messages"}`, the first of Spec-Bench's `{"turns"}`, `{"prompt"}` and lines of text are what a user says, or
/// with `raw` the prompt itself.
pub fn read(files: &[PathBuf], raw: bool) -> Result<Vec<Prompt>> {
    if files.is_empty() {
        return parse(spec_build::prompts::BUILT_IN, Path::new("built-in prompts"), raw);
    }
    let mut prompts = Vec::new();
    for file in files {
        let text =
            fs::read_to_string(file).with_context(|| format!("reading {}", file.display()))?;
        prompts.extend(parse(&text, file, raw)?);
    }
    Ok(prompts)
}

fn parse(text: &str, file: &Path, raw: bool) -> Result<Vec<Prompt>> {
    let lines = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
    let prompts: Vec<Prompt> = lines
        .map(|(idx, line)| {
            prompt(line, raw).with_context(|| format!("{} line {}", file.display(), idx + 1))
        })
        .collect::<Result<_>>()?;
    ensure!(!prompts.is_empty(), "{} has no prompt", file.display());
    Ok(prompts)
}

fn prompt(line: &str, raw: bool) -> Result<Prompt> {
    if !line.trim_start().starts_with('{') {
        return Ok(Prompt { category: NO_CATEGORY.into(), content: said(line.into(), raw) });
    }
    let line: Line = serde_json::from_str(line)
        .context("none of `messages`, `turns`, `prompt` and `prompt_ids` is there as expected")?;
    let of_task = line.task_id.and_then(|id| id.split_once('/').map(|(set, _)| set.to_string()));
    let category = line.category.or(of_task).unwrap_or_else(|| NO_CATEGORY.into());
    let content = match line.content {
        LineContent::Tokens { prompt_ids } => {
            ensure!(!prompt_ids.is_empty(), "`prompt_ids` is empty");
            Content::Tokens(prompt_ids)
        }
        LineContent::Messages { messages } => {
            ensure!(!messages.is_empty(), "`messages` is empty");
            Content::Chat(messages)
        }
        LineContent::Turns { turns } => {
            said(turns.into_iter().next().context("`turns` is empty")?, raw)
        }
        LineContent::Prompt { prompt } => said(prompt, raw),
    };
    Ok(Prompt { category, content })
}

fn said(text: String, raw: bool) -> Content {
    match raw {
        true => Content::Text(text),
        false => Content::Chat(vec![Message { role: "user".into(), content: text }]),
    }
}

/// So many of the prompts, evenly from all, so that each category keeps its share.
pub fn evenly(prompts: Vec<Prompt>, num: usize) -> Vec<Prompt> {
    let num = num.min(prompts.len());
    (0..num).map(|idx| prompts[idx * prompts.len() / num].clone()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(text: &str) -> Result<Vec<Prompt>> {
        parse(text, Path::new("file"), false)
    }

    #[test]
    fn every_kind_of_line_is_read() {
        let text = r#"
            {"question_id": 81, "category": "writing", "turns": ["Write.", "Again."]}
            {"task_id": "HumanEval/1", "prompt": "def f():"}
            {"messages": [{"role": "system", "content": "Be short."}]}
            {"prompt_ids": [1, 2]}
            Why?"#;
        let prompts = parsed(text).unwrap();
        let categories: Vec<&str> = prompts.iter().map(|prompt| prompt.category.as_str()).collect();
        assert_eq!(categories, ["writing", "HumanEval", "all", "all", "all"]);
        assert_eq!(prompts[0].content, said("Write.".into(), false));
        assert_eq!(prompts[3].content, Content::Tokens(vec![1, 2]));
        let raw = prompt(r#"{"task_id": "HumanEval/1", "prompt": "def f():"}"#, true).unwrap();
        assert_eq!(raw.content, Content::Text("def f():".into()));
    }

    #[test]
    fn a_line_that_is_no_prompt_is_named() {
        let error = |text| format!("{:#}", parsed(text).unwrap_err());
        assert!(error("Why?\n{\"turns\": []}").contains("file line 2: `turns` is empty"));
        assert!(error("{\"text\": 1}").contains("file line 1: none of `messages`"));
        assert!(error("\n\n").contains("file has no prompt"));
    }

    #[test]
    fn the_built_in_prompts_are_of_several_kinds() {
        let prompts = read(&[], false).unwrap();
        let categories: std::collections::BTreeSet<_> =
            prompts.iter().map(|prompt| &prompt.category).collect();
        assert!(prompts.len() >= 24 && categories.len() >= 6, "{categories:?}");
    }

    #[test]
    fn some_of_the_prompts_are_taken_evenly() {
        let prompts = parsed("a\nb\nc\nd\ne\nf").unwrap();
        assert_eq!(
            evenly(prompts.clone(), 3),
            [&prompts[0..1], &prompts[2..3], &prompts[4..5]].concat()
        );
        assert_eq!(evenly(prompts.clone(), 9), prompts);
    }
}
