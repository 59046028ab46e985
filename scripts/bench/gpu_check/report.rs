//! What was found, on standard error as it comes and in a JSON file that is whole after every entry.

use serde_json::{Map, Value, json};
use std::error::Error;
use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::time::Instant;

/// The text of a check that passed, or why it did not.
pub(crate) type Outcome = Result<Verdict, Box<dyn Error>>;

/// How a check that ran, or did not need to, ended.
pub(crate) enum Verdict {
    /// It holds, and how well.
    Passed(String),
    /// It does not apply here, and why.
    Skipped(String),
}

/// The results of a run.
pub(crate) struct Report {
    file: Option<PathBuf>,
    json: Map<String, Value>,
    passed: usize,
    failed: usize,
    skipped: usize,
}

impl Report {
    /// Writes to `file`, beginning with these facts.
    pub(crate) fn new(file: Option<PathBuf>, facts: Map<String, Value>) -> Self {
        Self { file, json: facts, passed: 0, failed: 0, skipped: 0 }
    }

    /// Runs a check; a panic is a failure like any other, and the next check runs.
    pub(crate) fn check(&mut self, name: &str, run: impl FnOnce(&mut Self) -> Outcome) {
        eprint!("{name} ... ");
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

    fn settle(&mut self, name: &str, status: &str, detail: &str, seconds: f64) {
        match status {
            "passed" => self.passed += 1,
            "skipped" => self.skipped += 1,
            _ => self.failed += 1,
        }
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

    /// The last line, and whether nothing failed.
    pub(crate) fn finish(&mut self) -> (String, bool) {
        let Self { passed, failed, skipped, .. } = *self;
        self.put("counts", json!({ "passed": passed, "failed": failed, "skipped": skipped }));
        (format!("{passed} passed, {failed} failed, {skipped} skipped"), failed == 0)
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

fn message(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("panicked").into()
}
