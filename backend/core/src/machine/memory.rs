//! How much memory this process can still take before something is killed for it: the least of what the machine has
//! to give and what each control group around the process leaves. Swapping is not counted on.

use super::cgroup::{Group, Version, groups};
use super::{Files, of_system};
use std::fmt;
use std::path::{Path, PathBuf};

/// Memory that can still be had.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Headroom {
    pub bytes: usize,
    pub bound: Bound,
}

/// What bounds the memory of a process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Bound {
    /// The machine's own memory.
    Machine,
    /// A control group.
    Group {
        folder: PathBuf,
        /// What it may have.
        limit: usize,
        /// What it has, without what can be dropped.
        used: usize,
    },
}

impl Headroom {
    /// Of this process, now. `None` where the system does not say.
    pub(crate) fn now() -> Option<Self> {
        Self::of(&of_system)
    }

    /// Of the process whose files these are.
    pub(super) fn of(files: Files<'_>) -> Option<Self> {
        let groups = groups(files, "memory");
        let groups = groups.iter().filter_map(|group| group_headroom(files, group));
        machine_headroom(files).into_iter().chain(groups).min_by_key(|headroom| headroom.bytes)
    }
}

impl fmt::Display for Bound {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Machine => write!(f, "of the machine's memory"),
            Self::Group { folder, limit, used } => write!(
                f,
                "of the {} MiB of the control group {}, which has {} MiB in use",
                limit >> 20,
                folder.display(),
                used >> 20
            ),
        }
    }
}

/// What the system can give without swapping.
fn machine_headroom(files: Files<'_>) -> Option<Headroom> {
    let text = files(Path::new("/proc/meminfo"))?;
    let line = text.lines().find(|line| line.starts_with("MemAvailable:"))?;
    let kib: usize = line.split_whitespace().nth(1)?.parse().ok()?;
    Some(Headroom { bytes: kib * 1024, bound: Bound::Machine })
}

fn group_headroom(files: Files<'_>, group: &Group) -> Option<Headroom> {
    let number = |name: &str| group.read(files, name)?.parse::<usize>().ok();
    // Above `memory.high` a group is not killed but slowed down until it serves nobody.
    let (limit, in_use) = match group.version {
        Version::V1 => (number("memory.limit_in_bytes"), number("memory.usage_in_bytes")?),
        Version::V2 => {
            let limits = [number("memory.max"), number("memory.high")];
            (limits.into_iter().flatten().min(), number("memory.current")?)
        }
    };
    let (limit, statistics) = (limit?, group.read(files, "memory.stat").unwrap_or_default());
    let used = in_use.saturating_sub(droppable_bytes(group.version, &statistics));
    let bound = Bound::Group { folder: group.folder.clone(), limit, used };
    Some(Headroom { bytes: limit.saturating_sub(used), bound })
}

/// File pages of a group that the kernel drops rather than kill: neither mapped (programs and libraries that run) nor
/// still to be written.
fn droppable_bytes(version: Version, statistics: &str) -> usize {
    let value = |name: &str| {
        let values = statistics.lines().filter_map(|line| line.split_once(' '));
        let found =
            values.filter(|(key, _)| *key == name).find_map(|(_, value)| value.parse().ok());
        found.unwrap_or(0)
    };
    let sum = |names: [&str; 3]| names.into_iter().map(value).sum::<usize>();
    let (kept, cached) = match version {
        Version::V1 => (
            sum(["total_mapped_file", "total_dirty", "total_writeback"]),
            value("total_inactive_file") + value("total_active_file"),
        ),
        Version::V2 => (
            sum(["file_mapped", "file_dirty", "file_writeback"]),
            value("inactive_file") + value("active_file"),
        ),
    };
    cached.saturating_sub(kept)
}
