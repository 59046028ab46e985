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
    /// [`BLOCK`](super::panel::BLOCK) inputs of an output: one bfloat16, among the values, and where it says so another that
    /// is added.
    PerBlock {
        has_offset: bool,
    },
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
    /// Four bits without sign, a bfloat16 scale and a bfloat16 offset for every [`BLOCK`](super::panel::BLOCK) inputs of an
    /// output; activations as for int8.
    Int4,
}

impl Dtype {
    /// Every format.
    pub const ALL: [Dtype; 6] =
        [Dtype::Fp32, Dtype::Fp16, Dtype::Bf16, Dtype::Fp8, Dtype::Int8, Dtype::Int4];

    /// What it is made of: the table of all formats.
    pub(crate) const fn format(self) -> Format {
        let (name, bits, scale) = match self {
            Dtype::Fp32 => ("fp32", 32, Scale::None),
            Dtype::Fp16 => ("fp16", 16, Scale::None),
            Dtype::Bf16 => ("bf16", 16, Scale::None),
            Dtype::Fp8 => ("fp8", 8, Scale::PerOutput),
            Dtype::Int8 => ("int8", 8, Scale::PerBlock { has_offset: false }),
            Dtype::Int4 => ("int4", 4, Scale::PerBlock { has_offset: true }),
        };
        Format { name, bits, scale }
    }

    /// Bytes of one stored value. Panics for a format whose values are no whole bytes.
    pub const fn bytes(self) -> usize {
        let bits = self.format().bits;
        assert!(bits.is_multiple_of(8), "a value of whole bytes");
        bits / 8
    }

    /// Whether weights of this format carry one f32 scale an output.
    pub const fn has_output_scales(self) -> bool {
        matches!(self.format().scale, Scale::PerOutput)
    }

    /// Whether keys and values on a CPU may have it.
    pub const fn holds_keys_and_values(self) -> bool {
        matches!(self, Dtype::Fp32 | Dtype::Fp16 | Dtype::Fp8)
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
