//! Threads for regions of tens of microseconds, hundreds of them a token. Between regions a worker spins
//! for a moment and then sleeps, so a busy engine pays no wake-up and an idle one no processor time.
//! A panic in a region reaches the caller after every worker has left the region; a region started inside
//! a region runs on the thread that started it.
#![allow(unsafe_code)]

mod register;
mod seats;
mod team;
#[cfg(test)]
mod tests;

pub use register::{Pinned, Pinning};

use super::float_mode::FloatMode;
use register::Claim;
use seats::Seats;
use std::any::Any;
use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use team::{Region, Team};

thread_local! {
    static INSIDE: Cell<bool> = const { Cell::new(false) };
}

/// Persistent threads that run one region at a time. The calling thread is worker 0.
pub struct Pool {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
    /// Held during a region; protects the ranges.
    turn: Mutex<()>,
    /// Its place among the pools of the process, if it has one.
    claim: Option<Arc<Claim>>,
}

/// On a cache line of its own (two, as they are fetched in pairs).
#[derive(Default)]
#[repr(align(128))]
struct Padded<T>(T);

struct Shared {
    team: Team,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
    /// What is left of each worker's part of a `for_each`: the next task in the low half, the end in
    /// the high half.
    ranges: Box<[Padded<AtomicU64>]>,
    /// Whose tasks each worker takes once it has none, in this order.
    victims: Box<[Vec<usize>]>,
    /// The same, of those on the worker's own node.
    near_victims: Box<[Vec<usize>]>,
}

impl Pool {
    /// Starts `threads - 1` threads that run wherever the system lets them. With one thread everything runs on the
    /// caller.
    pub fn new(threads: usize) -> Self {
        Self::start(&Seats::together(threads.max(1)), None)
    }

    /// Threads for the processors that the calling thread may use, one for each physical core where their number is not
    /// given, beside the other such pools of the process.
    pub fn on_machine(threads: Option<usize>, pinning: Pinning) -> Self {
        let cpus = register::cpus_of_caller();
        let threads = threads.unwrap_or_else(|| cpus.threads()).max(1);
        let (claim, seats) = Claim::new(cpus, threads, pinning);
        Self::start(&seats, Some(Arc::new(claim)))
    }

    fn start(seats: &Seats, claim: Option<Arc<Claim>>) -> Self {
        let threads = seats.len();
        let node: Vec<usize> = seats.iter().map(|seat| seat.node).collect();
        let victims: Vec<Vec<usize>> = (0..threads).map(|worker| seats.victims(worker)).collect();
        let near = |(worker, victims): (usize, &Vec<usize>)| -> Vec<usize> {
            victims.iter().copied().filter(|&victim| node[victim] == node[worker]).collect()
        };
        let shared = Arc::new(Shared {
            team: Team::new(seats),
            panic: Mutex::new(None),
            ranges: (0..threads).map(|_| Padded::default()).collect(),
            near_victims: victims.iter().enumerate().map(near).collect(),
            victims: victims.into(),
        });
        let mut pool = Self { shared, workers: Vec::new(), turn: Mutex::new(()), claim };
        for worker in 1..threads {
            let (shared, claim) = (Arc::clone(&pool.shared), pool.claim.clone());
            let spawned =
                thread::Builder::new().name(format!("spec-cpu-{worker}")).spawn(move || {
                    let _pinned = claim.and_then(|claim| Pinned::enter(&claim, worker));
                    let _mode = FloatMode::enter();
                    shared.work(worker);
                });
            // Those that have started end with the pool.
            pool.workers.push(spawned.expect("the system has threads to spare at start-up"));
        }
        pool
    }

    /// Workers of a region, the caller counted.
    pub fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Takes the calling thread for worker 0, also in where it runs, as long as what is returned lives. `None` where
    /// another thread is that, or nothing is to be said.
    pub fn pin_caller(&self) -> Option<Pinned> {
        Pinned::enter(self.claim.as_ref()?, 0)
    }

    /// Runs `region(worker)` once for every worker and returns when all have returned.
    pub(crate) fn run(&self, region: impl Fn(usize) + Sync) {
        if self.workers.is_empty() || INSIDE.get() {
            (0..self.threads()).for_each(region);
            return;
        }
        let turn = lock(&self.turn);
        self.run_locked(&turn, &region);
    }

    /// Runs `task(i)` for every `i < num_tasks`, in any order, each once. A worker walks a contiguous
    /// range upwards, so tasks over consecutive memory stream, and then takes from the far ends of others.
    pub(crate) fn for_each(&self, num_tasks: usize, task: impl Fn(usize) + Sync) {
        self.share_out(num_tasks, &self.shared.victims, &task);
    }

    /// As `for_each`, by workers of the node whose range it is: they are the ones that find near what the task writes.
    pub(crate) fn for_each_near(&self, num_tasks: usize, task: impl Fn(usize) + Sync) {
        self.share_out(num_tasks, &self.shared.near_victims, &task);
    }

    fn share_out(&self, num_tasks: usize, victims: &[Vec<usize>], task: &(impl Fn(usize) + Sync)) {
        if self.workers.is_empty() || INSIDE.get() || num_tasks <= 1 {
            (0..num_tasks).for_each(task);
            return;
        }
        assert!(u32::try_from(num_tasks).is_ok(), "{num_tasks} tasks, at most 2^32 - 1");
        let turn = lock(&self.turn);
        let (ranges, threads) = (&self.shared.ranges, self.threads());
        for (worker, range) in ranges.iter().enumerate() {
            let (start, end) = (num_tasks * worker / threads, num_tasks * (worker + 1) / threads);
            // Ordered before the workers' reads by the signal of the region.
            range.0.store(start as u64 | (end as u64) << 32, Ordering::Relaxed);
        }
        self.run_locked(&turn, &|worker| {
            while let Some(i) = take_first(&ranges[worker].0) {
                task(i);
            }
            for &other in &victims[worker] {
                while let Some(i) = take_last(&ranges[other].0) {
                    task(i);
                }
            }
        });
    }

    /// Runs `task(i, chunk)` for every `chunk_len`-long piece of `data`, the last perhaps shorter.
    pub(crate) fn for_each_chunk<T: Send>(
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
        let mut own = Ok(());
        // SAFETY: `turn` is held, and `run_inside` catches.
        unsafe { shared.team.run(region, || own = run_inside(region, 0)) };
        let theirs = lock(&shared.panic).take();
        if let Some(payload) = own.err().or(theirs) {
            resume_unwind(payload);
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        // SAFETY: nobody else has the pool any more.
        unsafe { self.shared.team.end() };
        for worker in self.workers.drain(..) {
            // A worker catches its regions' panics, so there is nothing to learn from the result.
            let _ = worker.join();
        }
    }
}

impl Shared {
    fn work(&self, worker: usize) {
        self.team.work(worker, |region| {
            if let Err(payload) = run_inside(region, worker) {
                lock(&self.panic).get_or_insert(payload);
            }
        });
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
