//! Who answers: an engine in this process, a Triton server, an OpenAI-compatible server.

mod engine;
mod openai;
mod triton;

use crate::answer::{Answer, Ask};
use crate::prompts::Prompt;
use crate::setting::Setting;
use anyhow::{Result, bail};
use spec_build::cli::DraftLen;
use std::path::PathBuf;
use std::sync::Arc;

/// An address: `DIR`, or a model of a server as `triton://HOST:PORT/MODEL` or `openai://HOST:PORT/MODEL`; over TLS with
/// `triton+https` or `openai+https` in front.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Address {
    /// A model folder, run in this process.
    Engine(PathBuf),
    /// A model at Triton's gRPC port.
    Triton(Remote),
    /// A model of a server with OpenAI's completions under `/v1`.
    OpenAi(Remote),
}

/// A model of a server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Remote {
    /// `HOST:PORT`.
    pub host: String,
    /// The model's name there.
    pub model: String,
    /// Whether the server is reached over TLS, its certificate checked against those that the system trusts.
    pub tls: bool,
}

impl Remote {
    /// The server's URL.
    pub fn url(&self) -> String {
        format!("{}://{}", if self.tls { "https" } else { "http" }, self.host)
    }
}

impl std::str::FromStr for Address {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let Some((scheme, rest)) = text.split_once("://") else {
            return Ok(Self::Engine(text.into()));
        };
        let expected = "expected DIR, triton://HOST:PORT/MODEL or openai://HOST:PORT/MODEL \
                        (triton+https, openai+https over TLS)";
        // Names of models may have slashes, hosts have none.
        let (host, model) = rest.split_once('/').ok_or(expected)?;
        if host.is_empty() || model.is_empty() {
            return Err(expected.into());
        }
        let (kind, tls) = match scheme.strip_suffix("+https") {
            Some(kind) => (kind, true),
            None => (scheme, false),
        };
        let remote = Remote { host: host.into(), model: model.into(), tls };
        match kind {
            "triton" => Ok(Self::Triton(remote)),
            "openai" => Ok(Self::OpenAi(remote)),
            _ => Err(expected.into()),
        }
    }
}

impl Address {
    /// Whether draft lengths can be chosen there.
    pub fn takes_draft_len(&self) -> bool {
        !matches!(self, Self::OpenAi(_))
    }
}

/// What all requests of a measurement have in common.
#[derive(Clone, Debug)]
pub struct Common {
    /// What is asked.
    pub prompts: Arc<Vec<Prompt>>,
    /// New tokens at most.
    pub max_tokens: usize,
    /// Go on after the model's end tokens, so that every answer is as long.
    pub ignore_eos: bool,
    /// Threads of an engine in this process.
    pub threads: Option<usize>,
}

/// An endpoint that is ready to be asked in one way.
pub enum Endpoint {
    /// In this process.
    Engine(Box<engine::EngineEndpoint>),
    /// Over gRPC.
    Triton(Box<triton::TritonEndpoint>),
    /// Over HTTP.
    OpenAi(openai::OpenAiEndpoint),
}

impl Endpoint {
    /// Loads or reaches it.
    pub async fn open(address: &Address, setting: &Setting, common: &Common) -> Result<Self> {
        if setting.lookup.is_some() && !matches!(address, Address::Engine(_)) {
            bail!("{}: the look-up of a server is its own parameter `lookup`", setting.endpoint);
        }
        Ok(match address {
            Address::Engine(dir) => {
                let open = engine::EngineEndpoint::open(dir, setting, common)?;
                Self::Engine(Box::new(open))
            }
            Address::Triton(remote) => {
                let open = triton::TritonEndpoint::open(remote, setting, common);
                Self::Triton(Box::new(open.await?))
            }
            Address::OpenAi(remote) => {
                if setting.draft_len != DraftLen::Auto {
                    bail!("{}: draft lengths cannot be chosen there", setting.endpoint);
                }
                Self::OpenAi(openai::OpenAiEndpoint::new(remote, setting, common)?)
            }
        })
    }

    /// Sends one request and waits for the whole answer.
    pub async fn ask(&self, ask: Ask) -> Answer {
        match self {
            Self::Engine(engine) => engine.ask(ask).await,
            Self::Triton(triton) => triton.ask(ask).await,
            Self::OpenAi(openai) => openai.ask(ask).await,
        }
    }
}

/// A hash that is the same in every process of this program.
fn hash(parts: impl Iterator<Item: AsRef<[u8]>>) -> u64 {
    use std::hash::{DefaultHasher, Hasher};
    let mut hasher = DefaultHasher::new();
    parts.for_each(|part| hasher.write(part.as_ref()));
    hasher.finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_say_who_answers() {
        let parse = |text: &str| text.parse::<Address>();
        assert_eq!(parse("models/small"), Ok(Address::Engine("models/small".into())));
        let remote = |tls| Remote { host: "localhost:8001".into(), model: "org/name".into(), tls };
        for (prefix, tls) in [("", false), ("+https", true)] {
            let at = |kind| parse(&format!("{kind}{prefix}://localhost:8001/org/name"));
            assert_eq!(at("triton"), Ok(Address::Triton(remote(tls))));
            assert_eq!(at("openai"), Ok(Address::OpenAi(remote(tls))));
        }
        assert_eq!(remote(false).url(), "http://localhost:8001");
        assert_eq!(remote(true).url(), "https://localhost:8001");
        for wrong in ["http://h:1/m", "+https://h:1/m", "triton://h:1", "triton:///m"] {
            assert!(parse(wrong).unwrap_err().starts_with("expected DIR"), "{wrong}");
        }
    }
}
