//! Device memory of the emulator: one mapping of the host, handed out in pieces and never moved.
//! Addresses are plain numbers, as a driver gives them.

#![allow(unsafe_code)]

use std::cell::Cell;

/// Alignment of every allocation, in bytes.
const ALIGNMENT: usize = 256;

/// What memory holds before anybody writes it: NaN in every float format.
const POISON: u8 = 0xff;

/// Memory that kernels may use, until it is dropped.
pub struct Arena {
    memory: *mut u8,
    num_bytes: usize,
    used: Cell<usize>,
}

impl Arena {
    /// Reserves address space; only what is allocated takes memory.
    pub fn new(num_bytes: usize) -> Self {
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: a fresh anonymous mapping at an address of the kernel's choice touches nothing.
        let memory =
            unsafe { libc::mmap(std::ptr::null_mut(), num_bytes, protection, flags, -1, 0) };
        assert!(memory != libc::MAP_FAILED, "no address space for an arena of {num_bytes} bytes");
        Self { memory: memory.cast(), num_bytes, used: Cell::new(0) }
    }

    /// Address of new memory, poisoned, aligned to 256 bytes.
    pub fn alloc(&self, num_bytes: usize) -> u64 {
        let start = self.used.get();
        let end = start + num_bytes.max(1).next_multiple_of(ALIGNMENT);
        assert!(end <= self.num_bytes, "the arena of {} bytes is full", self.num_bytes);
        self.used.set(end);
        let address = self.memory as u64 + start as u64;
        self.write(address, &vec![POISON; end - start]);
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

    fn place(&self, address: u64, num_bytes: usize) -> *mut u8 {
        let start = self.memory as u64;
        let end = start + self.used.get() as u64;
        assert!(
            address >= start
                && address.checked_add(num_bytes as u64).is_some_and(|last| last <= end),
            "{num_bytes} bytes at {address:#x} are not in the arena's {start:#x} to {end:#x}"
        );
        self.memory.wrapping_add((address - start) as usize)
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        // SAFETY: the mapping is this arena's own; nothing refers to it any more.
        unsafe { libc::munmap(self.memory.cast(), self.num_bytes) };
    }
}
