//! An open engine: the mapped file and its manifest. Opening checks everything but the contents of
//! the sections; after that nothing here fails. The only place that maps files.
#![allow(unsafe_code)]

use super::{Device, DrafterKind, Manifest, format};
use crate::{Error, Result};
use memmap2::Mmap;
use spec_kernels::ARCHS;
use std::collections::HashMap;
use std::fs::{self, File};
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};

/// Bytes hashed between two reports of progress.
const VERIFY_CHUNK: usize = 16 << 20;
/// Longest error text: a hostile manifest may put anything into a name.
const MAX_ERROR_CHARS: usize = 500;

/// An engine file, mapped and checked.
#[derive(Debug)]
pub struct Engine {
    path: PathBuf,
    map: Mmap,
    manifest: Manifest,
    ranges: HashMap<String, Range<usize>>,
}

impl Engine {
    /// Maps the file and checks header, manifest, bounds and padding.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let io = |error| Error::io(path, error);
        // Before opening: opening a pipe would wait for a writer.
        if !fs::metadata(path).map_err(io)?.is_file() {
            return Err(io(io::Error::new(io::ErrorKind::InvalidInput, "not a regular file")));
        }
        let file = File::open(path).map_err(io)?;
        // SAFETY: an engine file is never changed in place: `EngineWriter` renames a finished file
        // over the old one, and a mapping keeps the file that it was made from.
        let map = unsafe { Mmap::map(&file) }.map_err(io)?;
        let manifest = format::parse(&map)
            .map_err(|what| bad_engine(path, &what, "rebuild with spec-build"))?;
        let ranges = manifest
            .sections
            .iter()
            .map(|s| (s.name.clone(), s.offset as usize..(s.offset + s.bytes) as usize))
            .collect();
        Ok(Self { path: path.to_path_buf(), map, manifest, ranges })
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

    /// The bytes of a section, aligned to 256. Panics if the model has no such section: which ones
    /// it has follows from its config, by [`expected_sections`](super::expected_sections).
    pub fn section(&self, name: &str) -> &[u8] {
        let range = self.ranges.get(name);
        let range = range.unwrap_or_else(|| panic!("the model has no section `{name}`"));
        &self.map[range.clone()]
    }

    /// The values of a norm, bias or scale. Panics like [`section`](Self::section).
    pub fn floats(&self, name: &str) -> &[f32] {
        const { assert!(cfg!(target_endian = "little"), "engine files are little-endian") };
        // SAFETY: any four bytes are an f32.
        let (before, values, after) = unsafe { self.section(name).align_to::<f32>() };
        assert!(before.is_empty() && after.is_empty(), "section `{name}` does not hold f32");
        values
    }

    /// Refuses an engine that was not built for the CPU.
    pub fn require_cpu(&self) -> Result<()> {
        match &self.manifest.device {
            Device::Cpu => Ok(()),
            Device::Cuda { archs, .. } => {
                let what = format!("built for cuda:{}, opened on the cpu", archs.join(","));
                Err(bad_engine(&self.path, &what, "rebuild with spec-build --device cpu"))
            }
        }
    }

    /// The architecture whose code to load on a GPU of this compute capability, under this branch of the
    /// driver. Refuses an engine that has none.
    pub fn require_cuda(&self, major: u32, minor: u32, driver: u32) -> Result<&str> {
        let device = format!("a GPU of compute capability {major}.{minor}");
        let remedy = match best_arch(ARCHS.into_iter(), major, minor) {
            Some(arch) => format!("rebuild with spec-build --device cuda:{arch}"),
            None => format!("spec-build compiles for {}, none of which it runs", ARCHS.join(", ")),
        };
        let (archs, min_driver) = match &self.manifest.device {
            Device::Cuda { archs, min_driver } => (archs, *min_driver),
            Device::Cpu => {
                let what = format!("built for the cpu, opened on {device}");
                return Err(bad_engine(&self.path, &what, &remedy));
            }
        };
        let Some(arch) = best_arch(archs.iter().map(String::as_str), major, minor) else {
            let what = format!("built for cuda:{}, opened on {device}", archs.join(","));
            return Err(bad_engine(&self.path, &what, &remedy));
        };
        if driver < min_driver {
            let what = format!("needs driver {min_driver}, found {driver}");
            return Err(bad_engine(&self.path, &what, "update the driver"));
        }
        Ok(arch)
    }

    /// Reads every section and compares its hash; `progress` gets the bytes done so far.
    pub fn verify_hashes(&self, mut progress: impl FnMut(u64)) -> Result<()> {
        let mut done = 0;
        for section in &self.manifest.sections {
            let mut hasher = blake3::Hasher::new();
            for chunk in self.section(&section.name).chunks(VERIFY_CHUNK) {
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
                return Err(bad_engine(&self.path, &what, "rebuild with spec-build"));
            }
        }
        Ok(())
    }
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
