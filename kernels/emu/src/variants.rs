//! Which variants the emulator is built with. The build script includes this file too.

use spec_kernels::{Epilogue, Format, GEMM_ROWS, Variant};

/// One compiled kernel: its name, its source in `kernels/`, and the defines.
pub(crate) struct Unit {
    pub(crate) name: String,
    pub(crate) kernel: String,
    pub(crate) defines: Vec<(String, String)>,
}

/// Query heads of a key head that tests use.
const GROUPS: [usize; 6] = [1, 2, 3, 4, 7, 8];

/// What a unit's name ends in when it is compiled without bulk copies, as for sm_80.
const OLD_ARCHITECTURE: &str = "@sm_80";

/// All variants of the kernels, and both kinds of architecture where they differ.
pub(crate) fn all() -> Vec<Unit> {
    let mut units = Vec::new();
    for variant in variants() {
        let unit = unit(&variant);
        if variant.kernel == "gemm" {
            let mut old = self::unit(&variant);
            old.name += OLD_ARCHITECTURE;
            old.defines.push(("EMU_ARCH".into(), "800".into()));
            units.push(old);
        }
        units.push(unit);
    }
    units
}

fn unit(variant: &Variant) -> Unit {
    Unit {
        name: variant.to_string(),
        kernel: variant.kernel.to_string(),
        defines: variant
            .defines
            .iter()
            .map(|(name, value)| (name.to_string(), value.clone()))
            .collect(),
    }
}

fn variants() -> Vec<Variant> {
    let mut all: Vec<_> = ["rows", "sample", "accept"].map(Variant::plain).into();
    for format in [Format::Fp8, Format::Fp16] {
        all.push(Variant::embed(format));
        for rows in GEMM_ROWS {
            let qkv = [64, 128].map(|head_dim| Epilogue::Qkv { head_dim });
            let others = [Epilogue::Raw, Epilogue::Residual, Epilogue::SwiGlu, Epilogue::Head];
            all.extend(qkv.into_iter().chain(others).map(|e| Variant::gemm(format, rows, e)));
        }
        for head_dim in [64, 128] {
            all.push(Variant::rope(format, head_dim));
            all.extend(GROUPS.map(|group| Variant::attention(format, head_dim, group)));
        }
    }
    all
}
