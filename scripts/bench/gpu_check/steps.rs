//! Whole steps of whole runtimes: drafting, verification and acceptance at several batch sizes and draft lengths, with
//! what the GPU takes of them, and the kernels of a step one by one.

use crate::ceiling::Ceilings;
use crate::goal;
use crate::gpu::{Machine, Watched};
use crate::kind;
use crate::noise::random_words;
use crate::prefill;
use crate::random_engine::{Model, RandomEngines};
use crate::report::Report;
use crate::timing::{Timing, rounded};
use serde_json::{Value, json};
use spec_core::engine::Manifest;
use spec_core::runtime::{DraftPolicy, Options, Prefill, Request, Runtime, SequenceId};
use spec_core::testing::cuda::device::Launch;
use std::collections::{BTreeMap, HashSet};
use std::error::Error;
use std::time::Instant;

/// What is timed.
#[derive(Clone, Copy)]
struct Plan {
    batches: &'static [usize],
    draft_lens: &'static [usize],
    /// Tokens of a prompt.
    context: usize,
    /// Steps that are timed, after some that are not.
    steps: usize,
}

const PLAN: Plan =
    Plan { batches: &[1, 4, 16, 64], draft_lens: &[0, 4, 8], context: 1000, steps: 25 };
/// On an emulator.
const FEW: Plan = Plan { batches: &[2], draft_lens: &[0, 2], context: 20, steps: 2 };

/// Steps ahead of those that are timed: the first may record its graph.
const WARM_UP: usize = 3;
/// The least that holds a sequence of the engine's longest.
const MIN_KV_TOKENS: usize = 8192;
/// More steps than any prompts take: a runtime that does not come to them is broken.
const MOST_PREFILL_STEPS: usize = 100_000;

/// A pair on a device, and what its times are compared with.
pub(crate) struct Bench<'a> {
    pub(crate) engines: &'a RandomEngines,
    pub(crate) target: &'a Model,
    pub(crate) draft: Option<&'a Model>,
    pub(crate) machine: Machine,
    /// Name of the GPU.
    pub(crate) gpu: &'a str,
    pub(crate) ceilings: Option<Ceilings>,
    /// When to begin nothing more.
    pub(crate) deadline: Instant,
}

/// A batch that is timed.
#[derive(Clone, Copy)]
struct Run {
    batch: usize,
    draft_len: usize,
    plan: Plan,
}

/// Times of the steps of a run.
struct Times {
    wall: Timing,
    gpu: Timing,
    tokens: usize,
}

impl Bench<'_> {
    /// Times everything; gives how many runs went into the report.
    pub(crate) fn run(&self, report: &mut Report) -> Result<usize, Box<dyn Error>> {
        let plan = if self.machine.is_emulated() { FEW } else { PLAN };
        let waiting = self.waiting_gpu_us(plan)?;
        let mut device = self.machine.open()?;
        let opened = device.clone();
        let options = options(plan, self.machine);
        let mut runtime =
            Runtime::load_on(&self.engines.target, &options, &|_| Ok(Box::new(opened.clone())))?;
        let before = report.count("steps");
        let mut one_row = None;
        for &batch in plan.batches {
            for &draft_len in plan.draft_lens {
                if draft_len > 0 && self.draft.is_none() {
                    continue;
                }
                if Instant::now() > self.deadline {
                    return Ok(report.count("steps") - before);
                }
                let run = Run { batch, draft_len, plan };
                let times = self.time(&run, &mut runtime, &device)?;
                let gpu = waiting.get(&draft_len).copied().filter(|_| batch == 1);
                let entry = self.entry(&run, &times, gpu, &mut one_row, &mut device)?;
                report.push("steps", entry);
            }
        }
        Ok(report.count("steps") - before)
    }

    /// Microseconds of the GPU in steps of one sequence that wait for the host, by draft length: of steps that begin
    /// ahead nobody sees when the one before has ended.
    fn waiting_gpu_us(&self, plan: Plan) -> Result<BTreeMap<usize, f64>, Box<dyn Error>> {
        let device = self.machine.open()?;
        let options = Options { launch_ahead: false, ..options(plan, self.machine) };
        let opened = device.clone();
        let mut runtime =
            Runtime::load_on(&self.engines.target, &options, &|_| Ok(Box::new(opened.clone())))?;
        let drafts = plan.draft_lens.iter().filter(|&&len| len == 0 || self.draft.is_some());
        let times = drafts.map(|&draft_len| {
            let run = Run { batch: 1, draft_len, plan };
            Ok((draft_len, self.time(&run, &mut runtime, &device)?.gpu.median()))
        });
        times.collect()
    }

    /// Runs a batch from its prompts on.
    fn time(
        &self,
        run: &Run,
        runtime: &mut Runtime,
        device: &Watched,
    ) -> Result<Times, Box<dyn Error>> {
        let Run { batch, draft_len, plan } = *run;
        let room = (plan.steps + WARM_UP + batch) * (draft_len + 1);
        let vocab_size = self.engines.target.manifest().model.vocab_size;
        let mut waiting = HashSet::new();
        for idx in 0..batch {
            waiting.insert(runtime.add(Request {
                prompt: prompt(idx, plan.context, vocab_size).into(),
                max_tokens: room,
                draft_len: Some(draft_len),
                ignore_eos: true,
                ..Request::default()
            })?);
        }
        let ids: Vec<SequenceId> = waiting.iter().copied().collect();
        for _ in 0..MOST_PREFILL_STEPS {
            if waiting.is_empty() {
                break;
            }
            step(runtime)?.tokens.iter().for_each(|(id, _)| {
                waiting.remove(id);
            });
        }
        if !waiting.is_empty() {
            return Err("the prompts do not come to an end".into());
        }
        for _ in 0..WARM_UP {
            step(runtime)?;
        }
        device.watch().take_graphs();
        let (mut wall, mut tokens) = (Vec::new(), 0);
        for _ in 0..plan.steps {
            let stepped = step(runtime)?;
            wall.push(stepped.us);
            tokens += stepped.tokens.iter().map(|(_, count)| count).sum::<usize>();
        }
        let gpu = device.watch().take_graphs();
        // More where a step that began ahead was not the one that was asked for.
        if gpu.len() < plan.steps {
            return Err(format!("{} graphs in {} steps", gpu.len(), plan.steps).into());
        }
        ids.into_iter().for_each(|id| {
            runtime.cancel(id);
        });
        let gpu = gpu.into_iter().map(|time| time.as_secs_f64() * 1e6).collect();
        Ok(Times { wall: Timing::new(wall, 1), gpu: Timing::new(gpu, 1), tokens })
    }

    fn entry(
        &self,
        run: &Run,
        times: &Times,
        waiting_gpu: Option<f64>,
        one_row: &mut Option<f64>,
        device: &mut Watched,
    ) -> Result<Value, Box<dyn Error>> {
        let Run { batch, draft_len, plan } = *run;
        let wall = times.wall.median();
        // Below nothing where the host's part hides behind the GPU's.
        let gap = waiting_gpu.map(|gpu| wall - gpu);
        let per_step = times.tokens as f64 / plan.steps as f64;
        let bytes = self.bytes(run) as f64;
        let mut entry = json!({
            "model": self.target.name(), "drafter": self.draft.map(Model::name),
            "batch": batch, "draft_len": draft_len, "context": plan.context,
            "step": times.wall.json(), "gpu": times.gpu.json(),
            "host_gap_us": gap.map(rounded), "tokens_per_step": rounded(per_step),
            "tokens_per_s": rounded(per_step / wall * 1e6), "gb": rounded(bytes / 1e9),
            "share_of_copy": self.ceilings.map(|ceilings| rounded(bytes / wall / ceilings.copy)),
        });
        let layers = self.layers(device)?;
        if let Some(whole) = layers.extrapolated(wall, self.target) {
            entry["layers"] = json!([self.target.shape.num_layers, self.target.shape.all_layers]);
            entry["extrapolated_us"] = json!(rounded(whole));
        }
        entry["target_us"] = json!(rounded(layers.of_target));
        let one = *one_row.get_or_insert(layers.of_target);
        entry["parts_us"] = layers.parts;
        if !self.machine.is_emulated() {
            entry["goals"] = self.goals(run, wall, gap, layers.of_target / one);
        }
        Ok(entry)
    }

    /// Of milliseconds a token, of the host's part, and of verification to a pass of one row.
    fn goals(&self, run: &Run, wall: f64, gap: Option<f64>, to_one_row: f64) -> Value {
        let is_one = run.batch == 1;
        let token = goal::token_ms(self.target, self.gpu).filter(|_| is_one && run.draft_len == 0);
        let verify = (is_one && run.draft_len == 4).then_some(goal::VERIFY_RATIO);
        json!([
            goal::json("ms a token", token, |most| wall / 1e3 <= most),
            goal::json("host gap, us", gap.map(|_| goal::HOST_GAP_US), |most| {
                gap.is_some_and(|gap| gap <= most)
            }),
            goal::json("verification to one row", verify, |most| to_one_row <= most),
        ])
    }

    /// What a step has to read at least: weights of every pass, and keys and values.
    fn bytes(&self, run: &Run) -> usize {
        let of = |manifest: &Manifest| {
            let positions = run.batch * run.plan.context * manifest.model.num_layers;
            kind::pass_bytes(manifest) + positions * kind::kv_bytes(manifest)
        };
        let draft = self.engines.draft.as_ref().map_or(0, |draft| of(draft.manifest()));
        of(self.engines.target.manifest()) + run.draft_len * draft
    }

    /// Times the kernels of the step that ran last, kind by kind.
    fn layers(&self, device: &mut Watched) -> Result<Layers, Box<dyn Error>> {
        let target = self.engines.target.manifest();
        let draft = self.engines.draft.as_ref().map(|draft| draft.manifest());
        let mut by_part = BTreeMap::<_, Vec<Launch>>::new();
        let recorded = device.watch().last_replayed();
        let name = |launch: &Launch| device.watch().variant(launch.kernel);
        // The tables of the target's pass, the last one, are the first of its launches.
        let verify = recorded.iter().rposition(|launch| name(launch) == "rows");
        let verify = verify.ok_or("the graph that ran last is no step")?;
        for (idx, launch) in recorded.iter().enumerate() {
            let (whose, manifest) = match idx < verify {
                true => ("drafter", draft.unwrap_or(target)),
                false => ("target", target),
            };
            let part = (whose, kind::of(&name(launch), manifest));
            by_part.entry(part).or_default().push(launch.clone());
        }
        let (mut parts, mut of_layers, mut of_target) = (json!({}), 0.0, 0.0);
        let is_emulated = self.machine.is_emulated();
        for ((whose, kind), launches) in by_part {
            let us = Timing::of_kernel(&kind, launches, is_emulated, device)?.median();
            parts[format!("{whose} {kind}")] = json!(rounded(us));
            if whose == "drafter" {
                continue;
            }
            of_target += us;
            if kind::LAYER.contains(&kind.as_str()) {
                of_layers += us;
            }
        }
        Ok(Layers { parts, of_layers, of_target })
    }
}

/// The kernels of a step.
struct Layers {
    /// Microseconds of all launches of a part, by its name.
    parts: Value,
    /// Microseconds of the target's layers.
    of_layers: f64,
    /// Microseconds of all of the target's pass.
    of_target: f64,
}

impl Layers {
    /// Microseconds of a step with all layers of the model, if not all were built.
    fn extrapolated(&self, wall: f64, model: &Model) -> Option<f64> {
        let shape = model.shape;
        let missing = (shape.all_layers - shape.num_layers) as f64 / shape.num_layers as f64;
        (missing > 0.0).then_some(wall + self.of_layers * missing)
    }
}

fn options(plan: Plan, machine: Machine) -> Options {
    // Where nothing computes prompts in blocks that need not be said each time.
    let lacks = |(way, _)| prefill::missing(way, machine).is_some();
    let prefill = prefill::BLOCKS.into_iter().all(lacks).then_some(Prefill::Exact);
    let most = plan.batches.iter().max().copied().unwrap_or(1);
    // Twice the prompts: room for what is generated, and pages are whole.
    let kv_tokens = Some((2 * most * plan.context).max(MIN_KV_TOKENS));
    Options { draft_policy: DraftPolicy::Fixed, kv_tokens, prefill, ..Options::default() }
}

/// Random, another for each sequence and the same for each run, so that its keys may be found in the cache.
fn prompt(idx: usize, len: usize, vocab_size: usize) -> Vec<u32> {
    let words = random_words((idx + 1) * len).split_off(idx * len);
    words.into_iter().map(|word| word % vocab_size as u32).collect()
}

/// What a step took and brought.
struct Stepped {
    us: f64,
    /// Sequences that got tokens, and how many.
    tokens: Vec<(SequenceId, usize)>,
}

fn step(runtime: &mut Runtime) -> Result<Stepped, Box<dyn Error>> {
    let start = Instant::now();
    let step = runtime.step();
    let us = start.elapsed().as_secs_f64() * 1e6;
    if let Some(failure) = step.failure {
        return Err(failure.into());
    }
    let emitted = step.events.iter().filter(|event| !event.emitted.is_empty());
    let tokens = emitted.map(|event| (event.id, event.emitted.len())).collect();
    Ok(Stepped { us, tokens })
}
