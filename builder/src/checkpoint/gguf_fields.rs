//! Metadata of a GGUF file by key and type, with errors that name the key and what was found.

use super::family::{FAMILIES, FamilyRow};
use super::gguf::{Gguf, Value};
use anyhow::{Context, Result, bail};

/// Metadata by type. Names without the architecture's prefix get it, the `_at` forms take full keys.
pub(super) struct Fields<'a> {
    pub(super) gguf: &'a Gguf,
    pub(super) arch: &'a str,
    pub(super) row: &'static FamilyRow,
}

impl<'a> Fields<'a> {
    pub(super) fn new(gguf: &'a Gguf) -> Result<Self> {
        let arch = match gguf.metadata.get("general.architecture") {
            Some(Value::Text(arch)) => arch.as_str(),
            other => bail!("general.architecture is {other:?}, expected a string"),
        };
        let row = FAMILIES.iter().find(|row| row.gguf == Some(arch)).with_context(|| {
            let known: Vec<_> = FAMILIES.iter().filter_map(|row| row.gguf).collect();
            format!("architecture `{arch}` is not supported: expected one of {}", known.join(", "))
        })?;
        Ok(Self { gguf, arch, row })
    }

    fn read<T>(
        &self,
        key: &str,
        what: &str,
        as_type: impl Fn(&'a Value) -> Option<T>,
    ) -> Result<Option<T>> {
        let Some(value) = self.gguf.metadata.get(key) else { return Ok(None) };
        match as_type(value) {
            Some(value) => Ok(Some(value)),
            None => bail!("{key} is {value:?}, expected {what}"),
        }
    }

    pub(super) fn size_at(&self, key: &str) -> Result<Option<usize>> {
        self.read(key, "a whole number", |value| match value {
            Value::Uint(n) => usize::try_from(*n).ok(),
            Value::Int(n) => usize::try_from(*n).ok(),
            _ => None,
        })
    }

    pub(super) fn size(&self, name: &str) -> Result<Option<usize>> {
        self.size_at(&format!("{}.{name}", self.arch))
    }

    pub(super) fn need(&self, name: &str) -> Result<usize> {
        self.size(name)?.with_context(|| format!("{}.{name} is missing", self.arch))
    }

    pub(super) fn float(&self, name: &str) -> Result<Option<f64>> {
        self.read(&format!("{}.{name}", self.arch), "a number", |value| match value {
            Value::Float(x) => Some(*x),
            _ => None,
        })
    }

    pub(super) fn text_at(&self, key: &str) -> Result<Option<&'a str>> {
        self.read(key, "a string", |value| match value {
            Value::Text(text) => Some(text.as_str()),
            _ => None,
        })
    }

    pub(super) fn text(&self, name: &str) -> Result<Option<&'a str>> {
        self.text_at(&format!("{}.{name}", self.arch))
    }

    pub(super) fn flag_at(&self, key: &str) -> Result<Option<bool>> {
        self.read(key, "true or false", |value| match value {
            Value::Bool(flag) => Some(*flag),
            _ => None,
        })
    }
}
