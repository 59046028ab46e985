//! Status codes of the interface, and what went wrong behind one.

use std::ffi::CStr;

/// A `CUresult`.
pub(crate) type Status = u32;

pub(crate) const SUCCESS: Status = 0;
pub(crate) const INVALID_VALUE: Status = 1;
pub(crate) const OUT_OF_MEMORY: Status = 2;
pub(crate) const NOT_INITIALIZED: Status = 3;
pub(crate) const INVALID_DEVICE: Status = 101;
pub(crate) const INVALID_IMAGE: Status = 200;
pub(crate) const INVALID_CONTEXT: Status = 201;
pub(crate) const NO_BINARY_FOR_GPU: Status = 209;
pub(crate) const INVALID_HANDLE: Status = 400;
pub(crate) const ILLEGAL_STATE: Status = 401;
pub(crate) const NOT_FOUND: Status = 500;
pub(crate) const NOT_READY: Status = 600;
pub(crate) const LAUNCH_FAILED: Status = 719;
pub(crate) const NOT_SUPPORTED: Status = 801;
pub(crate) const CAPTURE_UNSUPPORTED: Status = 900;
pub(crate) const CAPTURE_INVALIDATED: Status = 901;
pub(crate) const UNKNOWN: Status = 999;

/// The codes that have a name here.
const NAMES: [(Status, &CStr); 17] = [
    (SUCCESS, c"CUDA_SUCCESS"),
    (INVALID_VALUE, c"CUDA_ERROR_INVALID_VALUE"),
    (OUT_OF_MEMORY, c"CUDA_ERROR_OUT_OF_MEMORY"),
    (NOT_INITIALIZED, c"CUDA_ERROR_NOT_INITIALIZED"),
    (INVALID_DEVICE, c"CUDA_ERROR_INVALID_DEVICE"),
    (INVALID_IMAGE, c"CUDA_ERROR_INVALID_IMAGE"),
    (INVALID_CONTEXT, c"CUDA_ERROR_INVALID_CONTEXT"),
    (NO_BINARY_FOR_GPU, c"CUDA_ERROR_NO_BINARY_FOR_GPU"),
    (INVALID_HANDLE, c"CUDA_ERROR_INVALID_HANDLE"),
    (ILLEGAL_STATE, c"CUDA_ERROR_ILLEGAL_STATE"),
    (NOT_FOUND, c"CUDA_ERROR_NOT_FOUND"),
    (NOT_READY, c"CUDA_ERROR_NOT_READY"),
    (LAUNCH_FAILED, c"CUDA_ERROR_LAUNCH_FAILED"),
    (NOT_SUPPORTED, c"CUDA_ERROR_NOT_SUPPORTED"),
    (CAPTURE_UNSUPPORTED, c"CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"),
    (CAPTURE_INVALIDATED, c"CUDA_ERROR_STREAM_CAPTURE_INVALIDATED"),
    (UNKNOWN, c"CUDA_ERROR_UNKNOWN"),
];

/// The name of a code.
pub(crate) fn name(status: Status) -> Option<&'static CStr> {
    NAMES.iter().find(|(known, _)| *known == status).map(|(_, name)| *name)
}

/// Why a call does not succeed.
#[derive(Clone, Debug)]
pub(crate) struct Fault {
    /// What the call returns.
    pub(crate) status: Status,
    /// What the caller, or a kernel, did wrong; none where a correct program may come here.
    pub(crate) wrong: Option<String>,
}

impl Fault {
    /// What a correct program can meet.
    pub(crate) fn plain(status: Status) -> Self {
        Self { status, wrong: None }
    }

    /// What it cannot.
    pub(crate) fn wrong(status: Status, message: impl Into<String>) -> Self {
        Self { status, wrong: Some(message.into()) }
    }
}

/// What a call gives.
pub(crate) type Outcome<T = ()> = Result<T, Fault>;
