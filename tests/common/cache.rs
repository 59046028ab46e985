//! Folders that are costly to make, kept in `target/test-models` under a name that ends in a hash of all
//! that they are made from, the builder's source included. A folder with an outdated hash is removed.

use blake3::Hasher;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

/// The repository.
pub(crate) fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// The folder `label`, made by `make` (which is given where to write) unless it is there already for
/// the same `inputs`.
pub(crate) fn folder(label: &str, inputs: &[&str], make: impl FnOnce(&Path)) -> PathBuf {
    let cache = root().join("target/test-models");
    fs::create_dir_all(&cache).expect("target is writable");
    let path = cache.join(format!("{label}@{}", key(inputs)));
    // Test programs run side by side: one makes it, the others wait.
    let lock = File::create(cache.join(format!("{label}.lock"))).expect("target is writable");
    lock.lock().expect("a lock");
    if !path.exists() {
        remove_outdated(&cache, label);
        let partial = cache.join(format!("{label}@partial"));
        make(&partial);
        fs::rename(&partial, &path).expect("the folder was made");
    }
    path
}

fn remove_outdated(cache: &Path, label: &str) {
    for entry in fs::read_dir(cache).expect("the cache is a folder") {
        let path = entry.expect("a readable folder").path();
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        if name.split_once('@').is_some_and(|(other, _)| other == label) {
            fs::remove_dir_all(&path).expect("the cache is writable");
        }
    }
}

fn key(inputs: &[&str]) -> String {
    let mut hasher = Hasher::new();
    for input in inputs.iter().chain([&code()]) {
        hasher.update(&(input.len() as u64).to_le_bytes()).update(input.as_bytes());
    }
    hasher.finalize().to_hex()[..16].into()
}

/// A hash over the sources that decide what an engine file holds.
fn code() -> &'static str {
    static CODE: OnceLock<String> = OnceLock::new();
    CODE.get_or_init(|| {
        let mut files = Vec::new();
        for folder in ["builder/src", "backend/core/src/engine", "backend/core/src/model"] {
            list(&root().join(folder), &mut files);
        }
        files.sort();
        let mut hasher = Hasher::new();
        for file in files {
            hasher.update(&fs::read(file).expect("a readable source"));
        }
        hasher.finalize().to_string()
    })
}

fn list(folder: &Path, files: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).expect("the sources are there") {
        let path = entry.expect("a readable folder").path();
        match path.is_dir() {
            true => list(&path, files),
            false => files.push(path),
        }
    }
}
