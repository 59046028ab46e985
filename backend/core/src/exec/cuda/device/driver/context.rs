//! What a GPU's memory and code belong to.
#![allow(unsafe_code)]

use super::calls::{self, Status, check};
use crate::Result;
use cudarc::driver::sys;
use std::ptr;

/// The primary context of a GPU, for as long as somebody has it.
pub(super) struct Context {
    device: sys::CUdevice,
    handle: sys::CUcontext,
}

// SAFETY: a handle that any thread may use; it is released once, at drop.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

impl Context {
    pub(super) fn retain(device: sys::CUdevice) -> Result<Self> {
        let mut handle = ptr::null_mut();
        // SAFETY: a pointer to a local.
        let status = unsafe { calls::cuDevicePrimaryCtxRetain(&mut handle, device) };
        check("cuDevicePrimaryCtxRetain", status)?;
        Ok(Self { device, handle })
    }

    /// Makes it that of the calling thread.
    pub(super) fn make_current(&self) -> Status {
        // SAFETY: the context is retained until drop.
        unsafe { calls::cuCtxSetCurrent(self.handle) }
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: it was retained once.
        unsafe { calls::cuDevicePrimaryCtxRelease_v2(self.device) };
    }
}
