//! The primary context of a device: everything that was made in it, and the error that ends it.

use crate::code::{Function, Module};
use crate::config::Failing;
use crate::fault::{Fault, INVALID_VALUE, NOT_SUPPORTED, Outcome, Status};
use crate::memory::Memory;
use crate::stream::{Kernel, Stream, Work};
use crate::table::{Handle, Table};

/// A context.
pub(crate) struct Context {
    pub(crate) capability: (u32, u32),
    pub(crate) memory: Memory,
    pub(crate) modules: Table<Module>,
    pub(crate) functions: Table<Function>,
    pub(crate) streams: Table<Stream>,
    pub(crate) events: Table<Event>,
    pub(crate) graphs: Table<Vec<Work>>,
    /// Graphs that can be launched.
    pub(crate) execs: Table<Vec<Work>>,
    /// The status of a kernel that failed: of every call from then on.
    pub(crate) sticky: Option<Status>,
    seed: u64,
}

/// A point in a stream, once it was recorded: the works before it.
#[derive(Default)]
pub(crate) struct Event {
    recorded: Option<(Handle, u64)>,
}

/// What a launch asks for.
pub(crate) struct Config {
    pub(crate) grid: [u32; 3],
    pub(crate) block: [u32; 3],
    pub(crate) shared_bytes: u32,
    pub(crate) overlap: bool,
}

impl Context {
    pub(crate) fn new(capability: (u32, u32), memory_bytes: usize) -> Self {
        Self {
            capability,
            memory: Memory::new(memory_bytes),
            modules: Table::new("module"),
            functions: Table::new("function"),
            streams: Table::new("stream"),
            events: Table::new("event"),
            graphs: Table::new("graph"),
            execs: Table::new("executable graph"),
            sticky: None,
            seed: 0,
        }
    }

    /// Refuses what waits for the device, or changes its memory, while this thread captures a stream, or another one does
    /// that binds all.
    pub(crate) fn not_in_capture(&mut self, what: &str) -> Outcome {
        let capturing = self.streams.iter().find(|(_, stream)| stream.binds_this_thread());
        match capturing.map(|(handle, _)| handle) {
            Some(handle) => Err(self.streams.get_mut(handle)?.forbid(what)),
            None => Ok(()),
        }
    }

    /// Waits for all streams, or for those that calls without a stream wait for.
    pub(crate) fn wait_for_all(
        &mut self,
        blocking: bool,
        failing: &mut Option<Failing>,
    ) -> Outcome {
        let wanted = self.streams.iter().filter(|(_, stream)| stream.is_blocking || !blocking);
        let streams: Vec<Handle> = wanted.map(|(handle, _)| handle).collect();
        streams.into_iter().try_for_each(|stream| self.wait(stream, u64::MAX, failing))
    }

    /// Waits for the first `num` works of a stream.
    pub(crate) fn wait(
        &mut self,
        stream: Handle,
        num: u64,
        failing: &mut Option<Failing>,
    ) -> Outcome {
        let stream = self.streams.get_mut(stream)?;
        let done = stream.run_to(num, &self.memory, failing, &mut self.seed);
        if let Err(fault) = &done {
            self.sticky = Some(fault.status);
        }
        done
    }

    /// Copies from the host, which may use pageable memory again at once.
    pub(crate) fn write(&mut self, to: u64, from: u64, bytes: &[u8], stream: Handle) -> Outcome {
        self.memory.check(to, bytes.len())?;
        let work = match self.memory.is_pinned(from, bytes.len())? {
            true => Work::Copy { to, from, bytes: bytes.len() },
            false => Work::Write { to, bytes: bytes.to_vec() },
        };
        self.streams.get_mut(stream)?.push(work)
    }

    pub(crate) fn unload(&mut self, module: Handle) -> Outcome {
        if self.streams.iter().any(|(_, stream)| stream.needs(module)) {
            return Err(Fault::wrong(INVALID_VALUE, "code of the module is still to run"));
        }
        self.modules.remove(module)?;
        self.functions.retain(|function| function.module != module);
        Ok(())
    }

    pub(crate) fn launch(
        &mut self,
        stream: Handle,
        function: Handle,
        config: &Config,
        params: Vec<u8>,
    ) -> Outcome {
        let function = self.functions.get(function)?;
        let ([grid, 1, 1], [block, 1, 1]) = (config.grid, config.block) else {
            return Err(Fault::wrong(NOT_SUPPORTED, "launches have one dimension here"));
        };
        if grid == 0 || block == 0 {
            let message = format!("{grid} blocks of {block} threads");
            return Err(Fault::wrong(INVALID_VALUE, message));
        }
        if config.overlap && self.capability < (9, 0) {
            let message = "launches do not overlap on this architecture";
            return Err(Fault::wrong(NOT_SUPPORTED, message));
        }
        function.check(block, config.shared_bytes)?;
        let kernel = Kernel {
            module: function.module,
            variant: function.variant.clone(),
            grid,
            block,
            shared_bytes: config.shared_bytes,
            params,
            overlap: config.overlap,
        };
        self.streams.get_mut(stream)?.push(Work::Launch(kernel))
    }

    /// Issues a graph.
    pub(crate) fn replay(&mut self, exec: Handle, stream: Handle) -> Outcome {
        let works = self.execs.get(exec)?.clone();
        for work in &works {
            if let Work::Launch(kernel) = work {
                self.modules.get(kernel.module)?;
            }
        }
        let stream = self.streams.get_mut(stream)?;
        works.into_iter().try_for_each(|work| stream.push(work))
    }

    pub(crate) fn record(&mut self, event: Handle, stream: Handle) -> Outcome {
        let found = self.streams.get_mut(stream)?;
        if found.is_capturing() {
            return Err(found.forbid("an event"));
        }
        let recorded = Some((stream, found.num_issued()));
        self.events.get_mut(event)?.recorded = recorded;
        Ok(())
    }

    /// The stream and the works before an event; none if it was never recorded or its stream is gone.
    pub(crate) fn recorded(&self, event: Handle) -> Outcome<Option<(Handle, u64)>> {
        let recorded = self.events.get(event)?.recorded;
        Ok(recorded.filter(|(stream, _)| self.streams.get(*stream).is_ok()))
    }

    /// What was made and not destroyed. Functions go with their modules.
    pub(crate) fn left(&self) -> Vec<String> {
        let Self { memory, modules, functions: _, streams, events, graphs, execs, .. } = self;
        let tables = [modules.left(), streams.left(), events.left(), graphs.left(), execs.left()];
        memory.left().into_iter().chain(tables.into_iter().flatten()).collect()
    }
}
