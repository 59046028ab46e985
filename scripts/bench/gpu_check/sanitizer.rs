//! The small checks once more under compute-sanitizer, where it is installed.

use crate::gpu::Machine;
use crate::report::{Outcome, Report, Verdict};
use std::process::Command;

const PROGRAM: &str = "compute-sanitizer";

/// What a run exits with where the sanitizer has found something.
const FOUND: i32 = 86;

/// After which it is ended, and what `timeout` exits with then.
const SECONDS: &str = "120";
const ENDED: i32 = 124;

/// Lines of its output that tell what is wrong.
const SHOWN_LINES: usize = 12;

/// Runs the tools that look at memory and at races.
pub(crate) fn run(report: &mut Report, machine: Machine) {
    for tool in ["memcheck", "racecheck"] {
        report.check(&format!("{PROGRAM} {tool}"), |_| under(tool, machine));
    }
}

fn under(tool: &str, machine: Machine) -> Outcome {
    let Machine::Driver(ordinal) = machine else {
        return Ok(Verdict::Skipped("the emulator has checks of its own".into()));
    };
    if Command::new(PROGRAM).arg("--version").output().is_err() {
        return Ok(Verdict::Skipped(format!("{PROGRAM} is not installed")));
    }
    let output = Command::new("timeout")
        .args([SECONDS, PROGRAM])
        .args(["--tool", tool, "--error-exitcode", &FOUND.to_string()])
        .arg(std::env::current_exe()?)
        .args(["--small", "--only", "logits,texts", "--gpu", &ordinal.to_string()])
        .output()?;
    let printed =
        [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
    // Its own lines begin like this.
    let lines: Vec<&str> = printed[0].lines().filter(|line| line.starts_with("=====")).collect();
    if lines.iter().any(|line| line.contains("Device not supported")) {
        return Ok(Verdict::Skipped(format!("{PROGRAM} does not support this device")));
    }
    if output.status.code() == Some(ENDED) {
        return Ok(Verdict::Skipped(format!("no end after {SECONDS} seconds")));
    }
    if output.status.success() {
        return Ok(Verdict::Passed(lines.last().copied().unwrap_or("no errors").into()));
    }
    let all = printed[1].lines().filter(|line| line.contains("failed")).chain(lines);
    let shown: Vec<&str> = all.take(SHOWN_LINES).collect();
    Err(format!("{}: {}", output.status, shown.join(" | ")).into())
}
