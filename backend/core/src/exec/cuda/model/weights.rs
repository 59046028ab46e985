//! An engine's weights in the memory of a GPU.

use crate::Result;
use crate::engine::{Engine, SectionKind};
use crate::exec::cuda::device::{Address, Device, Gpu};
use crate::model::decoder::{self, Decoder, Linear, Load, MatrixKind, Vector};
use crate::model::eagle::Eagle;
use crate::model::medusa::Medusa;
use crate::model::{DraftHead, ModelConfig};
use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;

/// Sections stay aligned as they are in the file.
const ALIGNMENT: usize = 256;

/// A matrix, its scales and its bias; 0 where it has none.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Matrix {
    pub kind: MatrixKind,
    /// Image of the matrix.
    pub weights: Address,
    /// f32 an output.
    pub scales: Address,
    /// f32 an output.
    pub bias: Address,
    /// Outputs.
    pub n: usize,
    /// Inputs.
    pub k: usize,
}

/// What looks at other rows.
pub(super) type Attention = decoder::Attention<Matrix, Address>;

/// What looks at its row alone.
pub(super) type Mlp = decoder::Mlp<Matrix, Address>;

/// All weights of a model or a head.
#[derive(Clone, Debug)]
pub(crate) enum Weights {
    /// Of a model of its own.
    Decoder(Box<Decoder<Matrix, Address>>),
    /// Of a head on the hidden states of another model.
    Eagle(Box<Eagle<Matrix, Address>>),
    /// Of heads that draft a token each from one of these.
    Medusa(Box<Medusa<Matrix, Address>>),
}

impl Weights {
    /// Bytes that [`upload`](Self::upload) allocates.
    pub(crate) fn bytes(engine: &Engine) -> usize {
        let sections = engine.manifest().sections.iter();
        let data = sections.filter(|section| section.kind != SectionKind::Code);
        data.map(|section| (section.bytes as usize).next_multiple_of(ALIGNMENT)).sum()
    }

    /// Copies every section but the code to the device.
    pub(crate) fn upload(engine: &Engine, device: &mut dyn Device) -> Result<Self> {
        let address = device.alloc(Self::bytes(engine))?;
        Self::upload_to(address, engine, device)
    }

    /// As `upload`, to memory that is there.
    fn upload_to(address: Address, engine: &Engine, device: &mut dyn Device) -> Result<Self> {
        // What cannot run is refused before gigabytes are copied.
        let description = device.describe();
        let (major, minor) = description.capability;
        engine.require_cuda(major, minor, description.driver)?;
        let mut placed = Placed::upload(address, engine, device)?;
        Self::load(&engine.manifest().model, &mut placed)
    }

    /// Brings what there is into the order of the computation.
    pub(super) fn load<L>(model: &ModelConfig, loader: &mut L) -> Result<Self>
    where
        L: Load<Matrix = Matrix, Vector = Address>,
    {
        match &model.draft_head {
            None => Ok(Self::Decoder(Box::new(Decoder::of(model).load(loader)?))),
            Some(DraftHead::Eagle(eagle)) => {
                Ok(Self::Eagle(Box::new(Eagle::of(model, eagle).load(loader)?)))
            }
            Some(DraftHead::Medusa(medusa)) => {
                Ok(Self::Medusa(Box::new(Medusa::of(model, medusa).load(loader)?)))
            }
        }
    }
}

/// Weights in memory of their own, which goes with the last model that holds them.
pub(crate) struct Uploaded {
    pub(super) weights: Weights,
    /// Has allocated it, and does nothing else.
    _owner: Gpu,
}

/// Weights that a model computes with.
#[derive(Debug)]
pub(crate) enum Held {
    /// In memory of its device.
    Own(Weights),
    /// In memory that others may use too.
    Shared(Arc<Uploaded>),
}

impl Held {
    pub(super) fn weights(&self) -> &Weights {
        match self {
            Self::Own(weights) => weights,
            Self::Shared(uploaded) => &uploaded.weights,
        }
    }
}

impl fmt::Debug for Uploaded {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Uploaded").finish_non_exhaustive()
    }
}

impl Uploaded {
    /// Has `owner` allocate memory, and `device` copy the weights there: devices of one number that share memory.
    pub(crate) fn new(
        engine: &Engine,
        mut owner: Box<dyn Device>,
        device: &mut dyn Device,
    ) -> Result<Self> {
        let address = owner.alloc(Weights::bytes(engine))?;
        // Zeroed, before another queue writes there; written, before others read.
        owner.wait()?;
        let weights = Weights::upload_to(address, engine, device)?;
        device.wait()?;
        Ok(Self { weights, _owner: Gpu::new(owner) })
    }
}

/// Where sections are, by name.
struct Placed<'a>(HashMap<&'a str, Address>);

impl<'a> Placed<'a> {
    fn upload(mut address: Address, engine: &'a Engine, device: &mut dyn Device) -> Result<Self> {
        let mut placed = HashMap::new();
        let reader = engine.reader()?;
        for section in &engine.manifest().sections {
            if section.kind == SectionKind::Code {
                continue;
            }
            let source = reader.section(&section.name);
            device.write_with(address, source.len(), &mut |offset, piece| {
                source.read(offset, piece)
            })?;
            placed.insert(section.name.as_str(), address);
            address += (section.bytes as usize).next_multiple_of(ALIGNMENT) as Address;
        }
        reader.finish()?;
        Ok(Self(placed))
    }

    /// 0 where there is none.
    fn address(&self, name: &str) -> Address {
        self.0.get(name).copied().unwrap_or(0)
    }
}

impl Load for Placed<'_> {
    type Matrix = Matrix;
    type Vector = Address;

    fn matrix(&mut self, linear: &Linear) -> Result<Matrix> {
        let Linear { name, kind, k, .. } = linear;
        Ok(Matrix {
            kind: *kind,
            weights: self.address(name),
            scales: self.address(&format!("{name}.scale")),
            bias: self.address(&format!("{name}.bias")),
            n: linear.n(),
            k: *k,
        })
    }

    fn vector(&mut self, vector: &Vector) -> Result<Address> {
        Ok(self.address(&vector.name))
    }
}
