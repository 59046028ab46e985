//! Page-locked memory of the machine, which a GPU reads and writes as well.
#![allow(unsafe_code)]

use super::Driver;
use super::calls::{self, check};
use super::context::Context;
use crate::Result;
use crate::exec::cuda::device::Address;
use cudarc::driver::sys;
use std::ops::Range;
use std::ptr::{self, NonNull};
use std::sync::Arc;
use std::sync::atomic::AtomicU32;

/// Such memory, freed at drop.
pub(super) struct Pinned {
    host: NonNull<AtomicU32>,
    num_words: usize,
    context: Arc<Context>,
}

// SAFETY: the memory is this value's own and not bound to a thread.
unsafe impl Send for Pinned {}
// SAFETY: what can be done through a shared reference are atomic accesses.
unsafe impl Sync for Pinned {}

impl Pinned {
    /// Zeroed memory of so many bytes, a multiple of four. The driver's context is that of the calling thread.
    pub(super) fn alloc(bytes: usize, driver: &Driver) -> Result<Self> {
        let mut host = ptr::null_mut();
        // SAFETY: a pointer to a local.
        let status =
            unsafe { calls::cuMemHostAlloc(&mut host, bytes, sys::CU_MEMHOSTALLOC_DEVICEMAP) };
        driver.check("cuMemHostAlloc", status)?;
        let host: NonNull<AtomicU32> = NonNull::new(host.cast()).expect("the driver gave memory");
        // SAFETY: it was just allocated, with this many bytes, and is aligned to pages.
        unsafe { host.as_ptr().cast::<u8>().write_bytes(0, bytes) };
        Ok(Self { host, num_words: bytes / size_of::<u32>(), context: Arc::clone(&driver.context) })
    }

    /// Where the device sees it.
    pub(super) fn address(&self, driver: &Driver) -> Result<Address> {
        let mut address = 0;
        let host = self.host.as_ptr().cast();
        // SAFETY: a pointer to a local; the memory is mapped for devices.
        let status = unsafe { calls::cuMemHostGetDevicePointer_v2(&mut address, host, 0) };
        driver.check("cuMemHostGetDevicePointer", status)?;
        Ok(address)
    }

    /// A range of its bytes, to write. The device reads there only what was issued to it.
    pub(super) fn bytes_mut(&mut self, range: Range<usize>) -> &mut [u8] {
        let len = self.num_words * size_of::<u32>();
        // SAFETY: the memory is initialised and as long as this, and the borrow is exclusive.
        let bytes = unsafe { std::slice::from_raw_parts_mut(self.host.as_ptr().cast(), len) };
        &mut bytes[range]
    }
}

impl AsRef<[AtomicU32]> for Pinned {
    fn as_ref(&self) -> &[AtomicU32] {
        // SAFETY: the memory is initialised, as long as this, and aligned to pages.
        unsafe { std::slice::from_raw_parts(self.host.as_ptr(), self.num_words) }
    }
}

impl Drop for Pinned {
    /// Errors are of no use to anyone here.
    fn drop(&mut self) {
        if check("cuCtxSetCurrent", self.context.make_current()).is_ok() {
            // SAFETY: it was allocated once, and this is the last use.
            unsafe { calls::cuMemFreeHost(self.host.as_ptr().cast()) };
        }
    }
}
