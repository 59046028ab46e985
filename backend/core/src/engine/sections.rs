//! Which sections an engine has: a function of the model, its number formats and the device, used by the
//! builder and by the reader. The order here is the order in the file.

use super::code::{code_section, needed_variants};
use super::{Device, Precision, SectionKind};
use crate::model::{Dtype, ModelConfig, image, panel};

/// A section that a model demands, before it has a place and a hash.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SectionSpec {
    /// Such as `layers.0.qkv`, `layers.0.qkv.scale`, `embed`.
    pub name: String,
    /// What it holds.
    pub kind: SectionKind,
    /// Number format; none for code.
    pub dtype: Option<Dtype>,
    /// Logical shape, padding of the layout not counted; empty for code.
    pub shape: Vec<usize>,
    /// Length in the file, the layout's padding counted; none for code, which is as long as the compiler
    /// makes it.
    pub bytes: Option<u64>,
}

/// The sections of a model, in file order: embedding, layers, final norm, and the head if it is not
/// the embedding. A weight is followed by its `.scale` (if the format has one), then its `.bias`. For CUDA
/// the code follows, architecture after architecture.
pub fn expected_sections(
    config: &ModelConfig,
    precision: &Precision,
    device: &Device,
) -> Vec<SectionSpec> {
    let ModelConfig {
        vocab_size,
        hidden_size,
        intermediate_size,
        num_layers,
        head_dim,
        tied_head,
        ..
    } = *config;
    let mut list = List { device, specs: Vec::new() };
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
    if let Device::Cuda { archs, .. } = device {
        let variants = needed_variants(config, precision);
        let names =
            archs.iter().flat_map(|arch| variants.iter().map(move |v| code_section(arch, v)));
        names.for_each(|name| list.push(name, SectionKind::Code, None, Vec::new(), None));
    }
    list.specs
}

struct List<'a> {
    device: &'a Device,
    specs: Vec<SectionSpec>,
}

impl List<'_> {
    /// No overflow: [`ModelConfig::validate`] bounds all sizes.
    fn weight(&mut self, name: &str, dtype: Dtype, outputs: usize, inputs: usize, bias: bool) {
        let (bytes, values) = match self.device {
            Device::Cpu => (panel::packed_bytes(dtype, outputs, inputs), outputs),
            Device::Cuda { .. } => {
                (image::image_bytes(dtype, outputs, inputs), image::padded_len(outputs))
            }
        };
        let shape = vec![outputs, inputs];
        self.push(name.into(), SectionKind::Weight, Some(dtype), shape, Some(bytes));
        if dtype.is_scaled() {
            self.floats(format!("{name}.scale"), SectionKind::Scale, outputs, values);
        }
        if bias {
            self.floats(format!("{name}.bias"), SectionKind::Vector, outputs, values);
        }
    }

    fn vector(&mut self, name: &str, size: usize) {
        self.floats(name.into(), SectionKind::Vector, size, size);
    }

    /// `size` values in the room of `padded`.
    fn floats(&mut self, name: String, kind: SectionKind, size: usize, padded: usize) {
        self.push(name, kind, Some(Dtype::Fp32), vec![size], Some(4 * padded));
    }

    fn push(
        &mut self,
        name: String,
        kind: SectionKind,
        dtype: Option<Dtype>,
        shape: Vec<usize>,
        bytes: Option<usize>,
    ) {
        let bytes = bytes.map(|bytes| bytes as u64);
        self.specs.push(SectionSpec { name, kind, dtype, shape, bytes });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::tests::tiny_manifest;
    use crate::model::testing::small_llama;

    fn names(config: &ModelConfig, precision: &Precision) -> Vec<String> {
        expected_sections(config, precision, &Device::Cpu)
            .into_iter()
            .map(|spec| spec.name)
            .collect()
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
        let specs = expected_sections(&config, &precision, &Device::Cpu);
        let find = |name: &str| specs.iter().find(|spec| spec.name == name).unwrap();
        assert_eq!(find("layers.0.qkv").shape, [config.qkv_size(), config.hidden_size]);
        assert_eq!(find("layers.0.out").shape, [config.hidden_size, config.q_size()]);
        assert_eq!(find("layers.0.gate_up.scale").shape, [2 * config.intermediate_size]);
        assert_eq!(find("layers.0.gate_up.scale").bytes, Some(8 * config.intermediate_size as u64));
        assert_eq!(find("layers.0.q_norm").dtype, Some(Dtype::Fp32));
        assert_eq!(find("head").dtype, Some(Dtype::Int8));
        assert_eq!(find("layers.0.down").dtype, Some(Dtype::Fp8));
    }

    #[test]
    fn cuda_sections_are_padded_to_tiles_and_end_with_the_code() {
        let mut config = small_llama();
        (config.qkv_bias, config.tied_head, config.num_layers) = (true, false, 1);
        let precision = Precision { weights: Dtype::Fp8, head: Dtype::Fp16, kv: Dtype::Fp16 };
        let archs = vec!["sm_90a".to_string(), "sm_80".to_string()];
        let device = Device::Cuda { archs, min_driver: 580 };
        let specs = expected_sections(&config, &precision, &device);
        let bytes = |name: &str| specs.iter().find(|spec| spec.name == name).unwrap().bytes;
        // 100 rows are two tiles; 96 inputs of one byte one unit, of two bytes two.
        assert_eq!(bytes("embed"), Some(2 * 2 * 8192));
        assert_eq!(bytes("layers.0.out"), Some(2 * 2 * 8192));
        assert_eq!(bytes("layers.0.out.scale"), Some(128 * 4));
        assert_eq!(bytes("layers.0.qkv.bias"), Some(512 * 4));
        assert_eq!(bytes("layers.0.input_norm"), Some(96 * 4), "norms are not padded");
        let variants = needed_variants(&config, &precision);
        let (weights, code) = specs.split_at(specs.len() - 2 * variants.len());
        assert!(weights.iter().all(|spec| spec.kind != SectionKind::Code && spec.bytes.is_some()));
        for (arch, code) in ["sm_90a", "sm_80"].iter().zip(code.chunks(variants.len())) {
            for (spec, variant) in code.iter().zip(&variants) {
                assert_eq!(spec.name, format!("code.{arch}.{variant}"));
                assert_eq!((spec.kind, spec.dtype, spec.bytes), (SectionKind::Code, None, None));
            }
        }
    }
}
