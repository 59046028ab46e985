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

use crate::api::{Level, log, monotonic_ns};
use crate::instance::Instance;
use crate::{barrier, process};
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

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
    watcher: Option<Thread>,
}

struct Entry {
    id: u64,
    instance: Instance,
    /// When its server began to end, if that is known from the server alone.
    begun_at: Option<u64>,
    /// From the beginning of the end.
    limit: Duration,
    answer: Arc<Answer>,
}

/// Answers what is open with an error, and returns when the clients have been told, or after this time.
type Answer = dyn Fn(Duration) + Send + Sync;

/// Something that holds requests: as long as this lives it is told when the server ends.
///
/// ```no_run
/// use std::sync::{Arc, Mutex};
/// use std::time::Duration;
/// use triton_backend::{Error, Instance, OnExit, Request};
///
/// /// What is being worked on, when the server gives it no more than ten seconds.
/// fn watch(instance: &Instance, running: &Arc<Mutex<Vec<Request>>>) -> OnExit {
///     let running = Arc::clone(running);
///     instance.on_exit(Duration::from_secs(10), move |_limit| {
///         if let Ok(mut running) = running.lock() {
///             for mut request in running.drain(..) {
///                 request.fail(&Error::unavailable("the server is shutting down"));
///             }
///         }
///     })
/// }
/// ```
#[derive(Debug)]
pub struct OnExit(u64);

impl OnExit {
    /// As [`Instance::on_exit`](crate::Instance::on_exit).
    pub(crate) fn new(
        instance: Instance,
        limit: Duration,
        answer: impl Fn(Duration) + Send + Sync + 'static,
    ) -> Self {
        let limit = limit.min(grace() / 2);
        let mut watched = lock();
        watched.num_entries += 1;
        let id = watched.num_entries;
        let answer = Arc::new(answer);
        watched.entries.push(Entry { id, instance, begun_at: None, limit, answer });
        if watched.watcher.is_none() {
            let watcher = thread::Builder::new()
                .name(format!("{}-watch", process::backend_name()))
                .spawn(watch);
            // Without the thread there is still the handler of `exit`.
            watched.watcher = watcher.ok().map(|watcher| watcher.thread().clone());
        }
        Self(id)
    }
}

impl Drop for OnExit {
    fn drop(&mut self) {
        let mut watched = lock();
        watched.entries.retain(|entry| entry.id != self.0);
        // Without anything to watch over there is no thread, unless the server ends. It is not waited for: by then there
        // may be another one, and the library stays.
        if watched.entries.is_empty() && ending_for().is_none() {
            watched.watcher.take().iter().for_each(Thread::unpark);
        }
    }
}

fn lock() -> MutexGuard<'static, Watched> {
    WATCHED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The server is about to end. May be called by a signal handler.
pub(crate) fn begin() {
    // Of several signals the first one counts.
    let _ = BEGUN_AT.compare_exchange(0, monotonic_ns(), Ordering::AcqRel, Ordering::Acquire);
    if GRACE.get().is_some_and(Duration::is_zero) {
        // There is no time to answer anything.
        barrier::close();
    }
}

/// How long the process has been ending.
fn ending_for() -> Option<Duration> {
    Some(BEGUN_AT.load(Ordering::Acquire)).filter(|&at| at > 0).map(since)
}

fn since(at: u64) -> Duration {
    Duration::from_nanos(monotonic_ns().saturating_sub(at))
}

impl Entry {
    /// Learns from the server that it ends. In Triton's own program that is the end of the process; another one may
    /// start its next server.
    fn ask_server(&mut self) {
        if ending_for().is_some() || self.begun_at.is_some() || !self.instance.is_server_exiting() {
            return;
        }
        match process::is_triton() {
            true => begin(),
            false => self.begun_at = Some(monotonic_ns()),
        }
    }

    fn is_due(&self) -> bool {
        let ending_for = ending_for().or_else(|| self.begun_at.map(since));
        ending_for.is_some_and(|time| time >= self.limit)
    }
}

/// Has everything answered. All are told, and waited for together no longer than `LAST_ANSWERS`.
fn answer_all(answers: &[Arc<Answer>]) {
    // Who wants to call Triton now waits for ever, and nobody could hear the answers.
    if barrier::is_barred() {
        return;
    }
    let end = Instant::now() + LAST_ANSWERS;
    answers.iter().for_each(|answer| answer(end.saturating_duration_since(Instant::now())));
}

/// Looks for the end, and tells those whose time is up; then sees to it that it comes.
fn watch() {
    let mut told = Vec::new();
    loop {
        let mut watched = lock();
        let is_own = |watcher: &Thread| watcher.id() == thread::current().id();
        if !watched.watcher.as_ref().is_none_or(is_own) {
            return;
        }
        watched.entries.iter_mut().for_each(Entry::ask_server);
        let is_empty = watched.entries.is_empty();
        if is_empty && ending_for().is_none() {
            watched.watcher = None;
            return;
        }
        let is_due = |entry: &&Entry| entry.is_due() && !told.contains(&entry.id);
        let due: Vec<_> = watched.entries.iter().filter(is_due).collect();
        let answers: Vec<_> = due.iter().map(|entry| Arc::clone(&entry.answer)).collect();
        let ids: Vec<_> = due.iter().map(|entry| entry.id).collect();
        drop(watched);
        told.extend(ids);
        answer_all(&answers);
        if process::is_triton() && ending_for().is_some_and(|time| time > grace() + OVERTIME) {
            let status = i32::from(!is_empty);
            let name = process::backend_name();
            eprintln!(
                "{name}: the server has not ended within its exit timeout: ended with {status}"
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
pub(crate) fn exit(status: i32) {
    begin();
    let answers: Vec<_> = lock().entries.iter().map(|entry| Arc::clone(&entry.answer)).collect();
    answer_all(&answers);
    if !answers.is_empty() {
        let is_heard = !barrier::is_barred();
        if is_heard {
            thread::sleep(FLUSH);
        }
        if process::is_triton() {
            if is_heard {
                log(Level::Warn, "the server exits with models at work: ended without further ado");
            }
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
