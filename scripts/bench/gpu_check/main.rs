//! Checks the CUDA executor on a GPU and measures it: see `scripts/gpu-check`. With `--emulate` the same runs on an
//! emulated GPU, where times mean nothing.

#[path = "../../../tests/common/mod.rs"]
mod common;

mod args;
mod bench;
mod case;
mod ceiling;
mod external;
mod goal;
mod gpu;
mod kernels;
mod kind;
mod logits;
mod noise;
mod prefill;
mod random_engine;
mod report;
mod sanitizer;
mod steps;
#[cfg(test)]
mod tests;
mod texts;
mod timing;

use args::Args;
use gpu::Bed;
use report::Report;
use serde_json::{Map, Value, json};
use spec_core::exec::cuda::device::{Description, Device};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

/// What is left of ten minutes for PyTorch.
const PEER_BUDGET: Duration = Duration::from_secs(120);

fn main() -> ExitCode {
    let args = match Args::parse(std::env::args().skip(1)) {
        Ok(args) => args,
        Err(message) => {
            eprintln!("{message}");
            return ExitCode::from(2);
        }
    };
    let description = match args.machine.open() {
        Ok(device) => device.describe().clone(),
        Err(error) => {
            eprintln!("gpu-check: {error}");
            return ExitCode::FAILURE;
        }
    };
    match run(&args, &description) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(message) => {
            eprintln!("gpu-check: {message}");
            ExitCode::FAILURE
        }
    }
}

/// Whether nothing failed.
fn run(args: &Args, description: &Description) -> Result<bool, String> {
    let start = Instant::now();
    let arch = gpu::arch(description)?;
    let file = args.results.as_ref().map(|folder| result_file(folder, &args.date, description));
    let mut report = Report::new(file.clone(), facts(args, description, arch));
    let bed = Bed { machine: args.machine, arch, small: args.small };
    if args.wants("logits") {
        logits::run(&mut report, bed);
    }
    if args.wants("texts") {
        texts::run(&mut report, bed);
    }
    if ["kernels", "prefill", "steps"].iter().any(|part| args.wants(part)) {
        bench::run(&mut report, args, &description.name, arch, start);
    }
    if let Some(script) = args.peer.as_deref().filter(|_| args.wants("peer")) {
        external::peer(&mut report, script, bed, PEER_BUDGET);
    }
    if args.wants("sanitizer") {
        sanitizer::run(&mut report, args.machine);
    }
    if let Some(program) = &args.server {
        external::with_engine(&mut report, "an engine behind tritonserver", program, bed);
    }
    let (line, is_good) = report.finish();
    if let Some(file) = file {
        eprintln!("Written to {}.", file.display());
    }
    println!("{line}");
    Ok(is_good)
}

/// What the numbers depend on.
fn facts(args: &Args, description: &Description, arch: &str) -> Map<String, Value> {
    let Description { name, capability, driver, num_sms } = description;
    let facts = json!({
        "date": args.date, "commit": args.commit, "gpu": name, "arch": arch,
        "capability": [capability.0, capability.1], "driver": driver, "num_sms": num_sms,
        "emulated": args.machine.is_emulated(), "small": args.small,
    });
    let Value::Object(facts) = facts else { unreachable!("an object was written above") };
    facts
}

fn result_file(folder: &Path, date: &str, description: &Description) -> PathBuf {
    let plain = |c: char| if c.is_ascii_alphanumeric() { c.to_ascii_lowercase() } else { '-' };
    let name: String = description.name.chars().map(plain).collect();
    let minutes: String = date.chars().take(16).filter(|&c| c != ':').collect();
    folder.join(format!("gpu-{name}-{minutes}.json"))
}
