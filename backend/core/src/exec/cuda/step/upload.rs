//! What the host uploads for steps: gathered in memory that both sides see, so that nobody waits for a copy. A slot
//! holds what one step is told, and is written again when no step on its way can still need it.

use super::buffers::{StepBuffers, StepCapacity};
use super::input::StepInput;
use super::page_table::PageTable;
use super::params::{Distribution, Drafting};
use crate::Result;
use crate::exec::cuda::device::pod::Pod;
use crate::exec::cuda::device::{Address, Device, Shared};
use crate::pages::PageId;
use std::ops::Range;

/// One more than steps can be on their way: one that nobody waits for any more, one that is waited for, and one that
/// has begun ahead.
const SLOTS: usize = 4;

/// What a step is told.
#[derive(Debug)]
pub(super) struct StepData {
    pub(super) input: StepInput,
    /// One a place.
    pub(super) drafting: Vec<Drafting>,
    /// `[place][drafts]`.
    pub(super) drafts: Vec<u32>,
    /// Of the drafts.
    pub(super) distributions: Vec<Distribution>,
    pub(super) number: u32,
}

/// The slots, and what the device knows.
pub(super) struct Uploads {
    shared: Shared,
    slot: usize,
    pages: PageTable,
}

impl Uploads {
    pub(super) fn alloc(capacity: &StepCapacity, device: &mut dyn Device) -> Result<Self> {
        let shared = device.alloc_shared(SLOTS * StepBuffers::uploaded_bytes(capacity))?;
        let pages = PageTable::new(capacity.places, capacity.max_pages);
        Ok(Self { shared, slot: 0, pages })
    }

    /// Begins with what another step is told.
    pub(super) fn next_slot(&mut self) {
        self.slot = (self.slot + 1) % SLOTS;
    }

    /// What the device has of the pages.
    pub(super) fn pages(&self) -> &PageTable {
        &self.pages
    }

    /// What the device has of them is not known.
    pub(super) fn forget_pages(&mut self) {
        self.pages.forget();
    }

    /// Tells a step everything but its pages, in one copy.
    pub(super) fn tell(
        &mut self,
        told: &StepData,
        buffers: &StepBuffers,
        device: &mut dyn Device,
    ) -> Result<()> {
        self.put(buffers, buffers.sequences, &told.input.sequences);
        self.put(buffers, buffers.last_tokens, &told.input.last_tokens);
        self.put(buffers, buffers.drafting, &told.drafting);
        self.put(buffers, buffers.drafts, &told.drafts);
        self.put(buffers, buffers.draft_distributions, &told.distributions);
        self.put(buffers, buffers.step, &[told.number]);
        self.put(buffers, buffers.words, &told.input.words);
        let words = (told.input.words.len() * size_of::<u32>()) as Address;
        self.copy(buffers, buffers.sequences..buffers.words + words, device)
    }

    /// Tells the pages of some places, in rising order.
    pub(super) fn tell_pages<'a>(
        &mut self,
        places: impl Iterator<Item = (usize, &'a [PageId])>,
        buffers: &StepBuffers,
        device: &mut dyn Device,
    ) -> Result<()> {
        for change in self.pages.update(places) {
            let at = |word: usize| buffers.pages + (word * size_of::<u32>()) as Address;
            self.put(buffers, at(change.start), self.pages.words(change.clone()));
            self.copy(buffers, at(change.start)..at(change.end), device)?;
        }
        Ok(())
    }

    /// A slot has the layout of the uploaded arrays on the device.
    fn offset(&self, buffers: &StepBuffers, address: Address) -> usize {
        self.slot * buffers.uploaded_len() + (address - buffers.sequences) as usize
    }

    fn put<T: Pod>(&self, buffers: &StepBuffers, address: Address, values: &[T]) {
        self.shared.copy_from(self.offset(buffers, address), values);
    }

    fn copy(
        &self,
        buffers: &StepBuffers,
        range: Range<Address>,
        device: &mut dyn Device,
    ) -> Result<()> {
        let from = self.offset(buffers, range.start)..self.offset(buffers, range.end);
        device.write_shared(range.start, &self.shared, from)
    }
}
