//! The weights of one model, copied from an engine file into memory.

use super::{Arena, Pool, Weight};
use crate::Result;
use crate::engine::{Engine, SectionKind};
use crate::model::Dtype;

/// All weights of a model.
pub(super) struct Weights {
    pub(super) embed: Weight,
    pub(super) layers: Vec<Layer>,
    pub(super) final_norm: Vec<f32>,
    /// `None`: the embedding is the head.
    head: Option<Weight>,
}

/// The weights of one decoder layer.
pub(super) struct Layer {
    pub(super) input_norm: Vec<f32>,
    pub(super) qkv: Weight,
    pub(super) q_norm: Option<Vec<f32>>,
    pub(super) k_norm: Option<Vec<f32>>,
    pub(super) out: Weight,
    pub(super) post_norm: Vec<f32>,
    pub(super) gate_up: Weight,
    pub(super) down: Weight,
}

impl Weights {
    pub(super) fn load(engine: &Engine, pool: &Pool) -> Result<Self> {
        let manifest = engine.manifest();
        let (model, precision) = (&manifest.model, &manifest.precision);
        let room = manifest.sections.iter().filter(|section| section.kind == SectionKind::Weight);
        let mut loader = Loader {
            engine,
            pool,
            arena: Arena::new(room.map(|section| Arena::room(section.bytes as usize)).sum())?,
        };
        let (hidden, ff) = (model.hidden_size, model.intermediate_size);
        let vocab = model.vocab_size;
        let embed = loader.weight("embed", precision.head, vocab, hidden, false);
        let dtype = precision.weights;
        let layers = (0..model.num_layers)
            .map(|idx| {
                let name = |part: &str| format!("layers.{idx}.{part}");
                let norm = |part: &str| engine.floats(&name(part)).to_vec();
                let (qkv_bias, q) = (model.qkv_bias, model.q_size());
                Layer {
                    input_norm: norm("input_norm"),
                    qkv: loader.weight(&name("qkv"), dtype, model.qkv_size(), hidden, qkv_bias),
                    q_norm: model.qk_norm.then(|| norm("q_norm")),
                    k_norm: model.qk_norm.then(|| norm("k_norm")),
                    out: loader.weight(&name("out"), dtype, hidden, q, model.out_bias),
                    post_norm: norm("post_norm"),
                    gate_up: loader.weight(&name("gate_up"), dtype, 2 * ff, hidden, model.mlp_bias),
                    down: loader.weight(&name("down"), dtype, hidden, ff, model.mlp_bias),
                }
            })
            .collect();
        let final_norm = engine.floats("final_norm").to_vec();
        let head =
            (!model.tied_head).then(|| loader.weight("head", precision.head, vocab, hidden, false));
        Ok(Self { embed, layers, final_norm, head })
    }

    pub(super) fn head(&self) -> &Weight {
        self.head.as_ref().unwrap_or(&self.embed)
    }
}

/// Copies sections into one arena.
struct Loader<'a> {
    engine: &'a Engine,
    pool: &'a Pool,
    arena: Arena,
}

impl Loader<'_> {
    fn weight(&mut self, name: &str, dtype: Dtype, n: usize, k: usize, has_bias: bool) -> Weight {
        let bytes = self.arena.push(self.pool, self.engine.section(name));
        let floats = |suffix: &str| self.engine.floats(&format!("{name}.{suffix}")).to_vec();
        let scales = if dtype.is_scaled() { floats("scale") } else { Vec::new() };
        Weight::new(dtype, n, k, bytes, scales, has_bias.then(|| floats("bias")))
    }
}
