//! What the threads of an instance leave for its engine thread, and how they learn that it is closing or dead. One lock,
//! held for moments; the engine thread never waits for anybody but for work.

use crate::room::Place;
use crate::watch::Watch;
use spec_core::runtime::{FinishReason, Request};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use triton_backend::{Error, monotonic_ns};

/// How long others go before an engine whose step has failed.
const AVOIDED: Duration = Duration::from_secs(1);

/// Names a request for as long as its instance lives.
pub(crate) type TicketId = u64;

/// Names a row of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct RowId {
    pub(crate) ticket: TicketId,
    pub(crate) row_idx: usize,
}

/// A request for the engine thread.
pub(crate) struct Job {
    pub(crate) ticket: TicketId,
    /// A row each.
    pub(crate) requests: Vec<Request>,
    pub(crate) watch: Watch,
    /// Its place among those that wait.
    pub(crate) place: Place,
}

/// What is no longer wanted.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Stop {
    /// A row that ends well all the same: its text has met a stop word, or its client wants no more.
    Row(RowId, FinishReason),
    /// A request whose client cannot be served any more.
    Ticket(TicketId),
}

/// What has come in.
#[derive(Default)]
pub(crate) struct Mail {
    pub(crate) jobs: Vec<Job>,
    pub(crate) stops: Vec<Stop>,
    /// Whether what is still there is to be given up: the time to finish it is over.
    pub(crate) gives_up: bool,
}

#[derive(Default)]
struct Inside {
    mail: Mail,
    closing: bool,
    /// What the engine thread died of.
    death: Option<String>,
    /// What the last step failed with.
    failure: Option<String>,
    finished: bool,
}

/// The mailbox of an engine thread.
pub(crate) struct Mailbox {
    inside: Mutex<Inside>,
    mail_came: Condvar,
    /// The engine thread is at its end.
    ended: Condvar,
    /// Read without the lock by readiness checks.
    healthy: AtomicBool,
    /// When the last step failed that did, in nanoseconds of the monotonic clock.
    failed_at: AtomicU64,
}

impl Mailbox {
    pub(crate) fn new() -> Self {
        Self {
            inside: Mutex::default(),
            mail_came: Condvar::new(),
            ended: Condvar::new(),
            healthy: AtomicBool::new(true),
            failed_at: AtomicU64::new(0),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Inside> {
        self.inside.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Leaves a job, or gives it back with the reason why not. `announce` runs just before the engine thread can see
    /// the job.
    pub(crate) fn leave(&self, job: Job, announce: impl FnOnce()) -> Result<(), Box<(Job, Error)>> {
        let mut inside = self.lock();
        if let Some(error) = closed(&inside) {
            return Err(Box::new((job, error)));
        }
        announce();
        inside.mail.jobs.push(job);
        drop(inside);
        self.mail_came.notify_one();
        Ok(())
    }

    /// Whether jobs have come that the engine thread has not collected, or it is to give up what it has.
    pub(crate) fn hurries(&self) -> bool {
        let inside = self.lock();
        !inside.mail.jobs.is_empty() || inside.mail.gives_up
    }

    /// Tells the engine thread that something is no longer wanted.
    pub(crate) fn stop(&self, stop: Stop) {
        let mut inside = self.lock();
        // A dead engine thread reads nothing.
        if inside.death.is_none() {
            inside.mail.stops.push(stop);
        }
        drop(inside);
        self.mail_came.notify_one();
    }

    /// What has come in since the last call; a caller that is idle waits for mail. `None` when it is idle and no mail can
    /// come any more.
    pub(crate) fn collect(&self, idle: bool) -> Option<Mail> {
        let mut inside = self.lock();
        while idle && inside.mail.jobs.is_empty() && inside.mail.stops.is_empty() {
            if inside.closing {
                return None;
            }
            inside = self.mail_came.wait(inside).unwrap_or_else(PoisonError::into_inner);
        }
        let gives_up = inside.mail.gives_up;
        Some(std::mem::replace(&mut inside.mail, Mail { gives_up, ..Mail::default() }))
    }

    /// The engine thread has died of this.
    pub(crate) fn die(&self, cause: &str) {
        self.healthy.store(false, Ordering::Release);
        let mut inside = self.lock();
        inside.death = Some(cause.to_string());
        inside.mail = Mail::default();
    }

    /// How the last step went.
    pub(crate) fn note_step(&self, failure: Option<&str>) {
        let healthy = failure.is_none();
        if !healthy {
            self.failed_at.store(monotonic_ns(), Ordering::Release);
        }
        if self.healthy.swap(healthy, Ordering::AcqRel) != healthy || !healthy {
            self.lock().failure = failure.map(str::to_string);
        }
    }

    /// Whether the engine thread lives and its last step worked.
    pub(crate) fn health(&self) -> Result<(), Error> {
        if self.healthy.load(Ordering::Acquire) {
            return Ok(());
        }
        let inside = self.lock();
        let cause = inside.death.as_ref().or(inside.failure.as_ref());
        Err(Error::unavailable(cause.map_or("the engine failed", String::as_str)))
    }

    /// Whether others go before it: it is dead, or a step has just failed. After a while it is tried again.
    pub(crate) fn is_avoided(&self) -> bool {
        let has_just_failed = || {
            let failed_at = self.failed_at.load(Ordering::Acquire);
            monotonic_ns().saturating_sub(failed_at) < AVOIDED.as_nanos() as u64
        };
        !self.healthy.load(Ordering::Acquire) && (self.lock().death.is_some() || has_just_failed())
    }

    /// Takes no more jobs.
    pub(crate) fn close(&self) {
        self.lock().closing = true;
        self.mail_came.notify_one();
    }

    /// Waits until the engine thread has finished; after `limit` has it give up what is left.
    pub(crate) fn drain(&self, limit: Duration) {
        let inside = self.lock();
        let waited = self.ended.wait_timeout_while(inside, limit, |inside| !inside.finished);
        let (mut inside, timeout) = waited.unwrap_or_else(PoisonError::into_inner);
        if timeout.timed_out() {
            inside.mail.gives_up = true;
        }
    }

    /// The engine thread is at its end.
    pub(crate) fn finish(&self) {
        self.lock().finished = true;
        self.ended.notify_all();
    }
}

fn closed(inside: &Inside) -> Option<Error> {
    if let Some(cause) = &inside.death {
        return Some(Error::unavailable(format!("{cause}; reload the model")));
    }
    inside.closing.then(|| Error::unavailable("the model instance is being taken away"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::parameters::{LevelPolicy, QueuePolicy, WhenFull};
    use crate::room::Room;
    use std::sync::Arc;
    use std::thread;

    fn job(ticket: TicketId) -> Job {
        let watch = Watch::new(Box::new(|| false), 0, None, None, &LevelPolicy::default());
        let room = Room::new(QueuePolicy::default(), 1, WhenFull::Refuse);
        let place = room.enter(1, 1, || None).unwrap();
        Job { ticket, requests: vec![Request::default()], watch, place }
    }

    fn refusal(mailbox: &Mailbox) -> Error {
        match mailbox.leave(job(8), || panic!("it is announced")) {
            Ok(()) => panic!("it is taken"),
            Err(back) => back.1,
        }
    }

    #[test]
    fn a_job_is_announced_before_it_can_be_seen() {
        let mailbox = Arc::new(Mailbox::new());
        let announced = Arc::new(AtomicBool::new(false));
        let (other, seen) = (Arc::clone(&mailbox), Arc::clone(&announced));
        let engine = thread::spawn(move || {
            let mail = other.collect(true).unwrap();
            (mail.jobs.len(), seen.load(Ordering::SeqCst))
        });
        assert!(mailbox.leave(job(0), || announced.store(true, Ordering::SeqCst)).is_ok());
        assert_eq!(engine.join().unwrap(), (1, true));
    }

    #[test]
    fn a_job_that_is_not_collected_hurries_and_what_is_no_longer_wanted_does_not() {
        let mailbox = Mailbox::new();
        mailbox.stop(Stop::Ticket(3));
        assert!(!mailbox.hurries());
        assert!(mailbox.leave(job(0), || ()).is_ok());
        assert!(mailbox.hurries());
        mailbox.collect(false).unwrap();
        assert!(!mailbox.hurries());
    }

    #[test]
    fn a_dead_engine_refuses_with_its_cause() {
        let mailbox = Mailbox::new();
        assert!(mailbox.leave(job(7), || ()).is_ok());
        mailbox.health().unwrap();
        mailbox.die("the engine thread ended by a panic: oh");
        let message = refusal(&mailbox).message;
        assert_eq!(message, "the engine thread ended by a panic: oh; reload the model");
        assert_eq!(mailbox.health().unwrap_err().code, triton_backend::Code::Unavailable);
    }

    #[test]
    fn health_follows_the_last_step() {
        let mailbox = Mailbox::new();
        mailbox.note_step(Some("device: lost"));
        assert_eq!(mailbox.health().unwrap_err().message, "device: lost");
        mailbox.note_step(None);
        mailbox.health().unwrap();
    }

    #[test]
    fn one_whose_step_has_failed_is_avoided_for_a_while_and_a_dead_one_for_ever() {
        let mailbox = Mailbox::new();
        assert!(!mailbox.is_avoided());
        mailbox.note_step(Some("device: lost"));
        assert!(mailbox.is_avoided());
        // A nanosecond after the clock's zero is long ago.
        mailbox.failed_at.store(1, Ordering::Release);
        assert!(!mailbox.is_avoided() && mailbox.health().is_err());
        mailbox.die("a panic");
        assert!(mailbox.is_avoided());
    }

    #[test]
    fn a_closed_mailbox_ends_an_idle_engine_and_refuses_jobs() {
        let mailbox = Mailbox::new();
        mailbox.close();
        assert!(mailbox.collect(true).is_none());
        assert!(mailbox.collect(false).is_some(), "work that is there is finished");
        assert_eq!(refusal(&mailbox).code, triton_backend::Code::Unavailable);
    }

    #[test]
    fn what_is_not_finished_in_time_is_given_up() {
        let mailbox = Mailbox::new();
        mailbox.close();
        mailbox.drain(Duration::from_millis(1));
        assert!(mailbox.collect(false).unwrap().gives_up);
    }
}
