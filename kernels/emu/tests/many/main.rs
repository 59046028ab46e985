//! The kernels around products of many rows, each against its naive twin in f64, under disturbed schedules; and that
//! a row's bits depend on that row alone.

#[allow(dead_code, reason = "shared with the tests of the few-row product")]
#[path = "../gemm/image.rs"]
mod image;
mod multiply;
mod mutation;
mod operand;
mod product;
mod run;
mod unpack;
mod written;
