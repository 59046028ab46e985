//! Launches of the product in the emulator: memory laid out, what must not change watched, results taken.

use crate::image::{HalfUnits, bytes_of, reorder};
use crate::params::{
    GemmParams, NormaliseParams, ROW_THREADS, float_bytes, format_code, word_bytes,
};
use crate::problem::{Plan, Problem};
use crate::twin::{self, Near};
use half::f16;
use spec_core::model::Dtype;
use spec_core::testing::cuda::model::{
    OPERAND_SHARED_BYTES, gemm_launch_bytes, gemm_partials, gemm_rows, gemm_shared_bytes,
    gemm_sharing_distance, gemm_threads,
};
use spec_emu::{Arena, Launch, Schedule};
use spec_kernels::{Epilogue, Format, Variant};

/// What memory holds that the kernel must not touch.
pub(crate) const UNTOUCHED: u8 = 0xa5;

/// What a sum of 64 squares may lose in f32, of its value.
pub(crate) const SQUARES_ERROR: f64 = 1e-6;

/// Whose code runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Arch {
    /// Without bulk copies.
    Ampere,
    /// With warpgroups.
    Hopper,
    /// With bulk copies and large multiprocessors.
    Blackwell,
}

impl Arch {
    pub(crate) const ALL: [Self; 3] = [Self::Ampere, Self::Hopper, Self::Blackwell];

    fn capability(self) -> (u32, u32) {
        match self {
            Self::Ampere => (8, 0),
            Self::Hopper => (9, 0),
            Self::Blackwell => (10, 0),
        }
    }

    fn suffix(self) -> &'static str {
        match self {
            Self::Ampere => "@sm_80",
            Self::Hopper => "",
            Self::Blackwell => "@sm_100",
        }
    }

    /// Rows that products are compiled for.
    pub(crate) fn capacities(self) -> &'static [usize] {
        gemm_rows(self.capability())
    }
}

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
    pub(crate) arch: Arch,
    pub(crate) schedule: Schedule,
}

impl Run {
    /// With at least so many blocks: with many rows two are a cluster.
    pub(crate) fn new(capacity: usize, picks: Vec<usize>, grid: u32) -> Self {
        let schedule = Schedule::PLAIN;
        let grid = if capacity > 64 { grid.next_multiple_of(2) } else { grid };
        Self { capacity, picks, is_indexed: false, grid, arch: Arch::Hopper, schedule }
    }

    pub(crate) fn variant(&self, plan: &Plan) -> String {
        let name = Variant::gemm(plan.weight, self.capacity, plan.epilogue).to_string();
        name + self.arch.suffix()
    }

    /// Of its launch.
    pub(crate) fn shared_bytes(&self, plan: &Plan) -> u32 {
        let (rows, capability) = (self.capacity, self.arch.capability());
        if plan.epilogue == Epilogue::Head {
            return gemm_shared_bytes(rows, capability);
        }
        let format = dtype(plan.weight);
        gemm_launch_bytes([plan.n, plan.k], format, rows, self.grid as usize, capability)
    }

    /// Which of its blocks share rows.
    pub(crate) fn sharing_distance(&self, plan: &Plan) -> usize {
        let (rows, capability) = (self.capacity, self.arch.capability());
        if plan.epilogue == Epilogue::Head {
            return (rows > 64).into();
        }
        let format = dtype(plan.weight);
        gemm_sharing_distance([plan.n, plan.k], format, rows, self.grid as usize, capability)
    }

    pub(crate) fn threads(&self) -> u32 {
        gemm_threads(self.capacity, self.arch.capability())
    }

    /// Whether the rows are normed before.
    pub(crate) fn takes_halves(&self, epilogue: Epilogue) -> bool {
        self.arch == Arch::Hopper && epilogue != Epilogue::Residual
    }

    /// How halves are written for the next product, if not row after row.
    pub(crate) fn output_units(&self, plan: &Plan) -> Option<HalfUnits> {
        let is_units = self.arch == Arch::Hopper && plan.epilogue == Epilogue::SwiGlu;
        is_units.then_some(HalfUnits { len: plan.n / 2 })
    }

    /// Whether rows are looked up: on Hopper not by the product, but by the norm before.
    fn looks_up(&self, epilogue: Epilogue) -> bool {
        self.is_indexed && (self.arch != Arch::Hopper || self.takes_halves(epilogue))
    }

    /// Floats of the workspace for a matrix.
    pub(crate) fn partials(&self, shape: [usize; 2]) -> usize {
        gemm_partials(shape, self.grid as usize, self.capacity, self.arch.capability())
    }
}

fn dtype(weight: Format) -> Dtype {
    match weight {
        Format::Fp8 => Dtype::Fp8,
        Format::Fp16 => Dtype::Fp16,
    }
}

/// What a run leaves behind.
pub(crate) struct Outcome {
    /// The output's rows, in the order of the picks.
    pub(crate) output: Vec<Vec<u8>>,
    /// HEAD: of each row and tile.
    pub(crate) best: Vec<Vec<(f32, u32)>>,
    /// RESIDUAL: of each row and tile.
    pub(crate) squares: Vec<Vec<f32>>,
    pub(crate) cache: Vec<u8>,
}

/// A problem in device memory.
pub(crate) struct Loaded<'a> {
    arena: &'a Arena,
    pub(crate) params: GemmParams,
    /// What norms the rows before, if that is needed.
    pub(crate) normalise: Option<NormaliseParams>,
    output_bytes: usize,
}

/// The launch of what norms rows.
pub(crate) fn normalise(params: &[u8], grid: u32) -> Launch<'_> {
    Launch {
        variant: "normalise",
        grid,
        block: ROW_THREADS,
        shared_bytes: OPERAND_SHARED_BYTES,
        params,
        ..Launch::default()
    }
}

impl<'a> Loaded<'a> {
    pub(crate) fn new(arena: &'a Arena, problem: &Problem, run: &Run) -> Self {
        let plan = problem.plan;
        let tiles = plan.n.div_ceil(64);
        // A block of the head has whole tiles, and nothing to share.
        let has_parts = plan.epilogue != Epilogue::Head;
        let partials = |shape| arena.alloc(run.partials(shape) * 4);
        let output = output_bytes(problem, run);
        let rows: Vec<u8> = run.picks.iter().flat_map(|&row| problem.rows[row].bytes()).collect();
        let picks: Vec<u32> = run.picks.iter().map(|&row| row as u32).collect();
        let in_order = |values: &[f32]| arena.put(&float_bytes(&reorder(values, &problem.order)));
        let mut params = GemmParams {
            weights: arena.put(&problem.matrix.pack(&problem.order)),
            scales: if plan.weight == Format::Fp8 { in_order(&problem.scales) } else { 0 },
            bias: if plan.has_bias { in_order(&problem.bias) } else { 0 },
            input: arena.put(&input_bytes(problem, run)),
            norm: arena.put(&float_bytes(&problem.norm)),
            squares: arena.put(&squares_bytes(problem, run)),
            rows: arena.put(&rows),
            row_index: if run.looks_up(plan.epilogue) { arena.put(&word_bytes(&picks)) } else { 0 },
            partials: if has_parts { partials([plan.n, plan.k]) } else { 0 },
            arrivals: if has_parts { arena.put(&vec![0; tiles * 4]) } else { 0 },
            output: arena.put(&output),
            cache: arena.put(&vec![UNTOUCHED; problem.cache_bytes()]),
            rope: arena.put(&float_bytes(&problem.rope)),
            pages: arena.put(&word_bytes(&problem.pages)),
            kv_scales: arena.put(&float_bytes(&problem.kv_scales())),
            best: arena.put(&vec![UNTOUCHED; (run.picks.len() + 1) * tiles * 8]),
            eps: problem.eps,
            num_rows: run.picks.len(),
            n: plan.n,
            k: plan.k,
            num_heads: plan.num_heads,
            num_kv_heads: plan.num_kv_heads(),
            max_pages: problem.max_pages(),
            kv: format_code(plan.kv),
            sharing_distance: run.sharing_distance(&plan),
        };
        let normalise = run.takes_halves(plan.epilogue).then(|| {
            let values = arena.alloc(HalfUnits { len: plan.k }.bytes(run.picks.len()));
            let before = NormaliseParams::of(&params, values);
            (params.input, params.row_index) = (values, 0);
            before
        });
        Self { arena, params, normalise, output_bytes: output.len() }
    }

    fn read(&self, address: u64, len: usize) -> Vec<u8> {
        read(self.arena, address, len)
    }

    /// Takes the results, after looking at what must be as before.
    pub(crate) fn outcome(&self, problem: &Problem, run: &Run) -> Outcome {
        let (count, tiles) = (run.picks.len(), problem.plan.n.div_ceil(64));
        if self.params.arrivals != 0 {
            let arrivals = self.read(self.params.arrivals, tiles * 4);
            let is_zero = arrivals.iter().all(|&byte| byte == 0);
            assert!(is_zero, "{run:?}: arrivals do not return to zero");
        }
        let mut output = self.read(self.params.output, self.output_bytes);
        if let Some(units) = run.output_units(&problem.plan) {
            output = units.unpack(&output, count, UNTOUCHED);
            output.resize(output.len() / count * (count + 1), UNTOUCHED);
        }
        let best = self.read(self.params.best, (count + 1) * tiles * 8);
        let written = |epilogue, bytes| if problem.plan.epilogue == epilogue { bytes } else { 0 };
        let best_end = written(Epilogue::Head, count * tiles * 8);
        let squares_end = written(Epilogue::Residual, count * tiles * 4);
        let squares = self.read(self.params.squares, squares_end / count * (count + 1));
        let row_bytes = output.len() / (count + 1);
        for (bytes, end) in
            [(&output, count * row_bytes), (&best, best_end), (&squares, squares_end)]
        {
            let is_untouched = bytes[end..].iter().all(|&byte| byte == UNTOUCHED);
            assert!(is_untouched, "{run:?}: writes beyond the last row");
        }
        let best = best[..best_end].chunks(tiles * 8);
        Outcome {
            output: output.chunks(row_bytes).take(count).map(<[u8]>::to_vec).collect(),
            best: best.map(|row| row.chunks(8).map(best_of_bytes).collect()).collect(),
            squares: floats(&squares[..squares_end]).chunks(tiles).map(<[f32]>::to_vec).collect(),
            cache: self.read(self.params.cache, problem.cache_bytes()),
        }
    }
}

pub(crate) fn read(arena: &Arena, address: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    arena.read(address, &mut bytes);
    bytes
}

fn best_of_bytes(bytes: &[u8]) -> (f32, u32) {
    let word = |i: usize| u32::from_le_bytes(bytes[i..i + 4].try_into().unwrap());
    (f32::from_bits(word(0)), word(4))
}

/// The input's rows: all of them where the kernel looks them up, or those that take part.
fn input_bytes(problem: &Problem, run: &Run) -> Vec<u8> {
    let k = problem.plan.k;
    let picked = run.picks.iter().flat_map(|&row| &problem.input[row * k..][..k]);
    let input: Vec<f32> = if run.looks_up(problem.plan.epilogue) {
        problem.input.clone()
    } else {
        picked.copied().collect()
    };
    if problem.plan.epilogue == Epilogue::Residual {
        let halves: Vec<u8> = input.iter().flat_map(|&x| f16::from_f32(x).to_le_bytes()).collect();
        return match run.arch {
            // Beyond a row there are numbers.
            Arch::Hopper => HalfUnits { len: k }.pack(&halves, UNTOUCHED),
            Arch::Ampere | Arch::Blackwell => halves,
        };
    }
    float_bytes(&input)
}

/// Sums of squares of those rows, or room for those of the output and a row more.
fn squares_bytes(problem: &Problem, run: &Run) -> Vec<u8> {
    let Plan { n, k, epilogue, .. } = problem.plan;
    if epilogue == Epilogue::Residual {
        return vec![UNTOUCHED; (run.picks.len() + 1) * n.div_ceil(64) * 4];
    }
    let input = floats(&input_bytes(problem, run));
    let squares = input.chunks(k).flat_map(twin::squares_of_tiles);
    squares.flat_map(|square| (square as f32).to_le_bytes()).collect()
}

/// What stands in the output before, and a row more that nobody may touch.
fn output_bytes(problem: &Problem, run: &Run) -> Vec<u8> {
    if let Some(units) = run.output_units(&problem.plan) {
        return vec![UNTOUCHED; units.bytes(run.picks.len())];
    }
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
    let arena = Arena::new(1 << 30);
    let loaded = Loaded::new(&arena, problem, run);
    let before = loaded.normalise.as_ref().map(NormaliseParams::bytes);
    let before = before.iter().map(|params| normalise(params, run.grid));
    let launch = Launch {
        variant: &run.variant(&problem.plan),
        grid: run.grid,
        block: run.threads(),
        shared_bytes: run.shared_bytes(&problem.plan),
        params: &loaded.params.bytes(),
        ..Launch::default()
    };
    for launch in before.chain([launch]) {
        let ran = spec_emu::launch(&launch, &run.schedule);
        ran.unwrap_or_else(|error| panic!("{run:?}: {error}"));
    }
    loaded.outcome(problem, run)
}

/// Runs the product and compares every row with the twin.
pub(crate) fn check(problem: &Problem, run: &Run) {
    let (plan, outcome) = (&problem.plan, self::run(problem, run));
    let mut seen = vec![false; problem.cache_bytes()];
    for (i, &row_idx) in run.picks.iter().enumerate() {
        let row = &problem.rows[row_idx];
        let expected = twin::expect(problem, row_idx);
        let found = values(&outcome.output[i], plan.output_row().1);
        for (n, (near, &found)) in expected.output.iter().zip(&found).enumerate() {
            assert!(near.has(found), "{plan:?} {run:?}: row {i} output {n}: {found} for {near:?}");
        }
        if plan.epilogue == Epilogue::Residual {
            let row: Vec<f32> = found.iter().map(|&x| x as f32).collect();
            for (square, expected) in outcome.squares[i].iter().zip(twin::squares_of_tiles(&row)) {
                let error = (f64::from(*square) - expected).abs();
                assert!(error <= SQUARES_ERROR * expected, "{run:?}: {square} for {expected}");
            }
        }
        if plan.epilogue == Epilogue::Head {
            let logits: Vec<f32> = found.iter().map(|&x| x as f32).collect();
            assert_eq!(outcome.best[i], twin::best_of_tiles(&logits), "{plan:?} {run:?}: row {i}");
        }
        if matches!(plan.epilogue, Epilogue::Qkv { .. }) && row.is_active() {
            for (stored, places) in expected.stored.iter().zip(problem.cache_places(row)) {
                check_stored(plan.kv, stored, &places, &outcome.cache, &mut seen);
            }
        }
    }
    check_rest(&outcome.cache, &seen);
}

/// Compares keys or values of a row, and marks their bytes.
pub(crate) fn check_stored(
    kv: Format,
    stored: &[Near],
    places: &[usize],
    cache: &[u8],
    seen: &mut [bool],
) {
    assert_eq!(stored.len(), places.len());
    for (near, &place) in stored.iter().zip(places) {
        let found = twin::load(cache, kv, place);
        assert!(near.has(found), "element {place} of the cache: {found} for {near:?}");
        seen[place * bytes_of(kv)..][..bytes_of(kv)].fill(true);
    }
}

/// The rest of the cache is as it was.
pub(crate) fn check_rest(cache: &[u8], seen: &[bool]) {
    let stray = cache.iter().zip(seen).position(|(&x, &seen)| !seen && x != UNTOUCHED);
    assert_eq!(stray, None, "a byte of the cache is written where no row is");
}

pub(crate) fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks().0.iter().map(|&four| f32::from_le_bytes(four)).collect()
}

/// A row of the output as numbers.
pub(crate) fn values(bytes: &[u8], size: usize) -> Vec<f64> {
    let value = |x: &[u8]| match size {
        2 => f16::from_le_bytes(x.try_into().unwrap()).to_f64(),
        _ => f32::from_le_bytes(x.try_into().unwrap()).into(),
    };
    bytes.chunks(size).map(value).collect()
}
