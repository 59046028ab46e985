//! What the machine and the control groups around this process give to it.
//!
//! Everything is worked out from files of the system, which are read through `Files`: tests bring recorded ones.

mod affinity;
mod cgroup;
mod cpus;
mod heap;
mod memory;
mod priority;
mod resident;
#[cfg(test)]
mod tests;
mod tiles;

pub(crate) use affinity::ThreadId;
pub(crate) use cpus::Core;
pub use cpus::Cpus;
pub use heap::trim_heap;
pub(crate) use memory::Headroom;
pub use priority::lower_thread_priority;
pub(crate) use resident::resident_bytes;
#[cfg(target_arch = "x86_64")]
pub(crate) use tiles::ask_for_tiles;

use std::path::Path;

/// Bytes of the machine's memory that this process can still get, where the system says so.
pub fn free_memory() -> Option<usize> {
    Headroom::now().map(|headroom| headroom.bytes)
}

/// Gives the text of a file of the system, where there is such a file.
type Files<'a> = &'a dyn Fn(&Path) -> Option<String>;

/// The files of this machine.
fn of_system(path: &Path) -> Option<String> {
    std::fs::read_to_string(path).ok()
}
