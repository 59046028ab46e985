//! A file that is not there until it is finished: written beside its place under another name,
//! renamed over it, removed if it is dropped before. Its owner holds a lock on it, so what a killed
//! process left behind is told from what a living one still writes, in whatever pid namespace.

use crate::{Error, Result};
use std::ffi::{OsStr, OsString};
use std::fs::{self, File, OpenOptions, TryLockError};
use std::hash::{BuildHasher, RandomState};
use std::io;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

const SUFFIX: &[u8] = b".tmp";

/// An unfinished file.
#[derive(Debug)]
pub(super) struct TempFile {
    file: File,
    temp_path: PathBuf,
    path: PathBuf,
    renamed: bool,
}

impl TempFile {
    /// A file of `len` zeros that will take the place of `path`. Removes what killed processes left
    /// for the same path.
    pub(super) fn create(path: &Path, len: u64) -> Result<Self> {
        let io = |error| Error::io(path, error);
        let prefix = prefix(path).ok_or_else(|| io(io::ErrorKind::InvalidFilename.into()))?;
        if path.is_dir() {
            return Err(io(io::ErrorKind::IsADirectory.into()));
        }
        remove_abandoned(folder(path), &prefix);
        let (file, temp_path) = create_locked(folder(path), &prefix)?;
        let temp = Self { file, temp_path, path: path.to_path_buf(), renamed: false };
        temp.file.set_len(len).map_err(|error| temp.error(error))?;
        Ok(temp)
    }

    /// Where it will be.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    pub(super) fn write_at(&self, bytes: &[u8], offset: u64) -> Result<()> {
        self.file.write_all_at(bytes, offset).map_err(|error| self.error(error))
    }

    /// Waits until the contents are on the disk.
    pub(super) fn sync(&self) -> Result<()> {
        self.file.sync_all().map_err(|error| self.error(error))
    }

    /// Takes its place, in one step, for good. The contents must have been synced.
    pub(super) fn rename(mut self) -> Result<()> {
        fs::rename(&self.temp_path, &self.path).map_err(|error| self.error(error))?;
        self.renamed = true;
        let folder = folder(&self.path);
        let synced = File::open(folder).and_then(|folder| folder.sync_all());
        synced.map_err(|error| Error::io(folder, error))
    }

    /// Failures are reported for the place that the user named.
    fn error(&self, error: io::Error) -> Error {
        Error::io(&self.path, error)
    }
}

impl Drop for TempFile {
    fn drop(&mut self) {
        if !self.renamed {
            // Nobody is left to tell; the next build for this path tries again.
            let _ = fs::remove_file(&self.temp_path);
        }
    }
}

/// Creates a file of a fresh name and locks it. Someone who cleans up may remove it between the two;
/// then it has no name any more, and another one is made.
fn create_locked(folder: &Path, prefix: &[u8]) -> Result<(File, PathBuf)> {
    loop {
        let temp_path = folder.join(temp_name(prefix));
        let io = |error| Error::io(&temp_path, error);
        let file = match OpenOptions::new().write(true).create_new(true).open(&temp_path) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => continue,
            result => result.map_err(io)?,
        };
        // Where the file system has no locks, nothing is ever taken for abandoned.
        let _ = file.lock();
        if file.metadata().map_err(io)?.nlink() > 0 {
            return Ok((file, temp_path));
        }
    }
}

/// Removes the temporary files of a path that no process holds. Best effort: they cost only room.
fn remove_abandoned(folder: &Path, prefix: &[u8]) {
    let Ok(entries) = fs::read_dir(folder) else { return };
    for entry in entries.flatten() {
        let name = entry.file_name();
        if is_temp_name(&name, prefix) && is_abandoned(&entry.path()) {
            let _ = fs::remove_file(entry.path());
        }
    }
}

fn is_abandoned(path: &Path) -> bool {
    let is_file = fs::symlink_metadata(path).is_ok_and(|metadata| metadata.is_file());
    is_file
        && File::open(path).is_ok_and(|file| match file.try_lock() {
            Ok(()) => true,
            Err(TryLockError::WouldBlock | TryLockError::Error(_)) => false,
        })
}

/// `.NAME.` for the file called NAME: what its temporary files' names start with.
fn prefix(path: &Path) -> Option<Vec<u8>> {
    Some([b".", path.file_name()?.as_bytes(), b"."].concat())
}

/// The prefix, the pid for people to read, and 16 random digits.
fn temp_name(prefix: &[u8]) -> OsString {
    let random = RandomState::new().hash_one(0);
    let unique = format!("{}-{random:016x}", std::process::id());
    OsString::from_vec([prefix, unique.as_bytes(), SUFFIX].concat())
}

fn is_temp_name(name: &OsStr, prefix: &[u8]) -> bool {
    let middle = name.as_bytes().strip_prefix(prefix).and_then(|rest| rest.strip_suffix(SUFFIX));
    middle.and_then(|middle| std::str::from_utf8(middle).ok()).is_some_and(|middle| {
        middle.split_once('-').is_some_and(|(pid, random)| {
            !pid.is_empty()
                && pid.bytes().all(|byte| byte.is_ascii_digit())
                && random.len() == 16
                && random.bytes().all(|byte| byte.is_ascii_hexdigit())
        })
    })
}

fn folder(path: &Path) -> &Path {
    match path.parent() {
        Some(folder) if folder != Path::new("") => folder,
        _ => Path::new("."),
    }
}
