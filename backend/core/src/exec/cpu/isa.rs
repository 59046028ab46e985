//! Which instruction set the kernels use. A value of [`Isa`] is proof that this machine has it, so code
//! that takes one may call functions compiled for it.

use std::fmt;

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
    /// AVX-512 F, BW, VL and DQ with BF16, VNNI and VBMI.
    Avx512,
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
        [Level::Portable, Level::Avx2, Level::Avx512]
            .into_iter()
            .filter(|level| level.is_supported())
            .map(Self)
    }

    pub(crate) fn level(self) -> Level {
        self.0
    }
}

impl Level {
    #[cfg(target_arch = "x86_64")]
    fn is_supported(self) -> bool {
        use std::arch::is_x86_feature_detected as has;
        match self {
            Level::Portable => true,
            Level::Avx2 => has!("avx2") && has!("fma") && has!("f16c"),
            Level::Avx512 => {
                // Levels nest: code for AVX-512 may use AVX2 too.
                let base = Level::Avx2.is_supported()
                    && has!("avx512f")
                    && has!("avx512bw")
                    && has!("avx512vl")
                    && has!("avx512dq");
                base && has!("avx512bf16") && has!("avx512vnni") && has!("avx512vbmi")
            }
        }
    }

    #[cfg(not(target_arch = "x86_64"))]
    fn is_supported(self) -> bool {
        self == Level::Portable
    }
}

impl fmt::Display for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.0 {
            Level::Portable => "portable",
            Level::Avx2 => "avx2",
            Level::Avx512 => "avx512",
        })
    }
}
