//! Engines of well-known shapes with random weights, written without a checkpoint: what a bench needs, in the time that
//! the bytes take. They generate nothing sensible and have no tokenizer.

use crate::noise::{E4M3_DEVIATION, random_e4m3, random_halves};
use spec_build::cuda::{Cache, Compiler};
use spec_core::engine::{
    Device, DrafterKind, Engine, EngineWriter, Limits, Manifest, Peer, Precision, Role, Sealed,
    Section, SectionKind, commit_pair,
};
use spec_core::exec::SearchPath;
use spec_core::model::{Dtype, Family, ModelConfig};
use spec_core::runtime::{DRAFT_FILE, TARGET_FILE};
use std::collections::HashMap;
use std::error::Error;
use std::path::Path;
use std::sync::Mutex;
use tempfile::TempDir;

/// Of weights: products of thousands of inputs stay near 1.
const WEIGHT_DEVIATION: f64 = 1.0 / 64.0;

/// Random bytes that matrices repeat.
const BLOCK_BYTES: usize = 4 << 20;

/// The shape of a model.
#[derive(Debug)]
pub(crate) struct Shape {
    pub(crate) name: &'static str,
    hidden_size: usize,
    intermediate_size: usize,
    num_heads: usize,
    num_kv_heads: usize,
    head_dim: usize,
    /// Layers that are built.
    pub(crate) num_layers: usize,
    /// Layers of the real model: times of a pass are extrapolated where it has more.
    pub(crate) all_layers: usize,
    vocab_size: usize,
    tied_head: bool,
}

pub(crate) const LLAMA_1B: Shape = Shape {
    name: "Llama-3.2-1B",
    hidden_size: 2048,
    intermediate_size: 8192,
    num_heads: 32,
    num_kv_heads: 8,
    head_dim: 64,
    num_layers: 16,
    all_layers: 16,
    vocab_size: 128_256,
    tied_head: true,
};

pub(crate) const LLAMA_8B: Shape = Shape {
    name: "Llama-3.1-8B",
    hidden_size: 4096,
    intermediate_size: 14_336,
    num_heads: 32,
    num_kv_heads: 8,
    head_dim: 128,
    num_layers: 32,
    all_layers: 32,
    vocab_size: 128_256,
    tied_head: false,
};

/// A tenth of the layers: more would not fit beside their cache everywhere, and all are alike.
pub(crate) const LLAMA_70B: Shape = Shape {
    name: "Llama-3.1-70B",
    hidden_size: 8192,
    intermediate_size: 28_672,
    num_heads: 64,
    num_kv_heads: 8,
    head_dim: 128,
    num_layers: 8,
    all_layers: 80,
    vocab_size: 128_256,
    tied_head: false,
};

/// For the emulator.
pub(crate) const TINY: Shape = Shape {
    name: "tiny",
    hidden_size: 128,
    intermediate_size: 256,
    num_heads: 2,
    num_kv_heads: 1,
    head_dim: 64,
    num_layers: 2,
    all_layers: 4,
    vocab_size: 192,
    tied_head: true,
};

/// A model of a shape in a number format.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Model {
    pub(crate) shape: &'static Shape,
    /// Of the layers; FP8 weights go with an FP8 cache.
    pub(crate) dtype: Dtype,
}

impl Model {
    /// Such as `Llama-3.1-8B FP8`.
    pub(crate) fn name(&self) -> String {
        format!("{} {}", self.shape.name, self.dtype.name().to_uppercase())
    }

    pub(crate) fn config(&self) -> ModelConfig {
        let Shape { vocab_size, hidden_size, intermediate_size, num_layers, .. } = *self.shape;
        let Shape { num_heads, num_kv_heads, head_dim, tied_head, .. } = *self.shape;
        ModelConfig {
            family: Family::Llama,
            vocab_size,
            hidden_size,
            intermediate_size,
            num_layers,
            num_heads,
            num_kv_heads,
            head_dim,
            rms_norm_eps: 1e-5,
            rope_theta: 500_000.0,
            rope_scaling: None,
            max_position: 1 << 17,
            tied_head,
            qkv_bias: false,
            out_bias: false,
            mlp_bias: false,
            qk_norm: false,
            mask_token: None,
            draft_vocab: None,
            draft_head: None,
        }
    }

    pub(crate) fn precision(&self) -> Precision {
        Precision { weights: self.dtype, head: Dtype::Fp16, kv: self.dtype }
    }
}

/// Engines on disk, as long as the folder lives.
pub(crate) struct RandomEngines {
    pub(crate) target: Engine,
    pub(crate) draft: Option<Engine>,
    _folder: TempDir,
}

impl RandomEngines {
    /// Compiles the kernels and writes a target, and a drafter if there is one, to a new temporary folder.
    pub(crate) fn write(
        target: Model,
        draft: Option<Model>,
        limits: &Limits,
        arch: &str,
    ) -> Result<Self, Box<dyn Error>> {
        let folder = tempfile::tempdir()?;
        let compiler = Compiler::open(&SearchPath::of_process(None), Cache::of_user())?;
        let maker = Maker { compiler, limits, arch, folder: folder.path() };
        let peer = |file: &str| Peer { file: file.into(), identity: String::new() };
        let drafter = draft.map_or(DrafterKind::None, |_| DrafterKind::Model(peer(DRAFT_FILE)));
        let sealed = maker.write(&target, TARGET_FILE, Role::Target, drafter, None)?;
        match &draft {
            Some(draft) => {
                let target = Some(peer(TARGET_FILE));
                let draft =
                    maker.write(draft, DRAFT_FILE, Role::Draft, DrafterKind::None, target)?;
                commit_pair(sealed, draft)?;
            }
            None => sealed.commit()?,
        }
        let target = Engine::open(folder.path().join(TARGET_FILE))?;
        let draft = target.open_drafter()?;
        Ok(Self { target, draft, _folder: folder })
    }
}

struct Maker<'a> {
    compiler: Compiler,
    limits: &'a Limits,
    arch: &'a str,
    folder: &'a Path,
}

impl Maker<'_> {
    fn write(
        &self,
        model: &Model,
        file: &str,
        role: Role,
        drafter: DrafterKind,
        target: Option<Peer>,
    ) -> Result<Sealed, Box<dyn Error>> {
        let archs = vec![self.arch.to_string()];
        let (config, precision) = (model.config(), model.precision());
        let code = self.compiler.compile_model(&archs, &config, &precision)?;
        let manifest = Manifest {
            builder: "gpu-check".into(),
            kernels: spec_kernels::HASH.into(),
            device: Device::Cuda { archs, min_driver: 0 },
            role,
            identity: String::new(),
            drafter,
            target,
            model: config,
            precision,
            limits: self.limits.clone(),
            tokenizer: "0".repeat(64),
            end_tokens: vec![0],
            bos_token: None,
            kv_scales: None,
            costs: None,
            sections: Vec::new(),
        };
        let lengths: HashMap<String, u64> =
            code.iter().map(|code| (code.section.clone(), code.cubin.len() as u64)).collect();
        let writer = EngineWriter::with_code(self.folder.join(file), manifest, &lengths)?;
        for code in &code {
            let mut section = writer.section(&code.section);
            section.write(&code.cubin)?;
            section.close();
        }
        fill(&writer)?;
        Ok(writer.seal()?)
    }
}

/// Writes every section but the code, several at a time: hashing takes longer than writing.
fn fill(writer: &EngineWriter) -> spec_core::Result<()> {
    let noise = Blocks {
        e4m3: random_e4m3(BLOCK_BYTES),
        halves: random_halves(BLOCK_BYTES / 2, WEIGHT_DEVIATION),
    };
    let sections = writer.sections().iter().filter(|section| section.kind != SectionKind::Code);
    let queue = Mutex::new(sections);
    let work = || {
        loop {
            let next = queue.lock().expect("no thread panics while it holds this").next();
            let Some(section) = next else { return Ok(()) };
            noise.fill(section, writer)?;
        }
    };
    let num_threads = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..num_threads).map(|_| scope.spawn(work)).collect();
        threads.into_iter().try_for_each(|thread| thread.join().expect("it returns errors"))
    })
}

/// What sections are filled with.
struct Blocks {
    e4m3: Vec<u8>,
    halves: Vec<u8>,
}

impl Blocks {
    fn fill(&self, section: &Section, writer: &EngineWriter) -> spec_core::Result<()> {
        let mut out = writer.section(&section.name);
        let mut left = section.bytes as usize;
        let floats;
        let block = match (section.kind, section.dtype) {
            (SectionKind::Weight, Some(Dtype::Fp8)) => &self.e4m3,
            (SectionKind::Weight, _) => &self.halves,
            (kind, _) => {
                let value = if kind == SectionKind::Scale {
                    WEIGHT_DEVIATION / E4M3_DEVIATION
                } else {
                    1.0
                };
                floats = (value as f32).to_le_bytes().repeat(left / 4);
                &floats
            }
        };
        while left > 0 {
            let len = left.min(block.len());
            out.write(&block[..len])?;
            left -= len;
        }
        out.close();
        Ok(())
    }
}
