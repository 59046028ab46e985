//! An engine in this process, on a thread of its own that runs its steps.

use super::Common;
use crate::answer::{Answer, Ask};
use crate::prompts::{Content, Prompt};
use crate::results::Speculation;
use crate::setting::{Load, Setting};
use anyhow::{Result, ensure};
use spec_build::cli::DraftLen;
use spec_core::runtime::{
    Counters, DraftPolicy, Event, FinishReason, ModelFolder, Options, Request, Runtime, SequenceId,
};
use spec_core::sampling::SamplingParams;
use spec_core::tokenizer::{Conversation, Tokenizer};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, mpsc};
use std::thread::{self, JoinHandle};
use std::time::Instant;
use tokio::sync::oneshot;

/// The engine's thread ends when this is dropped.
pub struct EngineEndpoint {
    asked: Option<mpsc::Sender<Asked>>,
    thread: Option<JoinHandle<()>>,
    prompts: Vec<Arc<Vec<u32>>>,
    request: Request,
}

/// A request on its way to the engine's thread.
struct Asked {
    request: Request,
    answer: Answer,
    reply: oneshot::Sender<Answer>,
}

/// A request that the engine works on.
struct Running {
    answer: Answer,
    tokens: Vec<u32>,
    reply: oneshot::Sender<Answer>,
}

impl EngineEndpoint {
    /// Loads the engine.
    pub fn open(dir: &Path, setting: &Setting, common: &Common) -> Result<Self> {
        let folder = ModelFolder::open(dir)?;
        let encode = |prompt: &Prompt| encode(prompt, &folder.tokenizer).map(Arc::new);
        let prompts = common.prompts.iter().map(encode).collect::<Result<_>>()?;
        let (draft_policy, draft_len) = match setting.draft_len {
            DraftLen::Auto => (DraftPolicy::Adaptive, None),
            DraftLen::Fixed(len) => (DraftPolicy::Fixed, Some(len)),
        };
        let options = Options {
            threads: common.threads,
            draft_policy,
            lookup: setting.lookup,
            max_batch_size: match setting.load {
                Load::Concurrency(count) => Some(count),
                Load::Rate(_) => None,
            },
            max_queue: usize::MAX,
            ..Options::default()
        };
        let request = Request {
            max_tokens: common.max_tokens,
            draft_len,
            ignore_eos: common.ignore_eos,
            sampling: SamplingParams {
                temperature: setting.temperature,
                ..SamplingParams::default()
            },
            ..Request::default()
        };
        let mut runtime = Runtime::load(&folder.target, &options)?;
        let (asked, waiting) = mpsc::channel();
        let thread = thread::spawn(move || run(&mut runtime, &waiting));
        Ok(Self { asked: Some(asked), thread: Some(thread), prompts, request })
    }

    /// Asks and waits.
    pub async fn ask(&self, ask: Ask) -> Answer {
        let mut request = Request {
            prompt: Arc::clone(&self.prompts[ask.prompt]),
            cache_salt: ask.cache_salt.clone(),
            ..self.request.clone()
        };
        request.sampling.seed = Some(ask.seed);
        let answer = Answer { input_tokens: request.prompt.len(), ..Answer::new(&ask) };
        let (reply, answered) = oneshot::channel();
        let asked = Asked { request, answer, reply };
        // The thread lives as long as the sender; if it has panicked, the answer never comes.
        let is_sent = self.asked.as_ref().is_some_and(|sender| sender.send(asked).is_ok());
        match answered.await {
            Ok(answer) if is_sent => answer,
            _ => Answer {
                failure: Some("the engine's thread has ended".into()),
                ..Answer::new(&ask)
            },
        }
    }
}

impl Drop for EngineEndpoint {
    fn drop(&mut self) {
        self.asked = None;
        if let Some(thread) = self.thread.take() {
            // A thread that panicked has said so on stderr, and its requests have failed.
            let _ = thread.join();
        }
    }
}

fn encode(prompt: &Prompt, tokenizer: &Tokenizer) -> Result<Vec<u32>> {
    let tokens = match &prompt.content {
        Content::Tokens(tokens) => tokens.clone(),
        Content::Text(text) => tokenizer.encode_prompt(text)?,
        Content::Chat(messages) if tokenizer.has_chat_template() => {
            let turns = messages.iter().map(|m| (m.role.as_str(), m.content.as_str()));
            tokenizer.encode_chat(&tokenizer.render_chat(&Conversation::new(turns))?)?
        }
        Content::Chat(messages) => {
            let texts: Vec<&str> = messages.iter().map(|m| m.content.as_str()).collect();
            tokenizer.encode_prompt(&texts.join("\n"))?
        }
    };
    ensure!(!tokens.is_empty(), "a prompt has no token: {:?}", prompt.content);
    Ok(tokens)
}

/// Takes requests and runs steps until nobody can ask any more.
fn run(runtime: &mut Runtime, waiting: &mpsc::Receiver<Asked>) {
    let _pinned = runtime.pin_caller();
    let mut running: BTreeMap<SequenceId, Running> = BTreeMap::new();
    loop {
        if running.is_empty() {
            let Ok(asked) = waiting.recv() else { return };
            add(runtime, &mut running, asked);
        }
        while let Ok(asked) = waiting.try_recv() {
            add(runtime, &mut running, asked);
        }
        let step = runtime.step();
        let now = Instant::now();
        let failure = step.failure.map(|error| error.to_string());
        for event in step.events {
            take_in(&mut running, event, now, failure.as_deref());
        }
    }
}

fn add(runtime: &mut Runtime, running: &mut BTreeMap<SequenceId, Running>, asked: Asked) {
    let Asked { request, answer, reply } = asked;
    match runtime.add(request) {
        Ok(id) => {
            running.insert(id, Running { answer, tokens: Vec::new(), reply });
        }
        Err(error) => {
            // Whoever asked may have gone.
            let _ = reply.send(Answer { failure: Some(error.to_string()), ..answer });
        }
    }
}

fn take_in(
    running: &mut BTreeMap<SequenceId, Running>,
    event: Event,
    now: Instant,
    failure: Option<&str>,
) {
    let Some(one) = running.get_mut(&event.id) else { return };
    one.tokens.extend(event.emitted.iter().map(|emitted| emitted.token));
    if !event.emitted.is_empty() {
        one.answer.came.push((now, event.emitted.len()));
    }
    let Some(sequence) = event.finished else { return };
    let Some(Running { mut answer, tokens, reply }) = running.remove(&event.id) else { return };
    answer.text_hash = super::hash(tokens.iter().map(|token| token.to_le_bytes()));
    answer.speculation = Some(speculation(&sequence.counters));
    if sequence.finish == Some(FinishReason::Failed) {
        answer.failure = Some(failure.unwrap_or("the engine failed").to_string());
    }
    let _ = reply.send(answer);
}

fn speculation(counters: &Counters) -> Speculation {
    Speculation {
        steps: counters.steps,
        drafted: counters.drafted,
        accepted: counters.accepted,
        histogram: counters.histogram(),
    }
}
