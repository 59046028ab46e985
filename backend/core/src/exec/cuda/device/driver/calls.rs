//! What is called of the CUDA driver, which every system has under the name `libcuda.so.1`. A `libcuda.so` may be the
//! toolkit's stub, which only links.
#![allow(unsafe_code)]

use crate::exec::cuda::device::library::{Library, functions};
use crate::{Error, Result};
use cudarc::driver::sys;
use std::ffi::{CStr, CString, c_char, c_int, c_uchar, c_uint, c_ulonglong, c_void};

const LIBRARY: &CStr = c"libcuda.so.1";

/// Names another library in its place: a compatibility package's, or one of a test.
const OTHER_LIBRARY: &str = "SPEC_CUDA_DRIVER";

/// A `CUresult`, of which newer drivers have more than older ones.
pub(super) type Status = u32;

pub(super) const SUCCESS: Status = 0;
pub(super) const OUT_OF_MEMORY: Status = 2;

/// After these no work is taken any more: errors of the hardware (214, 220, 226, 911), and kernels that broke off (700 an
/// illegal address, 702 too long, 709 the context is gone, 710 an assertion, 714 to 719 faults of an instruction, 721
/// memory of tensor cores).
const LAST: [Status; 15] =
    [214, 220, 226, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 721, 911];

/// Whether the driver's library is on this machine.
pub fn is_present() -> bool {
    library().is_ok()
}

/// Finds the driver.
pub(super) fn open() -> Result<()> {
    let missing = |what: String| {
        let remedy = "install it, or rebuild with spec-build --device cpu";
        Error::Device(format!("the CUDA driver (libcuda.so.1) is not installed: {what}: {remedy}"))
    };
    load(&library().map_err(missing)?).map_err(missing)
}

fn library() -> std::result::Result<Library, String> {
    match std::env::var_os(OTHER_LIBRARY) {
        None => Library::open(LIBRARY),
        Some(path) => {
            let path = CString::new(path.into_encoded_bytes())
                .map_err(|_| format!("{OTHER_LIBRARY} has a zero in it"))?;
            Library::open(&path).map_err(|error| format!("{OTHER_LIBRARY}: {error}"))
        }
    }
}

/// Turns what is no success into an error of this call.
pub(super) fn check(what: &str, status: Status) -> Result<()> {
    match status {
        SUCCESS => Ok(()),
        _ => Err(Error::Device(format!("{what}: {}", name_of(status)))),
    }
}

/// Whether a call has failed for good.
pub(super) fn is_last(status: Status) -> bool {
    LAST.contains(&status)
}

/// The driver's name for a status.
pub(super) fn name_of(status: Status) -> String {
    let mut name = std::ptr::null();
    // SAFETY: a pointer to a local; the driver's texts are static.
    unsafe {
        if cuGetErrorName(status, &mut name) == SUCCESS && !name.is_null() {
            CStr::from_ptr(name).to_string_lossy().into_owned()
        } else {
            format!("error {status}")
        }
    }
}

functions! {
    cuInit(flags: c_uint) -> Status;
    cuDriverGetVersion(version: *mut c_int) -> Status;
    cuGetErrorName(status: Status, name: *mut *const c_char) -> Status;
    cuDeviceGetCount(count: *mut c_int) -> Status;
    cuDeviceGet(device: *mut sys::CUdevice, ordinal: c_int) -> Status;
    cuDeviceGetName(name: *mut c_char, len: c_int, device: sys::CUdevice) -> Status;
    cuDeviceGetAttribute(
        value: *mut c_int,
        attribute: sys::CUdevice_attribute,
        device: sys::CUdevice,
    ) -> Status;
    cuDevicePrimaryCtxRetain(context: *mut sys::CUcontext, device: sys::CUdevice) -> Status;
    cuDevicePrimaryCtxRelease_v2(device: sys::CUdevice) -> Status;
    cuCtxSetCurrent(context: sys::CUcontext) -> Status;
    cuMemGetInfo_v2(free: *mut usize, total: *mut usize) -> Status;
    cuMemAlloc_v2(address: *mut sys::CUdeviceptr, bytes: usize) -> Status;
    cuMemFree_v2(address: sys::CUdeviceptr) -> Status;
    cuMemHostAlloc(host: *mut *mut c_void, bytes: usize, flags: c_uint) -> Status;
    cuMemHostGetDevicePointer_v2(
        address: *mut sys::CUdeviceptr,
        host: *mut c_void,
        flags: c_uint,
    ) -> Status;
    cuMemFreeHost(host: *mut c_void) -> Status;
    cuMemsetD8Async(
        to: sys::CUdeviceptr,
        value: c_uchar,
        bytes: usize,
        stream: sys::CUstream,
    ) -> Status;
    cuMemcpyHtoDAsync_v2(
        to: sys::CUdeviceptr,
        from: *const c_void,
        bytes: usize,
        stream: sys::CUstream,
    ) -> Status;
    cuMemcpyDtoDAsync_v2(
        to: sys::CUdeviceptr,
        from: sys::CUdeviceptr,
        bytes: usize,
        stream: sys::CUstream,
    ) -> Status;
    cuMemcpy2DAsync_v2(copy: *const sys::CUDA_MEMCPY2D, stream: sys::CUstream) -> Status;
    cuMemcpyDtoH_v2(to: *mut c_void, from: sys::CUdeviceptr, bytes: usize) -> Status;
    cuModuleLoadData(module: *mut sys::CUmodule, image: *const c_void) -> Status;
    cuModuleUnload(module: sys::CUmodule) -> Status;
    cuModuleGetFunction(
        function: *mut sys::CUfunction,
        module: sys::CUmodule,
        name: *const c_char,
    ) -> Status;
    cuFuncSetAttribute(
        function: sys::CUfunction,
        attribute: sys::CUfunction_attribute,
        value: c_int,
    ) -> Status;
    cuLaunchKernelEx(
        config: *const sys::CUlaunchConfig,
        function: sys::CUfunction,
        params: *mut *mut c_void,
        extra: *mut *mut c_void,
    ) -> Status;
    cuStreamCreate(stream: *mut sys::CUstream, flags: c_uint) -> Status;
    cuStreamDestroy_v2(stream: sys::CUstream) -> Status;
    cuStreamSynchronize(stream: sys::CUstream) -> Status;
    cuStreamBeginCapture_v2(stream: sys::CUstream, mode: sys::CUstreamCaptureMode) -> Status;
    cuStreamEndCapture(stream: sys::CUstream, graph: *mut sys::CUgraph) -> Status;
    cuGraphInstantiateWithFlags(
        exec: *mut sys::CUgraphExec,
        graph: sys::CUgraph,
        flags: c_ulonglong,
    ) -> Status;
    cuGraphDestroy(graph: sys::CUgraph) -> Status;
    cuGraphExecDestroy(exec: sys::CUgraphExec) -> Status;
    cuGraphLaunch(exec: sys::CUgraphExec, stream: sys::CUstream) -> Status;
    cuEventCreate(event: *mut sys::CUevent, flags: c_uint) -> Status;
    cuEventDestroy_v2(event: sys::CUevent) -> Status;
    cuEventRecord(event: sys::CUevent, stream: sys::CUstream) -> Status;
    cuEventSynchronize(event: sys::CUevent) -> Status;
}
