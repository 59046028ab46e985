//! The kernels of a step on the emulator. The models stand in for the layers: they are fed what the tables of
//! rows say, and what they answer stands where the head would have written it.

use crate::host::fed;
use crate::world::{Model, Sequence, World};
use spec_core::exec::cuda::plain::{Plain, bytes, bytes_mut};
use spec_core::exec::cuda::step_input::StepInput;
use spec_core::exec::cuda::step_params::*;
use spec_emu::{Arena, Launch, Schedule, launch};

/// Rows of a tile: not a divisor of what a sequence has, as a rule.
const TILE_ROWS: usize = 3;

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

/// How the kernels are run.
#[derive(Clone, Copy)]
pub(crate) struct Run {
    /// Variant of the sampling kernel, and its threads.
    pub(crate) sample: (&'static str, u32),
    pub(crate) schedule: Schedule,
    /// Places of the batch beyond the sequences.
    pub(crate) unused: usize,
}

impl Run {
    /// As it is shipped.
    pub(crate) const WHOLE: Self =
        Self { sample: ("sample", SAMPLE_THREADS), schedule: Schedule::PLAIN, unused: 1 };

    /// In blocks that take the emulator less time.
    pub(crate) const SMALL: Self = Self { sample: ("sample_small", 64), ..Self::WHOLE };

    /// In the smallest blocks.
    pub(crate) const WARP: Self = Self { sample: ("sample_warp", 32), ..Self::WHOLE };
}

struct Device<'a> {
    world: &'a World,
    run: Run,
    arena: Arena,
    places: usize,
    sequences: u64,
    words: u64,
    drafting: u64,
    drafts: u64,
    draft_weights: u64,
    draft_distributions: u64,
    choices: u64,
}

impl<'a> Device<'a> {
    fn new(world: &'a World, run: Run, input: &StepInput) -> Self {
        let arena = Arena::new(1 << 30);
        let places = input.sequences.len();
        let num_drafts = places * world.max_drafts;
        Self {
            world,
            run,
            places,
            sequences: arena.put(bytes(&input.sequences)),
            words: arena.put(bytes(&input.words)),
            drafting: arena.alloc(places * size_of::<Drafting>()),
            drafts: arena.alloc(4 * num_drafts),
            draft_weights: arena.alloc(4 * num_drafts * world.shared_vocab()),
            draft_distributions: arena.alloc(num_drafts * size_of::<Distribution>()),
            choices: arena.alloc((places + num_drafts) * size_of::<Choice>()),
            arena,
        }
    }

    fn launch<P: Plain>(&self, variant: &str, (grid, block): (u32, u32), params: P) {
        let params = [params];
        let launched = Launch {
            variant,
            grid,
            block,
            shared_bytes: if variant.starts_with("sample") { SAMPLE_SHARED_BYTES } else { 0 },
            params: bytes(&params),
            max_resident: 8,
            ..Launch::default()
        };
        launch(&launched, &self.run.schedule).unwrap();
    }

    fn read<T: Plain + Default>(&self, address: u64, num: usize) -> Vec<T> {
        let mut values = vec![T::default(); num];
        self.arena.read(address, bytes_mut(&mut values));
        values
    }

    /// The rows of a pass, and those of them that get logits.
    fn rows(&self, pass: u32) -> (Vec<Row>, Vec<u32>) {
        let (per_sequence, heads) = match pass {
            0 => (MAX_FED, 1),
            VERIFY => (self.world.max_drafts + 1, self.world.max_drafts + 1),
            _ => (1, 1),
        };
        let num_tiles = per_sequence.div_ceil(TILE_ROWS);
        let rows = self.arena.alloc(self.places * per_sequence * size_of::<Row>());
        let tiles = self.arena.alloc(self.places * num_tiles * size_of::<Tile>());
        let head_rows = self.arena.alloc(4 * self.places * heads);
        let vocab = match pass {
            VERIFY => self.world.target_vocab,
            _ => self.world.shared_vocab(),
        };
        let params = RowsParams {
            sequences: self.sequences,
            drafting: self.drafting,
            drafts: self.drafts,
            rows,
            tiles,
            head_rows,
            pass,
            num_sequences: self.places as u32,
            max_drafts: self.world.max_drafts as u32,
            vocab: vocab as u32,
            tile_rows: TILE_ROWS as u32,
            unused: 0,
        };
        self.launch("rows", (2, ROWS_THREADS), params);
        let rows: Vec<Row> = self.read(rows, self.places * per_sequence);
        check_tiles(&rows, per_sequence, &self.read(tiles, self.places * num_tiles));
        (rows, self.read(head_rows, self.places * heads))
    }

    /// Feeds the rows to a model; what it would say after each row that gets logits, nothing where the row is
    /// inactive.
    fn forward(&self, model: &Model, fed: &mut [Vec<u32>], pass: u32) -> Vec<Option<Vec<f32>>> {
        let (rows, head_rows) = self.rows(pass);
        let answers = rows.iter().map(|row| {
            (row.sequence != NO_SEQUENCE).then(|| {
                let fed = &mut fed[row.sequence as usize];
                assert!(fed.len() >= row.slot as usize, "a gap in the cache: {row:?}");
                assert_eq!((row.position, row.base), (row.slot, row.slot + 1), "{row:?}");
                assert_eq!((row.ancestors, row.unused), (0, 0), "{row:?}");
                fed.truncate(row.slot as usize);
                fed.push(row.token);
                model(row.sequence as usize, fed)
            })
        });
        let answers: Vec<_> = answers.collect();
        head_rows.iter().map(|&row| answers[row as usize].clone()).collect()
    }

    /// Runs `sample` on logits; rows without any hold garbage.
    fn sample(&self, pass: u32, logits: &[Option<Vec<f32>>]) {
        let (stride, vocab) = match pass {
            VERIFY => (self.world.target_vocab, self.world.target_vocab),
            _ => (self.world.drafter_vocab, self.world.shared_vocab()),
        };
        let garbage = vec![7e8; stride];
        let rows: Vec<&[f32]> =
            logits.iter().map(|row| row.as_deref().unwrap_or(&garbage)).collect();
        let best: Vec<Best> = rows
            .iter()
            .flat_map(|row| row.chunks(BEST_TILE).zip((0u32..).step_by(BEST_TILE)))
            .map(best)
            .collect();
        let scratch = 4 * rows.len() * vocab;
        let params = SampleParams {
            sequences: self.sequences,
            words: self.words,
            logits: self.arena.put(bytes(&rows.concat())),
            best: self.arena.put(bytes(&best)),
            scores: self.arena.alloc(scratch),
            draft_weights: self.draft_weights,
            draft_distributions: self.draft_distributions,
            target_weights: self.arena.alloc(scratch),
            drafting: self.drafting,
            drafts: self.drafts,
            choices: self.choices,
            pass,
            max_drafts: self.world.max_drafts as u32,
            vocab: vocab as u32,
            draft_vocab: self.world.shared_vocab() as u32,
            logits_stride: stride as u32,
            unused: 0,
        };
        let (variant, threads) = self.run.sample;
        self.launch(variant, (rows.len() as u32, threads), params);
    }

    fn accept(&self) -> Vec<Outcome> {
        let stride = self.world.max_drafts + 1;
        let results = self.arena.alloc(self.places * size_of::<StepResult>());
        let tokens = self.arena.alloc(4 * self.places * stride);
        let done = self.arena.put(bytes(&[0u32]));
        let params = AcceptParams {
            sequences: self.sequences,
            drafting: self.drafting,
            drafts: self.drafts,
            choices: self.choices,
            step: self.arena.put(bytes(&[STEP])),
            results,
            tokens,
            done,
            num_sequences: self.places as u32,
            max_drafts: self.world.max_drafts as u32,
        };
        self.launch("accept", (1, ROWS_THREADS), params);
        assert_eq!(self.read::<u32>(done, 1), [STEP]);
        let results: Vec<StepResult> = self.read(results, self.places);
        let tokens: Vec<u32> = self.read(tokens, self.places * stride);
        results
            .iter()
            .zip(tokens.chunks(stride))
            .map(|(result, tokens)| Outcome {
                tokens: tokens[..result.num_tokens as usize].to_vec(),
                drafted: result.drafted as usize,
                accepted: result.accepted as usize,
                draft_computed: result.draft_computed as usize,
            })
            .collect()
    }
}

/// What the head says of a tile of logits.
fn best((logits, first): (&[f32], u32)) -> Best {
    let mut best = Best { value: f32::NEG_INFINITY, index: first };
    for (index, &value) in (first..).zip(logits) {
        if value > best.value {
            best = Best { value, index };
        }
    }
    best
}

/// Tiles hold each active row of a sequence once, and no other.
fn check_tiles(rows: &[Row], per_sequence: usize, tiles: &[Tile]) {
    let num_tiles = per_sequence.div_ceil(TILE_ROWS);
    for (sequence, tiles) in tiles.chunks(num_tiles).enumerate() {
        let held: Vec<usize> = tiles
            .iter()
            .flat_map(|tile| {
                assert!(tile.num_rows as usize <= TILE_ROWS);
                let first = tile.first_row as usize;
                first..first + tile.num_rows as usize
            })
            .collect();
        let own = sequence * per_sequence..(sequence + 1) * per_sequence;
        let active: Vec<usize> = own.filter(|&row| rows[row].sequence != NO_SEQUENCE).collect();
        assert_eq!(held, active);
        assert!(active.iter().all(|&row| rows[row].sequence as usize == sequence));
    }
}

/// One step of all sequences.
pub(crate) fn step(world: &World, sequences: &[Sequence], run: Run) -> Vec<Outcome> {
    let mut input = StepInput::default();
    for (idx, sequence) in sequences.iter().enumerate() {
        input.push(&sequence.entry(idx));
    }
    input.pad(sequences.len() + run.unused);
    let device = Device::new(world, run, &input);
    let (mut fed_target, mut fed_drafter) = fed(world, sequences);
    for pass in 0..world.max_drafts as u32 {
        let logits = device.forward(&world.drafter, &mut fed_drafter, pass);
        device.sample(pass, &logits);
    }
    let logits = device.forward(&world.target, &mut fed_target, VERIFY);
    device.sample(VERIFY, &logits);
    let mut outcomes = device.accept();
    assert!(outcomes.split_off(sequences.len()).iter().all(|unused| *unused == Outcome::default()));
    outcomes
}
