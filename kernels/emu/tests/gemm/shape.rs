//! Ragged shapes and every way a matrix can be cut.

use crate::image::Random;
use crate::problem::{Plan, Problem};
use crate::run::{Run, check, run};
use crate::twin::some_rows;
use spec_emu::Schedule;
use spec_kernels::{Epilogue, Format, GEMM_ROWS};

/// Fewer k than a unit, no multiple of one, several chunks; a tile that is not whole; rings that wrap.
const SHAPES: [(usize, usize); 8] =
    [(64, 64), (200, 576), (128, 640), (65, 64), (130, 1088), (64, 4096), (192, 2048), (320, 128)];

fn is_right_in_every_shape(weight: Format, epilogue: Epilogue, is_old: bool) {
    let random = &mut Random(epilogue as u64);
    for (i, (n, k)) in SHAPES.into_iter().enumerate() {
        let problem = Problem::random(Plan::new(weight, epilogue, n, k), i as u64);
        for capacity in GEMM_ROWS {
            let picks = some_rows(1 + random.below(capacity), random);
            let grid = 1 + random.below(9) as u32;
            let schedule = Schedule::seeded(random.next() % 1000);
            let run_ = Run { is_old, schedule, ..Run::new(capacity, picks, grid) };
            check(&problem, &run_, &run(&problem, &run_));
        }
    }
}
