//! The server that a model belongs to.
#![allow(unsafe_code)]

use super::api::{check, functions};
use super::error::Code;
use super::sys;

/// A server. It lives at least as long as its models do; whoever keeps this sees to it that a model does.
#[derive(Clone, Copy, Debug)]
pub(super) struct Server(*mut sys::TRITONSERVER_Server);

// SAFETY: Triton's server may be asked from any thread.
unsafe impl Send for Server {}
// SAFETY: as above.
unsafe impl Sync for Server {}

impl Server {
    /// # Safety
    /// `raw` is alive whenever the result is used.
    pub(super) unsafe fn from_raw(raw: *mut sys::TRITONSERVER_Server) -> Self {
        Self(raw)
    }

    /// Whether it has been told to end. Then it does not answer this question any more.
    pub(super) fn is_exiting(&self) -> bool {
        let mut live = false;
        // SAFETY: the server is alive by the contract of `from_raw`.
        let asked = check(unsafe { functions().TRITONSERVER_ServerIsLive(self.0, &mut live) });
        asked.is_err_and(|error| error.code == Code::Unavailable)
    }
}
