//! What an engine of a model would launch on a GPU, and the code of it: what `scripts/gpu-predict` reads.
//!
//! `launches --arch sm_90a --output DIR MODEL...` compiles the kernels of each model and writes `VARIANT.cubin` and
//! `launches.json` to the folder. A model is a checkpoint, or the name of one that is made up, and a number format, such as
//! `llama-3.1-8b:fp8` (`fp8-head`: its head too; `fp16-fp8-head`: that alone; `eagle3-fp8`: an EAGLE-3 head of it, and likewise
//! `eagle1`, `peagle` and `medusa`), or an engine file.

use anyhow::{Context, Result, bail, ensure};
use clap::Parser;
use serde_json::{Value, json};
use spec_build::checkpoint::Checkpoint;
use spec_build::cuda::{Cache, Compiler, Cubin};
use spec_core::engine::{Device, Engine, Limits, Manifest, Precision, needed_variants};
use spec_core::exec::{HeadOutline, Outline, Planned, SearchPath};
use spec_core::model::{
    DraftHead, Dtype, EagleConfig, EagleKind, MedusaConfig, ModelConfig, TapNorms,
};
use spec_core::runtime::Prefill;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Steps that are told of: sequences, and drafts of each.
const STEPS: [(usize, usize); 8] =
    [(1, 0), (1, 4), (1, 8), (16, 0), (32, 0), (64, 0), (16, 4), (64, 4)];
/// Prompts, in tokens.
const PROMPTS: [usize; 3] = [512, 2048, 8192];

/// Drafts of a model or a head that makes all of them in one pass.
const DRAFTS_AT_ONCE: usize = 8;

/// Passes of a head that are told of: sequences, and known tokens of each.
const HEAD_PASSES: [(usize, usize); 5] = [(1, 1), (1, 5), (4, 5), (16, 1), (16, 5)];
/// Heads of a Medusa.
const MEDUSA_HEADS: usize = 4;
/// Tokens that an EAGLE-3 head drafts.
const HEAD_TOKENS: usize = 32_000;

/// What steps and sequences may have.
const LIMITS: Limits =
    Limits { max_draft_len: 8, max_batch_size: 64, max_seq_len: 1 << 14, max_num_tokens: 8192 };

/// A model and its formats.
struct Model {
    config: ModelConfig,
    precision: Precision,
}

#[derive(Parser)]
struct Args {
    /// An architecture that kernels are written for.
    #[arg(long, default_value = "sm_90a")]
    arch: String,
    /// Its compute capability.
    #[arg(long, default_value = "9.0")]
    capability: String,
    /// Streaming multiprocessors.
    #[arg(long, default_value_t = 132)]
    num_sms: u32,
    /// Where code and list go.
    #[arg(long)]
    output: PathBuf,
    /// Also steps of one sequence that verify so many rows.
    #[arg(long, value_delimiter = ',')]
    verify: Vec<usize>,
    /// Checkpoints or names with formats, or engine files.
    #[arg(required = true)]
    models: Vec<String>,
}

fn main() -> Result<()> {
    let args = Args::parse();
    ensure!(!args.verify.contains(&0), "--verify: at least one row");
    let (major, minor) = args.capability.split_once('.').context("--capability: such as 9.0")?;
    let capability = (major.parse()?, minor.parse()?);
    let compiler = Compiler::open(&SearchPath::of_process(None), Cache::of_user())?;
    std::fs::create_dir_all(&args.output)?;
    let mut models = Vec::new();
    let mut kernels = BTreeMap::new();
    for name in &args.models {
        let opened = opened(name)?;
        let Model { config, precision } = &opened;
        Device::Cuda { archs: vec![args.arch.clone()], min_driver: 0 }
            .validate(config, precision)?;
        let variants = needed_variants(config, precision, &args.arch);
        let archs = std::slice::from_ref(&args.arch);
        let codes = compiler.compile_model(archs, config, precision)?;
        for (variant, code) in variants.iter().zip(&codes) {
            let kernel = Cubin::parse(&code.cubin)?.kernel(variant.kernel)?;
            let file = format!("{variant}.cubin");
            std::fs::write(args.output.join(&file), &code.cubin)?;
            let defines: BTreeMap<_, _> = variant.defines.iter().cloned().collect();
            kernels.insert(
                variant.to_string(),
                json!({
                    "file": file, "kernel": variant.kernel, "defines": defines,
                    "registers": kernel.registers, "static_bytes": kernel.shared,
                }),
            );
        }
        models.push(model(name, &opened, &args, capability)?);
    }
    let all = json!({
        "arch": args.arch, "compiler": compiler.version(), "sources": spec_kernels::HASH,
        "num_sms": args.num_sms, "kernels": kernels, "models": models,
    });
    std::fs::write(args.output.join("launches.json"), serde_json::to_string(&all)?)?;
    Ok(())
}

/// A model by its name and a format, or that of an engine.
fn opened(name: &str) -> Result<Model> {
    if name.ends_with(".engine") {
        let Manifest { model, precision, .. } = Engine::open(name)?.manifest().clone();
        return Ok(Model { config: model, precision });
    }
    let expected = "expected MODEL:FORMAT, such as llama-3.1-8b:fp8, or an engine";
    let (model, format) = name.rsplit_once(':').context(expected)?;
    let kind = HEADS.into_iter().find_map(|(prefix, of)| Some((format.strip_prefix(prefix)?, of)));
    let (format, head_of) = match kind {
        Some((format, of)) => (format, Some(of)),
        None => (format, None),
    };
    let (format, is_masked) = match format.strip_suffix("-pard") {
        Some(format) => (format, true),
        None => (format, false),
    };
    let (format, drafted) = match format.split_once("-vocab") {
        Some((format, tokens)) => (format, Some(tokens.parse().context("-vocab: how many?")?)),
        None => (format, None),
    };
    let (weights, head) = match format {
        "fp8" => (Dtype::Fp8, Dtype::Fp16),
        "fp8-head" => (Dtype::Fp8, Dtype::Fp8),
        "fp16" => (Dtype::Fp16, Dtype::Fp16),
        "fp16-fp8-head" => (Dtype::Fp16, Dtype::Fp8),
        other => bail!("format {other}: expected fp8, fp8-head, fp16 or fp16-fp8-head"),
    };
    let path = if Path::new(model).exists() { model.into() } else { format!("random:{model}") };
    let mut checkpoint = Checkpoint::open(Path::new(&path))?;
    if let Some(drafted) = drafted {
        checkpoint.draft_only((0..drafted).collect())?;
    }
    let mut config = checkpoint.config;
    config.mask_token = is_masked.then_some(0);
    if let Some(head_of) = head_of {
        let precision = Precision { weights, head, kv: Dtype::Fp16 };
        return Ok(Model { config: head_of(config), precision });
    }
    Ok(Model { config, precision: Precision { weights, head, kv: weights } })
}

type HeadOf = fn(ModelConfig) -> ModelConfig;

/// Prefixes of formats, and heads of a model that they ask for.
const HEADS: [(&str, HeadOf); 4] =
    [("eagle1-", eagle1), ("eagle3-", eagle3), ("peagle-", peagle), ("medusa-", medusa)];

/// As published for Vicuna: heads of one block each, with matrices of their own.
fn medusa(target: ModelConfig) -> ModelConfig {
    let medusa = MedusaConfig {
        tap: target.num_layers,
        num_blocks: 1,
        block_bias: true,
        own_heads: vec![true; MEDUSA_HEADS],
    };
    let draft_head = Some(DraftHead::Medusa(medusa));
    ModelConfig { num_layers: 0, tied_head: false, draft_head, ..target }
}

/// A layer like the target's, whose head and embedding it takes.
fn eagle1(target: ModelConfig) -> ModelConfig {
    let eagle = EagleConfig {
        kind: EagleKind::Eagle1,
        taps: vec![target.num_layers],
        own_embed: false,
        own_head: false,
        draft_vocab: target.vocab_size,
        maps_vocab: false,
        ..eagle3_of(&target)
    };
    with_layer(target, eagle)
}

/// As published for it: a layer like the target's, and a head of some of its tokens.
fn eagle3(target: ModelConfig) -> ModelConfig {
    let eagle = eagle3_of(&target);
    with_layer(target, eagle)
}

/// The same, whose drafts all come from one pass.
fn peagle(target: ModelConfig) -> ModelConfig {
    let eagle = EagleConfig { mask_token: Some(0), ..eagle3_of(&target) };
    with_layer(target, eagle)
}

fn with_layer(target: ModelConfig, eagle: EagleConfig) -> ModelConfig {
    let draft_head = Some(DraftHead::Eagle(eagle));
    ModelConfig { num_layers: 1, tied_head: false, draft_head, ..target }
}

fn eagle3_of(target: &ModelConfig) -> EagleConfig {
    let layers = target.num_layers;
    EagleConfig {
        kind: EagleKind::Eagle3,
        taps: vec![2, layers / 2, layers - 3],
        target_hidden: target.hidden_size,
        tap_norms: TapNorms::None,
        fc_bias: false,
        norm_before_residual: false,
        norm_output: false,
        window: None,
        own_embed: true,
        own_head: true,
        draft_vocab: HEAD_TOKENS.min(target.vocab_size),
        maps_vocab: true,
        mask_token: None,
    }
}

/// What a head runs in a step's graph: passes for the first draft, of known tokens, and for others.
fn head(name: &str, model: &Model, args: &Args, capability: (u32, u32)) -> Result<Value> {
    let Model { config, precision } = model;
    let outline = HeadOutline::new(config, precision, args.num_sms, capability)?;
    let pass = |sequences: usize, known: usize, planned: Vec<Planned>| {
        json!({
            "sequences": sequences, "rows": sequences * known, "operations": operations(&planned),
        })
    };
    let first = |(sequences, known)| pass(sequences, known, outline.first_draft(sequences, known));
    // Medusa heads read one state, whatever is known.
    let told = |&(_, known): &(usize, usize)| known == 1 || config.eagle().is_some();
    let steps: Vec<Value> = HEAD_PASSES.into_iter().filter(told).map(first).collect();
    let draft = match config.drafts_at_once() {
        true => pass(1, 2 * DRAFTS_AT_ONCE, outline.draft_at_once(1, DRAFTS_AT_ONCE)),
        false => pass(1, 1, outline.draft(1)),
    };
    Ok(json!({
        "name": name, "config": config, "precision": precision, "steps": steps, "verify": [],
        "draft": draft, "prompts": [],
    }))
}

fn model(name: &str, model: &Model, args: &Args, capability: (u32, u32)) -> Result<Value> {
    let Model { config, precision } = model;
    if config.draft_head.is_some() {
        return head(name, model, args, capability);
    }
    let outline =
        |prefill| Outline::new(config, precision, &LIMITS, args.num_sms, capability, prefill);
    let (exact, blocks) = (outline(Prefill::Exact)?, outline(Prefill::Blocks)?);
    let library = outline(Prefill::CublasLt)?;
    let step = |(sequences, drafts): (usize, usize)| {
        json!({
            "sequences": sequences, "rows": sequences * (drafts + 1),
            "operations": operations(&exact.step(sequences, drafts)),
        })
    };
    let prompt = |(way, outline): (&str, &Outline), len: usize| {
        let passes = outline.prompt(len).into_iter().map(|pass| {
            json!({
                "first": pass.first, "rows": pass.rows, "operations": operations(&pass.operations),
            })
        });
        json!({ "way": way, "tokens": len, "passes": passes.collect::<Vec<_>>() })
    };
    let (draft_rows, draft) = match config.mask_token {
        None => (1, exact.draft(1)),
        Some(_) => (2 * DRAFTS_AT_ONCE, exact.draft_at_once(1, DRAFTS_AT_ONCE)),
    };
    let draft = json!({ "sequences": 1, "rows": draft_rows, "operations": operations(&draft) });
    let ways = [("exact", &exact), ("blocks", &blocks), ("cublaslt", &library)];
    let prompts = ways.into_iter().flat_map(|way| PROMPTS.map(|len| prompt(way, len)));
    Ok(json!({
        "name": name,
        "config": config,
        "precision": precision,
        "steps": STEPS.map(step),
        "verify": args.verify.iter().map(|&rows| step((1, rows - 1))).collect::<Vec<_>>(),
        "draft": draft,
        "prompts": prompts.collect::<Vec<_>>(),
    }))
}

fn operations(all: &[Planned]) -> Vec<Value> {
    all.iter().map(operation).collect()
}

fn operation(planned: &Planned) -> Value {
    match planned {
        Planned::Kernel { variant, grid, threads, shared_bytes, ring_bytes, rows, matrix } => {
            json!({
                "variant": variant.to_string(), "grid": grid, "threads": threads,
                "shared_bytes": shared_bytes, "ring_bytes": ring_bytes, "rows": rows,
                "matrix": matrix,
            })
        }
        Planned::Library { format, shape } => json!({ "library": format.name(), "shape": shape }),
    }
}
