//! An opened engine: what its file says about itself, checked, and what tells the file from another one. The file
//! is closed again: whoever wants its sections opens it with [`Engine::reader`], which refuses one that has changed.

use super::{Device, DrafterKind, EngineReader, Manifest, Section, format};
use crate::{Error, Result};
use spec_kernels::ARCHS;
use std::collections::HashMap;
use std::fs::{self, File};
use std::io;
use std::ops::Range;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

/// Bytes hashed between two reports of progress.
const VERIFY_CHUNK: usize = 16 << 20;
/// Longest error text: a hostile manifest may put anything into a name.
const MAX_ERROR_CHARS: usize = 500;

/// An engine file, checked but for the contents of its sections.
#[derive(Debug)]
pub struct Engine {
    path: PathBuf,
    manifest: Manifest,
    /// Of each section, by name.
    places: HashMap<String, usize>,
    version: FileVersion,
}

/// What tells a file from one that took its place, and from itself before it was written to.
#[derive(Clone, Debug, PartialEq, Eq)]
struct FileVersion {
    bytes: u64,
    /// Seconds and nanoseconds.
    modified: (i64, i64),
    /// Its first bytes: they hold the manifest's hash, and that the hashes of all sections.
    header: Vec<u8>,
}

/// Why a file is no engine, or could not be read.
enum Refusal {
    Content(String),
    Io(io::Error),
}

impl From<String> for Refusal {
    fn from(what: String) -> Self {
        Self::Content(what)
    }
}

impl Engine {
    /// Reads header and manifest, and checks them, the bounds of all sections and what is between them.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let io = |error| Error::io(path, error);
        // Before opening: opening a pipe would wait for a writer.
        if !fs::metadata(path).map_err(io)?.is_file() {
            return Err(io(io::Error::new(io::ErrorKind::InvalidInput, "not a regular file")));
        }
        let file = File::open(path).map_err(io)?;
        let version = FileVersion::of(&file).map_err(io)?;
        let manifest = format::parse(version.bytes, |range| read_range(&file, range));
        let manifest = manifest.map_err(|refusal| match refusal {
            Refusal::Content(what) => bad_engine(path, &what, "rebuild with spec-build"),
            Refusal::Io(error) => io(error),
        })?;
        let places = manifest.sections.iter().enumerate();
        let places = places.map(|(idx, section)| (section.name.clone(), idx)).collect();
        Ok(Self { path: path.to_path_buf(), manifest, places, version })
    }

    /// Opens the engine that this target drafts with, if it drafts with one, and checks that the two
    /// belong together.
    pub fn open_drafter(&self) -> Result<Option<Engine>> {
        let DrafterKind::Model(peer) = &self.manifest.drafter else { return Ok(None) };
        let draft = Engine::open(self.path.with_file_name(&peer.file))?;
        Manifest::check_pair(&self.manifest, &draft.manifest)?;
        Ok(Some(draft))
    }

    /// The file that was opened.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// What the file says about itself.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// Opens the file again to read its sections. Refuses one that was replaced or written to since.
    pub fn reader(&self) -> Result<EngineReader<'_>> {
        let file = File::open(&self.path).map_err(|error| Error::io(&self.path, error))?;
        self.check_unchanged(&file)?;
        Ok(EngineReader::new(self, file))
    }

    /// What the manifest says about a section. Panics if the model has no such section.
    pub(super) fn section(&self, name: &str) -> &Section {
        let place = self.places.get(name);
        let &place = place.unwrap_or_else(|| panic!("the model has no section `{name}`"));
        &self.manifest.sections[place]
    }

    /// Refuses a file that is not as it was when this was opened.
    pub(super) fn check_unchanged(&self, file: &File) -> Result<()> {
        let now = FileVersion::of(file).map_err(|error| Error::io(&self.path, error))?;
        let then = &self.version;
        if now == *then {
            return Ok(());
        }
        let ((now_s, now_ns), (then_s, then_ns)) = (now.modified, then.modified);
        let what = if now.bytes != then.bytes {
            format!("it has {} bytes and had {}", now.bytes, then.bytes)
        } else if now.header != then.header {
            "its header is another one".to_string()
        } else {
            format!("it was written to at {now_s}.{now_ns:09}, before at {then_s}.{then_ns:09}")
        };
        Err(self.bad(&format!("has changed since it was opened: {what}"), "load the model again"))
    }

    pub(super) fn bad(&self, what: &str, remedy: &str) -> Error {
        bad_engine(&self.path, what, remedy)
    }

    /// Refuses an engine that was not built for the CPU.
    pub(crate) fn require_cpu(&self) -> Result<()> {
        match &self.manifest.device {
            Device::Cpu => Ok(()),
            Device::Cuda { archs, .. } => {
                let what = format!("built for cuda:{}, opened on the cpu", archs.join(","));
                Err(self.bad(&what, "rebuild with spec-build --device cpu"))
            }
        }
    }

    /// The architecture whose code to load on a GPU of this compute capability, under this branch of the
    /// driver. Refuses an engine that has none.
    pub(crate) fn require_cuda(&self, major: u32, minor: u32, driver: u32) -> Result<&str> {
        let device = format!("a GPU of compute capability {major}.{minor}");
        let remedy = match best_arch(ARCHS.into_iter(), major, minor) {
            Some(arch) => format!("rebuild with spec-build --device cuda:{arch}"),
            None => format!("spec-build compiles for {}, none of which it runs", ARCHS.join(", ")),
        };
        let (archs, min_driver) = match &self.manifest.device {
            Device::Cuda { archs, min_driver } => (archs, *min_driver),
            Device::Cpu => {
                let what = format!("built for the cpu, opened on {device}");
                return Err(self.bad(&what, &remedy));
            }
        };
        let Some(arch) = best_arch(archs.iter().map(String::as_str), major, minor) else {
            let what = format!("built for cuda:{}, opened on {device}", archs.join(","));
            return Err(self.bad(&what, &remedy));
        };
        if driver < min_driver {
            let what = format!("needs driver {min_driver}, found {driver}");
            return Err(self.bad(&what, "update the driver"));
        }
        Ok(arch)
    }

    /// Reads every section and compares its hash; `progress` gets the bytes done so far.
    pub fn verify_hashes(&self, mut progress: impl FnMut(u64)) -> Result<()> {
        let reader = self.reader()?;
        let largest = self.manifest.sections.iter().map(|section| section.bytes as usize).max();
        let mut buffer = vec![0; largest.unwrap_or(0).min(VERIFY_CHUNK)];
        let mut done = 0;
        for section in &self.manifest.sections {
            let mut hasher = blake3::Hasher::new();
            let source = reader.section(&section.name);
            for offset in (0..source.len()).step_by(VERIFY_CHUNK) {
                let chunk = &mut buffer[..VERIFY_CHUNK.min(source.len() - offset)];
                source.read(offset, chunk)?;
                hasher.update_rayon(chunk);
                done += chunk.len() as u64;
                progress(done);
            }
            let found = hasher.finalize().to_hex();
            if *found != *section.hash {
                let what = format!(
                    "section `{}` has hash {found}, the manifest says {}",
                    section.name, section.hash
                );
                return Err(self.bad(&what, "rebuild with spec-build"));
            }
        }
        reader.finish()
    }
}

impl FileVersion {
    fn of(file: &File) -> io::Result<Self> {
        let metadata = file.metadata()?;
        let bytes = metadata.len();
        let mut header = vec![0; bytes.min(format::HEADER_LEN as u64) as usize];
        file.read_exact_at(&mut header, 0)?;
        Ok(Self { bytes, modified: (metadata.mtime(), metadata.mtime_nsec()), header })
    }
}

fn read_range(file: &File, range: Range<u64>) -> Result<Vec<u8>, Refusal> {
    let mut bytes = vec![0; (range.end - range.start) as usize];
    file.read_exact_at(&mut bytes, range.start).map_err(|error| {
        let what = format!("bytes {} to {}: {error}", range.start, range.end);
        Refusal::Io(io::Error::new(error.kind(), what))
    })?;
    Ok(bytes)
}

/// The newest of `archs` that a GPU runs.
fn best_arch<'a>(archs: impl Iterator<Item = &'a str>, major: u32, minor: u32) -> Option<&'a str> {
    let minors = archs.filter_map(|arch| Some((runs_on(arch, major, minor)?, arch)));
    minors.max().map(|(_, arch)| arch)
}

/// The minor version of `arch` if a cubin for it runs on the GPU: within a major version upwards, but code
/// for an architecture's own features (`sm_90a`) on that architecture alone.
fn runs_on(arch: &str, major: u32, minor: u32) -> Option<u32> {
    let digits = arch.strip_prefix("sm_")?;
    let number: u32 = digits.trim_end_matches(|c: char| c.is_ascii_lowercase()).parse().ok()?;
    let exact = digits.ends_with(|c: char| c.is_ascii_lowercase());
    let (arch_major, arch_minor) = (number / 10, number % 10);
    let runs = arch_major == major && (arch_minor == minor || (!exact && arch_minor < minor));
    runs.then_some(arch_minor)
}

fn bad_engine(path: &Path, what: &str, remedy: &str) -> Error {
    Error::BadEngine(one_line(&format!("engine {}: {what}", path.display())) + ": " + remedy)
}

/// Control characters escaped and the length bounded.
fn one_line(text: &str) -> String {
    let mut line = String::new();
    for (idx, c) in text.chars().enumerate() {
        if idx == MAX_ERROR_CHARS {
            line.push_str("...");
            break;
        }
        if c.is_control() {
            line.extend(c.escape_default());
        } else {
            line.push(c);
        }
    }
    line
}
