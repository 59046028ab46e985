//! Which part of a pass a kernel is, by the name of its variant, and what it has to read.

use spec_core::engine::Manifest;
use spec_core::model::ModelConfig;
use spec_core::model::decoder::{Decoder, Linear, MatrixKind};

/// The parts of a pass that run in every layer.
pub(crate) const LAYER: [&str; 6] = ["qkv", "rope", "attention", "out", "gate_up", "down"];

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
fn linear(kind: &str, manifest: &Manifest) -> Option<Linear> {
    // All layers are alike.
    let decoder = Decoder::of(&ModelConfig { num_layers: 1, ..manifest.model.clone() });
    let mut linears = decoder.layers[0].matrices().into_iter().chain([decoder.head()]);
    linears.find(|linear| product(linear.kind) == kind).cloned()
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
    let linear = linear(kind, manifest)?;
    let [n, k] = linear.shape();
    Some(([n, k], n * k * manifest.precision.of(linear.kind).bytes()))
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
