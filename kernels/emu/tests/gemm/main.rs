//! The few-row product, the embedding and the rotation against their naive twins: shapes, epilogues,
//! independence of a row, schedules, and kernels broken on purpose.
#![allow(clippy::unwrap_used)]

mod chain;
mod embed;
mod epilogue;
mod identity;
mod image;
mod mutant;
mod mutation;
mod overlap;
mod params;
mod problem;
mod rope;
mod run;
mod shape;
mod twin;
