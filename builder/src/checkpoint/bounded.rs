//! Reading small files of unknown origin: a size limit before anything is allocated, and JSON fields
//! with errors that name the file, the field and what was found.

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Map, Value};
use std::fs::File;
use std::io::Read;
use std::path::Path;

/// Bytes of a configuration file at most.
const MAX_CONFIG: u64 = 4 << 20;

/// The bytes of a file of at most `limit` bytes.
pub(super) fn read(path: &Path, limit: u64) -> Result<Vec<u8>> {
    let file = File::open(path).with_context(|| format!("opening {}", path.display()))?;
    let mut bytes = Vec::new();
    file.take(limit + 1)
        .read_to_end(&mut bytes)
        .with_context(|| format!("reading {}", path.display()))?;
    ensure!(bytes.len() as u64 <= limit, "{} is over {limit} bytes", path.display());
    Ok(bytes)
}

/// A JSON object, or the part of one, with the name by which errors call it.
#[derive(Clone, Debug)]
pub(super) struct Object {
    place: String,
    fields: Map<String, Value>,
}

impl Object {
    /// A configuration that is no file.
    pub(super) fn new(place: &str, fields: Map<String, Value>) -> Self {
        Self { place: place.into(), fields }
    }

    pub(super) fn open(path: &Path) -> Result<Self> {
        let fields = serde_json::from_slice(&read(path, MAX_CONFIG)?)
            .with_context(|| format!("{} is no JSON object", path.display()))?;
        let place = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        Ok(Self { place, fields })
    }

    /// Reads a configuration file that need not be there.
    pub(super) fn open_if_there(path: &Path) -> Result<Option<Self>> {
        if path.try_exists()? { Self::open(path).map(Some) } else { Ok(None) }
    }

    /// The same without a field.
    pub(super) fn without(&self, key: &str) -> Self {
        let mut fields = self.fields.clone();
        fields.remove(key);
        Self { place: self.place.clone(), fields }
    }

    /// The same with a field of this value.
    pub(super) fn with(mut self, key: &str, value: Value) -> Self {
        self.fields.insert(key.into(), value);
        self
    }

    /// What errors call it, such as `config.json` or `config.json: rope_scaling`.
    pub(super) fn place(&self) -> &str {
        &self.place
    }

    /// A field that is there and not null.
    pub(super) fn get(&self, key: &str) -> Option<&Value> {
        self.fields.get(key).filter(|value| !value.is_null())
    }

    pub(super) fn has_fields(&self) -> bool {
        !self.fields.is_empty()
    }

    fn read<'a, T>(
        &'a self,
        key: &str,
        what: &str,
        as_type: impl Fn(&'a Value) -> Option<T>,
    ) -> Result<Option<T>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        match as_type(value) {
            Some(value) => Ok(Some(value)),
            None => bail!("{}: `{key}` is {value}, expected {what}", self.place),
        }
    }

    pub(super) fn usize(&self, key: &str) -> Result<Option<usize>> {
        self.read(key, "a whole number", |v| v.as_u64().and_then(|n| n.try_into().ok()))
    }

    pub(super) fn need_usize(&self, key: &str) -> Result<usize> {
        self.need(key, self.usize(key)?)
    }

    pub(super) fn f64(&self, key: &str) -> Result<Option<f64>> {
        self.read(key, "a number", Value::as_f64)
    }

    pub(super) fn bool(&self, key: &str) -> Result<Option<bool>> {
        self.read(key, "true or false", Value::as_bool)
    }

    pub(super) fn text(&self, key: &str) -> Result<Option<&str>> {
        self.read(key, "a string", Value::as_str)
    }

    pub(super) fn list(&self, key: &str) -> Result<Option<&Vec<Value>>> {
        self.read(key, "a list", Value::as_array)
    }

    pub(super) fn object(&self, key: &str) -> Result<Option<Object>> {
        let fields = self.read(key, "an object", Value::as_object)?;
        let place = format!("{}: {key}", self.place);
        Ok(fields.map(|fields| Object { place, fields: fields.clone() }))
    }

    /// The objects in the fields of this one, in order.
    pub(super) fn objects(&self) -> Result<Vec<Object>> {
        self.fields.keys().map(|key| self.need(key, self.object(key)?)).collect()
    }

    /// A token id or a list of them; empty when the field is not there.
    pub(super) fn token_ids(&self, key: &str) -> Result<Vec<u32>> {
        let as_id = |value: &Value| value.as_u64().and_then(|id| u32::try_from(id).ok());
        let ids = self.read(key, "token ids", |value| match value {
            Value::Array(ids) => ids.iter().map(as_id).collect(),
            id => as_id(id).map(|id| vec![id]),
        })?;
        Ok(ids.unwrap_or_default())
    }

    /// Insists that a field was there.
    pub(super) fn need<T>(&self, key: &str, value: Option<T>) -> Result<T> {
        value.with_context(|| format!("{}: `{key}` is missing", self.place))
    }
}
