//! The file of an opened engine, to read its sections from: by bounded reads, straight to where they are wanted.
//! Nothing is mapped, so a file that is cut off or overwritten meanwhile, or a disk that fails, is an error of the
//! load that names file, section and place, and never a signal.

use super::{Engine, Section};
use crate::{Error, Result};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

/// What to do about a file that changes under its reader.
const REMEDY: &str = "load the model again once the file is whole";

/// An engine's file while it is read. Many threads may read at once.
#[derive(Debug)]
pub struct EngineReader<'a> {
    engine: &'a Engine,
    file: File,
}

/// A section of it.
#[derive(Clone, Copy, Debug)]
pub struct SectionReader<'a> {
    reader: &'a EngineReader<'a>,
    section: &'a Section,
}

impl<'a> EngineReader<'a> {
    pub(super) fn new(engine: &'a Engine, file: File) -> Self {
        Self { engine, file }
    }

    /// A section of this name. Panics if the model has none: which ones it has follows from its config, by
    /// [`expected_sections`](super::expected_sections).
    pub fn section(&'a self, name: &str) -> SectionReader<'a> {
        SectionReader { reader: self, section: self.engine.section(name) }
    }

    /// Ends reading. Refuses what was read if the file was written to since the engine was opened: it may be of
    /// two engines.
    pub fn finish(self) -> Result<()> {
        self.engine.check_unchanged(&self.file)
    }
}

impl SectionReader<'_> {
    /// Bytes that it has.
    #[expect(clippy::len_without_is_empty, reason = "a section is not a collection")]
    pub fn len(&self) -> usize {
        self.section.bytes as usize
    }

    /// Reads as many bytes as `out` has, from `offset` on. Panics if they go beyond the section.
    pub fn read(&self, offset: usize, mut out: &mut [u8]) -> Result<()> {
        let (name, len) = (&self.section.name, self.len());
        let end = offset.checked_add(out.len());
        assert!(end.is_some_and(|end| end <= len), "section `{name}` takes {len} bytes, not more");
        let mut place = self.section.offset + offset as u64;
        while !out.is_empty() {
            match self.reader.file.read_at(out, place) {
                Ok(0) => return Err(self.ends_at(place)),
                Ok(count) => {
                    out = &mut out[count..];
                    place += count as u64;
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(self.failed_at(place, &error)),
            }
        }
        Ok(())
    }

    /// All of it.
    pub fn bytes(&self) -> Result<Vec<u8>> {
        let mut bytes = vec![0; self.len()];
        self.read(0, &mut bytes)?;
        Ok(bytes)
    }

    /// The values of a norm, bias or scale. Panics if the section is of another length.
    pub fn floats(&self) -> Result<Vec<f32>> {
        let bytes = self.bytes()?;
        let (values, rest) = bytes.as_chunks::<4>();
        assert!(rest.is_empty(), "section `{}` does not hold f32", self.section.name);
        Ok(values.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect())
    }

    fn ends_at(&self, place: u64) -> Error {
        let Section { name, offset, bytes, .. } = self.section;
        let end = offset + bytes;
        self.reader.engine.bad(
            &format!("ends at byte {place}, inside of section `{name}` (bytes {offset} to {end})"),
            REMEDY,
        )
    }

    fn failed_at(&self, place: u64, error: &io::Error) -> Error {
        let what = format!("section `{}`, byte {place}: {error}", self.section.name);
        Error::io(self.reader.engine.path(), io::Error::new(error.kind(), what))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::tests::tiny_engine;

    /// The memory of a process is a file without anything at its beginning.
    #[test]
    fn a_disk_that_fails_is_an_error_with_file_section_and_place() {
        let (_folder, path) = tiny_engine();
        let engine = Engine::open(&path).unwrap();
        let file = File::open("/proc/self/mem").unwrap();
        let error = EngineReader::new(&engine, file).section("embed").bytes().unwrap_err();
        let offset = engine.section("embed").offset;
        let expected = format!("{}: section `embed`, byte {offset}: Input/output", path.display());
        assert!(error.to_string().starts_with(&expected), "{error}");
    }
}
