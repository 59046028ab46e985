//! What is called of cuBLASLt, which is loaded by the name of its major version: an older one may have the plain name.
#![allow(unsafe_code)]

use crate::exec::cuda::device::library::{Library, functions};
use crate::exec::cuda::device::search_path::SearchPath;
use cudarc::cublaslt::sys;
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::os::unix::ffi::OsStrExt as _;

/// The library, by the name of its major version.
pub(super) const LIBRARY: &str = "libcublasLt.so.13";
/// The first version of the interface used here, as `cublasLtGetVersion` counts.
const MIN_VERSION: usize = 130_000;

/// A `cublasStatus_t`, of which newer libraries may have more.
pub(super) type Status = u32;

const SUCCESS: Status = 0;

/// A status that is no success, by its name.
#[derive(Clone, Debug)]
pub(super) struct Failure(pub(super) String);

/// `cublasLtMatmulHeuristicResult_t`.
#[repr(C)]
pub(super) struct Choice {
    pub(super) algorithm: sys::cublasLtMatmulAlgo_t,
    workspace_bytes: usize,
    pub(super) status: Status,
    waves: f32,
    reserved: [c_int; 4],
}

const _: () = assert!(size_of::<Choice>() == size_of::<sys::cublasLtMatmulHeuristicResult_t>());

/// Loads the library: from a folder that is known to hold it, else by the loader. The error says what is missing.
pub(super) fn open(places: &SearchPath) -> Result<(), String> {
    let folder = places.folder(LIBRARY)?;
    let path = folder.map_or(LIBRARY.into(), |folder| folder.join(LIBRARY));
    let name = CString::new(path.as_os_str().as_bytes());
    let name = name.map_err(|_| format!("{} is no path", path.display()))?;
    load(&Library::open(&name)?)?;
    // SAFETY: takes nothing.
    let version = unsafe { cublasLtGetVersion() };
    if version < MIN_VERSION {
        return Err(format!("version {version} was found, {MIN_VERSION} is needed"));
    }
    Ok(())
}

/// Turns what is no success into its name.
pub(super) fn check(status: Status) -> Result<(), Failure> {
    if status == SUCCESS {
        return Ok(());
    }
    // SAFETY: takes any number; the texts are the library's own.
    let name = unsafe { cublasLtGetStatusName(status) };
    let name = match name.is_null() {
        true => format!("status {status}"),
        // SAFETY: not null, so a C string.
        false => unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned(),
    };
    Err(Failure(name))
}

functions! {
    cublasLtGetVersion() -> usize;
    cublasLtGetStatusName(status: Status) -> *const c_char;
    cublasLtCreate(handle: *mut sys::cublasLtHandle_t) -> Status;
    cublasLtDestroy(handle: sys::cublasLtHandle_t) -> Status;
    cublasLtMatmulDescCreate(
        product: *mut sys::cublasLtMatmulDesc_t,
        compute: sys::cublasComputeType_t,
        scale: sys::cudaDataType,
    ) -> Status;
    cublasLtMatmulDescSetAttribute(
        product: sys::cublasLtMatmulDesc_t,
        attribute: sys::cublasLtMatmulDescAttributes_t,
        value: *const c_void,
        bytes: usize,
    ) -> Status;
    cublasLtMatmulDescDestroy(product: sys::cublasLtMatmulDesc_t) -> Status;
    cublasLtMatrixLayoutCreate(
        layout: *mut sys::cublasLtMatrixLayout_t,
        element: sys::cudaDataType,
        rows: u64,
        columns: u64,
        stride: i64,
    ) -> Status;
    cublasLtMatrixLayoutDestroy(layout: sys::cublasLtMatrixLayout_t) -> Status;
    cublasLtMatmulPreferenceCreate(preference: *mut sys::cublasLtMatmulPreference_t) -> Status;
    cublasLtMatmulPreferenceSetAttribute(
        preference: sys::cublasLtMatmulPreference_t,
        attribute: sys::cublasLtMatmulPreferenceAttributes_t,
        value: *const c_void,
        bytes: usize,
    ) -> Status;
    cublasLtMatmulPreferenceDestroy(preference: sys::cublasLtMatmulPreference_t) -> Status;
    cublasLtMatmulAlgoGetHeuristic(
        handle: sys::cublasLtHandle_t,
        product: sys::cublasLtMatmulDesc_t,
        a: sys::cublasLtMatrixLayout_t,
        b: sys::cublasLtMatrixLayout_t,
        c: sys::cublasLtMatrixLayout_t,
        d: sys::cublasLtMatrixLayout_t,
        preference: sys::cublasLtMatmulPreference_t,
        num_wanted: c_int,
        choices: *mut Choice,
        num_found: *mut c_int,
    ) -> Status;
    cublasLtMatmul(
        handle: sys::cublasLtHandle_t,
        product: sys::cublasLtMatmulDesc_t,
        alpha: *const c_void,
        a: *const c_void,
        a_layout: sys::cublasLtMatrixLayout_t,
        b: *const c_void,
        b_layout: sys::cublasLtMatrixLayout_t,
        beta: *const c_void,
        c: *const c_void,
        c_layout: sys::cublasLtMatrixLayout_t,
        d: *mut c_void,
        d_layout: sys::cublasLtMatrixLayout_t,
        algorithm: *const sys::cublasLtMatmulAlgo_t,
        workspace: *mut c_void,
        workspace_bytes: usize,
        stream: sys::cudaStream_t,
    ) -> Status;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_library_that_is_here_has_all_that_is_called() {
        let places = SearchPath::of_process(None);
        match places.folder(LIBRARY) {
            Ok(Some(_)) => open(&places).unwrap(),
            _ => return eprintln!("skipped: there is no {LIBRARY}"),
        }
        check(SUCCESS).unwrap();
        assert_eq!(check(1).unwrap_err().0, "CUBLAS_STATUS_NOT_INITIALIZED");
        assert!(!check(4321).unwrap_err().0.is_empty());
    }
}
