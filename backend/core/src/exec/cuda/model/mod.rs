//! One model on a GPU: its weights, its KV cache, and its forward passes over prepared rows.
//!
//! A pass is a fixed sequence of launches for given numbers of rows; everything else (tokens, positions, pages) is
//! read on the device. So passes can be recorded once and replayed.

pub(super) mod code;
mod few;
mod forward;
pub(crate) mod kv;
mod many;
pub mod many_params;
mod outline;
pub mod params;
mod pass;
pub(crate) mod shape;
mod tables;
mod taps;
mod trees;
mod weights;
mod workspace;

pub use forward::OnHost;
pub use many::Prefill;
pub use outline::{Outline, Planned, PlannedPass};
pub(crate) use shape::BLOCKS;
pub(crate) use weights::{Uploaded, Weights};
pub(crate) use workspace::{Capacity, Workspace};

use crate::Result;
use crate::batch::{PromptBlocks, Segment};
use crate::engine::{Engine, Manifest, Precision};
use crate::exec::cuda::device::pod::bytes_of;
use crate::exec::cuda::device::{Address, Description, Device, Op, upload};
use crate::model::{Dtype, ModelConfig, RopeTable};
use crate::pages::PageId;
use code::Code;
use kv::Cache;
use many::{InBlocks, Many};
use pass::PassOps;
use shape::{TILE_OUTPUTS, Tiling};
use std::sync::Arc;
use tables::{Bounds, Tables, passes};
use taps::Taps;

/// A model on a device.
#[derive(Debug)]
pub struct Model {
    config: ModelConfig,
    precision: Precision,
    weights: Weights,
    code: Code,
    /// f32 `[positions][head_dim]`: cosines, then sines.
    rope: Address,
    cache: Cache,
    workspace: Workspace,
    capacity: Capacity,
    num_sms: u32,
    /// Of the GPU.
    capability: (u32, u32),
    /// For blocks of prompts, where a library multiplies those.
    many: Option<Many>,
    /// Whose memory the weights are in, where that is not the device's own.
    _owner: Option<Arc<Uploaded>>,
}

/// The rows of a pass; their tables are in the workspace.
#[derive(Clone, Copy, Debug)]
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
        let weights = Weights::upload(engine, device)?;
        Self::new(engine, weights, num_pages, prefill, device)
    }

    /// As `load_with`, with weights that others may compute with too.
    pub(crate) fn load_sharing(
        engine: &Engine,
        uploaded: Arc<Uploaded>,
        num_pages: usize,
        prefill: Prefill,
        device: &mut dyn Device,
    ) -> Result<Self> {
        let model = Self::new(engine, uploaded.weights.clone(), num_pages, prefill, device)?;
        Ok(Self { _owner: Some(uploaded), ..model })
    }

    fn new(
        engine: &Engine,
        weights: Weights,
        num_pages: usize,
        prefill: Prefill,
        device: &mut dyn Device,
    ) -> Result<Self> {
        let manifest = engine.manifest();
        let (config, precision) = (manifest.model.clone(), manifest.precision.clone());
        let Description { num_sms, capability, .. } = *device.describe();
        let code = Code::load(engine, device)?;
        let max_seq_len = manifest.limits.max_seq_len;
        let rope = upload_rope(&RopeTable::new(&config, max_seq_len), max_seq_len, device)?;
        let capacity = Capacity::of(manifest, prefill);
        let many = capacity.blocks.map(|rows| Many::load(engine, rows, device)).transpose()?;
        let workspace = Workspace::alloc(manifest, &capacity, num_sms as usize, device)?;
        let cache = Cache::alloc(manifest, num_pages, device)?;
        Ok(Self {
            precision,
            weights,
            code,
            rope,
            cache,
            workspace,
            capacity,
            num_sms,
            capability,
            many,
            config,
            _owner: None,
        })
    }

    /// Shape of the model.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// Where the tables of a pass go, and its results come from.
    pub fn workspace(&self) -> &Workspace {
        &self.workspace
    }

    pub(crate) fn capacity(&self) -> &Capacity {
        &self.capacity
    }

    /// Bytes that a model takes on a GPU besides weights and cache.
    pub(crate) fn working_bytes(
        manifest: &Manifest,
        prefill: Prefill,
        device: &Description,
    ) -> usize {
        let capacity = Capacity::of(manifest, prefill);
        let passes = Workspace::bytes(manifest, &capacity, device.num_sms as usize);
        let rope = manifest.limits.max_seq_len * manifest.model.head_dim * size_of::<f32>();
        let scales = Cache::scale_bytes(manifest);
        passes
            + rope
            + scales
            + capacity.blocks.map_or(0, |rows| Many::bytes(manifest, rows, device))
    }

    /// Gets what blocks of prompts of an engine's model take, beside their memory. The error says what is missing.
    pub(crate) fn enable_blocks(manifest: &Manifest, device: &mut dyn Device) -> Result<()> {
        Many::enable(manifest, device)
    }

    /// What of a prompt is computed in blocks, if anything.
    pub(crate) fn prompt_blocks(&self) -> Option<PromptBlocks> {
        self.capacity.blocks.map(|_| BLOCKS)
    }

    /// Runs segments for their keys and values alone; does not wait.
    pub fn run_without_logits(
        &self,
        segments: &[Segment<'_>],
        device: &mut dyn Device,
    ) -> Result<()> {
        for tables in passes(segments, &self.bounds()) {
            self.issue(&tables, None, device)?;
        }
        Ok(())
    }

    /// How large the tables of a pass may be.
    fn bounds(&self) -> Bounds {
        let Capacity { few: rows, blocks, sequences, .. } = self.capacity;
        let group = self.config.num_heads / self.config.num_kv_heads;
        Bounds { rows, blocks, sequences, group }
    }

    /// Uploads the tables of a pass and runs it, and keeps hidden states in `taps`; does not wait.
    fn issue(&self, tables: &Tables, taps: Option<&Taps>, device: &mut dyn Device) -> Result<()> {
        let work = &self.workspace;
        upload(device, work.rows, &tables.rows)?;
        upload(device, work.tiles, &tables.tiles)?;
        upload(device, work.logit_rows, &tables.logit_rows)?;
        upload(device, work.pages, &tables.pages)?;
        let pass = Pass {
            num_rows: tables.rows.len(),
            num_tiles: tables.tiles.len(),
            tiling: tables.tiling,
            num_logits: tables.logit_rows.len(),
            pages: work.pages,
            max_pages: tables.max_pages,
        };
        let blocks = self.in_blocks(tables.place);
        PassOps::new(self, &pass, blocks, taps).all().iter().try_for_each(|op| device.issue(op))
    }

    /// Who multiplies a pass whose first row has this place in its block.
    fn in_blocks(&self, place: Option<usize>) -> Option<InBlocks<'_>> {
        let (many, first) = self.many.as_ref().zip(place)?;
        Some(InBlocks { many, first })
    }

    /// A pass: embedding, layers, head. Its products take few rows each, however many it has.
    pub fn pass(&self, pass: &Pass) -> Vec<Op> {
        PassOps::new(self, pass, None, None).all()
    }

    /// Copies a page of the cache onto another one, in all layers; does not wait.
    fn copy_page(&self, from: PageId, to: PageId, device: &mut dyn Device) -> Result<()> {
        let bytes = kv::page_bytes(self.precision.kv, &self.config) / self.config.num_layers;
        (0..self.config.num_layers).try_for_each(|layer| {
            let at =
                |page: PageId| self.cache.layer(layer).memory + (page as usize * bytes) as Address;
            device.issue(&Op::Copy { from: at(from), to: at(to), bytes })
        })
    }

    /// Bytes of a row of [`Workspace::squares`].
    fn squares_bytes(&self) -> usize {
        self.config.hidden_size.div_ceil(TILE_OUTPUTS) * size_of::<f32>()
    }

    /// The format of the cache as `types.cuh` numbers it.
    fn kv_format(&self) -> u32 {
        format_code(self.precision.kv)
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
