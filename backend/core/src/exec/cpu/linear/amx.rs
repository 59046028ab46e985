//! The kernels for AMX, whose tile registers hold the sums of 16 rows and 16 outputs: as many rows cost what one costs.
//! Bfloat16 and what is expanded to it are multiplied there. Sums run over k in links of 32 inputs, whatever the rows. Blocks
//! of integers are left to AVX-512: a block is half of what a register takes, and scaling sums takes longer than their products.
#![allow(unsafe_code)]

use super::avx512;
use super::kernel::{Kernel, Path, Tile};
use crate::model::Dtype;
use crate::model::panel::{GROUP_BYTES, PANEL};
use std::arch::asm;
use std::mem::MaybeUninit;
use std::ops::Range;

/// Rows of a tile register, and its bytes in each: of 16 outputs.
const ROWS: usize = 16;
const ROW_BYTES: usize = 64;
/// Groups of bfloat16 that a register takes, two inputs of each output in one.
const GROUPS: usize = 16;

/// A kernel for every number of rows of a register.
macro_rules! for_rows {
    ($format:ty: $($rows:literal)*) => { [$(rows::<$format, $rows>),*] };
}
const BF16: [Kernel; ROWS] = for_rows!(Bf16: 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16);
const FP8: [Kernel; ROWS] = for_rows!(Fp8: 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16);

pub(super) fn path(dtype: Dtype, rows: usize) -> Path {
    match dtype {
        Dtype::Bf16 => avx512::direct(1, &BF16),
        Dtype::Fp8 if rows <= ROWS => avx512::direct(2, &FP8),
        // Expanded once for all of them.
        Dtype::Fp8 => avx512::expanded_fp8(&BF16),
        Dtype::Fp32 | Dtype::Fp16 | Dtype::Int8 | Dtype::Int4 => avx512::path(dtype, rows),
    }
}

/// How weights come into registers.
trait Format {
    /// Groups of bfloat16 that a unit makes.
    const EXPANSION: usize;
    /// Where units of a tile's weights stand as bfloat16: in place, or expanded into `room`. Fetches as many of what comes next.
    ///
    /// # Safety
    /// The machine has the level's features; the tile has the units, and `room` holds what they make.
    unsafe fn bf16(tile: &Tile, units: Range<usize>, room: &mut Room) -> *const u8;
}

/// For the weights of a register's groups.
#[repr(align(64))]
struct Room(MaybeUninit<[u8; GROUPS * GROUP_BYTES]>);

struct Bf16;
struct Fp8;

impl Format for Bf16 {
    const EXPANSION: usize = 1;

    #[inline(always)]
    unsafe fn bf16(tile: &Tile, units: Range<usize>, _: &mut Room) -> *const u8 {
        let first = tile.w.wrapping_add(units.start * GROUP_BYTES);
        units.for_each(|unit| fetch(tile, unit));
        first
    }
}

impl Format for Fp8 {
    const EXPANSION: usize = 2;

    #[inline(always)]
    unsafe fn bf16(tile: &Tile, units: Range<usize>, room: &mut Room) -> *const u8 {
        let expanded = room.0.as_mut_ptr().cast::<u8>();
        for (i, unit) in units.enumerate() {
            fetch(tile, unit);
            // SAFETY: as promised by the caller.
            unsafe {
                let to = expanded.add(i * Self::EXPANSION * GROUP_BYTES);
                avx512::expand_fp8(tile.w.add(unit * GROUP_BYTES), 1, to);
            }
        }
        expanded
    }
}

#[inline(always)]
fn fetch(tile: &Tile, unit: usize) {
    tile.fetch.share::<1>(unit, 0, 0, PANEL);
}

/// What the tile registers hold, as the processor is told: bytes of a row, and rows; both zero for one that is not used.
#[repr(C, align(64))]
struct Shape {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

impl Shape {
    /// Registers 0 to 3 hold the sums of rows and 64 outputs, 4 activations of the rows, 5 weights of 16 outputs. 6 and 7 are for
    /// the `rest` of the groups, as 4 and 5 are for whole runs of them.
    fn new(rows: usize, rest: usize) -> Self {
        let mut shape =
            Self { palette: 1, start_row: 0, reserved: [0; 14], row_bytes: [0; 16], rows: [0; 16] };
        let sums = [(rows, ROW_BYTES); PANEL * 4 / ROW_BYTES];
        let inputs = [(rows, 4 * GROUPS), (GROUPS, ROW_BYTES)];
        let inputs_of_rest = [(rows, 4 * rest), (rest, ROW_BYTES)];
        let used = if rest == 0 { &inputs_of_rest[..0] } else { &inputs_of_rest };
        for (i, (rows, row_bytes)) in sums.iter().chain(&inputs).chain(used).enumerate() {
            (shape.rows[i], shape.row_bytes[i]) = (*rows as u8, *row_bytes as u16);
        }
        shape
    }
}

/// # Safety
/// The tile's pointers cover `R` rows, and the machine has the level's features.
unsafe fn rows<F: Format, const R: usize>(tile: &Tile) {
    let run = GROUPS / F::EXPANSION;
    let (runs, rest) = (tile.units / run, tile.units % run);
    let shape = Shape::new(R, rest * F::EXPANSION);
    let mut rooms = [const { Room(MaybeUninit::uninit()) }; 2];
    let units = |i: usize| i * run..tile.units.min((i + 1) * run);
    let x = |i: usize| tile.x.wrapping_add(i * GROUPS);
    let x_bytes = 4 * tile.stride;
    // SAFETY: accumulators are `[R][64]`; every group of bfloat16 has a word of activations in each row. Registers keep their
    // shape and their values from one of these to the next, since compiled code uses none of them.
    unsafe {
        asm!("ldtilecfg [{}]", in(reg) &raw const shape, options(nostack, preserves_flags));
        load_sums(tile.acc);
        let mut ready = F::bf16(tile, units(0), &mut rooms[0]);
        for i in 0..runs {
            // Expanded a run ahead: what was stored just now is slow to load.
            let next = F::bf16(tile, units(i + 1), &mut rooms[(i + 1) % 2]);
            add_run(x(i), x_bytes, ready);
            ready = next;
        }
        if rest > 0 {
            add_rest(x(runs), x_bytes, ready);
        }
        store_sums(tile.acc);
        asm!("tilerelease", options(nostack, preserves_flags));
    }
}

/// # Safety
/// As in `rows`.
#[inline(always)]
unsafe fn load_sums(acc: *const f32) {
    // SAFETY: as promised by the caller.
    unsafe {
        asm!(
            "tileloadd tmm0, [{acc} + {stride}]",
            "tileloadd tmm1, [{acc} + {stride} + 64]",
            "tileloadd tmm2, [{acc} + {stride} + 128]",
            "tileloadd tmm3, [{acc} + {stride} + 192]",
            acc = in(reg) acc,
            stride = in(reg) 4 * PANEL,
            options(nostack, preserves_flags),
        );
    }
}

/// # Safety
/// As in `rows`.
#[inline(always)]
unsafe fn store_sums(acc: *mut f32) {
    // SAFETY: as promised by the caller.
    unsafe {
        asm!(
            "tilestored [{acc} + {stride}], tmm0",
            "tilestored [{acc} + {stride} + 64], tmm1",
            "tilestored [{acc} + {stride} + 128], tmm2",
            "tilestored [{acc} + {stride} + 192], tmm3",
            acc = in(reg) acc,
            stride = in(reg) 4 * PANEL,
            options(nostack, preserves_flags),
        );
    }
}

/// Adds products of activations, rows `$x_bytes` apart, and weights, which come into the registers `$x_tile` and `$w_tile`.
macro_rules! add {
    ($x:ident, $x_bytes:ident, $w:ident, $x_tile:literal, $w_tile:literal) => {
        asm!(
            concat!("tileloadd ", $x_tile, ", [{x} + {x_bytes}]"),
            concat!("tileloadd ", $w_tile, ", [{w} + {w_bytes}]"),
            concat!("tdpbf16ps tmm0, ", $x_tile, ", ", $w_tile),
            concat!("tileloadd ", $w_tile, ", [{w} + {w_bytes} + 64]"),
            concat!("tdpbf16ps tmm1, ", $x_tile, ", ", $w_tile),
            concat!("tileloadd ", $w_tile, ", [{w} + {w_bytes} + 128]"),
            concat!("tdpbf16ps tmm2, ", $x_tile, ", ", $w_tile),
            concat!("tileloadd ", $w_tile, ", [{w} + {w_bytes} + 192]"),
            concat!("tdpbf16ps tmm3, ", $x_tile, ", ", $w_tile),
            x = in(reg) $x,
            x_bytes = in(reg) $x_bytes,
            w = in(reg) $w,
            w_bytes = in(reg) GROUP_BYTES,
            options(nostack, preserves_flags),
        )
    };
}

/// # Safety
/// As in `rows`, for a whole run of groups.
#[inline(always)]
unsafe fn add_run(x: *const u32, x_bytes: usize, w: *const u8) {
    // SAFETY: as promised by the caller.
    unsafe { add!(x, x_bytes, w, "tmm4", "tmm5") };
}

/// # Safety
/// As in `rows`, for the rest of the groups.
#[inline(always)]
unsafe fn add_rest(x: *const u32, x_bytes: usize, w: *const u8) {
    // SAFETY: as promised by the caller.
    unsafe { add!(x, x_bytes, w, "tmm6", "tmm7") };
}
