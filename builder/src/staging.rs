//! A version folder in the making: written under a hidden name inside the model folder and moved to
//! its place by one rename, which on Linux also swaps an existing version out in the same step.
#![allow(unsafe_code)]

use anyhow::{Context, Result};
use std::ffi::CString;
use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// Names of unfinished folders begin with this.
const PREFIX: &str = ".staging-";

/// An unfinished version folder. Dropping it leaves no trace.
pub struct Staging {
    model: PathBuf,
    path: PathBuf,
    /// Whether the model folder was made for this version.
    is_first: bool,
    /// Held locked as long as the folder is in use, so that others can tell it from a leftover.
    _lock: File,
}

impl Staging {
    /// Makes the model folder if need be and an empty staging folder in it. What builds that were
    /// killed left behind is removed.
    pub fn create(model: &Path) -> Result<Self> {
        let context = || format!("creating {}", model.display());
        let is_first = !model.exists();
        fs::create_dir_all(model).with_context(context)?;
        remove_leftovers(model)?;
        let path = model.join(format!("{PREFIX}{}", std::process::id()));
        fs::create_dir(&path).with_context(context)?;
        let lock = File::open(&path).with_context(context)?;
        // Where a file system has no locks, only a build beside this one can take it for a leftover.
        let _ = lock.lock();
        Ok(Self { model: model.to_path_buf(), path, is_first, _lock: lock })
    }

    /// Where to write.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Moves the folder to `version` of the model, in one step, and writes `config.pbtxt`.
    pub fn commit(self, version: &str, config: &str) -> Result<()> {
        for entry in fs::read_dir(&self.path)? {
            File::open(entry?.path())?.sync_all()?;
        }
        File::open(&self.path)?.sync_all()?;
        let place = self.model.join(version);
        let write_config = || write_whole(&self.model.join("config.pbtxt"), config.as_bytes());
        let moving = || format!("moving the new version to {}", place.display());
        if place.exists() {
            replace(&self.path, &place, exchange).with_context(moving)?;
            write_config()?;
        } else {
            // A server that looks finds no version without a config.
            write_config()?;
            fs::rename(&self.path, &place).with_context(moving)?;
        }
        Ok(File::open(&self.model)?.sync_all()?)
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        // After a commit this is the version that was replaced, or nothing.
        let _ = fs::remove_dir_all(&self.path);
        if self.is_first {
            // Fails, as it should, where a version was committed.
            let _ = fs::remove_dir(&self.model);
        }
    }
}

/// Writes a file under another name and renames it.
fn write_whole(path: &Path, bytes: &[u8]) -> Result<()> {
    let partial = path.with_extension("partial");
    let write = || -> io::Result<()> {
        let mut file = File::create(&partial)?;
        file.write_all(bytes)?;
        file.sync_all()?;
        fs::rename(&partial, path)
    };
    write().with_context(|| format!("writing {}", path.display()))
}

fn remove_leftovers(model: &Path) -> Result<()> {
    for entry in fs::read_dir(model)? {
        let entry = entry?;
        let is_staging = entry.file_name().as_bytes().starts_with(PREFIX.as_bytes());
        // A folder that a running build holds is locked.
        if is_staging && File::open(entry.path())?.try_lock().is_ok() {
            fs::remove_dir_all(entry.path())
                .with_context(|| format!("removing the unfinished {}", entry.path().display()))?;
        }
    }
    Ok(())
}

/// Puts `new` where `old` is, which is then where `new` was: in one step where the file system can do that, else in three.
fn replace(
    new: &Path,
    old: &Path,
    exchange: impl Fn(&Path, &Path) -> io::Result<()>,
) -> io::Result<()> {
    match exchange(new, old) {
        // As on NFS.
        Err(error)
            if matches!(
                error.raw_os_error(),
                Some(libc::EINVAL | libc::ENOSYS | libc::EOPNOTSUPP)
            ) =>
        {
            let aside = new.with_extension("replaced");
            fs::rename(old, &aside)?;
            if let Err(error) = fs::rename(new, old) {
                fs::rename(&aside, old)?;
                return Err(error);
            }
            fs::rename(&aside, new)
        }
        exchanged => exchanged,
    }
}

/// Swaps two folders in one step.
fn exchange(a: &Path, b: &Path) -> io::Result<()> {
    let a = CString::new(a.as_os_str().as_bytes())?;
    let b = CString::new(b.as_os_str().as_bytes())?;
    // SAFETY: both are valid C strings for the time of the call.
    let status = unsafe {
        libc::renameat2(
            libc::AT_FDCWD,
            a.as_ptr(),
            libc::AT_FDCWD,
            b.as_ptr(),
            libc::RENAME_EXCHANGE,
        )
    };
    if status == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn version_with(model: &Path, text: &str) -> Result<()> {
        let staging = Staging::create(model)?;
        fs::write(staging.path().join("file"), text)?;
        staging.commit("1", "config")
    }

    fn names(model: &Path) -> Vec<String> {
        let entries = fs::read_dir(model).unwrap();
        let mut names: Vec<String> =
            entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    #[test]
    fn a_version_replaces_the_one_before_it() {
        let dir = tempfile::tempdir().unwrap();
        let model = dir.path().join("model");
        version_with(&model, "old").unwrap();
        version_with(&model, "new").unwrap();
        assert_eq!(fs::read_to_string(model.join("1/file")).unwrap(), "new");
        assert_eq!(names(&model), ["1", "config.pbtxt"]);
    }

    #[test]
    fn where_folders_cannot_be_swapped_they_are_moved() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        for name in ["old", "new"] {
            fs::create_dir(path(name)).unwrap();
            fs::write(path(name).join("file"), name).unwrap();
        }
        let error = |code| move |_: &Path, _: &Path| Err(io::Error::from_raw_os_error(code));
        let refused = replace(&path("new"), &path("old"), error(libc::EACCES)).unwrap_err();
        assert_eq!(refused.raw_os_error(), Some(libc::EACCES));
        replace(&path("new"), &path("old"), error(libc::EINVAL)).unwrap();
        for (name, text) in [("old", "new"), ("new", "old")] {
            assert_eq!(fs::read_to_string(path(name).join("file")).unwrap(), text);
        }
        assert_eq!(names(dir.path()), ["new", "old"]);
    }

    #[test]
    fn a_build_that_fails_leaves_the_old_version_and_no_trace() {
        let dir = tempfile::tempdir().unwrap();
        version_with(dir.path(), "old").unwrap();
        drop(Staging::create(dir.path()).unwrap());
        assert_eq!(fs::read_to_string(dir.path().join("1/file")).unwrap(), "old");
        assert_eq!(names(dir.path()), ["1", "config.pbtxt"]);
        drop(Staging::create(&dir.path().join("never")).unwrap());
        assert_eq!(names(dir.path()), ["1", "config.pbtxt"]);
    }

    #[test]
    fn leftovers_of_a_killed_build_are_removed_and_a_running_build_is_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join(".staging-1")).unwrap();
        let running = dir.path().join(".staging-2");
        fs::create_dir(&running).unwrap();
        let lock = File::open(&running).unwrap();
        lock.lock().unwrap();
        version_with(dir.path(), "new").unwrap();
        assert_eq!(names(dir.path()), [".staging-2", "1", "config.pbtxt"]);
    }
}
