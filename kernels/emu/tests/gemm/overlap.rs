//! A chain of kernels, each begun before the one before it has ended, gives the bits of one that runs in
//! turn: embedding, gates, their sum into the residual, logits. All products share one workspace.

use crate::image::{Matrix, Random};
use crate::params::{
    EmbedParams, GEMM_THREADS, GemmParams, ROW_THREADS, gemm_partials, gemm_shared_bytes,
};
use crate::problem::{Plan, Problem, Row};
use crate::run::{Loaded, Run, read};
use spec_emu::{Arena, Launch, Schedule};
use spec_kernels::{Epilogue, Format, Variant};

const HIDDEN: usize = 192;
const VOCAB: usize = 130;
const CAPACITY: usize = 8;
const NUM_ROWS: usize = 5;
const GRID: u32 = 5;

struct Kernel {
    variant: String,
    block: u32,
    shared_bytes: u32,
    params: Vec<u8>,
}

impl Kernel {
    fn launch(&self, overlap: bool) -> Launch<'_> {
        let Self { variant, block, shared_bytes, params } = self;
        let (block, shared_bytes) = (*block, *shared_bytes);
        Launch { variant, grid: GRID, block, shared_bytes, params, overlap, max_resident: 0 }
    }
}

/// The chain in a memory of its own.
struct Chain {
    arena: Arena,
    kernels: Vec<Kernel>,
    logits: u64,
    best: u64,
}

impl Chain {
    fn new(weight: Format) -> Self {
        let arena = Arena::new(1 << 28);
        let embed = embedding(&arena, weight);
        let partials = arena.alloc(gemm_partials(GRID, CAPACITY) * 4);
        let arrivals = arena.put(&[0; 64]);
        let activated = arena.alloc(NUM_ROWS * HIDDEN * 2);
        let stages = [
            (Epilogue::SwiGlu, 2 * HIDDEN, embed.residual, activated),
            (Epilogue::Residual, HIDDEN, activated, embed.residual),
            (Epilogue::Head, VOCAB, embed.residual, arena.alloc(NUM_ROWS * VOCAB * 4)),
        ];
        let mut kernels = vec![Kernel {
            variant: Variant::embed(weight).to_string(),
            block: ROW_THREADS,
            shared_bytes: 0,
            params: embed.bytes(),
        }];
        let (mut logits, mut best) = (0, 0);
        for (epilogue, n, input, output) in stages {
            let problem = Problem::random(Plan::new(weight, epilogue, n, HIDDEN), n as u64);
            let run = Run::new(CAPACITY, (0..NUM_ROWS).collect(), GRID);
            let own = Loaded::new(&arena, &problem, &run).params;
            let params = GemmParams { input, output, partials, arrivals, ..own };
            (logits, best) = (output, params.best);
            kernels.push(Kernel {
                variant: run.variant(&problem.plan),
                block: GEMM_THREADS,
                shared_bytes: gemm_shared_bytes(CAPACITY),
                params: params.bytes(),
            });
        }
        Self { arena, kernels, logits, best }
    }

    /// Bits of the logits and of what is best among them.
    fn run(&self, overlap: bool, schedule: Schedule) -> Vec<u8> {
        let launches: Vec<_> = self.kernels.iter().map(|kernel| kernel.launch(overlap)).collect();
        spec_emu::run(&launches, &schedule).unwrap();
        let mut bits = read(&self.arena, self.logits, NUM_ROWS * VOCAB * 4);
        bits.extend(read(&self.arena, self.best, NUM_ROWS * VOCAB.div_ceil(64) * 8));
        bits
    }
}

fn embedding(arena: &Arena, weight: Format) -> EmbedParams {
    let order: Vec<usize> = (0..VOCAB).collect();
    let matrix = Matrix::random(weight, VOCAB, HIDDEN, &mut Random(100));
    let row = |token| Row { token, ..Row::default() }.bytes();
    let rows: Vec<u8> = (0..NUM_ROWS as u32).flat_map(|i| row(i * 31 % VOCAB as u32)).collect();
    let ones: Vec<u8> = (0..192).flat_map(|_| 1f32.to_le_bytes()).collect();
    EmbedParams {
        weights: arena.put(&matrix.pack(&order)),
        scales: if weight == Format::Fp8 { arena.put(&ones) } else { 0 },
        rows: arena.put(&rows),
        residual: arena.alloc(NUM_ROWS * HIDDEN * 4),
        num_rows: NUM_ROWS,
        k: HIDDEN,
    }
}

#[test]
fn kernels_that_overlap_give_the_bits_of_kernels_in_turn() {
    for weight in [Format::Fp8, Format::Fp16] {
        let chain = Chain::new(weight);
        let expected = chain.run(false, Schedule::PLAIN);
        for seed in 0..20 {
            assert!(chain.run(true, Schedule::seeded(seed)) == expected, "seed {seed}");
        }
    }
}
