//! Checks the CUDA executor on a GPU and measures it: see `scripts/gpu-check`. With `--emulate` the same runs on an
//! emulated GPU, where times mean nothing.

#[path = "../../../tests/common/mod.rs"]
mod common;

mod args;
mod bench;
mod case;
mod ceiling;
mod clocks;
mod compile;
mod external;
mod goal;
mod gpu;
mod kernels;
mod kind;
mod launches;
mod logits;
mod noise;
mod outputs;
mod prefill;
mod random_engine;
mod report;
mod sanitizer;
mod steps;
mod supervisor;
#[cfg(test)]
mod tests;
mod texts;
mod timing;
mod twin;

use args::Args;
use gpu::Bed;
use report::Report;
use serde_json::{Map, Value, json};
use spec_core::testing::cuda::device::{Description, Device};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::Duration;

/// PyTorch takes so long at most, and leaves so much of the run to what comes after it.
const PEER_BUDGET: Duration = Duration::from_secs(100);
const AFTER_PEER: Duration = Duration::from_secs(60);

fn main() -> ExitCode {
    let args = match Args::parse(std::env::args().skip(1)) {
        Ok(args) => args,
        Err(message) => {
            eprintln!("{message}");
            return ExitCode::from(2);
        }
    };
    if let Some(arch) = args.compile {
        return match compile::run(arch) {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => {
                eprintln!("gpu-check: {error}");
                ExitCode::FAILURE
            }
        };
    }
    let ended = described(&args).and_then(|description| match &args.record {
        Some(file) => run(&args, &description, Some(file.clone())).map(|report| code(&report)),
        None => supervise(&args, &description),
    });
    match ended {
        Ok(code) => code,
        Err(message) => {
            eprintln!("gpu-check: {message}");
            ExitCode::FAILURE
        }
    }
}

fn described(args: &Args) -> Result<Description, String> {
    let device = args.machine.open().map_err(|error| error.to_string())?;
    Ok(device.describe().clone())
}

/// Has everything run in other processes; prints what came of it.
fn supervise(args: &Args, description: &Description) -> Result<ExitCode, String> {
    let text = |error: std::io::Error| error.to_string();
    let scratch = tempfile::tempdir().map_err(text)?;
    let folder = args.results.as_deref().unwrap_or(scratch.path());
    let file = result_file(folder, &args.date, description);
    // Of an earlier run in this minute.
    let _ = std::fs::remove_file(&file);
    let program = std::env::current_exe().map_err(text)?;
    let engines = scratch.path().join("engines");
    let process = || {
        // One that was ended has left its engines, and there may be no room for both.
        let _ = std::fs::remove_dir_all(&engines);
        let mut command = Command::new(&program);
        command.args(std::env::args_os().skip(1)).arg("--record").arg(&file);
        if std::fs::create_dir(&engines).is_ok() {
            command.env("TMPDIR", &engines);
        }
        command
    };
    let mut report = supervisor::run(process, &file, args.limit).map_err(text)?;
    let (line, is_good) = report.finish();
    if args.results.is_some() {
        eprintln!("Written to {}.", file.display());
    }
    println!("{line}");
    Ok(if is_good { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Runs what `file` does not tell to have ended, up to the first failure.
fn run(args: &Args, description: &Description, file: Option<PathBuf>) -> Result<Report, String> {
    let arch = gpu::arch(description)?;
    let mut report = Report::new(file, facts(args, description, arch)).stopping_at_failure();
    args.wanted().for_each(|part| report.set_part(part, "not begun"));
    let bed = Bed { machine: args.machine, arch, small: args.small };
    for part in args.wanted() {
        report.part(part, |report| match part {
            "launches" => launches::run(report, bed),
            "logits" => logits::run(report, bed),
            "texts" => texts::run(report, bed),
            "clocks" => clocks::run(report, bed.machine, arch),
            "bench" => bench::run(report, args, &description.name, arch),
            "peer" => external::peer(report, args.peer.as_deref(), bed, peer_budget(args, report)),
            "sanitizer" => sanitizer::run(report, args),
            _ => external::with_engine(report, args.server.as_deref(), bed),
        });
    }
    Ok(report)
}

/// What a process exits with that has recorded this.
fn code(report: &Report) -> ExitCode {
    if report.is_stopped() { ExitCode::from(supervisor::AGAIN) } else { ExitCode::SUCCESS }
}

fn peer_budget(args: &Args, report: &Report) -> Duration {
    args.limit.saturating_sub(report.elapsed() + AFTER_PEER).min(PEER_BUDGET)
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
