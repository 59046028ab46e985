//! The number formats of weights and of the KV cache.

use serde::{Deserialize, Serialize};
use std::fmt;

/// A number format. In engine manifests and on the command line it goes by its lowercase name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
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
    /// Signed bytes, one f32 scale per output channel; activations are quantised per token.
    Int8,
}

impl Dtype {
    /// Every format.
    pub const ALL: [Dtype; 5] = [Dtype::Fp32, Dtype::Fp16, Dtype::Bf16, Dtype::Fp8, Dtype::Int8];

    /// Bytes of one stored value.
    pub const fn bytes(self) -> usize {
        match self {
            Dtype::Fp32 => 4,
            Dtype::Fp16 | Dtype::Bf16 => 2,
            Dtype::Fp8 | Dtype::Int8 => 1,
        }
    }

    /// Whether weights of this format carry one f32 scale per output channel.
    pub const fn is_scaled(self) -> bool {
        matches!(self, Dtype::Fp8 | Dtype::Int8)
    }

    /// The name used in manifests and on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Dtype::Fp32 => "fp32",
            Dtype::Fp16 => "fp16",
            Dtype::Bf16 => "bf16",
            Dtype::Fp8 => "fp8",
            Dtype::Int8 => "int8",
        }
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
