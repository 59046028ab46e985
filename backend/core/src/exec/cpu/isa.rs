//! The instruction set levels of the CPU kernels and which of them this machine has.

use std::sync::OnceLock;

/// An instruction set level. Every kernel exists at every level.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Isa {
    /// AVX-512 with the bf16, vnni and vbmi extensions.
    Avx512,
    /// AVX2 with fma and f16c.
    Avx2,
    /// No instruction set assumed.
    Portable,
}

impl Isa {
    /// The best level of this machine.
    pub fn detect() -> Self {
        static BEST: OnceLock<Isa> = OnceLock::new();
        *BEST.get_or_init(|| {
            if has_avx512() {
                Isa::Avx512
            } else if has_avx2() {
                Isa::Avx2
            } else {
                Isa::Portable
            }
        })
    }

    /// Every level of this machine, best first.
    pub fn available() -> Vec<Self> {
        [Isa::Avx512, Isa::Avx2, Isa::Portable]
            .into_iter()
            .filter(|isa| isa.is_available())
            .collect()
    }

    /// Whether this machine has the level.
    pub fn is_available(self) -> bool {
        match (self, Isa::detect()) {
            (Isa::Portable, _) | (_, Isa::Avx512) => true,
            (Isa::Avx2, best) => best == Isa::Avx2,
            (Isa::Avx512, _) => false,
        }
    }
}

#[cfg(target_arch = "x86_64")]
fn has_avx512() -> bool {
    // Levels nest: whatever runs at the AVX-512 level may use AVX2 too.
    has_avx2()
        && is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512vl")
        && is_x86_feature_detected!("avx512dq")
        && is_x86_feature_detected!("avx512bf16")
        && is_x86_feature_detected!("avx512vnni")
        && is_x86_feature_detected!("avx512vbmi")
}

#[cfg(target_arch = "x86_64")]
fn has_avx2() -> bool {
    is_x86_feature_detected!("avx2")
        && is_x86_feature_detected!("fma")
        && is_x86_feature_detected!("f16c")
}

#[cfg(not(target_arch = "x86_64"))]
fn has_avx512() -> bool {
    false
}

#[cfg(not(target_arch = "x86_64"))]
fn has_avx2() -> bool {
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_detected_level_is_the_best_available_and_portable_is_always_there() {
        let available = Isa::available();
        assert_eq!(available[0], Isa::detect());
        assert_eq!(available.last(), Some(&Isa::Portable));
    }
}
