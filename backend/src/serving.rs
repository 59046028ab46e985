//! An instance at work: Triton's threads come in at `execute`, the engine thread computes, the responder answers.

use crate::contract::Call;
use crate::engine::Engine;
use crate::mailbox::{Job, Mailbox, Unwanted};
use crate::metrics::Slot;
use crate::model::Model;
use crate::responder::{News, Responder};
use crate::ticket::{Home, Ticket};
use crate::triton::{Error, Instance, Level, Request, Result, log, monotonic_ns, panic_message};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::thread::{self, JoinHandle};
use std::time::Duration;

/// An instance at work.
pub(crate) struct Serving {
    model: Arc<Model>,
    instance: Instance,
    mailbox: Arc<Mailbox>,
    news: Sender<News>,
    engine: JoinHandle<()>,
    responder: JoinHandle<()>,
    next_ticket: AtomicU64,
    /// Its name among the model's instances.
    door: usize,
    _slot: Arc<Slot>,
}

impl Serving {
    /// Loads a runtime and starts the threads.
    pub(crate) fn start(model: &Arc<Model>, instance: Instance) -> Result<Self> {
        let runtime = model.runtime(instance.placement()?)?;
        let memory = runtime.memory();
        // A server that keeps no account of memory says so; it is not needed to serve.
        let _ = instance.report_memory(memory.kv_bytes + memory.weight_bytes);
        let mailbox = Arc::new(Mailbox::new(model.settings.max_queue_size));
        let (news, receiver) = channel();
        // If the second thread cannot be had, the first ends with the last of its senders.
        let responder = Responder::new(Arc::clone(model), instance.clone(), Arc::clone(&mailbox));
        let responder = spawn("spec-responder", move || responder.run(receiver))?;
        let slot = Arc::new(Slot::new(&model.metrics, memory));
        let engine = Engine::new(runtime, Arc::clone(&mailbox), news.clone(), Arc::clone(&slot));
        let engine = spawn("spec-engine", move || engine.run())?;
        Ok(Self {
            door: model.open_door(news.clone()),
            model: Arc::clone(model),
            instance,
            mailbox,
            news,
            engine,
            responder,
            next_ticket: AtomicU64::new(0),
            _slot: slot,
        })
    }

    /// Takes requests on; returns when there is room for the next ones. Whatever is wrong, each is answered.
    pub(crate) fn take(&self, requests: Vec<Request>) {
        let guarded = |request| catch_unwind(AssertUnwindSafe(|| self.open(request)));
        // All are read before the first waits for room: their time runs from here.
        let opened: Vec<_> = requests.into_iter().map(guarded).collect();
        for ticket in opened {
            let admitted = ticket.map(|ticket| {
                catch_unwind(AssertUnwindSafe(|| ticket.into_iter().for_each(|t| self.admit(t))))
            });
            // The request that panicked was answered when it was dropped; the others go on.
            if let Err(panic) = admitted.flatten() {
                log(Level::Error, &format!("a request failed: {}", panic_message(&*panic)));
            }
        }
    }

    /// A ticket to be admitted, unless the request is answered already.
    fn open(&self, request: Request) -> Option<Box<Ticket>> {
        let call = self.read(&request);
        let id = self.next_ticket.fetch_add(1, Ordering::Relaxed);
        let (call, refusal) = match call {
            Ok(call) => (call, None),
            Err(error) => (Call::default(), Some(error)),
        };
        let mut ticket = Box::new(Ticket::new(id, request, call));
        if let Some(error) = refusal {
            ticket.fail(&error, &self.home());
            return None;
        }
        if ticket.is_stop() {
            if !ticket.request_id.is_empty() {
                self.model.end_named(&ticket.request_id);
            }
            ticket.finish_empty(&self.home());
            return None;
        }
        Some(ticket)
    }

    /// Copies and checks what the client sent.
    fn read(&self, request: &Request) -> Result<Call> {
        let (inputs, parameters) = (request.inputs()?, request.parameters()?);
        self.model.contract.parse(&inputs, &parameters, &self.model.folder.tokenizer)
    }

    fn admit(&self, mut ticket: Box<Ticket>) {
        let deadline = ticket.deadline(self.model.settings.request_timeout_ms);
        let (probe, engines) = (ticket.cancel_probe(), ticket.cancel_probe());
        let job = Job {
            ticket: ticket.id,
            requests: ticket.take_requests(),
            is_cancelled: Box::new(move || engines.is_cancelled()),
            deadline,
        };
        let unwanted = || match deadline {
            _ if probe.is_cancelled() => Some(Unwanted::Cancelled),
            Some(deadline) if deadline <= monotonic_ns() => Some(Unwanted::Late),
            _ => None,
        };
        let mut ticket = Some(ticket);
        let announce = || {
            if let Some(ticket) = ticket.take() {
                self.tell(News::Opened(ticket));
            }
        };
        if let Err(error) = self.mailbox.admit(job, unwanted, announce)
            && let Some(mut ticket) = ticket
        {
            ticket.fail(&error, &self.home());
        }
    }

    /// Answers everything that is in flight, waiting for it as long as is allowed, and ends the threads.
    pub(crate) fn stop(self) {
        let Self { model, mailbox, news, engine, responder, door, .. } = self;
        model.close_door(door);
        mailbox.close();
        mailbox.drain(Duration::from_millis(model.settings.drain_timeout_ms));
        // Neither thread lets a panic out.
        let _ = engine.join();
        drop(news);
        let _ = responder.join();
    }

    /// Whether it can serve.
    pub(crate) fn ready(&self) -> Result<()> {
        self.mailbox.health()
    }

    fn home(&self) -> Home<'_> {
        Home { model: &self.model, instance: &self.instance }
    }

    /// The responder lives as long as this does.
    fn tell(&self, news: News) {
        let _ = self.news.send(news);
    }
}

fn spawn(name: &str, body: impl FnOnce() + Send + 'static) -> Result<JoinHandle<()>> {
    let spawned = thread::Builder::new().name(name.into()).spawn(body);
    spawned.map_err(|error| Error::internal(format!("thread {name}: {error}")))
}
