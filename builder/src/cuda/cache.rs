//! Compiled code on disk, by a hash of all that it was made from. An entry is the hash of the code and then the code:
//! one that was damaged is as good as none. Whatever fails here costs time and nothing else.

use std::fs;
use std::hash::{BuildHasher, RandomState};
use std::path::{Path, PathBuf};

/// Folder of this program below the user's caches.
const FOLDER: &str = "spec-build/cubin";

/// A folder of entries.
#[derive(Clone, Debug)]
pub struct Cache {
    folder: PathBuf,
}

impl Cache {
    /// A cache in this folder, which is made when it is needed.
    pub fn in_folder(folder: impl Into<PathBuf>) -> Self {
        Self { folder: folder.into() }
    }

    /// The user's: `SPEC_CACHE`, or a folder in `XDG_CACHE_HOME` or `~/.cache`. None for a user without a home.
    pub fn of_user() -> Option<Self> {
        let path = |name| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
        let base = || path("XDG_CACHE_HOME").or_else(|| Some(path("HOME")?.join(".cache")));
        let folder = path("SPEC_CACHE").or_else(|| Some(base()?.join(FOLDER)));
        folder.map(Self::in_folder)
    }

    pub(super) fn get(&self, key: &blake3::Hash) -> Option<Vec<u8>> {
        let entry = fs::read(self.place(key)).ok()?;
        let (hash, code) = entry.split_first_chunk::<32>()?;
        (blake3::hash(code).as_bytes() == hash).then(|| code.to_vec())
    }

    /// Readers find the whole entry or none: it is written under another name and renamed.
    pub(super) fn put(&self, key: &blake3::Hash, code: &[u8]) {
        let place = self.place(key);
        let temp = self.folder.join(format!(".{key}-{:016x}", RandomState::new().hash_one(0)));
        let entry = [blake3::hash(code).as_bytes(), code].concat();
        let written = fs::create_dir_all(&self.folder)
            .and_then(|()| fs::write(&temp, entry))
            .and_then(|()| fs::rename(&temp, place));
        if written.is_err() {
            // It was not made, or stays behind where even this fails.
            let _ = fs::remove_file(&temp);
        }
    }

    fn place(&self, key: &blake3::Hash) -> PathBuf {
        let Self { folder } = self;
        Path::new(folder).join(key.to_hex().as_str())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_entry_comes_back_and_a_damaged_one_does_not() {
        let dir = tempfile::tempdir().unwrap();
        let cache = Cache::in_folder(dir.path().join("made/when/needed"));
        let (key, other) = (blake3::hash(b"key"), blake3::hash(b"other"));
        assert_eq!(cache.get(&key), None);
        cache.put(&key, b"code");
        assert_eq!(cache.get(&key).as_deref(), Some(&b"code"[..]));
        assert_eq!(cache.get(&other), None);
        let whole = fs::read(cache.place(&key)).unwrap();
        for len in 0..whole.len() {
            fs::write(cache.place(&key), &whole[..len]).unwrap();
            assert_eq!(cache.get(&key), None, "{len} bytes");
        }
        for byte in 0..whole.len() {
            let mut damaged = whole.clone();
            damaged[byte] ^= 1;
            fs::write(cache.place(&key), damaged).unwrap();
            assert_eq!(cache.get(&key), None, "byte {byte}");
        }
        cache.put(&key, b"code");
        assert_eq!(cache.get(&key).as_deref(), Some(&b"code"[..]));
        assert_eq!(fs::read_dir(&cache.folder).unwrap().count(), 1, "no temporary file is left");
    }

    #[test]
    fn a_folder_that_cannot_be_written_is_no_error() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("file"), "").unwrap();
        let cache = Cache::in_folder(dir.path().join("file"));
        cache.put(&blake3::hash(b"key"), b"code");
        assert_eq!(cache.get(&blake3::hash(b"key")), None);
    }
}
