//! Ragged shapes and every way a matrix can be cut.

use crate::image::Random;
use crate::problem::{Plan, Problem};
use crate::run::{Arch, Run, check};
use crate::twin::some_rows;
use spec_emu::Schedule;
use spec_kernels::{Epilogue, Format};

/// Fewer k than a unit, no multiple of one, several chunks; a tile that is not whole; rings that wrap.
const SHAPES: [(usize, usize); 8] =
    [(64, 64), (200, 576), (128, 640), (65, 64), (130, 1088), (64, 4096), (192, 2048), (320, 128)];

fn is_right_in_every_shape(weight: Format, epilogue: Epilogue, arch: Arch) {
    let random = &mut Random(1);
    for (i, (n, k)) in SHAPES.into_iter().enumerate() {
        let problem = Problem::random(Plan::new(weight, epilogue, n, k), i as u64);
        for &capacity in arch.capacities() {
            let picks = some_rows(1 + random.below(capacity), random);
            let grid = 1 + random.below(9) as u32;
            let schedule = Schedule::seeded(random.below(1000) as u64);
            check(&problem, &Run { arch, schedule, ..Run::new(capacity, picks, grid) });
        }
    }
}

#[test]
fn fp8_matrices_of_every_shape_add_to_the_residual() {
    for arch in Arch::ALL {
        is_right_in_every_shape(Format::Fp8, Epilogue::Residual, arch);
    }
}

#[test]
fn fp16_matrices_of_every_shape_add_to_the_residual() {
    for arch in Arch::ALL {
        is_right_in_every_shape(Format::Fp16, Epilogue::Residual, arch);
    }
}

#[test]
fn fp8_heads_of_every_shape_give_logits() {
    for arch in Arch::ALL {
        is_right_in_every_shape(Format::Fp8, Epilogue::Head, arch);
    }
}

#[test]
fn fp16_heads_of_every_shape_give_logits() {
    for arch in Arch::ALL {
        is_right_in_every_shape(Format::Fp16, Epilogue::Head, arch);
    }
}

#[test]
fn every_number_of_rows_is_right() {
    let problem = Problem::random(Plan::new(Format::Fp8, Epilogue::Raw, 128, 256), 2);
    for arch in Arch::ALL {
        let mut fewer = 0;
        for &capacity in arch.capacities() {
            // Of most every third: all places in eight rows come, in all runs of 64.
            let step = if capacity > 192 { 3 } else { 1 };
            for count in (fewer + 1..capacity).step_by(step).chain([capacity]) {
                check(&problem, &Run { arch, ..Run::new(capacity, (0..count).collect(), 3) });
            }
            fewer = capacity;
        }
    }
}

/// Five tiles of five units: parts begin and end in the middle of tiles, a tile has up to five parts, and
/// the last grids have blocks without work.
#[test]
fn every_grid_is_right_under_every_kind_of_schedule() {
    let problem = Problem::random(Plan::new(Format::Fp16, Epilogue::Raw, 320, 320), 3);
    for grid in (1..=27).chain([40]) {
        for seed in 0..3 {
            let schedule = Schedule::seeded(seed + 3 * u64::from(grid));
            let picks = vec![3, 0, 8];
            let arch = Arch::ALL[seed as usize];
            check(&problem, &Run { schedule, arch, ..Run::new(8, picks, grid) });
        }
    }
}
