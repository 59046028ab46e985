//! The GPU under test: the CUDA driver's, or an emulated one, behind a watch that remembers what the executor loaded
//! and allocated and how long its graphs took.

use spec_core::Result;
use spec_core::testing::cuda::Driver;
use spec_core::testing::cuda::device::{
    Address, Description, Device, Graph, Kernel, Launch, Mark, Op, ProductShape, Shared,
};
use spec_emu::{Emulator, Schedule};
use std::collections::{HashMap, VecDeque};
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Multiprocessors of the emulated GPU: an odd number, so that blocks begin and end inside of columns.
const EMULATED_SMS: u32 = 3;

/// Which GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Machine {
    /// The one with this number.
    Driver(usize),
    /// One that looks like an H100 with a few multiprocessors.
    Emulator,
    /// The same behind the driver's interface.
    EmulatedDriver,
}

impl Machine {
    /// Opens it: with memory of its own, that is free again when the device is dropped.
    pub(crate) fn open(self) -> Result<Watched> {
        let inner: Box<dyn Device> = match self {
            Self::Driver(ordinal) => Box::new(Driver::open(ordinal)?),
            Self::EmulatedDriver => Box::new(Driver::open(0)?),
            Self::Emulator => Box::new(Emulator::new((9, 0), EMULATED_SMS, Schedule::PLAIN)),
        };
        Ok(Watched::new(inner))
    }

    /// Whether times mean nothing.
    pub(crate) fn is_emulated(self) -> bool {
        !matches!(self, Self::Driver(_))
    }
}

/// What checks run on.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Bed {
    pub(crate) machine: Machine,
    /// What its kernels are compiled for.
    pub(crate) arch: &'static str,
    /// Only what an emulator or a sanitizer gets through.
    pub(crate) small: bool,
}

/// What there are kernels for, by compute capability; of 8.0 to 8.8 they are the same.
const ARCHS: [((u32, u32), &str); 5] = [
    ((8, 0), "sm_80"),
    ((8, 9), "sm_89"),
    ((9, 0), "sm_90a"),
    ((10, 0), "sm_100a"),
    ((12, 0), "sm_120a"),
];

/// The architecture to compile for.
pub(crate) fn arch(description: &Description) -> std::result::Result<&'static str, String> {
    let (major, minor) = description.capability;
    let known = if major == 8 && minor < 9 { (8, 0) } else { (major, minor) };
    let found = ARCHS.into_iter().find(|&(capability, _)| capability == known);
    let missing = || format!("compute capability {major}.{minor} has no kernels here");
    found.map(|(_, arch)| arch).ok_or_else(missing)
}

/// An architecture by its name.
pub(crate) fn known_arch(name: &str) -> std::result::Result<&'static str, String> {
    let found = ARCHS.into_iter().find(|&(_, arch)| arch == name);
    found.map(|(_, arch)| arch).ok_or_else(|| format!("there are no kernels for {name}"))
}

/// What was seen, also after the device went into an executor.
#[derive(Clone, Debug, Default)]
pub(crate) struct Watch(Arc<Mutex<Seen>>);

#[derive(Debug, Default)]
struct Seen {
    variants: Vec<String>,
    last_alloc: (Address, usize),
    /// The launches of each graph, by its number.
    recorded: Vec<Vec<Launch>>,
    last_replayed: Option<Graph>,
    graphs: Vec<Duration>,
}

impl Watch {
    fn seen(&self) -> MutexGuard<'_, Seen> {
        lock(&self.0)
    }

    /// Name of a loaded kernel.
    pub(crate) fn variant(&self, kernel: Kernel) -> String {
        self.seen().variants[kernel.0 as usize].clone()
    }

    /// The newest memory: where, and how many bytes were asked for.
    pub(crate) fn last_alloc(&self) -> (Address, usize) {
        self.seen().last_alloc
    }

    /// The launches of the graph that was issued last.
    pub(crate) fn last_replayed(&self) -> Vec<Launch> {
        let seen = self.seen();
        seen.last_replayed.map_or_else(Vec::new, |graph| seen.recorded[graph.0 as usize].clone())
    }

    /// How long each graph took, from its issue to the end of the wait for it; forgets them.
    pub(crate) fn take_graphs(&self) -> Vec<Duration> {
        std::mem::take(&mut self.seen().graphs)
    }
}

fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A device that is watched. A clone is the same device, so that one can be inside of a runtime.
#[derive(Clone)]
pub(crate) struct Watched {
    inner: Arc<Mutex<Box<dyn Device>>>,
    description: Description,
    watch: Watch,
    /// When the graphs were issued that have not ended yet.
    replayed: VecDeque<Instant>,
    num_ended: usize,
    /// When the last of those ended.
    ended_at: Instant,
    /// Graphs ahead of each mark, by its number: a device has marks of its own between those that it gives.
    marks: HashMap<u32, usize>,
}

impl Watched {
    fn new(inner: Box<dyn Device>) -> Self {
        let description = inner.describe().clone();
        let inner = Arc::new(Mutex::new(inner));
        Self {
            inner,
            description,
            watch: Watch::default(),
            replayed: VecDeque::new(),
            num_ended: 0,
            ended_at: Instant::now(),
            marks: HashMap::new(),
        }
    }

    /// The first `count` graphs have ended. One that was issued before another ended began when that one did.
    fn ended(&mut self, count: usize) {
        let Some(started) = self.replayed.front().copied() else { return };
        let num_new = count.saturating_sub(self.num_ended);
        if num_new > 0 {
            self.watch.seen().graphs.push(started.max(self.ended_at).elapsed());
        }
        self.replayed.drain(..num_new);
        self.num_ended += num_new;
        self.ended_at = Instant::now();
    }

    /// What it sees.
    pub(crate) fn watch(&self) -> &Watch {
        &self.watch
    }

    fn inner(&self) -> MutexGuard<'_, Box<dyn Device>> {
        lock(&self.inner)
    }
}

impl Device for Watched {
    fn describe(&self) -> &Description {
        &self.description
    }

    fn available_bytes(&self) -> Result<usize> {
        self.inner().available_bytes()
    }

    fn alloc(&mut self, bytes: usize) -> Result<Address> {
        let address = self.inner().alloc(bytes)?;
        self.watch.seen().last_alloc = (address, bytes);
        Ok(address)
    }

    fn alloc_shared(&mut self, bytes: usize) -> Result<Shared> {
        self.inner().alloc_shared(bytes)
    }

    fn write(&mut self, to: Address, bytes: &[u8]) -> Result<()> {
        self.inner().write(to, bytes)
    }

    fn write_shared(&mut self, to: Address, shared: &Shared, from: Range<usize>) -> Result<()> {
        self.inner().write_shared(to, shared, from)
    }

    fn read(&mut self, from: Address, out: &mut [u8]) -> Result<()> {
        self.inner().read(from, out)
    }

    fn load(
        &mut self,
        variant: &str,
        entry: &str,
        code: &[u8],
        shared_bytes: u32,
    ) -> Result<Kernel> {
        let kernel = self.inner().load(variant, entry, code, shared_bytes)?;
        let mut seen = self.watch.seen();
        assert_eq!(seen.variants.len(), kernel.0 as usize, "kernels are counted");
        seen.variants.push(variant.into());
        Ok(kernel)
    }

    fn issue(&mut self, op: &Op) -> Result<()> {
        self.inner().issue(op)
    }

    fn enable_products(&mut self, shapes: &[ProductShape]) -> Result<()> {
        self.inner().enable_products(shapes)
    }

    fn record(&mut self, ops: &[Op]) -> Result<Graph> {
        let graph = self.inner().record(ops)?;
        let mut seen = self.watch.seen();
        assert_eq!(seen.recorded.len(), graph.0 as usize, "graphs are counted");
        seen.recorded.push(ops.iter().filter_map(Op::as_launch).cloned().collect());
        Ok(graph)
    }

    fn replay(&mut self, graph: Graph) -> Result<()> {
        self.replayed.push_back(Instant::now());
        self.watch.seen().last_replayed = Some(graph);
        self.inner().replay(graph)
    }

    fn new_mark(&mut self) -> Result<Mark> {
        self.inner().new_mark()
    }

    fn put_mark(&mut self, mark: Mark) -> Result<()> {
        self.marks.insert(mark.0, self.num_ended + self.replayed.len());
        self.inner().put_mark(mark)
    }

    fn wait_for(&mut self, mark: Mark) -> Result<()> {
        self.inner().wait_for(mark)?;
        self.ended(self.marks.get(&mark.0).copied().unwrap_or(0));
        Ok(())
    }

    fn wait(&mut self) -> Result<()> {
        self.inner().wait()?;
        self.ended(self.num_ended + self.replayed.len());
        Ok(())
    }
}
