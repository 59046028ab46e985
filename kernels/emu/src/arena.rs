//! Device memory of the emulator: one mapping, handed out in pieces and never moved. Addresses are plain
//! numbers, as a driver gives them. Other processes can map the same memory at the same place.

#![allow(unsafe_code)]

use std::cell::{Cell, RefCell};
use std::fs::File;
use std::os::fd::{AsRawFd as _, FromRawFd as _};
use std::sync::Arc;
use std::sync::atomic::AtomicU32;
use std::{process, thread};

/// Alignment of every allocation, in bytes.
const ALIGNMENT: usize = 256;

/// Least bytes after every allocation that nobody may write, and what they hold.
const FENCE_BYTES: usize = 64;
const FENCE: u8 = 0xa5;

/// What memory holds before anybody writes it: NaN in every float format.
const POISON: u8 = 0xff;

/// Where arenas are looked for: below where programs and libraries are.
const FIRST_PLACE: usize = 1 << 36;
const PLACE_STEP: usize = 1 << 30;
const LAST_PLACE: usize = 1 << 38;
/// Where they are looked for behind that: the driver of a GPU may have reserved all that is before.
const FAR_STEP: usize = 1 << 34;
const FAR_PLACE: usize = 1 << 46;

/// Memory that kernels may use, until it is dropped. Panics then if a kernel wrote past an allocation.
pub struct Arena {
    mapping: Arc<Mapping>,
    used: Cell<usize>,
    /// Where the bytes between allocations start and end.
    fences: RefCell<Vec<(usize, usize)>>,
}

/// Address space, for as long as somebody has a part of it.
struct Mapping {
    file: File,
    memory: *mut u8,
    num_bytes: usize,
}

// SAFETY: the mapping is not bound to a thread.
unsafe impl Send for Mapping {}
// SAFETY: what is read and written through it is the kernels', which other threads and processes run: no references
// into it are handed out but those of [`Words`].
unsafe impl Sync for Mapping {}

/// An allocation that the host looks at as well.
pub(crate) struct Words {
    mapping: Arc<Mapping>,
    /// From the start of the mapping.
    start: usize,
    num_words: usize,
}

impl AsRef<[AtomicU32]> for Words {
    fn as_ref(&self) -> &[AtomicU32] {
        // SAFETY: the range lies inside, by `Arena::words`, is aligned, and mapped for as long as this is here.
        unsafe {
            let first = self.mapping.memory.add(self.start).cast();
            std::slice::from_raw_parts(first, self.num_words)
        }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the mapping is this value's own; nothing refers to it any more.
        unsafe { libc::munmap(self.memory.cast(), self.num_bytes) };
    }
}

impl Arena {
    /// Reserves address space; only what is allocated takes memory.
    pub fn new(num_bytes: usize) -> Self {
        // SAFETY: the name is a C string; the result is checked.
        let descriptor = unsafe { libc::memfd_create(c"arena".as_ptr(), libc::MFD_CLOEXEC) };
        assert!(descriptor >= 0, "no memory file: {}", std::io::Error::last_os_error());
        // SAFETY: the descriptor is open and belongs to nobody else.
        let file = unsafe { File::from_raw_fd(descriptor) };
        file.set_len(num_bytes as u64).expect("a memory file takes any length");
        let memory = (FIRST_PLACE..LAST_PLACE)
            .step_by(PLACE_STEP)
            .chain((LAST_PLACE..FAR_PLACE).step_by(FAR_STEP))
            .find_map(|place| map(&file, place, num_bytes))
            .unwrap_or_else(|| panic!("no address space for an arena of {num_bytes} bytes"));
        let mapping = Arc::new(Mapping { file, memory, num_bytes });
        Self { mapping, used: Cell::new(0), fences: RefCell::default() }
    }

    /// Address of new memory, poisoned, aligned to 256 bytes.
    pub fn alloc(&self, num_bytes: usize) -> u64 {
        let start = self.used.get();
        let end = start + (num_bytes + FENCE_BYTES).next_multiple_of(ALIGNMENT);
        let most = self.mapping.num_bytes;
        assert!(end <= most, "the arena of {most} bytes is full");
        self.used.set(end);
        let address = self.start() + start as u64;
        let mut fresh = vec![POISON; end - start];
        fresh[num_bytes..].fill(FENCE);
        self.write(address, &fresh);
        self.fences.borrow_mut().push((start + num_bytes, end));
        address
    }

    /// Address of new memory that holds `data`.
    pub fn put(&self, data: &[u8]) -> u64 {
        let address = self.alloc(data.len());
        self.write(address, data);
        address
    }

    /// Copies to the device.
    pub fn write(&self, address: u64, data: &[u8]) {
        let to = self.place(address, data.len());
        // SAFETY: `place` has checked that the bytes lie in the mapping, and `data` is no part of it:
        // nothing hands out references into it.
        unsafe { std::ptr::copy_nonoverlapping(data.as_ptr(), to, data.len()) };
    }

    /// Copies from the device.
    pub fn read(&self, address: u64, data: &mut [u8]) {
        let from = self.place(address, data.len());
        // SAFETY: as for `write`.
        unsafe { std::ptr::copy_nonoverlapping(from, data.as_mut_ptr(), data.len()) };
    }

    /// Address and bytes of every allocation.
    pub fn allocations(&self) -> Vec<(u64, usize)> {
        let mut next = 0;
        let allocation = |&(end, next_start): &(usize, usize)| {
            let start = std::mem::replace(&mut next, next_start);
            (self.start() + start as u64, end - start)
        };
        self.fences.borrow().iter().map(allocation).collect()
    }

    /// Forgets all allocations: the next one starts at the beginning again.
    pub fn clear(&self) {
        self.used.set(0);
        self.fences.borrow_mut().clear();
    }

    /// Whether everything was written inside allocations; if not, where. It is told once.
    pub fn check(&self) -> Result<(), String> {
        let fences = self.fences.take();
        for (start, end) in &fences {
            let (start, end) = (*start, *end);
            let address = self.start() + start as u64;
            let mut bytes = vec![0; end - start];
            self.read(address, &mut bytes);
            if let Some(past) = bytes.iter().position(|byte| *byte != FENCE) {
                return Err(format!(
                    "a write {past} bytes past the allocation ending at {address:#x}"
                ));
            }
        }
        self.fences.replace(fences);
        Ok(())
    }

    /// File, address and length, for another process.
    pub(crate) fn shared(&self) -> String {
        let Mapping { file, num_bytes, .. } = &*self.mapping;
        let (process, descriptor) = (process::id(), file.as_raw_fd());
        format!("/proc/{process}/fd/{descriptor} {} {num_bytes}", self.start())
    }

    /// An allocation as words that the host reads and writes at any time.
    pub(crate) fn words(&self, address: u64, num_words: usize) -> Words {
        self.place(address, num_words * size_of::<u32>());
        let start = (address - self.start()) as usize;
        assert!(start.is_multiple_of(size_of::<u32>()), "{address:#x} is no word's");
        Words { mapping: Arc::clone(&self.mapping), start, num_words }
    }

    /// Address of the first byte.
    fn start(&self) -> u64 {
        self.mapping.memory as u64
    }

    fn place(&self, address: u64, num_bytes: usize) -> *mut u8 {
        let start = self.start();
        let end = start + self.used.get() as u64;
        let inside = address >= start
            && address.checked_add(num_bytes as u64).is_some_and(|last| last <= end);
        assert!(
            inside,
            "{num_bytes} bytes at {address:#x} are not in the arena's {start:#x} to {end:#x}"
        );
        self.mapping.memory.wrapping_add((address - start) as usize)
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        if let Err(message) = self.check()
            && !thread::panicking()
        {
            panic!("{message}");
        }
    }
}

/// Maps the file at a place, if all of it is free.
fn map(file: &File, place: usize, num_bytes: usize) -> Option<*mut u8> {
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_SHARED | libc::MAP_FIXED_NOREPLACE;
    let wanted = std::ptr::without_provenance_mut(place);
    let descriptor = file.as_raw_fd();
    // SAFETY: with MAP_FIXED_NOREPLACE no mapping is replaced; the descriptor is open.
    let memory = unsafe { libc::mmap(wanted, num_bytes, protection, flags, descriptor, 0) };
    (memory != libc::MAP_FAILED).then_some(memory.cast())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_found_where_a_driver_has_reserved_all_before() {
        for place in (FIRST_PLACE..LAST_PLACE).step_by(PLACE_STEP) {
            let flags =
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_FIXED;
            let wanted = std::ptr::without_provenance_mut(place);
            // SAFETY: nothing else is there: this is the only test of its process that has arenas, and maps none yet.
            let mapped = unsafe { libc::mmap(wanted, PLACE_STEP, libc::PROT_NONE, flags, -1, 0) };
            assert_ne!(mapped, libc::MAP_FAILED);
        }
        let arena = Arena::new(1 << 30);
        let address = arena.put(&[1, 2, 3]);
        assert!(address >= LAST_PLACE as u64, "{address:#x}");
        let mut read = [0; 3];
        arena.read(address, &mut read);
        assert_eq!(read, [1, 2, 3]);
    }
}
