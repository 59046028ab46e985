//! Programs that check or measure something of their own: what they exit with says how it went (0 passed, 77 skipped,
//! else failed), the last line that they print says why.

use crate::case::{self, Drafts};
use crate::gpu::Bed;
use crate::report::{Outcome, Report, Verdict};
use serde_json::Value;
use std::process::{Command, Output};
use std::time::Duration;

/// What does not apply here.
const SKIPPED: i32 = 77;

/// Lines of a failed program that are shown.
const SHOWN_LINES: usize = 6;

/// Measures the same with PyTorch; each line that the script prints on standard output is an entry.
pub(crate) fn peer(report: &mut Report, script: &str, bed: Bed, budget: Duration) {
    let mut found = Vec::new();
    report.check("the same in PyTorch", |_| {
        if bed.machine.is_emulated() {
            return Ok(Verdict::Skipped("an emulator has no speed".into()));
        }
        let seconds = budget.as_secs().to_string();
        let output = Command::new("python3").args([script, "--budget", &seconds]).output()?;
        let lines = String::from_utf8_lossy(&output.stdout);
        let entries = lines.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
        found.extend(entries.filter(Value::is_object));
        match verdict(&output)? {
            Verdict::Passed(_) => Ok(Verdict::Passed(format!("{} timed", found.len()))),
            skipped => Ok(skipped),
        }
    });
    found.into_iter().for_each(|entry| report.push("peer", entry));
}

/// Lets a program try an engine pair in the repository that it is given, `tiny` by name.
pub(crate) fn with_engine(report: &mut Report, name: &str, program: &str, bed: Bed) {
    report.check(name, |_| {
        if bed.machine.is_emulated() {
            return Ok(Verdict::Skipped("no server sees the emulator".into()));
        }
        let (folder, _engine) = case::speculating(Drafts::Model, bed);
        let repository = folder.path().join("repository");
        std::fs::create_dir(&repository)?;
        std::fs::rename(folder.path().join("pair"), repository.join("pair"))?;
        verdict(&Command::new(program).arg(&repository).arg("pair").output()?)
    });
}

fn verdict(output: &Output) -> Outcome {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_string();
    let (out, err) = (text(&output.stdout), text(&output.stderr));
    let last = |text: &str| text.lines().last().unwrap_or_default().to_string();
    match output.status.code() {
        Some(0) => Ok(Verdict::Passed(last(&out))),
        Some(SKIPPED) => Ok(Verdict::Skipped(last(&err))),
        _ => {
            let lines: Vec<&str> = err.lines().collect();
            let shown = &lines[lines.len().saturating_sub(SHOWN_LINES)..];
            Err(format!("{}: {}", output.status, shown.join(" | ")).into())
        }
    }
}
