//! The one file that knows safetensors' bytes: a u64 length, a JSON header, the data. Reads only the
//! header, bounded; checks every offset against the file and every size against its shape. The crate of that name, which the
//! tests compare with, wants the whole file in memory, and its errors name neither the file nor the two values.

use anyhow::{Context, Result, bail, ensure};
use serde::de::{Error as _, IgnoredAny, MapAccess, Visitor};
use serde::{Deserialize, Deserializer};
use std::fmt;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

/// Bytes of a header at most: the format's own limit.
const MAX_HEADER: u64 = 100_000_000;

/// A tensor as the header states it, checked against the file.
#[derive(Clone, Debug)]
pub(super) struct Stored {
    pub(super) name: String,
    /// The format's own name of the number format.
    pub(super) dtype: String,
    pub(super) shape: Vec<usize>,
    pub(super) file: Arc<File>,
    /// From the start of the file.
    pub(super) offset: u64,
}

#[derive(Deserialize)]
struct Info {
    dtype: String,
    shape: Vec<u64>,
    data_offsets: (u64, u64),
}

/// The tensors of a header in its order, duplicates refused.
struct Header(Vec<(String, Info)>);

impl<'de> Deserialize<'de> for Header {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Entries;
        impl<'de> Visitor<'de> for Entries {
            type Value = Header;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of tensors")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Header, A::Error> {
                let mut entries = Vec::new();
                while let Some(name) = map.next_key::<String>()? {
                    if name == "__metadata__" {
                        map.next_value::<IgnoredAny>()?;
                        continue;
                    }
                    let info = map.next_value().map_err(|error| {
                        A::Error::custom(format_args!("tensor `{name}`: {error}"))
                    })?;
                    entries.push((name, info));
                }
                Ok(Header(entries))
            }
        }
        deserializer.deserialize_map(Entries)
    }
}

pub(super) fn open(path: &Path) -> Result<Vec<Stored>> {
    read(path).with_context(|| format!("reading {}", path.display()))
}

fn read(path: &Path) -> Result<Vec<Stored>> {
    let file = Arc::new(File::open(path)?);
    let file_len = file.metadata()?.len();
    let mut length = [0; 8];
    ensure!(file_len >= 8, "it has {file_len} bytes, a safetensors file has at least 8");
    file.read_exact_at(&mut length, 0)?;
    let header_len = u64::from_le_bytes(length);
    let most = MAX_HEADER.min(file_len - 8);
    ensure!(
        header_len <= most,
        "its header claims {header_len} bytes, at most {most} are possible"
    );
    let mut header = vec![0; header_len as usize];
    file.read_exact_at(&mut header, 8)?;
    let Header(entries) = serde_json::from_slice(&header).context("its header")?;

    let data_start = 8 + header_len;
    let data_len = file_len - data_start;
    check_coverage(&entries, data_len)?;
    entries
        .into_iter()
        .map(|(name, info)| {
            let shape = check_size(&info).with_context(|| format!("tensor `{name}`"))?;
            let offset = data_start + info.data_offsets.0;
            Ok(Stored { name, dtype: info.dtype, shape, file: file.clone(), offset })
        })
        .collect()
}

/// Tensors must cover the data without gap or overlap, and no name may appear twice.
fn check_coverage(entries: &[(String, Info)], data_len: u64) -> Result<()> {
    let mut by_offset: Vec<_> = entries.iter().collect();
    by_offset.sort_by_key(|(_, info)| info.data_offsets);
    let mut end = 0;
    for (name, info) in by_offset {
        let (from, to) = info.data_offsets;
        ensure!(
            from == end && to >= from && to <= data_len,
            "tensor `{name}` is at {from}..{to}, expected from {end} to at most {data_len}"
        );
        end = to;
    }
    ensure!(end == data_len, "its tensors end at {end}, its data at {data_len}");
    let mut names: Vec<_> = entries.iter().map(|(name, _)| name).collect();
    names.sort();
    if let Some(pair) = names.windows(2).find(|pair| pair[0] == pair[1]) {
        bail!("tensor `{}` appears twice", pair[0]);
    }
    Ok(())
}

fn check_size(info: &Info) -> Result<Vec<usize>> {
    let bits = dtype_bits(&info.dtype)
        .with_context(|| format!("its dtype `{}` is unknown", info.dtype))?;
    let (from, to) = info.data_offsets;
    let bytes = info
        .shape
        .iter()
        .try_fold(bits, |product, size| product.checked_mul(*size))
        .map(|bits| bits.div_ceil(8));
    ensure!(
        bytes == Some(to - from),
        "it has {} bytes, its shape {:?} in {} another number",
        to - from,
        info.shape,
        info.dtype
    );
    info.shape.iter().map(|size| Ok(usize::try_from(*size)?)).collect()
}

fn dtype_bits(dtype: &str) -> Option<u64> {
    Some(match dtype {
        "F4" => 4,
        "F6_E2M3" | "F6_E3M2" => 6,
        "BOOL" | "U8" | "I8" | "F8_E5M2" | "F8_E4M3" | "F8_E8M0" => 8,
        "I16" | "U16" | "F16" | "BF16" => 16,
        "I32" | "U32" | "F32" => 32,
        "I64" | "U64" | "F64" | "C64" => 64,
        _ => return None,
    })
}
