//! Launches of the product in the emulator: memory laid out, what must not change watched, results taken.

use crate::image::reorder;
use crate::problem::{Plan, Problem};
use crate::twin;
use half::f16;
use spec_emu::{Arena, Launch, Schedule};
use spec_kernels::{Epilogue, Format, Variant};

pub(crate) const THREADS: u32 = 288;
/// What memory holds that the kernel must not touch.
const UNTOUCHED: u8 = 0xa5;
const STAGES: usize = 6;

/// How a problem is run.
#[derive(Clone, Debug)]
pub(crate) struct Run {
    /// Rows that the kernel is compiled for.
    pub(crate) capacity: usize,
    /// Rows of the problem that take part.
    pub(crate) picks: Vec<usize>,
    /// Whether the kernel finds them through `row_index`, or side by side.
    pub(crate) is_indexed: bool,
    pub(crate) grid: u32,
    /// Without bulk copies, as on sm_80.
    pub(crate) is_old: bool,
    pub(crate) schedule: Schedule,
}

impl Run {
    pub(crate) fn new(capacity: usize, picks: Vec<usize>, grid: u32) -> Self {
        let schedule = Schedule::PLAIN;
        Self { capacity, picks, is_indexed: false, grid, is_old: false, schedule }
    }

    pub(crate) fn variant(&self, plan: &Plan) -> String {
        let name = Variant::gemm(plan.weight, self.capacity, plan.epilogue).to_string();
        if self.is_old { name + "@sm_80" } else { name }
    }
}

/// What a run leaves behind.
pub(crate) struct Outcome {
    /// The output's rows, in the order of the picks.
    pub(crate) output: Vec<Vec<u8>>,
    /// HEAD: of each row and tile.
    pub(crate) best: Vec<Vec<(f32, u32)>>,
    pub(crate) cache: Vec<u8>,
}

/// Dynamic shared memory that the kernel needs.
pub(crate) fn shared_bytes(capacity: usize) -> u32 {
    let chunk = match capacity {
        8 => 2048,
        16 => 1024,
        _ => 512,
    };
    let (ring, x) = (STAGES * 8192, capacity * (chunk + 16) * 2);
    let (sums, factors) = (2 * capacity * (64 + 4) * 4, capacity * 4);
    (ring + x + sums + factors + 2 * STAGES * 8 + 16) as u32
}

/// Floats of the workspace for parts of tiles.
pub(crate) fn partials_len(grid: u32, capacity: usize) -> usize {
    grid as usize * 2 * capacity * 64
}

/// A problem in device memory.
pub(crate) struct Loaded {
    pub(crate) arena: Arena,
    pub(crate) params: Vec<u8>,
    pub(crate) input: u64,
    output: u64,
    output_bytes: usize,
    best: u64,
    cache: u64,
    arrivals: u64,
}

/// Appends fields as the C++ struct has them.
#[derive(Default)]
pub(crate) struct Fields(pub Vec<u8>);

impl Fields {
    pub(crate) fn pointers(mut self, pointers: &[u64]) -> Self {
        self.0.extend(pointers.iter().flat_map(|x| x.to_le_bytes()));
        self
    }

    pub(crate) fn floats(mut self, floats: &[f32]) -> Self {
        self.0.extend(floats.iter().flat_map(|x| x.to_le_bytes()));
        self
    }

    pub(crate) fn words(mut self, words: &[usize]) -> Self {
        self.0.extend(words.iter().flat_map(|&x| (x as u32).to_le_bytes()));
        self
    }
}

pub(crate) fn float_bytes(floats: &[f32]) -> Vec<u8> {
    floats.iter().flat_map(|x| x.to_le_bytes()).collect()
}

pub(crate) fn word_bytes(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|x| x.to_le_bytes()).collect()
}

pub(crate) fn format_code(format: Format) -> usize {
    match format {
        Format::Fp8 => 1,
        Format::Fp16 => 2,
    }
}

impl Loaded {
    pub(crate) fn new(problem: &Problem, run: &Run) -> Self {
        let plan = problem.plan;
        let arena = Arena::new(1 << 30);
        let tiles = plan.n.div_ceil(64);
        let input = arena.put(&input_bytes(problem, run));
        let output = arena.put(&output_bytes(problem, run));
        let best = arena.put(&vec![UNTOUCHED; (run.picks.len() + 1) * tiles * 8]);
        let cache = arena.put(&vec![UNTOUCHED; problem.cache_bytes()]);
        let arrivals = arena.put(&vec![0; tiles * 4]);
        let picks: Vec<u32> = run.picks.iter().map(|&row| row as u32).collect();
        let rows: Vec<u8> = run.picks.iter().flat_map(|&row| problem.rows[row].bytes()).collect();
        let image = |values: &[f32]| arena.put(&float_bytes(&reorder(values, &problem.order)));
        let is_fp8 = plan.weight == Format::Fp8;
        let params = Fields::default()
            .pointers(&[
                arena.put(&problem.matrix.pack(&problem.order)),
                if is_fp8 { image(&problem.scales) } else { 0 },
                if plan.has_bias { image(&problem.bias) } else { 0 },
                input,
                arena.put(&float_bytes(&problem.norm)),
                arena.put(&rows),
                if run.is_indexed { arena.put(&word_bytes(&picks)) } else { 0 },
                arena.alloc(partials_len(run.grid, run.capacity) * 4),
                arrivals,
                output,
                cache,
                arena.put(&float_bytes(&problem.rope)),
                arena.put(&word_bytes(&problem.pages)),
                best,
            ])
            .floats(&[problem.eps, problem.k_scale, problem.v_scale])
            .words(&[run.picks.len(), plan.n, plan.k, plan.num_heads, plan.num_kv_heads()])
            .words(&[problem.max_pages(), format_code(plan.kv)])
            .0;
        let output_bytes = output_bytes(problem, run).len();
        Self { arena, params, input, output, output_bytes, best, cache, arrivals }
    }

    pub(crate) fn read(&self, address: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.arena.read(address, &mut bytes);
        bytes
    }

    /// Takes the results, after looking at what must be as before.
    pub(crate) fn outcome(&self, problem: &Problem, run: &Run) -> Outcome {
        let (count, tiles) = (run.picks.len(), problem.plan.n.div_ceil(64));
        let arrivals = self.read(self.arrivals, tiles * 4);
        assert!(arrivals.iter().all(|&byte| byte == 0), "arrivals do not return to zero");
        let output = self.read(self.output, self.output_bytes);
        let best = self.read(self.best, (count + 1) * tiles * 8);
        let is_head = problem.plan.epilogue == Epilogue::Head;
        let best_end = if is_head { count * tiles * 8 } else { 0 };
        let row_bytes = self.output_bytes / (count + 1);
        for (bytes, end) in [(&output, count * row_bytes), (&best, best_end)] {
            let untouched = bytes[end..].iter().all(|&byte| byte == UNTOUCHED);
            assert!(untouched, "writes beyond the last row");
        }
        let entry = |bytes: &[u8]| {
            let word = |i: usize| u32::from_le_bytes(bytes[i..i + 4].try_into().unwrap());
            (f32::from_bits(word(0)), word(4))
        };
        let best = best[..best_end].chunks(tiles * 8);
        Outcome {
            output: output.chunks(row_bytes).take(count).map(<[u8]>::to_vec).collect(),
            best: best.map(|row| row.chunks(8).map(entry).collect()).collect(),
            cache: self.read(self.cache, problem.cache_bytes()),
        }
    }
}

/// The input's rows: all of them where the kernel looks them up, or those that take part.
fn input_bytes(problem: &Problem, run: &Run) -> Vec<u8> {
    let k = problem.plan.k;
    let picked = run.picks.iter().flat_map(|&row| &problem.input[row * k..][..k]);
    let input: Vec<f32> =
        if run.is_indexed { problem.input.clone() } else { picked.copied().collect() };
    if problem.plan.epilogue == Epilogue::Residual {
        return input.iter().flat_map(|&x| f16::from_f32(x).to_le_bytes()).collect();
    }
    float_bytes(&input)
}

/// What stands in the output before, and a row more that nobody may touch.
fn output_bytes(problem: &Problem, run: &Run) -> Vec<u8> {
    let n = problem.plan.n;
    let (width, bytes) = problem.plan.output_row();
    let mut output = vec![UNTOUCHED; (run.picks.len() + 1) * width * bytes];
    if problem.plan.epilogue == Epilogue::Residual {
        for (to, &row) in output.chunks_mut(n * 4).zip(&run.picks) {
            to.copy_from_slice(&float_bytes(&problem.residual[row * n..][..n]));
        }
    }
    output
}

/// Runs the product alone.
pub(crate) fn run(problem: &Problem, run: &Run) -> Outcome {
    let loaded = Loaded::new(problem, run);
    let launch = Launch {
        variant: &run.variant(&problem.plan),
        grid: run.grid,
        block: THREADS,
        shared_bytes: shared_bytes(run.capacity),
        params: &loaded.params,
        ..Launch::default()
    };
    spec_emu::launch(&launch, &run.schedule).unwrap_or_else(|error| panic!("{run:?}: {error}"));
    loaded.outcome(problem, run)
}

/// Compares every row of a run with the twin.
pub(crate) fn check(problem: &Problem, run: &Run, outcome: &Outcome) {
    let plan = &problem.plan;
    let mut cache = vec![false; problem.cache_bytes()];
    for (i, &row_idx) in run.picks.iter().enumerate() {
        let row = &problem.rows[row_idx];
        let expected = twin::expect(problem, row_idx);
        let found = values(&outcome.output[i], plan.output_row().1);
        for (n, (near, &found)) in expected.output.iter().zip(&found).enumerate() {
            assert!(near.has(found), "{plan:?} {run:?}: row {i} output {n}: {found} for {near:?}");
        }
        if plan.epilogue == Epilogue::Head {
            let logits: Vec<f32> = found.iter().map(|&x| x as f32).collect();
            assert_eq!(outcome.best[i], twin::best_of_tiles(&logits), "{plan:?} {run:?}: row {i}");
        }
        if matches!(plan.epilogue, Epilogue::Qkv { .. }) && row.is_active() {
            for (stored, places) in expected.stored.iter().zip(problem.cache_places(row)) {
                check_stored(plan, stored, &places, &outcome.cache, &mut cache);
            }
        }
    }
    let stray = outcome.cache.iter().zip(&cache).position(|(&x, seen)| !seen && x != UNTOUCHED);
    assert_eq!(stray, None, "{plan:?} {run:?}: the cache is written where no row is");
}

/// Keys or values of a row; marks their bytes in `seen`.
pub(crate) fn check_stored(
    plan: &Plan,
    stored: &[twin::Near],
    places: &[usize],
    cache: &[u8],
    seen: &mut [bool],
) {
    let bytes = crate::image::bytes_of(plan.kv);
    for (near, &place) in stored.iter().zip(places) {
        let found = twin::load(cache, plan.kv, place);
        assert!(near.has(found), "{plan:?}: element {place} of the cache: {found} for {near:?}");
        seen[place * bytes..][..bytes].fill(true);
    }
}

/// A row of the output as numbers.
pub(crate) fn values(bytes: &[u8], size: usize) -> Vec<f64> {
    let value = |x: &[u8]| match size {
        2 => f16::from_le_bytes(x.try_into().unwrap()).to_f64(),
        _ => f32::from_le_bytes(x.try_into().unwrap()).into(),
    };
    bytes.chunks(size).map(value).collect()
}
