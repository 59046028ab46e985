//! Compiles the machine, and every variant of the kernels as an object of its own. An object is kept
//! until its source, a header of it or the compiler's command changes.

#[path = "src/variants.rs"]
mod variants;

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;
use std::{env, fs, thread};

use variants::Unit;

fn main() {
    let root = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").expect("cargo sets it"));
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets it"));
    let kernels = root.parent().expect("kernels/").to_path_buf();
    let folders = [root.join("cpp"), root.join("tests"), kernels];
    folders.iter().for_each(|folder| watch(folder));

    let mut build = cxx_build::bridge("src/machine.rs");
    build.std("c++17").opt_level(2).flag_if_supported("-Wno-psabi");
    folders.iter().for_each(|folder| {
        build.include(folder);
    });
    let units: Vec<_> = units(&folders);
    for object in compile(&build, &units, &folders, &out) {
        build.object(object);
    }
    let table = out.join("table.cpp");
    write_if_changed(&table, &table_text(&units));
    for name in ["machine", "block", "fiber", "sync", "copy", "collective", "bridge"] {
        build.file(root.join("cpp").join(format!("{name}.cpp")));
    }
    build.file(table).compile("spec_emu");
}

/// Cargo runs this script again when a C++ or CUDA file changes; a folder of its own would make it run
/// for the Rust files too.
fn watch(folder: &Path) {
    for path in files(folder, &["cu", "cuh", "cpp", "h"]) {
        println!("cargo:rerun-if-changed={}", path.display());
    }
}

fn files(folder: &Path, extensions: &[&str]) -> Vec<PathBuf> {
    let mut files: Vec<PathBuf> = fs::read_dir(folder)
        .expect("a folder of this package")
        .filter_map(|entry| entry.ok().map(|entry| entry.path()))
        .filter(|path| path.extension().is_some_and(|e| extensions.iter().any(|x| e == *x)))
        .collect();
    files.sort();
    files
}

/// The variants whose kernel exists, and the kernels of the emulator's own tests.
fn units(folders: &[PathBuf; 3]) -> Vec<Unit> {
    let mut units = variants::all();
    units.retain(|unit| folders[2].join(format!("{}.cu", unit.kernel)).exists());
    for path in files(&folders[1], &["cu"]) {
        let name = path.file_stem().expect("a file").to_string_lossy().into_owned();
        units.push(Unit { kernel: name.clone(), name, defines: Vec::new() });
    }
    units
}

/// The sources and headers that `file` is made of.
fn closure(file: &str, folders: &[PathBuf], seen: &mut BTreeSet<PathBuf>) {
    let Some(path) = folders.iter().map(|folder| folder.join(file)).find(|path| path.exists())
    else {
        return;
    };
    if !seen.insert(path.clone()) {
        return;
    }
    let text = fs::read_to_string(&path).expect("a readable source");
    for line in text.lines() {
        if let Some(rest) = line.trim().strip_prefix("#include \"") {
            closure(rest.trim_end_matches('"'), folders, seen);
        }
    }
}

/// Compiles what has no object yet, on all processors.
fn compile(build: &cc::Build, units: &[Unit], folders: &[PathBuf], out: &Path) -> Vec<PathBuf> {
    let compiler = build.get_compiler();
    let jobs: Vec<_> =
        units.iter().enumerate().map(|job| prepare(&compiler, job, folders, out)).collect();
    let objects = jobs.iter().map(|(object, _)| object.clone()).collect();
    let queue = Mutex::new(jobs.into_iter().filter(|(object, _)| !object.exists()));
    let num_threads = thread::available_parallelism().map_or(1, usize::from);
    thread::scope(|scope| {
        for _ in 0..num_threads {
            scope.spawn(|| {
                loop {
                    let job = queue.lock().expect("no thread panics with it").next();
                    let Some((object, command)) = job else { break };
                    run(&object, command);
                }
            });
        }
    });
    objects
}

/// The object of a unit, which has a hash of all that went into it in its name, and its command.
fn prepare(
    compiler: &cc::Tool,
    (index, unit): (usize, &Unit),
    folders: &[PathBuf],
    out: &Path,
) -> (PathBuf, Command) {
    let mut command = compiler.to_command();
    command.arg("-Wno-subobject-linkage").arg("-Wno-unused");
    for (name, value) in &unit.defines {
        command.arg(format!("-D{name}={value}"));
    }
    command.arg(format!("-DEMU_FILE=\"{}.cu\"", unit.kernel));
    command.arg(format!("-DEMU_NAME=\"{}\"", unit.name));
    command.arg(format!("-DEMU_ENTRY=emu_entry_{index}"));
    command.arg("-c").arg(folders[0].join("unit.cpp"));

    let mut sources = BTreeSet::new();
    closure("unit.cpp", folders, &mut sources);
    closure(&format!("{}.cu", unit.kernel), folders, &mut sources);
    let mut hasher = DefaultHasher::new();
    format!("{command:?}").hash(&mut hasher);
    for path in sources {
        fs::read(path).expect("a readable source").hash(&mut hasher);
    }
    let object = out.join(format!("{}-{:016x}.o", unit.name, hasher.finish()));
    (object, command)
}

fn run(object: &Path, mut command: Command) {
    // Written beside its place first: an object that exists is whole.
    let partial = object.with_extension("partial");
    let output = command.arg("-o").arg(&partial).output().expect("the compiler starts");
    let messages = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}:\n{messages}", object.display());
    messages.lines().for_each(|line| println!("cargo:warning={line}"));
    fs::rename(partial, object).expect("the output folder can be written");
}

fn table_text(units: &[Unit]) -> String {
    let mut text = String::from("#include \"machine.h\"\n");
    for index in 0..units.len() {
        writeln!(text, "extern const emu::Entry emu_entry_{index};").expect("writing to a string");
    }
    text += "namespace emu {\nconst Entry* const ENTRIES[] = {\n";
    for index in 0..units.len() {
        writeln!(text, "    &emu_entry_{index},").expect("writing to a string");
    }
    text + "    nullptr,\n};\n}\n"
}

fn write_if_changed(path: &Path, text: &str) {
    if fs::read_to_string(path).ok().as_deref() != Some(text) {
        fs::write(path, text).expect("the output folder can be written");
    }
}
