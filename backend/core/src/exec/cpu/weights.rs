//! The weights of one model, read from an engine file into memory.

use super::{Arena, Pool, Weight};
use crate::Result;
use crate::engine::{Engine, EngineReader, SectionKind};
use crate::model::{Dtype, ModelConfig};

/// All weights of a model; several models may compute with them at once.
pub struct Weights {
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
    /// Reads them; all threads of the pool help.
    pub fn load(engine: &Engine, pool: &Pool) -> Result<Self> {
        Self::load_into(Self::reserve(engine)?, engine, pool)
    }

    /// Memory for the matrices of a model.
    pub fn reserve(engine: &Engine) -> Result<Arena> {
        let sections = engine.manifest().sections.iter();
        let matrices = sections.filter(|section| section.kind == SectionKind::Weight);
        Arena::new(matrices.map(|section| Arena::room(section.bytes as usize)).sum())
    }

    /// As `load`, with the matrices in memory that `reserve` gave.
    pub fn load_into(arena: Arena, engine: &Engine, pool: &Pool) -> Result<Self> {
        engine.require_cpu()?;
        let manifest = engine.manifest();
        let (model, precision) = (&manifest.model, &manifest.precision);
        let reader = engine.reader()?;
        let mut loader = Loader { reader: &reader, pool, arena };
        let (hidden, vocab) = (model.hidden_size, model.vocab_size);
        let embed = loader.weight("embed", precision.head, vocab, hidden, false)?;
        let layers = (0..model.num_layers).map(|idx| loader.layer(idx, model, precision.weights));
        let layers = layers.collect::<Result<_>>()?;
        let final_norm = loader.floats("final_norm")?;
        let head = match model.tied_head {
            true => None,
            false => Some(loader.weight("head", precision.head, vocab, hidden, false)?),
        };
        reader.finish()?;
        Ok(Self { embed, layers, final_norm, head })
    }

    /// Bytes that the weights of an engine take.
    pub fn bytes(engine: &Engine) -> usize {
        let sections = engine.manifest().sections.iter();
        sections.map(|section| Arena::room(section.bytes as usize)).sum()
    }

    pub(super) fn head(&self) -> &Weight {
        self.head.as_ref().unwrap_or(&self.embed)
    }
}

/// Reads sections into one arena.
struct Loader<'a> {
    reader: &'a EngineReader<'a>,
    pool: &'a Pool,
    arena: Arena,
}

impl Loader<'_> {
    fn layer(&mut self, idx: usize, model: &ModelConfig, dtype: Dtype) -> Result<Layer> {
        let name = |part: &str| format!("layers.{idx}.{part}");
        let norm = |loader: &Self, part: &str| loader.floats(&name(part));
        let head_norm = |loader: &Self, part| model.qk_norm.then(|| norm(loader, part)).transpose();
        let (hidden, ff) = (model.hidden_size, model.intermediate_size);
        let (qkv, q) = (model.qkv_size(), model.q_size());
        Ok(Layer {
            input_norm: norm(self, "input_norm")?,
            qkv: self.weight(&name("qkv"), dtype, qkv, hidden, model.qkv_bias)?,
            q_norm: head_norm(self, "q_norm")?,
            k_norm: head_norm(self, "k_norm")?,
            out: self.weight(&name("out"), dtype, hidden, q, model.out_bias)?,
            post_norm: norm(self, "post_norm")?,
            gate_up: self.weight(&name("gate_up"), dtype, 2 * ff, hidden, model.mlp_bias)?,
            down: self.weight(&name("down"), dtype, hidden, ff, model.mlp_bias)?,
        })
    }

    fn weight(
        &mut self,
        name: &str,
        dtype: Dtype,
        n: usize,
        k: usize,
        has_bias: bool,
    ) -> Result<Weight> {
        let section = self.reader.section(name);
        let read = |offset, piece: &mut [u8]| section.read(offset, piece);
        let bytes = self.arena.fill(self.pool, section.len(), read)?;
        let floats = |suffix: &str| self.floats(&format!("{name}.{suffix}"));
        let scales = if dtype.is_scaled() { floats("scale")? } else { Vec::new() };
        let bias = has_bias.then(|| floats("bias")).transpose()?;
        Ok(Weight::new(dtype, n, k, bytes, scales, bias))
    }

    fn floats(&self, name: &str) -> Result<Vec<f32>> {
        self.reader.section(name).floats()
    }
}
