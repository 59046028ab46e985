//! The engine thread of an instance: it owns the runtime, and runs step after step as long as there is work.
//! It touches no object of Triton's but the probes that tell whether a client is still there; what it has
//! to say goes to the responder.

use crate::fault::Gate;
use crate::mailbox::{Job, Mail, Mailbox, RowId, Stop, TicketId};
use crate::metrics::Slot;
use crate::responder::{Gain, Update};
use crate::room::Place;
use crate::watch::{Verdict, Watch};
use spec_core::runtime::{Event, FinishReason, Runtime, Sequence, SequenceId, Step};
use std::collections::{BTreeMap, HashMap};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::time::Duration;
use triton_backend::{Error, Level, log, monotonic_ns, panic_message};

/// How often the gauges are set while steps run, in nanoseconds.
const PUBLISH_PERIOD: u64 = 100_000_000;

/// A request with rows in the runtime.
struct Open {
    watch: Watch,
    /// Its rows that have not ended.
    sequences: Vec<SequenceId>,
    /// Its place among those that wait, until one of the rows has run.
    place: Option<Place>,
}

/// The engine thread's state.
pub(crate) struct EngineThread {
    runtime: Runtime,
    mailbox: Arc<Mailbox>,
    updates: Sender<Update>,
    slot: Arc<Slot>,
    rows: HashMap<SequenceId, RowId>,
    open: BTreeMap<TicketId, Open>,
    published_at: u64,
    gate: Gate,
}

impl EngineThread {
    pub(crate) fn new(
        runtime: Runtime,
        mailbox: Arc<Mailbox>,
        updates: Sender<Update>,
        slot: Arc<Slot>,
        gate: Gate,
    ) -> Self {
        Self {
            runtime,
            mailbox,
            updates,
            slot,
            rows: HashMap::new(),
            open: BTreeMap::new(),
            published_at: 0,
            gate,
        }
    }

    /// Serves until the mailbox closes and everything is finished. A panic fails what is in flight.
    pub(crate) fn run(mut self) {
        let served = catch_unwind(AssertUnwindSafe(|| self.serve()));
        if let Err(panic) = served {
            self.die(&format!("the engine thread ended by a {}", panic_message(&*panic)));
        }
        self.mailbox.finish();
    }

    fn serve(&mut self) {
        let _pinned = self.runtime.pin_caller();
        loop {
            let usage = self.runtime.usage();
            if self.runtime.is_idle() || monotonic_ns() - self.published_at > PUBLISH_PERIOD {
                self.slot.publish(usage);
                self.published_at = monotonic_ns();
            }
            let Some(mail) = self.mailbox.collect(self.runtime.is_idle()) else { return };
            self.take(mail);
            self.drop_unwanted();
            if !self.runtime.is_idle() && !self.gate.lets_pass() {
                continue;
            }
            let began = monotonic_ns();
            let step = self.runtime.step_unless(&|| self.mailbox.hurries());
            self.report(step, began);
        }
    }

    fn take(&mut self, mail: Mail) {
        for job in mail.jobs {
            self.admit(job);
        }
        for stop in mail.stops {
            match stop {
                Stop::Row(row, reason) => {
                    let met = |(&id, &of): (&SequenceId, &RowId)| (of == row).then_some(id);
                    if let Some(id) = self.rows.iter().find_map(met) {
                        self.end(id, reason, Ok(reason));
                    }
                }
                Stop::Ticket(ticket) => self.abandon(ticket, &Error::cancelled()),
            }
        }
        if mail.gives_up {
            let left: Vec<TicketId> = self.open.keys().copied().collect();
            for ticket in left {
                self.abandon(ticket, &Error::unavailable("the model instance was taken away"));
            }
        }
    }

    fn admit(&mut self, job: Job) {
        let Job { ticket, requests, watch, place } = job;
        let mut open = Open { watch, sequences: Vec::new(), place: Some(place) };
        for (row_idx, request) in requests.into_iter().enumerate() {
            let row = RowId { ticket, row_idx };
            match self.runtime.add(request) {
                Ok(id) => {
                    self.rows.insert(id, row);
                    open.sequences.push(id);
                }
                Err(error) => self.tell(Update::Refused { ticket, error }),
            }
        }
        if !open.sequences.is_empty() {
            self.open.insert(ticket, open);
        }
    }

    /// Ends what nobody waits for any more, and puts off what has waited as long as it may.
    fn drop_unwanted(&mut self) {
        let now = monotonic_ns();
        let mut unwanted = Vec::new();
        for (&ticket, open) in &mut self.open {
            let verdict = match open.place {
                Some(_) => open.watch.look_waiting(now),
                None => open.watch.look(now).map_or(Verdict::Stays, Verdict::Ends),
            };
            match verdict {
                Verdict::Stays => {}
                Verdict::Delayed => open.sequences.iter().for_each(|&id| self.runtime.delay(id)),
                Verdict::Ends(error) => unwanted.push((ticket, error)),
            }
        }
        for (ticket, error) in unwanted {
            self.abandon(ticket, &error);
        }
    }

    /// Ends all rows of a request with an error.
    fn abandon(&mut self, ticket: TicketId, error: &Error) {
        let Some(open) = self.open.get(&ticket) else { return };
        for id in open.sequences.clone() {
            self.end(id, FinishReason::Cancelled, Err(error.clone()));
        }
    }

    /// Takes a sequence out of the runtime.
    fn end(&mut self, id: SequenceId, reason: FinishReason, outcome: Result<FinishReason, Error>) {
        let sequence = self.runtime.finish(id, reason);
        let Some(row) = self.close(id) else { return };
        let gain = Gain {
            prompt: Vec::new(),
            emitted: Vec::new(),
            counters: sequence.map(|sequence| sequence.counters).unwrap_or_default(),
            ending: Some(outcome),
            at: monotonic_ns(),
        };
        self.tell(Update::Progress { row, gain });
    }

    /// Forgets a sequence, and its request with the last of its rows.
    fn close(&mut self, id: SequenceId) -> Option<RowId> {
        let row = self.rows.remove(&id)?;
        if let Some(open) = self.open.get_mut(&row.ticket) {
            open.sequences.retain(|&other| other != id);
            // The probe goes with it: from here on the responder alone holds objects of Triton's.
            if open.sequences.is_empty() {
                self.open.remove(&row.ticket);
            }
        }
        Some(row)
    }

    fn report(&mut self, step: Step, began: u64) {
        for id in step.started {
            let Some(ticket) = self.rows.get(&id).map(|row| row.ticket) else { continue };
            if self.open.get_mut(&ticket).and_then(|open| open.place.take()).is_some() {
                self.tell(Update::Started { ticket, at: began });
            }
        }
        let at = monotonic_ns();
        let failure = step.failure.map(|error| error.to_string());
        for event in step.events {
            self.report_event(event, failure.as_deref(), at);
        }
        if let Some(failure) = &failure {
            log(Level::Error, &format!("a step failed: {failure}"));
        }
        if step.ran {
            let took = Duration::from_nanos(at.saturating_sub(began));
            self.slot.metrics().count_step(took, step.drafting);
            self.mailbox.note_step(failure.as_deref());
        }
    }

    fn report_event(&mut self, event: Event, failure: Option<&str>, at: u64) {
        let Event { id, prompt, emitted, counters, finished } = event;
        let ending = finished.map(|sequence| outcome(&sequence, failure));
        let row = match ending {
            Some(_) => self.close(id),
            None => self.rows.get(&id).copied(),
        };
        if let Some(row) = row {
            let gain = Gain { prompt, emitted, counters, ending, at };
            self.tell(Update::Progress { row, gain });
        }
    }

    /// The responder outlives this thread, so nobody can be missing at the other end.
    fn tell(&self, update: Update) {
        let _ = self.updates.send(update);
    }

    fn die(&mut self, cause: &str) {
        log(Level::Error, cause);
        self.mailbox.die(cause);
        // Also those that it had not seen: none is forgotten, whatever it was doing.
        self.tell(Update::Died(Error::internal(cause)));
        self.rows.clear();
        self.open.clear();
        self.slot.publish_death();
    }
}

/// How a sequence ended in a step.
fn outcome(sequence: &Sequence, failure: Option<&str>) -> Result<FinishReason, Error> {
    match sequence.finish {
        Some(FinishReason::Failed) => Err(Error::internal(failure.unwrap_or("the step failed"))),
        Some(reason) => Ok(reason),
        None => Err(Error::internal("a sequence ended without a reason")),
    }
}
