//! What the host spends on a step of an engine for GPUs, without the GPU and its driver: the executor's own code over
//! a device that is emulated, whose time is taken off. A step of a GPU that begins ahead hides all of this; one that
//! waits for the host adds it.
//!
//! `cargo run --release --example host_time [-- --steps N]`
//!
//! Microseconds a step, medians. `runtime` is scheduling, reading outcomes and events; `executor` is preparing
//! uploads and reading answers. Calls are those that cost a driver time: copies, graphs, launches, marks and waits.

#[path = "../../tests/common/mod.rs"]
mod common;

use common::models::Recipe;
use common::running;
use common::tiny::{self, Sizes};
use spec_core::Result;
use spec_core::engine::Engine;
use spec_core::model::Dtype;
use spec_core::runtime::DraftPolicy::Fixed;
use spec_core::runtime::{Options, Request, Runtime, SequenceId, TARGET_FILE};
use spec_core::sampling::SamplingParams;
use spec_core::testing::batch::{Entry, Executor, Stepped, Unwanted};
use spec_core::testing::cuda::device::{
    Address, Description, Device, Graph, Kernel, Mark, Op, ProductShape, Shared,
};
use spec_emu::{Emulator, Schedule};
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

/// The least that the kernels are written for.
const SIZES: Sizes =
    Sizes { hidden: 64, head_dim: 64, num_heads: 1, num_kv_heads: 1, ff: 64, qk_norm: false };
const BATCHES: [usize; 4] = [1, 4, 16, 32];
const DRAFT_LENS: [usize; 3] = [0, 4, 8];
/// Steps that are not counted: prompts, and graphs that are recorded.
const WARM_UP: usize = 6;
const STEPS: usize = 40;
/// With nine tokens in each, a text has not ended.
const MOST_STEPS: usize = 90;
/// Positions of the prompt of each sequence: no two begin alike.
const PROMPT: usize = 40;

/// Time inside of something, and calls of it.
#[derive(Default)]
struct Spent {
    nanos: AtomicU64,
    calls: AtomicU64,
}

impl Spent {
    fn time<T>(&self, work: impl FnOnce() -> T) -> T {
        let start = Instant::now();
        let result = work();
        self.nanos.fetch_add(start.elapsed().as_nanos() as u64, Relaxed);
        self.calls.fetch_add(1, Relaxed);
        result
    }

    /// Microseconds and calls since it was last asked.
    fn take(&self) -> (f64, u64) {
        (self.nanos.swap(0, Relaxed) as f64 / 1e3, self.calls.swap(0, Relaxed))
    }
}

/// A device whose time is taken.
struct TimedDevice {
    inner: Emulator,
    spent: Arc<Spent>,
}

impl Device for TimedDevice {
    fn describe(&self) -> &Description {
        self.inner.describe()
    }
    fn available_bytes(&self) -> Result<usize> {
        self.inner.available_bytes()
    }
    fn alloc(&mut self, bytes: usize) -> Result<Address> {
        self.spent.time(|| self.inner.alloc(bytes))
    }
    fn alloc_shared(&mut self, bytes: usize) -> Result<Shared> {
        self.spent.time(|| self.inner.alloc_shared(bytes))
    }
    fn write(&mut self, to: Address, bytes: &[u8]) -> Result<()> {
        self.spent.time(|| self.inner.write(to, bytes))
    }
    fn write_shared(&mut self, to: Address, shared: &Shared, from: Range<usize>) -> Result<()> {
        self.spent.time(|| self.inner.write_shared(to, shared, from))
    }
    fn read(&mut self, from: Address, out: &mut [u8]) -> Result<()> {
        self.spent.time(|| self.inner.read(from, out))
    }
    fn load(&mut self, variant: &str, entry: &str, code: &[u8], bytes: u32) -> Result<Kernel> {
        self.inner.load(variant, entry, code, bytes)
    }
    fn issue(&mut self, op: &Op) -> Result<()> {
        self.spent.time(|| self.inner.issue(op))
    }
    fn enable_products(&mut self, shapes: &[ProductShape]) -> Result<()> {
        self.inner.enable_products(shapes)
    }
    fn record(&mut self, ops: &[Op]) -> Result<Graph> {
        self.spent.time(|| self.inner.record(ops))
    }
    fn replay(&mut self, graph: Graph) -> Result<()> {
        self.spent.time(|| self.inner.replay(graph))
    }
    fn new_mark(&mut self) -> Result<Mark> {
        self.inner.new_mark()
    }
    fn put_mark(&mut self, mark: Mark) -> Result<()> {
        self.spent.time(|| self.inner.put_mark(mark))
    }
    fn wait_for(&mut self, mark: Mark) -> Result<()> {
        self.spent.time(|| self.inner.wait_for(mark))
    }
    fn wait(&mut self) -> Result<()> {
        self.spent.time(|| self.inner.wait())
    }
}

/// An executor whose time is taken, its device's with it.
struct TimedExecutor {
    inner: Box<dyn Executor>,
    spent: Arc<Spent>,
}

impl Executor for TimedExecutor {
    fn step(&mut self, entries: &[Entry<'_>], unwanted: Unwanted<'_>) -> Result<Option<Stepped>> {
        self.spent.time(|| self.inner.step(entries, unwanted))
    }
    fn forget(&mut self, id: SequenceId) {
        self.spent.time(|| self.inner.forget(id));
    }
    fn lookahead(&self) -> usize {
        self.inner.lookahead()
    }
}

/// Of one step.
struct Sample {
    runtime: f64,
    executor: f64,
    calls: u64,
}

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let steps = match args.as_slice() {
        [] => STEPS,
        [name, number] if name == "--steps" => number.parse().expect("a number of steps"),
        _ => panic!("expected nothing or --steps N, got {args:?}"),
    };
    assert!((1..=MOST_STEPS).contains(&steps), "{steps} steps: expected 1 to {MOST_STEPS}");
    let dir = tempfile::tempdir().expect("a folder");
    let engine = engine(dir.path());
    println!(
        "microseconds of the host a step (median of {steps}), beside {} of a clock's reading",
        clock()
    );
    println!("| sequences | drafts | begins | runtime | executor | host | a sequence | calls |");
    println!("|---|---|---|---|---|---|---|---|");
    for draft_len in DRAFT_LENS {
        for batch in BATCHES {
            for launch_ahead in [false, true] {
                let samples = measure(&engine, batch, draft_len, launch_ahead, steps);
                let runtime = median(samples.iter().map(|s| s.runtime));
                let executor = median(samples.iter().map(|s| s.executor));
                let calls = median(samples.iter().map(|s| s.calls as f64));
                let host = runtime + executor;
                let begins = if launch_ahead { "ahead" } else { "when asked" };
                println!(
                    "| {batch} | {draft_len} | {begins} | {runtime:.1} | {executor:.1} | {host:.1} | {:.2} | {calls} |",
                    host / batch as f64
                );
            }
        }
    }
}

fn engine(dir: &std::path::Path) -> Engine {
    tiny::write_sized(&dir.join("big"), 1, 1, &SIZES);
    tiny::write_sized(&dir.join("small"), 1, 1, &SIZES);
    Recipe::model(dir.join("big"), Dtype::Fp8, dir.join("small"), Dtype::Fp8)
        .on("cuda:sm_90a")
        .build(&dir.join("built"));
    Engine::open(dir.join("built/1").join(TARGET_FILE)).expect("opens")
}

fn measure(
    engine: &Engine,
    batch: usize,
    draft_len: usize,
    launch_ahead: bool,
    steps: usize,
) -> Vec<Sample> {
    let (device, executor) = (Arc::new(Spent::default()), Arc::new(Spent::default()));
    let mut runtime = load(engine, launch_ahead, &device, &executor);
    for idx in 0..batch {
        runtime.add(request(idx, draft_len)).expect("the request is allowed");
    }
    let mut sample = || {
        let start = Instant::now();
        let step = runtime.step();
        let whole = start.elapsed().as_secs_f64() * 1e6;
        assert!(step.failure.is_none(), "a step failed: {:?}", step.failure);
        let ((inside, _), (on_device, calls)) = (executor.take(), device.take());
        Sample { runtime: whole - inside, executor: inside - on_device, calls }
    };
    for _ in 0..WARM_UP {
        sample();
    }
    (0..steps).map(|_| sample()).collect()
}

fn load(
    engine: &Engine,
    launch_ahead: bool,
    device: &Arc<Spent>,
    executor: &Arc<Spent>,
) -> Runtime {
    let options = Options { launch_ahead, ..running::options(Fixed) };
    let first = Mutex::new(Some(Emulator::new((9, 0), 1, Schedule::PLAIN)));
    let open = |_| {
        let inner = first.lock().unwrap_or_else(PoisonError::into_inner).take();
        let inner = inner.expect("target and drafter share a device");
        Ok(Box::new(TimedDevice { inner, spent: Arc::clone(device) }) as _)
    };
    let spent = Arc::clone(executor);
    Runtime::load_on(engine, &options, &open)
        .expect("loads")
        .wrap_executor(|inner| Box::new(TimedExecutor { inner, spent }))
}

/// A text that does not end while it is measured, greedy or seeded in turns.
fn request(idx: usize, draft_len: usize) -> Request {
    let temperature = if idx.is_multiple_of(2) { 0.0 } else { 0.8 };
    let token = |at: usize| ((at * at + 7 * idx * at + idx) % 60) as u32;
    let prompt: Vec<u32> = (0..PROMPT).map(token).collect();
    Request {
        prompt: prompt.into(),
        max_tokens: 900,
        ignore_eos: true,
        draft_len: Some(draft_len),
        sampling: SamplingParams {
            temperature,
            seed: Some(idx as u64),
            ..SamplingParams::default()
        },
        ..Request::default()
    }
}

fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// What taking a time itself costs, in microseconds.
fn clock() -> String {
    let spent = Spent::default();
    (0..10_000).for_each(|_| spent.time(|| ()));
    let start = Instant::now();
    (0..10_000).for_each(|_| spent.time(|| ()));
    format!("{:.2}", start.elapsed().as_secs_f64() * 1e6 / 1e4)
}
