//! Memory that host and device both see: words that are read and written as atomics, for a device changes them at any
//! time, and that live as long as somebody can still look at them. So nothing here can be undefined: what is read too
//! early is the old value, or some of both.

use super::Address;
use super::pod::{Pod, bytes_of, bytes_of_mut};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

/// Bytes of a word.
const WORD: usize = size_of::<u32>();

/// Memory that host and device both see. A clone is the same memory. The device holds on to it as well, for its kernels
/// know the address.
#[derive(Clone)]
pub struct Shared {
    /// Gives the same words each time.
    memory: Arc<dyn AsRef<[AtomicU32]> + Send + Sync>,
    address: Address,
}

impl Shared {
    /// Memory that the device sees at an address. `memory` frees it when it is dropped.
    pub fn new(memory: Arc<dyn AsRef<[AtomicU32]> + Send + Sync>, address: Address) -> Self {
        Self { memory, address }
    }

    /// Where the device sees it.
    pub fn address(&self) -> Address {
        self.address
    }

    /// Bytes.
    pub fn num_bytes(&self) -> usize {
        size_of_val((*self.memory).as_ref())
    }

    /// Whether both are the same memory.
    pub fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.memory, &other.memory)
    }

    /// Copies values out, from `offset` bytes on. What the device wrote is seen once it was waited for.
    pub fn copy_to<T: Pod>(&self, offset: usize, out: &mut [T]) {
        let out = bytes_of_mut(out);
        let words = self.words(offset..offset + out.len());
        for (word, out) in words.iter().zip(out.as_chunks_mut::<WORD>().0) {
            *out = word.load(Relaxed).to_ne_bytes();
        }
    }

    /// Copies values in, to `offset` bytes on. What was issued and not waited for may still read what was there before,
    /// or some of it.
    pub fn copy_from<T: Pod>(&self, offset: usize, values: &[T]) {
        let values = bytes_of(values);
        let words = self.words(offset..offset + values.len());
        for (word, value) in words.iter().zip(values.as_chunks::<WORD>().0) {
            word.store(u32::from_ne_bytes(*value), Relaxed);
        }
    }

    /// A range of bytes, which begins and ends with a word.
    pub(super) fn words(&self, range: Range<usize>) -> &[AtomicU32] {
        let Range { start, end } = range;
        assert!(start.is_multiple_of(WORD) && end.is_multiple_of(WORD), "{range:?} are no words");
        let words = (*self.memory).as_ref().get(start / WORD..end / WORD);
        words.unwrap_or_else(|| panic!("bytes {range:?} of {}", self.num_bytes()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::thread;

    /// As a device that holds on to what it gave.
    struct Giver(Vec<Shared>);

    impl Giver {
        fn give(&mut self, num_bytes: usize) -> Shared {
            let words: Box<[AtomicU32]> =
                (0..num_bytes / WORD).map(|_| AtomicU32::new(0)).collect();
            self.0.push(Shared::new(Arc::new(words), 0));
            self.0[self.0.len() - 1].clone()
        }
    }

    fn shared(num_bytes: usize) -> Shared {
        Giver(Vec::new()).give(num_bytes)
    }

    #[test]
    fn values_come_out_as_they_went_in() {
        let shared = shared(24);
        assert_eq!(shared.num_bytes(), 24);
        shared.copy_from(4, &[1.5f32, -2.0]);
        shared.copy_from(16, &[0x0102_0304_0506_0708u64]);
        let (mut floats, mut long, mut all) = ([0f32; 2], [0u64], [0u32; 6]);
        shared.copy_to(4, &mut floats);
        shared.copy_to(16, &mut long);
        shared.copy_to(0, &mut all);
        assert_eq!((floats, long), ([1.5, -2.0], [0x0102_0304_0506_0708]));
        assert_eq!([all[0], all[1], all[3]], [0, 1.5f32.to_bits(), 0]);
    }

    #[test]
    fn it_is_there_when_who_gave_it_is_gone() {
        let mut giver = Giver(Vec::new());
        let shared = giver.give(8);
        giver.0[0].copy_from(0, &[7u32, 8]);
        drop(giver);
        let mut found = [0u32; 2];
        shared.copy_to(0, &mut found);
        assert_eq!(found, [7, 8]);
        let clone = shared.clone();
        drop(shared);
        clone.copy_to(0, &mut found);
        assert_eq!(found, [7, 8]);
    }

    #[test]
    fn threads_may_read_and_write_the_same_words_at_once() {
        let shared = shared(4);
        let writer = shared.clone();
        let writer = thread::spawn(move || (1..=100u32).for_each(|n| writer.copy_from(0, &[n])));
        let mut last = 0;
        while last < 100 {
            let mut found = [0u32];
            shared.copy_to(0, &mut found);
            assert!(found[0] >= last, "{} after {last}", found[0]);
            last = found[0];
            thread::yield_now();
        }
        writer.join().expect("it does not panic");
    }

    #[test]
    fn only_clones_are_the_same_memory() {
        let (first, second) = (shared(4), shared(4));
        assert!(first.is(&first.clone()));
        assert!(!first.is(&second));
    }

    #[test]
    #[should_panic(expected = "bytes 4..12 of 8")]
    fn what_is_outside_is_refused() {
        shared(8).copy_from(4, &[0u32; 2]);
    }

    #[test]
    #[should_panic(expected = "0..3 are no words")]
    fn parts_of_words_are_refused() {
        shared(8).copy_to(0, &mut [0u8; 3]);
    }
}
