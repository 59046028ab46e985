//! What is measured: one way of asking one endpoint.

use serde::{Deserialize, Serialize};
use spec_build::cli::DraftLen;
use spec_core::runtime::Lookup;
use std::fmt;

/// One way of asking.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Setting {
    /// Where: a model folder or an address.
    pub endpoint: String,
    /// Draft tokens a step.
    #[serde(with = "as_text")]
    pub draft_len: DraftLen,
    /// Where an engine in this process looks drafts up; none is as it was built.
    #[serde(with = "as_optional_text", default, skip_serializing_if = "Option::is_none")]
    pub lookup: Option<Lookup>,
    /// When requests are sent.
    pub load: Load,
    /// 0 takes the likeliest token.
    pub temperature: f32,
}

/// When requests are sent.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Load {
    /// So many at a time: another as soon as one has ended.
    Concurrency(usize),
    /// So many a second on average, whatever has ended: a Poisson process.
    Rate(f64),
}

impl Setting {
    /// Whether nothing is drafted.
    pub fn is_plain(&self) -> bool {
        self.draft_len == DraftLen::Fixed(0)
    }

    /// The same way of asking without drafts: what speed-ups are compared with.
    pub fn plain(&self) -> Self {
        Self { draft_len: DraftLen::Fixed(0), lookup: None, ..self.clone() }
    }

    /// Its draft length, and where drafts are looked up if that was said.
    pub fn drafts(&self) -> String {
        let len = match self.draft_len {
            DraftLen::Auto => "auto".into(),
            DraftLen::Fixed(0) => "off".into(),
            DraftLen::Fixed(len) => format!("K={len}"),
        };
        match self.lookup {
            Some(lookup) if !self.is_plain() => format!("{len}, {} look-up", lookup.name()),
            _ => len,
        }
    }
}

impl fmt::Display for Load {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Concurrency(count) => write!(f, "{count} at a time"),
            Self::Rate(rate) => write!(f, "{rate} a second"),
        }
    }
}

/// Draft lengths as on command lines.
mod as_text {
    use serde::{Deserialize, Deserializer, Serializer};
    use spec_build::cli::DraftLen;

    pub(super) fn serialize<S: Serializer>(len: &DraftLen, out: S) -> Result<S::Ok, S::Error> {
        match len {
            DraftLen::Auto => out.serialize_str("auto"),
            DraftLen::Fixed(len) => out.serialize_str(&len.to_string()),
        }
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<DraftLen, D::Error> {
        String::deserialize(from)?.parse().map_err(serde::de::Error::custom)
    }
}

mod as_optional_text {
    use serde::{Deserialize, Deserializer, Serializer};
    use spec_core::runtime::Lookup;

    pub(super) fn serialize<S: Serializer>(at: &Option<Lookup>, out: S) -> Result<S::Ok, S::Error> {
        match at {
            Some(lookup) => out.serialize_some(lookup.name()),
            None => out.serialize_none(),
        }
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(
        from: D,
    ) -> Result<Option<Lookup>, D::Error> {
        let text = Option::<String>::deserialize(from)?;
        text.map(|text| text.parse().map_err(serde::de::Error::custom)).transpose()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_are_read_back() {
        for (draft_len, lookup) in
            [(DraftLen::Auto, None), (DraftLen::Fixed(4), Some(Lookup::Suffix))]
        {
            let load = Load::Rate(0.5);
            let endpoint = "model".to_string();
            let setting = Setting { endpoint, draft_len, lookup, load, temperature: 0.8 };
            let json = serde_json::to_string(&setting).unwrap();
            assert_eq!(serde_json::from_str::<Setting>(&json).unwrap(), setting);
        }
    }
}
