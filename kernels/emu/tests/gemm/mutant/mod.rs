//! Kernels that are broken in one place, and how that shows.

mod warp;
mod warpgroup;

pub(crate) use warp::{AMPERE_MUTANTS, BLACKWELL_MUTANTS};
pub(crate) use warpgroup::{HOPPER_MUTANTS, MANY_MUTANTS, MOST_MUTANTS, STREAM_MUTANTS};

/// How a broken kernel is found out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Found {
    /// Other results.
    Wrong,
    /// The machine's message: threads that wait for ever, too many arrivals.
    Stopped,
    /// The race detector's.
    Race,
}

/// An embedding and products of it that overlap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Setup {
    /// Four tiles of eight units in blocks of eleven: whole tiles and parts, a ring that wraps; x is one
    /// segment.
    Short,
    /// Two tiles of twenty units in blocks of eight, twice: segments, in the old kernels of several chunks, and several
    /// parts to a tile.
    Long,
    /// A product that adds to the residual stream, and one of the sum.
    Sum,
    /// A head of four tiles for three blocks, with three segments.
    Head,
}

/// A kernel that is broken: `replacement` stands in `file` where `text` did.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Mutant {
    pub(crate) name: &'static str,
    pub(crate) found: Found,
    pub(crate) setup: Setup,
    pub(crate) file: &'static str,
    pub(crate) text: &'static str,
    pub(crate) replacement: &'static str,
}
