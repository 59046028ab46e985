//! Files that `torch.save` writes (`pytorch_model.bin`, `.pt`): a ZIP archive of a pickle and of one file for each
//! storage. The pickle is a program; here it is read by a machine that can make a dictionary of tensors and nothing else.

mod archive;
mod pickle;
#[cfg(test)]
mod tests;

use super::safetensors::Stored;
use anyhow::{Context, Result, bail, ensure};
use archive::Archive;
use pickle::{Tensor, Value};
use std::path::Path;
use std::rc::Rc;

/// Bytes of a pickle at most: names and shapes, no weights. Each may make a value of 32.
const MAX_PICKLE: u64 = 16 << 20;

/// The tensors of a file.
pub(super) fn open(path: &Path) -> Result<Vec<Stored>> {
    read(path).with_context(|| format!("reading {}", path.display()))
}

fn read(path: &Path) -> Result<Vec<Stored>> {
    let archive = Archive::open(path)?;
    let folder = archive.folder_of("data.pkl")?;
    if let Some(order) = archive.read_if_there(&format!("{folder}byteorder"), 16)? {
        let order = String::from_utf8_lossy(&order).into_owned();
        ensure!(order == "little", "its numbers are `{order}` endian, expected little");
    }
    let program = archive.read(&format!("{folder}data.pkl"), MAX_PICKLE)?;
    let tensors = pickle::run(&program).context("its data.pkl")?;
    let mut names: Vec<&str> = tensors.iter().map(|(name, _)| &**name).collect();
    names.sort_unstable();
    if let Some(pair) = names.windows(2).find(|pair| pair[0] == pair[1]) {
        bail!("tensor `{}` appears twice", pair[0]);
    }
    let stored = |(name, value): (Rc<str>, Value)| {
        let Value::Tensor(tensor) = value else {
            bail!("`{name}` is {}, expected a tensor", value.kind());
        };
        locate(&archive, &folder, &name, &tensor).with_context(|| format!("tensor `{name}`"))
    };
    tensors.into_iter().map(stored).collect()
}

/// Where a tensor's values are in the file.
fn locate(archive: &Archive, folder: &str, name: &str, tensor: &Tensor) -> Result<Stored> {
    let Tensor { storage, first, shape, strides } = tensor;
    let (dtype, bytes) = number_format(&storage.class)?;
    ensure!(
        is_contiguous(shape, strides),
        "its shape {shape:?} lies in steps of {strides:?}, expected one value behind the other"
    );
    let count = shape.iter().try_fold(1u64, |product, &size| product.checked_mul(size));
    let end = count.and_then(|count| count.checked_add(*first)?.checked_mul(bytes));
    let member = archive.member(&format!("{folder}data/{}", storage.key))?;
    let Some(_) = end.filter(|&end| end <= member.len) else {
        bail!(
            "its shape is {shape:?} from value {first} on, its storage has {} values",
            member.len / bytes
        );
    };
    Ok(Stored {
        name: name.into(),
        dtype: dtype.into(),
        shape: shape.iter().map(|&size| Ok(usize::try_from(size)?)).collect::<Result<_>>()?,
        file: archive.file(),
        offset: member.offset + first * bytes,
    })
}

/// What safetensors calls the number format of a storage class, and its bytes.
fn number_format(class: &str) -> Result<(&'static str, u64)> {
    Ok(match class {
        "FloatStorage" => ("F32", 4),
        "HalfStorage" => ("F16", 2),
        "BFloat16Storage" => ("BF16", 2),
        "DoubleStorage" => ("F64", 8),
        "LongStorage" => ("I64", 8),
        "IntStorage" => ("I32", 4),
        "ShortStorage" => ("I16", 2),
        "CharStorage" => ("I8", 1),
        "ByteStorage" => ("U8", 1),
        "BoolStorage" => ("BOOL", 1),
        _ => bail!("its storage is a `{class}`, which is not supported"),
    })
}

/// Whether rows lie one behind the other. How far apart the values of a dimension of one are does not matter.
fn is_contiguous(shape: &[u64], strides: &[u64]) -> bool {
    let mut step = Some(1u64);
    shape.len() == strides.len()
        && shape.iter().zip(strides).rev().all(|(&size, &stride)| {
            let fits = size <= 1 || step == Some(stride);
            step = step.and_then(|step| step.checked_mul(size));
            fits
        })
}
