//! Which instruction set the kernels use. A value of [`Isa`] is proof that this machine has it, so code
//! that takes one may call functions compiled for it.

use std::fmt;
use std::str::FromStr;

/// An instruction set that this machine has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Isa(Level);

/// The sets that there are kernels for, each better than the one before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Level {
    /// Plain Rust.
    Portable,
    /// AVX2, FMA and F16C.
    Avx2,
    /// These, and the dot product of bytes: AVX-VNNI, or its AVX-512 encoding for short vectors.
    AvxVnni,
    /// AVX-512 F, BW, VL and DQ with BF16, VNNI and VBMI.
    Avx512,
    /// These, and AMX with BF16, which the system has to let a process use.
    Amx,
}

impl Isa {
    /// Plain Rust, which every machine runs.
    pub const PORTABLE: Isa = Isa(Level::Portable);

    /// The best that this machine has.
    pub fn detect() -> Self {
        Self::supported().last().unwrap_or(Self::PORTABLE)
    }

    /// All that this machine has, the plainest first.
    pub fn supported() -> impl Iterator<Item = Self> {
        [Level::Portable, Level::Avx2, Level::AvxVnni, Level::Avx512, Level::Amx]
            .into_iter()
            .filter(|level| level.is_supported())
            .map(Self)
    }

    pub(crate) fn level(self) -> Level {
        self.0
    }
}

/// By its name; a set that this machine lacks is refused.
impl FromStr for Isa {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        let names = || Self::supported().map(|isa| isa.to_string()).collect::<Vec<_>>().join(", ");
        Self::supported()
            .find(|isa| isa.to_string() == name)
            .ok_or_else(|| format!("expected an instruction set of this machine: {}", names()))
    }
}

impl Level {
    #[cfg(target_arch = "x86_64")]
    fn is_supported(self) -> bool {
        use std::arch::is_x86_feature_detected as has;
        match self {
            Level::Portable => true,
            Level::Avx2 => has!("avx2") && has!("fma") && has!("f16c"),
            Level::AvxVnni => {
                let has_dot = has!("avxvnni") || has!("avx512vl") && has!("avx512vnni");
                Level::Avx2.is_supported() && has_dot
            }
            Level::Avx512 => {
                // Levels nest: code for AVX-512 may use AVX2 too.
                let base = Level::Avx2.is_supported()
                    && has!("avx512f")
                    && has!("avx512bw")
                    && has!("avx512vl")
                    && has!("avx512dq");
                base && has!("avx512bf16") && has!("avx512vnni") && has!("avx512vbmi")
            }
            Level::Amx => Level::Avx512.is_supported() && has_tiles(),
        }
    }

    #[cfg(not(target_arch = "x86_64"))]
    fn is_supported(self) -> bool {
        self == Level::Portable
    }
}

/// Whether there are tile registers with products of bfloat16, which the system lets this process use.
#[cfg(target_arch = "x86_64")]
fn has_tiles() -> bool {
    use crate::machine::ask_for_tiles;
    use std::arch::x86_64::{__cpuid, __cpuid_count};
    use std::sync::LazyLock;
    /// The bits for both in a word of leaf 7.
    const TILES: u32 = 1 << 22 | 1 << 24;
    static HAS_TILES: LazyLock<bool> = LazyLock::new(|| {
        let knows_leaf = __cpuid(0).eax >= 7;
        knows_leaf && __cpuid_count(7, 0).edx & TILES == TILES && ask_for_tiles()
    });
    *HAS_TILES
}

impl fmt::Display for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.0 {
            Level::Portable => "portable",
            Level::Avx2 => "avx2",
            Level::AvxVnni => "avx-vnni",
            Level::Avx512 => "avx512",
            Level::Amx => "amx",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_set_goes_by_its_name() {
        for isa in Isa::supported() {
            assert_eq!(isa.to_string().parse(), Ok(isa));
        }
        let message = "avx1024".parse::<Isa>().unwrap_err();
        assert!(message.starts_with("expected an instruction set of this machine: portable"));
    }
}
