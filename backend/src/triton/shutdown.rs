//! The end of the server, seen from a backend, whom nobody tells.
//!
//! Triton's `main` gives what is in flight a time to finish (`--exit-timeout-secs`), then destroys its frontends and calls
//! `exit`, whether or not requests are left. Whoever still answers one of these writes to freed memory; and a frontend
//! whose client keeps a stream open is never destroyed at all, so that the process stays for ever. Therefore:
//!
//! * The beginning of the end is noticed, by the signal that asks for it or by the server's own word.
//! * Backends are told to answer what they hold while there is time ([`OnExit`]).
//! * When `exit` is called with a backend at work, the process ends then and there: nothing is destroyed under threads that
//!   use it. In other hosts than Triton's own program, whose exit is theirs, those threads stop instead.
//! * A server that has not ended when its time is over is ended.

use super::api::{Level, log, monotonic_ns};
use super::server::Server;
use super::{barrier, process};
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

/// Triton's own, where its command line does not say.
const DEFAULT_GRACE: Duration = Duration::from_secs(30);
/// How often the server is looked at.
const PERIOD: Duration = Duration::from_millis(50);
/// How long `exit` may be held up: by requests that are being answered, then by calls that have begun.
const LAST_ANSWERS: Duration = Duration::from_secs(1);
const LAST_CALLS: Duration = Duration::from_millis(500);
/// What frontends need to write an answer to a socket.
const FLUSH: Duration = Duration::from_millis(100);
/// How much longer than its time a server may take.
const OVERTIME: Duration = Duration::from_millis(1500);

/// When the end began, in nanoseconds of the monotonic clock; 0 as long as it has not.
static BEGUN_AT: AtomicU64 = AtomicU64::new(0);
static WATCHED: Mutex<Watched> =
    Mutex::new(Watched { num_entries: 0, entries: Vec::new(), watcher: None });

/// Who is to be told of the end, and the thread that sees to it.
struct Watched {
    num_entries: u64,
    entries: Vec<Entry>,
    watcher: Option<JoinHandle<()>>,
}

struct Entry {
    id: u64,
    server: Server,
    /// From the beginning of the end.
    limit: Duration,
    answer: Arc<Answer>,
}

/// Answers what is open with an error, and returns when the clients have been told, or after this time.
type Answer = dyn Fn(Duration) + Send + Sync;

/// Something that holds requests: as long as this lives it is told when the server ends.
#[derive(Debug)]
pub struct OnExit(u64);

impl OnExit {
    /// As [`Instance::on_exit`](super::Instance::on_exit).
    pub(super) fn new(
        server: Server,
        limit: Duration,
        answer: impl Fn(Duration) + Send + Sync + 'static,
    ) -> Self {
        let limit = limit.min(grace() / 2);
        let mut watched = lock();
        watched.num_entries += 1;
        let id = watched.num_entries;
        watched.entries.push(Entry { id, server, limit, answer: Arc::new(answer) });
        if watched.watcher.is_none() {
            let watcher = thread::Builder::new().name("spec-watch".into()).spawn(watch);
            // Without the thread there is still the handler of `exit`.
            watched.watcher = watcher.ok();
        }
        Self(id)
    }
}

impl Drop for OnExit {
    fn drop(&mut self) {
        let mut watched = lock();
        watched.entries.retain(|entry| entry.id != self.0);
        // Without anything to watch over there is no thread, unless the server ends.
        let is_over = watched.entries.is_empty() && ending_for().is_none();
        let watcher = is_over.then(|| watched.watcher.take()).flatten();
        drop(watched);
        if let Some(watcher) = watcher {
            watcher.thread().unpark();
            // It lets no panic out.
            let _ = watcher.join();
        }
    }
}

fn lock() -> MutexGuard<'static, Watched> {
    WATCHED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The server is about to end. May be called by a signal handler.
pub(super) fn begin() {
    // Of several signals the first one counts.
    let _ = BEGUN_AT.compare_exchange(0, monotonic_ns(), Ordering::AcqRel, Ordering::Acquire);
    if GRACE.get().is_some_and(Duration::is_zero) {
        // There is no time to answer anything.
        barrier::close();
    }
}

/// How long the server has been ending.
fn ending_for() -> Option<Duration> {
    let begun_at = Some(BEGUN_AT.load(Ordering::Acquire)).filter(|&at| at > 0)?;
    Some(Duration::from_nanos(monotonic_ns().saturating_sub(begun_at)))
}

/// Looks for the end, and tells those whose time is up; then sees to it that it comes.
fn watch() {
    let mut told = Vec::new();
    loop {
        let watched = lock();
        // Asked under the lock: a server lives at least as long as its models, and these as their entries.
        match watched.entries.first() {
            Some(entry) if ending_for().is_none() && entry.server.is_exiting() => begin(),
            None if ending_for().is_none() => return,
            _ => {}
        }
        let is_due = |entry: &&Entry| ending_for().is_some_and(|time| time >= entry.limit);
        let due = watched.entries.iter().filter(is_due);
        let due: Vec<_> = due.map(|entry| (entry.id, Arc::clone(&entry.answer))).collect();
        let is_empty = watched.entries.is_empty();
        drop(watched);
        for (id, answer) in due {
            if !told.contains(&id) {
                told.push(id);
                answer(LAST_ANSWERS);
            }
        }
        if process::is_triton() && ending_for().is_some_and(|time| time > grace() + OVERTIME) {
            let status = i32::from(!is_empty);
            eprintln!(
                "spec: the server has not ended within its exit timeout: ended with {status}"
            );
            process::end(status);
        }
        thread::park_timeout(PERIOD);
    }
}

static GRACE: OnceLock<Duration> = OnceLock::new();

/// How long the server waits for what is in flight when it ends.
fn grace() -> Duration {
    *GRACE.get_or_init(|| {
        let line = std::fs::read("/proc/self/cmdline").unwrap_or_default();
        let secs = exit_timeout(line.split(|&byte| byte == 0).map(OsStr::from_bytes));
        secs.map_or(DEFAULT_GRACE, Duration::from_secs)
    })
}

/// Of Triton's command line.
fn exit_timeout<'a>(mut arguments: impl Iterator<Item = &'a OsStr>) -> Option<u64> {
    const NAME: &str = "--exit-timeout-secs";
    loop {
        let argument = arguments.next()?.to_str().unwrap_or_default();
        let value = match argument.strip_prefix(NAME) {
            Some("") => arguments.next()?.to_str()?,
            Some(value) if value.starts_with('=') => &value[1..],
            _ => continue,
        };
        return value.parse().ok();
    }
}

/// The process exits: `main` has returned, or somebody has called `exit`. Nothing that was made before the backend was
/// loaded has been destroyed yet.
pub(super) fn exit(status: i32) {
    begin();
    let answers: Vec<_> = lock().entries.iter().map(|entry| Arc::clone(&entry.answer)).collect();
    for answer in &answers {
        answer(LAST_ANSWERS);
    }
    if !answers.is_empty() {
        thread::sleep(FLUSH);
        if process::is_triton() {
            log(Level::Warn, "the server exits with models at work: ended without further ado");
            process::end(status);
        }
    }
    barrier::close();
    barrier::wait(LAST_CALLS);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(line: &str) -> Option<u64> {
        exit_timeout(line.split(' ').map(OsStr::new))
    }

    #[test]
    fn the_time_that_the_server_gives_is_read_from_its_command_line() {
        assert_eq!(told("tritonserver --exit-timeout-secs=4 --http-port=1"), Some(4));
        assert_eq!(told("tritonserver --exit-timeout-secs 120"), Some(120));
        assert_eq!(told("tritonserver --exit-timeout-secs"), None);
        assert_eq!(told("tritonserver --exit-timeout-secs-more=4 --exit-timeout-secs=0"), Some(0));
        assert_eq!(told("tritonserver --http-port=1"), None);
    }
}
