//! The weights of one model, read from an engine file into memory.

use super::{Arena, Pool, Weight};
use crate::Result;
use crate::engine::{Engine, EngineReader, Manifest, Precision, SectionKind};
use crate::model::DraftHead;
use crate::model::decoder::{Decoder, Linear, Load, Vector};
use crate::model::eagle::Eagle;
use crate::model::medusa::Medusa;

/// All weights of a model; several models may compute with them at once.
pub struct Weights {
    parts: Parts,
}

enum Parts {
    Decoder(Box<Decoder<Weight, Vec<f32>>>),
    Eagle(Box<Eagle<Weight, Vec<f32>>>),
    Medusa(Box<Medusa<Weight, Vec<f32>>>),
}

impl Weights {
    /// Reads them; all threads of the pool help.
    pub fn load(engine: &Engine, pool: &Pool) -> Result<Self> {
        Self::load_into(Self::reserve(engine)?, engine, pool)
    }

    /// Memory for the matrices of a model.
    pub(crate) fn reserve(engine: &Engine) -> Result<Arena> {
        let sections = engine.manifest().sections.iter();
        let matrices = sections.filter(|section| section.kind == SectionKind::Weight);
        Arena::new(matrices.map(|section| Arena::room(section.bytes as usize)).sum())
    }

    /// As `load`, with the matrices in memory that `reserve` gave.
    pub(crate) fn load_into(arena: Arena, engine: &Engine, pool: &Pool) -> Result<Self> {
        engine.require_cpu()?;
        let Manifest { model, precision, .. } = engine.manifest();
        let reader = engine.reader()?;
        let mut loader = Loader { reader: &reader, precision, pool, arena };
        let parts = match &model.draft_head {
            None => Parts::Decoder(Box::new(Decoder::of(model).load(&mut loader)?)),
            Some(DraftHead::Eagle(eagle)) => {
                Parts::Eagle(Box::new(Eagle::of(model, eagle).load(&mut loader)?))
            }
            Some(DraftHead::Medusa(medusa)) => {
                Parts::Medusa(Box::new(Medusa::of(model, medusa).load(&mut loader)?))
            }
        };
        reader.finish()?;
        Ok(Self { parts })
    }

    /// The parts of a model of its own.
    pub(super) fn decoder(&self) -> Option<&Decoder<Weight, Vec<f32>>> {
        match &self.parts {
            Parts::Decoder(decoder) => Some(decoder),
            Parts::Eagle(_) | Parts::Medusa(_) => None,
        }
    }

    /// The parts of a head on the hidden states of another model.
    pub(super) fn eagle(&self) -> Option<&Eagle<Weight, Vec<f32>>> {
        match &self.parts {
            Parts::Eagle(eagle) => Some(eagle),
            Parts::Decoder(_) | Parts::Medusa(_) => None,
        }
    }

    /// The parts of Medusa heads.
    pub(super) fn medusa(&self) -> Option<&Medusa<Weight, Vec<f32>>> {
        match &self.parts {
            Parts::Medusa(medusa) => Some(medusa),
            Parts::Decoder(_) | Parts::Eagle(_) => None,
        }
    }

    /// Bytes that the weights of an engine take.
    pub(crate) fn bytes(engine: &Engine) -> usize {
        let sections = engine.manifest().sections.iter();
        sections.map(|section| Arena::room(section.bytes as usize)).sum()
    }
}

/// Reads sections into one arena.
struct Loader<'a> {
    reader: &'a EngineReader<'a>,
    precision: &'a Precision,
    pool: &'a Pool,
    arena: Arena,
}

impl Load for Loader<'_> {
    type Matrix = Weight;
    type Vector = Vec<f32>;

    fn matrix(&mut self, linear: &Linear) -> Result<Weight> {
        let (name, dtype) = (&linear.name, self.precision.of(linear.kind));
        let section = self.reader.section(name);
        let read = |offset, piece: &mut [u8]| section.read(offset, piece);
        let bytes = self.arena.fill(self.pool, section.len(), read)?;
        let floats = |suffix: &str| self.floats(&format!("{name}.{suffix}"));
        let scales = if dtype.has_output_scales() { floats("scale")? } else { Vec::new() };
        let bias = linear.has_bias.then(|| floats("bias")).transpose()?;
        Ok(Weight::new(dtype, linear.n(), linear.k, bytes, scales, bias))
    }

    fn vector(&mut self, vector: &Vector) -> Result<Vec<f32>> {
        self.floats(&vector.name)
    }
}

impl Loader<'_> {
    fn floats(&self, name: &str) -> Result<Vec<f32>> {
        self.reader.section(name).floats()
    }
}
