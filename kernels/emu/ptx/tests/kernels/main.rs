//! Single launches of the product and of attention, as the emulator's own tests state them, from the text of NVRTC and on
//! the emulator: trees, splits, several blocks a tile, and epilogues with what the executor's small models do not have.
#![allow(clippy::unwrap_used)]

// What states a launch there; the twins that compare with tolerances are not used here.
#[allow(dead_code)]
#[path = "../../../tests/attention/case.rs"]
mod case;
#[allow(dead_code)]
#[path = "../../../tests/gemm/image.rs"]
mod image;
#[allow(dead_code)]
#[path = "../../../tests/gemm/params.rs"]
mod params;
#[allow(dead_code)]
#[path = "../../../tests/gemm/problem.rs"]
mod problem;
#[allow(dead_code)]
#[path = "../../../tests/gemm/run.rs"]
mod run;
#[allow(dead_code)]
#[path = "../../../tests/gemm/twin.rs"]
mod twin;

use std::collections::BTreeSet;
use std::io::{self, Write};
use std::path::Path;

use case::{Case, Context, Query, Shape};
use image::{Matrix, Random};
use params::{EmbedParams, ROW_THREADS, float_bytes};
use problem::{Plan, Problem, Row};
use run::{Arch, Loaded, Run, normalise};
use spec_build::cuda::{Cache, Compiler};
use spec_core::exec::SearchPath;
use spec_emu::{Arena, Launch, Schedule};
use spec_emu_ptx::{Kernels, compare};
use spec_kernels::{Epilogue, Format, MULTIPLY_EPILOGUES, Variant};

/// The kernels of an architecture; none where there is no NVRTC.
fn kernels(arch: &'static str) -> Option<Kernels> {
    compiler().map(|compiler| Kernels::new(compiler, arch))
}

fn compiler() -> Option<Compiler> {
    let cache = Cache::in_folder(Path::new(env!("CARGO_TARGET_TMPDIR")).join("ptx"));
    match Compiler::open(&SearchPath::of_process(None), Some(cache)) {
        Ok(compiler) => Some(compiler),
        Err(error) => {
            let _ = writeln!(io::stderr(), "skipped: {error:#}");
            None
        }
    }
}

fn product(kernels: &Kernels, plan: Plan, capacity: usize, num_rows: usize, grid: u32, arch: Arch) {
    let problem = Problem::random(plan, 1 + u64::from(grid));
    let picks = (0..num_rows).map(|row| row * 7 % problem::ALL_ROWS).collect();
    let run = Run { arch, is_indexed: grid.is_multiple_of(2), ..Run::new(capacity, picks, grid) };
    for seed in [0, 5] {
        let arena = Arena::new(1 << 28);
        let loaded = Loaded::new(&arena, &problem, &run);
        if let Some(before) = &loaded.normalise {
            spec_emu::launch(&normalise(&before.bytes(), grid), &Schedule::PLAIN).unwrap();
        }
        let launch = Launch {
            variant: &run.variant(&plan),
            grid,
            block: run.threads(),
            shared_bytes: run.shared_bytes(&plan),
            params: &loaded.params.bytes(),
            ..Launch::default()
        };
        compare(kernels, &arena, &launch, seed, None).unwrap();
    }
}

#[test]
fn products_with_every_epilogue_have_the_bits_of_the_emulator() {
    use Epilogue::{Head, Raw, Residual, SwiGlu};
    use Format::{Fp8, Fp16};
    let archs = [
        ("compute_90a", Arch::Hopper),
        ("compute_80", Arch::Ampere),
        ("compute_100a", Arch::Blackwell),
    ];
    for (name, arch) in archs {
        let Some(kernels) = kernels(name) else { return };
        let run = |plan, capacity, rows, grid| product(&kernels, plan, capacity, rows, grid, arch);
        run(Plan::new(Fp8, Raw, 200, 576).with_bias(), 8, 7, 4);
        run(Plan::new(Fp16, Residual, 130, 320), 16, 13, 5);
        run(Plan::new(Fp8, Residual, 64, 2304), 32, 29, 7);
        run(Plan::new(Fp16, SwiGlu, 192, 200).with_bias(), 8, 8, 2);
        run(Plan::new(Fp8, Head, 65, 640), 64, 50, 3);
        run(Plan::qkv(Fp8, 64, [3, 1], 192, Fp16).with_bias(), 8, 5, 2);
        run(Plan::qkv(Fp16, 128, [1, 1], 320, Fp8), 16, 11, 3);
        if arch == Arch::Hopper {
            run(Plan::new(Fp16, SwiGlu, 192, 200).with_bias(), 128, 70, 2);
            run(Plan::new(Fp8, Residual, 200, 704), 192, 190, 6);
        }
    }
}

#[test]
fn embeddings_have_the_bits_of_the_emulator() {
    const VOCAB: usize = 150;
    for arch in ["compute_90a", "compute_80"] {
        let Some(kernels) = kernels(arch) else { return };
        for (weight, k) in [(Format::Fp8, 576), (Format::Fp8, 2056), (Format::Fp16, 68)] {
            let random = &mut Random(k as u64);
            let arena = Arena::new(1 << 26);
            let order: Vec<usize> = (0..VOCAB).collect();
            let rows = (0..7).map(|row| Row { token: 21 * row, ..Row::default() });
            let rows: Vec<u8> = rows.flat_map(|row| row.bytes()).collect();
            let params = EmbedParams {
                weights: arena.put(&Matrix::random(weight, VOCAB, k, random).pack(&order)),
                scales: arena.put(&float_bytes(&random.floats(VOCAB, |x| 0.5 + 0.4 * x))),
                rows: arena.put(&rows),
                residual: arena.alloc(7 * k * 4),
                squares: arena.alloc(7 * k.div_ceil(64) * 4),
                num_rows: 7,
                k,
            };
            let (variant, params) = (Variant::embed(weight).to_string(), params.bytes());
            let (grid, block) = (3, ROW_THREADS);
            let (variant, params) = (&*variant, &*params);
            let launch = Launch { variant, grid, block, params, ..Launch::default() };
            compare(&kernels, &arena, &launch, 1, None).unwrap();
        }
    }
}

fn attention(kernels: &Kernels, case: &Case) {
    for seed in [0, 7] {
        let arena = Arena::new(1 << 28);
        let image = case.image(&arena);
        let variant = case.shape.variant();
        // Nodes of the tree of splits stand where the block that made them has its place.
        let workspace = u64::from_le_bytes(image.params[48..56].try_into().unwrap());
        let launch = case.launch(&variant, &image.params);
        compare(kernels, &arena, &launch, seed, Some(workspace)).unwrap();
    }
}

/// Rows that see a path of a tree behind the context each.
fn tree(shape: Shape, base: usize) -> Case {
    let paths = [0b1, 0b11, 0b101, 0b1011, 0b10101, 0b101011, 0b1000001];
    let row = |(name, ancestors): (usize, u64)| Query {
        name: name as u64,
        sequence: Some(0),
        base,
        ancestors,
        first: 0,
    };
    let rows: Vec<Query> = paths.into_iter().enumerate().map(row).collect();
    let tiles = rows.chunks(shape.tile_queries()).map(<[Query]>::to_vec).collect();
    let contexts = vec![Context::new(7, base + 7)];
    Case { contexts, tiles, ..Case::chains(shape, &[], 0) }
}

#[test]
fn attention_of_chains_and_trees_has_the_bits_of_the_emulator() {
    for arch in ["compute_90a", "compute_80"] {
        let Some(kernels) = kernels(arch) else { return };
        for (kv, head_dim, group, tile_rows) in [
            (Format::Fp16, 64, 4, 16),
            (Format::Fp8, 64, 3, 16),
            (Format::Fp16, 128, 4, 64),
            (Format::Fp8, 128, 3, 64),
        ] {
            let is_windowed = false;
            let shape = Shape { kv, head_dim, group, kv_heads: 2, tile_rows, is_windowed };
            let chains = Case::chains(shape, &[1, 17, 150, 95], 5);
            // Splits of two pages, and of one with several levels.
            attention(&kernels, &Case { split_tokens: 32, grid: 5, ..chains.clone() });
            attention(&kernels, &Case { split_tokens: 16, grid: 3, ..chains });
            attention(&kernels, &tree(shape, 41));
            if kv == Format::Fp16 {
                let windowed = Shape { is_windowed: true, ..shape };
                let mut case = Case { split_tokens: 32, ..Case::chains(windowed, &[95, 20], 9) };
                for row in case.tiles.iter_mut().flatten() {
                    row.first = row.base.saturating_sub(21);
                }
                attention(&kernels, &case);
            }
        }
    }
}

/// An assembler may fuse `mul.f32` with an `add.f32` of its product, and bits would follow from what it chose.
#[test]
fn no_product_of_floats_is_left_to_be_fused_with_a_sum() {
    let Some(compiler) = compiler() else { return };
    let (fp8, fp16) = (Format::Fp8, Format::Fp16);
    let variants = [
        Variant::gemm(fp8, 8, Epilogue::Qkv { head_dim: 64 }),
        Variant::gemm(fp16, 8, Epilogue::SwiGlu),
        Variant::gemm(fp8, 64, Epilogue::Head),
        Variant::gemm(fp16, 16, Epilogue::Residual),
        Variant::attention(fp8, 64, 3),
        Variant::attention_wide(fp16, 128, 4),
        Variant::embed(fp8),
        Variant::rope(fp8, 128),
        Variant::finish(Epilogue::Residual),
        Variant::finish(Epilogue::SwiGlu),
        Variant::plain("join"),
        Variant::plain("normalise"),
        Variant::plain("quantise"),
        Variant::plain("sample"),
    ];
    let of_warpgroups = MULTIPLY_EPILOGUES.map(|epilogue| Variant::multiply(fp8, 128, epilogue));
    let variants_of = |arch| {
        let more = if arch == "compute_90a" { &of_warpgroups[..] } else { &[] };
        variants.iter().chain(more)
    };
    for (arch, variant) in ["compute_90a", "compute_80"]
        .into_iter()
        .flat_map(|arch| variants_of(arch).map(move |variant| (arch, variant)))
    {
        let text = compiler.ptx(arch, variant).unwrap();
        assert!(text.contains("f32"), "{variant}");
        assert_eq!(fusible(&text), None, "{variant}, {arch}");
    }
    let fused = "mul.f32 \t%f3, %f1, %f2;\n@%p1 sub.f32 %f5, %f4, %f3;";
    assert!(fusible(fused).is_some());
}

/// The first sum of a product that both leave their rounding open.
fn fusible(text: &str) -> Option<&str> {
    let mut products = BTreeSet::new();
    text.lines().map(str::trim).find(|line| {
        let statement =
            line.strip_prefix('@').and_then(|rest| rest.split_once(char::is_whitespace));
        let statement = statement.map_or(*line, |(_, statement)| statement).trim_end_matches(';');
        let (opcode, operands) = statement.split_once(char::is_whitespace).unwrap_or_default();
        let mut operands = operands.split(',').map(str::trim);
        let result = operands.next().unwrap_or_default();
        let is_sum = ["add.f32", "sub.f32"].contains(&opcode);
        let is_fusible = is_sum && operands.any(|operand| products.contains(operand));
        match opcode {
            "mul.f32" => products.insert(result),
            _ => products.remove(result),
        };
        is_fusible
    })
}
