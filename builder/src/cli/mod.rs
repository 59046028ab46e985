//! The command line of `spec-build`.

mod draft_source;

pub use draft_source::DraftSource;

use crate::calibrate::Calibration;
use crate::draft_vocab::DraftVocab;
use clap::builder::{OsStringValueParser, TypedValueParser as _};
use clap::{Args, Parser, Subcommand};
use spec_core::model::Dtype;
use spec_core::runtime::{Isa, Lookup, MAX_DRAFT_BRANCHES, Pinning};
use std::ffi::OsString;
use std::path::PathBuf;

/// Compiles a target and a drafter into engine files that Triton serves with speculative decoding.
///
/// `spec-build --target ... --output ...` is short for `spec-build build ...`.
#[derive(Debug, Parser)]
#[command(version)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

impl Cli {
    /// Parses a command line; one that begins with an option is a build.
    pub fn from_args(args: impl Iterator<Item = OsString>) -> Self {
        let mut args: Vec<OsString> = args.collect();
        let own = ["-h", "--help", "-V", "--version"];
        let is_build = args
            .get(1)
            .and_then(|arg| arg.to_str())
            .is_some_and(|first| first.starts_with('-') && !own.contains(&first));
        if is_build {
            args.insert(1, "build".into());
        }
        Self::parse_from(args)
    }
}

/// What the program does.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Build a model folder.
    Build(Box<BuildArgs>),
    /// Print what an engine is.
    Inspect {
        /// An engine file or a model folder.
        engine: PathBuf,
        /// Print the whole manifest as JSON.
        #[arg(long)]
        json: bool,
    },
    /// Check every hash of an engine and run a few tokens.
    Verify {
        /// An engine file or a model folder.
        engine: PathBuf,
    },
    /// Before building: sizes, KV capacity, predicted step times and break-even acceptance.
    Plan(Box<PlanArgs>),
    /// Measure what drafting and verifying take on this machine, for draft lengths that pay from the first request on.
    Profile(ProfileArgs),
    /// Generate text from a built model folder, without a server.
    Try(Box<TryArgs>),
    /// Give a target that is built already another drafter.
    Draft(Box<DraftArgs>),
    /// Let a built target answer prompts, and store its tokens and hidden states to train a draft head with.
    Collect(Box<CollectArgs>),
    /// Convert a GGUF file to a Hugging Face checkpoint folder in bf16.
    Export {
        /// The GGUF file.
        gguf: PathBuf,
        /// The folder to write.
        #[arg(long)]
        output: PathBuf,
    },
}

/// What goes into a model folder.
#[derive(Clone, Debug, Args)]
pub struct ModelArgs {
    /// The model whose text is served: a Hugging Face folder, a GGUF file, or random weights in the shape of
    /// llama-3.2-1b, llama-3.2-3b, llama-3.1-8b, llama-3.1-70b or of a config.json, for measurements.
    #[arg(long, value_name = "DIR|FILE.gguf|random:NAME[@SEED]")]
    pub target: PathBuf,
    /// Where draft tokens come from: a second model, an EAGLE head or Medusa heads of the target, `ngram` (what followed the last
    /// `max` tokens, or as few as `min`, where they stood before; 3 and 2 where nothing is said), `suffix` (what mostly
    /// followed the last tokens there, or in the last `tokens` tokens of what was read and written for those with the same
    /// `cache_salt`; 524288 where nothing is said), `skip` (the target itself without some of its layers, which are searched, or
    /// named in a file such as SWIFT's skip_layers.json), or `none`.
    #[arg(
        long,
        value_name = "DIR|FILE.gguf|random:NAME|ngram[:max=N,min=N]|suffix[:tokens=N]|skip[:FILE]|none",
        default_value = "none",
        value_parser = OsStringValueParser::new().try_map(DraftSource::parse)
    )]
    pub draft: DraftSource,
    /// Draft tokens in a step, at most [default: 8, or as many as there are Medusa heads; 0 without a drafter].
    #[arg(long)]
    pub max_draft_len: Option<usize>,
    /// Number format of the layers' weights.
    #[arg(long, value_parser = parse_dtype, default_value = "fp8")]
    pub dtype: Dtype,
    /// Number format of the drafter's weights [default: that of the target].
    #[arg(long, value_parser = parse_dtype)]
    pub draft_dtype: Option<Dtype>,
    /// Number format of embedding and head [default: 16-bit; int8 for int4; fp32 for fp32; fp16 on a GPU].
    #[arg(long, value_parser = parse_dtype)]
    pub head_dtype: Option<Dtype>,
    /// The same for the drafter: half as many bytes cost a drafter's head few drafts [default: that of the target].
    #[arg(long, value_parser = parse_dtype)]
    pub draft_head_dtype: Option<Dtype>,
    /// Have a drafting model propose so many tokens of its vocabulary alone: its head becomes as much smaller. Those that stand most
    /// often in a text, or in the answers of a folder that `collect` has filled; without either those with the lowest
    /// numbers. A text is the same whatever drafts [default: all].
    #[arg(long, value_name = "N[:FILE|DIR]")]
    pub draft_vocab: Option<DraftVocab>,
    /// Number format of keys and values; those of a head stay fp16 where this is fp8 [default: fp16; fp32 for fp32].
    #[arg(long, value_parser = parse_dtype)]
    pub kv_dtype: Option<Dtype>,
    /// What the scales of FP8 keys and values are found with: a file of prompts as `collect` takes, or `none` for scales of 1
    /// [default: those of the checkpoint, or found with built-in prompts].
    #[arg(long, value_name = "FILE|none", value_parser = OsStringValueParser::new().map(Calibration::parse))]
    pub kv_calibration: Option<Calibration>,
    /// `cpu`, or `cuda:ARCH[,ARCH...]` such as `cuda:sm_90a`.
    #[arg(long, default_value = "cpu")]
    pub device: String,
    /// The same for the drafter [default: that of the target].
    #[arg(long, value_name = "DEVICE")]
    pub draft_device: Option<String>,
    /// Of `--draft skip`.
    #[command(flatten)]
    pub skip: SkipArgs,
    /// Folder of NVRTC, which compiles the kernels [default: SPEC_CUDA_LIB, or found].
    #[arg(long, value_name = "DIR")]
    pub cuda_lib: Option<PathBuf>,
    /// Sequences in a step.
    #[arg(long, default_value_t = 64)]
    pub max_batch_size: usize,
    /// Prompt and generated tokens of a sequence [default: 8192, or what the models allow].
    #[arg(long)]
    pub max_seq_len: Option<usize>,
    /// Rows in a step.
    #[arg(long, default_value_t = 8192)]
    pub max_num_tokens: usize,
}

/// A build.
#[derive(Clone, Debug, Args)]
pub struct BuildArgs {
    /// What goes in.
    #[command(flatten)]
    pub model: ModelArgs,
    /// The Triton model folder to write, such as `model_repository/NAME`.
    #[arg(long)]
    pub output: PathBuf,
    /// Do not report progress.
    #[arg(long, short)]
    pub quiet: bool,
}

/// A prediction.
#[derive(Clone, Debug, Args)]
pub struct PlanArgs {
    /// What would go in.
    #[command(flatten)]
    pub model: ModelArgs,
    /// Memory read bandwidth in GB/s to predict with [default: measured on this machine].
    #[arg(long)]
    pub bandwidth: Option<f64>,
    /// Instruction set to predict for: portable, avx2, avx-vnni, avx512 or amx [default: the best of this machine].
    #[arg(long)]
    pub isa: Option<Isa>,
    /// Tell what so many MiB of keys and values hold, beside what the memory of the device leaves to them.
    #[arg(long, value_name = "MIB")]
    pub kv_memory: Option<usize>,
}

/// A generation.
#[derive(Clone, Debug, Args)]
pub struct TryArgs {
    /// A folder written by this program.
    pub model: PathBuf,
    /// The prompt as text.
    #[arg(long, required_unless_present = "prompt_ids", conflicts_with = "prompt_ids")]
    pub prompt: Option<String>,
    /// The prompt as token ids, separated by commas.
    #[arg(long, value_delimiter = ',')]
    pub prompt_ids: Option<Vec<u32>>,
    /// Put the prompt through the model's chat template, as a user's message.
    #[arg(long, conflicts_with = "prompt_ids")]
    pub chat: bool,
    /// System message of the chat.
    #[arg(long, requires = "chat")]
    pub system: Option<String>,
    /// Tokens to generate at most.
    #[arg(long, default_value_t = 128)]
    pub max_tokens: usize,
    /// Draft tokens in a step: a number up to the engine's maximum, 0 for none, or `auto`.
    #[arg(long, default_value = "auto")]
    pub draft_len: DraftLen,
    /// Where drafts are looked up, alone or ahead of a model: off, ngram or suffix [default: as the engine was built].
    #[arg(long)]
    pub lookup: Option<Lookup>,
    /// Continuations that a look-up drafts side by side, as a tree.
    #[arg(long, default_value_t = 1)]
    pub ngram_branches: usize,
    /// Branches that the drafts of a model or a head have at most, 1 to 16, where it and its target are on the CPU or on one GPU.
    #[arg(long, default_value_t = 1, value_parser = draft_branches)]
    pub draft_branches: usize,
    /// Tokens of a draft with branches at most, in all of them.
    #[arg(long, value_parser = at_least_one)]
    pub draft_tree_tokens: Option<usize>,
    /// 0 is greedy.
    #[arg(long, default_value_t = 0.0)]
    pub temperature: f32,
    /// Keep the K likeliest tokens; 0 keeps all.
    #[arg(long, default_value_t = 0)]
    pub top_k: usize,
    /// Keep the likeliest tokens up to this probability.
    #[arg(long, default_value_t = 1.0)]
    pub top_p: f32,
    /// Keep tokens at least this fraction as likely as the likeliest.
    #[arg(long, default_value_t = 0.0)]
    pub min_p: f32,
    /// Penalty on tokens seen in prompt or output; 1 is off.
    #[arg(long, default_value_t = 1.0)]
    pub repetition_penalty: f32,
    /// Penalty on tokens seen in the output; 0 is off.
    #[arg(long, default_value_t = 0.0, allow_negative_numbers = true)]
    pub presence_penalty: f32,
    /// Penalty per occurrence in the output; 0 is off.
    #[arg(long, default_value_t = 0.0, allow_negative_numbers = true)]
    pub frequency_penalty: f32,
    /// Added to a token's logit, as ID:VALUE; may be repeated.
    #[arg(long, value_parser = parse_bias)]
    pub logit_bias: Vec<(u32, f32)>,
    /// Text that must not be completed; may be repeated.
    #[arg(long)]
    pub bad_word: Vec<String>,
    /// Text that ends the generation and is not printed; may be repeated.
    #[arg(long)]
    pub stop: Vec<String>,
    /// Nothing ends the text before this many tokens.
    #[arg(long, default_value_t = 0)]
    pub min_tokens: usize,
    /// Go on after the model's end tokens.
    #[arg(long)]
    pub ignore_eos: bool,
    /// The same seed gives the same text, with and without speculation.
    #[arg(long)]
    pub seed: Option<u64>,
    /// Report the log-probability of each token and this many of the likeliest (with --json).
    #[arg(long)]
    pub logprobs: Option<usize>,
    /// Threads [default: one for each physical core that may be used].
    #[arg(long)]
    pub threads: Option<usize>,
    /// Bind each thread to a core: auto (several last caches, no core left over), on or off.
    #[arg(long, default_value = "auto")]
    pub pin_threads: Pinning,
    /// Instruction set to compute with: portable, avx2, avx-vnni, avx512 or amx [default: the best of this machine].
    #[arg(long)]
    pub isa: Option<Isa>,
    /// Also generate with `--draft-len 0` and report both speeds.
    #[arg(long)]
    pub compare: bool,
    /// Print one JSON object on one line.
    #[arg(long)]
    pub json: bool,
}

/// How layers to skip are found.
#[derive(Clone, Debug, Default, Args)]
pub struct SkipArgs {
    /// Prompts to search layers to skip on, as `collect` takes [default: built-in ones].
    #[arg(long, value_name = "FILE")]
    pub skip_prompts: Option<PathBuf>,
    /// Minutes after which the search for them ends, once each part of each layer was tried [default: 5].
    #[arg(long, value_name = "MINUTES", value_parser = minutes)]
    pub skip_minutes: Option<f64>,
    /// Which entry of a file names the layers, if it has several.
    #[arg(long, value_name = "NAME")]
    pub skip_entry: Option<String>,
}

/// Another drafter.
#[derive(Clone, Debug, Args)]
pub struct DraftArgs {
    /// A folder written by this program, which gets the drafter.
    #[arg(long, value_name = "MODEL_DIR")]
    pub target: PathBuf,
    /// Where draft tokens come from, as for a build.
    #[arg(
        long,
        value_name = "DIR|FILE.gguf|random:NAME|ngram[:max=N,min=N]|suffix[:tokens=N]|skip[:FILE]|none",
        value_parser = OsStringValueParser::new().try_map(DraftSource::parse)
    )]
    pub draft: DraftSource,
    /// Of `--draft skip`.
    #[command(flatten)]
    pub skip: SkipArgs,
    /// Draft tokens in a step, at most [default: 8, or as many as there are Medusa heads; 0 without a drafter].
    #[arg(long)]
    pub max_draft_len: Option<usize>,
    /// Number format of the drafter's weights [default: that of the target].
    #[arg(long, value_parser = parse_dtype)]
    pub draft_dtype: Option<Dtype>,
    /// Number format of the drafter's embedding and head [default: that of the target].
    #[arg(long, alias = "draft-head-dtype", value_parser = parse_dtype)]
    pub head_dtype: Option<Dtype>,
    /// Have a drafting model propose so many tokens of its vocabulary alone: its head becomes as much smaller. Those that stand most
    /// often in a text, or in the answers of a folder that `collect` has filled; without either those with the lowest
    /// numbers. A text is the same whatever drafts [default: all].
    #[arg(long, value_name = "N[:FILE|DIR]")]
    pub draft_vocab: Option<DraftVocab>,
    /// What the scales of FP8 keys and values are found with: a file of prompts as `collect` takes, or `none` for scales of 1
    /// [default: those of the checkpoint, or found with built-in prompts].
    #[arg(long, value_name = "FILE|none", value_parser = OsStringValueParser::new().map(Calibration::parse))]
    pub kv_calibration: Option<Calibration>,
    /// Where the drafter runs: `cpu`, or `cuda:ARCH[,ARCH...]` [default: where the target does].
    #[arg(long, value_name = "DEVICE")]
    pub draft_device: Option<String>,
    /// Folder of NVRTC, which compiles the kernels [default: SPEC_CUDA_LIB, or found].
    #[arg(long, value_name = "DIR")]
    pub cuda_lib: Option<PathBuf>,
    /// Do not report progress.
    #[arg(long, short)]
    pub quiet: bool,
}

/// A measurement.
#[derive(Clone, Debug, Args)]
pub struct ProfileArgs {
    /// A folder written by this program, which gets the measured times.
    pub model: PathBuf,
    /// Rounds over everything that is measured; medians count.
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u16).range(1..))]
    pub rounds: u16,
    /// Threads of the CPU executor [default: as a server has].
    #[arg(long)]
    pub threads: Option<usize>,
    /// Instruction set of the CPU executor [default: the best there is].
    #[arg(long)]
    pub isa: Option<Isa>,
    /// Do not report what was measured.
    #[arg(long, short)]
    pub quiet: bool,
}

/// A collection.
#[derive(Clone, Debug, Args)]
pub struct CollectArgs {
    /// A folder written by this program.
    #[arg(long, value_name = "MODEL_DIR")]
    pub target: PathBuf,
    /// Prompts, one a line: text, or JSON with `prompt`, `turns` (the first one), `messages` or `prompt_ids`. May be repeated.
    #[arg(long, value_name = "FILE", required = true)]
    pub prompts: Vec<PathBuf>,
    /// The folder to fill. One that was begun is gone on with.
    #[arg(long, value_name = "DIR")]
    pub output: PathBuf,
    /// Answers to each prompt: the first one is greedy, the others are drawn.
    #[arg(long, default_value_t = 1)]
    pub answers: usize,
    /// Of the answers that are drawn.
    #[arg(long, default_value_t = 0.8)]
    pub temperature: f32,
    /// Tokens of an answer at most.
    #[arg(long, default_value_t = 512)]
    pub max_tokens: usize,
    /// One prompt of so many is answered once and kept to measure with; 0 keeps none.
    #[arg(long, default_value_t = 10)]
    pub held_out: usize,
    /// Layers behind which hidden states are taken, beside the last one [default: 2, half of them, all but 3].
    #[arg(long, value_delimiter = ',')]
    pub layers: Option<Vec<usize>>,
    /// Stop once the hidden states take so many GiB.
    #[arg(long, default_value_t = 20)]
    pub max_gib: usize,
    /// Give prompts to the model as they are, without its chat template.
    #[arg(long)]
    pub plain: bool,
    /// Threads [default: one for each physical core that may be used].
    #[arg(long)]
    pub threads: Option<usize>,
    /// Instruction set to compute with: portable, avx2, avx-vnni, avx512 or amx [default: the best of this machine].
    #[arg(long)]
    pub isa: Option<Isa>,
}

/// How many tokens to draft.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DraftLen {
    /// As many as pay.
    Auto,
    /// This many.
    Fixed(usize),
}

impl std::str::FromStr for DraftLen {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text == "auto" {
            return Ok(Self::Auto);
        }
        text.parse()
            .map(Self::Fixed)
            .map_err(|_| format!("`{text}` is neither a number nor `auto`"))
    }
}

/// More than a week is a mistake.
const MAX_MINUTES: f64 = 7.0 * 24.0 * 60.0;

fn minutes(text: &str) -> Result<f64, String> {
    let number = text.parse().ok().filter(|number| (0.0..=MAX_MINUTES).contains(number));
    number.ok_or_else(|| format!("expected a number of 0 to {MAX_MINUTES}"))
}

fn at_least_one(text: &str) -> Result<usize, String> {
    let number = text.parse().ok().filter(|number| *number > 0);
    number.ok_or_else(|| "expected a whole number of at least 1".into())
}

fn draft_branches(text: &str) -> Result<usize, String> {
    let number = text.parse().ok().filter(|number| (1..=MAX_DRAFT_BRANCHES).contains(number));
    number.ok_or_else(|| format!("expected a whole number of 1 to {MAX_DRAFT_BRANCHES}"))
}

fn parse_dtype(text: &str) -> Result<Dtype, String> {
    Dtype::ALL.into_iter().find(|dtype| dtype.name() == text).ok_or_else(|| {
        let names = Dtype::ALL.map(Dtype::name).join(", ");
        format!("expected one of {names}")
    })
}

fn parse_bias(text: &str) -> Result<(u32, f32), String> {
    let (id, value) = text.split_once(':').ok_or("expected ID:VALUE")?;
    let id = id.parse().map_err(|_| format!("`{id}` is no token id"))?;
    let value = value.parse().map_err(|_| format!("`{value}` is no number"))?;
    Ok((id, value))
}
