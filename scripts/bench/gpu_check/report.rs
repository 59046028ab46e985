//! What was found, on standard error as it comes and in a JSON file that is whole after every entry. A process that
//! goes on for one that ended early begins with its file, and runs what is not in it.

use serde_json::{Map, Value, json};
use std::collections::HashSet;
use std::error::Error;
use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// The text of a check that passed, or why it did not.
pub(crate) type Outcome = Result<Verdict, Box<dyn Error>>;

/// How a check that ran, or did not need to, ended.
pub(crate) enum Verdict {
    /// It holds, and how well.
    Passed(String),
    /// It does not apply here, and why.
    Skipped(String),
}

/// What a check that hangs is given up after, if it says nothing else.
const LIMIT: Duration = Duration::from_secs(90);

/// The results of a run.
pub(crate) struct Report {
    file: Option<PathBuf>,
    json: Map<String, Value>,
    /// Checks that another process has ended.
    ended: HashSet<String>,
    has_failed: bool,
    stops_at_failure: bool,
}

impl Report {
    /// Writes to `file`, beginning with what it holds, or with these facts and the time where it is new.
    pub(crate) fn new(file: Option<PathBuf>, facts: Map<String, Value>) -> Self {
        let held =
            file.as_ref().and_then(|file| serde_json::from_slice(&fs::read(file).ok()?).ok());
        let mut json: Map<String, Value> = held.unwrap_or(facts);
        json.entry("began").or_insert_with(|| json!(now()));
        let mut report =
            Self { file, json, ended: HashSet::new(), has_failed: false, stops_at_failure: false };
        let names = report.checks().iter().filter_map(|check| check["name"].as_str());
        report.ended = names.map(String::from).collect();
        report
    }

    /// Passes over everything after a check that failed: another process shall go on, on a GPU that is as new.
    pub(crate) fn stopping_at_failure(self) -> Self {
        Self { stops_at_failure: true, ..self }
    }

    /// Whether a check failed here, so that another process must go on.
    pub(crate) fn is_stopped(&self) -> bool {
        self.stops_at_failure && self.has_failed
    }

    /// Since the first process of the run began.
    pub(crate) fn elapsed(&self) -> Duration {
        let began = self.json["began"].as_f64().unwrap_or_else(now);
        Duration::from_secs_f64((now() - began).max(0.0))
    }

    /// A part of the run, as one that has not come to its end until it has.
    pub(crate) fn part(&mut self, name: &str, run: impl FnOnce(&mut Self)) {
        if self.is_stopped() {
            return;
        }
        self.set_part(name, "not finished");
        run(self);
        if !self.is_stopped() {
            self.set_part(name, "finished");
        }
    }

    /// Notes how far a part has come.
    pub(crate) fn set_part(&mut self, name: &str, state: &str) {
        let parts = self.json.entry("parts").or_insert_with(|| json!({}));
        if parts[name] != "finished" {
            parts[name] = json!(state);
        }
        self.write();
    }

    /// Whether a check has, in this process or in one before it.
    pub(crate) fn has_failed(&self, name: &str) -> bool {
        let is_it = |check: &Value| check["name"] == name && check["status"] == "failed";
        self.checks().iter().any(is_it)
    }

    /// Runs a check that does not take long; a panic is a failure like any other.
    pub(crate) fn check(&mut self, name: &str, run: impl FnOnce(&mut Self) -> Outcome) {
        self.check_within(LIMIT, name, run);
    }

    /// Runs a check, which who looks after this process ends when the time is over.
    pub(crate) fn check_within(
        &mut self,
        limit: Duration,
        name: &str,
        run: impl FnOnce(&mut Self) -> Outcome,
    ) {
        if self.is_stopped() || self.ended.contains(name) {
            return;
        }
        eprint!("{name} ... ");
        self.put("running", json!({ "name": name, "until": now() + limit.as_secs_f64() }));
        let start = Instant::now();
        let outcome = catch_unwind(AssertUnwindSafe(|| run(self)))
            .unwrap_or_else(|panic| Err(message(&*panic).into()));
        let (status, detail) = match outcome {
            Ok(Verdict::Passed(detail)) => ("passed", detail),
            Ok(Verdict::Skipped(why)) => ("skipped", why),
            Err(error) => ("failed", error.to_string()),
        };
        self.settle(name, status, &detail, start.elapsed().as_secs_f64());
    }

    /// The process that was recording has ended, and with it the check that ran, if one did.
    pub(crate) fn fail_running(&mut self, why: &str) {
        let running = self.json.get("running").cloned().unwrap_or_default();
        let name = running["name"].as_str().unwrap_or("between checks").to_string();
        self.settle(&name, "failed", why, 0.0);
    }

    /// Whether a check is running.
    pub(crate) fn is_running(&self) -> bool {
        self.json.contains_key("running")
    }

    /// Whether the check that runs does so for longer than it may; an emulator may take as long as it likes.
    pub(crate) fn is_overdue(&self) -> bool {
        if self.json.get("emulated") == Some(&json!(true)) {
            return false;
        }
        let until = self.json.get("running").and_then(|running| running["until"].as_f64());
        until.is_some_and(|until| now() > until)
    }

    fn settle(&mut self, name: &str, status: &str, detail: &str, seconds: f64) {
        self.has_failed |= status == "failed";
        self.json.remove("running");
        eprintln!("{status} ({seconds:.1} s): {detail}");
        let seconds = (seconds * 100.0).round() / 100.0;
        let entry = json!({ "name": name, "status": status, "detail": detail, "seconds": seconds });
        self.push("checks", entry);
    }

    /// Sets a field.
    pub(crate) fn put(&mut self, key: &str, value: Value) {
        self.json.insert(key.into(), value);
        self.write();
    }

    /// A field.
    pub(crate) fn get(&self, key: &str) -> Option<&Value> {
        self.json.get(key)
    }

    /// Appends to a list.
    pub(crate) fn push(&mut self, key: &str, value: Value) {
        let list = self.json.entry(key).or_insert_with(|| json!([]));
        list.as_array_mut().expect("only this makes lists").push(value);
        self.write();
    }

    /// Entries of a list.
    pub(crate) fn count(&self, key: &str) -> usize {
        self.json.get(key).and_then(Value::as_array).map_or(0, Vec::len)
    }

    fn checks(&self) -> &[Value] {
        self.json.get("checks").and_then(Value::as_array).map_or(&[], Vec::as_slice)
    }

    /// The last line, and whether nothing failed and every part came to its end.
    pub(crate) fn finish(&mut self) -> (String, bool) {
        let count = |status: &str| {
            self.checks().iter().filter(|check| check["status"] == json!(status)).count()
        };
        let [passed, failed, skipped] = ["passed", "failed", "skipped"].map(count);
        self.put("counts", json!({ "passed": passed, "failed": failed, "skipped": skipped }));
        let parts = self.json.get("parts").and_then(Value::as_object);
        // A file that could not be written has none, and nothing is known.
        let has_parts = parts.is_some_and(|parts| !parts.is_empty());
        let states = parts.into_iter().flatten();
        let states = states.filter_map(|(name, state)| Some((name, state.as_str()?)));
        let open = states.filter(|(_, state)| *state != "finished");
        let open: Vec<String> = open.map(|(name, state)| format!("{name} {state}")).collect();
        let mut line = format!("{passed} passed, {failed} failed, {skipped} skipped");
        if !open.is_empty() {
            line = format!("{line}; {}", open.join(", "));
        }
        (line, failed == 0 && has_parts && open.is_empty())
    }

    /// What cannot be written is said and does not end the run: the GPU's time is dear.
    fn write(&self) {
        let Some(file) = &self.file else { return };
        let partial = file.with_extension("partial");
        let text = serde_json::to_string_pretty(&self.json).expect("plain data becomes JSON");
        if let Err(error) =
            fs::write(&partial, text + "\n").and_then(|()| fs::rename(&partial, file))
        {
            eprintln!("gpu-check: {}: {error}", file.display());
        }
    }
}

/// Seconds, as every process sees them.
fn now() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64()
}

fn message(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("panicked").into()
}
