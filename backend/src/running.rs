//! The instances of a model that take requests. A request goes to the one that has the fewest, whichever Triton gave it
//! to, since none of them ever keeps Triton waiting.

use crate::mailbox::{Job, Mailbox, TicketId};
use crate::responder::Update;
use crate::ticket::Ticket;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use triton_backend::Error;

/// The instances of a model that take requests.
#[derive(Default)]
pub(crate) struct Running(Mutex<Vec<Arc<RunningInstance>>>);

/// What others need of an instance that runs.
pub(crate) struct RunningInstance {
    pub(crate) mailbox: Arc<Mailbox>,
    updates: Sender<Update>,
    /// Requests that it has taken and not ended.
    num_open: Arc<AtomicUsize>,
    /// Ends the requests of a name that it has not read.
    end_unread: Box<dyn Fn(&str) + Send + Sync>,
}

impl Running {
    fn lock(&self) -> MutexGuard<'_, Vec<Arc<RunningInstance>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn add(&self, instance: &Arc<RunningInstance>) {
        self.lock().push(Arc::clone(instance));
    }

    pub(crate) fn remove(&self, instance: &Arc<RunningInstance>) {
        self.lock().retain(|other| !Arc::ptr_eq(other, instance));
    }

    /// Gives a request to an instance; one that nobody takes comes back.
    pub(crate) fn take(&self, ticket: Box<Ticket>, job: Job) -> Result<(), (Box<Ticket>, Error)> {
        let mut instances = self.lock().clone();
        // One that cannot serve is asked only if no other can: it tells the reason.
        // Each is looked at once: what it tells changes meanwhile.
        instances.sort_by_cached_key(|instance| {
            (instance.mailbox.is_avoided(), instance.num_open.load(Ordering::Relaxed))
        });
        let mut refused = (ticket, job, Error::unavailable("the model is being unloaded"));
        for instance in instances {
            match instance.take(refused.0, refused.1) {
                Ok(()) => return Ok(()),
                Err(back) => refused = *back,
            }
        }
        Err((refused.0, refused.2))
    }

    /// Ends the requests of this name, whichever instance has them, read or not.
    pub(crate) fn end_named(&self, name: &str) {
        let instances = self.lock().clone();
        instances.iter().for_each(|instance| (instance.end_unread)(name));
        instances.iter().for_each(|instance| instance.tell(Update::EndNamed(name.to_string())));
    }

    /// Ends one request, whichever instance has taken it.
    pub(crate) fn end(&self, ticket: TicketId) {
        let instances = self.lock().clone();
        instances.iter().for_each(|instance| instance.tell(Update::EndTicket(ticket)));
    }
}

impl RunningInstance {
    pub(crate) fn new(
        mailbox: Arc<Mailbox>,
        updates: Sender<Update>,
        end_unread: impl Fn(&str) + Send + Sync + 'static,
    ) -> Self {
        Self { mailbox, updates, num_open: Arc::default(), end_unread: Box::new(end_unread) }
    }

    fn take(&self, ticket: Box<Ticket>, job: Job) -> Result<(), Box<(Box<Ticket>, Job, Error)>> {
        let mut ticket = Some(ticket);
        let announce = || {
            if let Some(mut ticket) = ticket.take() {
                ticket.count_in(&self.num_open);
                self.tell(Update::Opened(ticket));
            }
        };
        let left = self.mailbox.leave(job, announce);
        match (left, ticket) {
            (Err(back), Some(ticket)) => Err(Box::new((ticket, back.0, back.1))),
            _ => Ok(()),
        }
    }

    /// The responder lives as long as the instance takes requests.
    pub(crate) fn tell(&self, update: Update) {
        let _ = self.updates.send(update);
    }
}
