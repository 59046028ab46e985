//! Which sections an engine has: a function of the model, its number formats and the device, used by the
//! builder and by the reader. The order here is the order in the file.

use super::code::{code_section, needed_variants};
use super::{Device, Precision, SectionKind};
use crate::Result;
use crate::model::decoder::{self, Linear, Load, MatrixKind, Vector};
use crate::model::{Dtype, LayerSkip, ModelConfig, image, panel};

/// A section that a model demands, before it has a place and a hash.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SectionSpec {
    /// Such as `layers.0.qkv`, `layers.0.qkv.scale`, `embed`.
    pub name: String,
    /// What it holds.
    pub kind: SectionKind,
    /// What the matrix does, if it is one.
    pub matrix: Option<MatrixKind>,
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
    let mut list = List { device, precision, specs: Vec::new() };
    decoder::walk(config, &mut list).expect("a list takes everything");
    if let Device::Cuda { archs, .. } = device {
        let code = |arch: &String| -> Vec<String> {
            let variants = needed_variants(config, precision, arch);
            variants.iter().map(|variant| code_section(arch, variant)).collect()
        };
        let names = archs.iter().flat_map(code);
        let code = |name| SectionSpec {
            name,
            kind: SectionKind::Code,
            matrix: None,
            dtype: None,
            shape: Vec::new(),
            bytes: None,
        };
        list.specs.extend(names.map(code));
    }
    list.specs
}

/// The share of a pass of a model that one without these layers takes, by the bytes of the weights that it reads.
pub fn pass_share(
    skip: &LayerSkip,
    model: &ModelConfig,
    precision: &Precision,
    device: &Device,
) -> f64 {
    let (mut all, mut attention, mut mlp) = (0, 0, 0);
    for section in expected_sections(model, precision, device) {
        let bytes = section.bytes.unwrap_or(0);
        match section.matrix {
            // A row of it is read.
            Some(MatrixKind::Embed) if !model.tied_head => continue,
            Some(MatrixKind::Qkv | MatrixKind::Out) => attention += bytes,
            Some(MatrixKind::GateUp | MatrixKind::Down) => mlp += bytes,
            Some(MatrixKind::Embed | MatrixKind::Head | MatrixKind::Fc) => (),
            None => continue,
        }
        all += bytes;
    }
    let (attentions, mlps) = (skip.attention.len() as u64, skip.mlp.len() as u64);
    let left_out = attention * attentions + mlp * mlps;
    1.0 - left_out as f64 / (model.num_layers as f64 * all as f64)
}

struct List<'a> {
    device: &'a Device,
    precision: &'a Precision,
    specs: Vec<SectionSpec>,
}

impl Load for List<'_> {
    type Matrix = ();
    type Vector = ();

    fn matrix(&mut self, linear: &Linear) -> Result<()> {
        let Linear { name, kind, has_bias, .. } = linear;
        let (shape, dtype) = (linear.shape(), self.precision.of(*kind));
        let [n, k] = shape;
        let (bytes, values) = match self.device {
            Device::Cpu => (panel::packed_bytes(dtype, n, k), n),
            Device::Cuda { .. } => (image::image_bytes(dtype, n, k), image::padded_len(n)),
        };
        self.specs.push(SectionSpec {
            name: name.clone(),
            kind: SectionKind::Weight,
            matrix: Some(*kind),
            dtype: Some(dtype),
            shape: shape.into(),
            bytes: Some(bytes as u64),
        });
        if dtype.has_output_scales() {
            self.floats(format!("{name}.scale"), SectionKind::Scale, n, values);
        }
        if *has_bias {
            self.floats(format!("{name}.bias"), SectionKind::Vector, n, values);
        }
        Ok(())
    }

    fn vector(&mut self, vector: &Vector) -> Result<()> {
        self.floats(vector.name.clone(), SectionKind::Vector, vector.len, vector.len);
        Ok(())
    }
}

impl List<'_> {
    /// `size` values in the room of `padded`.
    fn floats(&mut self, name: String, kind: SectionKind, size: usize, padded: usize) {
        self.specs.push(SectionSpec {
            name,
            kind,
            matrix: None,
            dtype: Some(Dtype::Fp32),
            shape: vec![size],
            bytes: Some(4 * padded as u64),
        });
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
        let names = |arch: &'static str| {
            let variants = needed_variants(&config, &precision, arch);
            variants.into_iter().map(move |variant| format!("code.{arch}.{variant}"))
        };
        let names: Vec<String> = names("sm_90a").chain(names("sm_80")).collect();
        let (weights, code) = specs.split_at(specs.len() - names.len());
        assert!(weights.iter().all(|spec| spec.kind != SectionKind::Code && spec.bytes.is_some()));
        for (spec, name) in code.iter().zip(names) {
            assert_eq!(spec.name, name);
            assert_eq!((spec.kind, spec.dtype, spec.bytes), (SectionKind::Code, None, None));
        }
    }
}
