//! How the values of a stored tensor are encoded: the formats that are read, their block sizes, and
//! the names and numbers by which safetensors and GGUF call them.

use super::{dequant, kquant};

/// A number format of a stored tensor. `Q…` are the block formats of ggml.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Encoding {
    /// IEEE single precision.
    F32,
    /// IEEE half precision.
    F16,
    /// bfloat16.
    Bf16,
    /// e4m3fn; its scale is a tensor of its own.
    Fp8,
    /// Signed bytes; their scale is a tensor of its own.
    Int8,
    /// Blocks of 32: scale, 4 bits.
    Q4_0,
    /// Blocks of 32: scale and minimum, 4 bits.
    Q4_1,
    /// Blocks of 32: scale, 5 bits.
    Q5_0,
    /// Blocks of 32: scale and minimum, 5 bits.
    Q5_1,
    /// Blocks of 32: scale, 8 bits.
    Q8_0,
    /// Blocks of 256: 16 scales and minima, 2 bits.
    Q2K,
    /// Blocks of 256: 16 scales, 3 bits.
    Q3K,
    /// Blocks of 256: 8 scales and minima, 4 bits.
    Q4K,
    /// Blocks of 256: 8 scales and minima, 5 bits.
    Q5K,
    /// Blocks of 256: 16 scales, 6 bits.
    Q6K,
}

/// ggml's type numbers that are not read, for the refusal.
const UNREAD_GGML: &[(u32, &str)] = &[
    (9, "Q8_1"),
    (15, "Q8_K"),
    (16, "IQ2_XXS"),
    (17, "IQ2_XS"),
    (18, "IQ3_XXS"),
    (19, "IQ1_S"),
    (20, "IQ4_NL"),
    (21, "IQ3_S"),
    (22, "IQ2_S"),
    (23, "IQ4_XS"),
    (24, "I8"),
    (25, "I16"),
    (26, "I32"),
    (27, "I64"),
    (28, "F64"),
    (29, "IQ1_M"),
    (34, "TQ1_0"),
    (35, "TQ2_0"),
    (39, "MXFP4"),
];

impl Encoding {
    /// The format that safetensors calls `dtype`, if it is one that is read.
    pub(super) fn from_safetensors(dtype: &str) -> Option<Self> {
        match dtype {
            "F32" => Some(Self::F32),
            "F16" => Some(Self::F16),
            "BF16" => Some(Self::Bf16),
            "F8_E4M3" => Some(Self::Fp8),
            "I8" => Some(Self::Int8),
            _ => None,
        }
    }

    /// The format that ggml numbers `id`; the error is the name of one that is not read.
    pub(super) fn from_ggml(id: u32) -> Result<Self, String> {
        Ok(match id {
            0 => Self::F32,
            1 => Self::F16,
            2 => Self::Q4_0,
            3 => Self::Q4_1,
            6 => Self::Q5_0,
            7 => Self::Q5_1,
            8 => Self::Q8_0,
            10 => Self::Q2K,
            11 => Self::Q3K,
            12 => Self::Q4K,
            13 => Self::Q5K,
            14 => Self::Q6K,
            30 => Self::Bf16,
            _ => {
                let known = UNREAD_GGML.iter().find(|(unread, _)| *unread == id);
                return Err(known.map_or(format!("number {id}"), |(_, name)| (*name).into()));
            }
        })
    }

    /// Name as in the files.
    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "F32",
            Self::F16 => "F16",
            Self::Bf16 => "BF16",
            Self::Fp8 => "F8_E4M3",
            Self::Int8 => "I8",
            Self::Q4_0 => "Q4_0",
            Self::Q4_1 => "Q4_1",
            Self::Q5_0 => "Q5_0",
            Self::Q5_1 => "Q5_1",
            Self::Q8_0 => "Q8_0",
            Self::Q2K => "Q2_K",
            Self::Q3K => "Q3_K",
            Self::Q4K => "Q4_K",
            Self::Q5K => "Q5_K",
            Self::Q6K => "Q6_K",
        }
    }

    /// Values of a block; a row holds whole blocks.
    pub fn block_len(self) -> usize {
        match self {
            Self::F32 | Self::F16 | Self::Bf16 | Self::Fp8 | Self::Int8 => 1,
            Self::Q4_0 | Self::Q4_1 | Self::Q5_0 | Self::Q5_1 | Self::Q8_0 => 32,
            Self::Q2K | Self::Q3K | Self::Q4K | Self::Q5K | Self::Q6K => 256,
        }
    }

    /// Bytes of a block.
    pub fn block_bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
            Self::Fp8 | Self::Int8 => 1,
            Self::Q4_0 => 18,
            Self::Q4_1 => 20,
            Self::Q5_0 => 22,
            Self::Q5_1 => 24,
            Self::Q8_0 => 34,
            Self::Q2K => 84,
            Self::Q3K => 110,
            Self::Q4K => 144,
            Self::Q5K => 176,
            Self::Q6K => 210,
        }
    }

    /// Decodes whole blocks. `bytes` and `out` must hold the same number of them.
    pub(super) fn decode(self, bytes: &[u8], out: &mut [f32]) {
        let blocks = out.len() / self.block_len();
        assert_eq!(blocks * self.block_len(), out.len(), "values are no whole blocks");
        assert_eq!(blocks * self.block_bytes(), bytes.len(), "bytes are not the values'");
        match self {
            Self::F32 => dequant::f32(bytes, out),
            Self::F16 => dequant::f16(bytes, out),
            Self::Bf16 => dequant::bf16(bytes, out),
            Self::Fp8 => dequant::fp8(bytes, out),
            Self::Int8 => dequant::int8(bytes, out),
            Self::Q4_0 => dequant::q4_0(bytes, out),
            Self::Q4_1 => dequant::q4_1(bytes, out),
            Self::Q5_0 => dequant::q5_0(bytes, out),
            Self::Q5_1 => dequant::q5_1(bytes, out),
            Self::Q8_0 => dequant::q8_0(bytes, out),
            Self::Q2K => kquant::q2_k(bytes, out),
            Self::Q3K => kquant::q3_k(bytes, out),
            Self::Q4K => kquant::q4_k(bytes, out),
            Self::Q5K => kquant::q5_k(bytes, out),
            Self::Q6K => kquant::q6_k(bytes, out),
        }
    }
}
