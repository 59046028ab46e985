//! `spec-build try`: generates from a built model folder without a server.

use crate::cli::{DraftLen, TryArgs};
use anyhow::{Context, Result, ensure};
use serde_json::json;
use spec_core::runtime::{
    Counters, DraftPolicy, Emitted, Event, FinishReason, ModelFolder, Options, Request, Runtime,
    TextRules, TextStream,
};
use spec_core::sampling::SamplingParams;
use spec_core::tokenizer::{Conversation, Tokenizer, check_stops};
use std::io::{IsTerminal, Write};
use std::time::{Duration, Instant};

/// Accepted draft tokens on a terminal.
const GREEN: &str = "\x1b[32m";
const RESET: &str = "\x1b[0m";

/// Runs the command.
pub fn generate(args: &TryArgs) -> Result<()> {
    let folder = ModelFolder::open(&args.model)?;
    let options = Options {
        threads: args.threads,
        pinning: args.pin_threads,
        isa: args.isa,
        lookup: args.lookup,
        ngram_branches: args.ngram_branches,
        draft_branches: args.draft_branches,
        draft_tree_tokens: args.draft_tree_tokens,
        draft_policy: match args.draft_len {
            DraftLen::Auto => DraftPolicy::Adaptive,
            DraftLen::Fixed(_) => DraftPolicy::Fixed,
        },
        max_batch_size: Some(1),
        ..Options::default()
    };
    let mut runtime = Runtime::load(&folder.target, &options)?;
    let _pinned = runtime.pin_caller();
    let prompt = prompt(args, &folder)?;
    let request = request(args, &folder.tokenizer, prompt)?;
    let mut screen = Screen::new(args, &folder.tokenizer);
    let run = run(&mut runtime, request.clone(), |event| screen.show(event))?;
    let text = screen.finish()?;
    if args.json {
        println!("{}", run.to_json(&request.prompt, &text, screen.stopped));
        return Ok(());
    }
    let mut summary = run.summary();
    if args.compare {
        let plain = Request { draft_len: Some(0), ..request };
        let plain = self::run(&mut runtime, plain, |_| Ok(true))?;
        let same = match plain.tokens() == run.tokens() {
            true => "the same tokens",
            false => "other tokens, as draws without a seed differ from run to run",
        };
        let (rate, ratio) = (plain.rate(), run.rate() / plain.rate());
        summary += &format!("; with draft length 0 {rate:.1} tokens/s, so {ratio:.2}x, and {same}");
    }
    println!("[{summary}]");
    Ok(())
}

fn prompt(args: &TryArgs, folder: &ModelFolder) -> Result<Vec<u32>> {
    if let Some(ids) = &args.prompt_ids {
        return Ok(ids.clone());
    }
    let text = args.prompt.as_deref().unwrap_or_default();
    let tokenizer = &folder.tokenizer;
    if !args.chat {
        return Ok(tokenizer.encode_prompt(text)?);
    }
    ensure!(tokenizer.has_chat_template(), "--chat: the model has no chat template");
    let system = args.system.iter().map(|text| ("system", text.as_str()));
    let conversation = Conversation::new(system.chain([("user", text)]));
    Ok(tokenizer.encode_chat(&tokenizer.render_chat(&conversation)?)?)
}

fn request(args: &TryArgs, tokenizer: &Tokenizer, prompt: Vec<u32>) -> Result<Request> {
    ensure!(!prompt.is_empty(), "the prompt is empty: give at least one token");
    check_stops(&args.stop)?;
    let bad_words: Result<Vec<Vec<u32>>, _> =
        args.bad_word.iter().map(|text| tokenizer.encode(text, false)).collect();
    Ok(Request {
        prompt: prompt.into(),
        max_tokens: args.max_tokens,
        draft_len: match args.draft_len {
            DraftLen::Auto => None,
            DraftLen::Fixed(len) => Some(len),
        },
        sampling: SamplingParams {
            temperature: args.temperature,
            top_k: args.top_k,
            top_p: args.top_p,
            min_p: args.min_p,
            repetition_penalty: args.repetition_penalty,
            presence_penalty: args.presence_penalty,
            frequency_penalty: args.frequency_penalty,
            logit_bias: args.logit_bias.clone().into(),
            bad_words: bad_words?.into(),
            allowed_tokens: None,
            min_tokens: args.min_tokens,
            seed: args.seed,
            logprobs: args.logprobs,
            prompt_logprobs: None,
        },
        ignore_eos: args.ignore_eos,
        ..Request::default()
    })
}

/// What a generation brought.
pub struct Run {
    /// Every token, in order.
    pub emitted: Vec<Emitted>,
    /// Why it ended.
    pub reason: FinishReason,
    /// Steps and drafts.
    pub counters: Counters,
    /// Until the first token.
    pub prefill: Duration,
    /// From the first token to the last.
    pub decode: Duration,
}

/// Generates for one request alone. `show` sees each event and says whether to go on.
pub fn run(
    runtime: &mut Runtime,
    request: Request,
    mut show: impl FnMut(&Event) -> Result<bool>,
) -> Result<Run> {
    let start = Instant::now();
    let id = runtime.add(request)?;
    let mut emitted = Vec::new();
    let mut first = start;
    loop {
        let step = runtime.step();
        if let Some(error) = step.failure {
            return Err(error.into());
        }
        for event in step.events {
            if emitted.is_empty() {
                first = Instant::now();
            }
            emitted.extend_from_slice(&event.emitted);
            let goes_on = show(&event)?;
            let finished = match event.finished {
                Some(sequence) => Some(*sequence),
                None if goes_on => None,
                None => runtime.finish(id, FinishReason::StopWord),
            };
            if let Some(sequence) = finished {
                return Ok(Run {
                    emitted,
                    reason: sequence.finish.context("an ended sequence has a reason")?,
                    counters: sequence.counters,
                    prefill: first - start,
                    decode: first.elapsed(),
                });
            }
        }
    }
}

impl Run {
    /// The generated ids.
    pub fn tokens(&self) -> Vec<u32> {
        self.emitted.iter().map(|emitted| emitted.token).collect()
    }

    /// Tokens a second after the first.
    pub fn rate(&self) -> f64 {
        (self.emitted.len().saturating_sub(1)) as f64 / self.decode.as_secs_f64().max(1e-9)
    }

    fn summary(&self) -> String {
        let Counters { steps, drafted, accepted, .. } = &self.counters;
        let per_step = *accepted as f64 / (*steps).max(1) as f64;
        format!(
            "{} tokens, {:.1} tokens/s, {steps} steps, {drafted} drafted, {accepted} accepted, mean \
             accepted length {per_step:.2}; prefill {:.0} ms",
            self.emitted.len(),
            self.rate(),
            self.prefill.as_secs_f64() * 1e3
        )
    }

    fn to_json(&self, prompt: &[u32], text: &str, stopped: bool) -> serde_json::Value {
        let mut object = json!({
            "prompt_ids": prompt,
            "output_ids": self.tokens(),
            "text": text,
            "finish_reason": match self.reason {
                FinishReason::Length if !stopped => "length",
                _ => "stop",
            },
            "steps": self.counters.steps,
            "drafted": self.counters.drafted,
            "accepted": self.counters.accepted,
            "accepted_per_position": self.counters.accepted_per_position,
            "prefill_ms": self.prefill.as_secs_f64() * 1e3,
            "decode_ms": self.decode.as_secs_f64() * 1e3,
        });
        if self.emitted.iter().any(|emitted| emitted.logprob.is_some()) {
            let logprobs: Vec<_> = self.emitted.iter().map(|emitted| emitted.logprob).collect();
            let top: Vec<_> = self.emitted.iter().map(|emitted| &emitted.top_logprobs).collect();
            object["logprobs"] = json!(logprobs);
            object["top_logprobs"] = json!(top);
        }
        object
    }
}

/// Text as it comes: streamed with colours to a terminal, collected for JSON.
struct Screen<'a> {
    tokenizer: &'a Tokenizer,
    stream: TextStream,
    text: String,
    stopped: bool,
    streams: bool,
    colours: bool,
}

impl<'a> Screen<'a> {
    fn new(args: &TryArgs, tokenizer: &'a Tokenizer) -> Self {
        Self {
            tokenizer,
            stream: TextStream::new(&TextRules {
                stops: args.stop.clone().into(),
                min_tokens: args.min_tokens,
                goes_on: !args.chat,
                ..TextRules::default()
            }),
            text: String::new(),
            stopped: false,
            streams: !args.json,
            colours: !args.json && std::io::stdout().is_terminal(),
        }
    }

    /// Shows an event's tokens; all but the last were proposed by the drafter.
    fn show(&mut self, event: &Event) -> Result<bool> {
        let num_accepted = event.emitted.len().saturating_sub(1);
        for (idx, emitted) in event.emitted.iter().enumerate() {
            let chunk = self.stream.push(self.tokenizer, emitted.token)?;
            self.print(&chunk.text, idx < num_accepted)?;
            self.stopped |= chunk.stopped;
            if self.stopped {
                return Ok(false);
            }
        }
        Ok(true)
    }

    fn print(&mut self, text: &str, accepted: bool) -> Result<()> {
        self.text.push_str(text);
        if !self.streams || text.is_empty() {
            return Ok(());
        }
        let mut out = std::io::stdout().lock();
        match self.colours && accepted {
            true => write!(out, "{GREEN}{text}{RESET}")?,
            false => write!(out, "{text}")?,
        }
        Ok(out.flush()?)
    }

    /// Shows what was held back and gives the whole text.
    fn finish(&mut self) -> Result<String> {
        if !self.stopped {
            let chunk = self.stream.finish();
            self.stopped = chunk.stopped;
            self.print(&chunk.text, false)?;
        }
        if self.streams {
            println!();
        }
        Ok(std::mem::take(&mut self.text))
    }
}
