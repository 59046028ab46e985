//! The `spec-bench` command.

use anyhow::{Context, Result, ensure};
use clap::Parser;
use spec_bench::cli::{Asking, Cli, Command};
use spec_bench::endpoint::Common;
use spec_bench::machine::Machine;
use spec_bench::measure::{self, Plan};
use spec_bench::results::{FORMAT, Results};
use spec_bench::setting::Setting;
use spec_bench::{advice, prompts, report, terminal};
use std::fs;
use std::hash::{BuildHasher, RandomState};
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

fn main() -> ExitCode {
    match run(&Cli::parse().command) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("spec-bench: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Whether every request was answered.
fn run(command: &Command) -> Result<bool> {
    if let Command::Report { results, html } = command {
        let results = read(results)?;
        write(html, &report::html(&results))?;
        return Ok(true);
    }
    let Some((settings, asking)) = command.measures()? else { return Ok(true) };
    let results = measure(&settings, asking)?;
    print!("{}", terminal::show(&results));
    if let Some(path) = &asking.json {
        write(path, &serde_json::to_string_pretty(&results)?)?;
    }
    if let Some(path) = &asking.html {
        write(path, &report::html(&results))?;
    }
    Ok(results.runs.iter().all(|run| run.failed.is_empty()))
}

fn measure(settings: &[Setting], asking: &Asking) -> Result<Results> {
    let prompts = prompts::evenly(prompts::read(&asking.prompts, asking.raw)?, asking.num_prompts);
    let plan = Plan {
        rounds: asking.rounds,
        requests: asking.requests.unwrap_or(prompts.len()),
        warm_up: asking.warm_up,
        quiet: asking.quiet,
        key: RandomState::new().hash_one(SystemTime::now()),
    };
    let common = Common {
        prompts: Arc::new(prompts),
        max_tokens: asking.max_tokens,
        ignore_eos: asking.ignore_eos,
        threads: asking.threads,
    };
    let started = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    let runs = measure::measure(settings, &common, &plan)?;
    Ok(Results {
        format: FORMAT,
        command: std::env::args().collect::<Vec<_>>().join(" "),
        started,
        machine: Machine::here(),
        prompts: match asking.prompts.is_empty() {
            true => vec!["built-in prompts".into()],
            false => asking.prompts.iter().map(|path| path.display().to_string()).collect(),
        },
        rounds: plan.rounds,
        max_tokens: asking.max_tokens,
        advice: advice::advice(&runs),
        runs,
    })
}

fn read(path: &Path) -> Result<Results> {
    let text = fs::read_to_string(path).with_context(|| format!("reading {}", path.display()))?;
    let results: Results =
        serde_json::from_str(&text).with_context(|| path.display().to_string())?;
    let format = results.format;
    ensure!(format == FORMAT, "{}: format {format}, expected {FORMAT}", path.display());
    Ok(results)
}

fn write(path: &Path, text: &str) -> Result<()> {
    fs::write(path, text).with_context(|| format!("writing {}", path.display()))
}
