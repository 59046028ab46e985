//! Programs that check or measure something of their own: what they exit with says how it went (0 passed, 77 skipped,
//! else failed), the last line that they print says why.

use crate::case::{self, Drafts};
use crate::gpu::Bed;
use crate::report::{Outcome, Report, Verdict};
use serde_json::Value;
use std::io::{BufRead as _, BufReader, Read as _, Seek as _};
use std::process::{Command, Output, Stdio};
use std::time::Duration;

/// What does not apply here.
const SKIPPED: i32 = 77;

/// Lines of a failed program that are shown.
const SHOWN_LINES: usize = 6;

/// What PyTorch may take to come to an end when its time is up, in seconds.
const GRACE: u64 = 30;
/// Of a server that starts, answers and ends.
const SERVER_LIMIT: Duration = Duration::from_secs(240);

/// Measures the same with PyTorch; each line that the script prints on standard output is an entry, at once.
pub(crate) fn peer(report: &mut Report, script: Option<&str>, bed: Bed, budget: Duration) {
    let Some(script) = script else { return };
    let limit = budget.as_secs() + GRACE;
    report.check_within(Duration::from_secs(limit + GRACE), "the same in PyTorch", |report| {
        if bed.machine.is_emulated() {
            return Ok(Verdict::Skipped("an emulator has no speed".into()));
        }
        if budget.is_zero() {
            return Ok(Verdict::Skipped("the time is up".into()));
        }
        let (limit, budget) = (limit.to_string(), budget.as_secs().to_string());
        let mut command = Command::new("timeout");
        command.args(["--kill-after=5", &limit, "python3", script, "--budget", &budget]);
        let before = report.count("peer");
        let output = lines_of(&mut command, |line| {
            if let Ok(entry @ Value::Object(_)) = serde_json::from_str(line) {
                report.push("peer", entry);
            }
        })?;
        match verdict(&output)? {
            Verdict::Passed(_) => {
                Ok(Verdict::Passed(format!("{} timed", report.count("peer") - before)))
            }
            skipped => Ok(skipped),
        }
    });
}

/// Runs a program; each line on its standard output goes to `take` as it comes.
fn lines_of(command: &mut Command, mut take: impl FnMut(&str)) -> std::io::Result<Output> {
    // Into a file, so that nobody has to read it beside the lines.
    let mut errors = tempfile::tempfile()?;
    let mut child = command.stdout(Stdio::piped()).stderr(errors.try_clone()?).spawn()?;
    for line in BufReader::new(child.stdout.take().expect("piped")).lines() {
        take(&line?);
    }
    let status = child.wait()?;
    let mut stderr = Vec::new();
    errors.rewind()?;
    errors.read_to_end(&mut stderr)?;
    Ok(Output { status, stdout: Vec::new(), stderr })
}

/// Lets a program try an engine pair in the repository that it is given, `tiny` by name.
pub(crate) fn with_engine(report: &mut Report, program: Option<&str>, bed: Bed) {
    let Some(program) = program else { return };
    report.check_within(SERVER_LIMIT, "an engine behind tritonserver", |_| {
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

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn lines_are_taken_as_they_come_and_the_end_says_why() {
        let run = |script: &str| {
            let mut lines = Vec::new();
            let mut command = Command::new("bash");
            let output = lines_of(command.args(["-c", script]), |line| lines.push(line.into()));
            (lines as Vec<String>, verdict(&output.unwrap()))
        };
        let (lines, ended) = run("echo 1; echo 2; echo no PyTorch here >&2; exit 77");
        assert_eq!(lines, ["1", "2"]);
        assert!(matches!(ended, Ok(Verdict::Skipped(why)) if why == "no PyTorch here"));
        let (lines, ended) = run("echo 3; echo line of code >&2; echo wrong >&2; kill -KILL $$");
        assert_eq!(lines, ["3"]);
        let error = ended.err().unwrap().to_string();
        assert!(error.ends_with("line of code | wrong"), "{error}");
    }
}
