//! The one file that knows the bytes of ZIP: members that lie in the archive as they are, found by its directory.

use anyhow::{Context, Result, bail, ensure};
use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

/// Bytes of a directory at most.
const MAX_DIRECTORY: u64 = 64 << 20;

const END: [u8; 4] = *b"PK\x05\x06";
const END_LEN: usize = 22;
/// Bytes of a comment behind the end at most.
const MAX_COMMENT: usize = 0xffff;
const WIDE_LOCATOR: [u8; 4] = *b"PK\x06\x07";
const WIDE_LOCATOR_LEN: usize = 20;
const WIDE_END: [u8; 4] = *b"PK\x06\x06";
const WIDE_END_LEN: usize = 56;
const ENTRY: [u8; 4] = *b"PK\x01\x02";
const ENTRY_LEN: usize = 46;
const LOCAL: [u8; 4] = *b"PK\x03\x04";
const LOCAL_LEN: u64 = 30;
/// The extra field with sizes of 64 bits, and what stands where they replace one of 32.
const WIDE_FIELD: u16 = 1;
const IS_WIDE: u32 = u32::MAX;

/// Bytes of a member.
#[derive(Clone, Copy, Debug)]
pub(super) struct Member {
    /// From the start of the file.
    pub(super) offset: u64,
    pub(super) len: u64,
}

/// An open archive.
pub(super) struct Archive {
    file: Arc<File>,
    len: u64,
    /// Of each member where its local header stands, and the bytes behind that.
    members: BTreeMap<String, (u64, u64)>,
}

/// A place in bytes that may end too early.
struct Fields<'a>(&'a [u8]);

impl<'a> Fields<'a> {
    fn bytes(&mut self, len: usize) -> Result<&'a [u8]> {
        let (bytes, rest) = self.0.split_at_checked(len).context("its directory ends too early")?;
        self.0 = rest;
        Ok(bytes)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N]> {
        Ok(self.bytes(N)?.try_into()?)
    }

    fn u16(&mut self) -> Result<u16> {
        Ok(u16::from_le_bytes(self.array()?))
    }

    fn u32(&mut self) -> Result<u32> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    fn u64(&mut self) -> Result<u64> {
        Ok(u64::from_le_bytes(self.array()?))
    }
}

impl Archive {
    pub(super) fn open(path: &Path) -> Result<Self> {
        let file = Arc::new(File::open(path)?);
        let len = file.metadata()?.len();
        let mut archive = Self { file, len, members: BTreeMap::new() };
        let directory = archive.directory()?;
        let mut fields = Fields(&directory);
        while fields.0.starts_with(&ENTRY) {
            let (name, place) = entry(&mut fields)?;
            if archive.members.insert(name.clone(), place).is_some() {
                bail!("it has two files `{name}`");
            }
        }
        Ok(archive)
    }

    pub(super) fn file(&self) -> Arc<File> {
        Arc::clone(&self.file)
    }

    /// The folder that holds a file of this name, with the slash behind it.
    pub(super) fn folder_of(&self, name: &str) -> Result<String> {
        let folders = self.members.keys().filter_map(|member| member.strip_suffix(name));
        let mut folders = folders.filter(|folder| folder.is_empty() || folder.ends_with('/'));
        match (folders.next(), folders.next()) {
            (Some(folder), None) => Ok(folder.into()),
            (None, _) => bail!("it has no file `{name}`"),
            (Some(_), _) => bail!("it has more than one file `{name}`"),
        }
    }

    pub(super) fn member(&self, name: &str) -> Result<Member> {
        let &(header, len) =
            self.members.get(name).with_context(|| format!("it has no file `{name}`"))?;
        let context = || format!("its file `{name}`");
        let header_bytes: [u8; LOCAL_LEN as usize] = self.array(header).with_context(context)?;
        let mut fields = Fields(&header_bytes);
        ensure!(fields.array()? == LOCAL, "its file `{name}` is not where its directory says");
        fields.bytes(22)?;
        let (name_len, extra_len) = (u64::from(fields.u16()?), u64::from(fields.u16()?));
        let offset = header + LOCAL_LEN + name_len + extra_len;
        let end = offset.checked_add(len);
        ensure!(
            end.is_some_and(|end| end <= self.len),
            "its file `{name}` has {len} bytes at {offset}, the archive {} in all",
            self.len
        );
        Ok(Member { offset, len })
    }

    /// The bytes of a member of at most `limit` bytes.
    pub(super) fn read(&self, name: &str, limit: u64) -> Result<Vec<u8>> {
        let Member { offset, len } = self.member(name)?;
        ensure!(len <= limit, "its file `{name}` has {len} bytes, expected at most {limit}");
        self.bytes(offset, len)
    }

    pub(super) fn read_if_there(&self, name: &str, limit: u64) -> Result<Option<Vec<u8>>> {
        self.members.contains_key(name).then(|| self.read(name, limit)).transpose()
    }

    /// The entries of all members.
    fn directory(&self) -> Result<Vec<u8>> {
        let tail_len = self.len.min((END_LEN + MAX_COMMENT) as u64);
        let tail = self.bytes(self.len - tail_len, tail_len)?;
        let is_end = |&at: &usize| tail[at..].starts_with(&END);
        let last = tail.len().checked_sub(END_LEN);
        let Some(end) = last.and_then(|last| (0..=last).rev().find(is_end)) else {
            bail!("it is no ZIP archive: files of PyTorch before 1.6 are not read, save it again");
        };
        let mut fields = Fields(&tail[end..]);
        fields.bytes(12)?;
        let (mut len, mut offset) = (u64::from(fields.u32()?), u64::from(fields.u32()?));
        if let Some(locator) = end.checked_sub(WIDE_LOCATOR_LEN)
            && tail[locator..].starts_with(&WIDE_LOCATOR)
        {
            let mut fields = Fields(&tail[locator + 8..]);
            let wide: [u8; WIDE_END_LEN] = self.array(fields.u64()?)?;
            ensure!(wide.starts_with(&WIDE_END), "its directory is not where its end says");
            let mut fields = Fields(&wide[40..]);
            (len, offset) = (fields.u64()?, fields.u64()?);
        }
        ensure!(len <= MAX_DIRECTORY, "its directory has {len} bytes, at most {MAX_DIRECTORY}");
        self.bytes(offset, len).context("its directory")
    }

    fn array<const N: usize>(&self, offset: u64) -> Result<[u8; N]> {
        Ok(self.bytes(offset, N as u64)?.as_slice().try_into()?)
    }

    fn bytes(&self, offset: u64, len: u64) -> Result<Vec<u8>> {
        let end = offset.checked_add(len);
        ensure!(
            end.is_some_and(|end| end <= self.len),
            "{len} bytes at {offset} are not in a file of {}",
            self.len
        );
        let mut bytes = vec![0; len as usize];
        self.file.read_exact_at(&mut bytes, offset)?;
        Ok(bytes)
    }
}

/// A member's name, where its local header stands, and its bytes.
fn entry(fields: &mut Fields<'_>) -> Result<(String, (u64, u64))> {
    let mut entry = Fields(fields.bytes(ENTRY_LEN)?);
    entry.bytes(8)?;
    let (flags, method) = (entry.u16()?, entry.u16()?);
    entry.bytes(8)?;
    let (packed, len) = (entry.u32()?, entry.u32()?);
    let lens = [entry.u16()?, entry.u16()?, entry.u16()?].map(usize::from);
    entry.bytes(8)?;
    let header = entry.u32()?;
    let [name_len, extra_len, comment_len] = lens;
    let name = String::from_utf8_lossy(fields.bytes(name_len)?).into_owned();
    let mut extra = Fields(fields.bytes(extra_len)?);
    fields.bytes(comment_len)?;
    let is_encrypted = flags & 1 != 0;
    ensure!(method == 0 && !is_encrypted, "its file `{name}` is compressed or encrypted");

    let mut wide = Fields(&[]);
    while !extra.0.is_empty() {
        let (kind, len) = (extra.u16()?, usize::from(extra.u16()?));
        let bytes = extra.bytes(len)?;
        if kind == WIDE_FIELD {
            wide = Fields(bytes);
        }
    }
    // In this order, and only those that do not fit.
    let mut or_wide = |value| match value {
        IS_WIDE => wide.u64(),
        value => Ok(u64::from(value)),
    };
    let (len, packed, header) = (or_wide(len)?, or_wide(packed)?, or_wide(header)?);
    ensure!(len == packed, "its file `{name}` has {len} bytes, packed {packed}");
    Ok((name, (header, len)))
}
