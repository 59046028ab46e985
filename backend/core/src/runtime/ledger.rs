//! What this process has promised of its memory and not used yet. The system still counts that as free; without this
//! account, models that load one after the other, or at the same time, would be promised the same bytes.
//!
//! What is allocated on a GPU is no longer free before its promise ends. So models load onto a GPU one after the other, or one
//! would count what another has got as promised to it besides.

use super::MemoryType;
use crate::machine::resident_bytes;
use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};

static OF_PROCESS: LazyLock<Ledger> = LazyLock::new(Ledger::default);

/// The promises that stand. Clones are the same ledger.
#[derive(Clone, Default)]
pub(super) struct Ledger(Arc<Mutex<Vec<Entry>>>);

/// The ledger while a decision is made: nobody else makes one until this is dropped.
pub(super) struct Decision<'a> {
    ledger: &'a Ledger,
    entries: MutexGuard<'a, Vec<Entry>>,
}

/// Memory that is promised until this is dropped.
pub(super) struct Promise {
    ledger: Ledger,
    id: u64,
    bytes: usize,
}

struct Entry {
    id: u64,
    memory: MemoryType,
    bytes: usize,
    /// Addresses where promised memory is reserved: what is touched there is no longer free.
    reserved: Vec<Range<usize>>,
}

/// GPUs that are told apart; those beyond wait for others too.
const NUM_TURNS: usize = 64;

static TURNS: [Mutex<()>; NUM_TURNS] = [const { Mutex::new(()) }; NUM_TURNS];

/// The right to load models onto some GPUs.
pub(super) struct Turns {
    _held: Vec<MutexGuard<'static, ()>>,
}

impl Turns {
    /// Waits for the others that load onto GPUs of these numbers.
    pub(super) fn wait(numbers: impl IntoIterator<Item = usize>) -> Self {
        // In one order for all, so that nobody waits for whom it keeps waiting.
        let places: BTreeSet<usize> =
            numbers.into_iter().map(|number| number % NUM_TURNS).collect();
        let hold = |place: usize| TURNS[place].lock().unwrap_or_else(PoisonError::into_inner);
        Self { _held: places.into_iter().map(hold).collect() }
    }
}

impl Entry {
    fn outstanding(&self) -> usize {
        let used: usize = self.reserved.iter().cloned().map(resident_bytes).sum();
        self.bytes.saturating_sub(used)
    }
}

impl Ledger {
    pub(super) fn of_process() -> &'static Self {
        &OF_PROCESS
    }

    /// Begins a decision about what to promise.
    pub(super) fn decide(&self) -> Decision<'_> {
        Decision { ledger: self, entries: self.lock() }
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Entry>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Decision<'_> {
    /// Bytes of this type of memory that are promised and not used yet.
    pub(super) fn outstanding(&self, memory: MemoryType) -> usize {
        let entries = self.entries.iter().filter(|entry| entry.memory == memory);
        entries.map(Entry::outstanding).sum()
    }

    pub(super) fn promise(&mut self, memory: MemoryType, bytes: usize) -> Promise {
        let id = self.entries.last().map_or(0, |last| last.id + 1);
        self.entries.push(Entry { id, memory, bytes, reserved: Vec::new() });
        Promise { ledger: self.ledger.clone(), id, bytes }
    }
}

impl Promise {
    /// How much is promised.
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Promised memory lies at these addresses from now on.
    pub(super) fn reserve(&self, addresses: Range<usize>) {
        let mut entries = self.ledger.lock();
        let entry = entries.iter_mut().find(|entry| entry.id == self.id);
        entry.expect("it stands until it is dropped").reserved.push(addresses);
    }
}

impl Drop for Promise {
    fn drop(&mut self) {
        self.ledger.lock().retain(|entry| entry.id != self.id);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::thread;

    const CPU: MemoryType = MemoryType::Cpu;
    const LEN: usize = 32 << 20;

    #[test]
    fn promises_stand_until_they_are_dropped_each_for_its_memory() {
        let ledger = Ledger::default();
        let mut decision = ledger.decide();
        let first = decision.promise(CPU, 100);
        let second = decision.promise(CPU, 20);
        let other = decision.promise(MemoryType::Gpu(1), 3);
        assert_eq!(decision.outstanding(CPU), 120);
        assert_eq!(decision.outstanding(MemoryType::Gpu(1)), 3);
        assert_eq!(decision.outstanding(MemoryType::Gpu(0)), 0);
        drop(decision);
        drop(first);
        assert_eq!(ledger.decide().outstanding(CPU), 20);
        // The number of one that is gone is not given to two.
        let third = ledger.decide().promise(CPU, 5);
        drop(second);
        assert_eq!(ledger.decide().outstanding(CPU), 5);
        drop((third, other));
        assert_eq!(ledger.decide().outstanding(CPU), 0);
    }

    #[test]
    fn what_is_touched_of_a_promise_is_not_outstanding() {
        let ledger = Ledger::default();
        let promise = ledger.decide().promise(CPU, LEN + 1000);
        // Zeroes of the system: more than an allocator keeps.
        let mut memory = vec![0_u8; LEN];
        let start = memory.as_ptr() as usize;
        promise.reserve(start..start + LEN);
        assert!(ledger.decide().outstanding(CPU) > LEN * 15 / 16);
        memory.fill(1);
        assert!(ledger.decide().outstanding(CPU) <= 1000);
        std::hint::black_box(memory);
    }

    #[test]
    fn models_load_onto_a_gpu_one_after_the_other() {
        let (first, second) = (NUM_TURNS - 1, NUM_TURNS - 2);
        let loading = std::sync::atomic::AtomicUsize::new(0);
        let load = |numbers: [usize; 2]| {
            for _ in 0..200 {
                // A number twice, as of a drafter beside its target, is no reason to wait for oneself.
                let _turns = Turns::wait([numbers[0], numbers[1], numbers[0]]);
                let others = loading.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
                assert_eq!(others, 0, "two load at the same time");
                thread::yield_now();
                loading.fetch_sub(1, std::sync::atomic::Ordering::SeqCst);
            }
        };
        thread::scope(|scope| {
            scope.spawn(|| load([first, second]));
            scope.spawn(|| load([second, first]));
            scope.spawn(|| load([first, first + NUM_TURNS]));
        });
    }

    #[test]
    fn decisions_at_the_same_time_do_not_promise_the_same_bytes() {
        const FREE: usize = 1000;
        let ledger = Ledger::default();
        let take = || {
            let mut decision = ledger.decide();
            let left = FREE - decision.outstanding(CPU);
            thread::yield_now();
            (left >= 100).then(|| decision.promise(CPU, 100))
        };
        let promises: Vec<_> = thread::scope(|scope| {
            let threads: Vec<_> = (0..16).map(|_| scope.spawn(take)).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        assert_eq!(promises.iter().flatten().count(), FREE / 100);
        assert_eq!(ledger.decide().outstanding(CPU), FREE);
    }
}
