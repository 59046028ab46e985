//! The command line.

use crate::gpu::{self, Machine};
use std::path::PathBuf;
use std::time::Duration;

/// What there is to do, in this order.
const PARTS: [&str; 9] =
    ["launches", "logits", "texts", "clocks", "kernels", "prefill", "steps", "peer", "sanitizer"];
/// Those that are one part of the run, model by model.
const BENCH: [&str; 3] = ["kernels", "prefill", "steps"];

/// Seconds after which the bench begins nothing more, so that PyTorch and the sanitizer get their share.
const BUDGET: u64 = 360;
/// Seconds of the whole run: within ten minutes, with what a machine takes to start a process or to end one.
const LIMIT: u64 = 570;
/// A machine may be as slow as it likes.
const EMULATED_LIMIT: Duration = Duration::from_secs(24 * 3600);

const USAGE: &str = "\
gpu_check [--emulate] [--gpu N] [--small] [--only PART,...] [--model NAME] [--budget SECONDS] [--limit SECONDS]
          [--peer SCRIPT] [--server PROGRAM] [--results DIR] [--date TIME] [--commit ID] [--record FILE]
gpu_check --compile ARCH
  --emulate   an emulated GPU: no times, small shapes
  --emulate-driver   the same behind the driver's interface: SPEC_CUDA_DRIVER names the library of an emulated one
  --gpu N     number of the GPU [0]
  --small     only models that a sanitizer gets through
  --only      parts, separated by commas [all]: launches logits texts clocks kernels prefill steps peer sanitizer
  --model     only models whose name holds this, such as 8B or FP16
  --budget    begin to measure nothing more after so long [360]
  --limit     end after so long, wherever it is [570; none on an emulator]
  --peer      script that measures the same in PyTorch
  --server    program that serves a repository and asks it
  --results   folder for a JSON file of all that was found [none is written]
  --date, --commit   what the file says about when, and of what
  --compile   only compile what a run on this architecture needs, such as sm_90a, into the user's cache
  --record    run in this process up to the first failure, beginning behind what this file holds: for a debugger";

/// What is asked for.
pub(crate) struct Args {
    pub(crate) machine: Machine,
    pub(crate) small: bool,
    pub(crate) results: Option<PathBuf>,
    pub(crate) date: String,
    pub(crate) commit: String,
    pub(crate) budget: Duration,
    /// Of the whole run.
    pub(crate) limit: Duration,
    /// Compile for this architecture, and nothing else.
    pub(crate) compile: Option<&'static str>,
    /// Where this process records, if another one looks after it.
    pub(crate) record: Option<PathBuf>,
    pub(crate) peer: Option<String>,
    pub(crate) server: Option<String>,
    only: Vec<String>,
    model: String,
}

impl Args {
    /// The error is what to print.
    pub(crate) fn parse(mut args: impl Iterator<Item = String>) -> Result<Self, String> {
        let mut parsed = Self {
            machine: Machine::Driver(0),
            small: false,
            results: None,
            date: "undated".into(),
            commit: "unknown".into(),
            budget: Duration::from_secs(BUDGET),
            limit: Duration::from_secs(LIMIT),
            compile: None,
            record: None,
            peer: None,
            server: None,
            only: Vec::new(),
            model: String::new(),
        };
        while let Some(arg) = args.next() {
            let mut value = || args.next().ok_or(format!("{arg} needs a value\n{USAGE}"));
            match arg.as_str() {
                "--emulate" => parsed.emulate(Machine::Emulator),
                "--emulate-driver" => parsed.emulate(Machine::EmulatedDriver),
                "--small" => parsed.small = true,
                "--gpu" => {
                    let number = value()?;
                    let ordinal = number.parse().map_err(|_| format!("--gpu {number}"))?;
                    parsed.machine = Machine::Driver(ordinal);
                }
                "--only" => parsed.only = parts(&value()?)?,
                "--peer" => parsed.peer = Some(value()?),
                "--server" => parsed.server = Some(value()?),
                "--model" => parsed.model = value()?,
                "--budget" => parsed.budget = seconds("--budget", &value()?)?,
                "--limit" => parsed.limit = seconds("--limit", &value()?)?,
                "--compile" => parsed.compile = Some(gpu::known_arch(&value()?)?),
                "--record" => parsed.record = Some(value()?.into()),
                "--results" => parsed.results = Some(value()?.into()),
                "--date" => parsed.date = value()?,
                "--commit" => parsed.commit = value()?,
                "--help" | "-h" => return Err(USAGE.into()),
                _ => return Err(format!("unknown argument {arg}\n{USAGE}")),
            }
        }
        Ok(parsed)
    }

    fn emulate(&mut self, machine: Machine) {
        (self.machine, self.small, self.limit) = (machine, true, EMULATED_LIMIT);
    }

    /// Whether a part is asked for.
    pub(crate) fn wants(&self, part: &str) -> bool {
        self.only.is_empty() || self.only.iter().any(|only| only == part)
    }

    /// The parts of the run that are asked for, in order.
    pub(crate) fn wanted(&self) -> impl Iterator<Item = &'static str> {
        let bench = BENCH.iter().any(|part| self.wants(part));
        let peer = self.peer.is_some() && self.wants("peer");
        let parts = [
            ("launches", self.wants("launches")),
            ("logits", self.wants("logits")),
            ("texts", self.wants("texts")),
            ("clocks", self.wants("clocks")),
            ("bench", bench),
            ("peer", peer),
            ("sanitizer", self.wants("sanitizer")),
            ("server", self.server.is_some()),
        ];
        parts.into_iter().filter_map(|(part, is_wanted)| is_wanted.then_some(part))
    }

    /// Whether a model is asked for.
    pub(crate) fn wants_model(&self, name: &str) -> bool {
        name.contains(&self.model)
    }
}

fn seconds(option: &str, text: &str) -> Result<Duration, String> {
    text.parse().map(Duration::from_secs).map_err(|_| format!("{option} {text}"))
}

fn parts(list: &str) -> Result<Vec<String>, String> {
    let parts: Vec<String> = list.split(',').map(String::from).collect();
    match parts.iter().find(|part| !PARTS.contains(&part.as_str())) {
        Some(part) => Err(format!("--only {part}: expected one of {}\n{USAGE}", PARTS.join(", "))),
        None => Ok(parts),
    }
}
