//! The control groups that limit this process, of both versions: a group is a folder, and what limits it is in that
//! folder and in all above it.

use super::Files;
use std::path::{Path, PathBuf};

/// How a group's files are called and written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Version {
    /// A hierarchy for each controller.
    V1,
    /// One hierarchy for all.
    V2,
}

/// A group that limits the process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Group {
    pub(super) version: Version,
    pub(super) folder: PathBuf,
}

impl Group {
    /// The text of one of the group's files, without space around it.
    pub(super) fn read(&self, files: Files<'_>, name: &str) -> Option<String> {
        Some(files(&self.folder.join(name))?.trim().to_string())
    }
}

/// The groups of this process that have the files of `controller`, and may limit it: its own first, then those above,
/// as far as they are visible from here.
pub(super) fn groups(files: Files<'_>, controller: &str) -> Vec<Group> {
    let text = |path| files(Path::new(path)).unwrap_or_default();
    let (memberships, mounts) = (text("/proc/self/cgroup"), text("/proc/self/mountinfo"));
    let mounts: Vec<Mount> = mounts.lines().filter_map(Mount::parse).collect();
    let mut groups = Vec::new();
    for line in memberships.lines() {
        // Number of the hierarchy, its controllers, the group.
        let mut fields = line.splitn(3, ':');
        let (Some(_), Some(controllers), Some(path)) =
            (fields.next(), fields.next(), fields.next())
        else {
            continue;
        };
        let version = match controllers {
            "" => Version::V2,
            some if some.split(',').any(|one| one == controller) => Version::V1,
            _ => continue,
        };
        let mut fitting = mounts.iter().filter(|mount| mount.carries(version, controller));
        let mount = fitting.clone().find(|mount| Path::new(path).starts_with(&mount.root));
        if let Some(mount) = mount.or_else(|| fitting.next()) {
            let folders = mount.folders(Path::new(path));
            groups.extend(folders.into_iter().map(|folder| Group { version, folder }));
        }
    }
    groups
}

/// A mounted hierarchy.
struct Mount {
    /// The group that is seen at `point`: in a container often its own.
    root: PathBuf,
    point: PathBuf,
    file_system: String,
    options: String,
}

impl Mount {
    /// From a line of `mountinfo`; other file systems too.
    fn parse(line: &str) -> Option<Self> {
        let (place, kind) = line.split_once(" - ")?;
        let mut place = place.split(' ').skip(3);
        let (root, point) = (unescaped(place.next()?), unescaped(place.next()?));
        let mut kind = kind.split(' ');
        let (file_system, options) = (kind.next()?.to_string(), kind.nth(1)?.to_string());
        Some(Self { root: root.into(), point: point.into(), file_system, options })
    }

    fn carries(&self, version: Version, controller: &str) -> bool {
        match version {
            Version::V1 => {
                self.file_system == "cgroup" && self.options.split(',').any(|one| one == controller)
            }
            Version::V2 => self.file_system == "cgroup2",
        }
    }

    /// Folders from that of a group up to where the hierarchy is mounted. A group that is not below the mounted one
    /// (another namespace's) is hidden; what is mounted limits it then, as far as can be seen.
    fn folders(&self, group: &Path) -> Vec<PathBuf> {
        let below = group.strip_prefix(&self.root).unwrap_or(Path::new(""));
        let is_plain = below.components().all(|one| matches!(one, std::path::Component::Normal(_)));
        let below = if is_plain { below } else { Path::new("") };
        // The last ancestor is empty: the mount itself.
        let folder = |part: &Path| match part.as_os_str().is_empty() {
            true => self.point.clone(),
            false => self.point.join(part),
        };
        below.ancestors().map(folder).collect()
    }
}

/// Space and the like are written as `\040` in `mountinfo`.
fn unescaped(text: &str) -> String {
    let mut parts = text.split('\\');
    let mut plain = parts.next().unwrap_or_default().to_string();
    for part in parts {
        match part.get(..3).and_then(|digits| u8::from_str_radix(digits, 8).ok()) {
            Some(byte) => {
                plain.push(char::from(byte));
                plain.push_str(&part[3..]);
            }
            None => plain.push_str(part),
        }
    }
    plain
}
