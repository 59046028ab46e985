//! The few-row product, the embedding and the rotation against their naive twins: shapes, epilogues,
//! independence of a row, schedules.

mod chain;
mod embed;
mod epilogue;
mod identity;
mod image;
mod mutation;
mod overlap;
mod params;
mod problem;
mod rope;
mod run;
mod shape;
mod twin;
