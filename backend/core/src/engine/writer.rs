//! Writes an engine file. Sections have their places from the start, so that several threads write
//! several sections at once; each section is written from front to back and hashed on the way. The
//! bytes of the file depend on the inputs alone, not on the order in which sections were written.
//!
//! create -> section .. close (for each) -> seal -> commit, or commit_pair for two that name each other.

use super::temp::TempFile;
use super::{DrafterKind, Manifest, Peer, Section, SectionSpec, check, expected_sections, format};
use crate::{Error, Result};
use std::collections::HashMap;
use std::path::Path;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

/// Stands for a hash that is not known yet; as long as one, so that filling it in moves nothing.
const UNKNOWN: &str = "0000000000000000000000000000000000000000000000000000000000000000";

/// An engine file whose sections are being written. Dropping it leaves no trace.
#[derive(Debug)]
pub struct EngineWriter {
    temp: TempFile,
    manifest: Manifest,
    progress: Vec<Progress>,
}

#[derive(Debug, Default)]
struct Progress {
    taken: AtomicBool,
    hash: OnceLock<String>,
}

impl EngineWriter {
    /// As `with_code`, for an engine without any.
    #[cfg(test)]
    pub(crate) fn create(path: impl AsRef<Path>, manifest: Manifest) -> Result<Self> {
        Self::with_code(path, manifest, &HashMap::new())
    }

    /// Starts the file that will take the place of `path`. The sections follow from model, precision and
    /// device; those of `manifest` are replaced, and so is its identity. A peer whose identity is
    /// empty gets it in [`commit_pair`]. `code` has the length of each code section. Panics if one is
    /// not among them.
    pub fn with_code(
        path: impl AsRef<Path>,
        mut manifest: Manifest,
        code: &HashMap<String, u64>,
    ) -> Result<Self> {
        let path = path.as_ref();
        let bad = |what: String| Error::BadModel(format!("engine {}: {what}", path.display()));
        // Before anything is derived from it: sizes out of bounds would overflow.
        manifest.model.validate()?;
        manifest.device.validate(&manifest.model, &manifest.precision)?;
        let specs = expected_sections(&manifest.model, &manifest.precision, &manifest.device);
        manifest.sections = specs.into_iter().map(|spec| unplaced(spec, code)).collect();
        manifest.identity = manifest.compute_identity();
        if let Some(peer) = peer_mut(&mut manifest).filter(|peer| peer.identity.is_empty()) {
            peer.identity = UNKNOWN.to_string();
        }
        check::manifest(&manifest).map_err(bad)?;
        let len = format::place(&mut manifest).map_err(bad)?;
        let temp = TempFile::create(path, len)?;
        let progress = manifest.sections.iter().map(|_| Progress::default()).collect();
        Ok(Self { temp, manifest, progress })
    }

    /// The sections to write, in file order; their hashes are not known yet.
    pub fn sections(&self) -> &[Section] {
        &self.manifest.sections
    }

    /// Starts a section. Panics if the model has no such section or it was started before.
    pub fn section(&self, name: &str) -> SectionWriter<'_> {
        let idx = self.manifest.sections.iter().position(|section| section.name == name);
        let idx = idx.unwrap_or_else(|| panic!("the model has no section `{name}`"));
        let progress = &self.progress[idx];
        assert!(!progress.taken.swap(true, Ordering::Relaxed), "section `{name}` is started twice");
        SectionWriter {
            temp: &self.temp,
            section: &self.manifest.sections[idx],
            hash: &progress.hash,
            hasher: blake3::Hasher::new(),
            written: 0,
        }
    }

    /// Fixes the contents: hashes and identity. Panics if a section was not written.
    pub fn seal(mut self) -> Result<Sealed> {
        for (section, progress) in self.manifest.sections.iter_mut().zip(self.progress) {
            let hash = progress.hash.into_inner();
            section.hash =
                hash.unwrap_or_else(|| panic!("section `{}` was not written", section.name));
        }
        self.manifest.identity = self.manifest.compute_identity();
        // The long part of reaching the disk, while nothing is visible yet.
        self.temp.sync()?;
        Ok(Sealed { temp: self.temp, manifest: self.manifest })
    }
}

/// A section being written, from front to back.
#[derive(Debug)]
pub struct SectionWriter<'a> {
    temp: &'a TempFile,
    section: &'a Section,
    hash: &'a OnceLock<String>,
    hasher: blake3::Hasher,
    written: u64,
}

impl SectionWriter<'_> {
    /// Bytes that it takes.
    #[expect(clippy::len_without_is_empty, reason = "a section is not a collection")]
    pub fn len(&self) -> u64 {
        self.section.bytes
    }

    /// Appends bytes. Panics if they go beyond the section.
    pub fn write(&mut self, bytes: &[u8]) -> Result<()> {
        let Section { name, bytes: size, offset, .. } = self.section;
        let left = size - self.written;
        assert!(bytes.len() as u64 <= left, "section `{name}` takes {size} bytes, not more");
        self.temp.write_at(bytes, offset + self.written)?;
        self.hasher.update(bytes);
        self.written += bytes.len() as u64;
        Ok(())
    }

    /// Ends the section. Panics if it is not full.
    pub fn close(self) {
        let Section { name, bytes: size, .. } = self.section;
        assert!(self.written == *size, "section `{name}` has {} of {size} bytes", self.written);
        let hash = self.hasher.finalize().to_hex().to_string();
        // Nobody else sets it: a section is started only once.
        self.hash.set(hash).expect("a section is closed once");
    }
}

/// An engine file with all its sections, not yet in its place. Dropping it leaves no trace.
#[derive(Debug)]
pub struct Sealed {
    temp: TempFile,
    manifest: Manifest,
}

impl Sealed {
    /// The identity of a peer may still be open.
    #[cfg(test)]
    pub(crate) fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// Puts the file into its place, in one step. Panics if it has a peer of unknown identity: such
    /// a file goes through [`commit_pair`].
    pub fn commit(mut self) -> Result<()> {
        let peer = peer_mut(&mut self.manifest);
        assert!(peer.is_none_or(|peer| peer.identity != UNKNOWN), "the peer's identity is unknown");
        self.write_manifest()?;
        self.temp.rename()
    }

    /// Writes header and manifest, durably. They fill their place exactly: only hashes have changed
    /// since it was laid out, and those are all of the same length.
    fn write_manifest(&self) -> Result<()> {
        let start = format::encode(&self.manifest)
            .map_err(|what| Error::BadModel(format!("engine {}: {what}", self.path().display())))?;
        let room = self.manifest.sections.first().map(|section| section.offset);
        assert_eq!(Some(start.len() as u64), room, "the manifest outgrew its place");
        self.temp.write_at(&start, 0)?;
        self.temp.sync()
    }

    fn path(&self) -> &Path {
        self.temp.path()
    }
}

/// Puts a target and its draft into their places, each naming the other's identity. Both are whole
/// on the disk before the first is renamed. A crash between the two renames leaves a draft that the
/// old target does not name, which opening the pair reports.
pub fn commit_pair(mut target: Sealed, mut draft: Sealed) -> Result<()> {
    if let Some(peer) = peer_mut(&mut target.manifest) {
        peer.identity.clone_from(&draft.manifest.identity);
    }
    if let Some(peer) = peer_mut(&mut draft.manifest) {
        peer.identity.clone_from(&target.manifest.identity);
    }
    Manifest::check_pair(&target.manifest, &draft.manifest)?;
    draft.write_manifest()?;
    target.write_manifest()?;
    draft.temp.rename()?;
    target.temp.rename()
}

/// The other engine that a manifest names.
fn peer_mut(manifest: &mut Manifest) -> Option<&mut Peer> {
    match &mut manifest.drafter {
        DrafterKind::Model(peer) => Some(peer),
        DrafterKind::None
        | DrafterKind::Ngram { .. }
        | DrafterKind::Suffix { .. }
        | DrafterKind::Skip { .. } => manifest.target.as_mut(),
    }
}

fn unplaced(spec: SectionSpec, code: &HashMap<String, u64>) -> Section {
    let SectionSpec { name, kind, matrix: _, dtype, shape, bytes } = spec;
    let bytes = bytes.or_else(|| code.get(&name).copied());
    let bytes = bytes.unwrap_or_else(|| panic!("there is no code for section `{name}`"));
    Section { name, kind, dtype, shape, offset: 0, bytes, hash: UNKNOWN.to_string() }
}
