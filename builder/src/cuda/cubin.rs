//! Reads what a compiled kernel takes from its ELF file: registers, stack, shared memory, size of its parameters.
//! Every offset is checked: the file may come from anywhere.

use anyhow::{Context, Result, bail, ensure};

/// Attributes of `.nv.info` sections that are read.
const PARAM_CBANK: u8 = 0x0a;
const FRAME_SIZE: u8 = 0x11;
const MIN_STACK_SIZE: u8 = 0x12;
const REGISTER_COUNT: u8 = 0x2f;
/// The form of an attribute whose value has a length of its own; of the others it is two bytes.
const SIZED: u8 = 4;

/// An ELF file of NVIDIA's.
#[derive(Clone, Debug)]
pub struct Cubin<'a> {
    sections: Vec<Section<'a>>,
}

/// What a kernel takes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Kernel {
    /// Registers of a thread.
    pub registers: u32,
    /// Bytes of stack of a thread: spilled registers, arrays with computed indices.
    pub stack: u32,
    /// Bytes of shared memory that are known to the compiler.
    pub shared: u64,
    /// Bytes of its parameters.
    pub params: u32,
}

#[derive(Clone, Debug)]
struct Section<'a> {
    name: &'a str,
    /// Empty for a section that takes no room in the file.
    bytes: &'a [u8],
    size: u64,
}

/// One attribute of an `.nv.info` section.
struct Attribute<'a> {
    kind: u8,
    value: &'a [u8],
}

impl<'a> Cubin<'a> {
    /// Reads the table of sections.
    pub fn parse(file: &'a [u8]) -> Result<Self> {
        ensure!(file.starts_with(b"\x7fELF\x02\x01"), "the code is no 64-bit ELF file");
        let table = u64_at(file, 0x28)?;
        let (num_sections, names) = (u16_at(file, 0x3c)?, u16_at(file, 0x3e)?);
        let header = |idx: u16| -> Result<&[u8]> {
            slice(file, table.saturating_add(64 * u64::from(idx)), 64)
        };
        let names = contents(file, header(names)?)?;
        let section = |idx| -> Result<Section<'a>> {
            let header = header(idx)?;
            let name = text_at(names, u32_at(header, 0)? as usize)?;
            Ok(Section { name, bytes: contents(file, header)?, size: u64_at(header, 0x20)? })
        };
        Ok(Self { sections: (0..num_sections).map(section).collect::<Result<_>>()? })
    }

    /// What the kernel of this name takes; an error if there is none.
    pub fn kernel(&self, name: &str) -> Result<Kernel> {
        ensure!(self.section(&format!(".text.{name}")).is_some(), "the code has no entry `{name}`");
        // There is one kernel a file, so the values of the whole file are its own; a function that was not
        // inlined would add its frame.
        let whole = self.attributes(".nv.info")?;
        let largest = |kind| -> Result<u32> {
            let values = whole.iter().filter(|attribute| attribute.kind == kind);
            let values = values.map(|attribute| u32_at(attribute.value, 4));
            Ok(values.collect::<Result<Vec<u32>>>()?.into_iter().max().unwrap_or(0))
        };
        let own = self.attributes(&format!(".nv.info.{name}"))?;
        let params = own.iter().find(|attribute| attribute.kind == PARAM_CBANK);
        Ok(Kernel {
            registers: largest(REGISTER_COUNT)?,
            stack: largest(FRAME_SIZE)?.max(largest(MIN_STACK_SIZE)?),
            shared: self.section(&format!(".nv.shared.{name}")).map_or(0, |section| section.size),
            params: params.map_or(Ok(0), |attribute| u16_at(attribute.value, 6))?.into(),
        })
    }

    fn section(&self, name: &str) -> Option<&Section<'a>> {
        self.sections.iter().find(|section| section.name == name)
    }

    fn attributes(&self, section: &str) -> Result<Vec<Attribute<'a>>> {
        let section =
            self.section(section).with_context(|| format!("the code has no section {section}"))?;
        let mut rest = section.bytes;
        let mut attributes = Vec::new();
        while let Some((&[form, kind, low, high], after)) = rest.split_first_chunk::<4>() {
            let len = if form == SIZED { usize::from(u16::from_le_bytes([low, high])) } else { 0 };
            ensure!(len <= after.len(), "an attribute of {} ends beyond it", section.name);
            attributes.push(Attribute { kind, value: &after[..len] });
            rest = &after[len..];
        }
        Ok(attributes)
    }
}

/// The bytes of the section that a header describes; none if it takes no room in the file.
fn contents<'a>(file: &'a [u8], header: &[u8]) -> Result<&'a [u8]> {
    const NOBITS: u32 = 8;
    match u32_at(header, 4)? {
        NOBITS => Ok(&[]),
        _ => slice(file, u64_at(header, 0x18)?, u64_at(header, 0x20)?),
    }
}

fn slice(bytes: &[u8], start: u64, len: u64) -> Result<&[u8]> {
    let end = start.checked_add(len).filter(|&end| end <= bytes.len() as u64);
    let Some(end) = end else {
        bail!("{len} bytes at {start} are beyond the {} bytes of the code", bytes.len());
    };
    Ok(&bytes[start as usize..end as usize])
}

fn u16_at(bytes: &[u8], at: u64) -> Result<u16> {
    let bytes = slice(bytes, at, 2)?;
    Ok(u16::from_le_bytes([bytes[0], bytes[1]]))
}

fn u32_at(bytes: &[u8], at: u64) -> Result<u32> {
    Ok(u32::from(u16_at(bytes, at)?) | u32::from(u16_at(bytes, at + 2)?) << 16)
}

fn u64_at(bytes: &[u8], at: u64) -> Result<u64> {
    Ok(u64::from(u32_at(bytes, at)?) | u64::from(u32_at(bytes, at + 4)?) << 32)
}

fn text_at(bytes: &[u8], at: usize) -> Result<&str> {
    let rest = bytes.get(at..).context("a name beyond the names")?;
    let end = rest.iter().position(|&byte| byte == 0).context("a name without an end")?;
    Ok(std::str::from_utf8(&rest[..end])?)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An ELF file of these sections; a length stands for one without contents.
    fn elf(sections: &[(&str, Result<&[u8], u64>)]) -> Vec<u8> {
        let mut names = vec![0];
        let mut data = Vec::new();
        let mut headers = Vec::new();
        let mut header = |names: &mut Vec<u8>, name: &str, kind: u32, at: u64, size: u64| {
            let mut header = [0; 64];
            header[..4].copy_from_slice(&(names.len() as u32).to_le_bytes());
            header[4..8].copy_from_slice(&kind.to_le_bytes());
            header[0x18..0x20].copy_from_slice(&at.to_le_bytes());
            header[0x20..0x28].copy_from_slice(&size.to_le_bytes());
            names.extend(name.bytes().chain([0]));
            headers.extend(header);
        };
        for (name, contents) in sections {
            let at = 64 + data.len() as u64;
            match contents {
                Ok(bytes) => {
                    header(&mut names, name, 1, at, bytes.len() as u64);
                    data.extend_from_slice(bytes);
                }
                Err(size) => header(&mut names, name, 8, at, *size),
            }
        }
        let size = (names.len() + ".shstrtab".len() + 1) as u64;
        let at = 64 + data.len() as u64;
        header(&mut names, ".shstrtab", 3, at, size);
        let mut file = b"\x7fELF\x02\x01".to_vec();
        file.resize(64, 0);
        file[0x28..0x30].copy_from_slice(&(at + size).to_le_bytes());
        file[0x3c..0x3e].copy_from_slice(&(sections.len() as u16 + 1).to_le_bytes());
        file[0x3e..0x40].copy_from_slice(&(sections.len() as u16).to_le_bytes());
        [file, data, names, headers].concat()
    }

    fn sized(kind: u8, value: &[u8]) -> Vec<u8> {
        [&[SIZED, kind, value.len() as u8, 0], value].concat()
    }

    fn sample() -> Vec<u8> {
        let count = |kind, value: u32| sized(kind, &[[9, 0, 0, 0], value.to_le_bytes()].concat());
        let info = [count(REGISTER_COUNT, 77), count(FRAME_SIZE, 16), count(MIN_STACK_SIZE, 24)];
        let own = [vec![3, 0x1b, 0xff, 0], sized(PARAM_CBANK, &[9, 0, 0, 0, 0x10, 2, 0x98, 0])];
        elf(&[
            (".nv.info", Ok(&info.concat())),
            (".nv.info.gemm", Ok(&own.concat())),
            (".text.gemm", Ok(&[1, 2, 3])),
            (".nv.shared.gemm", Err(1280)),
        ])
    }

    #[test]
    fn resources_are_read() {
        let file = sample();
        let kernel = Cubin::parse(&file).unwrap().kernel("gemm").unwrap();
        assert_eq!(kernel, Kernel { registers: 77, stack: 24, shared: 1280, params: 0x98 });
    }

    #[test]
    fn another_entry_is_an_error() {
        let file = sample();
        let error = Cubin::parse(&file).unwrap().kernel("rope").unwrap_err();
        assert_eq!(error.to_string(), "the code has no entry `rope`");
    }

    #[test]
    fn damage_never_panics() {
        let file = sample();
        let read = |file: &[u8]| Cubin::parse(file).and_then(|cubin| cubin.kernel("gemm"));
        for len in 0..file.len() {
            assert!(read(&file[..len]).is_err(), "{len} bytes");
        }
        for byte in 0..file.len() {
            for value in [0, 0x7f, 0xff] {
                let mut damaged = file.clone();
                damaged[byte] = value;
                let _ = read(&damaged);
            }
        }
    }
}
