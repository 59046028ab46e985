//! What a model's passes launch, without its weights, its code or a GPU: for predictions. The launches are those of the
//! executor itself; only their addresses mean nothing.

use super::code::{EndCode, LayerCode, LoadKernel};
use super::layers::Layers;
use super::many::InBlocks;
use super::many_params::MultiplyParams;
use super::params::GemmParams;
use super::pass::DecoderPart;
use super::shape::{self, Tiling};
use super::tables::{self, Tables};
use super::weights::Matrix;
use super::{Capacity, Eagle, Many, Medusa, Model, Pass, Prefill, Weights};
use crate::Result;
use crate::batch::Segment;
use crate::engine::{Kernels, Limits, Precision};
use crate::exec::cuda::device::pod::bytes_of_mut;
use crate::exec::cuda::device::{Address, Description, Kernel, Launch, Op};
use crate::model::decoder::{Decoder, Linear, Load, Vector};
use crate::model::image::unit_len;
use crate::model::{DraftHead, Dtype, EagleConfig, MedusaConfig, ModelConfig};
use crate::pages::pages_for;
use spec_kernels::Variant;

/// A model of which nothing is loaded.
#[derive(Debug)]
pub struct Outline {
    model: Model,
    /// By the numbers of their kernels.
    variants: Vec<Variant>,
}

/// One operation of a pass.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Planned {
    /// A kernel of this project.
    Kernel {
        /// Its code.
        variant: Variant,
        /// Thread blocks.
        grid: u32,
        /// Threads of a block.
        threads: u32,
        /// Dynamic shared memory of a block.
        shared_bytes: u32,
        /// Of that, bytes of what streams through the ring of a product; 0 elsewhere.
        ring_bytes: u32,
        /// Rows that a product computes; those of the pass elsewhere.
        rows: usize,
        /// Outputs and inputs of a product whose variant does not say them, inputs in whole units.
        matrix: Option<[usize; 2]>,
    },
    /// A product of a library.
    Library {
        /// What is multiplied.
        format: Dtype,
        /// Rows, outputs and inputs.
        shape: [usize; 3],
    },
}

/// A pass over some rows of one prompt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlannedPass {
    /// Positions before it.
    pub first: usize,
    /// Its rows.
    pub rows: usize,
    /// In their order.
    pub operations: Vec<Planned>,
}

impl Outline {
    /// Of an engine for these limits, on a GPU of so many multiprocessors and this compute capability.
    pub fn new(
        config: &ModelConfig,
        precision: &Precision,
        limits: &Limits,
        num_sms: u32,
        capability: (u32, u32),
        prefill: Prefill,
    ) -> Result<Self> {
        let mut loader = Numbering { variants: Vec::new(), capability };
        let kernels = Kernels { model: config, precision };
        let code = LayerCode::of(&kernels, &mut loader)?;
        let ends = EndCode::of(&kernels, &mut loader)?;
        let capacity = Capacity::new(config, limits, prefill);
        let device = Description { name: String::new(), capability, driver: 0, num_sms };
        let many = Many::outline(&kernels, prefill, &device, &mut loader)?;
        let layers = Layers::outline(config, precision, code, num_sms, capability);
        let decoder = Decoder::of(config).load(&mut Nowhere)?;
        let model = Model { decoder, layers, ends, capacity, many, _weights: None };
        Ok(Self { model, variants: loader.variants })
    }

    /// The launches of a pass of `places` rows of each sequence.
    pub(in crate::exec::cuda) fn pass(
        &self,
        sequences: usize,
        places: usize,
        num_logits: usize,
    ) -> Vec<Planned> {
        let group = self.model.layers.group();
        let tiling = Tiling::of(sequences, places, group);
        let num_tiles = sequences * places.div_ceil(tiling.rows(group));
        self.planned(&of_rows(sequences * places, num_tiles, tiling, num_logits), None)
    }

    /// The passes of a prompt of `len` tokens that is alone, up to its first logits.
    pub fn prompt(&self, len: usize) -> Vec<PlannedPass> {
        let tokens = vec![0; len];
        let pages = vec![0; pages_for(len)];
        let segment = Segment {
            tokens: &tokens,
            first_position: 0,
            pages: &pages,
            prompt_len: len,
            num_logits: 1,
            tree: &[],
        };
        let mut first = 0;
        let mut passes = Vec::new();
        for tables in tables::passes(&[segment], &self.model.bounds()) {
            let Tables { place, rows, tiles, tiling, logit_rows, .. } = tables;
            let pass = of_rows(rows.len(), tiles.len(), tiling, logit_rows.len());
            let operations = self.planned(&pass, self.model.in_blocks(place));
            passes.push(PlannedPass { first, rows: rows.len(), operations });
            first += rows.len();
        }
        passes
    }

    /// Whether it has logits of some tokens alone.
    pub(in crate::exec::cuda) fn maps_vocab(&self) -> bool {
        self.model.config().draft_vocab.is_some()
    }

    /// Tokens that it reads.
    pub(in crate::exec::cuda) fn vocab_size(&self) -> usize {
        self.model.config().vocab_size
    }

    /// The kernels that passes launch.
    pub fn variants(&self) -> &[Variant] {
        &self.variants
    }

    fn planned(&self, pass: &Pass, blocks: Option<InBlocks<'_>>) -> Vec<Planned> {
        let ops = self.model.ops(pass, blocks, DecoderPart::default());
        let planned = ops.iter().filter_map(|op| match op {
            Op::Launch(launch) => Some(self.kernel(launch, pass.num_rows)),
            Op::Product(product) => {
                let shape = product.shape;
                Some(Planned::Library { format: shape.format, shape: [shape.m, shape.n, shape.k] })
            }
            // Of hidden states that somebody wants to see: nobody does.
            Op::Copy { .. } => None,
        });
        planned.collect()
    }

    fn kernel(&self, launch: &Launch, rows: usize) -> Planned {
        planned(launch, rows, &self.variants, self.model.layers.capability)
    }
}

/// A launch as it is told of.
fn planned(launch: &Launch, rows: usize, variants: &[Variant], capability: (u32, u32)) -> Planned {
    let Launch { kernel, grid, block, shared_bytes, .. } = *launch;
    let variant = variants[kernel.0 as usize].clone();
    let (mut rows, mut ring_bytes, mut matrix) = (rows, 0, None);
    if variant.kernel == "gemm" {
        let mut params = [GemmParams::default()];
        bytes_of_mut(&mut params).copy_from_slice(&launch.params);
        rows = params[0].num_rows as usize;
        ring_bytes = shape::gemm_ring_bytes(rows, capability);
    }
    if variant.kernel == "multiply" {
        let mut params = [MultiplyParams::default()];
        bytes_of_mut(&mut params).copy_from_slice(&launch.params);
        let [MultiplyParams { n, k_units, .. }] = params;
        let is_fp8 = variant.defines.contains(&("WEIGHT", "FP8".into()));
        let unit = unit_len(if is_fp8 { Dtype::Fp8 } else { Dtype::Fp16 });
        matrix = Some([n as usize, k_units as usize * unit]);
    }
    Planned::Kernel { variant, grid, threads: block, shared_bytes, ring_bytes, rows, matrix }
}

/// A head on the hidden states of a target, of which nothing is loaded.
pub struct HeadOutline {
    head: Head,
    variants: Vec<Variant>,
    capability: (u32, u32),
}

enum Head {
    Eagle(Box<Eagle>),
    Medusa(Box<Medusa>),
}

impl HeadOutline {
    /// Of an engine on a GPU of so many multiprocessors and this compute capability.
    pub fn new(
        config: &ModelConfig,
        precision: &Precision,
        num_sms: u32,
        capability: (u32, u32),
    ) -> Result<Self> {
        let mut loader = Numbering { variants: Vec::new(), capability };
        let config = &with_own_matrices(config);
        let code = LayerCode::of(&Kernels { model: config, precision }, &mut loader)?;
        let layers = Layers::outline(config, precision, code, num_sms, capability);
        let weights = Weights::load(config, &mut Nowhere)?;
        let head = match config.medusa() {
            Some(_) => Head::Medusa(Box::new(Medusa::outline(layers, weights, &mut loader)?)),
            None => Head::Eagle(Box::new(Eagle::outline(layers, weights, &mut loader)?)),
        };
        Ok(Self { head, variants: loader.variants, capability })
    }

    /// Tokens of its target, where it drafts others than the first ones of them.
    pub(in crate::exec::cuda) fn mapped_vocab(&self) -> Option<usize> {
        match &self.head {
            Head::Eagle(head) => head.config().maps_vocab.then(|| head.vocab_size()),
            Head::Medusa(_) => None,
        }
    }

    /// Whether its passes go by tables.
    pub(in crate::exec::cuda) fn has_tables(&self) -> bool {
        matches!(self.head, Head::Eagle(_))
    }

    /// The launches of a step's first pass, with `places` rows of each sequence, and logits of so many.
    pub(in crate::exec::cuda) fn first_pass(
        &self,
        sequences: usize,
        places: usize,
        num_logits: usize,
    ) -> Vec<Planned> {
        match &self.head {
            Head::Eagle(head) => {
                let tiling = Tiling::of(sequences, places, head.group());
                let num_tiles = sequences * places.div_ceil(tiling.rows(head.group()));
                let pass = of_rows(sequences * places, num_tiles, tiling, num_logits);
                self.planned(&head.pass(&pass, false), pass.num_rows)
            }
            // Of whatever is known it reads one state.
            Head::Medusa(heads) => {
                let ops = [heads.begin(sequences), heads.head(0, sequences)].concat();
                self.planned(&ops, sequences)
            }
        }
    }

    /// Those of each pass behind it, which goes on with what the one before has left.
    pub(in crate::exec::cuda) fn later_pass(&self, sequences: usize) -> Vec<Planned> {
        match &self.head {
            Head::Eagle(_) => self.first_pass(sequences, 1, sequences),
            Head::Medusa(heads) => self.planned(&heads.head(0, sequences), sequences),
        }
    }

    fn planned(&self, ops: &[Op], rows: usize) -> Vec<Planned> {
        let launches = ops.iter().filter_map(Op::as_launch);
        launches.map(|launch| planned(launch, rows, &self.variants, self.capability)).collect()
    }
}

/// The same head: a matrix that it leaves to its target takes what one of its own does.
fn with_own_matrices(config: &ModelConfig) -> ModelConfig {
    let draft_head = config.draft_head.clone().map(|head| match head {
        DraftHead::Eagle(eagle) => {
            DraftHead::Eagle(EagleConfig { own_embed: true, own_head: true, ..eagle })
        }
        DraftHead::Medusa(medusa) => {
            let own_heads = vec![true; medusa.num_heads()];
            DraftHead::Medusa(MedusaConfig { own_heads, ..medusa })
        }
    });
    ModelConfig { draft_head, ..config.clone() }
}

/// An address that is not 0, which would mean none.
pub(super) const SOMEWHERE: Address = 1 << 40;

fn of_rows(num_rows: usize, num_tiles: usize, tiling: Tiling, num_logits: usize) -> Pass {
    Pass { num_rows, num_tiles, tiling, num_logits, pages: 0, max_pages: 0 }
}

/// Numbers kernels in the order in which they are asked for.
struct Numbering {
    variants: Vec<Variant>,
    capability: (u32, u32),
}

impl LoadKernel for Numbering {
    fn capability(&self) -> (u32, u32) {
        self.capability
    }

    fn load(&mut self, variant: &Variant, _: u32) -> Result<Kernel> {
        self.variants.push(variant.clone());
        Ok(Kernel(self.variants.len() as u32 - 1))
    }
}

/// Weights that are not anywhere.
struct Nowhere;

impl Load for Nowhere {
    type Matrix = Matrix;
    type Vector = Address;

    fn matrix(&mut self, linear: &Linear) -> Result<Matrix> {
        let &Linear { kind, k, .. } = linear;
        Ok(Matrix { kind, weights: 0, scales: 0, bias: 0, n: linear.n(), k })
    }

    fn vector(&mut self, _: &Vector) -> Result<Address> {
        Ok(SOMEWHERE)
    }
}
