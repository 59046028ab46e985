//! Compiles C++ to objects that are kept until a source, a header of it or the command changes. The
//! build script includes this file too: what it does for the crate, tests do for programs of their own.

use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;
use std::{fs, process, thread};

/// The machine, without what only Rust needs.
pub(crate) const MACHINE: [&str; 9] =
    ["machine", "schedule", "block", "fiber", "crash", "sync", "copy", "collective", "warpgroup"];

/// A compiler, where it looks for headers, and where its objects are kept.
pub(crate) struct Compiler {
    pub(crate) program: PathBuf,
    pub(crate) flags: Vec<String>,
    pub(crate) folders: Vec<PathBuf>,
    pub(crate) out: PathBuf,
}

/// One object to be: a source in one of the folders, and what it includes by a define.
pub(crate) struct Source {
    pub(crate) name: String,
    pub(crate) file: String,
    pub(crate) included: Option<String>,
    pub(crate) flags: Vec<String>,
}

impl Source {
    /// A part of the machine.
    pub(crate) fn plain(file: &str) -> Self {
        let (name, file) = (file.to_owned(), format!("{file}.cpp"));
        Self { name, file, included: None, flags: Vec::new() }
    }

    /// A variant of a kernel; its entry gets the symbol `emu_entry_<index>`.
    pub(crate) fn unit(index: usize, unit: &crate::variants::Unit) -> Self {
        let mut flags: Vec<_> =
            unit.defines.iter().map(|(name, value)| format!("-D{name}={value}")).collect();
        flags.push(format!("-DEMU_FILE=\"{}\"", unit.path));
        flags.push(format!("-DEMU_NAME=\"{}\"", unit.name));
        flags.push(format!("-DEMU_ENTRY=emu_entry_{index}"));
        Self {
            name: unit.name.clone(),
            file: "unit.cpp".into(),
            included: Some(unit.path.clone()),
            flags,
        }
    }
}

/// The C++ that lists the entries of so many units.
pub(crate) fn table(num_units: usize) -> String {
    let externs: String =
        (0..num_units).map(|i| format!("extern const emu::Entry emu_entry_{i};\n")).collect();
    let entries: String = (0..num_units).map(|i| format!("    &emu_entry_{i},\n")).collect();
    format!(
        "#include \"machine.h\"\n{externs}\
         namespace emu {{\nconst Entry* const ENTRIES[] = {{\n{entries}    nullptr,\n}};\n}}\n"
    )
}

impl Compiler {
    /// The objects of all sources, compiled on all processors where they are not there yet.
    pub(crate) fn compile(&self, sources: &[Source]) -> Result<Vec<PathBuf>, String> {
        let jobs: Vec<_> = sources.iter().map(|source| self.prepare(source)).collect();
        let objects = jobs.iter().map(|(object, _)| object.clone()).collect();
        let queue = Mutex::new(jobs.into_iter().filter(|(object, _)| !object.exists()));
        let next = || queue.lock().expect("no thread panics while it holds this").next();
        let work = || {
            while let Some((object, command)) = next() {
                run(command, &object)?;
            }
            Ok::<(), String>(())
        };
        let num_threads = thread::available_parallelism().map_or(1, usize::from);
        thread::scope(|scope| {
            let threads: Vec<_> = (0..num_threads).map(|_| scope.spawn(work)).collect();
            threads.into_iter().try_for_each(|thread| thread.join().expect("it returns errors"))
        })?;
        Ok(objects)
    }

    /// Links a program of objects.
    pub(crate) fn link(&self, objects: &[PathBuf], program: &Path) -> Result<(), String> {
        let mut command = Command::new(&self.program);
        command.args(&self.flags).args(objects);
        run(command, program)
    }

    /// The object's place, which has a hash of all that goes into it in its name, and its command.
    fn prepare(&self, source: &Source) -> (PathBuf, Command) {
        let mut command = Command::new(&self.program);
        command.args(&self.flags).args(&source.flags);
        for folder in &self.folders {
            command.arg("-I").arg(folder);
        }
        let mut files = BTreeMap::new();
        self.collect(&source.file, &mut files);
        source.included.iter().for_each(|file| self.collect(file, &mut files));
        let path = self.find(&source.file).unwrap_or_else(|| source.file.clone().into());
        command.arg("-c").arg(path);

        // Not where the folders are: what a mutated folder has as all others have is compiled once.
        let mut hasher = DefaultHasher::new();
        (&self.program, &self.flags, &source.flags).hash(&mut hasher);
        for (name, path) in files {
            (name, fs::read(path).ok()).hash(&mut hasher);
        }
        let object = self.out.join(format!("{}-{:016x}.o", source.name, hasher.finish()));
        (object, command)
    }

    fn find(&self, file: &str) -> Option<PathBuf> {
        self.folders.iter().map(|folder| folder.join(file)).find(|path| path.exists())
    }

    /// Adds `file` and all that it includes, by name.
    fn collect(&self, file: &str, files: &mut BTreeMap<String, PathBuf>) {
        let path = self.find(file);
        let path = path.unwrap_or_else(|| panic!("{file} is included, and in none of the folders"));
        let text = fs::read_to_string(&path).unwrap_or_default();
        if files.insert(file.to_owned(), path).is_none() {
            let included = text.lines().filter_map(|line| line.trim().strip_prefix("#include \""));
            included.for_each(|rest| self.collect(rest.trim_end_matches('"'), files));
        }
    }
}

/// Runs a command that makes `product`, which is whole as soon as it exists.
fn run(mut command: Command, product: &Path) -> Result<(), String> {
    let unique = format!("{}-{:?}", process::id(), thread::current().id());
    let partial = product.with_extension(unique.replace(['(', ')'], ""));
    let output = command.arg("-o").arg(&partial).output();
    let output = output.map_err(|e| format!("starting {:?}: {e}", command.get_program()))?;
    if !output.status.success() {
        let messages = String::from_utf8_lossy(&output.stderr);
        return Err(format!("compiling {}:\n{messages}", product.display()));
    }
    fs::rename(&partial, product).map_err(|e| format!("writing {}: {e}", product.display()))
}
