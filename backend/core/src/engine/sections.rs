//! Which sections an engine has: a function of the model and its number formats, used by the builder
//! and by the reader. The order here is the order in the file.

use super::{Precision, SectionKind};
use crate::model::{Dtype, ModelConfig};

/// A section that a model demands, before it has a place and a hash.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SectionSpec {
    /// Such as `layers.0.qkv`, `layers.0.qkv.scale`, `embed`.
    pub name: String,
    /// What it holds.
    pub kind: SectionKind,
    /// Number format.
    pub dtype: Dtype,
    /// Logical shape, padding of the layout not counted.
    pub shape: Vec<usize>,
}

impl SectionSpec {
    /// Length in the file, the layout's padding counted.
    pub fn bytes(&self) -> u64 {
        match (self.kind, &self.shape[..]) {
            (SectionKind::Weight, &[n, k]) => packed_bytes(self.dtype, n, k),
            _ => self.shape.iter().map(|&size| size as u64).product::<u64>() * 4,
        }
    }
}

/// Outputs in a panel of packed weights.
const PANEL: u64 = 64;

/// Bytes of an `[n, k]` weight: whole panels of outputs, and inputs in the groups that one
/// multiply-add instruction takes. No overflow: [`ModelConfig::validate`] bounds n and k.
fn packed_bytes(dtype: Dtype, n: usize, k: usize) -> u64 {
    let group = match dtype {
        Dtype::Fp8 | Dtype::Int8 => 4,
        Dtype::Bf16 => 2,
        Dtype::Fp16 | Dtype::Fp32 => 1,
    };
    (n as u64).next_multiple_of(PANEL) * (k as u64).next_multiple_of(group) * dtype.bytes() as u64
}

/// The sections of a model, in file order: embedding, layers, final norm, and the head if it is not
/// the embedding. A weight is followed by its `.scale` (if the format has one), then its `.bias`.
pub fn expected_sections(config: &ModelConfig, precision: &Precision) -> Vec<SectionSpec> {
    let ModelConfig {
        vocab_size,
        hidden_size,
        intermediate_size,
        num_layers,
        head_dim,
        tied_head,
        ..
    } = *config;
    let mut list = List(Vec::new());
    list.weight("embed", precision.head, vocab_size, hidden_size, false);
    for layer in 0..num_layers {
        let name = |part: &str| format!("layers.{layer}.{part}");
        let dtype = precision.weights;
        list.vector(&name("input_norm"), hidden_size);
        list.weight(&name("qkv"), dtype, config.qkv_size(), hidden_size, config.qkv_bias);
        if config.qk_norm {
            list.vector(&name("q_norm"), head_dim);
            list.vector(&name("k_norm"), head_dim);
        }
        list.weight(&name("out"), dtype, hidden_size, config.q_size(), config.out_bias);
        list.vector(&name("post_norm"), hidden_size);
        list.weight(&name("gate_up"), dtype, 2 * intermediate_size, hidden_size, config.mlp_bias);
        list.weight(&name("down"), dtype, hidden_size, intermediate_size, config.mlp_bias);
    }
    list.vector("final_norm", hidden_size);
    if !tied_head {
        list.weight("head", precision.head, vocab_size, hidden_size, false);
    }
    list.0
}

struct List(Vec<SectionSpec>);

impl List {
    fn weight(&mut self, name: &str, dtype: Dtype, outputs: usize, inputs: usize, bias: bool) {
        self.push(name.to_string(), SectionKind::Weight, dtype, vec![outputs, inputs]);
        if dtype.is_scaled() {
            let scale = format!("{name}.scale");
            self.push(scale, SectionKind::Scale, Dtype::Fp32, vec![outputs]);
        }
        if bias {
            self.vector(&format!("{name}.bias"), outputs);
        }
    }

    fn vector(&mut self, name: &str, size: usize) {
        self.push(name.to_string(), SectionKind::Vector, Dtype::Fp32, vec![size]);
    }

    fn push(&mut self, name: String, kind: SectionKind, dtype: Dtype, shape: Vec<usize>) {
        self.0.push(SectionSpec { name, kind, dtype, shape });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::tests::tiny_manifest;

    fn names(config: &ModelConfig, precision: &Precision) -> Vec<String> {
        expected_sections(config, precision).into_iter().map(|spec| spec.name).collect()
    }

    #[test]
    fn a_plain_tied_model_has_only_weights_and_norms() {
        let manifest = tiny_manifest();
        assert_eq!(
            names(&manifest.model, &manifest.precision),
            [
                "embed",
                "layers.0.input_norm",
                "layers.0.qkv",
                "layers.0.out",
                "layers.0.post_norm",
                "layers.0.gate_up",
                "layers.0.down",
                "final_norm",
            ]
        );
    }

    #[test]
    fn every_option_adds_its_sections_in_place() {
        let mut config = tiny_manifest().model;
        config.tied_head = false;
        config.qkv_bias = true;
        config.out_bias = true;
        config.mlp_bias = true;
        config.qk_norm = true;
        let precision = Precision { weights: Dtype::Fp8, head: Dtype::Int8, kv: Dtype::Fp16 };
        assert_eq!(
            names(&config, &precision),
            [
                "embed",
                "embed.scale",
                "layers.0.input_norm",
                "layers.0.qkv",
                "layers.0.qkv.scale",
                "layers.0.qkv.bias",
                "layers.0.q_norm",
                "layers.0.k_norm",
                "layers.0.out",
                "layers.0.out.scale",
                "layers.0.out.bias",
                "layers.0.post_norm",
                "layers.0.gate_up",
                "layers.0.gate_up.scale",
                "layers.0.gate_up.bias",
                "layers.0.down",
                "layers.0.down.scale",
                "layers.0.down.bias",
                "final_norm",
                "head",
                "head.scale",
            ]
        );
        let specs = expected_sections(&config, &precision);
        let find = |name: &str| specs.iter().find(|spec| spec.name == name).unwrap();
        assert_eq!(find("layers.0.qkv").shape, [config.qkv_size(), config.hidden_size]);
        assert_eq!(find("layers.0.out").shape, [config.hidden_size, config.q_size()]);
        assert_eq!(find("layers.0.gate_up.scale").shape, [2 * config.intermediate_size]);
        assert_eq!(find("layers.0.gate_up.scale").bytes(), 8 * config.intermediate_size as u64);
        assert_eq!(find("layers.0.q_norm").dtype, Dtype::Fp32);
        assert_eq!(find("head").dtype, Dtype::Int8);
        assert_eq!(find("layers.0.down").dtype, Dtype::Fp8);
    }

    #[test]
    fn weights_are_padded_to_panels_and_groups() {
        assert_eq!(packed_bytes(Dtype::Fp32, 1, 3), 64 * 3 * 4);
        assert_eq!(packed_bytes(Dtype::Fp16, 65, 3), 128 * 3 * 2);
        assert_eq!(packed_bytes(Dtype::Bf16, 64, 3), 64 * 4 * 2);
        assert_eq!(packed_bytes(Dtype::Fp8, 64, 5), 64 * 8);
        assert_eq!(packed_bytes(Dtype::Int8, 63, 4), 64 * 4);
    }
}
