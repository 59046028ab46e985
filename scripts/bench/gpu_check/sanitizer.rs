//! The small checks once more under compute-sanitizer, where it is installed.

use crate::args::Args;
use crate::gpu::Machine;
use crate::report::{Outcome, Report, Verdict};
use std::process::Command;
use std::time::Duration;

const PROGRAM: &str = "compute-sanitizer";

/// What a run exits with where the sanitizer has found something.
const FOUND: i32 = 86;

/// Seconds after which a tool is ended, and what `timeout` exits with then.
const MOST_SECONDS: u64 = 120;
const ENDED: i32 = 124;
/// Less is not worth beginning with, and so much of the run is left for its end.
const LEAST_SECONDS: u64 = 20;

/// Lines of its output that tell what is wrong.
const SHOWN_LINES: usize = 12;

/// The only kernel that hands memory from bulk copies to other warps through a barrier in memory. racecheck takes the
/// copy for a write of the thread that has issued it, and reports each such hand-over.
const BULK_COPIER: &str = "gemm";

/// How many races are reported, if all of them are between accesses of that kernel.
fn races_of_bulk_copies(lines: &[&str]) -> Option<usize> {
    let races = lines.iter().filter(|line| line.contains("Race reported"));
    let (own, others): (Vec<&&str>, Vec<_>) =
        races.partition(|line| line.matches(&format!(" {BULK_COPIER}+0x")).count() == 2);
    (!own.is_empty() && others.is_empty()).then_some(own.len())
}

/// Runs the tools that look at memory and at races, in what is left of the time.
pub(crate) fn run(report: &mut Report, args: &Args) {
    for tool in ["memcheck", "racecheck"] {
        let left = args.limit.saturating_sub(report.elapsed()).as_secs();
        let seconds = left.saturating_sub(LEAST_SECONDS).min(MOST_SECONDS);
        let limit = Duration::from_secs(seconds + LEAST_SECONDS);
        report.check_within(limit, &format!("{PROGRAM} {tool}"), |_| {
            under(tool, args.machine, seconds)
        });
    }
}

fn under(tool: &str, machine: Machine, seconds: u64) -> Outcome {
    let Machine::Driver(ordinal) = machine else {
        return Ok(Verdict::Skipped("the emulator has checks of its own".into()));
    };
    if seconds < LEAST_SECONDS {
        return Ok(Verdict::Skipped("the time is up".into()));
    }
    if Command::new(PROGRAM).arg("--version").output().is_err() {
        return Ok(Verdict::Skipped(format!("{PROGRAM} is not installed")));
    }
    let record = tempfile::tempdir()?;
    let output = Command::new("timeout")
        .args(["--kill-after=5", &seconds.to_string(), PROGRAM])
        .args(["--tool", tool, "--error-exitcode", &FOUND.to_string()])
        .arg(std::env::current_exe()?)
        .args(["--small", "--only", "logits,texts", "--gpu", &ordinal.to_string()])
        // In the process that the tool looks at.
        .arg("--record")
        .arg(record.path().join("found.json"))
        .output()?;
    let printed =
        [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
    // Its own lines begin like this.
    let lines: Vec<&str> = printed[0].lines().filter(|line| line.starts_with("=====")).collect();
    if lines.iter().any(|line| line.contains("Device not supported")) {
        return Ok(Verdict::Skipped(format!("{PROGRAM} does not support this device")));
    }
    if output.status.code() == Some(ENDED) {
        return Ok(Verdict::Skipped(format!("no end after {seconds} seconds")));
    }
    if output.status.success() {
        return Ok(Verdict::Passed(lines.last().copied().unwrap_or("no errors").into()));
    }
    let failed: Vec<&str> = printed[1].lines().filter(|line| line.contains("failed")).collect();
    let only_found = output.status.code() == Some(FOUND) && failed.is_empty();
    if let Some(count) = races_of_bulk_copies(&lines).filter(|_| only_found) {
        let why = "it does not see that a barrier waits for bulk copies";
        return Ok(Verdict::Skipped(format!("{count} reports, all of the product's ring: {why}")));
    }
    let shown: Vec<&str> = failed.into_iter().chain(lines).take(SHOWN_LINES).collect();
    Err(format!("{}: {}", output.status, shown.join(" | ")).into())
}

#[cfg(test)]
mod tests {
    use super::*;

    const OF_RING: &str = "========= Error: Race reported between Write access at gemm+0x1a0 and Read access at gemm+0x9f0 [16 hazards]";
    const OF_PLAN: &str = "========= Error: Race reported between Write access at attention+0x10 and Read access at attention+0x20 [1 hazards]";

    #[test]
    fn only_races_of_bulk_copies_are_passed_over() {
        assert_eq!(
            races_of_bulk_copies(&[OF_RING, OF_RING, "========= RACECHECK SUMMARY"]),
            Some(2)
        );
        assert_eq!(races_of_bulk_copies(&[OF_RING, OF_PLAN]), None);
        assert_eq!(races_of_bulk_copies(&["========= ERROR SUMMARY: 1 error"]), None);
    }
}
