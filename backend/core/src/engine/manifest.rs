//! What an engine file says about itself, as JSON.

use crate::model::decoder::MatrixKind;
use crate::model::{Dtype, KvScales, LayerSkip, ModelConfig};
use serde::{Deserialize, Serialize};

/// Which of a pair an engine is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// The model whose text is served.
    Target,
    /// The model that proposes.
    Draft,
}

/// The device that the sections are packed for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase", tag = "kind", deny_unknown_fields)]
pub enum Device {
    /// The CPU executor, any instruction set.
    Cpu,
    /// NVIDIA GPUs of the listed architectures.
    Cuda {
        /// Such as `sm_90a`, each of [`spec_kernels::ARCHS`] at most once.
        archs: Vec<String>,
        /// The oldest driver that loads the cubins, such as 580.
        min_driver: u32,
    },
}

/// The other engine of a pair, by what it holds: see [`Manifest::identity`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Peer {
    /// File name beside this one.
    pub file: String,
    /// The identity that the file must have.
    pub identity: String,
}

/// Where draft tokens come from.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase", tag = "kind", deny_unknown_fields)]
pub enum DrafterKind {
    /// No speculation.
    None,
    /// Continuations of earlier occurrences of the last tokens.
    Ngram {
        /// Longest suffix looked up, in tokens.
        max_ngram: usize,
        /// Shortest suffix looked up, in tokens.
        min_ngram: usize,
    },
    /// What followed the last tokens in the text, or in others that were read and written lately.
    Suffix {
        /// Tokens of other texts that are kept.
        max_tokens: usize,
    },
    /// A second engine.
    Model(Peer),
    /// The target itself, without some of its layers.
    Skip {
        /// Those that are left out.
        layers: LayerSkip,
        /// What passes without them take, and what the drafts are worth, where that was measured.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        costs: Option<CostTable>,
    },
}

impl DrafterKind {
    /// Whether drafts take passes of a model: a second one, or the target's own layers.
    pub(crate) fn runs_passes(&self) -> bool {
        matches!(self, Self::Model(_) | Self::Skip { .. })
    }

    /// The layers that drafts go without, where they are the target's own.
    pub(crate) fn skipped(&self) -> Option<&LayerSkip> {
        match self {
            Self::Skip { layers, .. } => Some(layers),
            Self::None | Self::Ngram { .. } | Self::Suffix { .. } | Self::Model(_) => None,
        }
    }
}

/// Number formats.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Precision {
    /// Projections of the layers.
    pub weights: Dtype,
    /// Embedding and head.
    pub head: Dtype,
    /// Keys and values.
    pub kv: Dtype,
}

impl Precision {
    pub(crate) fn of(&self, kind: MatrixKind) -> Dtype {
        match kind {
            MatrixKind::Embed | MatrixKind::Head => self.head,
            MatrixKind::Qkv
            | MatrixKind::Out
            | MatrixKind::GateUp
            | MatrixKind::Down
            | MatrixKind::Fc => self.weights,
        }
    }
}

/// What the engine was built for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Limits {
    /// Draft tokens in a step.
    pub max_draft_len: usize,
    /// Sequences in a step.
    pub max_batch_size: usize,
    /// Prompt and generated tokens of a sequence.
    pub max_seq_len: usize,
    /// Rows in a step.
    pub max_num_tokens: usize,
}

/// Measured times of passes: `step_ms[i]` for a pass of `rows[i]` rows, and what reading the cache adds; of a drafter also
/// what reading prompts takes, and what its drafts are worth.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CostTable {
    /// Rows in a pass, ascending.
    pub rows: Vec<usize>,
    /// Milliseconds of the pass, without what lies in the cache.
    pub step_ms: Vec<f64>,
    /// Nanoseconds that a row takes for every position of the cache before it.
    #[serde(default)]
    pub position_ns: f64,
    /// Milliseconds that a drafter takes for each token of a prompt before its first draft; 0 where that was not measured.
    #[serde(default)]
    pub prompt_token_ms: f64,
    /// Of a drafter: the share of its drafts that was accepted at each position where those before it were. Of those
    /// positions that were measured.
    #[serde(default)]
    pub acceptance: Vec<f64>,
}

/// What a section holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SectionKind {
    /// A matrix in the device's packed layout; shape is [outputs, inputs].
    Weight,
    /// f32 per output channel of the weight of the same name, in the order of its rows.
    Scale,
    /// An f32 vector: a norm weight or a bias.
    Vector,
    /// A compiled kernel for one architecture.
    Code,
}

/// A run of bytes in the file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Section {
    /// Such as `layers.0.qkv`, `layers.0.qkv.scale`, `embed`.
    pub name: String,
    /// What it holds.
    pub kind: SectionKind,
    /// Number format; none for code.
    pub dtype: Option<Dtype>,
    /// Logical shape, padding of the layout not counted; empty for code.
    pub shape: Vec<usize>,
    /// From the start of the file; a multiple of 256.
    pub offset: u64,
    /// Length; the layout's padding counted.
    pub bytes: u64,
    /// blake3 of the bytes, in hex.
    pub hash: String,
}

/// The manifest of an engine.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    /// Program and version that wrote the file.
    pub builder: String,
    /// Hash over the kernel sources that the builder carried.
    pub kernels: String,
    /// Where it runs.
    pub device: Device,
    /// Which of the pair it is.
    pub role: Role,
    /// blake3 over model, precision, device and section hashes: what the file computes, whoever its peer is.
    pub identity: String,
    /// In a target: where draft tokens come from. In a draft: `None`.
    pub drafter: DrafterKind,
    /// In a draft: the target it was built for.
    pub target: Option<Peer>,
    /// Shape of the model.
    pub model: ModelConfig,
    /// Number formats.
    pub precision: Precision,
    /// Of keys and values in FP8; all 1 where there are none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kv_scales: Option<KvScales>,
    /// What it was built for.
    pub limits: Limits,
    /// blake3 of `tokenizer.json`, in hex.
    pub tokenizer: String,
    /// Tokens that end a text.
    pub end_tokens: Vec<u32>,
    /// Token put before every prompt, if the model wants one.
    pub bos_token: Option<u32>,
    /// Measured step times, once measured.
    pub costs: Option<CostTable>,
    /// Every section, in file order.
    pub sections: Vec<Section>,
}
