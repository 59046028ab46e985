//! Compiles the machine, and every variant of the kernels as an object of its own.

#[allow(dead_code)]
#[path = "src/compile.rs"]
mod compile;
#[path = "src/variants.rs"]
mod variants;

use std::path::{Path, PathBuf};
use std::{env, fs};

use compile::{Compiler, MACHINE, Source};

/// Set to compile no kernels: a build script is not told what it is for.
const NO_CODE: &str = "SPEC_EMU_NO_CODE";

fn main() {
    let root = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").expect("cargo sets it"));
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets it"));
    let folders = variants::folders(&root);
    // Everything in kernels/, new files too.
    println!("cargo:rerun-if-changed={}", folders[2].display());

    let mut build = cxx_build::bridge("src/machine.rs");
    // Each test program would carry 100 MB of what a debugger reads.
    build.std("c++17").opt_level(2).debug(false).warnings(true).flag_if_supported("-Wno-psabi");
    let compiler = compiler(&build, &folders, &out);
    if links_nothing() {
        return;
    }
    let units = variants::all(&folders);
    let units: Vec<_> = units.iter().enumerate().map(|(i, unit)| Source::unit(i, unit)).collect();
    let machine = MACHINE.map(Source::plain);
    for sources in [&machine[..], &units] {
        let objects = compiler.compile(sources).unwrap_or_else(|e| panic!("{e}"));
        objects.into_iter().for_each(|object| {
            build.object(object);
        });
    }
    let table = out.join("table.cpp");
    fs::write(&table, compile::table(units.len())).expect("the output folder can be written");
    build.include(&folders[0]).file(folders[0].join("bridge.cpp")).file(table).compile("spec_emu");
}

/// Whether clippy asks, or `cargo doc` where it is told so: all of this would be compiled for them once more.
fn links_nothing() -> bool {
    println!("cargo:rerun-if-env-changed={NO_CODE}");
    let wrapper = env::var_os("RUSTC_WORKSPACE_WRAPPER").map(PathBuf::from);
    let is_lint =
        wrapper.is_some_and(|path| path.file_stem().is_some_and(|name| name == "clippy-driver"));
    is_lint || env::var_os(NO_CODE).is_some()
}

/// The compiler that `cc` has found, for the objects here and, by its name, for tests that build programs.
fn compiler(build: &cc::Build, folders: &[PathBuf], out: &Path) -> Compiler {
    let tool = build.get_compiler();
    println!("cargo:rustc-env=EMU_COMPILER={}", tool.path().display());
    let mut flags: Vec<_> = tool.args().iter().map(|a| a.to_string_lossy().into_owned()).collect();
    // A kernel need not use all of its helpers.
    flags.push("-Wno-unused".into());
    Compiler { program: tool.path().into(), flags, folders: folders.into(), out: out.into() }
}
