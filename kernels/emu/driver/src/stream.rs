//! A queue of work, which waits until somebody has to know that it is done, and its recording as a graph.

use std::collections::VecDeque;
use std::thread::{self, ThreadId};

use spec_emu::{Launch, Schedule};

use crate::config::Failing;
use crate::fault::{
    CAPTURE_INVALIDATED, CAPTURE_UNSUPPORTED, Fault, ILLEGAL_STATE, LAUNCH_FAILED, Outcome,
};
use crate::memory::Memory;
use crate::table::Handle;

/// Blocks in flight: no kernel of the executor waits for a block that has not begun.
const MAX_RESIDENT: u32 = 8;

/// What a stream does.
#[derive(Clone)]
pub(crate) enum Work {
    Launch(Kernel),
    Fill {
        to: u64,
        value: u8,
        bytes: usize,
    },
    /// Bytes that were read when the copy was issued.
    Write {
        to: u64,
        bytes: Vec<u8>,
    },
    /// Pinned memory of the host is read when it is this copy's turn.
    Copy {
        to: u64,
        from: u64,
        bytes: usize,
    },
}

/// A launch that has been checked.
#[derive(Clone)]
pub(crate) struct Kernel {
    pub(crate) module: Handle,
    pub(crate) variant: String,
    pub(crate) grid: u32,
    pub(crate) block: u32,
    pub(crate) shared_bytes: u32,
    pub(crate) params: Vec<u8>,
    pub(crate) overlap: bool,
}

/// A stream.
#[derive(Default)]
pub(crate) struct Stream {
    /// Calls without a stream wait for its work.
    pub(crate) is_blocking: bool,
    queue: VecDeque<Work>,
    num_done: u64,
    capture: Option<Capture>,
}

/// A recording.
struct Capture {
    works: Vec<Work>,
    is_broken: bool,
    /// Who records.
    thread: ThreadId,
    /// Whether others must not do either what a recording cannot hold.
    binds_all: bool,
}

impl Stream {
    pub(crate) fn new(is_blocking: bool) -> Self {
        Self { is_blocking, ..Self::default() }
    }

    /// Work that has been issued, ever.
    pub(crate) fn num_issued(&self) -> u64 {
        self.num_done + self.queue.len() as u64
    }

    pub(crate) fn is_capturing(&self) -> bool {
        self.capture.is_some()
    }

    /// Whether a recording keeps this thread from what it cannot hold. A driver would let even the one that records do it where
    /// the recording is relaxed; but then it is part of none, which nobody means.
    pub(crate) fn binds_this_thread(&self) -> bool {
        let binds =
            |capture: &Capture| capture.binds_all || capture.thread == thread::current().id();
        self.capture.as_ref().is_some_and(binds)
    }

    /// Adds work, to the recording if there is one.
    pub(crate) fn push(&mut self, work: Work) -> Outcome {
        let Some(capture) = &mut self.capture else {
            self.queue.push_back(work);
            return Ok(());
        };
        if matches!(work, Work::Write { .. }) {
            return Err(self.forbid("a copy of memory that is not pinned"));
        }
        capture.works.push(work);
        Ok(())
    }

    /// Refuses what a recording must not contain, and spoils the recording.
    pub(crate) fn forbid(&mut self, what: &str) -> Fault {
        if let Some(capture) = &mut self.capture {
            capture.is_broken = true;
        }
        Fault::wrong(CAPTURE_UNSUPPORTED, format!("{what} while a stream is captured"))
    }

    pub(crate) fn begin(&mut self, binds_all: bool) -> Outcome {
        if self.capture.is_some() {
            return Err(Fault::wrong(ILLEGAL_STATE, "the stream is captured already"));
        }
        let thread = thread::current().id();
        self.capture = Some(Capture { works: Vec::new(), is_broken: false, thread, binds_all });
        Ok(())
    }

    pub(crate) fn end(&mut self) -> Outcome<Vec<Work>> {
        let none = || Fault::wrong(ILLEGAL_STATE, "the stream is not captured");
        let capture = self.capture.take().ok_or_else(none)?;
        if capture.is_broken { Err(Fault::plain(CAPTURE_INVALIDATED)) } else { Ok(capture.works) }
    }

    /// Whether code of a module is still to run.
    pub(crate) fn needs(&self, module: Handle) -> bool {
        self.queue
            .iter()
            .any(|work| matches!(work, Work::Launch(kernel) if kernel.module == module))
    }

    /// Does the first `num` works that were ever issued, unless they are done. After an error the rest never runs.
    pub(crate) fn run_to(
        &mut self,
        num: u64,
        memory: &Memory,
        failing: &mut Option<Failing>,
        seed: &mut u64,
    ) -> Outcome {
        let now = num.saturating_sub(self.num_done).min(self.queue.len() as u64) as usize;
        let works: Vec<Work> = self.queue.drain(..now).collect();
        self.num_done += now as u64;
        let is_launch = |work: &Work| matches!(work, Work::Launch(_));
        for run in works.chunk_by(|a, b| is_launch(a) && is_launch(b)) {
            match &run[0] {
                Work::Launch(_) => launch(run, failing, seed)?,
                Work::Fill { to, value, bytes } => memory.write(*to, &vec![*value; *bytes])?,
                Work::Write { to, bytes } => memory.write(*to, bytes)?,
                Work::Copy { to, from, bytes } => {
                    memory.write(*to, &memory.read(*from, *bytes)?)?
                }
            }
        }
        Ok(())
    }
}

/// Runs kernels that follow each other.
fn launch(works: &[Work], failing: &mut Option<Failing>, seed: &mut u64) -> Outcome {
    let kernels = works.iter().filter_map(|work| match work {
        Work::Launch(kernel) => Some(kernel),
        _ => None,
    });
    let mut launches = Vec::new();
    for kernel in kernels {
        if let Some(status) = failing.as_mut().and_then(|failing| failing.of("kernel")) {
            return Err(Fault::plain(status));
        }
        launches.push(Launch {
            variant: &kernel.variant,
            grid: kernel.grid,
            block: kernel.block,
            shared_bytes: kernel.shared_bytes,
            params: &kernel.params,
            overlap: kernel.overlap,
            max_resident: MAX_RESIDENT,
        });
    }
    // Another order each time, and the same in every run.
    *seed += 1;
    let schedule = Schedule { seed: *seed, ..Schedule::PLAIN };
    spec_emu::run(&launches, &schedule).map_err(|message| Fault::wrong(LAUNCH_FAILED, message))
}
