//! The number formats of weights and of the KV cache.

use serde::{Deserialize, Serialize};
use std::fmt;

/// What a number format is made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Format {
    /// The name used in manifests and on the command line.
    pub name: &'static str,
    /// Bits of one stored value.
    pub bits: usize,
    /// What a stored value is multiplied by.
    pub scale: Scale,
}

/// Which stored values share a scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Scale {
    None,
    /// Those of an output: one f32, in a section of its own.
    PerOutput,
    /// [`BLOCK`](super::panel::BLOCK) inputs of an output: one bfloat16, among the values.
    PerBlock,
}

/// A number format. In engine manifests and on the command line it goes by its lowercase name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, PartialOrd, Ord)]
#[serde(rename_all = "lowercase")]
pub enum Dtype {
    /// IEEE single precision.
    Fp32,
    /// IEEE half precision.
    Fp16,
    /// bfloat16.
    Bf16,
    /// e4m3fn (largest value 448, no infinities), one f32 scale per output channel.
    Fp8,
    /// Signed bytes, one bfloat16 scale for every [`BLOCK`](super::panel::BLOCK) inputs of an output;
    /// activations are quantised in the same blocks.
    Int8,
}

impl Dtype {
    /// Every format.
    pub const ALL: [Dtype; 5] = [Dtype::Fp32, Dtype::Fp16, Dtype::Bf16, Dtype::Fp8, Dtype::Int8];

    /// What it is made of: the table of all formats.
    pub(crate) const fn format(self) -> Format {
        let (name, bits, scale) = match self {
            Dtype::Fp32 => ("fp32", 32, Scale::None),
            Dtype::Fp16 => ("fp16", 16, Scale::None),
            Dtype::Bf16 => ("bf16", 16, Scale::None),
            Dtype::Fp8 => ("fp8", 8, Scale::PerOutput),
            Dtype::Int8 => ("int8", 8, Scale::PerBlock),
        };
        Format { name, bits, scale }
    }

    /// Bytes of one stored value.
    pub const fn bytes(self) -> usize {
        self.format().bits / 8
    }

    /// Whether weights of this format carry one f32 scale an output.
    pub const fn has_output_scales(self) -> bool {
        matches!(self.format().scale, Scale::PerOutput)
    }

    /// The name used in manifests and on the command line.
    pub const fn name(self) -> &'static str {
        self.format().name
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
