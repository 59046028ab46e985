//! The few-row product against its naive twin: shapes, epilogues, independence of a row, schedules.

mod epilogue;
mod identity;
mod image;
mod overlap;
mod problem;
mod run;
mod shape;
mod twin;
