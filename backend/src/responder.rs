//! The responder thread of an instance: turns what the engine thread tells it into text and sends it, so that no step
//! waits for a client. It owns every request that was taken on.

use crate::mailbox::{Mailbox, RowId, Stop, TicketId};
use crate::model::Model;
use crate::ticket::{Outcome, Owner, Ticket};
use spec_core::runtime::{Counters, Emitted, FinishReason};
use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender};
use triton_backend::{Error, Instance, Level, log, panic_message};

/// What the responder is told.
pub(crate) enum Update {
    /// A request was taken on; all else about it comes later.
    Opened(Box<Ticket>),
    /// The runtime did not take a row of it.
    Refused { ticket: TicketId, error: spec_core::Error },
    /// A step took part of it for the first time, at this time.
    Started { ticket: TicketId, at: u64 },
    /// A step brought something to a row, or it ended, or both.
    Progress { row: RowId, gain: Gain },
    /// A client asks to end its request of this name.
    EndNamed(String),
    /// Its client asked to end this request before it was opened.
    EndTicket(TicketId),
    /// The server ends: all requests are to be answered now, and those that come yet. Then the sender is to be told.
    Exit(Sender<()>),
    /// The engine thread died of this: nothing more comes.
    Died(Error),
    /// The instance is at its end.
    End,
}

impl Update {
    /// The request that it is about, if it is about one.
    fn ticket(&self) -> Option<TicketId> {
        match self {
            Self::Opened(ticket) => Some(ticket.id),
            Self::Refused { ticket, .. } | Self::Started { ticket, .. } => Some(*ticket),
            Self::Progress { row, .. } => Some(row.ticket),
            Self::EndNamed(_) | Self::EndTicket(_) | Self::Exit(_) | Self::Died(_) | Self::End => {
                None
            }
        }
    }
}

/// What a row has gained.
#[derive(Clone, Debug)]
pub(crate) struct Gain {
    /// Tokens of its prompt, where the request asks how likely they are.
    pub(crate) prompt: Vec<Emitted>,
    pub(crate) emitted: Vec<Emitted>,
    /// All that it has counted so far.
    pub(crate) counters: Counters,
    /// How it ended in the runtime, if it did.
    pub(crate) ending: Option<Result<FinishReason, Error>>,
    pub(crate) at: u64,
}

/// The responder thread's state.
pub(crate) struct Responder {
    model: Arc<Model>,
    instance: Instance,
    mailbox: Arc<Mailbox>,
    tickets: HashMap<TicketId, Ticket>,
    /// Whether the server ends.
    exits: bool,
}

impl Responder {
    pub(crate) fn new(model: Arc<Model>, instance: Instance, mailbox: Arc<Mailbox>) -> Self {
        Self { model, instance, mailbox, tickets: HashMap::new(), exits: false }
    }

    /// Works until the end of the instance. A panic over one ticket fails that ticket.
    pub(crate) fn run(mut self, updates: Receiver<Update>) {
        for update in updates {
            let ticket = update.ticket();
            if matches!(update, Update::End) {
                return;
            }
            let handled = catch_unwind(AssertUnwindSafe(|| self.handle(update)));
            if let Err(panic) = handled {
                let error = Error::internal(panic_message(&*panic));
                log(Level::Error, &format!("a response failed: {error}"));
                if let Some(ticket) = ticket.and_then(|ticket| self.tickets.remove(&ticket)) {
                    self.give_up(ticket, &error);
                }
            }
        }
    }

    fn handle(&mut self, update: Update) {
        match update {
            Update::Opened(ticket) if self.exits => self.give_up(*ticket, &server_ends()),
            Update::Opened(ticket) => {
                self.tickets.insert(ticket.id, *ticket);
            }
            Update::Refused { ticket, error } => {
                if let Some(ticket) = self.tickets.remove(&ticket) {
                    self.give_up(ticket, &self.model.contract.error(error));
                }
            }
            Update::Started { ticket, at } => {
                if let Some(ticket) = self.tickets.get_mut(&ticket) {
                    ticket.start(at);
                }
            }
            Update::Progress { row, gain } => self.progress(row, gain),
            Update::EndNamed(name) => self.cancel(|ticket| ticket.request_id == name),
            Update::EndTicket(id) => self.cancel(|ticket| ticket.id == id),
            Update::Exit(answered) => {
                self.exits = true;
                self.give_up_all(&server_ends());
                // Who asked may have had enough of waiting.
                let _ = answered.send(());
            }
            Update::Died(error) => self.give_up_all(&error),
            Update::End => {}
        }
    }

    fn progress(&mut self, row: RowId, gain: Gain) {
        if gain.ending.is_some() {
            self.model.metrics.count_drafts(&gain.counters);
        }
        // Update of a ticket that has failed may still come in.
        let Some(ticket) = self.tickets.get_mut(&row.ticket) else { return };
        let owner = Owner { model: &self.model, instance: &self.instance };
        let outcome = ticket.progress(row.row_idx, gain, &owner);
        if let Ok(Outcome::Stopped) = outcome {
            self.mailbox.stop(Stop::Row(row, FinishReason::StopWord));
        }
        let ended = !matches!(outcome, Ok(Outcome::Open | Outcome::Stopped));
        let Some(ticket) = ended.then(|| self.tickets.remove(&row.ticket)).flatten() else {
            return;
        };
        match outcome {
            Ok(_) => ticket.report(true, &owner),
            Err(error) => self.give_up(ticket, &error),
        }
    }

    fn give_up_all(&mut self, error: &Error) {
        for (_, ticket) in std::mem::take(&mut self.tickets) {
            self.give_up(ticket, error);
        }
    }

    fn give_up(&self, mut ticket: Ticket, error: &Error) {
        ticket.fail(error, &Owner { model: &self.model, instance: &self.instance });
        // Other rows of it may still run.
        self.mailbox.stop(Stop::Ticket(ticket.id));
    }

    fn cancel(&self, which: impl Fn(&Ticket) -> bool) {
        for ticket in self.tickets.values().filter(|ticket| which(ticket)) {
            for row_idx in 0..ticket.num_sequences() {
                let row = RowId { ticket: ticket.id, row_idx };
                self.mailbox.stop(Stop::Row(row, FinishReason::Cancelled));
            }
        }
    }
}

/// What clients hear whose requests are not finished when the server ends.
pub(crate) fn server_ends() -> Error {
    Error::unavailable("the server is shutting down")
}
