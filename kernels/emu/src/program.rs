//! The machine as a process of its own: for kernels that are broken on purpose, and to watch kernels for races.

use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use std::{env, fs, process, thread};

use spec_kernels::SOURCES;

use crate::compile::{self, Compiler, MACHINE, Source};
use crate::variants::{self, Unit};
use crate::{Arena, Launch, Schedule};

/// How long a program may run: only one that hangs outside the machine's view takes long.
const TIMEOUT: Duration = Duration::from_secs(240);

/// What a program ends with whose kernels have a race.
const RACE_EXIT: i32 = 66;

/// A change to a source.
#[derive(Clone, Copy, Debug)]
pub struct Mutation<'a> {
    /// The file's path, in `kernels/` or among the tests.
    pub file: &'a str,
    /// Text that must occur in it exactly once.
    pub text: &'a str,
    /// What stands there instead.
    pub replacement: &'a str,
}

/// How a program is built.
#[derive(Clone, Copy, Debug, Default)]
pub struct Options<'a> {
    /// Whether the kernels are watched for races.
    pub races: bool,
    /// What is broken.
    pub mutation: Option<Mutation<'a>>,
}

/// A built program.
pub struct Program {
    path: PathBuf,
}

impl Program {
    /// Builds a program with some variants. Objects are kept: what has not changed is not compiled again.
    pub fn build(variants: &[&str], options: &Options) -> Result<Self, String> {
        let folders = variants::folders(Path::new(env!("CARGO_MANIFEST_DIR")));
        let all = variants::all(&folders);
        let units = variants.iter().map(|name| find(&all, name)).collect::<Result<Vec<_>, _>>()?;
        let out = Path::new(env!("OUT_DIR")).join("programs");
        fs::create_dir_all(&out).map_err(|e| format!("creating {}: {e}", out.display()))?;
        let table = format!("table_{}", units.len());
        write_once(&out.join(format!("{table}.cpp")), &compile::table(units.len()))?;

        let mut machine = compiler(&folders, &out, &["-O2"]);
        let mut files = [&MACHINE[..], &["main", &table]].concat();
        // The kernels alone are compiled with the calls that race.cpp answers, in place of the sanitizer's library: the machine
        // says itself what it reads and writes, and what orders memory. Their lines are for its messages.
        let mut kernels = compiler(&folders, &out, &["-O1"]);
        if options.races {
            machine.flags.push("-DEMU_RACES".into());
            files.push("race");
            kernels.flags.extend(["-fsanitize=thread", "-g1"].map(String::from));
        }
        if let Some(mutation) = &options.mutation {
            kernels.folders = vec![folders[0].clone(), mutate(&folders, mutation, &out)?];
        }
        let files: Vec<_> = files.into_iter().map(Source::plain).collect();
        let units: Vec<_> = units.iter().enumerate().map(|(i, u)| Source::unit(i, u)).collect();
        let objects = [machine.compile(&files)?, kernels.compile(&units)?].concat();
        let path = out.join(unique("program"));
        machine.link(&objects, &path)?;
        Ok(Self { path })
    }

    /// Runs launches as [`crate::run`] does, on memory of `arena`. The error is the machine's message,
    /// or one that begins with `race:`, `crash:` or `timeout:`.
    pub fn run(
        &self,
        arena: &Arena,
        launches: &[Launch],
        schedule: &Schedule,
    ) -> Result<(), String> {
        let mut job = format!(
            "arena {}\nschedule {} {} {}\n",
            arena.shared(),
            schedule.seed,
            schedule.landing as u8,
            u8::from(schedule.disturbed)
        );
        for launch in launches {
            job += &describe(launch);
        }
        let path = self.path.with_file_name(unique("job"));
        fs::write(&path, job).map_err(|e| format!("writing {}: {e}", path.display()))?;
        let result = self.start(&path).and_then(finish).and_then(|()| arena.check());
        // A job that stays behind does no harm.
        let _ = fs::remove_file(&path);
        result
    }

    fn start(&self, job: &Path) -> Result<Child, String> {
        let mut command = Command::new(&self.path);
        command.arg(job).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
        command.spawn().map_err(|e| format!("starting {}: {e}", self.path.display()))
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        // A program that stays behind does no harm.
        let _ = fs::remove_file(&self.path);
    }
}

fn find<'a>(all: &'a [Unit], name: &str) -> Result<&'a Unit, String> {
    all.iter().find(|unit| unit.name == name).ok_or_else(|| format!("no kernel is called {name}"))
}

fn compiler(folders: &[PathBuf; 3], out: &Path, flags: &[&str]) -> Compiler {
    let flags = ["-std=c++17", "-Wno-psabi"].iter().chain(flags);
    Compiler {
        program: env!("EMU_COMPILER").into(),
        flags: flags.map(|&flag| flag.into()).collect(),
        folders: [folders.as_slice(), &[out.to_path_buf()]].concat(),
        out: out.into(),
    }
}

/// A name that no other program or job of this or another process has.
fn unique(stem: &str) -> String {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    format!("{stem}-{}-{}", process::id(), NEXT.fetch_add(1, Ordering::Relaxed))
}

fn write_once(path: &Path, text: &str) -> Result<(), String> {
    if fs::read_to_string(path).ok().as_deref() == Some(text) {
        return Ok(());
    }
    let partial = path.with_file_name(unique("partial"));
    fs::write(&partial, text)
        .and_then(|()| fs::rename(&partial, path))
        .map_err(|e| format!("writing {}: {e}", path.display()))
}

/// A folder with all kernels, one of them changed. The same change gives the same folder.
fn mutate(folders: &[PathBuf; 3], mutation: &Mutation, out: &Path) -> Result<PathBuf, String> {
    let mut found = false;
    let mut texts = Vec::new();
    let own = folders[1].read_dir().into_iter().flatten().flatten().map(|entry| entry.file_name());
    let own = own.filter_map(|name| name.into_string().ok().filter(|name| name.ends_with(".cu")));
    let own = own.map(|name| (folders[1].clone(), name));
    let kernels = SOURCES.iter().map(|(path, _)| (folders[2].clone(), path.to_string()));
    for (folder, name) in own.chain(kernels) {
        let path = folder.join(&name);
        let mut text = fs::read_to_string(&path).map_err(|e| format!("{}: {e}", path.display()))?;
        if name == mutation.file {
            found = true;
            text = replace_once(&text, mutation)?;
        }
        texts.push((name, text));
    }
    if !found {
        return Err(format!("no source is called {}", mutation.file));
    }
    texts.sort();
    let mut hasher = DefaultHasher::new();
    texts.hash(&mut hasher);
    let folder = out.join(format!("mutant-{:016x}", hasher.finish()));
    for (name, text) in texts {
        let path = folder.join(name);
        let parent = path.parent().unwrap_or(&folder);
        fs::create_dir_all(parent).map_err(|e| format!("creating {}: {e}", parent.display()))?;
        write_once(&path, &text)?;
    }
    Ok(folder)
}

fn replace_once(text: &str, mutation: &Mutation) -> Result<String, String> {
    let count = text.matches(mutation.text).count();
    if count != 1 {
        return Err(format!("{} has {count} times, not once: {}", mutation.file, mutation.text));
    }
    Ok(text.replace(mutation.text, mutation.replacement))
}

fn describe(launch: &Launch) -> String {
    let params: String = launch.params.iter().map(|byte| format!("{byte:02x}")).collect();
    format!(
        "launch {} {} {} {} {} {} {params}\n",
        launch.variant,
        launch.grid,
        launch.block,
        launch.shared_bytes,
        u8::from(launch.overlap),
        launch.max_resident
    )
}

/// Waits for the end of a program and says what it was.
fn finish(mut child: Child) -> Result<(), String> {
    let started = Instant::now();
    // Read beside the wait: a full pipe would stop the program.
    let stderr = child.stderr.take();
    let reader = thread::spawn(move || stderr.map(std::io::read_to_string));
    let status = loop {
        let status = child.try_wait().map_err(|e| format!("waiting for the program: {e}"))?;
        if let Some(status) = status {
            break status;
        }
        if started.elapsed() > TIMEOUT {
            let _ = child.kill();
            let _ = child.wait();
            return Err(format!("timeout: no end after {} seconds", TIMEOUT.as_secs()));
        }
        thread::sleep(Duration::from_millis(5));
    };
    let text = reader.join().ok().flatten().and_then(Result::ok).unwrap_or_default();
    match status.code() {
        Some(0) => Ok(()),
        Some(1) => Err(text.trim().to_owned()),
        Some(RACE_EXIT) => Err(format!("race: {}", text.trim())),
        _ => Err(format!("crash: {status}: {}", text.trim())),
    }
}
