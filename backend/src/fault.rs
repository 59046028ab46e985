//! Faults on demand, for tests of what becomes of requests and server. Built with the feature `fault-injection` alone;
//! `no_fault.rs` stands in its place otherwise.
//!
//! * `SPEC_FAULT=panic:N` panics in the executor's Nth step, `error:N` has it fail.
//! * `SPEC_GATES=FOLDER` holds models by files in that folder. `MODEL` holds a word and a number: each engine thread
//!   of the model runs so many steps more from when it first sees the word, and from then on looks after its mail
//!   without running any. While there is `MODEL.stuck` a step that has begun does not end; while there is
//!   `MODEL.load` the model is being loaded.

use spec_core::runtime::{Runtime, SequenceId};
use spec_core::testing::batch::{Entry, Executor, LongPrompts, PromptBlocks, Stepped, Unwanted};
use std::fs;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;
use triton_backend::{Error, Result};

/// How often a thread that is held looks whether it may go on.
const LOOK: Duration = Duration::from_millis(1);

/// What a step does instead of its work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    Panic,
    Error,
}

/// An executor that breaks once, and stops while a file is there.
struct Faulty {
    inner: Box<dyn Executor>,
    fault: Option<Fault>,
    /// Steps until then.
    steps_left: u64,
    stuck: Option<PathBuf>,
}

impl Executor for Faulty {
    fn step(
        &mut self,
        entries: &[Entry<'_>],
        unwanted: Unwanted<'_>,
    ) -> spec_core::Result<Option<Stepped>> {
        wait_while(self.stuck.as_deref());
        self.steps_left = self.steps_left.wrapping_sub(1);
        match self.fault.filter(|_| self.steps_left == 0) {
            Some(Fault::Panic) => panic!("injected by SPEC_FAULT"),
            Some(Fault::Error) => {
                Err(spec_core::Error::Device("injected by SPEC_FAULT".to_string()))
            }
            None => self.inner.step(entries, unwanted),
        }
    }

    fn long_prompts(&self) -> LongPrompts {
        self.inner.long_prompts()
    }

    fn forget(&mut self, id: SequenceId) {
        self.inner.forget(id);
    }

    fn prompt_blocks(&self) -> Option<PromptBlocks> {
        self.inner.prompt_blocks()
    }

    fn lookahead(&self) -> usize {
        self.inner.lookahead()
    }
}

/// Breaks a model's runtime as the environment says.
pub(crate) fn inject(model: &str, runtime: Runtime) -> Result<Runtime> {
    let (fault, steps_left) = fault()?.unzip();
    let (steps_left, stuck) = (steps_left.unwrap_or(0), gate_file(model, ".stuck"));
    if fault.is_none() && stuck.is_none() {
        return Ok(runtime);
    }
    Ok(runtime.wrap_executor(|inner| Box::new(Faulty { inner, fault, steps_left, stuck })))
}

fn fault() -> Result<Option<(Fault, u64)>> {
    let Ok(told) = std::env::var("SPEC_FAULT") else { return Ok(None) };
    let parsed = match told.split_once(':') {
        Some(("panic", step)) => step.parse().ok().map(|step| (Fault::Panic, step)),
        Some(("error", step)) => step.parse().ok().map(|step| (Fault::Error, step)),
        _ => None,
    };
    match parsed {
        None => {
            let message = format!("SPEC_FAULT is '{told}', panic:STEP or error:STEP are known");
            Err(Error::invalid_arg(message))
        }
        known => Ok(known),
    }
}

/// Stands between an engine thread and its next step.
pub(crate) struct Gate {
    file: Option<PathBuf>,
    word: String,
    steps_left: u64,
}

impl Gate {
    /// The gate of an engine thread of this model.
    pub(crate) fn new(model: &str) -> Self {
        Self { file: gate_file(model, ""), word: String::new(), steps_left: 0 }
    }

    /// Whether a step may run now; counts it. Otherwise waits a moment.
    pub(crate) fn lets_pass(&mut self) -> bool {
        let Some(told) = self.file.as_ref().and_then(|file| fs::read_to_string(file).ok()) else {
            return true;
        };
        let (word, steps) = told.trim().split_once(' ').unwrap_or((&told, "0"));
        if self.word != word {
            (self.word, self.steps_left) = (word.to_string(), steps.parse().unwrap_or(0));
        }
        let passes = self.steps_left > 0;
        self.steps_left = self.steps_left.saturating_sub(1);
        if !passes {
            thread::sleep(LOOK);
        }
        passes
    }
}

/// Keeps a model from being loaded as long as its file is there.
pub(crate) fn hold_load(model: &str) {
    wait_while(gate_file(model, ".load").as_deref());
}

fn gate_file(model: &str, suffix: &str) -> Option<PathBuf> {
    let folder = std::env::var_os("SPEC_GATES")?;
    Some(Path::new(&folder).join(format!("{model}{suffix}")))
}

fn wait_while(file: Option<&Path>) {
    while file.is_some_and(Path::exists) {
        thread::sleep(LOOK);
    }
}
