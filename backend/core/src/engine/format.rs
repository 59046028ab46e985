//! The bytes of an engine file; no other file knows them. Pure: bytes in, values out, and the caller reads the
//! file. A failure is a text that says what is wrong and both values; the caller adds the file and the remedy.
//!
//! ```text
//! 0   8   magic
//! 8   4   format version, u32 LE
//! 12  4   zero
//! 16  8   manifest length, u64 LE
//! 24  32  blake3 of the manifest
//! 56  n   manifest JSON, padded with spaces to the next 256
//! ..      sections, each at a multiple of 256, in manifest order, zeros between, the last ends at EOF
//! ```

use super::{Manifest, check};
use std::ops::Range;

/// Text that says what is wrong with a file, both values included.
pub(super) type Result<T> = std::result::Result<T, String>;

const MAGIC: &[u8; 8] = b"SPECENG\n";
const VERSION: u32 = 1;
/// Sections start at multiples of this: cache lines, and the alignment of device copies.
const ALIGN: u64 = 256;
/// The header carries the manifest's hash, because a hash inside the manifest could not cover it:
/// with it, opening a file detects every change of what the file says about itself.
pub(super) const HEADER_LEN: usize = 56;
/// Far above what the largest permitted model needs, far below what would hurt to parse.
const MAX_MANIFEST_LEN: u64 = 64 << 20;

/// Where sections of given sizes lie.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Layout {
    /// Start of each section.
    pub(super) offsets: Vec<u64>,
    /// End of the last.
    pub(super) end: u64,
}

/// Lays sections out from `start` on, without room to spare. `None` if they end beyond `u64::MAX`.
pub(super) fn layout(start: u64, sizes: impl IntoIterator<Item = u64>) -> Option<Layout> {
    let mut offsets = Vec::new();
    let mut end = start;
    for size in sizes {
        let offset = end.checked_next_multiple_of(ALIGN)?;
        offsets.push(offset);
        end = offset.checked_add(size)?;
    }
    Some(Layout { offsets, end })
}

/// Gives every section its offset and returns the length of the file. The offsets are part of the
/// manifest, whose length decides the offsets: each round can only move the sections further, by the
/// few digits that the numbers grew, so this ends.
pub(super) fn place(manifest: &mut Manifest) -> Result<u64> {
    let mut start = 0;
    loop {
        let sizes = manifest.sections.iter().map(|section| section.bytes);
        let layout = layout(start, sizes).ok_or("sections end beyond 2^64 bytes")?;
        for (section, offset) in manifest.sections.iter_mut().zip(layout.offsets) {
            section.offset = offset;
        }
        let needed = encode(manifest)?.len() as u64;
        if needed == start {
            return Ok(layout.end);
        }
        start = needed;
    }
}

/// Header and padded manifest: everything before the first section.
pub(super) fn encode(manifest: &Manifest) -> Result<Vec<u8>> {
    let json = serde_json::to_vec(manifest).map_err(|e| format!("manifest: {e}"))?;
    if json.len() as u64 > MAX_MANIFEST_LEN {
        return Err(format!("manifest is {} bytes, at most {MAX_MANIFEST_LEN}", json.len()));
    }
    Ok(frame(&json))
}

/// The start of a file with this manifest text.
pub(super) fn frame(json: &[u8]) -> Vec<u8> {
    let padded = (HEADER_LEN + json.len()).next_multiple_of(ALIGN as usize);
    let mut bytes = Vec::with_capacity(padded);
    bytes.extend_from_slice(MAGIC);
    bytes.extend_from_slice(&VERSION.to_le_bytes());
    bytes.extend_from_slice(&[0; 4]);
    bytes.extend_from_slice(&(json.len() as u64).to_le_bytes());
    bytes.extend_from_slice(blake3::hash(json).as_bytes());
    bytes.extend_from_slice(json);
    bytes.resize(padded, b' ');
    bytes
}

/// Checks a file of `len` bytes, except for the contents of its sections, and returns its manifest. After this
/// every section lies inside the file, and the sections are those that the model demands. `read` gives the bytes
/// of a range, which lies inside the file and is no longer than a manifest may be.
pub(super) fn parse<E: From<String>>(
    len: u64,
    mut read: impl FnMut(Range<u64>) -> std::result::Result<Vec<u8>, E>,
) -> std::result::Result<Manifest, E> {
    let header = Header::parse(&read(0..len.min(HEADER_LEN as u64))?, len)?;
    let manifest = header.manifest(&read(HEADER_LEN as u64..header.end())?)?;
    for gap in gaps(&manifest, header.end(), len)? {
        check_fill(&read(gap.clone())?, gap.start, 0)?;
    }
    Ok(manifest)
}

/// What the start of a file says about the manifest that follows it.
struct Header {
    json_len: usize,
    json_hash: blake3::Hash,
}

impl Header {
    /// From the first [`HEADER_LEN`] bytes of a file of `file_len` bytes, or from all that it has.
    fn parse(start: &[u8], file_len: u64) -> Result<Self> {
        let Some(after_magic) = start.strip_prefix(MAGIC) else {
            let start = start[..start.len().min(MAGIC.len())].escape_ascii();
            let magic = MAGIC.escape_ascii();
            return Err(format!(
                "not an engine file: starts with \"{start}\", expected \"{magic}\""
            ));
        };
        // The version decides what the rest means, so it comes before any complaint about the rest.
        if let Some(&version) = after_magic.first_chunk::<4>() {
            let version = u32::from_le_bytes(version);
            if version != VERSION {
                return Err(format!("built by format {version}, this reads {VERSION}"));
            }
        }
        let Some(header) = start.first_chunk::<HEADER_LEN>() else {
            return Err(format!("ends at byte {file_len}, the header takes {HEADER_LEN}"));
        };
        let header = Self::of(header)?;
        if header.end() > file_len {
            return Err(format!("ends at byte {file_len}, its manifest at {}", header.end()));
        }
        Ok(header)
    }

    fn of(bytes: &[u8; HEADER_LEN]) -> Result<Self> {
        let reserved = u32::from_le_bytes([bytes[12], bytes[13], bytes[14], bytes[15]]);
        if reserved != 0 {
            return Err(format!("bytes 12 to 16 hold {reserved}, expected 0"));
        }
        let mut len = [0; 8];
        len.copy_from_slice(&bytes[16..24]);
        let len = u64::from_le_bytes(len);
        if len == 0 || len > MAX_MANIFEST_LEN {
            return Err(format!("manifest length is {len}, expected 1 to {MAX_MANIFEST_LEN}"));
        }
        let json_hash = blake3::Hash::from_slice(&bytes[24..]).map_err(|e| e.to_string())?;
        Ok(Self { json_len: len as usize, json_hash })
    }

    /// Where the manifest and its padding end.
    fn end(&self) -> u64 {
        ((HEADER_LEN + self.json_len) as u64).next_multiple_of(ALIGN)
    }

    /// The manifest out of what follows the header, up to [`end`](Self::end): proven by its hash, and checked.
    fn manifest(&self, text: &[u8]) -> Result<Manifest> {
        let (json, padding) = text.split_at(self.json_len);
        check_fill(padding, (HEADER_LEN + self.json_len) as u64, b' ')?;
        let (found, expected) = (blake3::hash(json), self.json_hash);
        if found != expected {
            let (found, expected) = (found.to_hex(), expected.to_hex());
            return Err(format!("manifest has hash {found}, the header says {expected}"));
        }
        let manifest =
            serde_json::from_slice(json).map_err(|error| format!("manifest: {error}"))?;
        check::manifest(&manifest)?;
        Ok(manifest)
    }
}

/// Checks that sections lie where [`layout`] puts them, from `start` up to the end of the file, and gives what is
/// between them.
fn gaps(manifest: &Manifest, start: u64, file_len: u64) -> Result<Vec<Range<u64>>> {
    let layout = layout(start, manifest.sections.iter().map(|section| section.bytes))
        .ok_or("sections end beyond 2^64 bytes")?;
    for (section, expected) in manifest.sections.iter().zip(&layout.offsets) {
        if section.offset != *expected {
            return Err(format!(
                "section `{}` starts at byte {}, expected {expected}",
                section.name, section.offset
            ));
        }
    }
    if layout.end != file_len {
        return Err(format!("ends at byte {file_len}, its sections at {}", layout.end));
    }
    let ends = manifest.sections.iter().map(|section| section.offset + section.bytes);
    let gaps = std::iter::once(start).chain(ends).zip(layout.offsets);
    Ok(gaps.map(|(end, next)| end..next).filter(|gap| !gap.is_empty()).collect())
}

/// Bytes that stand at `start` must all be `fill`.
fn check_fill(bytes: &[u8], start: u64, fill: u8) -> Result<()> {
    match bytes.iter().position(|&byte| byte != fill) {
        None => Ok(()),
        Some(idx) => Err(format!(
            "byte {} is padding and holds {}, expected {fill}",
            start + idx as u64,
            bytes[idx]
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::tests::{parse_bytes, placed_manifest};
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn sections_are_aligned_tight_and_in_order(
            start in 0u64..1 << 40,
            sizes in prop::collection::vec(1u64..1 << 40, 0..40),
        ) {
            let layout = layout(start, sizes.iter().copied()).unwrap();
            let mut end = start;
            for (offset, size) in layout.offsets.iter().zip(&sizes) {
                prop_assert_eq!(offset % ALIGN, 0);
                prop_assert!(*offset >= end && offset - end < ALIGN);
                end = offset + size;
            }
            prop_assert_eq!(layout.end, end);
            prop_assert_eq!(layout.offsets.len(), sizes.len());
        }

        #[test]
        fn layout_never_wraps_around(start: u64, sizes in prop::collection::vec(any::<u64>(), 0..8)) {
            let needed = sizes.iter().fold(u128::from(start), |end, &size| {
                end.next_multiple_of(u128::from(ALIGN)) + u128::from(size)
            });
            match layout(start, sizes) {
                Some(layout) => prop_assert_eq!(u128::from(layout.end), needed),
                None => prop_assert!(needed > u128::from(u64::MAX)),
            }
        }

        #[test]
        fn placing_agrees_with_the_encoded_manifest(name_len in 0usize..3000) {
            let mut manifest = placed_manifest();
            manifest.builder = "x".repeat(name_len);
            let end = place(&mut manifest).unwrap();
            let start = encode(&manifest).unwrap();
            prop_assert_eq!(manifest.sections[0].offset, start.len() as u64);
            let mut file = start;
            file.resize(end as usize, 0);
            prop_assert_eq!(parse_bytes(&file), Ok(manifest));
        }
    }

    #[test]
    fn rounding_up_does_not_wrap_around() {
        let last = u64::MAX - 255;
        assert_eq!(layout(last, [255]).map(|layout| layout.end), Some(u64::MAX));
        assert_eq!(layout(last + 1, [0]), None);
        assert_eq!(layout(0, [last + 1, 1]), None);
    }

    #[test]
    fn an_oversized_manifest_is_refused_before_it_is_written() {
        let mut manifest = placed_manifest();
        manifest.builder = "x".repeat(MAX_MANIFEST_LEN as usize);
        assert!(place(&mut manifest).unwrap_err().ends_with("bytes, at most 67108864"));
    }
}
