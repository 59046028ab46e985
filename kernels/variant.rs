//! A kernel with its compile-time constants. Builder, executor and emulator name compiled code by it.

use std::fmt;

/// One `.cu` file and the defines that it is compiled with.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Variant {
    /// Stem of the file, and name of its entry.
    pub kernel: &'static str,
    /// Names and values, in a fixed order.
    pub defines: Vec<(&'static str, String)>,
}

/// A number format as the kernels spell it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Format {
    /// e4m3 with scales.
    Fp8,
    /// Half precision.
    Fp16,
}

/// What the product does with its sums.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Epilogue {
    /// Rotates queries and keys, writes keys and values to the cache; of heads of this many elements.
    Qkv {
        /// 64 or 128.
        head_dim: usize,
    },
    /// Plain sums.
    Raw,
    /// Adds to the residual stream.
    Residual,
    /// silu(gate) * up.
    SwiGlu,
    /// Logits, and the best of each tile.
    Head,
}

/// Architectures that the kernels are written for. Code for `sm_90a` and the two after it runs on exactly that
/// compute capability, code for the others also on later ones of the same major version.
pub const ARCHS: [&str; 5] = ["sm_80", "sm_89", "sm_90a", "sm_100a", "sm_120a"];

/// Rows that products are compiled for, ascending, where single warps multiply.
pub const GEMM_ROWS: [usize; 4] = [8, 16, 32, 64];

/// The same where warpgroups do.
pub const WGMMA_ROWS: [usize; 7] = [8, 16, 32, 64, 128, 192, 320];

/// Rows of a tile of what is multiplied as a whole block, where warpgroups do that.
pub const MULTIPLY_ROWS: [usize; 2] = [128, 256];

/// What becomes of the sums there.
pub const MULTIPLY_EPILOGUES: [Epilogue; 3] = [Epilogue::Raw, Epilogue::Residual, Epilogue::SwiGlu];

/// Whether warpgroups make products on an architecture, of rows that a kernel before has normed.
pub fn has_warpgroups(arch: &str) -> bool {
    arch == "sm_90a"
}

/// Rows that products are compiled for on an architecture.
pub fn gemm_rows(arch: &str) -> &'static [usize] {
    if has_warpgroups(arch) { &WGMMA_ROWS } else { &GEMM_ROWS }
}

/// Most query heads of a key head.
pub const MAX_GROUP: usize = 16;

impl Format {
    fn name(self) -> &'static str {
        match self {
            Self::Fp8 => "FP8",
            Self::Fp16 => "FP16",
        }
    }
}

impl Epilogue {
    fn name(self) -> &'static str {
        match self {
            Self::Qkv { .. } => "QKV",
            Self::Raw => "RAW",
            Self::Residual => "RESIDUAL",
            Self::SwiGlu => "SWIGLU",
            Self::Head => "HEAD",
        }
    }
}

impl Variant {
    /// The product of rows with a packed matrix, for at most `rows` rows, one of [`gemm_rows`] of some architecture.
    pub fn gemm(weight: Format, rows: usize, epilogue: Epilogue) -> Self {
        assert!(WGMMA_ROWS.contains(&rows), "no product is compiled for {rows} rows");
        let mut defines = vec![
            ("WEIGHT", weight.name().into()),
            ("ROWS", rows.to_string()),
            ("EPILOGUE", epilogue.name().into()),
        ];
        if let Epilogue::Qkv { head_dim } = epilogue {
            defines.push(("HEAD_DIM", head_dim.to_string()));
        }
        Self { kernel: "gemm", defines }
    }

    /// The same for one shape alone, `n` outputs of `k` inputs: the compiler knows every trip count.
    pub fn with_shape(mut self, n: usize, k: usize) -> Self {
        self.defines.extend([("SHAPE_N", n.to_string()), ("SHAPE_K", k.to_string())]);
        self
    }

    /// The token rows of the embedding.
    pub fn embed(weight: Format) -> Self {
        Self { kernel: "embed", defines: vec![("WEIGHT", weight.name().into())] }
    }

    /// A matrix row by row, for products of many rows by a library.
    pub fn unpack(weight: Format) -> Self {
        Self { kernel: "unpack", defines: vec![("WEIGHT", weight.name().into())] }
    }

    /// The product of rows in units with a packed matrix of the same format, in tiles of `rows` of them, one of
    /// [`MULTIPLY_ROWS`]: for one of [`MULTIPLY_EPILOGUES`].
    pub fn multiply(format: Format, rows: usize, epilogue: Epilogue) -> Self {
        assert!(MULTIPLY_ROWS.contains(&rows), "there are no tiles of {rows} rows");
        assert!(MULTIPLY_EPILOGUES.contains(&epilogue), "not {epilogue:?}");
        let defines = vec![
            ("WEIGHT", format.name().into()),
            ("ROWS", rows.to_string()),
            ("EPILOGUE", epilogue.name().into()),
        ];
        Self { kernel: "multiply", defines }
    }

    /// What follows a product of many rows: [`Epilogue::Residual`] or [`Epilogue::SwiGlu`].
    pub fn finish(epilogue: Epilogue) -> Self {
        assert!(matches!(epilogue, Epilogue::Residual | Epilogue::SwiGlu), "not {epilogue:?}");
        Self { kernel: "finish", defines: vec![("EPILOGUE", epilogue.name().into())] }
    }

    /// Head norms and rotation of what the plain product wrote.
    pub fn rope(kv: Format, head_dim: usize) -> Self {
        let defines = vec![("KV", kv.name().into()), ("HEAD_DIM", head_dim.to_string())];
        Self { kernel: "rope", defines }
    }

    /// Attention of `group` query heads a key head.
    pub fn attention(kv: Format, head_dim: usize, group: usize) -> Self {
        assert!((1..=MAX_GROUP).contains(&group), "{group} query heads share a key head");
        let defines = vec![
            ("KV", kv.name().into()),
            ("HEAD_DIM", head_dim.to_string()),
            ("GROUP", group.to_string()),
        ];
        Self { kernel: "attention", defines }
    }

    /// As [`Self::attention`], with the same bits, for tiles of 64 instead of 16 packed rows: where
    /// many rows of a sequence attend together.
    pub fn attention_wide(kv: Format, head_dim: usize, group: usize) -> Self {
        let mut variant = Self::attention(kv, head_dim, group);
        variant.defines.push(("TILE_ROWS", "64".into()));
        variant
    }

    /// The same for rows that see no positions before a first one of their own.
    #[must_use]
    pub fn windowed(mut self) -> Self {
        assert_eq!(self.kernel, "attention");
        self.defines.push(("WINDOW", "1".into()));
        self
    }

    /// A kernel without compile-time constants.
    pub fn plain(kernel: &'static str) -> Self {
        Self { kernel, defines: Vec::new() }
    }
}

impl fmt::Display for Variant {
    /// Such as `gemm.WEIGHT=FP8.ROWS=8.EPILOGUE=HEAD`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.kernel)?;
        self.defines.iter().try_for_each(|(name, value)| write!(f, ".{name}={value}"))
    }
}
