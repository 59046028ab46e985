//! What a backend needs of the process that it lives in: to hear of its end, and to stay in it until then.
#![allow(unsafe_code)]

use crate::shutdown;
use libc::{c_int, c_void, siginfo_t};
use std::cell::UnsafeCell;
use std::ffi::{CStr, OsStr};
use std::mem::{self, MaybeUninit};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::ptr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Once, OnceLock};

/// Name of Triton's own program.
const PROGRAM: &str = "tritonserver";
/// What an operator, a terminal or an orchestrator ends it with.
const SIGNALS: [c_int; 2] = [libc::SIGTERM, libc::SIGINT];

/// The handlers that were there before ours, in the order of `SIGNALS`.
static EARLIER: [Earlier; 2] = [Earlier::new(), Earlier::new()];

struct Earlier {
    action: UnsafeCell<MaybeUninit<libc::sigaction>>,
    is_set: AtomicBool,
}

// SAFETY: written once, under `Once`, before `is_set` is raised; read only after that.
unsafe impl Sync for Earlier {}

impl Earlier {
    const fn new() -> Self {
        Self { action: UnsafeCell::new(MaybeUninit::uninit()), is_set: AtomicBool::new(false) }
    }
}

unsafe extern "C" {
    /// As `atexit`, for functions that are told the status; of the GNU C library.
    fn on_exit(function: extern "C" fn(c_int, *mut c_void), argument: *mut c_void) -> c_int;
}

/// Whether this is Triton's own program, which ends as `shutdown` describes. Other hosts have ways of their own.
pub(crate) fn is_triton() -> bool {
    static IS_TRITON: OnceLock<bool> = OnceLock::new();
    *IS_TRITON.get_or_init(|| {
        let program = std::fs::read_link("/proc/self/exe").unwrap_or_default();
        program.file_name() == Some(OsStr::new(PROGRAM))
    })
}

/// Path of the library that this code is in, as the loader has it.
fn library() -> Option<&'static CStr> {
    let mut info = MaybeUninit::<libc::Dl_info>::zeroed();
    let function = library as fn() -> _ as *const c_void;
    // SAFETY: the address of a function; `info` is ours, and all zeros are a value of it. A name that the loader gives is a
    // C string that lives as long as the library does.
    unsafe {
        libc::dladdr(function, info.as_mut_ptr());
        let name = info.assume_init().dli_fname;
        (!name.is_null()).then(|| CStr::from_ptr(name))
    }
}

/// Name of the library's file without its suffix: `libtriton_NAME`.
pub(crate) fn library_name() -> &'static str {
    static NAME: OnceLock<String> = OnceLock::new();
    NAME.get_or_init(|| {
        let path = library().map(|path| Path::new(OsStr::from_bytes(path.to_bytes())));
        let name = path.and_then(Path::file_stem).unwrap_or_default();
        name.to_string_lossy().into_owned()
    })
}

/// The backend's name: Triton finds the backend NAME in the file `libtriton_NAME.so`.
pub(crate) fn backend_name() -> &'static str {
    library_name().strip_prefix("libtriton_").unwrap_or(library_name())
}

/// Has `shutdown::exit` run when the process exits, before anything is destroyed that is older than this call; and keeps
/// this library in memory until then, as its threads and handlers may run that long. Called again it does nothing.
pub(crate) fn note_exit() {
    extern "C" fn exit(status: c_int, _: *mut c_void) {
        shutdown::exit(status);
    }
    static ONCE: Once = Once::new();
    let Some(path) = library() else { return };
    // SAFETY: opening what is loaded already runs no initialiser. A handler is registered only if it stays in memory.
    ONCE.call_once(|| unsafe {
        let flags = libc::RTLD_NOW | libc::RTLD_NOLOAD | libc::RTLD_NODELETE;
        if !libc::dlopen(path.as_ptr(), flags).is_null() {
            // Without room for one more handler the process exits as it would without this.
            on_exit(exit, ptr::null_mut());
        }
    });
}

/// Ends the process now: nothing is destroyed, no handler runs, but what was written to C's streams arrives.
pub(crate) fn end(status: i32) -> ! {
    // SAFETY: neither uses anything of ours.
    unsafe {
        libc::fflush(ptr::null_mut());
        libc::_exit(status)
    }
}

/// Has the signals that end the server noted on their way to it. Its frontends take requests only after it has set its
/// handlers, so the first request is the time to do this.
pub(crate) fn note_exit_signals() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        if is_triton() {
            (0..SIGNALS.len()).for_each(note_signal);
        }
    });
}

fn note_signal(idx: usize) {
    let earlier = &EARLIER[idx];
    // SAFETY: the actions are ours to read and write: `Once` keeps other threads away, and the handler is not set yet.
    unsafe {
        let slot = (*earlier.action.get()).as_mut_ptr();
        let asked = libc::sigaction(SIGNALS[idx], ptr::null(), slot);
        let handler = (*slot).sa_sigaction;
        if asked != 0 || handler == libc::SIG_DFL || handler == libc::SIG_IGN {
            return;
        }
        earlier.is_set.store(true, Ordering::Release);
        let mut action = *slot;
        action.sa_sigaction = on_signal as extern "C" fn(_, _, _) as usize;
        action.sa_flags |= libc::SA_SIGINFO;
        libc::sigaction(SIGNALS[idx], &action, ptr::null_mut());
    }
}

/// Notes that the end has begun, and does what would have been done without us.
extern "C" fn on_signal(signal: c_int, info: *mut siginfo_t, context: *mut c_void) {
    shutdown::begin();
    let earlier = SIGNALS.iter().position(|&known| known == signal).map(|idx| &EARLIER[idx]);
    let Some(earlier) = earlier.filter(|earlier| earlier.is_set.load(Ordering::Acquire)) else {
        return;
    };
    // SAFETY: `is_set` tells that the action was written; its handler has the type that its flags name.
    unsafe {
        let action = (*earlier.action.get()).assume_init_ref();
        match action.sa_flags & libc::SA_SIGINFO {
            0 => mem::transmute::<usize, extern "C" fn(c_int)>(action.sa_sigaction)(signal),
            _ => mem::transmute::<usize, extern "C" fn(c_int, *mut siginfo_t, *mut c_void)>(
                action.sa_sigaction,
            )(signal, info, context),
        }
    }
}
