//! What the threads of an instance leave for its engine thread, and how they learn that it is full, closing or
//! dead. One lock, held for moments; the engine thread never waits for anybody but for work.

use crate::triton::Error;
use spec_core::runtime::Request;
use spec_core::sequence::FinishReason;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// How often a thread that waits for room looks whether its client is still there.
const ROOM_CHECK: Duration = Duration::from_millis(5);

/// Names a request for as long as its instance lives.
pub(crate) type TicketId = u64;

/// Names a row of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct RowId {
    pub(crate) ticket: TicketId,
    pub(crate) row_idx: usize,
}

/// Tells whether a client has gone away.
pub(crate) type Probe = Box<dyn Fn() -> bool + Send>;

/// A request for the engine thread.
pub(crate) struct Job {
    pub(crate) ticket: TicketId,
    /// A row each.
    pub(crate) requests: Vec<Request>,
    pub(crate) is_cancelled: Probe,
    /// On the monotonic clock, in nanoseconds.
    pub(crate) deadline: Option<u64>,
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
    /// Rows in the hands of the engine thread that have never run.
    queued: usize,
    closing: bool,
    /// What the engine thread died of.
    death: Option<String>,
    /// What the last step failed with.
    failure: Option<String>,
    finished: bool,
}

impl Inside {
    fn waiting(&self) -> usize {
        self.queued + self.mail.jobs.iter().map(|job| job.requests.len()).sum::<usize>()
    }
}

/// The mailbox of an engine thread.
pub(crate) struct Mailbox {
    inside: Mutex<Inside>,
    mail_came: Condvar,
    /// Something changed for those who wait: there is room, or the end has come.
    changed: Condvar,
    /// Rows that may wait.
    max_queue_size: usize,
    /// Read without the lock by readiness checks.
    healthy: AtomicBool,
}

/// Why a job was not taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Unwanted {
    /// The client went away.
    Cancelled,
    /// Its time was up.
    Late,
}

impl Mailbox {
    pub(crate) fn new(max_queue_size: usize) -> Self {
        Self {
            inside: Mutex::default(),
            mail_came: Condvar::new(),
            changed: Condvar::new(),
            max_queue_size,
            healthy: AtomicBool::new(true),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Inside> {
        self.inside.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Leaves a job as soon as there is room. `unwanted` is asked now and then; `announce` runs just before
    /// the engine thread can see the job.
    pub(crate) fn admit(
        &self,
        job: Job,
        mut unwanted: impl FnMut() -> Option<Unwanted>,
        announce: impl FnOnce(),
    ) -> Result<(), Error> {
        let mut inside = self.lock();
        loop {
            if let Some(error) = closed(&inside) {
                return Err(error);
            }
            match unwanted() {
                Some(Unwanted::Cancelled) => return Err(Error::cancelled()),
                Some(Unwanted::Late) => return Err(deadline_passed()),
                None => {}
            }
            // A request of more rows than may wait gets in when nobody else waits.
            let waiting = inside.waiting();
            if waiting == 0 || waiting + job.requests.len() <= self.max_queue_size {
                break;
            }
            let waited = self.changed.wait_timeout(inside, ROOM_CHECK);
            inside = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        announce();
        inside.mail.jobs.push(job);
        drop(inside);
        self.mail_came.notify_one();
        Ok(())
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

    /// What has come in since the last call. `queued` rows wait in the caller's hands; if it is idle this
    /// waits for mail. `None` when it is idle and no mail can come any more.
    pub(crate) fn collect(&self, queued: usize, idle: bool) -> Option<Mail> {
        let mut inside = self.lock();
        if inside.queued != queued {
            inside.queued = queued;
            self.changed.notify_all();
        }
        while idle && inside.mail.jobs.is_empty() && inside.mail.stops.is_empty() {
            if inside.closing {
                return None;
            }
            inside = self.mail_came.wait(inside).unwrap_or_else(PoisonError::into_inner);
        }
        // What is taken now waits in the caller's hands until it says otherwise.
        inside.queued = inside.waiting();
        let gives_up = inside.mail.gives_up;
        Some(std::mem::replace(&mut inside.mail, Mail { gives_up, ..Mail::default() }))
    }

    /// The engine thread has died of this.
    pub(crate) fn die(&self, cause: &str) {
        self.healthy.store(false, Ordering::Release);
        let mut inside = self.lock();
        inside.death = Some(cause.to_string());
        inside.queued = 0;
        inside.mail = Mail::default();
        self.changed.notify_all();
    }

    /// How the last step went.
    pub(crate) fn note_step(&self, failure: Option<&str>) {
        let healthy = failure.is_none();
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

    /// Takes no more jobs.
    pub(crate) fn close(&self) {
        self.lock().closing = true;
        self.mail_came.notify_one();
        self.changed.notify_all();
    }

    /// Waits until the engine thread has finished; after `limit` has it give up what is left.
    pub(crate) fn drain(&self, limit: Duration) {
        let inside = self.lock();
        let waited = self.changed.wait_timeout_while(inside, limit, |inside| !inside.finished);
        let (mut inside, timeout) = waited.unwrap_or_else(PoisonError::into_inner);
        if timeout.timed_out() {
            inside.mail.gives_up = true;
        }
    }

    /// The engine thread is at its end.
    pub(crate) fn finish(&self) {
        self.lock().finished = true;
        self.changed.notify_all();
    }
}

fn closed(inside: &Inside) -> Option<Error> {
    if let Some(cause) = &inside.death {
        return Some(Error::unavailable(format!("{cause}; reload the model")));
    }
    inside.closing.then(|| Error::unavailable("the model instance is being taken away"))
}

/// What a client hears whose time was up.
pub(crate) fn deadline_passed() -> Error {
    Error::unavailable("Request timeout expired: it was not finished in the time it had")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::sync::atomic::AtomicUsize;
    use std::sync::mpsc::channel;
    use std::thread;

    fn job(ticket: TicketId, num_rows: usize) -> Job {
        let requests = vec![Request::default(); num_rows];
        Job { ticket, requests, is_cancelled: Box::new(|| false), deadline: None }
    }

    fn admit(mailbox: &Mailbox, job: Job) -> Result<(), Error> {
        mailbox.admit(job, || None, || ())
    }

    #[test]
    fn a_full_mailbox_holds_its_callers_until_jobs_have_started() {
        let mailbox = Arc::new(Mailbox::new(2));
        admit(&mailbox, job(0, 2)).unwrap();
        let (sender, admitted) = channel();
        let other = Arc::clone(&mailbox);
        let caller = thread::spawn(move || {
            admit(&other, job(1, 1)).unwrap();
            sender.send(()).unwrap();
        });
        // Taken over, but not started: still waiting, told so or not.
        assert_eq!(mailbox.collect(0, true).unwrap().jobs.len(), 1);
        assert!(admitted.recv_timeout(Duration::from_millis(50)).is_err());
        mailbox.collect(2, false).unwrap();
        assert!(admitted.recv_timeout(Duration::from_millis(50)).is_err());
        mailbox.collect(1, false).unwrap();
        admitted.recv_timeout(Duration::from_secs(10)).unwrap();
        caller.join().unwrap();
    }

    #[test]
    fn a_job_of_more_rows_than_may_wait_gets_in_when_nobody_waits() {
        let mailbox = Mailbox::new(2);
        admit(&mailbox, job(0, 5)).unwrap();
        let late = mailbox.admit(job(1, 1), || Some(Unwanted::Late), || panic!("not admitted"));
        assert_eq!(late.unwrap_err().code, crate::triton::Code::Unavailable);
    }

    #[test]
    fn a_caller_whose_client_leaves_does_not_wait_on() {
        let mailbox = Mailbox::new(1);
        admit(&mailbox, job(0, 1)).unwrap();
        let asked = AtomicUsize::new(0);
        let leaves = || (asked.fetch_add(1, Ordering::Relaxed) > 2).then_some(Unwanted::Cancelled);
        let error = mailbox.admit(job(1, 1), leaves, || panic!("not admitted")).unwrap_err();
        assert_eq!(error, Error::cancelled());
    }

    #[test]
    fn a_job_is_announced_before_it_can_be_seen() {
        let mailbox = Arc::new(Mailbox::new(1));
        let announced = Arc::new(AtomicBool::new(false));
        let (other, seen) = (Arc::clone(&mailbox), Arc::clone(&announced));
        let engine = thread::spawn(move || {
            let mail = other.collect(0, true).unwrap();
            (mail.jobs.len(), seen.load(Ordering::SeqCst))
        });
        mailbox.admit(job(0, 1), || None, || announced.store(true, Ordering::SeqCst)).unwrap();
        assert_eq!(engine.join().unwrap(), (1, true));
    }

    #[test]
    fn a_dead_engine_refuses_with_its_cause() {
        let mailbox = Mailbox::new(4);
        admit(&mailbox, job(7, 1)).unwrap();
        mailbox.health().unwrap();
        mailbox.die("the engine thread ended by a panic: oh");
        let message = admit(&mailbox, job(8, 1)).unwrap_err().message;
        assert_eq!(message, "the engine thread ended by a panic: oh; reload the model");
        assert_eq!(mailbox.health().unwrap_err().code, crate::triton::Code::Unavailable);
    }

    #[test]
    fn health_follows_the_last_step() {
        let mailbox = Mailbox::new(1);
        mailbox.note_step(Some("device: lost"));
        assert_eq!(mailbox.health().unwrap_err().message, "device: lost");
        mailbox.note_step(None);
        mailbox.health().unwrap();
    }

    #[test]
    fn a_closed_mailbox_ends_an_idle_engine_and_refuses_jobs() {
        let mailbox = Mailbox::new(1);
        mailbox.close();
        assert!(mailbox.collect(0, true).is_none());
        assert!(mailbox.collect(0, false).is_some(), "work that is there is finished");
        assert!(admit(&mailbox, job(0, 1)).is_err());
    }

    #[test]
    fn what_is_not_finished_in_time_is_given_up() {
        let mailbox = Mailbox::new(1);
        mailbox.close();
        mailbox.drain(Duration::from_millis(1));
        assert!(mailbox.collect(0, false).unwrap().gives_up);
    }
}
