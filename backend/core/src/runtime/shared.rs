//! The weights that instances of a model share: one copy in each memory, there for as long as one of them is.

use crate::exec::{cpu, cuda};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

/// Copies so far, of all models of the process.
static NUM_COPIES: AtomicU64 = AtomicU64::new(0);

/// Weights that the instances of a model have in memory, each instance its share of the ownership.
#[derive(Default)]
pub struct SharedWeights(Mutex<Copies>);

/// Copies by where they are.
#[derive(Default)]
pub(super) struct Copies {
    pub(super) cpu: Shelf<cpu::Weights>,
    pub(super) gpu: Shelf<cuda::Uploaded>,
}

/// Whose weights, and where: an engine's identity, and the number of a GPU.
pub(super) type Key = (String, Option<usize>);

/// Copies of one kind.
pub(super) struct Shelf<W>(Vec<(Key, Numbered<Weak<W>>)>);

/// With the copy's number in this process.
pub(super) struct Numbered<T> {
    pub(super) number: u64,
    pub(super) weights: T,
}

impl SharedWeights {
    /// Instances load one after the other, so that the second finds what the first has loaded.
    pub(super) fn lock(&self) -> MutexGuard<'_, Copies> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<W> Shelf<W> {
    pub(super) fn get(&self, key: &Key) -> Option<Numbered<Arc<W>>> {
        self.0.iter().filter(|(other, _)| other == key).find_map(|(_, copy)| {
            let Numbered { number, weights } = copy;
            Some(Numbered { number: *number, weights: weights.upgrade()? })
        })
    }

    /// Remembers a copy as long as somebody holds it.
    pub(super) fn put(&mut self, key: Key, weights: W) -> Numbered<Arc<W>> {
        let (number, weights) = (NUM_COPIES.fetch_add(1, Ordering::Relaxed), Arc::new(weights));
        self.0.retain(|(_, copy)| copy.weights.strong_count() > 0);
        self.0.push((key, Numbered { number, weights: Arc::downgrade(&weights) }));
        Numbered { number, weights }
    }
}

impl<W> Default for Shelf<W> {
    fn default() -> Self {
        Self(Vec::new())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_copy_is_there_as_long_as_somebody_holds_it() {
        let mut shelf = Shelf::default();
        let key = |name: &str, gpu| (name.to_string(), gpu);
        assert!(shelf.get(&key("a", None)).is_none());
        let first = shelf.put(key("a", None), 1);
        let other = shelf.put(key("a", Some(0)), 2);
        let again = shelf.get(&key("a", None)).unwrap();
        assert_eq!((again.number, *again.weights), (first.number, 1));
        assert_ne!(other.number, first.number);
        assert_eq!(*shelf.get(&key("a", Some(0))).unwrap().weights, 2);
        assert!(shelf.get(&key("b", None)).is_none() && shelf.get(&key("a", Some(1))).is_none());
        drop(first);
        assert!(shelf.get(&key("a", None)).is_some());
        drop(again);
        assert!(shelf.get(&key("a", None)).is_none());
        let next = shelf.put(key("a", None), 3);
        assert!(next.number > other.number && shelf.0.len() == 2);
    }
}
