//! Progress on stderr: a bar with bytes, rate and time left on a terminal, a line now and then otherwise.

use indicatif::{HumanBytes, ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::io::IsTerminal;
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// Time between two lines when stderr is not a terminal.
const LINE_INTERVAL: Duration = Duration::from_secs(5);

/// Counts bytes of one job; shared by the threads that do it.
pub struct Progress {
    bar: ProgressBar,
    lines: Option<Mutex<Instant>>,
    label: String,
}

impl Progress {
    /// Starts a job of `bytes`.
    pub fn start(label: &str, bytes: u64) -> Self {
        let terminal = std::io::stderr().is_terminal();
        let target =
            if terminal { ProgressDrawTarget::stderr() } else { ProgressDrawTarget::hidden() };
        let bar =
            ProgressBar::with_draw_target(Some(bytes), target).with_message(label.to_string());
        bar.set_style(
            ProgressStyle::with_template(
                "{msg:24} [{bar:32}] {bytes}/{total_bytes} {bytes_per_sec} {eta}",
            )
            .expect("the template is well formed")
            .progress_chars("=> "),
        );
        let lines = (!terminal).then(|| Mutex::new(Instant::now()));
        Self { bar, lines, label: label.to_string() }
    }

    /// A job that shows nothing.
    pub fn hidden() -> Self {
        Self { bar: ProgressBar::hidden(), lines: None, label: String::new() }
    }

    /// Adds finished bytes.
    pub fn add(&self, bytes: u64) {
        self.bar.inc(bytes);
        let Some(lines) = &self.lines else { return };
        let Ok(mut last) = lines.try_lock() else { return };
        if last.elapsed() >= LINE_INTERVAL {
            *last = Instant::now();
            eprintln!(
                "{}: {} of {}, {}/s, {:.0} s left",
                self.label,
                HumanBytes(self.bar.position()),
                HumanBytes(self.bar.length().unwrap_or(0)),
                HumanBytes(self.bar.per_sec() as u64),
                self.bar.eta().as_secs_f64()
            );
        }
    }

    /// Ends the job and says how it went.
    pub fn finish(self) {
        let seconds = self.bar.elapsed().as_secs_f64().max(1e-9);
        let bytes = self.bar.position();
        self.bar.finish_and_clear();
        if !self.label.is_empty() {
            eprintln!(
                "{}: {} in {seconds:.1} s, {}/s",
                self.label,
                HumanBytes(bytes),
                HumanBytes((bytes as f64 / seconds) as u64)
            );
        }
    }
}
