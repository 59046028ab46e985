//! What keeps the threads of the product in order, and the kernels around it, is needed.

use super::{Cut, Problem};
use crate::image::{Matrix, Random};
use crate::run::read;
use crate::written::{Layout, Written};
use half::f16;
use spec_core::testing::cuda::device::bytes_of as bytes_of_params;
use spec_core::testing::cuda::model::many_params::{MultiplyParams, QuantiseParams};
use spec_core::testing::cuda::model::{
    MULTIPLY_CLUSTER, MULTIPLY_SHARED_BYTES, MULTIPLY_THREADS, OPERAND_SHARED_BYTES, ROW_THREADS,
};
use spec_emu::{Arena, Launch, Mutation, Options, Program, Schedule};
use spec_kernels::{Epilogue, Format, MULTIPLY_EPILOGUES, Variant};

/// Rows that a kernel in front writes, and others in their place when they have been multiplied: each kernel may begin while the
/// one before it still runs.
fn in_a_chain(program: &Program, schedule: &Schedule) -> Result<Vec<u8>, String> {
    const PLACES: usize = 128;
    const WIDTH: usize = 384;
    let (arena, random) = (Arena::new(1 << 26), &mut Random(6));
    let weights = Matrix::random(Format::Fp8, 64, WIDTH, random);
    let weights = arena.put(&weights.pack(&(0..64).collect::<Vec<_>>()));
    let written = Written::new(&arena, Format::Fp8, PLACES, WIDTH, Layout::Units { first: 0 });
    let (num_rows, k) = (PLACES as u32, WIDTH as u32);
    let mut quantise = || {
        let halves = random.floats(PLACES * WIDTH, |x| x).into_iter().map(f16::from_f32);
        let bytes: Vec<u8> = halves.flat_map(f16::to_le_bytes).collect();
        QuantiseParams { input: arena.put(&bytes), output: written.params, num_rows, k }
    };
    let quantise = [quantise(), quantise()];
    let multiply = [0, 1].map(|_| MultiplyParams {
        weights,
        rows: written.params.values,
        output: arena.put(&[0; PLACES * 64 * 4]),
        n: 64,
        k_units: 3,
        num_rows,
        ..MultiplyParams::default()
    });
    let product = Variant::multiply(Format::Fp8, 128, Epilogue::Raw).to_string();
    let one = |params| Launch {
        variant: "quantise",
        grid: 3,
        block: ROW_THREADS,
        shared_bytes: OPERAND_SHARED_BYTES,
        params,
        overlap: true,
        ..Launch::default()
    };
    let other = |params| Launch {
        variant: &product,
        grid: MULTIPLY_CLUSTER,
        block: MULTIPLY_THREADS,
        shared_bytes: MULTIPLY_SHARED_BYTES,
        params,
        overlap: true,
        ..Launch::default()
    };
    let launches = [
        one(bytes_of_params(&quantise[..1])),
        other(bytes_of_params(&multiply[..1])),
        one(bytes_of_params(&quantise[1..])),
        other(bytes_of_params(&multiply[1..])),
    ];
    program.run(&arena, &launches, schedule)?;
    Ok(multiply.map(|params| read(&arena, params.output, PLACES * 64 * 4)).concat())
}

fn find_in_a_chain(options: &Options<'_>) -> Option<String> {
    let product = Variant::multiply(Format::Fp8, 128, Epilogue::Raw).to_string();
    let variants = ["quantise", &product];
    let plain = Program::build(&variants, &Options::default()).expect("builds");
    let expected = in_a_chain(&plain, &Schedule::PLAIN).expect("runs");
    let changed = Program::build(&variants, options).expect("builds");
    (0..6).find_map(|seed| match in_a_chain(&changed, &Schedule::seeded(seed)) {
        Ok(found) if found == expected => None,
        Ok(_) => Some(format!("other results with seed {seed}")),
        Err(message) => Some(message),
    })
}

#[test]
fn rows_are_waited_for_and_not_replaced_too_early() {
    assert_eq!(find_in_a_chain(&Options { races: true, mutation: None }), None);
    for (name, file, text, replacement) in [
        (
            "rows are asked for before they are there",
            PRODUCT,
            "    grid_wait();\n    uint32_t early",
            "    uint32_t early",
        ),
        (
            "rows are replaced while they are multiplied",
            "prefill/quantise.cu",
            "    grid_wait();\n",
            "    struct AtTheEnd { ~AtTheEnd() { grid_wait(); } } at_the_end;\n",
        ),
    ] {
        let mutation = Some(Mutation { file, text, replacement });
        let found = find_in_a_chain(&Options { races: false, mutation });
        assert!(found.is_some(), "{name} is not found out");
    }
}

/// What the first of some schedules says of a product that is changed: of tiles that take several rounds of the ring, of such
/// that fit into it, and of a cluster that goes on to other outputs, of which there are none for one of its blocks.
fn find(epilogue: Epilogue, tile: usize, options: &Options<'_>) -> Option<String> {
    let name = Variant::multiply(Format::Fp8, tile, epilogue).to_string();
    let program = Program::build(&[&name], options).expect("builds");
    let cut = Cut { tile, places: 0..256, clusters: 1 };
    [(192, 1300), (192, 300), (320, 300)].into_iter().find_map(|(n, k)| {
        let problem = Problem::random(Format::Fp8, epilogue, 256, n, k);
        find_in(&problem, &cut, &program, options.races)
    })
}

fn find_in(problem: &Problem, cut: &Cut, program: &Program, races: bool) -> Option<String> {
    let expected = problem.run_here(cut, 0);
    (0..if races { 3 } else { 12 }).find_map(|seed| {
        let schedule = Schedule::seeded(seed);
        match problem.run(cut, &|arena, launches| program.run(arena, launches, &schedule)) {
            Ok(found) if found == expected => None,
            Ok(_) => Some(format!("other results with seed {seed}")),
            Err(message) => Some(message),
        }
    })
}

#[test]
fn the_product_as_it_is_has_no_race() {
    for (epilogue, tile) in MULTIPLY_EPILOGUES.into_iter().zip([256, 128, 256]) {
        let found = find(epilogue, tile, &Options { races: true, mutation: None });
        assert_eq!(found, None, "{epilogue:?}");
    }
    assert_eq!(find(Epilogue::SwiGlu, 128, &Options { races: false, mutation: None }), None);
}

const PRODUCT: &str = "prefill/multiply.cu";

/// What a change of the kernels or of the emulator alone can break: `scripts/check-kernels` runs it.
mod exhaustive {
    use super::{PRODUCT, find};
    use spec_emu::{Mutation, Options};
    use spec_kernels::Epilogue;

    const OUTPUTS: &str = "prefill/outputs.cuh";

    #[test]
    fn what_keeps_the_threads_of_the_product_in_order_is_needed() {
        for (name, epilogue, file, text, replacement) in [
            (
                "a stage is filled while it is read",
                Epilogue::Raw,
                PRODUCT,
                "                mbar_wait(&ring.empty[at.stage], at.parity ^ 1);\n",
                "",
            ),
            (
                "a stage is read before it is there",
                Epilogue::Raw,
                PRODUCT,
                "        mbar_wait(&ring.full[at.stage], at.parity);\n",
                "",
            ),
            (
                "a stage is given back while its products run",
                Epilogue::Raw,
                PRODUCT,
                "            warpgroup_wait<1>();\n",
                "",
            ),
            (
                "sums are stored while products run",
                Epilogue::Raw,
                PRODUCT,
                "    warpgroup_wait<0>();\n",
                "    warpgroup_wait<1>();\n",
            ),
            (
                "barriers are used before they are there",
                Epilogue::Raw,
                PRODUCT,
                "    // Behind this the barriers of all CTAs are there.\n    cluster_sync();\n",
                "",
            ),
            (
                "a CTA ends before others have given back its ring",
                Epilogue::Raw,
                PRODUCT,
                "        mbar_wait(&ring.empty[at.stage], at.parity ^ 1);\n    }\n}\n",
                "    }\n}\n",
            ),
            (
                "a stage is filled while another CTA reads it",
                Epilogue::Raw,
                PRODUCT,
                "mbar_arrive_at(&ring.empty[at.stage], lane_index());",
                "mbar_arrive_at(&ring.empty[at.stage], cluster_rank());",
            ),
            (
                "rows do not come to the whole cluster",
                Epilogue::Raw,
                PRODUCT,
                "bulk_copy_to_cluster<CLUSTER>",
                "bulk_copy_to_cluster<1>",
            ),
            (
                "a unit of rows is another's",
                Epilogue::Raw,
                PRODUCT,
                "tile.places * ROW_UNITS + own",
                "tile.places * ROW_UNITS + i",
            ),
            (
                "all CTAs have the same outputs",
                Epilogue::Raw,
                PRODUCT,
                "(tile.outputs * CLUSTER + cluster_rank())",
                "(tile.outputs * CLUSTER)",
            ),
            (
                "both tiles of a pair are the first",
                Epilogue::Raw,
                PRODUCT,
                "minimum(first_output_tile(tile) + i, order.outputs - 1)",
                "minimum(first_output_tile(tile), order.outputs - 1)",
            ),
            (
                "outputs that there are not are stored",
                Epilogue::Raw,
                OUTPUTS,
                "if (tile * UNIT_OUTPUTS >= stride) {",
                "if (false) {",
            ),
            (
                "scales of outputs are those of the first tile",
                Epilogue::Residual,
                OUTPUTS,
                "tile * UNIT_OUTPUTS + first_output(own) : 0",
                "first_output(own) : 0",
            ),
            (
                "scales are used before they are told",
                Epilogue::SwiGlu,
                OUTPUTS,
                "        }\n        warpgroup_barrier(own);\n    }\n}\n",
                "        }\n    }\n}\n",
            ),
            (
                "squares are added up before they are there",
                Epilogue::Residual,
                OUTPUTS,
                "            warpgroup_barrier(own);\n            add_squares_of",
                "            add_squares_of",
            ),
            (
                "squares are replaced while they are added up",
                Epilogue::Residual,
                OUTPUTS,
                "            // The next places' go there.\n            warpgroup_barrier(own);\n",
                "",
            ),
            (
                "squares lack lanes",
                Epilogue::Residual,
                OUTPUTS,
                "sum_of_lanes<ADDING>",
                "sum_of_lanes<1>",
            ),
            (
                "what others tell is read before it is there",
                Epilogue::SwiGlu,
                OUTPUTS,
                "        warpgroup_barrier(own);\n        UNROLL",
                "        UNROLL",
            ),
            (
                "what others tell is replaced before it is read",
                Epilogue::SwiGlu,
                OUTPUTS,
                "        // The next places go there.\n        warpgroup_barrier(own);\n",
                "",
            ),
        ] {
            let mutation = Some(Mutation { file, text, replacement });
            let found = find(epilogue, 128, &Options { races: true, mutation });
            assert!(found.is_some(), "{name} is not found out");
        }
    }
}
