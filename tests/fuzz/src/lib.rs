//! What the fuzz targets share: a memory limit, files to read from, and the parts of an input.

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

/// Opens a checkpoint and reads every tensor.
pub fn read_checkpoint(path: &Path) -> Option<Checkpoint> {
    let checkpoint = Checkpoint::open(path).ok()?;
    for (name, tensor) in checkpoint.tensors() {
        let mut out = vec![0.0; tensor.num_rows() * tensor.row_len()];
        let _ = checkpoint.read_rows(name, 0..tensor.num_rows(), &mut out);
        let (mut bytes, mut scales) = (vec![0; out.len()], vec![0.0; tensor.num_rows()]);
        let _ = checkpoint.read_fp8_rows(name, 0..tensor.num_rows(), &mut bytes, &mut scales);
    }
    Some(checkpoint)
}
