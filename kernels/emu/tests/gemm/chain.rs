//! Kernels of a forward pass one after the other: the embedding, then products that share a workspace.

use crate::image::{Matrix, Random};
use crate::params::{EmbedParams, GemmParams, NormaliseParams, ROW_THREADS, float_bytes};
use crate::problem::{Plan, Problem, Row};
use crate::run::{Arch, Loaded, Run, read};
use spec_core::testing::cuda::model::OPERAND_SHARED_BYTES;
use spec_emu::{Arena, Launch};
use spec_kernels::{Epilogue, Format, Variant};

const TOKENS: usize = 130;
/// Tiles of the largest matrix.
const MAX_TILES: usize = 16;

/// What the products of a chain have in common.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Size {
    pub(crate) weight: Format,
    pub(crate) hidden: usize,
    pub(crate) capacity: usize,
    pub(crate) num_rows: usize,
    pub(crate) grid: u32,
    pub(crate) arch: Arch,
}

impl Size {
    fn run(&self) -> Run {
        let Self { capacity, num_rows, grid, arch, .. } = *self;
        Run { arch, ..Run::new(capacity, (0..num_rows).collect(), grid) }
    }
}

struct Kernel {
    variant: String,
    block: u32,
    shared_bytes: u32,
    params: Vec<u8>,
}

impl Kernel {
    fn launch(&self, grid: u32, overlap: bool) -> Launch<'_> {
        let Self { variant, block, shared_bytes, params } = self;
        let (block, shared_bytes) = (*block, *shared_bytes);
        Launch { variant, grid, block, shared_bytes, params, overlap, max_resident: 0 }
    }
}

/// Kernels in a memory of their own.
pub(crate) struct Chain {
    size: Size,
    pub(crate) arena: Arena,
    kernels: Vec<Kernel>,
    pub(crate) residual: u64,
    /// Of the residual.
    squares: u64,
    partials: u64,
    arrivals: u64,
    outputs: Vec<(u64, usize)>,
}

impl Chain {
    /// The embedding of some tokens.
    pub(crate) fn new(size: Size) -> Self {
        let arena = Arena::new(1 << 28);
        let order: Vec<usize> = (0..TOKENS).collect();
        let matrix = Matrix::random(size.weight, TOKENS, size.hidden, &mut Random(100));
        let row = |i: usize| Row { token: (i * 31 % TOKENS) as u32, ..Row::default() }.bytes();
        let rows: Vec<u8> = (0..size.num_rows).flat_map(row).collect();
        let embed = EmbedParams {
            weights: arena.put(&matrix.pack(&order)),
            scales: arena.put(&float_bytes(&[0.5; TOKENS])),
            rows: arena.put(&rows),
            residual: arena.alloc(size.num_rows * size.hidden * 4),
            squares: arena.alloc(size.num_rows * size.hidden.div_ceil(64) * 4),
            num_rows: size.num_rows,
            k: size.hidden,
        };
        let kernel = Kernel {
            variant: Variant::embed(size.weight).to_string(),
            block: ROW_THREADS,
            shared_bytes: 0,
            params: embed.bytes(),
        };
        let largest = [64 * MAX_TILES, size.hidden];
        let partials = arena.alloc(size.run().partials(largest) * 4);
        let arrivals = arena.put(&[0; MAX_TILES * 4]);
        let EmbedParams { residual, squares, .. } = embed;
        let (kernels, outputs) = (vec![kernel], Vec::new());
        Self { size, arena, kernels, residual, squares, partials, arrivals, outputs }
    }

    /// A product with a matrix of n outputs, from `input` to `output`; where one is not given, new memory takes its
    /// place. Returns where it goes.
    pub(crate) fn product(
        &mut self,
        (epilogue, n): (Epilogue, usize),
        input: Option<u64>,
        output: Option<u64>,
    ) -> u64 {
        let Size { weight, hidden, num_rows, .. } = self.size;
        let problem = Problem::random(Plan::new(weight, epilogue, n, hidden), n as u64);
        let run = self.size.run();
        let Loaded { params: own, normalise, .. } = Loaded::new(&self.arena, &problem, &run);
        let units = run.output_units(&problem.plan);
        let (squares, partials, arrivals) = (self.squares, self.partials, self.arrivals);
        let mut input = input.unwrap_or(own.input);
        if let Some(before) = normalise {
            let product = GemmParams { input, squares, ..own.clone() };
            input = before.values;
            self.kernels.push(Kernel {
                variant: "normalise".into(),
                block: ROW_THREADS,
                shared_bytes: OPERAND_SHARED_BYTES,
                params: NormaliseParams::of(&product, input).bytes(),
            });
        }
        let output = output.unwrap_or(own.output);
        self.kernels.push(Kernel {
            variant: run.variant(&problem.plan),
            block: run.threads(),
            shared_bytes: run.shared_bytes(&problem.plan),
            params: GemmParams { input, squares, output, partials, arrivals, ..own }.bytes(),
        });
        let (width, bytes) = problem.plan.output_row();
        let row_after_row = num_rows * width * bytes;
        self.outputs.push((output, units.map_or(row_after_row, |units| units.bytes(num_rows))));
        output
    }

    /// Names of the kernels.
    pub(crate) fn variants(&self) -> Vec<&str> {
        self.kernels.iter().map(|kernel| &*kernel.variant).collect()
    }

    pub(crate) fn launches(&self, overlap: bool) -> Vec<Launch<'_>> {
        self.kernels.iter().map(|kernel| kernel.launch(self.size.grid, overlap)).collect()
    }

    /// All outputs, and the arrivals.
    pub(crate) fn bits(&self) -> Vec<u8> {
        let outputs = self.outputs.iter().map(|&(address, len)| read(&self.arena, address, len));
        let mut bits: Vec<u8> = outputs.flatten().collect();
        bits.extend(read(&self.arena, self.arrivals, MAX_TILES * 4));
        bits
    }
}
