//! What the fuzz targets share: a memory limit, files to read from, and the parts of an input.

use serde_json::Value;
use spec_build::checkpoint::Checkpoint;
use std::alloc::{GlobalAlloc, Layout, System};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::LazyLock;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Bytes that a target may hold: inputs have some KiB, so whatever takes this much was told to.
const MEMORY: usize = 512 << 20;

/// Refuses memory beyond the limit; the program then aborts, and the input is saved.
pub struct Limited;

static USED: AtomicUsize = AtomicUsize::new(0);

#[global_allocator]
static ALLOCATOR: Limited = Limited;

// SAFETY: everything is the system's, but for requests that are refused by a null pointer.
unsafe impl GlobalAlloc for Limited {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if USED.fetch_add(layout.size(), Ordering::Relaxed) + layout.size() > MEMORY {
            USED.fetch_sub(layout.size(), Ordering::Relaxed);
            return std::ptr::null_mut();
        }
        // SAFETY: the caller's promise is passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        USED.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: as above.
        unsafe { System.dealloc(pointer, layout) }
    }
}

/// Files are written here: in the folder for temporary ones, which scripts/fuzz puts into memory.
static FOLDER: LazyLock<PathBuf> = LazyLock::new(|| {
    let folder = std::env::temp_dir().join(format!("spec-fuzz-{}", std::process::id()));
    fs::create_dir_all(&folder).expect("a folder for the inputs");
    folder
});

/// The folder, with a file of these bytes in it.
pub fn file(name: &str, bytes: &[u8]) -> PathBuf {
    let path = FOLDER.join(name);
    fs::write(&path, bytes).expect("a file for the input");
    path
}

/// The folder without a file.
pub fn no_file(name: &str) {
    let _ = fs::remove_file(FOLDER.join(name));
}

/// The folder that the files are in.
pub fn folder() -> &'static Path {
    &FOLDER
}

/// An input as a number of files, between bytes that no text has.
pub fn parts(input: &[u8]) -> impl Iterator<Item = &[u8]> {
    input.split(|&byte| byte == 0xff)
}

/// More data than this is not made of a header.
const MAX_BYTES: u64 = 1 << 20;

/// A safetensors file of a header, which is given its length and as many bytes as it claims, all the same.
pub fn safetensors(header: &[u8], byte: u8) -> Vec<u8> {
    let json: Value = serde_json::from_slice(header).unwrap_or_default();
    let ends = json.as_object().into_iter().flat_map(|tensors| tensors.values());
    let end = ends.filter_map(|tensor| tensor["data_offsets"][1].as_u64()).max().unwrap_or(0);
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header);
    bytes.resize(bytes.len() + end.min(MAX_BYTES) as usize, byte);
    bytes
}

/// Opens a checkpoint and reads every tensor.
pub fn read_checkpoint(path: &Path) -> Option<Checkpoint> {
    let checkpoint = Checkpoint::open(path).ok()?;
    read_tensors(&checkpoint);
    Some(checkpoint)
}

/// Reads every tensor.
pub fn read_tensors(checkpoint: &Checkpoint) {
    for (name, tensor) in checkpoint.tensors() {
        let mut out = vec![0.0; tensor.num_rows() * tensor.row_len()];
        let _ = checkpoint.read_rows(name, 0..tensor.num_rows(), &mut out);
        let (mut bytes, mut scales) = (vec![0; out.len()], vec![0.0; tensor.num_rows()]);
        let _ = checkpoint.read_fp8_rows(name, 0..tensor.num_rows(), &mut bytes, &mut scales);
    }
}
