//! Drafts that the host writes beside the sequences of a step.

use crate::world::{Sequence, World};
use spec_core::testing::cuda::step::params::{Distribution, Drafting, NO_TOKEN};

/// What the host writes about drafts that are given, and of every place if the drafter does not run.
pub(crate) struct Given {
    pub(crate) drafting: Vec<Drafting>,
    pub(crate) drafts: Vec<u32>,
    pub(crate) distributions: Vec<Distribution>,
}

impl Given {
    /// Everything else is garbage, unless nobody else writes it.
    pub(crate) fn new(world: &World, sequences: &[Sequence], places: usize) -> Self {
        let garbage = if world.drafting { u32::MAX } else { 0 };
        let unknown = Drafting { num_drafted: garbage, is_going: garbage, ..Drafting::default() };
        let nothing = Distribution { total: f64::NAN, certain: NO_TOKEN - 1, unused: 0 };
        let mut given = Self {
            drafting: vec![unknown; places],
            drafts: vec![NO_TOKEN; places * world.max_drafts],
            distributions: vec![nothing; places * world.max_drafts],
        };
        for (place, sequence) in sequences.iter().enumerate() {
            if !sequence.given.is_empty() {
                given.drafting[place].num_drafted = sequence.given.len() as u32;
            }
            for (idx, &token) in sequence.given.iter().enumerate() {
                given.drafts[place * world.max_drafts + idx] = token;
                given.distributions[place * world.max_drafts + idx] = Distribution::certain(token);
            }
        }
        given
    }
}
