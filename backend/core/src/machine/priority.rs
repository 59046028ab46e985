//! Which threads of the process go first.
#![allow(unsafe_code)]

/// Lets other threads of the process go before this one, for as long as it lives.
pub fn lower_thread_priority() {
    const NICE: i32 = 5;
    // SAFETY: changes nothing but this thread, whose number Linux takes for that of a process. Refusal does no harm.
    unsafe {
        libc::setpriority(libc::PRIO_PROCESS, libc::gettid() as u32, NICE);
    }
}
