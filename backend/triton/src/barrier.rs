//! The way into Triton's functions, which can be barred for good. When the process exits, Triton's objects are destroyed
//! under the backend's threads: from then on a thread that wants to call Triton stops here and never goes on.

use crate::sys::Functions;
use std::cell::Cell;
use std::ops::Deref;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// Threads that are in a call.
static INSIDE: AtomicUsize = AtomicUsize::new(0);
static BARRED: AtomicBool = AtomicBool::new(false);

thread_local! {
    /// Calls of this thread that have not returned: an argument of a call may be a call itself.
    static DEPTH: Cell<usize> = const { Cell::new(0) };
}

/// A call in progress: the function table, for as long as this lives.
pub(crate) struct Calling {
    functions: &'static Functions,
}

impl Calling {
    /// Begins a call. Does not return once calls are barred, unless this thread is in one already.
    pub(crate) fn new(functions: &'static Functions) -> Self {
        Self::try_new(functions).unwrap_or_else(|| stop_here())
    }

    /// As `new`, but returns in any case.
    pub(crate) fn try_new(functions: &'static Functions) -> Option<Self> {
        let enters = DEPTH.with(|depth| {
            if depth.get() == 0 {
                // Sequentially consistent with `close`: either it counts this call, or the call sees it.
                INSIDE.fetch_add(1, Ordering::SeqCst);
                if BARRED.load(Ordering::SeqCst) {
                    INSIDE.fetch_sub(1, Ordering::SeqCst);
                    return false;
                }
            }
            depth.set(depth.get() + 1);
            true
        });
        enters.then_some(Self { functions })
    }
}

impl Deref for Calling {
    type Target = Functions;

    fn deref(&self) -> &Functions {
        self.functions
    }
}

impl Drop for Calling {
    fn drop(&mut self) {
        DEPTH.with(|depth| {
            depth.set(depth.get() - 1);
            if depth.get() == 0 {
                INSIDE.fetch_sub(1, Ordering::SeqCst);
            }
        });
    }
}

/// Whether Triton cannot be called any more.
pub(crate) fn is_barred() -> bool {
    BARRED.load(Ordering::SeqCst)
}

/// Stops a thread of Triton's that would return to it.
pub(crate) fn stop_if_barred() {
    if is_barred() {
        stop_here();
    }
}

/// Bars further calls. May be called by a signal handler.
pub(crate) fn close() {
    BARRED.store(true, Ordering::SeqCst);
}

/// Waits for the calls in progress, but no longer than `limit`.
pub(crate) fn wait(limit: Duration) {
    let end = Instant::now() + limit;
    while INSIDE.load(Ordering::SeqCst) > 0 && Instant::now() < end {
        thread::sleep(Duration::from_millis(1));
    }
}

/// The process is about to end; this thread has nothing left to do in it.
fn stop_here() -> ! {
    loop {
        thread::park();
    }
}
