//! Runs the checks in a process of their own and begins another one for what is left wherever that one ends early: a
//! kernel that faults takes its process's GPU with it, one that hangs its process, and neither the run.

use crate::report::Report;
use serde_json::Map;
use std::io;
use std::path::Path;
use std::process::{Child, Command, ExitStatus};
use std::thread;
use std::time::{Duration, Instant};

/// What a process exits with that leaves the rest to another one.
pub(crate) const AGAIN: u8 = 75;

/// How often is looked.
const PAUSE: Duration = Duration::from_millis(100);
/// How long a process that was ended may take to go: the driver stops its kernels first.
const PATIENCE: Duration = Duration::from_secs(20);

/// How a process ended.
enum End {
    ByItself(ExitStatus),
    /// Its check took too long.
    Overdue,
    /// The run has.
    TimeIsUp,
}

/// Runs processes that record in `file` until one has nothing left to do or `limit` is over; gives what is in the file.
pub(crate) fn run(
    mut process: impl FnMut() -> Command,
    file: &Path,
    limit: Duration,
) -> io::Result<Report> {
    let deadline = Instant::now() + limit;
    let read = || Report::new(Some(file.into()), Map::new());
    let mut num_checks = 0;
    loop {
        let mut child = process().spawn()?;
        let end = watch(&mut child, || read().is_overdue(), deadline)?;
        let mut report = read();
        let mut goes_on = report.is_running();
        match end {
            End::ByItself(status) if status.success() => return Ok(report),
            End::ByItself(status) if status.code() == Some(AGAIN.into()) => goes_on = true,
            End::ByItself(status) => report.fail_running(&format!("its process ended: {status}")),
            End::Overdue => report.fail_running("it did not come to its end and was ended"),
            End::TimeIsUp => {
                report.fail_running("it was ended: the time of the run was up");
                return Ok(report);
            }
        }
        // The next one would end at the same place, if not in a check that has an end now.
        let before = std::mem::replace(&mut num_checks, report.count("checks"));
        if !goes_on || num_checks == before {
            return Ok(report);
        }
    }
}

fn watch(child: &mut Child, is_overdue: impl Fn() -> bool, deadline: Instant) -> io::Result<End> {
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(End::ByItself(status));
        }
        let is_up = Instant::now() > deadline;
        if is_up || is_overdue() {
            end(child)?;
            return Ok(if is_up { End::TimeIsUp } else { End::Overdue });
        }
        thread::sleep(PAUSE);
    }
}

fn end(child: &mut Child) -> io::Result<()> {
    child.kill()?;
    let start = Instant::now();
    while child.try_wait()?.is_none() {
        if start.elapsed() > PATIENCE {
            eprintln!("gpu-check: process {} does not end", child.id());
            return Ok(());
        }
        thread::sleep(PAUSE);
    }
    Ok(())
}
