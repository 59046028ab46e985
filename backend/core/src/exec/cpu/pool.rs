//! Threads for regions of tens of microseconds, hundreds of them a token. Between regions a worker spins
//! for a moment and then sleeps, so a busy engine pays no wake-up and an idle one no processor time.
//! A panic in a region reaches the caller after every worker has left the region; a region started inside
//! a region runs on the thread that started it.
#![allow(unsafe_code)]

use std::any::Any;
use std::cell::{Cell, UnsafeCell};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle, Thread};
use std::time::{Duration, Instant};

/// How long a thread spins before it sleeps: longer than the gaps between the regions of a step,
/// shorter than anyone would notice.
const SPIN: Duration = Duration::from_micros(80);

thread_local! {
    static INSIDE: Cell<bool> = const { Cell::new(false) };
}

/// Persistent threads that run one region at a time. The calling thread is worker 0.
pub struct Pool {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
    /// Held during a region; protects `shared.job` and the ranges.
    turn: Mutex<()>,
}

/// On a cache line of its own (two, as they are fetched in pairs).
#[derive(Default)]
#[repr(align(128))]
struct Padded<T>(T);

type Region<'a> = dyn Fn(usize) + Sync + 'a;

struct Shared {
    /// Counts regions; a change is the signal to run `job`.
    epoch: Padded<AtomicU64>,
    /// Workers still inside the current region.
    running: Padded<AtomicUsize>,
    job: UnsafeCell<Option<Job>>,
    stop: AtomicBool,
    asleep: Box<[Padded<AtomicBool>]>,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
    /// What is left of each worker's part of a `for_each`: the next task in the low half, the end in
    /// the high half.
    ranges: Box<[Padded<AtomicU64>]>,
}

struct Job {
    region: *const Region<'static>,
    caller: Thread,
}

// SAFETY: `job` is written only by the holder of `turn` while no worker is in a region, and read only by
// workers between the change of `epoch` and their decrement of `running`; the region itself is `Sync`.
unsafe impl Sync for Shared {}
// SAFETY: as above; the pointer in `job` is not dereferenced outside a region.
unsafe impl Send for Shared {}

impl Pool {
    /// Starts `threads - 1` threads. With one thread everything runs on the caller.
    pub fn new(threads: usize) -> Self {
        let threads = threads.max(1);
        let shared = Arc::new(Shared {
            epoch: Padded::default(),
            running: Padded::default(),
            job: UnsafeCell::new(None),
            stop: AtomicBool::new(false),
            asleep: (0..threads).map(|_| Padded::default()).collect(),
            panic: Mutex::new(None),
            ranges: (0..threads).map(|_| Padded::default()).collect(),
        });
        let workers = (1..threads)
            .map(|worker| {
                let shared = Arc::clone(&shared);
                thread::Builder::new()
                    .name(format!("spec-cpu-{worker}"))
                    .spawn(move || shared.work(worker))
                    .expect("the system has threads to spare at start-up")
            })
            .collect();
        Self { shared, workers, turn: Mutex::new(()) }
    }

    /// Workers of a region, the caller counted.
    pub fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Runs `region(worker)` once for every worker and returns when all have returned.
    pub fn run(&self, region: impl Fn(usize) + Sync) {
        if self.workers.is_empty() || INSIDE.get() {
            (0..self.threads()).for_each(region);
            return;
        }
        let turn = lock(&self.turn);
        self.run_locked(&turn, &region);
    }

    /// Runs `task(i)` for every `i < num_tasks`, in any order, each once. A worker walks a contiguous
    /// range upwards, so tasks over consecutive memory stream, and then takes from the far ends of others.
    pub fn for_each(&self, num_tasks: usize, task: impl Fn(usize) + Sync) {
        if self.workers.is_empty() || INSIDE.get() || num_tasks <= 1 {
            (0..num_tasks).for_each(task);
            return;
        }
        assert!(u32::try_from(num_tasks).is_ok(), "{num_tasks} tasks, at most 2^32 - 1");
        let turn = lock(&self.turn);
        let (ranges, threads) = (&self.shared.ranges, self.threads());
        for (worker, range) in ranges.iter().enumerate() {
            let (start, end) = (num_tasks * worker / threads, num_tasks * (worker + 1) / threads);
            // Ordered before the workers' reads by the release of `epoch`.
            range.0.store(start as u64 | (end as u64) << 32, Ordering::Relaxed);
        }
        self.run_locked(&turn, &|worker| {
            while let Some(i) = take_first(&ranges[worker].0) {
                task(i);
            }
            for other in (worker + 1..threads).chain(0..worker) {
                while let Some(i) = take_last(&ranges[other].0) {
                    task(i);
                }
            }
        });
    }

    /// Runs `task(i, chunk)` for every `chunk_len`-long piece of `data`, the last perhaps shorter.
    pub fn for_each_chunk<T: Send>(
        &self,
        data: &mut [T],
        chunk_len: usize,
        task: impl Fn(usize, &mut [T]) + Sync,
    ) {
        let len = data.len();
        let base = SyncPtr(data.as_mut_ptr());
        self.for_each(len.div_ceil(chunk_len), |i| {
            let start = i * chunk_len;
            let chunk_len = chunk_len.min(len - start);
            // SAFETY: each `i` is handed out once and its chunk overlaps no other; `data` is borrowed
            // mutably until `for_each` returns.
            let chunk = unsafe { std::slice::from_raw_parts_mut(base.get().add(start), chunk_len) };
            task(i, chunk);
        });
    }

    fn run_locked(&self, _turn: &MutexGuard<'_, ()>, region: &Region<'_>) {
        let shared = &*self.shared;
        let erased: *const Region<'_> = region;
        // SAFETY: only the lifetime changes; `Leave` below keeps this frame until no worker uses it.
        let erased =
            unsafe { std::mem::transmute::<*const Region<'_>, *const Region<'static>>(erased) };
        // SAFETY: `turn` is held and the last region has been left by every worker.
        unsafe { *shared.job.get() = Some(Job { region: erased, caller: thread::current() }) };
        shared.running.0.store(self.workers.len(), Ordering::Relaxed);
        // Sequentially consistent with `asleep`: either the worker sees the new epoch before it sleeps,
        // or its flag is seen here.
        shared.epoch.0.fetch_add(1, Ordering::SeqCst);
        for (worker, handle) in self.workers.iter().enumerate() {
            if shared.asleep[worker + 1].0.load(Ordering::SeqCst) {
                handle.thread().unpark();
            }
        }
        let own = run_inside(region, 0);
        shared.wait_for_workers();
        let theirs = lock(&shared.panic).take();
        if let Some(payload) = own.err().or(theirs) {
            resume_unwind(payload);
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        self.shared.epoch.0.fetch_add(1, Ordering::SeqCst);
        for worker in self.workers.drain(..) {
            worker.thread().unpark();
            // A worker catches its regions' panics, so there is nothing to learn from the result.
            let _ = worker.join();
        }
    }
}

impl Shared {
    fn work(&self, worker: usize) {
        let mut seen = 0;
        loop {
            seen = self.next_epoch(worker, seen);
            if self.stop.load(Ordering::SeqCst) {
                return;
            }
            // SAFETY: the epoch changed, so the caller has written the job and waits for us to leave.
            let (region, caller) = unsafe {
                let job = (*self.job.get()).as_ref().expect("a region starts with its job");
                (&*job.region, job.caller.clone())
            };
            if let Err(payload) = run_inside(region, worker) {
                lock(&self.panic).get_or_insert(payload);
            }
            if self.running.0.fetch_sub(1, Ordering::SeqCst) == 1
                && self.asleep[0].0.load(Ordering::SeqCst)
            {
                caller.unpark();
            }
        }
    }

    fn next_epoch(&self, worker: usize, seen: u64) -> u64 {
        let changed = || Some(self.epoch.0.load(Ordering::SeqCst)).filter(|&epoch| epoch != seen);
        wait(&self.asleep[worker].0, changed)
    }

    fn wait_for_workers(&self) {
        let done = || (self.running.0.load(Ordering::SeqCst) == 0).then_some(());
        wait(&self.asleep[0].0, done);
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

fn run_inside(region: &Region<'_>, worker: usize) -> thread::Result<()> {
    INSIDE.set(true);
    let result = catch_unwind(AssertUnwindSafe(|| region(worker)));
    INSIDE.set(false);
    result
}

fn take_first(range: &AtomicU64) -> Option<usize> {
    take(range, |start, end| (start, start + 1, end))
}

fn take_last(range: &AtomicU64) -> Option<usize> {
    take(range, |start, end| (end - 1, start, end - 1))
}

/// Takes a task off a range: `pick` says which, and the range that is left.
fn take(range: &AtomicU64, pick: impl Fn(u64, u64) -> (u64, u64, u64)) -> Option<usize> {
    let mut taken = 0;
    let split = |range: u64| {
        let (start, end) = (range & 0xffff_ffff, range >> 32);
        if start >= end {
            return None;
        }
        let (task, start, end) = pick(start, end);
        taken = task as usize;
        Some(start | end << 32)
    };
    // Tasks share nothing but what the region's start and end order.
    range.fetch_update(Ordering::Relaxed, Ordering::Relaxed, split).ok()?;
    Some(taken)
}

/// A panic in a region is handed on by other means, so a poisoned lock holds nothing broken.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A pointer whose targets the tasks of a region divide among themselves.
pub(crate) struct SyncPtr<T>(pub(crate) *mut T);

impl<T> SyncPtr<T> {
    pub(crate) fn get(&self) -> *mut T {
        self.0
    }
}

// SAFETY: every use says why its targets do not overlap.
unsafe impl<T: Send> Sync for SyncPtr<T> {}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(payload: &(dyn Any + Send)) -> &str {
        payload.downcast_ref::<&str>().copied().unwrap_or("")
    }

    #[test]
    fn every_worker_runs_once_a_region() {
        for threads in [1, 2, 3, 8] {
            let pool = Pool::new(threads);
            for _ in 0..200 {
                let seen: Vec<_> = (0..threads).map(|_| AtomicUsize::new(0)).collect();
                pool.run(|worker| {
                    seen[worker].fetch_add(1, Ordering::Relaxed);
                });
                assert!(seen.iter().all(|n| n.load(Ordering::Relaxed) == 1));
            }
        }
    }

    #[test]
    fn every_task_runs_once() {
        let pool = Pool::new(3);
        for num_tasks in [0, 1, 2, 3, 7, 100, 1001] {
            let seen: Vec<_> = (0..num_tasks).map(|_| AtomicUsize::new(0)).collect();
            pool.for_each(num_tasks, |i| {
                seen[i].fetch_add(1, Ordering::Relaxed);
            });
            assert!(seen.iter().all(|n| n.load(Ordering::Relaxed) == 1));
        }
    }

    #[test]
    fn a_slow_worker_loses_its_tasks_to_the_others() {
        let pool = Pool::new(2);
        let first = thread::current().id();
        let by_caller = AtomicUsize::new(0);
        pool.for_each(100, |_| {
            if thread::current().id() == first {
                by_caller.fetch_add(1, Ordering::Relaxed);
                thread::sleep(Duration::from_millis(30));
            }
        });
        assert!(by_caller.load(Ordering::Relaxed) < 50);
    }

    #[test]
    fn chunks_cover_the_data_once() {
        let mut data = vec![0_u32; 1000];
        Pool::new(3).for_each_chunk(&mut data, 64, |i, chunk| {
            chunk.iter_mut().for_each(|v| *v += 1 + i as u32);
        });
        assert!(data.iter().enumerate().all(|(i, &v)| v == 1 + (i / 64) as u32));
    }

    #[test]
    fn workers_wake_after_they_slept() {
        let pool = Pool::new(2);
        for _ in 0..20 {
            thread::sleep(SPIN * 4);
            let sum = AtomicUsize::new(0);
            pool.run(|worker| {
                sum.fetch_add(worker + 1, Ordering::Relaxed);
            });
            assert_eq!(sum.load(Ordering::Relaxed), 3);
        }
    }

    #[test]
    fn the_caller_sleeps_through_a_long_region() {
        let pool = Pool::new(2);
        pool.run(|worker| {
            if worker == 1 {
                thread::sleep(SPIN * 20);
            }
        });
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_pool_goes_on() {
        let pool = Pool::new(3);
        for culprit in 0..3 {
            let result = catch_unwind(AssertUnwindSafe(|| {
                pool.run(|worker| assert!(worker != culprit, "on purpose"));
            }));
            assert_eq!(message(&*result.unwrap_err()), "on purpose");
            let result = catch_unwind(AssertUnwindSafe(|| {
                pool.for_each(50, |i| assert!(i != culprit * 20, "one task"));
            }));
            assert_eq!(message(&*result.unwrap_err()), "one task");
            let count = AtomicUsize::new(0);
            pool.for_each(10, |_| {
                count.fetch_add(1, Ordering::Relaxed);
            });
            assert_eq!(count.load(Ordering::Relaxed), 10);
        }
    }

    #[test]
    fn a_region_inside_a_region_runs_in_place() {
        let pool = Pool::new(2);
        let count = AtomicUsize::new(0);
        pool.run(|_| {
            pool.for_each(10, |_| {
                pool.run(|_| {
                    count.fetch_add(1, Ordering::Relaxed);
                });
            });
        });
        assert_eq!(count.load(Ordering::Relaxed), 2 * 10 * 2);
    }

    #[test]
    fn a_panic_leaves_no_thread_marked_as_inside() {
        let pool = Pool::new(2);
        let result = catch_unwind(AssertUnwindSafe(|| pool.run(|_| panic!("on purpose"))));
        assert!(result.is_err());
        let ids = Mutex::new(std::collections::HashSet::new());
        pool.run(|_| {
            lock(&ids).insert(thread::current().id());
        });
        assert_eq!(lock(&ids).len(), 2);
    }

    #[test]
    fn two_threads_may_share_a_pool() {
        let pool = Pool::new(2);
        let count = AtomicUsize::new(0);
        thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    for _ in 0..200 {
                        pool.for_each(16, |_| {
                            count.fetch_add(1, Ordering::Relaxed);
                        });
                    }
                });
            }
        });
        assert_eq!(count.load(Ordering::Relaxed), 2 * 200 * 16);
    }
}
