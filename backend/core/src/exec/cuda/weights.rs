//! An engine's weights in the memory of a GPU.

use super::device::{Address, Device};
use super::forward::Gpu;
use crate::Result;
use crate::engine::{Engine, SectionKind};
use std::collections::HashMap;
use std::fmt;

/// Sections stay aligned as they are in the file.
const ALIGNMENT: usize = 256;

/// A matrix, its scales and its bias; 0 where it has none.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Matrix {
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

/// The weights of one layer.
#[derive(Clone, Copy, Debug)]
pub(super) struct Layer {
    /// Norm before the attention.
    pub input_norm: Address,
    /// Queries, keys and values.
    pub qkv: Matrix,
    /// Norm of each query head, or 0.
    pub q_norm: Address,
    /// Norm of each key head, or 0.
    pub k_norm: Address,
    /// Output of the attention.
    pub out: Matrix,
    /// Norm before the MLP.
    pub post_norm: Address,
    /// Gate and up.
    pub gate_up: Matrix,
    /// Down.
    pub down: Matrix,
}

/// All weights of a model.
#[derive(Clone, Debug)]
pub struct Weights {
    /// Table of token vectors.
    pub(super) embed: Matrix,
    /// In order.
    pub(super) layers: Vec<Layer>,
    /// Norm before the head.
    pub(super) final_norm: Address,
    /// The head, or the embedding again.
    pub(super) head: Matrix,
}

impl Weights {
    /// Bytes that [`upload`](Self::upload) allocates.
    pub fn bytes(engine: &Engine) -> usize {
        let sections = engine.manifest().sections.iter();
        let data = sections.filter(|section| section.kind != SectionKind::Code);
        data.map(|section| (section.bytes as usize).next_multiple_of(ALIGNMENT)).sum()
    }

    /// Copies every section but the code to the device.
    pub fn upload(engine: &Engine, device: &mut dyn Device) -> Result<Self> {
        let address = device.alloc(Self::bytes(engine))?;
        Self::upload_to(address, engine, device)
    }

    /// As `upload`, to memory that is there.
    fn upload_to(address: Address, engine: &Engine, device: &mut dyn Device) -> Result<Self> {
        // What cannot run is refused before gigabytes are copied.
        let description = device.describe();
        let (major, minor) = description.capability;
        engine.require_cuda(major, minor, description.driver)?;
        let placed = Placed::upload(address, engine, device)?;
        let config = &engine.manifest().model;
        let layer = |idx: usize| {
            let name = |part: &str| format!("layers.{idx}.{part}");
            Layer {
                input_norm: placed.vector(&name("input_norm")),
                qkv: placed.matrix(&name("qkv")),
                q_norm: placed.vector(&name("q_norm")),
                k_norm: placed.vector(&name("k_norm")),
                out: placed.matrix(&name("out")),
                post_norm: placed.vector(&name("post_norm")),
                gate_up: placed.matrix(&name("gate_up")),
                down: placed.matrix(&name("down")),
            }
        };
        Ok(Self {
            embed: placed.matrix("embed"),
            layers: (0..config.num_layers).map(layer).collect(),
            final_norm: placed.vector("final_norm"),
            head: placed.matrix(if config.tied_head { "embed" } else { "head" }),
        })
    }
}

/// Weights in memory of their own, which goes with the last model that holds them.
pub struct Uploaded {
    pub(super) weights: Weights,
    /// Has allocated it, and does nothing else.
    _owner: Gpu,
}

impl fmt::Debug for Uploaded {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Uploaded").finish_non_exhaustive()
    }
}

impl Uploaded {
    /// Has `owner` allocate memory, and `device` copy the weights there: devices of one number that share memory.
    pub fn new(
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

/// Sections by name: where they are, and their shapes.
struct Placed<'a>(HashMap<&'a str, (Address, &'a [usize])>);

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
            placed.insert(section.name.as_str(), (address, &section.shape[..]));
            address += (section.bytes as usize).next_multiple_of(ALIGNMENT) as Address;
        }
        reader.finish()?;
        Ok(Self(placed))
    }

    /// 0 where the model has none.
    fn vector(&self, name: &str) -> Address {
        self.0.get(name).map_or(0, |placed| placed.0)
    }

    fn matrix(&self, name: &str) -> Matrix {
        let (weights, shape) = self.0[name];
        Matrix {
            weights,
            scales: self.vector(&format!("{name}.scale")),
            bias: self.vector(&format!("{name}.bias")),
            n: shape[0],
            k: shape[1],
        }
    }
}
