//! The command line.

use crate::gpu::Machine;
use std::path::PathBuf;
use std::time::Duration;

/// What there is to do, in this order.
const PARTS: [&str; 7] = ["logits", "texts", "kernels", "prefill", "steps", "peer", "sanitizer"];

/// Seconds after which no model is begun: with PyTorch's part the whole run shall end within ten minutes.
const BUDGET: u64 = 420;

const USAGE: &str = "\
gpu_check [--emulate] [--gpu N] [--small] [--only PART,...] [--model NAME] [--budget SECONDS]
          [--peer SCRIPT] [--server PROGRAM] [--results DIR] [--date TIME] [--commit ID]
  --emulate   an emulated GPU: no times, small shapes
  --gpu N     number of the GPU [0]
  --small     only models that a sanitizer gets through
  --only      parts, separated by commas [all]: logits texts kernels prefill steps peer sanitizer
  --model     only models whose name holds this, such as 8B or FP16
  --budget    begin to measure nothing more after so long [420]
  --peer      script that measures the same in PyTorch
  --server    program that serves a repository and asks it
  --results   folder for a JSON file of all that was found [none is written]
  --date, --commit   what the file says about when, and of what";

/// What is asked for.
pub(crate) struct Args {
    pub(crate) machine: Machine,
    pub(crate) small: bool,
    pub(crate) results: Option<PathBuf>,
    pub(crate) date: String,
    pub(crate) commit: String,
    pub(crate) budget: Duration,
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
            peer: None,
            server: None,
            only: Vec::new(),
            model: String::new(),
        };
        while let Some(arg) = args.next() {
            let mut value = || args.next().ok_or(format!("{arg} needs a value\n{USAGE}"));
            match arg.as_str() {
                "--emulate" => (parsed.machine, parsed.small) = (Machine::Emulator, true),
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
                "--budget" => {
                    let text = value()?;
                    let seconds = text.parse().map_err(|_| format!("--budget {text}"))?;
                    parsed.budget = Duration::from_secs(seconds);
                }
                "--results" => parsed.results = Some(value()?.into()),
                "--date" => parsed.date = value()?,
                "--commit" => parsed.commit = value()?,
                "--help" | "-h" => return Err(USAGE.into()),
                _ => return Err(format!("unknown argument {arg}\n{USAGE}")),
            }
        }
        Ok(parsed)
    }

    /// Whether a part is asked for.
    pub(crate) fn wants(&self, part: &str) -> bool {
        self.only.is_empty() || self.only.iter().any(|only| only == part)
    }

    /// Whether a model is asked for.
    pub(crate) fn wants_model(&self, name: &str) -> bool {
        name.contains(&self.model)
    }
}

fn parts(list: &str) -> Result<Vec<String>, String> {
    let parts: Vec<String> = list.split(',').map(String::from).collect();
    match parts.iter().find(|part| !PARTS.contains(&part.as_str())) {
        Some(part) => Err(format!("--only {part}: expected one of {}\n{USAGE}", PARTS.join(", "))),
        None => Ok(parts),
    }
}
