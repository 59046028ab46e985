//! Progress on stderr: a bar with what is done, rate and time left on a terminal, a line now and then otherwise.

use indicatif::{HumanBytes, ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::io::IsTerminal;
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// Time between two lines when stderr is not a terminal.
const LINE_INTERVAL: Duration = Duration::from_secs(5);

/// What a job consists of.
#[derive(Clone, Copy)]
enum Unit {
    Bytes,
    /// Things with this name.
    Items(&'static str),
}

impl Unit {
    fn template(self) -> String {
        let counts = match self {
            Self::Bytes => "{bytes}/{total_bytes} {bytes_per_sec}".into(),
            Self::Items(name) => format!("{{pos}}/{{len}} {name} {{per_sec}}"),
        };
        format!("{{msg:24}} [{{bar:32}}] {counts} {{eta}}")
    }

    fn show(self, count: u64) -> String {
        match self {
            Self::Bytes => HumanBytes(count).to_string(),
            Self::Items(name) => format!("{count} {name}"),
        }
    }

    fn show_part(self, count: u64, total: u64) -> String {
        match self {
            Self::Bytes => format!("{} of {}", HumanBytes(count), HumanBytes(total)),
            Self::Items(name) => format!("{count} of {total} {name}"),
        }
    }

    fn show_rate(self, count: f64) -> String {
        match self {
            Self::Bytes => format!("{}/s", HumanBytes(count as u64)),
            Self::Items(name) => format!("{count:.1} {name}/s"),
        }
    }
}

/// Counts what is done of one job; shared by the threads that do it.
pub struct Progress {
    bar: ProgressBar,
    lines: Option<Mutex<Instant>>,
    label: String,
    unit: Unit,
}

impl Progress {
    /// Starts a job of `bytes`.
    pub fn start(label: &str, bytes: u64) -> Self {
        Self::start_unit(label, bytes, Unit::Bytes)
    }

    /// Starts a job of `count` things, which have this name.
    pub fn counting(label: &str, count: u64, name: &'static str) -> Self {
        Self::start_unit(label, count, Unit::Items(name))
    }

    fn start_unit(label: &str, count: u64, unit: Unit) -> Self {
        let terminal = std::io::stderr().is_terminal();
        let target =
            if terminal { ProgressDrawTarget::stderr() } else { ProgressDrawTarget::hidden() };
        let bar =
            ProgressBar::with_draw_target(Some(count), target).with_message(label.to_string());
        bar.set_style(
            ProgressStyle::with_template(&unit.template())
                .expect("the template is well formed")
                .progress_chars("=> "),
        );
        let lines = (!terminal).then(|| Mutex::new(Instant::now()));
        Self { bar, lines, label: label.to_string(), unit }
    }

    /// A job that shows nothing.
    pub fn hidden() -> Self {
        let bar = ProgressBar::hidden();
        Self { bar, lines: None, label: String::new(), unit: Unit::Bytes }
    }

    /// Adds what is done.
    pub fn add(&self, count: u64) {
        self.bar.inc(count);
        let Some(lines) = &self.lines else { return };
        let Ok(mut last) = lines.try_lock() else { return };
        if last.elapsed() >= LINE_INTERVAL {
            *last = Instant::now();
            eprintln!(
                "{}: {}, {}, {:.0} s left",
                self.label,
                self.unit.show_part(self.bar.position(), self.bar.length().unwrap_or(0)),
                self.unit.show_rate(self.bar.per_sec()),
                self.bar.eta().as_secs_f64()
            );
        }
    }

    /// Ends the job and says how it went.
    pub fn finish(self) {
        let seconds = self.bar.elapsed().as_secs_f64().max(1e-9);
        let count = self.bar.position();
        self.bar.finish_and_clear();
        if !self.label.is_empty() {
            let rate = self.unit.show_rate(count as f64 / seconds);
            eprintln!("{}: {} in {seconds:.1} s, {rate}", self.label, self.unit.show(count));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_counted_is_named_once() {
        assert_eq!(Unit::Items("answers").show_part(49, 1922), "49 of 1922 answers");
        assert_eq!(Unit::Bytes.show_part(1 << 20, 3 << 20), "1.00 MiB of 3.00 MiB");
    }
}
