//! What an outline tells of a model's launches, which predictions are made of, is what the executor launches.

use super::{NUM_SMS, both, emulator};
use crate::common::small::{NORMED, SMALL};
use spec_core::exec::{Outline, Planned};
use spec_core::model::Dtype;
use spec_core::runtime::Prefill;
use spec_core::testing::cuda::device::Op;
use spec_core::testing::cuda::model::Tiling;
use spec_core::testing::cuda::{Model, Pass};
use spec_emu::Schedule;

#[test]
fn an_outline_launches_what_the_executor_does() {
    for (sizes, dtype) in [(&SMALL, Dtype::Fp8), (&NORMED, Dtype::Fp16)] {
        let (_dir, _, engine) = both(sizes, dtype, Dtype::Fp16);
        let manifest = engine.manifest();
        let model = Model::load(&engine, 8, &mut emulator(Schedule::PLAIN)).unwrap();
        let (config, precision) = (&manifest.model, &manifest.precision);
        let limits = &manifest.limits;
        let outline =
            Outline::new(config, precision, limits, NUM_SMS, (9, 0), Prefill::Exact).unwrap();
        let group = config.num_heads / config.num_kv_heads;
        for rows in [1, 9, 70] {
            let tiling = Tiling::of(1, rows, group);
            let num_tiles = rows.div_ceil(tiling.rows(group));
            let pass = Pass {
                num_rows: rows,
                num_tiles,
                tiling,
                num_logits: rows,
                pages: 0,
                max_pages: 0,
            };
            let ops = model.pass(&pass);
            let launched: Vec<_> = ops
                .iter()
                .filter_map(Op::as_launch)
                .map(|launch| {
                    // Kernels are numbered as they are loaded.
                    let variant = &outline.variants()[launch.kernel.0 as usize];
                    (variant.to_string(), launch.grid, launch.block, launch.shared_bytes)
                })
                .collect();
            let planned: Vec<_> = outline.step(1, rows - 1).iter().map(shape).collect();
            // Between the tables of a step, and its decisions.
            let [tables, pass @ .., decisions, end] = &planned[..] else {
                panic!("{} operations", planned.len())
            };
            assert_eq!([&tables.0, &decisions.0, &end.0], ["rows", "sample", "accept"]);
            assert_eq!(pass, launched, "{dtype} {sizes:?}, {rows} rows");
        }
    }
}

fn shape(planned: &Planned) -> (String, u32, u32, u32) {
    let Planned::Kernel { variant, grid, threads, shared_bytes, .. } = planned else {
        panic!("{planned:?} is no kernel")
    };
    (variant.to_string(), *grid, *threads, *shared_bytes)
}

#[test]
fn a_prompt_is_cut_as_the_executor_cuts_it() {
    let (_dir, _, engine) = both(&SMALL, Dtype::Fp8, Dtype::Fp16);
    let manifest = engine.manifest();
    let (config, precision, limits) = (&manifest.model, &manifest.precision, &manifest.limits);
    let outline = |prefill| {
        Outline::new(config, precision, limits, NUM_SMS, (9, 0), prefill).unwrap().prompt(600)
    };
    for prefill in [Prefill::Exact, Prefill::Blocks, Prefill::CublasLt] {
        let passes = outline(prefill);
        let mut next = 0;
        for pass in &passes {
            assert_eq!(pass.first, next, "{prefill:?}");
            next += pass.rows;
            let is_product = |one: &&Planned| match one {
                Planned::Library { .. } => true,
                Planned::Kernel { variant, .. } => variant.kernel == "multiply",
            };
            let num_products = pass.operations.iter().filter(is_product).count();
            let is_block = prefill != Prefill::Exact && pass.first < 512;
            let expected = if is_block { 4 } else { 0 };
            assert_eq!(num_products, expected * config.num_layers, "{} rows", pass.rows);
        }
        assert_eq!(next, 600);
    }
}
