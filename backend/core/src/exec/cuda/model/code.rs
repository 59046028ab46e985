//! The kernels of one model, loaded from its engine.

use super::shape::{self, Tiling};
use crate::Result;
use crate::engine::{Engine, EngineReader, Kernels, code_section};
use crate::exec::cuda::device::{Device, Kernel};
use crate::model::decoder::{Decoder, Layer, Linear, MatrixKind};
use crate::model::eagle::Eagle;
use crate::model::medusa::Medusa;
use crate::model::{EagleConfig, MedusaConfig, ModelConfig};
use spec_kernels::{Variant, WGMMA_ROWS};

/// A product compiled for each number of rows, in the order of [`shape::gemm_rows`].
#[derive(Clone, Copy, Debug)]
pub(super) struct ByRows {
    /// Beyond those of the GPU there is nothing.
    kernels: [Kernel; WGMMA_ROWS.len()],
}

impl ByRows {
    /// That of a place in the GPU's numbers of rows.
    pub(super) fn get(&self, idx: usize) -> Kernel {
        self.kernels[idx]
    }
}

/// The kernels at both ends of a model.
#[derive(Clone, Copy, Debug)]
pub(super) struct EndCode {
    /// Token rows.
    pub(super) embed: Kernel,
    pub(super) head: ByRows,
    /// Logits over the whole vocabulary, where the head has those of some tokens.
    pub(super) spread: Option<Kernel>,
}

/// The kernels of decoder layers.
#[derive(Clone, Copy, Debug)]
pub(super) struct LayerCode {
    /// Queries, keys and values: with the rotation, or plain where `rope` follows.
    qkv: ByRows,
    /// Head norms and rotation, where the product does not rotate.
    pub(super) rope: Kernel,
    /// Norms of many rows, where products take these as halves.
    pub(super) normalise: Option<Kernel>,
    /// Attention, in narrow tiles.
    attention: Kernel,
    /// In wide ones.
    attention_wide: Kernel,
    /// Output of the attention.
    out: ByRows,
    gate_up: ByRows,
    down: ByRows,
}

/// The kernels of a head on hidden states, besides those of its layers.
#[derive(Clone, Copy, Debug)]
pub(super) struct HeadCode {
    /// Pieces of rows, put together.
    pub(super) join: Kernel,
    /// The hidden states of the target, into one.
    pub(super) fc: ByRows,
    /// Queries, keys and values of the first layer, plain.
    pub(super) qkv: ByRows,
    /// Token rows of its own table.
    pub(super) embed: Option<Kernel>,
    /// Its own logits.
    pub(super) head: Option<ByRows>,
    /// Logits over its target's vocabulary, where it drafts other tokens than the first ones.
    pub(super) spread: Option<Kernel>,
}

/// The kernels of heads that draft a token each from a hidden state.
#[derive(Clone, Copy, Debug)]
pub(super) struct MedusaCode {
    /// Rows of states, and what they become.
    pub(super) join: Kernel,
    /// Products of blocks, which are all alike; none where heads have none.
    pub(super) block: Option<ByRows>,
    /// Logits of the heads that have a matrix of their own.
    pub(super) head: Option<ByRows>,
}

/// Where kernels come from.
pub(super) trait LoadKernel {
    /// Compute capability that they are launched on.
    fn capability(&self) -> (u32, u32);

    /// A variant that uses up to `shared_bytes`.
    fn load(&mut self, variant: &Variant, shared_bytes: u32) -> Result<Kernel>;
}

/// Loads from an engine's code.
pub(super) fn load<T>(
    engine: &Engine,
    device: &mut dyn Device,
    of: impl FnOnce(&Kernels<'_>, &mut Loader<'_>) -> Result<T>,
) -> Result<T> {
    let reader = engine.reader()?;
    let mut loader = Loader::new(engine, &reader, device)?;
    let code = of(&Kernels::of(engine.manifest()), &mut loader)?;
    reader.finish()?;
    Ok(code)
}

impl EndCode {
    /// Those of a model.
    pub(super) fn of(kernels: &Kernels<'_>, loader: &mut impl LoadKernel) -> Result<Self> {
        let decoder = Decoder::of(&ModelConfig { num_layers: 1, ..kernels.model.clone() });
        let maps_vocab = kernels.model.draft_vocab.is_some();
        let spread = maps_vocab.then(|| loader.load(&Variant::plain("spread"), 0));
        Ok(Self {
            spread: spread.transpose()?,
            embed: loader.load(&kernels.embed(), 0)?,
            head: by_rows(loader, |rows| kernels.gemm(decoder.head(), rows))?,
        })
    }
}

impl HeadCode {
    /// Those of a head.
    pub(super) fn of(
        kernels: &Kernels<'_>,
        eagle: &EagleConfig,
        loader: &mut impl LoadKernel,
    ) -> Result<Self> {
        let parts = Eagle::of(kernels.model, eagle);
        let embed = parts.embed.is_some().then(|| loader.load(&kernels.embed(), 0));
        let head = parts.head.as_ref().map(|head| by_rows(loader, |rows| kernels.gemm(head, rows)));
        let spread = eagle.maps_vocab.then(|| loader.load(&Variant::plain("spread"), 0));
        Ok(Self {
            join: loader.load(&Variant::plain("join"), shape::OPERAND_SHARED_BYTES)?,
            fc: by_rows(loader, |rows| kernels.gemm(&parts.fc, rows))?,
            qkv: by_rows(loader, |rows| kernels.first_gemm(&parts.first.attention.qkv, rows))?,
            embed: embed.transpose()?,
            head: head.transpose()?,
            spread: spread.transpose()?,
        })
    }
}

impl MedusaCode {
    /// Those of some heads.
    pub(super) fn of(
        kernels: &Kernels<'_>,
        medusa: &MedusaConfig,
        loader: &mut impl LoadKernel,
    ) -> Result<Self> {
        let Medusa { heads, .. } = Medusa::of(kernels.model, medusa);
        let block = heads.iter().flat_map(|head| &head.blocks).next();
        let head = heads.iter().find_map(|head| head.head.as_ref());
        let mut product = |linear: &Linear| by_rows(loader, |rows| kernels.gemm(linear, rows));
        Ok(Self {
            block: block.map(&mut product).transpose()?,
            head: head.map(product).transpose()?,
            join: loader.load(&Variant::plain("join"), shape::OPERAND_SHARED_BYTES)?,
        })
    }
}

impl LayerCode {
    /// What the layers of a model or a head need, but the first one of a head.
    pub(super) fn of(kernels: &Kernels<'_>, loader: &mut impl LoadKernel) -> Result<Self> {
        let Kernels { model, precision } = *kernels;
        let shared_bytes = |tiling: Tiling| tiling.shared_bytes(precision.kv, model.head_dim);
        let [narrow, wide] = kernels.attention();
        // All layers are alike.
        let layer = Layer::of(model, 0);
        let has_warpgroups = shape::has_warpgroups(loader.capability());
        let normalise = has_warpgroups
            .then(|| loader.load(&Variant::plain("normalise"), shape::OPERAND_SHARED_BYTES));
        Ok(Self {
            qkv: by_rows(loader, |rows| kernels.gemm(&layer.attention.qkv, rows))?,
            rope: loader.load(&kernels.rope(), 0)?,
            normalise: normalise.transpose()?,
            attention: loader.load(&narrow, shared_bytes(Tiling::Narrow))?,
            attention_wide: loader.load(&wide, shared_bytes(Tiling::Wide))?,
            out: by_rows(loader, |rows| kernels.gemm(&layer.attention.out, rows))?,
            gate_up: by_rows(loader, |rows| kernels.gemm(&layer.mlp.gate_up, rows))?,
            down: by_rows(loader, |rows| kernels.gemm(&layer.mlp.down, rows))?,
        })
    }

    /// The product with a matrix of this kind.
    pub(super) fn gemm(&self, kind: MatrixKind) -> &ByRows {
        match kind {
            MatrixKind::Qkv => &self.qkv,
            MatrixKind::Out => &self.out,
            MatrixKind::GateUp => &self.gate_up,
            MatrixKind::Down => &self.down,
            MatrixKind::Embed | MatrixKind::Head | MatrixKind::Fc => {
                unreachable!("no matrix of a layer")
            }
        }
    }

    /// Attention in tiles of this width.
    pub(super) fn attention(&self, tiling: Tiling) -> Kernel {
        match tiling {
            Tiling::Narrow => self.attention,
            Tiling::Wide => self.attention_wide,
        }
    }
}

/// Loads code sections of one architecture.
pub(in crate::exec::cuda) struct Loader<'a> {
    reader: &'a EngineReader<'a>,
    arch: &'a str,
    device: &'a mut dyn Device,
}

impl<'a> Loader<'a> {
    /// Finds the architecture that suits the device.
    pub(in crate::exec::cuda) fn new(
        engine: &'a Engine,
        reader: &'a EngineReader<'a>,
        device: &'a mut dyn Device,
    ) -> Result<Self> {
        let description = device.describe();
        let (major, minor) = description.capability;
        let arch = engine.require_cuda(major, minor, description.driver)?;
        Ok(Self { reader, arch, device })
    }

    /// Loads a variant that uses up to `shared_bytes`.
    pub(in crate::exec::cuda) fn load(
        &mut self,
        variant: &Variant,
        shared_bytes: u32,
    ) -> Result<Kernel> {
        let code = self.reader.section(&code_section(self.arch, variant)).bytes()?;
        self.device.load(&variant.to_string(), variant.kernel, &code, shared_bytes)
    }
}

impl LoadKernel for Loader<'_> {
    fn capability(&self) -> (u32, u32) {
        self.device.describe().capability
    }

    fn load(&mut self, variant: &Variant, shared_bytes: u32) -> Result<Kernel> {
        Loader::load(self, variant, shared_bytes)
    }
}

/// A product, for each number of rows.
fn by_rows(loader: &mut impl LoadKernel, product: impl Fn(usize) -> Variant) -> Result<ByRows> {
    let mut loaded = ByRows { kernels: [Kernel(0); WGMMA_ROWS.len()] };
    for (kernel, &rows) in loaded.kernels.iter_mut().zip(shape::gemm_rows(loader.capability())) {
        let shared_bytes = shape::gemm_shared_bytes(rows, loader.capability());
        *kernel = loader.load(&product(rows), shared_bytes)?;
    }
    Ok(loaded)
}
