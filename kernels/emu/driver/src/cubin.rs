//! Compiled code as NVRTC writes it: an ELF file whose extra sections say what a kernel takes. Read from a bare pointer,
//! as the interface hands it over: the headers say where it ends.
#![allow(unsafe_code)]

use std::slice;

const HEADER_BYTES: usize = 64;
const SECTION_BYTES: usize = 64;
const SYMBOL_BYTES: usize = 24;

/// `EM_CUDA`.
const MACHINE: u16 = 190;
/// Code as the tools of CUDA 13 write it has the architecture in bits 8 to 15 of the flags.
const ABI_VERSION: u8 = 8;
/// A section without bytes in the file.
const NO_BITS: u32 = 8;
const SYMBOLS: u32 = 2;
/// A global function, in a symbol's info.
const GLOBAL_FUNCTION: u8 = 0x12;

/// Attributes of a kernel, and the forms that they come in.
const WITH_BYTES: u8 = 4;
const TWO_BYTES: u8 = 3;
const MAX_THREADS: u8 = 0x05;
const PARAM_BYTES: u8 = 0x19;
/// Of a whole file: whether it is for one architecture alone, such as sm_90a.
const ONE_TARGET: u8 = 0x09;

/// A file of code.
pub(crate) struct Cubin {
    /// BLAKE3 of all of it.
    pub(crate) hash: String,
    /// Such as 90.
    pub(crate) sm: u32,
    /// Runs on this architecture alone.
    pub(crate) is_for_one: bool,
    pub(crate) kernels: Vec<Kernel>,
}

/// Threads that a block has at most.
const MOST_THREADS: u32 = 1024;

/// A kernel in it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Kernel {
    pub(crate) name: String,
    /// Threads that a block can have: what the code says, or what any block can.
    pub(crate) max_threads: u32,
    pub(crate) param_bytes: usize,
    /// Shared memory besides what a launch asks for.
    pub(crate) shared_bytes: u32,
}

struct Section<'a> {
    name: &'a str,
    kind: u32,
    bytes: usize,
    /// Empty where the file holds nothing of it.
    data: &'a [u8],
}

impl Cubin {
    /// # Safety
    /// `image` points to a whole ELF file, or to [`HEADER_BYTES`] that are not one's beginning.
    pub(crate) unsafe fn read(image: *const u8) -> Result<Self, String> {
        // SAFETY: the caller says so.
        let header = unsafe { slice::from_raw_parts(image, HEADER_BYTES) };
        check_header(header)?;
        let table = at(header, 40)? as usize;
        let num_sections = usize::from(two(header, 60)?);
        // SAFETY: the file is whole, so its table of sections is there.
        let all = unsafe { slice::from_raw_parts(image, table + num_sections * SECTION_BYTES) };
        let end = end_of(all, table)?;
        // SAFETY: likewise what the table and the header speak of.
        Self::parse(unsafe { slice::from_raw_parts(image, end) })
    }

    /// Takes a file whose header has been checked.
    fn parse(file: &[u8]) -> Result<Self, String> {
        let sections = sections(file)?;
        let find = |name: &str| sections.iter().find(|section| section.name == name);
        let compatibility =
            find(".nv.compat").map_or(Ok(Vec::new()), |found| attributes(found.data))?;
        let one = compatibility.iter().find(|(attribute, _)| *attribute == ONE_TARGET);
        let mut kernels = Vec::new();
        for name in function_names(&sections)? {
            let info = find(&format!(".nv.info.{name}"));
            let info = attributes(info.ok_or(format!("nothing about {name}"))?.data)?;
            let value = |wanted| info.iter().find(|(attribute, _)| *attribute == wanted);
            let shared = find(&format!(".nv.shared.{name}"));
            kernels.push(Kernel {
                max_threads: value(MAX_THREADS).map_or(MOST_THREADS, |(_, value)| *value),
                param_bytes: value(PARAM_BYTES).map_or(0, |(_, value)| *value as usize),
                shared_bytes: shared.map_or(0, |section| section.bytes as u32),
                name,
            });
        }
        Ok(Self {
            hash: blake3::hash(file).to_hex().to_string(),
            sm: four(file, 48)? >> 8 & 0xff,
            is_for_one: one.is_some_and(|(_, value)| *value != 0),
            kernels,
        })
    }
}

fn check_header(header: &[u8]) -> Result<(), String> {
    if !header.starts_with(b"\x7fELF\x02\x01\x01") {
        return Err(format!("no ELF file, it begins {:02x?}", &header[..8]));
    }
    let (machine, abi) = (two(header, 18)?, header[8]);
    if machine != MACHINE || abi != ABI_VERSION {
        return Err(format!("an ELF file of machine {machine}, version {abi}"));
    }
    Ok(())
}

/// Where the last section or table ends.
fn end_of(file: &[u8], table: usize) -> Result<usize, String> {
    let segments =
        at(file, 32)? as usize + usize::from(two(file, 54)?) * usize::from(two(file, 56)?);
    let mut end = segments.max(file.len());
    for entry in file[table..].chunks_exact(SECTION_BYTES) {
        if four(entry, 4)? != NO_BITS {
            end = end.max((at(entry, 24)? + at(entry, 32)?) as usize);
        }
    }
    Ok(end)
}

fn sections(file: &[u8]) -> Result<Vec<Section<'_>>, String> {
    let table = at(file, 40)? as usize;
    let (num, names) = (usize::from(two(file, 60)?), usize::from(two(file, 62)?));
    let entry = |idx: usize| part(file, table + idx * SECTION_BYTES, SECTION_BYTES);
    let data = |entry: &[u8]| match four(entry, 4)? {
        NO_BITS => Ok(&file[..0]),
        _ => part(file, at(entry, 24)? as usize, at(entry, 32)? as usize),
    };
    let names = data(entry(names)?)?;
    let section = |idx| {
        let entry = entry(idx)?;
        let (kind, bytes) = (four(entry, 4)?, at(entry, 32)? as usize);
        Ok(Section { name: text(names, four(entry, 0)?)?, kind, bytes, data: data(entry)? })
    };
    (0..num).map(section).collect()
}

/// Names of the global functions.
fn function_names(sections: &[Section<'_>]) -> Result<Vec<String>, String> {
    let symbols = sections.iter().find(|section| section.kind == SYMBOLS).ok_or("no symbols")?;
    let names = sections.iter().find(|section| section.name == ".strtab").ok_or("no names")?;
    let functions = symbols.data.chunks_exact(SYMBOL_BYTES).filter(|s| s[4] == GLOBAL_FUNCTION);
    functions.map(|symbol| Ok(text(names.data, four(symbol, 0)?)?.to_owned())).collect()
}

/// Each attribute with the first number of its value.
fn attributes(mut data: &[u8]) -> Result<Vec<(u8, u32)>, String> {
    let mut found = Vec::new();
    while !data.is_empty() {
        let (form, attribute, short) = (data[0], part(data, 1, 1)?[0], two(data, 2)?);
        let bytes = if form == WITH_BYTES { usize::from(short) } else { 0 };
        let value = match form {
            WITH_BYTES => four(data, 4).unwrap_or(0),
            TWO_BYTES => u32::from(short),
            _ => u32::from(short & 0xff),
        };
        found.push((attribute, value));
        data = &data[4..];
        data = part(data, bytes, data.len().saturating_sub(bytes))?;
    }
    Ok(found)
}

fn part(data: &[u8], start: usize, bytes: usize) -> Result<&[u8], String> {
    let end = start.checked_add(bytes).filter(|end| *end <= data.len());
    end.map(|end| &data[start..end])
        .ok_or_else(|| format!("{bytes} bytes at {start} are not there"))
}

fn text(names: &[u8], start: u32) -> Result<&str, String> {
    let rest = part(names, start as usize, names.len().saturating_sub(start as usize))?;
    let name = rest.split(|byte| *byte == 0).next().unwrap_or_default();
    str::from_utf8(name).map_err(|_| format!("a name {name:?}"))
}

fn two(data: &[u8], start: usize) -> Result<u16, String> {
    part(data, start, 2).map(|bytes| u16::from_le_bytes([bytes[0], bytes[1]]))
}

fn four(data: &[u8], start: usize) -> Result<u32, String> {
    Ok(u32::from(two(data, start)?) | u32::from(two(data, start + 2)?) << 16)
}

fn at(data: &[u8], start: usize) -> Result<u64, String> {
    Ok(u64::from(four(data, start)?) | u64::from(four(data, start + 4)?) << 32)
}
