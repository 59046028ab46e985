//! What a drafter is told of the target's passes: of every position that is valid, once, its token and hidden states, bit
//! for bit those of a pass over the text alone, whatever was drafted beside it.
#![allow(clippy::unwrap_used)]

mod common;

use common::models::Recipe;
use common::small::SMALL;
use common::tiny;
use spec_core::Result;
use spec_core::engine::Engine;
use spec_core::exec::Pool;
use spec_core::model::Dtype;
use spec_core::runtime::{Isa, SequenceId, TARGET_FILE};
use spec_core::sampling::SamplingParams;
use spec_core::testing::batch::{Branching, DraftLens, Entry, Executor, Forward, Segment, WANTED};
use spec_core::testing::cpu::Model;
use spec_core::testing::draft::{Drafter, Ngram, Proposal, Verified};
use spec_core::testing::sampling::{Coupling, Sampler};
use spec_core::testing::{Host, PageId};
use std::collections::HashMap;
use std::sync::{Arc, Mutex};

/// Behind no layer, and behind all of them.
const LAYERS: [usize; 2] = [0, 2];

/// What was told of a sequence: its positions' tokens, and the bits of their hidden states.
#[derive(Default)]
struct Told {
    tokens: Vec<u32>,
    hidden: Vec<Vec<u32>>,
}

/// Drafts by looking up, in trees, and notes what it is told.
struct Witness {
    lookup: Ngram,
    told: Arc<Mutex<HashMap<SequenceId, Told>>>,
}

impl Drafter for Witness {
    fn taps(&self) -> &[usize] {
        &LAYERS
    }

    fn propose(&mut self, entries: &[Entry<'_>]) -> Result<Vec<Proposal>> {
        self.lookup.propose(entries)
    }

    fn observe(&mut self, verified: &[Verified<'_>]) -> Result<()> {
        let mut all = self.told.lock().unwrap();
        for Verified { entry, accepted, taps } in verified {
            let told = all.entry(entry.id).or_default();
            assert_eq!(told.tokens.len(), entry.computed, "every position once, in order");
            told.tokens.extend(&entry.tokens[entry.computed..entry.computed + entry.chunk]);
            told.tokens.extend(accepted);
            told.hidden.extend(taps.iter().map(|row| bits(row)));
            assert_eq!(told.hidden.len(), told.tokens.len(), "a row a token");
        }
        Ok(())
    }

    fn forget(&mut self, id: SequenceId) {
        self.lookup.forget(id);
    }
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

fn model(engine: &Engine) -> Model {
    Model::load(engine, 32, Isa::detect(), Arc::new(Pool::new(2))).unwrap()
}

/// Hidden states of a text, from an empty cache.
fn alone(engine: &Engine, tokens: &[u32]) -> Vec<Vec<u32>> {
    let mut model = model(engine);
    model.tap(&LAYERS).unwrap();
    let pages: Vec<PageId> = (0..8).collect();
    let segment = Segment {
        tokens,
        first_position: 0,
        pages: &pages,
        prompt_len: 0,
        num_logits: 0,
        tree: &[],
    };
    model.forward(&[segment]).unwrap();
    let taps = model.taps().unwrap();
    taps.chunks_exact(taps.len() / tokens.len()).map(bits).collect()
}

#[test]
fn a_drafter_is_told_of_every_position_as_if_it_were_computed_alone() {
    let dir = tempfile::tempdir().unwrap();
    tiny::write_sized(&dir.path().join("hf"), 2, 5, &SMALL);
    Recipe::plain(dir.path().join("hf"), Dtype::Bf16).build(&dir.path().join("built"));
    let engine = Engine::open(dir.path().join("built").join("1").join(TARGET_FILE)).unwrap();
    let told = Arc::new(Mutex::new(HashMap::new()));
    let lookup = Ngram::new(2, 1).with_branches(3);
    let witness = Witness { lookup, told: Arc::clone(&told) };
    let mut host = Host::new(Box::new(model(&engine)), Some(Box::new(witness))).unwrap();

    // Two sequences that repeat themselves in several ways: one is prefilled in chunks, beside the other's drafts.
    let pages: [Vec<PageId>; 2] = [(0..8).collect(), (8..16).rev().collect()];
    let cool = SamplingParams { temperature: 0.7, ..SamplingParams::default() };
    let samplers = [SamplingParams::default(), cool]
        .map(|params| Sampler::new(params, Coupling::Path(9), vec![]));
    let mut texts = [vec![1, 2, 3, 1, 2, 4, 1, 2, 3, 5, 1, 2], (0..30).map(|i| i % 7).collect()];
    let (mut computed, mut forks, mut accepted) = ([0, 0], 0, 0);
    for step in 0.. {
        if texts.iter().any(|text| text.len() > 110) {
            break;
        }
        let entry = |idx: usize| {
            let tokens: &[u32] = &texts[idx];
            let chunk = (tokens.len() - computed[idx]).min(9);
            let samples = computed[idx] + chunk == tokens.len();
            Entry {
                id: idx as u64,
                tokens,
                prompt_len: 4,
                max_len: 128,
                computed: computed[idx],
                chunk,
                draft_computed: 0,
                is_read: true,
                speculates: true,
                draft_lens: DraftLens::both(if samples { 6 } else { 0 }),
                branching: Branching::CHAIN,
                given: if samples && step % 5 == 4 { &[3, 1] } else { &[] },
                min_confidence: 0.0,
                pages: &pages[idx],
                prompt_rows: 0,
                shares: spec_core::testing::Shares::All,
                sampler: &samplers[idx],
            }
        };
        let entry = |idx| {
            let entry: Entry<'_> = entry(idx);
            // Given drafts come in place of others.
            if entry.given.is_empty() {
                entry
            } else {
                Entry { draft_lens: DraftLens::default(), ..entry }
            }
        };
        let entries = [entry(0), entry(1)];
        let outcomes = host.step(&entries, WANTED).unwrap().unwrap().outcomes;
        let chunks = entries.map(|entry| entry.chunk);
        for (idx, outcome) in outcomes.into_iter().enumerate() {
            texts[idx].extend(outcome.tokens.iter().map(|emitted| emitted.token));
            computed[idx] += chunks[idx] + outcome.accepted;
            forks += usize::from(outcome.accepted > 0 && outcome.accepted < outcome.drafted);
            accepted += outcome.accepted;
        }
    }
    assert!(accepted > 10 && forks > 5, "{accepted} accepted, {forks} in part");
    let told = told.lock().unwrap();
    for (idx, text) in texts.iter().enumerate() {
        let told = &told[&(idx as u64)];
        assert_eq!(told.tokens, text[..computed[idx]]);
        assert!(told.hidden == alone(&engine, &told.tokens), "sequence {idx}");
    }
}
