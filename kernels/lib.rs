//! The CUDA sources of the project as text, and one hash over them.
//!
//! `spec-build` compiles them; an engine records [`HASH`], so that an engine and a server which
//! disagree about the kernels say so.

mod variant;

mod sources {
    #![allow(missing_docs, unreachable_pub)]
    include!(concat!(env!("OUT_DIR"), "/sources.rs"));
}

/// Every kernel source as (file name, text), sorted by name.
pub use sources::SOURCES;

/// A short hash over the names and texts of all sources.
pub use sources::HASH;

pub use variant::{ARCHS, Epilogue, Format, GEMM_ROWS, MAX_GROUP, Variant};

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;

    use super::SOURCES;

    #[test]
    fn every_source_is_embedded() {
        let kernels = Path::new(env!("CARGO_MANIFEST_DIR")).join("kernels");
        let mut sources: Vec<_> = fs::read_dir(kernels)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .filter(|name| name.ends_with(".cu") || name.ends_with(".cuh"))
            .collect();
        sources.sort();
        let embedded: Vec<_> = SOURCES.iter().map(|(name, _)| *name).collect();
        // A file that is new to this folder: touch build.rs.
        assert_eq!(embedded, sources);
    }
}
