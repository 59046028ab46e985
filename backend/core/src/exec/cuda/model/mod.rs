//! One model on a GPU: its weights, its KV cache, and its forward passes over prepared rows.
//!
//! A pass is a fixed sequence of launches for given numbers of rows; everything else (tokens, positions, pages) is
//! read on the device. So passes can be recorded once and replayed.

pub(super) mod code;
mod eagle;
mod few;
mod forward;
pub(crate) mod half_rows;
mod head_on_host;
pub(crate) mod kv;
mod layers;
mod many;
pub mod many_params;
mod medusa;
mod medusa_on_host;
mod outline;
pub mod params;
mod pass;
mod residual_rows;
pub(crate) mod shape;
mod tables;
mod taps;
mod trees;
mod unit_norm;
mod weights;
mod workspace;

pub use eagle::Eagle;
pub use forward::OnHost;
pub use head_on_host::HeadOnHost;
pub use many::Prefill;
pub use medusa::Medusa;
pub use medusa_on_host::MedusaOnHost;
pub use outline::{HeadOutline, Outline, Planned, PlannedPass};
pub(crate) use pass::{DecoderPart, Extent};
pub(crate) use residual_rows::ResidualRows;
pub(crate) use shape::{BLOCK_LEN, multiplies_blocks};
pub(crate) use taps::Taps;
pub(crate) use weights::{Held, Uploaded, Weights};
pub(crate) use workspace::{Capacity, Workspace};

use crate::batch::{PromptBlocks, Segment};
use crate::engine::{Engine, Manifest};
use crate::exec::cuda::device::pod::bytes_of;
use crate::exec::cuda::device::{Address, Description, Device, Kernel, Op};
use crate::model::decoder::Decoder;
use crate::model::{DraftHead, Dtype, ModelConfig, RopeTable};
use crate::pages::PageId;
use crate::{Error, Result};
use code::{EndCode, LayerCode};
use layers::Layers;
use many::{InBlocks, Many};
use pass::PassOps;
use shape::Tiling;
use tables::{Blocks, Bounds, Tables, passes};
use weights::Matrix;

/// A model on a device.
#[derive(Debug)]
pub struct Model {
    decoder: Decoder<Matrix, Address>,
    layers: Layers,
    /// Kernels of the embedding and of the head.
    ends: EndCode,
    capacity: Capacity,
    /// For blocks of prompts, where they are multiplied as such.
    many: Option<Many>,
    /// What the addresses of `decoder` are valid with.
    _weights: Option<Held>,
}

/// The rows of a pass; their tables are in the workspace.
#[derive(Clone, Copy, Debug, Default)]
pub struct Pass {
    /// Rows.
    pub num_rows: usize,
    /// Places for tiles.
    pub num_tiles: usize,
    /// Their width.
    pub tiling: Tiling,
    /// Rows that want logits, the first entries of `logit_rows`.
    pub num_logits: usize,
    /// u32 `[sequences][max_pages]`.
    pub pages: Address,
    /// Width of the page table.
    pub max_pages: usize,
}

impl Model {
    /// Loads the engine's code and weights and makes a cache of `num_pages` pages.
    pub fn load(engine: &Engine, num_pages: usize, device: &mut dyn Device) -> Result<Self> {
        Self::load_with(engine, num_pages, Prefill::Exact, device)
    }

    /// As `load`, with a choice of who multiplies many rows.
    pub fn load_with(
        engine: &Engine,
        num_pages: usize,
        prefill: Prefill,
        device: &mut dyn Device,
    ) -> Result<Self> {
        let weights = Held::Own(Weights::upload(engine, device)?);
        Self::load_from(engine, weights, num_pages, prefill, device)
    }

    /// As `load_with`, with weights that are there.
    pub(crate) fn load_from(
        engine: &Engine,
        weights: Held,
        num_pages: usize,
        prefill: Prefill,
        device: &mut dyn Device,
    ) -> Result<Self> {
        let Weights::Decoder(decoder) = weights.weights() else {
            let path = engine.path().display();
            return Err(Error::BadEngine(format!("engine {path}: a head, expected a model")));
        };
        let (layer_code, ends) = code::load(engine, device, |kernels, loader| {
            Ok((LayerCode::of(kernels, loader)?, EndCode::of(kernels, loader)?))
        })?;
        let capacity = Capacity::of(engine.manifest(), prefill);
        let many = Many::load(engine, prefill, capacity.blocks.unwrap_or(0), device)?;
        let layers = Layers::alloc(engine, layer_code, &capacity, num_pages, device)?;
        let decoder = (**decoder).clone();
        Ok(Self { decoder, layers, ends, capacity, many, _weights: Some(weights) })
    }

    /// Shape of the model.
    pub fn config(&self) -> &ModelConfig {
        &self.layers.config
    }

    /// Where the tables of a pass go, and its results come from.
    pub fn workspace(&self) -> &Workspace {
        &self.layers.workspace
    }

    /// What spreads logits over the whole vocabulary, where it has those of some tokens.
    pub(crate) fn spread_code(&self) -> Option<Kernel> {
        self.ends.spread
    }

    pub(crate) fn capacity(&self) -> &Capacity {
        &self.capacity
    }

    /// Bytes that an engine's model, or head, takes on a GPU besides weights and cache.
    pub(crate) fn working_bytes(
        manifest: &Manifest,
        prefill: Prefill,
        device: &Description,
    ) -> usize {
        match &manifest.model.draft_head {
            Some(DraftHead::Eagle(eagle)) => return Eagle::working_bytes(manifest, eagle, device),
            Some(DraftHead::Medusa(_)) => return Medusa::working_bytes(manifest, device),
            None => (),
        }
        let capacity = Capacity::of(manifest, prefill);
        let block_rows = capacity.blocks.unwrap_or(0);
        Layers::bytes(manifest, &capacity, device)
            + Many::bytes(manifest, prefill, block_rows, device)
    }

    /// Gets what a library takes that multiplies blocks of prompts of an engine's model, beside memory. The error says what
    /// is missing.
    pub(crate) fn enable_library(manifest: &Manifest, device: &mut dyn Device) -> Result<()> {
        Many::enable_library(manifest, device)
    }

    /// What of a prompt is computed in blocks, if anything.
    pub(crate) fn prompt_blocks(&self) -> Option<PromptBlocks> {
        let of = |many: &Many| shape::prompt_blocks(many.is_by_library(), self.layers.capability);
        self.many.as_ref().map(of)
    }

    /// Runs segments for their keys and values alone; does not wait.
    pub fn run_without_logits(
        &self,
        segments: &[Segment<'_>],
        device: &mut dyn Device,
    ) -> Result<()> {
        for tables in passes(segments, &self.bounds()) {
            self.issue(&tables, DecoderPart::default(), device)?;
        }
        Ok(())
    }

    /// The same, and keeps the rows that want logits: each at the next of `places` among `kept`.
    pub(crate) fn run_to_head(
        &self,
        segments: &[Segment<'_>],
        kept: &ResidualRows,
        places: &[usize],
        device: &mut dyn Device,
    ) -> Result<()> {
        let part = DecoderPart { extent: Extent::Layers, ..DecoderPart::default() };
        let mut places = places.iter();
        for tables in passes(segments, &self.bounds()) {
            self.issue(&tables, part, device)?;
            for (&row, &place) in tables.logit_rows.iter().zip(places.by_ref()) {
                let copies = self.residual_rows().copy(row as usize, kept, place);
                copies.iter().try_for_each(|op| device.issue(op))?;
            }
        }
        Ok(())
    }

    /// Rows of a pass, as its layers leave them and its head takes them.
    pub(crate) fn residual_rows(&self) -> ResidualRows {
        let Workspace { residual: values, squares, .. } = self.layers.workspace;
        ResidualRows { values, squares, hidden: self.layers.config.hidden_size }
    }

    /// How large the tables of a pass may be.
    fn bounds(&self) -> Bounds {
        let Capacity { few: rows, blocks, sequences, .. } = self.capacity;
        let blocks = blocks.zip(self.prompt_blocks());
        let blocks = blocks.map(|(rows, of_prompts)| Blocks { rows, of_prompts });
        Bounds { rows, blocks, sequences, group: self.layers.group() }
    }

    /// Uploads the tables of a pass and runs it; does not wait.
    fn issue(&self, tables: &Tables, part: DecoderPart<'_>, device: &mut dyn Device) -> Result<()> {
        let pass = self.layers.upload(tables, device)?;
        let ops = self.ops(&pass, self.in_blocks(tables.place), part);
        ops.iter().try_for_each(|op| device.issue(op))
    }

    fn ops(&self, pass: &Pass, blocks: Option<InBlocks<'_>>, part: DecoderPart<'_>) -> Vec<Op> {
        PassOps::new(&self.layers, pass, blocks, part).decoder(&self.decoder, &self.ends)
    }

    /// Who multiplies a pass whose first row has this place in its block.
    fn in_blocks(&self, place: Option<usize>) -> Option<InBlocks<'_>> {
        let (many, first) = self.many.as_ref().zip(place)?;
        Some(InBlocks { many, first })
    }

    /// A pass: embedding, layers, head. Its products take few rows each, however many it has.
    pub fn pass(&self, pass: &Pass) -> Vec<Op> {
        self.pass_of(pass, DecoderPart::default())
    }

    /// The same of a part of the decoder.
    pub(crate) fn pass_of(&self, pass: &Pass, part: DecoderPart<'_>) -> Vec<Op> {
        self.ops(pass, None, part)
    }

    /// Whether a pass over so many rows of each sequence has room.
    pub(crate) fn holds(&self, sequences: usize, places: usize) -> bool {
        self.capacity.holds(sequences, places, self.layers.group())
    }

    /// Copies a page of the cache onto another one, in all layers; does not wait.
    pub(crate) fn copy_page(
        &self,
        from: PageId,
        to: PageId,
        device: &mut dyn Device,
    ) -> Result<()> {
        self.layers.copy_page(from, to, device)
    }
}

/// A number format as `types.cuh` numbers it.
fn format_code(format: Dtype) -> u32 {
    if format == Dtype::Fp8 { 1 } else { 2 }
}

fn upload_rope(table: &RopeTable, len: usize, device: &mut dyn Device) -> Result<Address> {
    let mut values = Vec::new();
    for position in 0..len {
        let (cos, sin) = table.at(position);
        values.extend_from_slice(cos);
        values.extend_from_slice(sin);
    }
    let address = device.alloc(size_of_val(&values[..]))?;
    device.write(address, bytes_of(&values))?;
    Ok(address)
}
