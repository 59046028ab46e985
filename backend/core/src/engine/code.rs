//! Which compiled kernels a model needs: builder and executor ask here, so that what is built is what is
//! looked for. Also what the kernels demand of a model.

use super::{Manifest, Precision};
use crate::model::decoder::{Decoder, Layer, Linear, MatrixKind};
use crate::model::eagle::Eagle;
use crate::model::image::RUN;
use crate::model::medusa::Medusa;
use crate::model::{DraftHead, Dtype, EagleConfig, MedusaConfig, ModelConfig};
use spec_kernels::{
    Epilogue, Format, MAX_GROUP, MULTIPLY_EPILOGUES, MULTIPLY_ROWS, Variant, gemm_rows,
    has_warpgroups,
};

/// Elements of a head that the kernels are written for.
const HEAD_DIMS: [usize; 2] = [64, 128];

/// The kernels of one model. It has passed [`Device::validate`](super::Device::validate).
#[derive(Clone, Copy, Debug)]
pub(crate) struct Kernels<'a> {
    pub model: &'a ModelConfig,
    pub precision: &'a Precision,
}

impl<'a> Kernels<'a> {
    /// Those of an engine's model.
    pub(crate) fn of(manifest: &'a Manifest) -> Self {
        Self { model: &manifest.model, precision: &manifest.precision }
    }

    /// The product of at most `rows` rows, one of [`gemm_rows`], with a matrix.
    pub(crate) fn gemm(&self, linear: &Linear, rows: usize) -> Variant {
        let model = self.model;
        let epilogue = match linear.kind {
            // The norms of the heads come before the rotation, and need whole heads.
            MatrixKind::Qkv if model.qk_norm => Epilogue::Raw,
            MatrixKind::Qkv => Epilogue::Qkv { head_dim: model.head_dim },
            MatrixKind::Out | MatrixKind::Down | MatrixKind::Fc => Epilogue::Residual,
            MatrixKind::GateUp => Epilogue::SwiGlu,
            MatrixKind::Embed | MatrixKind::Head => Epilogue::Head,
        };
        self.gemm_with(linear, rows, epilogue)
    }

    /// The same with the queries, keys and values of the first layer of a head on hidden states: its rows are put together before
    /// it, behind their norms where they have some.
    pub(crate) fn first_gemm(&self, qkv: &Linear, rows: usize) -> Variant {
        self.gemm_with(qkv, rows, Epilogue::Residual)
    }

    fn gemm_with(&self, linear: &Linear, rows: usize, epilogue: Epilogue) -> Variant {
        let dtype = self.precision.of(linear.kind);
        Variant::gemm(format(dtype), rows, epilogue).with_shape(linear.n(), linear.k)
    }

    /// The rows of the embedding.
    pub(crate) fn embed(&self) -> Variant {
        Variant::embed(format(self.precision.head))
    }

    /// Norms and rotation of the heads, where the product does not rotate.
    pub(crate) fn rope(&self) -> Variant {
        Variant::rope(format(self.precision.kv), self.model.head_dim)
    }

    /// The product with whole blocks of a prompt, in tiles of so many rows.
    pub(crate) fn multiply(&self, rows: usize, epilogue: Epilogue) -> Variant {
        Variant::multiply(format(self.precision.weights), rows, epilogue)
    }

    /// The matrices, row by row, for products of many rows by a library.
    pub(crate) fn unpack(&self) -> Variant {
        Variant::unpack(format(self.precision.weights))
    }

    /// Halves as kernels here multiply them in blocks.
    pub(crate) fn quantise(&self) -> Variant {
        Variant::plain("quantise")
    }

    /// The same for a library, which takes halves as they are where weights are FP16.
    pub(crate) fn quantise_for_library(&self) -> Option<Variant> {
        (self.precision.weights == Dtype::Fp8).then(|| self.quantise())
    }

    /// The attention, in narrow tiles and in wide ones.
    pub(crate) fn attention(&self) -> [Variant; 2] {
        let (kv, head_dim) = (format(self.precision.kv), self.model.head_dim);
        let group = self.model.num_heads / self.model.num_kv_heads;
        let both =
            [Variant::attention(kv, head_dim, group), Variant::attention_wide(kv, head_dim, group)];
        match self.model.draft_head {
            None => both,
            Some(_) => both.map(Variant::windowed),
        }
    }

    /// The matrices of decoder layers that are all alike.
    fn layer(&self) -> [Linear; 4] {
        Layer::of(self.model, 0).matrices().map(Linear::clone)
    }
}

/// Every kernel that a model needs on an architecture, each once, in the order of its engine.
pub fn needed_variants(model: &ModelConfig, precision: &Precision, arch: &str) -> Vec<Variant> {
    let kernels = Kernels { model, precision };
    let rows = gemm_rows(arch);
    let mut variants = match &model.draft_head {
        None => of_model(&kernels, rows),
        Some(DraftHead::Eagle(eagle)) => of_head(&kernels, eagle, rows),
        Some(DraftHead::Medusa(medusa)) => of_medusa(&kernels, medusa, rows),
    };
    variants.extend(has_warpgroups(arch).then(|| Variant::plain("normalise")));
    if has_warpgroups(arch) && model.draft_head.is_none() {
        for epilogue in MULTIPLY_EPILOGUES {
            variants.extend(MULTIPLY_ROWS.map(|rows| kernels.multiply(rows, epilogue)));
        }
        variants.push(kernels.quantise());
    }
    // Two matrices of one shape share their kernel.
    let mut seen = std::collections::HashSet::new();
    variants.retain(|variant| seen.insert(variant.clone()));
    variants
}

fn of_model(kernels: &Kernels<'_>, rows: &[usize]) -> Vec<Variant> {
    let mut variants = vec![kernels.embed()];
    let head = Decoder::of(&ModelConfig { num_layers: 0, ..kernels.model.clone() }).head().clone();
    for linear in kernels.layer().into_iter().chain([head]) {
        variants.extend(rows.iter().map(|&rows| kernels.gemm(&linear, rows)));
    }
    variants.push(kernels.rope());
    variants.extend(kernels.attention());
    variants.extend(["rows", "sample", "accept"].map(Variant::plain));
    variants.extend([kernels.unpack(), Variant::plain("normalise")]);
    variants.extend(kernels.quantise_for_library());
    variants.extend([Epilogue::Residual, Epilogue::SwiGlu].map(Variant::finish));
    variants.extend(kernels.model.draft_vocab.map(|_| Variant::plain("spread")));
    variants
}

/// A head leaves to its target what the engine does not have, kernels included.
fn of_head(kernels: &Kernels<'_>, eagle: &EagleConfig, rows: &[usize]) -> Vec<Variant> {
    let Eagle { embed, fc, first, head, .. } = Eagle::of(kernels.model, eagle);
    let mut variants = vec![Variant::plain("join")];
    variants.extend(eagle.maps_vocab.then(|| Variant::plain("spread")));
    variants.extend(embed.map(|_| kernels.embed()));
    variants.extend(rows.iter().map(|&rows| kernels.first_gemm(&first.attention.qkv, rows)));
    for linear in [fc].into_iter().chain(kernels.layer()).chain(head) {
        variants.extend(rows.iter().map(|&rows| kernels.gemm(&linear, rows)));
    }
    variants.push(kernels.rope());
    variants.extend(kernels.attention());
    variants
}

/// Heads run with the kernels of their target besides.
fn of_medusa(kernels: &Kernels<'_>, medusa: &MedusaConfig, rows: &[usize]) -> Vec<Variant> {
    let Medusa { heads, .. } = Medusa::of(kernels.model, medusa);
    let matrices = heads.into_iter().flat_map(|head| head.blocks.into_iter().chain(head.head));
    let products = matrices.flat_map(|linear| rows.iter().map(move |&rows| (linear.clone(), rows)));
    let mut variants = vec![Variant::plain("join")];
    variants.extend(products.map(|(linear, rows)| kernels.gemm(&linear, rows)));
    variants
}

/// The section that holds a kernel's code for an architecture.
pub fn code_section(arch: &str, variant: &Variant) -> String {
    format!("code.{arch}.{variant}")
}

/// What the kernels demand of a model, and what to do where it is not met.
pub(super) fn check_model(model: &ModelConfig, precision: &Precision) -> Result<(), String> {
    let Precision { weights, head, kv } = *precision;
    let formats =
        [("weights", weights, "--dtype"), ("head", head, "--head-dtype"), ("kv", kv, "--kv-dtype")];
    for (field, dtype, option) in formats {
        if !matches!(dtype, Dtype::Fp8 | Dtype::Fp16) {
            return Err(refusal(field, dtype, "fp8 or fp16", &format!("use {option} fp8 or fp16")));
        }
    }
    let elsewhere = "use --device cpu";
    match &model.draft_head {
        None => (),
        // Rows are put together in whole vectors.
        Some(DraftHead::Eagle(eagle)) if !eagle.target_hidden.is_multiple_of(RUN) => {
            let (size, expected) = (eagle.target_hidden, format!("a multiple of {RUN}"));
            return Err(refusal("target_hidden", size, &expected, "use --draft-device cpu"));
        }
        // What it leaves to its target is as wide as that.
        Some(DraftHead::Eagle(eagle))
            if !(eagle.own_embed && eagle.own_head) && eagle.target_hidden != model.hidden_size =>
        {
            let (size, expected) = (model.hidden_size, eagle.target_hidden.to_string());
            return Err(refusal("hidden_size", size, &expected, "use --draft-device cpu"));
        }
        Some(DraftHead::Eagle(_)) => (),
        // As wide as their target, which has passed.
        Some(DraftHead::Medusa(_)) => (),
    }
    if !HEAD_DIMS.contains(&model.head_dim) {
        return Err(refusal("head_dim", model.head_dim, "64 or 128", elsewhere));
    }
    let group = model.num_heads / model.num_kv_heads;
    if group > MAX_GROUP {
        let most = format!("at most {MAX_GROUP}");
        return Err(refusal("num_heads / num_kv_heads", group, &most, elsewhere));
    }
    // Gate and up take turns in runs of rows, and every row of inputs is loaded in whole vectors.
    for (field, size) in
        [("hidden_size", model.hidden_size), ("intermediate_size", model.intermediate_size)]
    {
        if !size.is_multiple_of(RUN) {
            return Err(refusal(field, size, &format!("a multiple of {RUN}"), elsewhere));
        }
    }
    Ok(())
}

fn refusal(field: &str, value: impl std::fmt::Display, expected: &str, remedy: &str) -> String {
    format!("{field} is {value}, CUDA engines take {expected}: {remedy}")
}

fn format(dtype: Dtype) -> Format {
    match dtype {
        Dtype::Fp8 => Format::Fp8,
        Dtype::Fp16 => Format::Fp16,
        other => panic!("there are no kernels for {other}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::testing::small_llama;

    const FP8: Precision = Precision { weights: Dtype::Fp8, head: Dtype::Fp16, kv: Dtype::Fp16 };

    fn names(model: &ModelConfig) -> Vec<String> {
        needed_variants(model, &FP8, "sm_80").iter().map(ToString::to_string).collect()
    }

    #[test]
    fn every_matrix_has_its_kernel_for_every_number_of_rows() {
        let names = names(&small_llama());
        assert_eq!(names.len(), 1 + 5 * 4 + 3 + 3 + 5);
        for name in [
            "embed.WEIGHT=FP16",
            "gemm.WEIGHT=FP8.ROWS=8.EPILOGUE=QKV.HEAD_DIM=64.SHAPE_N=512.SHAPE_K=96",
            "gemm.WEIGHT=FP8.ROWS=16.EPILOGUE=RESIDUAL.SHAPE_N=96.SHAPE_K=256",
            "gemm.WEIGHT=FP8.ROWS=16.EPILOGUE=SWIGLU.SHAPE_N=320.SHAPE_K=96",
            "gemm.WEIGHT=FP8.ROWS=32.EPILOGUE=RESIDUAL.SHAPE_N=96.SHAPE_K=160",
            "gemm.WEIGHT=FP16.ROWS=8.EPILOGUE=HEAD.SHAPE_N=100.SHAPE_K=96",
            "rope.KV=FP16.HEAD_DIM=64",
            "attention.KV=FP16.HEAD_DIM=64.GROUP=2",
            "attention.KV=FP16.HEAD_DIM=64.GROUP=2.TILE_ROWS=64",
            "unpack.WEIGHT=FP8",
            "normalise",
            "quantise",
            "finish.EPILOGUE=RESIDUAL",
            "finish.EPILOGUE=SWIGLU",
            "rows",
            "sample",
            "accept",
        ] {
            assert!(names.iter().any(|n| n == name), "{name} is not among {names:?}");
        }
    }

    #[test]
    fn warpgroups_take_more_rows() {
        let hopper = needed_variants(&small_llama(), &FP8, "sm_90a");
        assert_eq!(hopper.len(), names(&small_llama()).len() + 5 * 3 + 3 * 2);
        let most = "gemm.WEIGHT=FP8.ROWS=320.EPILOGUE=RESIDUAL.SHAPE_N=96.SHAPE_K=160";
        assert!(hopper.iter().any(|variant| variant.to_string() == most));
    }

    #[test]
    fn head_norms_need_the_plain_product() {
        let names = names(&ModelConfig { qk_norm: true, ..small_llama() });
        let raw = "gemm.WEIGHT=FP8.ROWS=8.EPILOGUE=RAW.SHAPE_N=512.SHAPE_K=96";
        assert!(names.contains(&raw.into()), "{names:?}");
        assert!(!names.iter().any(|name| name.contains("QKV")), "{names:?}");
    }

    #[test]
    fn matrices_of_one_shape_share_their_kernel() {
        let names = names(&ModelConfig { intermediate_size: 256, ..small_llama() });
        assert_eq!(names.len(), 1 + 4 * 4 + 3 + 3 + 5);
    }
}
