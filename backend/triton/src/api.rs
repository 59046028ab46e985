//! Triton's functions, found at run time in the process that loaded us, and errors on their way across.
//!
//! Nothing is linked: hosts name and load their library differently (an executable that links it, a Python
//! extension with private symbols, a wheel with a renamed file), and each of these must work.
#![allow(unsafe_code)]

use crate::barrier::Calling;
use crate::error::{Code, Error, Result};
use crate::process;
use crate::sys::{self, Functions};
use libloading::os::unix::{Library, RTLD_NOW};
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::sync::OnceLock;

type ErrorNew = unsafe extern "C" fn(u32, *const c_char) -> *mut sys::TRITONSERVER_Error;

/// The interface of Triton that this was written for: another major or an older minor is refused.
const API: (u32, u32) = (1, 19);
/// What the file name of the host's library contains, however it was renamed.
const LIBRARY: &[u8] = b"libtritonserver";

static FUNCTIONS: OnceLock<Functions> = OnceLock::new();
/// Found first, so that failing to find the others can be told.
static ERROR_NEW: OnceLock<ErrorNew> = OnceLock::new();

/// The function table, for one call. Does not return once the process exits.
pub(crate) fn functions() -> Calling {
    Calling::new(
        FUNCTIONS.get().expect("Triton calls TRITONBACKEND_Initialize before anything else"),
    )
}

/// The function table, unless the process exits. As long as the result lives, `functions` returns.
pub(crate) fn try_functions() -> Option<Calling> {
    Calling::try_new(FUNCTIONS.get()?)
}

/// Fills the function table. Called again it does nothing.
pub(crate) fn resolve() -> Result<()> {
    if FUNCTIONS.get().is_some() {
        return Ok(());
    }
    let library = host()?;
    let missing: Vec<&str> =
        sys::NAMES.iter().copied().filter(|name| !exports(&library, name)).collect();
    if !missing.is_empty() {
        let message = format!("this Triton does not have {}: it is too old", missing.join(", "));
        return Err(Error::unsupported(message));
    }
    // SAFETY: the symbols are those of Triton's documented interface, with the types of its headers.
    let functions = unsafe { Functions::from_library(library) }
        .map_err(|e| Error::internal(format!("Triton's functions: {e}")))?;
    let (mut major, mut minor) = (0, 0);
    // SAFETY: both point to numbers of ours.
    check_with(&functions, unsafe { functions.TRITONBACKEND_ApiVersion(&mut major, &mut minor) })?;
    if major != API.0 || minor < API.1 {
        return Err(Error::unsupported(format!(
            "Triton's backend interface is {major}.{minor}, this backend needs {}.{} or a later {}.x",
            API.0, API.1, API.0
        )));
    }
    // Another thread may have been first; the tables are equal.
    let _ = FUNCTIONS.set(functions);
    Ok(())
}

/// The library that the host got Triton from.
fn host() -> Result<Library> {
    let mut candidates = vec![Library::this()];
    candidates.extend(loaded_path().and_then(|path| {
        // SAFETY: the library is loaded already, so no initialiser runs.
        unsafe { Library::open(Some(path.to_str().ok()?), RTLD_NOW | libc::RTLD_NOLOAD) }.ok()
    }));
    for library in candidates {
        // SAFETY: the type is that of Triton's header.
        if let Ok(symbol) = unsafe { library.get::<ErrorNew>(b"TRITONSERVER_ErrorNew\0") } {
            ERROR_NEW.get_or_init(|| *symbol);
            return Ok(library);
        }
    }
    Err(Error::internal("no TRITONSERVER_ErrorNew in this process: it is not a Triton server"))
}

fn exports(library: &Library, name: &str) -> bool {
    // SAFETY: only the address is asked for.
    unsafe { library.get::<*const c_void>(name.as_bytes()) }.is_ok()
}

/// Path of a loaded object that is Triton's library by its name.
fn loaded_path() -> Option<CString> {
    unsafe extern "C" fn visit(
        info: *mut libc::dl_phdr_info,
        _: libc::size_t,
        found: *mut c_void,
    ) -> c_int {
        // SAFETY: the loader gives a valid record, its name is null or a C string, and `found` is the
        // option that `loaded_path` passed.
        let (name, found) = unsafe {
            let name = (*info).dlpi_name;
            if name.is_null() {
                return 0;
            }
            (CStr::from_ptr(name), &mut *found.cast::<Option<CString>>())
        };
        if name.to_bytes().windows(LIBRARY.len()).any(|part| part == LIBRARY) {
            *found = Some(name.to_owned());
            return 1;
        }
        0
    }
    let mut found: Option<CString> = None;
    // SAFETY: `visit` takes the pointer as what it is, and the call ends before `found` does.
    unsafe { libc::dl_iterate_phdr(Some(visit), (&raw mut found).cast()) };
    found
}

/// Takes an error from Triton; null is success.
pub(crate) fn check(raw: *mut sys::TRITONSERVER_Error) -> Result<()> {
    check_with(&functions(), raw)
}

fn check_with(functions: &Functions, raw: *mut sys::TRITONSERVER_Error) -> Result<()> {
    if raw.is_null() {
        return Ok(());
    }
    // SAFETY: a non-null error is ours until it is deleted, which happens once, here.
    unsafe {
        let code = Code::from_raw(functions.TRITONSERVER_ErrorCode(raw));
        let message = text(functions.TRITONSERVER_ErrorMessage(raw));
        functions.TRITONSERVER_ErrorDelete(raw);
        Err(Error { code, message })
    }
}

/// Hands an error to Triton, who owns it then.
pub(crate) fn into_raw(error: &Error) -> *mut sys::TRITONSERVER_Error {
    let Some(new) = ERROR_NEW.get() else {
        // Nothing can be told to a host that has no errors, and null would mean success.
        eprintln!("{}: {error}", process::library_name());
        std::process::abort();
    };
    let message = c_string(&error.message);
    // SAFETY: the message is a C string that outlives the call.
    unsafe { new(error.code as u32, message.as_ptr()) }
}

/// For C, up to the first NUL.
pub(crate) fn c_string(text: &str) -> CString {
    let end = text.find('\0').unwrap_or(text.len());
    CString::new(&text[..end]).unwrap_or_default()
}

/// From C; null is empty.
///
/// # Safety
/// `raw` is null or a C string.
pub(crate) unsafe fn text(raw: *const c_char) -> String {
    if raw.is_null() {
        return String::new();
    }
    // SAFETY: by the contract of this function.
    unsafe { CStr::from_ptr(raw) }.to_string_lossy().into_owned()
}

/// Nanoseconds of the monotonic clock: the clock of Triton's statistics, and so of [`Times`](crate::Times).
pub fn monotonic_ns() -> u64 {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `now` is ours. The call cannot fail for this clock.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &mut now) };
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

/// Weight of a line in Triton's log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Level {
    /// Worth knowing.
    Info = 0,
    /// Worth a look.
    Warn = 1,
    /// Something failed.
    Error = 2,
}

/// Writes a line to Triton's log, under the backend's name. Outside of Triton, as in unit tests, it does nothing.
///
/// ```
/// use triton_backend::{Level, log};
///
/// log(Level::Warn, "model 'echo': the parameter 'colour' is not read");
/// ```
pub fn log(level: Level, message: &str) {
    if FUNCTIONS.get().is_none() {
        return;
    }
    let (functions, message) = (functions(), c_string(message));
    let name = c_string(process::backend_name());
    // SAFETY: both strings outlive the call; an error is deleted by `check` and of no use.
    let _ = check_with(&functions, unsafe {
        functions.TRITONSERVER_LogMessage(level as u32, name.as_ptr(), 0, message.as_ptr())
    });
}
