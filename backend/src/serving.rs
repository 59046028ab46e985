//! An instance at work: Triton's threads come in at `execute`, readers turn what they bring into calls, the engine thread
//! computes, the responder answers.

use crate::contract::{Call, Contract};
use crate::engine_thread::EngineThread;
use crate::fault::Gate;
use crate::intake::{Intake, Lane, Reading, Unread, Work};
use crate::mailbox::{Job, Mailbox, TicketId};
use crate::memory::reported;
use crate::metrics::Slot;
use crate::model::Model;
use crate::responder::{Responder, Update, server_ends};
use crate::room::Place;
use crate::running::RunningInstance;
use crate::ticket::{Owner, Ticket};
use crate::watch::Watch;
use spec_core::machine::lower_thread_priority;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, Weak};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};
use triton_backend::{
    Error, Instance, Level, OnExit, Request, Result, log, monotonic_ns, panic_message,
};

/// Most bytes of an input or a parameter that is looked at before a request is read: a number for each of as many rows as
/// a request can have.
const BRIEF_BYTES: usize = 16 << 10;

/// An instance at work, and its threads.
pub(crate) struct Serving {
    ingress: Arc<Ingress>,
    readers: Vec<JoinHandle<()>>,
    engine: JoinHandle<()>,
    responder: JoinHandle<()>,
    on_exit: Option<OnExit>,
    _slot: Arc<Slot>,
}

/// Where requests come in: what Execute and the readers share.
struct Ingress {
    model: Arc<Model>,
    instance: Instance,
    intake: Intake<Arrived>,
    running: Arc<RunningInstance>,
    /// Whether the server ends.
    exits: AtomicBool,
}

/// A request that has arrived.
struct Arrived {
    id: TicketId,
    request: Request,
    at: u64,
    place: Place,
}

impl Serving {
    /// Loads a runtime and starts the threads.
    pub(crate) fn start(model: &Arc<Model>, instance: Instance) -> Result<Self> {
        let runtime = model.runtime(instance.placement()?)?;
        let memory = runtime.memory().clone();
        // A server that keeps no account of memory says so; it is not needed to serve.
        let _ = instance.report_memory(&reported(&memory));
        let mailbox = Arc::new(Mailbox::new());
        let (updates, receiver) = channel();
        // Without an engine thread the responder ends with the last of its senders.
        let responder = Responder::new(Arc::clone(model), instance.clone(), Arc::clone(&mailbox));
        let responder = spawn("spec-responder", move || responder.run(receiver))?;
        let slot = Arc::new(Slot::new(&model.metrics, memory));
        let gate = Gate::new(&model.name);
        let engine = EngineThread::new(
            runtime,
            Arc::clone(&mailbox),
            updates.clone(),
            Arc::clone(&slot),
            gate,
        );
        let engine = spawn("spec-engine", move || engine.run())?;
        let ingress = Arc::new_cyclic(|ingress: &Weak<Ingress>| {
            let ingress = Weak::clone(ingress);
            let end_unread = move |name: &str| {
                ingress.upgrade().iter().for_each(|ingress| ingress.end_unread(name));
            };
            Ingress {
                model: Arc::clone(model),
                instance,
                intake: Intake::new(),
                running: Arc::new(RunningInstance::new(mailbox, updates, end_unread)),
                exits: AtomicBool::new(false),
            }
        });
        let readers = Vec::new();
        let mut serving = Self { ingress, readers, engine, responder, on_exit: None, _slot: slot };
        match serving.open() {
            Ok(()) => Ok(serving),
            Err(error) => {
                serving.stop();
                Err(error)
            }
        }
    }

    /// Lets requests in.
    fn open(&mut self) -> Result<()> {
        for (name, lane) in [("spec-read", Lane::Small), ("spec-read-large", Lane::Large)] {
            let ingress = Arc::clone(&self.ingress);
            self.readers.push(spawn(name, move || ingress.read_all(lane))?);
        }
        let limit = Duration::from_millis(self.ingress.model.settings.drain_timeout_ms);
        let told = Arc::clone(&self.ingress);
        let answer = move |limit| told.answer_all(limit);
        self.on_exit = Some(self.ingress.instance.on_exit(limit, answer));
        self.ingress.model.running.add(&self.ingress.running);
        Ok(())
    }

    /// Takes requests on, and returns at once. Whatever is wrong, each is answered.
    pub(crate) fn take(&self, requests: Vec<Request>) {
        for request in requests {
            guarded(|| self.ingress.receive(request));
        }
    }

    /// Answers everything that is in flight, waiting for it as long as is allowed, and ends the threads.
    pub(crate) fn stop(self) {
        let Self { ingress, readers, engine, responder, on_exit, _slot } = self;
        let end = Instant::now() + Duration::from_millis(ingress.model.settings.drain_timeout_ms);
        let left = || end.saturating_duration_since(Instant::now());
        // What is not read yet may still go to another instance, or to this one.
        ingress.intake.close();
        ingress.refuse_all(
            ingress.intake.drain(left()),
            &Error::unavailable("the model instance was taken away"),
        );
        ingress.model.running.remove(&ingress.running);
        ingress.running.mailbox.close();
        ingress.running.mailbox.drain(left());
        // None of the threads lets a panic out.
        readers.into_iter().for_each(|reader| drop(reader.join()));
        let _ = engine.join();
        ingress.running.tell(Update::End);
        let _ = responder.join();
        drop(on_exit);
    }

    /// Whether it can serve. One whose last step failed is tried again after a while: were it not ready until a step works,
    /// and got no requests until it is ready, it would never be.
    pub(crate) fn ready(&self) -> Result<()> {
        let mailbox = &self.ingress.running.mailbox;
        if mailbox.is_avoided() { mailbox.health() } else { Ok(()) }
    }
}

impl Ingress {
    /// Leaves a request to the readers, or answers it.
    fn receive(&self, request: Request) {
        let (id, at) = (self.model.next_ticket(), monotonic_ns());
        match self.look(&request, at) {
            Ok(Look::Stop(name)) => {
                self.end_named(&name);
                Ticket::new(id, request, Call::default(), at).finish_empty(&self.owner());
            }
            Ok(Look::Waits { name, level, bytes, watch, place }) => {
                let content = Arrived { id, request, at, place };
                let unread = Unread { name, level, bytes, watch, content };
                if let Err(back) = self.intake.push(unread) {
                    self.refuse(back.0, &back.1);
                }
            }
            Err(error) => self.fail(Ticket::new(id, request, Call::default(), at), &error),
        }
    }

    /// All that must be known of a request before it is read.
    fn look(&self, request: &Request, at: u64) -> Result<Look> {
        if self.exits.load(Ordering::Acquire) {
            return Err(server_ends());
        }
        let (inputs, of_inputs) = request.small_inputs(&Contract::BRIEF_INPUTS, BRIEF_BYTES)?;
        let (parameters, of_parameters) =
            request.small_parameters(&Contract::BRIEF_PARAMETERS, BRIEF_BYTES)?;
        let bytes = of_inputs.saturating_add(of_parameters);
        let brief = self.model.contract.brief(&inputs, &parameters);
        let name = request.id();
        if brief.stop {
            return Ok(Look::Stop(name));
        }
        let (room, settings) = (&self.model.room, &self.model.settings);
        let level = room.policy().level(brief.priority, request.priority());
        let limit = settings.request_timeout_ms;
        let probe = request.cancel_probe();
        let watch = Watch::new(
            Box::new(move || probe.is_cancelled()),
            at,
            [request.timeout(), brief.timeout].into_iter().flatten().min(),
            (limit > 0).then(|| Duration::from_millis(limit)),
            room.policy().of(level),
        );
        let place = room.enter(level, bytes, || match self.exits.load(Ordering::Acquire) {
            true => Some(server_ends()),
            false => watch.look_unplaced(monotonic_ns()),
        })?;
        Ok(Look::Waits { name, level, bytes, watch, place })
    }

    /// Ends the requests of a name, wherever they are. One without a name has none to be ended by.
    fn end_named(&self, name: &str) {
        if !name.is_empty() {
            self.model.running.end_named(name);
        }
    }

    /// Ends those that wait here to be read, and marks those that are being read.
    fn end_unread(&self, name: &str) {
        let ended = self.intake.end_named(name);
        ended.into_iter().for_each(|unread| self.ticket(unread).finish_empty(&self.owner()));
    }

    /// Reads what comes on a lane, until no more can come.
    fn read_all(&self, lane: Lane) {
        if lane == Lane::Large {
            // Whoever generates goes first: what is read here takes long anyway.
            lower_thread_priority();
        }
        while let Some(work) = self.intake.next(lane) {
            guarded(|| match work {
                Work::Read(unread, reading) => self.read(unread, &reading),
                Work::Refuse(unread, error) => self.refuse(unread, &error),
            });
        }
    }

    /// Reads a request and gives it to an instance.
    fn read(&self, unread: Unread<Arrived>, reading: &Reading<'_, Arrived>) {
        let Unread { level, watch, content: Arrived { id, request, at, place }, .. } = unread;
        let call = match self.call(&request) {
            Ok(call) => call,
            Err(error) => return self.fail(Ticket::new(id, request, Call::default(), at), &error),
        };
        let mut ticket = Box::new(Ticket::new(id, request, call, at));
        if reading.is_ended() {
            return ticket.finish_empty(&self.owner());
        }
        let job = Job { ticket: id, requests: ticket.take_requests(level), watch, place };
        if let Err((ticket, error)) = self.model.running.take(ticket, job) {
            return self.fail(*ticket, &error);
        }
        // In between. By its number: its client may have sent another one of this name by now.
        if reading.is_ended() {
            self.model.running.end(id);
        }
    }

    /// Copies and checks what the client sent.
    fn call(&self, request: &Request) -> Result<Call> {
        let (inputs, parameters) = (request.inputs()?, request.parameters()?);
        self.model.contract.parse(&inputs, &parameters, &self.model.folder.tokenizer)
    }

    /// The server ends: nothing may be left open when this returns.
    fn answer_all(&self, limit: Duration) {
        self.exits.store(true, Ordering::Release);
        self.refuse_all(self.intake.drain(Duration::ZERO), &server_ends());
        let (told, answered) = channel();
        self.running.tell(Update::Exit(told));
        // A responder that is gone has answered all it had; one that is stuck cannot be helped.
        let _ = answered.recv_timeout(limit);
    }

    fn refuse_all(&self, unread: Vec<Unread<Arrived>>, error: &Error) {
        unread.into_iter().for_each(|unread| self.refuse(unread, error));
    }

    fn refuse(&self, unread: Unread<Arrived>, error: &Error) {
        self.fail(self.ticket(unread), error);
    }

    /// A request that is answered without having been read.
    fn ticket(&self, unread: Unread<Arrived>) -> Ticket {
        let Arrived { id, request, at, .. } = unread.content;
        Ticket::new(id, request, Call::default(), at)
    }

    fn fail(&self, mut ticket: Ticket, error: &Error) {
        ticket.fail(error, &self.owner());
    }

    fn owner(&self) -> Owner<'_> {
        Owner { model: &self.model, instance: &self.instance }
    }
}

/// What a request is, as far as can be told without reading it.
enum Look {
    /// It ends another one.
    Stop(String),
    /// It is to be read.
    Waits { name: String, level: u32, bytes: usize, watch: Watch, place: Place },
}

/// Runs what concerns one request. A panic fails that one, which was answered when it was dropped.
fn guarded(body: impl FnOnce()) {
    if let Err(panic) = catch_unwind(AssertUnwindSafe(body)) {
        log(Level::Error, &format!("a request failed: {}", panic_message(&*panic)));
    }
}

fn spawn(name: &str, body: impl FnOnce() + Send + 'static) -> Result<JoinHandle<()>> {
    let spawned = thread::Builder::new().name(name.into()).spawn(body);
    spawned.map_err(|error| Error::internal(format!("thread {name}: {error}")))
}
