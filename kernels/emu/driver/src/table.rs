//! Handles that were given out, and those that are gone.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicU64, Ordering};

use crate::fault::{Fault, INVALID_HANDLE, Outcome};

/// What the caller holds. Never 0, and no number stands for two things.
pub(crate) type Handle = u64;

/// A number that was never given out.
pub(crate) fn fresh() -> Handle {
    static NEXT: AtomicU64 = AtomicU64::new(0x1000);
    NEXT.fetch_add(16, Ordering::Relaxed)
}

/// The living things of a kind.
pub(crate) struct Table<T> {
    kind: &'static str,
    living: BTreeMap<Handle, T>,
    gone: BTreeSet<Handle>,
}

impl<T> Table<T> {
    pub(crate) fn new(kind: &'static str) -> Self {
        Self { kind, living: BTreeMap::new(), gone: BTreeSet::new() }
    }

    pub(crate) fn put(&mut self, thing: T) -> Handle {
        let handle = fresh();
        self.living.insert(handle, thing);
        handle
    }

    pub(crate) fn get(&self, handle: Handle) -> Outcome<&T> {
        self.living.get(&handle).ok_or_else(|| self.missing(handle))
    }

    pub(crate) fn get_mut(&mut self, handle: Handle) -> Outcome<&mut T> {
        let missing = self.missing(handle);
        self.living.get_mut(&handle).ok_or(missing)
    }

    pub(crate) fn remove(&mut self, handle: Handle) -> Outcome<T> {
        let missing = self.missing(handle);
        let thing = self.living.remove(&handle).ok_or(missing)?;
        self.gone.insert(handle);
        Ok(thing)
    }

    /// Removes what the owner of other things takes with it.
    pub(crate) fn retain(&mut self, mut keep: impl FnMut(&T) -> bool) {
        let gone: Vec<Handle> = self
            .living
            .iter()
            .filter(|(_, thing)| !keep(thing))
            .map(|(handle, _)| *handle)
            .collect();
        for handle in gone {
            self.living.remove(&handle);
            self.gone.insert(handle);
        }
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (Handle, &T)> {
        self.living.iter().map(|(handle, thing)| (*handle, thing))
    }

    /// Such as `2 streams`, if there are any.
    pub(crate) fn left(&self) -> Option<String> {
        let count = self.living.len();
        (count > 0).then(|| format!("{count} {}{}", self.kind, if count == 1 { "" } else { "s" }))
    }

    fn missing(&self, handle: Handle) -> Fault {
        let what = if self.gone.contains(&handle) { "was destroyed" } else { "is unknown here" };
        Fault::wrong(INVALID_HANDLE, format!("the {} {handle:#x} {what}", self.kind))
    }
}
