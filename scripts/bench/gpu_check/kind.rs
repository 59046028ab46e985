//! Which part of a pass a kernel is, by the name of its variant, and what it has to read.

use spec_core::engine::{Device, Manifest, SectionSpec, expected_sections};
use spec_core::model::decoder::MatrixKind;

/// The parts of a pass that run in every layer; the norm of many rows once for the head as well.
pub(crate) const LAYER: [&str; 7] =
    ["normalise", "qkv", "rope", "attention", "out", "gate_up", "down"];

/// The name of a product.
fn product(kind: MatrixKind) -> &'static str {
    match kind {
        MatrixKind::Qkv => "qkv",
        MatrixKind::Out => "out",
        MatrixKind::GateUp => "gate_up",
        MatrixKind::Down => "down",
        MatrixKind::Embed | MatrixKind::Head | MatrixKind::Fc => "head",
    }
}

/// The matrix that a kind of product has.
fn section(kind: &str, manifest: &Manifest) -> Option<SectionSpec> {
    // All layers are alike, and where the head is not the embedding both have one shape.
    let sections = expected_sections(&manifest.model, &manifest.precision, &Device::Cpu);
    sections.into_iter().find(|each| each.matrix.is_some_and(|matrix| product(matrix) == kind))
}

/// What a variant does in a pass of the model.
pub(crate) fn of(variant: &str, manifest: &Manifest) -> String {
    let epilogue = |name: &str| variant.contains(&format!(".EPILOGUE={name}"));
    let out_k = manifest.model.q_size();
    let name = match variant.split('.').next().unwrap_or(variant) {
        "gemm" if epilogue("QKV") || epilogue("RAW") => "qkv",
        "gemm" if epilogue("SWIGLU") => "gate_up",
        "gemm" if epilogue("HEAD") => "head",
        "gemm" if variant.ends_with(&format!(".SHAPE_K={out_k}")) => "out",
        "gemm" => "down",
        other => other,
    };
    name.into()
}

/// Outputs and inputs of a product, and the bytes of its weights.
pub(crate) fn matrix(kind: &str, manifest: &Manifest) -> Option<([usize; 2], usize)> {
    let section = section(kind, manifest)?;
    let (&[n, k], dtype) = (section.shape.first_chunk()?, section.dtype?);
    Some(([n, k], n * k * dtype.bytes()))
}

/// Weights of a product.
pub(crate) fn weights(kind: &str, manifest: &Manifest) -> usize {
    matrix(kind, manifest).map_or(0, |([n, k], _)| n * k)
}

/// Bytes of all weights that a pass reads.
pub(crate) fn pass_bytes(manifest: &Manifest) -> usize {
    let bytes = |kind| matrix(kind, manifest).map_or(0, |(_, bytes)| bytes);
    manifest.model.num_layers * LAYER.into_iter().map(bytes).sum::<usize>() + bytes("head")
}

/// Bytes of the keys and values of one position in one layer.
pub(crate) fn kv_bytes(manifest: &Manifest) -> usize {
    2 * manifest.model.kv_size() * manifest.precision.kv.bytes()
}
