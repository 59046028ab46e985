//! The one file that knows GGUF's bytes, versions 2 and 3: key-value metadata, tensor table, data.
//! Lengths and counts are checked against what is left of the file before anything is allocated;
//! arrays are skipped while opening and read when asked for.

use super::encoding::Encoding;
use anyhow::{Context, Result, bail, ensure};
use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{BufReader, Read, Seek, SeekFrom};
use std::path::Path;
use std::sync::Arc;

pub(super) const MAGIC: &[u8; 4] = b"GGUF";

/// Bytes of metadata and tensor table at most; the largest vocabularies take some 20 MiB.
const MAX_HEADER: u64 = 256 << 20;
/// Elements of an array that is read at most.
const MAX_LIST: u64 = 1 << 23;
/// Tensors, and metadata values, at most: far more than a model has.
const MAX_ENTRIES: u64 = 1 << 16;
const MAX_DIMENSIONS: u32 = 4;

/// The numbers of value types.
mod kind {
    pub(super) const U32: u32 = 4;
    pub(super) const I32: u32 = 5;
    pub(super) const F32: u32 = 6;
    pub(super) const STRING: u32 = 8;
    pub(super) const LIST: u32 = 9;
}

/// A metadata value.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Value {
    Uint(u64),
    Int(i64),
    Float(f64),
    Bool(bool),
    Text(String),
    /// An array: type and number of its elements, and where they begin.
    List {
        kind: u32,
        len: u64,
        offset: u64,
    },
}

/// A tensor as the table states it, checked against the file.
#[derive(Clone, Debug)]
pub(super) struct Stored {
    pub(super) name: String,
    pub(super) encoding: Encoding,
    /// Outermost first, the reverse of the file's order.
    pub(super) shape: Vec<usize>,
    /// From the start of the file.
    pub(super) offset: u64,
    bytes: u64,
}

/// An opened GGUF file.
#[derive(Debug)]
pub(super) struct Gguf {
    pub(super) file: Arc<File>,
    pub(super) metadata: BTreeMap<String, Value>,
    pub(super) tensors: Vec<Stored>,
}

impl Gguf {
    pub(super) fn open(path: &Path) -> Result<Self> {
        let file = Arc::new(File::open(path)?);
        let file_len = file.metadata()?.len();
        let mut cursor = Cursor::new(&file, 0, file_len.min(MAX_HEADER))?;
        let (num_tensors, num_values) = preamble(&mut cursor)?;
        let metadata = read_metadata(&mut cursor, num_values)?;
        let mut tensors = read_table(&mut cursor, num_tensors)?;
        let alignment = match metadata.get("general.alignment") {
            None => 32,
            Some(Value::Uint(n)) if n.is_power_of_two() && *n <= 1 << 16 => *n,
            Some(other) => bail!("general.alignment is {other:?}, expected a power of two"),
        };
        place(&mut tensors, cursor.at.next_multiple_of(alignment), alignment, file_len)?;
        Ok(Self { file, metadata, tensors })
    }

    pub(super) fn strings(&self, key: &str) -> Result<Option<Vec<String>>> {
        self.list(key, kind::STRING, 8, |cursor| cursor.string())
    }

    /// An array of 32-bit floats.
    pub(super) fn floats(&self, key: &str) -> Result<Option<Vec<f32>>> {
        self.list(key, kind::F32, 4, |cursor| Ok(f32::from_bits(cursor.u32()?)))
    }

    /// An array of 32-bit integers, signed or not.
    pub(super) fn integers(&self, key: &str) -> Result<Option<Vec<i32>>> {
        let unsigned = matches!(self.metadata.get(key), Some(Value::List { kind: kind::U32, .. }));
        let kind = if unsigned { kind::U32 } else { kind::I32 };
        self.list(key, kind, 4, |cursor| Ok(cursor.u32()? as i32))
    }

    fn list<T>(
        &self,
        key: &str,
        expected: u32,
        least_bytes: u64,
        read: impl Fn(&mut Cursor<'_>) -> Result<T>,
    ) -> Result<Option<Vec<T>>> {
        let (len, offset) = match self.metadata.get(key) {
            None => return Ok(None),
            Some(Value::List { kind, len, offset }) if *kind == expected => (*len, *offset),
            Some(other) => bail!("{key} is {other:?}, expected an array of type {expected}"),
        };
        ensure!(len <= MAX_LIST, "{key} has {len} elements, at most {MAX_LIST} are read");
        let mut cursor = Cursor::new(&self.file, offset, self.file.metadata()?.len())?;
        cursor.room_for(len, least_bytes).with_context(|| key.to_string())?;
        let read_one = |idx| read(&mut cursor).with_context(|| format!("{key}: element {idx}"));
        (0..len).map(read_one).collect::<Result<_>>().map(Some)
    }
}

/// Magic, version and counts.
fn preamble(cursor: &mut Cursor<'_>) -> Result<(u64, u64)> {
    let mut magic = [0; 4];
    cursor.fill(&mut magic)?;
    ensure!(magic == *MAGIC, "its magic is {magic:?}, expected {MAGIC:?}");
    let version = cursor.u32()?;
    if (2..=3).contains(&version.swap_bytes()) {
        bail!("it is a big-endian GGUF file, expected little-endian");
    }
    ensure!((2..=3).contains(&version), "it is GGUF version {version}, expected 2 or 3");
    let (num_tensors, num_values) = (cursor.u64()?, cursor.u64()?);
    // The shortest entries: an empty name, no dimension; an empty key, one byte of value.
    cursor.room_for(num_tensors, 8 + 4 + 4 + 8).context("its tensor count")?;
    cursor.room_for(num_values, 8 + 4 + 1).context("its metadata count")?;
    for (what, count) in [("tensors", num_tensors), ("metadata values", num_values)] {
        ensure!(count <= MAX_ENTRIES, "it has {count} {what}, at most {MAX_ENTRIES} are read");
    }
    Ok((num_tensors, num_values))
}

fn read_metadata(cursor: &mut Cursor<'_>, num_values: u64) -> Result<BTreeMap<String, Value>> {
    let mut metadata = BTreeMap::new();
    for idx in 0..num_values {
        let key = cursor.string().with_context(|| format!("metadata key {idx}"))?;
        let value = cursor
            .u32()
            .and_then(|kind| cursor.value(kind))
            .with_context(|| format!("metadata `{key}`"))?;
        if metadata.insert(key.clone(), value).is_some() {
            bail!("metadata `{key}` appears twice");
        }
    }
    Ok(metadata)
}

/// The tensor table; offsets are still those of the file, relative to the data.
fn read_table(cursor: &mut Cursor<'_>, num_tensors: u64) -> Result<Vec<Stored>> {
    let mut tensors = Vec::new();
    let mut names = BTreeSet::new();
    for idx in 0..num_tensors {
        let name = cursor.string().with_context(|| format!("name of tensor {idx}"))?;
        let tensor = read_entry(cursor, name).with_context(|| format!("entry of tensor {idx}"))?;
        ensure!(names.insert(tensor.name.clone()), "tensor `{}` appears twice", tensor.name);
        tensors.push(tensor);
    }
    Ok(tensors)
}

fn read_entry(cursor: &mut Cursor<'_>, name: String) -> Result<Stored> {
    let dimensions = cursor.u32()?;
    ensure!(
        (1..=MAX_DIMENSIONS).contains(&dimensions),
        "tensor `{name}` has {dimensions} dimensions, expected 1 to {MAX_DIMENSIONS}"
    );
    let sizes = (0..dimensions).map(|_| cursor.u64()).collect::<Result<Vec<u64>>>()?;
    let encoding = Encoding::from_ggml(cursor.u32()?).map_err(|unread| {
        anyhow::anyhow!("tensor `{name}`: type {unread} is not supported: convert to another")
    })?;
    let (block_len, block_bytes) = (encoding.block_len() as u64, encoding.block_bytes() as u64);
    ensure!(
        sizes[0].is_multiple_of(block_len),
        "tensor `{name}`: rows of {} are no multiple of {block_len}, a block of {}",
        sizes[0],
        encoding.name()
    );
    ensure!(
        dimensions > 1 || block_len == 1,
        "tensor `{name}`: a vector in {} is not supported",
        encoding.name()
    );
    let bytes = sizes[1..]
        .iter()
        .try_fold(sizes[0] / block_len, |product, size| product.checked_mul(*size))
        .and_then(|blocks| blocks.checked_mul(block_bytes));
    let bytes = bytes.with_context(|| format!("tensor `{name}`: its size overflows: {sizes:?}"))?;
    let shape =
        sizes.iter().rev().map(|size| Ok(usize::try_from(*size)?)).collect::<Result<_>>()?;
    Ok(Stored { name, encoding, shape, offset: cursor.u64()?, bytes })
}

/// Makes offsets absolute; refuses tensors that lie outside the file or over each other.
fn place(tensors: &mut [Stored], data_start: u64, alignment: u64, file_len: u64) -> Result<()> {
    for tensor in &mut *tensors {
        let (name, relative) = (&tensor.name, tensor.offset);
        ensure!(
            relative.is_multiple_of(alignment),
            "tensor `{name}` is at {relative}, expected a multiple of {alignment}"
        );
        let end = data_start.checked_add(relative).and_then(|at| at.checked_add(tensor.bytes));
        ensure!(
            end.is_some_and(|end| end <= file_len),
            "tensor `{name}` takes {} bytes from {relative}, after the end of the file: its data \
             has {} bytes",
            tensor.bytes,
            file_len.saturating_sub(data_start)
        );
        tensor.offset = data_start + relative;
    }
    let mut order: Vec<&Stored> = tensors.iter().collect();
    order.sort_by_key(|tensor| (tensor.offset, tensor.bytes));
    for pair in order.windows(2) {
        ensure!(
            pair[0].offset + pair[0].bytes <= pair[1].offset,
            "tensors `{}` and `{}` overlap",
            pair[0].name,
            pair[1].name
        );
    }
    Ok(())
}

/// A reader that knows how far it may go.
struct Cursor<'a> {
    reader: BufReader<&'a File>,
    at: u64,
    end: u64,
}

impl<'a> Cursor<'a> {
    fn new(file: &'a File, at: u64, end: u64) -> Result<Self> {
        let mut reader = BufReader::with_capacity(1 << 16, file);
        reader.seek(SeekFrom::Start(at))?;
        Ok(Self { reader, at, end })
    }

    /// Refuses `count` entries of at least `bytes` each that cannot be in what is left.
    fn room_for(&self, count: u64, bytes: u64) -> Result<()> {
        let left = self.end.saturating_sub(self.at);
        ensure!(
            count <= left / bytes,
            "{count} entries are claimed at byte {}, {left} bytes are left",
            self.at
        );
        Ok(())
    }

    fn fill(&mut self, out: &mut [u8]) -> Result<()> {
        self.room_for(out.len() as u64, 1)?;
        self.reader.read_exact(out)?;
        self.at += out.len() as u64;
        Ok(())
    }

    fn skip(&mut self, bytes: u64) -> Result<()> {
        self.room_for(bytes, 1)?;
        self.reader.seek_relative(i64::try_from(bytes)?)?;
        self.at += bytes;
        Ok(())
    }

    fn bytes<const N: usize>(&mut self) -> Result<[u8; N]> {
        let mut bytes = [0; N];
        self.fill(&mut bytes)?;
        Ok(bytes)
    }

    fn u32(&mut self) -> Result<u32> {
        self.bytes().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Result<u64> {
        self.bytes().map(u64::from_le_bytes)
    }

    fn string(&mut self) -> Result<String> {
        let len = self.u64()?;
        self.room_for(len, 1)?;
        let mut bytes = vec![0; usize::try_from(len)?];
        self.fill(&mut bytes)?;
        Ok(String::from_utf8(bytes)?)
    }

    fn value(&mut self, kind: u32) -> Result<Value> {
        Ok(match kind {
            0 => Value::Uint(u64::from(self.bytes::<1>()?[0])),
            1 => Value::Int(i64::from(self.bytes::<1>()?[0] as i8)),
            2 => Value::Uint(u64::from(u16::from_le_bytes(self.bytes()?))),
            3 => Value::Int(i64::from(i16::from_le_bytes(self.bytes()?))),
            kind::U32 => Value::Uint(u64::from(self.u32()?)),
            kind::I32 => Value::Int(i64::from(self.u32()? as i32)),
            kind::F32 => Value::Float(f64::from(f32::from_bits(self.u32()?))),
            7 => match self.bytes::<1>()?[0] {
                flag @ 0..=1 => Value::Bool(flag == 1),
                other => bail!("a truth value is {other}, expected 0 or 1"),
            },
            kind::STRING => Value::Text(self.string()?),
            kind::LIST => self.pass_list()?,
            10 => Value::Uint(self.u64()?),
            11 => Value::Int(self.u64()? as i64),
            12 => Value::Float(f64::from_bits(self.u64()?)),
            other => bail!("value type {other} is unknown"),
        })
    }

    /// Notes where an array is and goes past it.
    fn pass_list(&mut self) -> Result<Value> {
        let (kind, len) = (self.u32()?, self.u64()?);
        let offset = self.at;
        let each = match kind {
            0 | 1 | 7 => 1,
            2 | 3 => 2,
            4..=6 => 4,
            10..=12 => 8,
            kind::STRING => {
                self.room_for(len, 8)?;
                for _ in 0..len {
                    let string_len = self.u64()?;
                    self.skip(string_len)?;
                }
                return Ok(Value::List { kind, len, offset });
            }
            other => bail!("an array of value type {other} is not supported"),
        };
        self.room_for(len, each)?;
        self.skip(len * each)?;
        Ok(Value::List { kind, len, offset })
    }
}
