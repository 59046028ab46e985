//! Embeds every CUDA source of `kernels/` as (name, text) pairs, with one hash over all of them.
//! Needs no compiler: the sources are compiled by `spec-build`, for the architectures it is asked for.

use std::fmt::Write as _;
use std::path::PathBuf;
use std::{env, fs};

fn main() {
    let root = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").expect("cargo sets it"));
    let kernels = root.join("kernels");
    let mut sources: Vec<PathBuf> = fs::read_dir(&kernels)
        .expect("kernels/ is part of the package")
        .filter_map(|entry| entry.ok().map(|e| e.path()))
        .filter(|path| path.extension().is_some_and(|ext| ext == "cu" || ext == "cuh"))
        .collect();
    sources.sort();

    let mut hasher = blake3::Hasher::new();
    let mut table = String::from("pub const SOURCES: &[(&str, &str)] = &[\n");
    for path in &sources {
        // Not the whole folder: it has the emulator in it, on which nothing here depends.
        println!("cargo:rerun-if-changed={}", path.display());
        let name = path.file_name().expect("a file").to_string_lossy().into_owned();
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
