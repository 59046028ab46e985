//! The CUDA sources of the project as text, and one hash over them.
//!
//! `spec-build` compiles them; an engine records [`HASH`], so that an engine and a server which
//! disagree about the kernels say so.

mod variant;

mod sources {
    #![allow(missing_docs, unreachable_pub)]
    include!(concat!(env!("OUT_DIR"), "/sources.rs"));
}

/// Every kernel source as (path inside of `kernels/`, text), sorted.
pub use sources::SOURCES;

/// A short hash over the names and texts of all sources.
pub use sources::HASH;

/// The kernel that a source of this path has the entry of; none for headers.
pub fn kernel_of(path: &str) -> Option<&str> {
    path.strip_suffix(".cu")?.rsplit('/').next()
}

/// The path of the source that has the entry of a kernel.
pub fn path_of(kernel: &str) -> Option<&'static str> {
    let mut paths = SOURCES.iter().map(|(path, _)| *path);
    paths.find(|path| kernel_of(path) == Some(kernel))
}

pub use variant::{
    ARCHS, Epilogue, Format, GEMM_ROWS, MAX_GROUP, MULTIPLY_EPILOGUES, MULTIPLY_ROWS, Variant,
    WGMMA_ROWS, gemm_rows, has_warpgroups,
};

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::{Path, PathBuf};

    use super::{SOURCES, kernel_of, path_of};

    #[test]
    fn every_source_is_embedded() {
        let kernels = Path::new(env!("CARGO_MANIFEST_DIR")).join("kernels");
        let mut sources = Vec::new();
        let rooms = fs::read_dir(&kernels).unwrap().map(|entry| entry.unwrap().path());
        for room in rooms.filter(|path| path.is_dir() && !path.ends_with("emu")) {
            let files = fs::read_dir(room).unwrap().map(|entry| entry.unwrap().path());
            let is_source =
                |path: &PathBuf| path.extension().is_some_and(|kind| kind == "cu" || kind == "cuh");
            let inside = |path: PathBuf| path.strip_prefix(&kernels).unwrap().to_path_buf();
            sources.extend(files.filter(is_source).map(inside));
        }
        sources.sort();
        let embedded: Vec<_> = SOURCES.iter().map(|(path, _)| PathBuf::from(path)).collect();
        // A room that is new: name it in build.rs. A file that is new: touch build.rs.
        assert_eq!(embedded, sources);
    }

    #[test]
    fn a_kernel_is_found_by_its_name_alone() {
        assert_eq!(path_of("rope"), Some("attention/rope.cu"));
        assert_eq!(path_of("prims"), None);
        assert_eq!(kernel_of("gemm/ring.cuh"), None);
        let mut kernels: Vec<_> = SOURCES.iter().filter_map(|(path, _)| kernel_of(path)).collect();
        let num_kernels = kernels.len();
        kernels.sort();
        kernels.dedup();
        assert_eq!(kernels.len(), num_kernels, "two sources of one kernel");
    }
}
