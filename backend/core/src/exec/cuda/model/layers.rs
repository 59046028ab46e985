//! What decoder layers run with, a model's or a head's: kernels, a cache, and the memory that passes work in.

use super::code::LayerCode;
use super::kv::{self, Cache};
use super::outline::SOMEWHERE;
use super::shape::TILE_OUTPUTS;
use super::tables::Tables;
use super::workspace::{Capacity, Workspace};
use super::{Pass, format_code, upload_rope};
use crate::Result;
use crate::engine::{Engine, Manifest, Precision};
use crate::exec::cuda::device::{Address, Description, Device, Op, upload};
use crate::model::{ModelConfig, RopeTable};
use crate::pages::PageId;

/// Everything but weights.
#[derive(Clone, Debug)]
pub(super) struct Layers {
    pub(super) config: ModelConfig,
    pub(super) precision: Precision,
    pub(super) code: LayerCode,
    /// f32 `[positions][head_dim]`: cosines, then sines.
    pub(super) rope: Address,
    pub(super) cache: Cache,
    pub(super) workspace: Workspace,
    pub(super) num_sms: u32,
    /// Of the GPU.
    pub(super) capability: (u32, u32),
}

impl Layers {
    /// For an engine's model or head, with a cache of `num_pages` pages.
    pub(super) fn alloc(
        engine: &Engine,
        code: LayerCode,
        capacity: &Capacity,
        num_pages: usize,
        device: &mut dyn Device,
    ) -> Result<Self> {
        let manifest = engine.manifest();
        let (config, precision) = (manifest.model.clone(), manifest.precision.clone());
        let Description { num_sms, capability, .. } = *device.describe();
        let max_seq_len = manifest.limits.max_seq_len;
        let rope = upload_rope(&RopeTable::new(&config, max_seq_len), max_seq_len, device)?;
        let workspace = Workspace::alloc(manifest, capacity, device)?;
        let cache = Cache::alloc(manifest, num_pages, device)?;
        Ok(Self { config, precision, code, rope, cache, workspace, num_sms, capability })
    }

    /// With kernels from elsewhere, and memory nowhere.
    pub(super) fn outline(
        config: &ModelConfig,
        precision: &Precision,
        code: LayerCode,
        num_sms: u32,
        capability: (u32, u32),
    ) -> Self {
        let workspace =
            Workspace { logit_rows: SOMEWHERE, best: SOMEWHERE, ..Workspace::default() };
        Self {
            config: config.clone(),
            precision: precision.clone(),
            code,
            rope: 0,
            cache: Cache::NOWHERE,
            workspace,
            num_sms,
            capability,
        }
    }

    /// Bytes that [`alloc`](Self::alloc) takes besides the pages.
    pub(super) fn bytes(manifest: &Manifest, capacity: &Capacity, device: &Description) -> usize {
        let passes = Workspace::bytes(manifest, capacity, device);
        let rope = manifest.limits.max_seq_len * manifest.model.head_dim * size_of::<f32>();
        passes + rope + Cache::scale_bytes(manifest)
    }

    /// Query heads of a key head.
    pub(super) fn group(&self) -> usize {
        self.config.num_heads / self.config.num_kv_heads
    }

    /// Uploads the tables of a pass; does not wait.
    pub(super) fn upload(&self, tables: &Tables, device: &mut dyn Device) -> Result<Pass> {
        let work = &self.workspace;
        upload(device, work.rows, &tables.rows)?;
        upload(device, work.tiles, &tables.tiles)?;
        upload(device, work.logit_rows, &tables.logit_rows)?;
        upload(device, work.pages, &tables.pages)?;
        Ok(Pass {
            num_rows: tables.rows.len(),
            num_tiles: tables.tiles.len(),
            tiling: tables.tiling,
            num_logits: tables.logit_rows.len(),
            pages: work.pages,
            max_pages: tables.max_pages,
        })
    }

    /// Copies a page of the cache onto another one, in all layers; does not wait.
    pub(super) fn copy_page(
        &self,
        from: PageId,
        to: PageId,
        device: &mut dyn Device,
    ) -> Result<()> {
        let rows = self.config.num_layers;
        let bytes = kv::page_bytes(self.precision.kv, &self.config) / rows;
        let at = |page: PageId| self.cache.layer(0).memory + (page as usize * bytes) as Address;
        let (from, to, pitch) = (at(from), at(to), self.cache.layer_bytes());
        device.issue(&Op::Copy { from, to, bytes, rows, pitch })
    }

    /// Bytes of a row of [`Workspace::squares`].
    pub(super) fn squares_bytes(&self) -> usize {
        self.config.hidden_size.div_ceil(TILE_OUTPUTS) * size_of::<f32>()
    }

    /// The format of the cache as `types.cuh` numbers it.
    pub(super) fn kv_format(&self) -> u32 {
        format_code(self.precision.kv)
    }
}
