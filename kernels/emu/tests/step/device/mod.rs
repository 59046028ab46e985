//! The kernels of a step on the emulator. The models stand in for the layers: they are fed what the tables of
//! rows say, and what they answer stands where the head would have written it.

mod checks;

use crate::given::Given;
use crate::host::fed;
use crate::world::{Model, Sequence, World};
use checks::{check_next, check_tiles, ensure};
use spec_core::testing::cuda::device::{Pod, bytes_of, bytes_of_mut};
use spec_core::testing::cuda::step::params::*;
use spec_core::testing::cuda::step::{Planned, StepInput};
use spec_emu::{Arena, Launch, Program, Schedule};

/// Rows of a tile: not a divisor of what a sequence has, as a rule.
const TILE_ROWS: usize = 3;

/// Positions that a row of the drafter sees, as if it were a head; the target is a model.
fn window(pass: u32) -> u32 {
    if pass == VERIFY { 0 } else { 5 }
}

/// The first of them: none sees position 0.
fn first_seen(pass: u32, position: u32) -> u32 {
    if pass == VERIFY { 0 } else { (position + 1).saturating_sub(window(pass)).max(1) }
}

/// The number of every step.
const STEP: u32 = 0x5eed;

/// What a step did for a place of the batch.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Outcome {
    pub(crate) tokens: Vec<u32>,
    pub(crate) drafted: usize,
    pub(crate) accepted: usize,
    pub(crate) draft_computed: usize,
}

/// Runs launches on memory.
pub(crate) type Other<'a> = &'a dyn Fn(&Arena, &[Launch<'_>]) -> Result<(), String>;

/// How the kernels are run.
#[derive(Clone, Copy)]
pub(crate) struct Run<'a> {
    /// Variant of the sampling kernel, its threads, and its blocks a row.
    pub(crate) sample: (&'static str, u32, u32),
    pub(crate) schedule: Schedule,
    /// Places of the batch beyond the sequences.
    pub(crate) unused: usize,
    /// Runs them in place of this process.
    pub(crate) program: Option<&'a Program>,
    /// Runs them in place of the emulator, where no program does.
    pub(crate) other: Option<Other<'a>>,
}

impl Run<'_> {
    /// As it is shipped.
    pub(crate) const WHOLE: Self = Self {
        sample: ("sample", SAMPLE_THREADS, SAMPLE_SLICES),
        schedule: Schedule::PLAIN,
        unused: 1,
        program: None,
        other: None,
    };

    /// In blocks that take the emulator less time.
    pub(crate) const SMALL: Self = Self { sample: ("sample_small", 64, 2), ..Self::WHOLE };

    /// In the smallest blocks.
    pub(crate) const WARP: Self = Self { sample: ("sample_warp", 32, 1), ..Self::WHOLE };
}

/// A launch to be.
struct Job {
    variant: &'static str,
    grid: u32,
    block: u32,
    params: Vec<u8>,
}

/// What `rows` writes for a pass.
struct Tables {
    pass: u32,
    per_sequence: usize,
    heads_each: usize,
    rows: u64,
    tiles: u64,
    head_rows: u64,
}

struct Device<'a> {
    world: &'a World,
    run: Run<'a>,
    arena: Arena,
    places: usize,
    sequences: u64,
    last_tokens: u64,
    words: u64,
    drafting: u64,
    drafts: u64,
    draft_weights: u64,
    draft_distributions: u64,
    choices: u64,
    parts: u64,
    answers: u64,
    answer: AnswerLayout,
}

/// Where the parts of an answer stand in it.
struct AnswerLayout {
    bytes: usize,
    tokens: usize,
    done: usize,
}

impl AnswerLayout {
    fn of(places: usize, num_drafts: usize) -> Self {
        let tokens = places * size_of::<StepResult>();
        let done = tokens + 4 * (places + num_drafts);
        Self { bytes: done + 4, tokens, done }
    }
}

impl<'a> Device<'a> {
    fn new(world: &'a World, run: Run<'a>, input: &StepInput, given: &Given) -> Self {
        let arena = Arena::new(1 << 30);
        let places = input.sequences.len();
        let num_drafts = places * world.max_drafts;
        let answer = AnswerLayout::of(places, num_drafts);
        Self {
            world,
            run,
            places,
            sequences: arena.put(bytes_of(&input.sequences)),
            last_tokens: arena.put(bytes_of(&input.last_tokens)),
            words: arena.put(bytes_of(&input.words)),
            drafting: arena.put(bytes_of(&given.drafting)),
            drafts: arena.put(bytes_of(&given.drafts)),
            draft_weights: arena.alloc(4 * num_drafts * weights_len(world.shared_vocab())),
            draft_distributions: arena.put(bytes_of(&given.distributions)),
            choices: arena.alloc((places + num_drafts) * size_of::<Choice>()),
            parts: arena.put(&vec![0; (places + num_drafts) * SAMPLE_PARTS_BYTES]),
            answers: arena.alloc(ANSWERS * answer.bytes),
            answer,
            arena,
        }
    }

    /// Runs kernels that may begin before the one before has ended.
    fn launch(&self, jobs: &[Job]) -> Result<(), String> {
        let launches: Vec<_> = jobs
            .iter()
            .map(|job| Launch {
                variant: job.variant,
                grid: job.grid,
                block: job.block,
                shared_bytes: if job.variant.starts_with("sample") {
                    SAMPLE_SHARED_BYTES
                } else {
                    0
                },
                params: &job.params,
                overlap: true,
                max_resident: 8,
            })
            .collect();
        match (self.run.program, self.run.other) {
            (Some(program), _) => program.run(&self.arena, &launches, &self.run.schedule),
            (None, Some(run)) => run(&self.arena, &launches),
            (None, None) => spec_emu::run(&launches, &self.run.schedule),
        }
    }

    fn read<T: Pod + Default>(&self, address: u64, num: usize) -> Vec<T> {
        let mut values = vec![T::default(); num];
        self.arena.read(address, bytes_of_mut(&mut values));
        values
    }

    fn tables(&self, pass: u32) -> Tables {
        let num_masks = self.num_masks();
        let (per_sequence, heads_each) = match pass {
            0 => (self.world.most_fed() + num_masks, num_masks + 1),
            VERIFY => (self.world.max_drafts + 1, self.world.max_drafts + 1),
            _ => (1, 1),
        };
        let num_tiles = per_sequence.div_ceil(TILE_ROWS);
        Tables {
            pass,
            per_sequence,
            heads_each,
            rows: self.arena.alloc(self.places * per_sequence * size_of::<Row>()),
            tiles: self.arena.alloc(self.places * num_tiles * size_of::<Tile>()),
            head_rows: self.arena.alloc(4 * self.places * heads_each),
        }
    }

    fn rows(&self, tables: &Tables) -> Job {
        let vocab = match tables.pass {
            VERIFY => self.world.target_vocab,
            _ => self.world.shared_vocab(),
        };
        let params = RowsParams {
            sequences: self.sequences,
            last_tokens: self.last_tokens,
            drafting: self.drafting,
            drafts: self.drafts,
            rows: tables.rows,
            tiles: tables.tiles,
            head_rows: tables.head_rows,
            pass: tables.pass,
            num_sequences: self.places as u32,
            max_drafts: self.world.max_drafts as u32,
            vocab: vocab as u32,
            tile_rows: TILE_ROWS as u32,
            window: window(tables.pass),
            last_len: last_len(self.world) as u32,
            most_fed: self.world.most_fed() as u32,
            num_masks: self.num_masks() as u32,
            mask_token: self.world.mask.unwrap_or(0),
        };
        job("rows", 2, ROWS_THREADS, params)
    }

    /// Feeds the rows of a table to a model; what it says after each row that gets logits, nothing where that
    /// is inactive. The error names what cannot be.
    fn forward(
        &self,
        model: &Model,
        fed: &mut [Vec<u32>],
        tables: &Tables,
    ) -> Result<Vec<Option<Vec<f32>>>, String> {
        let rows: Vec<Row> = self.read(tables.rows, self.places * tables.per_sequence);
        let num_tiles = self.places * tables.per_sequence.div_ceil(TILE_ROWS);
        check_tiles(&rows, tables.per_sequence, &self.read(tables.tiles, num_tiles))?;
        let mut answers = Vec::new();
        for row in &rows {
            let Some(fed) = fed.get_mut(row.sequence as usize) else {
                ensure(row.sequence == NO_SEQUENCE, || format!("whose row is {row:?}"))?;
                answers.push(None);
                continue;
            };
            let (slot, length) = (row.slot as usize, fed.len());
            ensure(slot <= length, || format!("{length} tokens in the cache of {row:?}"))?;
            let expected = Row {
                token: row.token,
                position: row.slot,
                slot: row.slot,
                base: row.slot + 1,
                ancestors: 0,
                sequence: row.sequence,
                first: first_seen(tables.pass, row.slot),
            };
            ensure(*row == expected, || format!("{row:?}, not {expected:?}"))?;
            fed.truncate(slot);
            fed.push(row.token);
            answers.push(Some(model(row.sequence as usize, fed)));
        }
        let heads: Vec<u32> = self.read(tables.head_rows, self.places * tables.heads_each);
        let answer = |&row: &u32| answers.get(row as usize).cloned();
        heads.iter().map(|row| answer(row).ok_or_else(|| format!("logits of row {row}"))).collect()
    }

    /// `sample` on the logits of a pass, once a draft; rows without any hold garbage.
    fn sample(&self, pass: u32, logits: &[Option<Vec<f32>>]) -> Vec<Job> {
        let (stride, vocab) = match pass {
            VERIFY => (self.world.target_vocab, self.world.target_vocab),
            _ => (self.world.drafter_vocab, self.world.shared_vocab()),
        };
        let garbage = vec![7e8; stride];
        let rows: Vec<&[f32]> =
            logits.iter().map(|row| row.as_deref().unwrap_or(&garbage)).collect();
        let tiles = rows.iter().flat_map(|row| row.chunks(BEST_TILE).zip(0..));
        let best: Vec<Best> = tiles.map(best).collect();
        let logits = self.arena.put(bytes_of(&rows.concat()));
        let best = self.arena.put(bytes_of(&best));
        let num_drafts = if pass == 0 { self.num_masks() + 1 } else { 1 };
        let num_rows = rows.len() / num_drafts;
        let params = |draft: usize| SampleParams {
            sequences: self.sequences,
            words: self.words,
            logits: logits + (draft * stride * size_of::<f32>()) as u64,
            best: best + (draft * stride.div_ceil(BEST_TILE) * size_of::<Best>()) as u64,
            scores: self.arena.alloc(4 * num_rows * scores_len(vocab)),
            draft_weights: self.draft_weights,
            draft_distributions: self.draft_distributions,
            target_weights: self.arena.alloc(4 * num_rows * weights_len(vocab)),
            drafting: self.drafting,
            drafts: self.drafts,
            choices: self.choices,
            parts: self.parts,
            pass: pass.wrapping_add(draft as u32),
            max_drafts: self.world.max_drafts as u32,
            vocab: vocab as u32,
            draft_vocab: self.world.shared_vocab() as u32,
            logits_stride: stride as u32,
            row_step: num_drafts as u32,
        };
        let (variant, threads, slices) = self.run.sample;
        let sample = |draft| job(variant, num_rows as u32 * slices, threads, params(draft));
        (0..num_drafts).map(sample).collect()
    }

    /// Rows of masks in the drafter's first pass.
    fn num_masks(&self) -> usize {
        self.world.mask.map_or(0, |_| self.world.max_drafts.saturating_sub(1))
    }

    fn accept(&self) -> Job {
        let params = AcceptParams {
            sequences: self.sequences,
            last_tokens: self.last_tokens,
            drafting: self.drafting,
            drafts: self.drafts,
            choices: self.choices,
            step: self.arena.put(bytes_of(&[STEP])),
            answers: self.answers,
            answer_bytes: self.answer.bytes as u32,
            tokens_offset: self.answer.tokens as u32,
            done_offset: self.answer.done as u32,
            num_sequences: self.places as u32,
            max_drafts: self.world.max_drafts as u32,
            last_len: last_len(self.world) as u32,
            most_fed: self.world.most_fed() as u32,
            draft_cache: match (self.world.on_targets_cache, self.world.mask) {
                (true, _) => CACHE_OF_TARGET,
                (false, Some(_)) => CACHE_OF_KNOWN,
                (false, None) => CACHE_OF_DRAFTS,
            },
        };
        job("accept", 1, ROWS_THREADS, params)
    }

    /// All kernels of a step, in order.
    fn step(&self, sequences: &[Sequence]) -> Result<Vec<Outcome>, String> {
        let (mut fed_target, mut fed_drafter) = fed(self.world, sequences);
        let passes = self.passes();
        let mut tables = self.tables(passes[0]);
        self.launch(&[self.rows(&tables)])?;
        for (&pass, &next) in passes.iter().zip(&passes[1..]) {
            let logits = self.forward(&self.world.drafter, &mut fed_drafter, &tables)?;
            tables = self.tables(next);
            let mut jobs = self.sample(pass, &logits);
            jobs.push(self.rows(&tables));
            self.launch(&jobs)?;
        }
        let mut logits = self.forward(&self.world.target, &mut fed_target, &tables)?;
        for (place, sequence) in sequences.iter().enumerate().filter(|(_, s)| s.has_run) {
            let found = &mut logits[place * tables.per_sequence..][..tables.per_sequence];
            let has_rows = found.iter().any(Option::is_some);
            ensure(!has_rows, || format!("rows of place {place}, whose last one has run"))?;
            found[0] = Some((self.world.target)(place, &sequence.tokens));
        }
        let mut jobs = self.sample(VERIFY, &logits);
        jobs.push(self.accept());
        self.launch(&jobs)?;
        self.outcomes()
    }

    /// The same if no pass has to wait for what the models say of the tokens.
    fn step_at_once(&self, sequences: &[Sequence]) -> Result<Vec<Outcome>, String> {
        let mut jobs = Vec::new();
        for pass in self.passes() {
            let (model, rows) = match pass {
                VERIFY => (&self.world.target, self.world.max_drafts + 1),
                0 => (&self.world.drafter, self.num_masks() + 1),
                _ => (&self.world.drafter, 1),
            };
            let first = if pass == VERIFY { 0 } else { pass as usize };
            let places = (0..self.places).flat_map(|place| (0..rows).map(move |row| (place, row)));
            let logits: Vec<_> = places
                .map(|(place, row)| {
                    let sequence = sequences.get(place)?;
                    Some(model(place, &vec![0; sequence.tokens.len() + first + row]))
                })
                .collect();
            jobs.push(self.rows(&self.tables(pass)));
            jobs.extend(self.sample(pass, &logits));
        }
        jobs.push(self.accept());
        self.launch(&jobs)?;
        self.outcomes()
    }

    fn passes(&self) -> Vec<u32> {
        let passes = match (self.world.drafting, self.world.mask) {
            (false, _) => 0,
            (true, None) => self.world.max_drafts as u32,
            (true, Some(_)) => 1,
        };
        (0..passes).chain([VERIFY]).collect()
    }

    fn outcomes(&self) -> Result<Vec<Outcome>, String> {
        let answer = self.answers + (STEP as usize % ANSWERS * self.answer.bytes) as u64;
        let done = self.read::<u32>(answer + self.answer.done as u64, 1)[0];
        ensure(done == STEP, || format!("step {done} is done, not {STEP}"))?;
        let stride = self.world.max_drafts + 1;
        let results: Vec<StepResult> = self.read(answer, self.places);
        let tokens = answer + self.answer.tokens as u64;
        let tokens: Vec<u32> = self.read(tokens, self.places * stride);
        let outcomes = results.iter().zip(tokens.chunks(stride)).map(|(result, tokens)| {
            let tokens = tokens.get(..result.num_tokens as usize);
            Ok(Outcome {
                tokens: tokens.ok_or_else(|| format!("{result:?}"))?.to_vec(),
                drafted: result.drafted as usize,
                accepted: result.accepted as usize,
                draft_computed: result.draft_computed as usize,
            })
        });
        outcomes.collect()
    }
}

fn job(variant: &'static str, grid: u32, block: u32, params: impl Pod) -> Job {
    Job { variant, grid, block, params: bytes_of(&[params]).to_vec() }
}

/// What the head says of a tile of logits.
fn best((logits, tile): (&[f32], u32)) -> Best {
    let first = tile * BEST_TILE as u32;
    let mut best = Best { value: f32::NEG_INFINITY, index: first };
    for (index, &value) in (first..).zip(logits) {
        if value > best.value {
            best = Best { value, index };
        }
    }
    best
}

/// Known tokens of a sequence that the device has: more than are ever fed.
fn last_len(world: &World) -> usize {
    world.max_drafts + 3
}

/// One step of all sequences. The error says what is wrong with the kernels.
pub(crate) fn step(
    world: &World,
    sequences: &[Sequence],
    run: Run<'_>,
) -> Result<Vec<Outcome>, String> {
    let mut input = StepInput::new(last_len(world));
    for (idx, sequence) in sequences.iter().enumerate() {
        let entry = sequence.entry(idx);
        let unseen = entry.tokens.len() - entry.draft_computed;
        let num_fed = if entry.speculates { unseen } else { 0 };
        let planned = Planned {
            num_fed,
            draft_computed: entry.draft_computed,
            draft_len: entry.draft_lens.model,
            num_given: entry.given.len(),
            branch: sequence.branch,
            has_run: sequence.has_run,
        };
        input.push(&entry, planned);
    }
    input.pad(sequences.len() + run.unused);
    let given = Given::new(world, sequences, input.sequences.len());
    let device = Device::new(world, run, &input, &given);
    let step = if world.blind { Device::step_at_once } else { Device::step };
    let mut outcomes = step(&device, sequences)?;
    let after = device.read::<StepSequence>(device.sequences, input.sequences.len());
    let last_tokens = device.read::<u32>(device.last_tokens, input.last_tokens.len());
    let after = after.iter().zip(last_tokens.chunks(last_len(world)));
    for ((idx, sequence), after) in sequences.iter().enumerate().zip(after) {
        let (entry, before) = (sequence.entry(idx), &input.sequences[idx]);
        check_next(world, &entry, &outcomes[idx], before, after)?;
    }
    let unused = outcomes.split_off(sequences.len());
    ensure(unused.iter().all(|place| *place == Outcome::default()), || format!("{unused:?}"))?;
    Ok(outcomes)
}
