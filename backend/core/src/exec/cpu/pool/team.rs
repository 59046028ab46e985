//! Workers that run regions together, and wait for each other in a tree: a worker is woken by its parent, wakes its
//! children, runs, waits for them and tells its parent. What two of them tell each other lies on a line of its own, so
//! that no line goes round among all of them.
#![allow(unsafe_code)]

use super::seats::Seats;
use std::cell::{Cell, UnsafeCell};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

/// How long a thread spins before it sleeps: longer than the gaps between the regions of a step,
/// shorter than anyone would notice.
pub(super) const SPIN: Duration = Duration::from_micros(80);

/// What all workers run at once, each with its number.
pub(super) type Region<'a> = dyn Fn(usize) + Sync + 'a;

/// A region without its lifetime; none tells workers to end.
type Job = Option<*const Region<'static>>;

/// The workers; worker 0 is whoever starts a region.
pub(super) struct Team {
    slots: Box<[Slot]>,
    /// Regions so far.
    epoch: AtomicU64,
    /// Who runs the current one as worker 0.
    caller: UnsafeCell<Option<Thread>>,
}

/// What a worker and its neighbours in the tree tell each other, on a cache line of its own (two, as they are fetched in
/// pairs).
#[repr(align(128))]
struct Slot {
    parent: usize,
    children: Vec<usize>,
    /// The region to run next; a change is the signal.
    go: AtomicU64,
    /// The last region that this worker and all below it have left.
    done: AtomicU64,
    asleep: AtomicBool,
    /// Written by the parent ahead of `go`.
    job: UnsafeCell<Job>,
    thread: OnceLock<Thread>,
}

// SAFETY: `caller` is written only by the starter of a region, of whom there is one at a time, while all workers are
// outside of regions, and read by the children of worker 0 between `go` and `done`. A `job` is written by the parent
// while its worker is outside of regions, and read by the worker behind `go`. A region itself is `Sync`.
unsafe impl Sync for Team {}
// SAFETY: as above; the pointer of a job is not dereferenced outside of its region.
unsafe impl Send for Team {}

impl Team {
    pub(super) fn new(seats: &Seats) -> Self {
        let parents = seats.parents();
        let slot = |worker: usize| Slot {
            parent: parents[worker],
            children: (1..parents.len()).filter(|&child| parents[child] == worker).collect(),
            go: AtomicU64::new(0),
            done: AtomicU64::new(0),
            asleep: AtomicBool::new(false),
            job: UnsafeCell::new(None),
            thread: OnceLock::new(),
        };
        Self {
            slots: (0..parents.len()).map(slot).collect(),
            epoch: AtomicU64::new(0),
            caller: UnsafeCell::new(None),
        }
    }

    /// Runs a region on all workers, as worker 0 `own`, and returns when all have left it.
    ///
    /// # Safety
    /// Nobody else starts or ends anything meanwhile. `own` does not unwind.
    pub(super) unsafe fn run(&self, region: &Region<'_>, own: impl FnOnce()) {
        let erased: *const Region<'_> = region;
        // SAFETY: only the lifetime changes: no worker uses it once the last child has said that it is done, and this
        // frame stays until then, since `own` does not unwind.
        let job =
            unsafe { std::mem::transmute::<*const Region<'_>, *const Region<'static>>(erased) };
        // SAFETY: by the contract no region runs, so nobody reads it.
        unsafe { *self.caller.get() = Some(thread::current()) };
        let epoch = self.epoch.fetch_add(1, Ordering::Relaxed) + 1;
        self.start_children(0, epoch, Some(job));
        own();
        self.wait_for_children(0, epoch);
    }

    /// Has all workers end.
    ///
    /// # Safety
    /// Nobody starts anything meanwhile or afterwards.
    pub(super) unsafe fn end(&self) {
        let epoch = self.epoch.fetch_add(1, Ordering::Relaxed) + 1;
        self.start_children(0, epoch, None);
    }

    /// What a worker other than 0 does with its thread. `run` runs a region and does not unwind.
    pub(super) fn work(&self, worker: usize, run: impl Fn(&Region<'_>)) {
        let slot = &self.slots[worker];
        slot.thread.get_or_init(thread::current);
        let mut seen = 0;
        loop {
            let next = || Some(slot.go.load(Ordering::SeqCst)).filter(|&epoch| epoch != seen);
            seen = wait(&slot.asleep, next);
            // SAFETY: the parent has written it ahead of the change of `go` and leaves it alone until it sees `done`.
            let job = unsafe { *slot.job.get() };
            let caller = match (slot.parent, job) {
                // SAFETY: the starter has written it ahead of the region and leaves it alone until this worker is done.
                (0, Some(_)) => unsafe { (*self.caller.get()).clone() },
                _ => None,
            };
            self.start_children(worker, seen, job);
            let Some(region) = job else { return };
            // SAFETY: the starter keeps the region until this worker is done.
            run(unsafe { &*region });
            self.wait_for_children(worker, seen);
            slot.done.store(seen, Ordering::SeqCst);
            let parent = &self.slots[slot.parent];
            if parent.asleep.load(Ordering::SeqCst)
                && let Some(thread) = caller.as_ref().or(parent.thread.get())
            {
                thread.unpark();
            }
        }
    }

    fn start_children(&self, worker: usize, epoch: u64, job: Job) {
        for &child in &self.slots[worker].children {
            let slot = &self.slots[child];
            // SAFETY: the child is outside of regions: it was waited for at the end of the last one.
            unsafe { *slot.job.get() = job };
            // Sequentially consistent with `asleep`: either the worker sees the new epoch before it sleeps, or its flag
            // is seen here. A thread that has not set its handle has not slept yet.
            slot.go.store(epoch, Ordering::SeqCst);
            if slot.asleep.load(Ordering::SeqCst)
                && let Some(thread) = slot.thread.get()
            {
                thread.unpark();
            }
        }
    }

    fn wait_for_children(&self, worker: usize, epoch: u64) {
        let slot = &self.slots[worker];
        let num_done = Cell::new(0);
        let all_done = || {
            let is_done = |child: usize| self.slots[child].done.load(Ordering::SeqCst) == epoch;
            let left = &slot.children[num_done.get()..];
            let news = left.iter().take_while(|&&child| is_done(child)).count();
            num_done.set(num_done.get() + news);
            (news == left.len()).then_some(())
        };
        wait(&slot.asleep, all_done);
    }
}

/// Spins, then sleeps, until `ready` has an answer. Whoever makes it ready must look at `asleep` after
/// that and unpark this thread if it is set.
fn wait<T>(asleep: &AtomicBool, ready: impl Fn() -> Option<T>) -> T {
    let mut deadline = None;
    loop {
        for _ in 0..64 {
            if let Some(answer) = ready() {
                return answer;
            }
            std::hint::spin_loop();
        }
        let now = Instant::now();
        if now < *deadline.get_or_insert(now + SPIN) {
            continue;
        }
        asleep.store(true, Ordering::SeqCst);
        let answer = loop {
            if let Some(answer) = ready() {
                break answer;
            }
            thread::park();
        };
        asleep.store(false, Ordering::SeqCst);
        return answer;
    }
}
