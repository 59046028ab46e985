//! `spec-build collect`: a target answers prompts, and its tokens and hidden states are stored for whoever trains a draft
//! head of it.

mod data;

use crate::cli::CollectArgs;
use crate::progress::Progress;
use crate::prompts;
use crate::table;
use anyhow::{Context, Result, ensure};
use data::{Answer, Data, Origin};
use half::bf16;
use spec_core::engine::Engine;
use spec_core::runtime::{
    FinishReason, ModelFolder, Options, Request, Runtime, Sequence, SequenceId, Watch,
};
use spec_core::sampling::SamplingParams;
use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, PoisonError};

/// Rows of a step at most: what a pass computes of prompts is kept until the step ends.
const MAX_ROWS: usize = 2048;

/// An answer that is to be given.
#[derive(Clone, Copy)]
struct Task {
    prompt: usize,
    answer: usize,
}

/// Hidden states of the sequences that run, `[token][layer][hidden]`.
type States = Arc<Mutex<HashMap<SequenceId, Vec<bf16>>>>;

/// Runs the command.
pub fn collect(args: &CollectArgs) -> Result<()> {
    let folder = ModelFolder::open(&args.target)?;
    let manifest = folder.target.manifest();
    let prompts = prompts::read(&args.prompts, &folder.tokenizer, !args.plain)?;
    let layers = layers(args, manifest.model.num_layers)?;
    let origin = origin(args, &folder.target, &prompts, layers);
    let mut data = Data::open(&args.output, &origin)?;
    let states = States::default();
    let mut runtime = load(args, &folder.target, &origin, &states)?;
    let _pinned = runtime.pin_caller();
    let max_len = runtime.limits().max_seq_len;
    let (tasks, too_long) = tasks(args, &prompts, &data, max_len);
    if too_long > 0 {
        eprintln!(
            "{too_long} prompts leave no room in the {max_len} tokens of the engine: left out"
        );
    }
    let wanted = tasks.len();
    let collection =
        Collection { args, prompts: &prompts, max_len, states, running: HashMap::new() };
    let ended = collection.run(&mut runtime, &mut data, tasks)?;
    println!(
        "{}: {} answers, {} tokens with hidden states, {}{}",
        args.output.display(),
        data.len(),
        data.tokens(),
        table::bytes(data.bytes() as u64),
        match ended {
            Ended::Full => format!("; --max-gib {} is reached", args.max_gib),
            Ended::Done if wanted == 0 => "; nothing was left to do".into(),
            Ended::Done => String::new(),
        }
    );
    Ok(())
}

/// The layers that are asked for, or a low, a middle and a high one, as most heads want them.
fn layers(args: &CollectArgs, num_layers: usize) -> Result<Vec<usize>> {
    let is_ascending = |layers: &[usize]| layers.is_sorted_by(|a, b| a < b);
    if let Some(layers) = &args.layers {
        ensure!(
            is_ascending(layers) && layers.iter().all(|&layer| layer < num_layers),
            "--layers {layers:?}: expected ascending numbers below {num_layers}"
        );
        return Ok(layers.clone());
    }
    let layers = vec![2, num_layers / 2, num_layers.saturating_sub(3)];
    ensure!(
        is_ascending(&layers),
        "a model of {num_layers} layers is too small for the usual ones, {layers:?}: name some with --layers"
    );
    Ok(layers)
}

fn origin(args: &CollectArgs, target: &Engine, prompts: &[Vec<u32>], layers: Vec<usize>) -> Origin {
    let manifest = target.manifest();
    let mut hash = blake3::Hasher::new();
    for prompt in prompts {
        hash.update(&(prompt.len() as u64).to_le_bytes());
        prompt.iter().for_each(|token| _ = hash.update(&token.to_le_bytes()));
    }
    Origin {
        target: manifest.identity.clone(),
        prompts: hash.finalize().to_hex().to_string(),
        // Behind the last layer comes what a head is to hit.
        layers: layers.into_iter().chain([manifest.model.num_layers]).collect(),
        hidden_size: manifest.model.hidden_size,
        temperature: args.temperature,
        max_tokens: args.max_tokens,
        held_out: args.held_out,
    }
}

/// A runtime that stores what it computes of every sequence.
fn load(args: &CollectArgs, target: &Engine, origin: &Origin, states: &States) -> Result<Runtime> {
    let layers = &origin.layers;
    let options = Options {
        threads: args.threads,
        isa: args.isa,
        max_num_tokens: Some(MAX_ROWS),
        ..Options::default()
    };
    let (states, width) = (Arc::clone(states), layers.len() * origin.hidden_size);
    let on_states = move |id, first: usize, rows: &[&[f32]]| {
        let mut states = states.lock().unwrap_or_else(PoisonError::into_inner);
        let own: &mut Vec<bf16> = states.entry(id).or_default();
        own.resize((first + rows.len()) * width, bf16::ZERO);
        for (to, from) in own[first * width..].chunks_exact_mut(width).zip(rows) {
            to.iter_mut().zip(*from).for_each(|(to, from)| *to = bf16::from_f32(*from));
        }
    };
    let watch = Watch { layers: layers.clone(), on_states: Box::new(on_states) };
    Ok(Runtime::load_watched(target, &options, watch)?)
}

/// What is not there yet: one answer to every prompt, then another. Prompts that are held out are answered once. Also how
/// many prompts are too long.
fn tasks(
    args: &CollectArgs,
    prompts: &[Vec<u32>],
    data: &Data,
    max_len: usize,
) -> (VecDeque<Task>, usize) {
    let fits = |prompt: &Vec<u32>| prompt.len() < max_len;
    let all = (0..args.answers)
        .flat_map(|answer| (0..prompts.len()).map(move |prompt| Task { prompt, answer }));
    let wanted = all.filter(|&Task { prompt, answer }| {
        fits(&prompts[prompt])
            && !data.has(prompt, answer)
            && !(answer > 0 && is_held_out(args, prompt))
    });
    (wanted.collect(), prompts.iter().filter(|prompt| !fits(prompt)).count())
}

/// Whether a prompt is kept to measure with. Files are often sorted by kinds: these are of all of it.
fn is_held_out(args: &CollectArgs, prompt: usize) -> bool {
    args.held_out > 0 && prompt % args.held_out == args.held_out - 1
}

/// Why a run ended.
enum Ended {
    Done,
    /// The folder has as much as it may.
    Full,
}

/// Answers on their way.
struct Collection<'a> {
    args: &'a CollectArgs,
    prompts: &'a [Vec<u32>],
    /// Positions of the engine, of which each prompt leaves one at least.
    max_len: usize,
    states: States,
    running: HashMap<SequenceId, Task>,
}

impl Collection<'_> {
    /// Lets the target give the answers, as many at once as it takes.
    fn run(
        mut self,
        runtime: &mut Runtime,
        data: &mut Data,
        mut tasks: VecDeque<Task>,
    ) -> Result<Ended> {
        let progress = Progress::counting("answers", tasks.len() as u64, "answers");
        let at_once = runtime.limits().max_batch_size;
        loop {
            while self.running.len() < at_once
                && let Some(task) = tasks.pop_front()
            {
                self.running.insert(runtime.add(self.request(task))?, task);
            }
            if self.running.is_empty() {
                progress.finish();
                return Ok(Ended::Done);
            }
            let step = runtime.step();
            if let Some(error) = step.failure {
                return Err(error.into());
            }
            for sequence in step.events.into_iter().filter_map(|event| event.finished) {
                self.store(*sequence, data)?;
                progress.add(1);
                if data.bytes() >= self.args.max_gib << 30 {
                    progress.finish();
                    return Ok(Ended::Full);
                }
            }
        }
    }

    /// The first answer to a prompt is the likeliest, the others are drawn.
    fn request(&self, Task { prompt, answer }: Task) -> Request {
        let sampling = SamplingParams {
            temperature: if answer == 0 { 0.0 } else { self.args.temperature },
            seed: Some((answer * self.prompts.len() + prompt) as u64),
            ..SamplingParams::default()
        };
        let prompt = Arc::new(self.prompts[prompt].clone());
        Request {
            // A prompt may leave room for fewer.
            max_tokens: self.args.max_tokens.min(self.max_len - prompt.len()),
            prompt,
            sampling,
            ..Request::default()
        }
    }

    fn store(&mut self, sequence: Sequence, data: &mut Data) -> Result<()> {
        let Task { prompt, answer } =
            self.running.remove(&sequence.id).context("an answer that nobody asked for")?;
        ensure!(sequence.finish != Some(FinishReason::Failed), "an answer failed");
        let states =
            self.states.lock().unwrap_or_else(PoisonError::into_inner).remove(&sequence.id);
        let held_out = is_held_out(self.args, prompt);
        let (prompt_tokens, token_ids) = (sequence.prompt_len, sequence.tokens.to_vec());
        let answer = Answer { prompt, answer, held_out, prompt_tokens, token_ids };
        data.add(answer, &states.context("an answer without hidden states")?)
    }
}
