//! Which variants the emulator is built with. The build script includes this file too.

use std::fs;
use std::path::{Path, PathBuf};

use spec_kernels::{
    Epilogue, Format, GEMM_ROWS, MULTIPLY_EPILOGUES, MULTIPLY_ROWS, Variant, WGMMA_ROWS, path_of,
};

/// One compiled kernel: its name, its source, and the defines.
pub(crate) struct Unit {
    pub(crate) name: String,
    pub(crate) kernel: String,
    /// In one of the folders.
    pub(crate) path: String,
    pub(crate) defines: Vec<(String, String)>,
}

/// Query heads of a key head that tests use, with heads of any size and with large ones.
const GROUPS: [usize; 6] = [1, 2, 3, 4, 7, 8];
const LARGE_GROUPS: [usize; 4] = [5, 6, 12, 16];
/// Those of heads on hidden states, whose keys and values are halves.
const WINDOWED_GROUPS: [usize; 3] = [2, 3, 4];

/// The kernels with code of their own for other architectures than Hopper's, and these: one without bulk copies, and one that
/// has them, and large multiprocessors, but no warpgroups.
const KINDS: [(&str, &[u32]); 3] = [("gemm", &[80, 100]), ("probe", &[80]), ("ring", &[80])];

/// Where sources and headers are: the machine's, the test kernels', the kernels'.
pub(crate) fn folders(root: &Path) -> [PathBuf; 3] {
    [root.join("cpp"), root.join("tests"), root.join("..")]
}

/// The variants of all kernels, for every kind of architecture where they differ; and the kernels of the emulator's own
/// tests.
pub(crate) fn all(folders: &[PathBuf; 3]) -> Vec<Unit> {
    let mut units: Vec<_> = variants().iter().map(unit).collect();
    let kernels = fs::read_dir(&folders[1]).expect("a folder of this package");
    let paths = kernels.filter_map(|entry| entry.ok().map(|entry| entry.path()));
    for path in paths.filter(|path| path.extension().is_some_and(|e| e == "cu")) {
        let name = path.file_stem().expect("a file").to_string_lossy().into_owned();
        let path = format!("{name}.cu");
        units.push(Unit { kernel: name.clone(), name, path, defines: Vec::new() });
    }
    let others: Vec<_> = units.iter().flat_map(others).collect();
    units.extend(others);
    units.sort_by(|a, b| a.name.cmp(&b.name));
    units
}

fn unit(variant: &Variant) -> Unit {
    Unit {
        name: variant.to_string(),
        kernel: variant.kernel.to_string(),
        path: path_of(variant.kernel).expect("every variant has a source").to_string(),
        defines: variant
            .defines
            .iter()
            .map(|(name, value)| (name.to_string(), value.clone()))
            .collect(),
    }
}

/// The same for other architectures; the name says so.
fn others(unit: &Unit) -> Vec<Unit> {
    let rows = unit.defines.iter().find(|(name, _)| name == "ROWS");
    if rows.is_some_and(|(_, rows)| !GEMM_ROWS.iter().any(|few| few.to_string() == *rows)) {
        return Vec::new();
    }
    let kinds = KINDS.iter().filter(|(kernel, _)| *kernel == unit.kernel);
    let other = |&sm: &u32| {
        let mut defines = unit.defines.clone();
        defines.push(("EMU_ARCH".into(), (sm * 10).to_string()));
        let (kernel, path) = (unit.kernel.clone(), unit.path.clone());
        Unit { name: format!("{}@sm_{sm}", unit.name), kernel, path, defines }
    };
    kinds.flat_map(|(_, sms)| sms.iter()).map(other).collect()
}

fn variants() -> Vec<Variant> {
    let mut all: Vec<_> = ["rows", "sample", "accept", "normalise", "quantise", "join", "spread"]
        .map(Variant::plain)
        .into();
    all.extend([Epilogue::Residual, Epilogue::SwiGlu].map(Variant::finish));
    for format in [Format::Fp8, Format::Fp16] {
        all.extend([Variant::embed(format), Variant::unpack(format)]);
        for rows in MULTIPLY_ROWS {
            all.extend(MULTIPLY_EPILOGUES.map(|e| Variant::multiply(format, rows, e)));
        }
        for rows in WGMMA_ROWS {
            let qkv = [64, 128].map(|head_dim| Epilogue::Qkv { head_dim });
            let others = [Epilogue::Raw, Epilogue::Residual, Epilogue::SwiGlu, Epilogue::Head];
            all.extend(qkv.into_iter().chain(others).map(|e| Variant::gemm(format, rows, e)));
        }
        for head_dim in [64, 128] {
            all.push(Variant::rope(format, head_dim));
            let large = if head_dim == 128 { &LARGE_GROUPS[..] } else { &[] };
            for &group in GROUPS.iter().chain(large) {
                all.push(Variant::attention(format, head_dim, group));
                all.push(Variant::attention_wide(format, head_dim, group));
            }
        }
    }
    for (head_dim, group) in
        [64, 128].into_iter().flat_map(|head_dim| WINDOWED_GROUPS.map(|group| (head_dim, group)))
    {
        all.push(Variant::attention(Format::Fp16, head_dim, group).windowed());
        all.push(Variant::attention_wide(Format::Fp16, head_dim, group).windowed());
    }
    all
}
