//! Embeds every CUDA source of `kernels/` as (path, text) pairs, with one hash over all of them.
//! Needs no compiler: the sources are compiled by `spec-build`, for the architectures it is asked for.

use std::fmt::Write as _;
use std::path::PathBuf;
use std::{env, fs};

/// The folders of `kernels/` that hold CUDA sources.
const ROOMS: [&str; 8] =
    ["attention", "common", "gemm", "head", "prefill", "sample", "step", "wgmma"];

fn main() {
    let root = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").expect("cargo sets it"));
    let kernels = root.join("kernels");
    let rooms = ROOMS.map(|room| kernels.join(room));
    let mut sources: Vec<PathBuf> = rooms
        .iter()
        .flat_map(|room| fs::read_dir(room).expect("the room is part of the package"))
        .filter_map(|entry| entry.ok().map(|e| e.path()))
        .filter(|path| path.extension().is_some_and(|ext| ext == "cu" || ext == "cuh"))
        .collect();
    sources.sort();

    let mut hasher = blake3::Hasher::new();
    let mut table = String::from("pub const SOURCES: &[(&str, &str)] = &[\n");
    for path in &sources {
        // Not the whole folder: it has the emulator in it, on which nothing here depends.
        println!("cargo:rerun-if-changed={}", path.display());
        let name = path.strip_prefix(&kernels).expect("it is inside");
        let name = name.to_str().expect("sources have plain names");
        let text = fs::read(path).expect("a readable kernel source");
        hasher.update(name.as_bytes()).update(&[0]).update(&text).update(&[0]);
        writeln!(table, "    ({name:?}, include_str!({path:?})),").expect("writing to a string");
    }
    table.push_str("];\n");
    writeln!(table, "pub const HASH: &str = \"{}\";", &hasher.finalize().to_hex()[..16])
        .expect("writing to a string");
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets it")).join("sources.rs");
    fs::write(out, table).expect("writing the table");
}
