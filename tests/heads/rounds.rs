//! Five rounds of drafting, as the reference went through them, with a head on any device.

use crate::common::golden;
use crate::support::Recorded;
use spec_core::testing::draft::{Head, HeadPass, HeadSegment};

/// Of the one sequence.
pub(crate) const PAGES: [u32; 3] = [2, 0, 1];

/// Drafts of a round.
const NUM_DRAFTS: usize = 4;

/// Runs one row.
pub(crate) fn run(head: &mut dyn Head, token: usize, state: &[f32], position: usize) -> HeadPass {
    let segment = HeadSegment {
        tokens: &[token as u32],
        states: state,
        first_position: position,
        pages: &PAGES,
        num_logits: 1,
        tree: &[],
    };
    head.forward(&[segment]).unwrap()
}

/// The target's token of a head's likeliest one.
fn likeliest(head: &dyn Head, pass: &HeadPass) -> usize {
    let row = golden::likeliest(pass.logits.row(0), 1)[0];
    head.vocab_map().map_or(row, |map| map[row] as usize)
}

/// Goes on with the tokens that the reference drafted. `check` gets the name of what was recorded, what the head says, and
/// what the reference says. Gives the tokens that the head holds to be the likeliest, round by round.
pub(crate) fn follow(
    case: &str,
    head: &mut dyn Head,
    mut check: impl FnMut(&str, &[f32], &[f32]),
) -> Vec<Vec<usize>> {
    let (target, recorded) = (Recorded::of("target"), Recorded::of(case));
    let tokens = target.whole("token_ids");
    let is_eagle1 = case.starts_with("eagle1");
    let taps = if is_eagle1 { "last_hidden_pre_norm" } else { "aux_hidden_states" };
    let states = head.states(&target.floats(taps)).unwrap();
    match is_eagle1 {
        true => check("states", &states, &target.floats("last_hidden_post_norm")),
        false => check("states", &states, &recorded.floats("fused")),
    }
    let width = head.width();
    let state = |position: usize| &states[position * width..(position + 1) * width];
    let mut read = 0;
    let mut rounds = Vec::new();
    for (round, committed) in recorded.whole("commit").into_iter().enumerate() {
        let of_round = |name: &str| format!("r{round}.{name}");
        // The states of these positions are new: each comes with the token behind it.
        let (mut logits, mut handed_on) = (Vec::new(), Vec::new());
        let mut last = HeadPass::default();
        for position in read..committed {
            last = run(head, tokens[position + 1], state(position), position + 1);
            logits.extend_from_slice(last.logits.row(0));
            handed_on.extend_from_slice(&last.states);
        }
        let mut check = |name: &str, found: &[f32]| {
            let name = of_round(name);
            check(&name, found, &recorded.floats(&name));
        };
        check("first.logits", &logits);
        check("first.hidden", &handed_on);
        let (mut logits, mut handed_on, mut drafts) = (vec![], vec![], vec![]);
        let drafted = recorded.whole(&of_round("chain.tokens"));
        assert_eq!(drafted.len(), NUM_DRAFTS);
        for (draft, &token) in drafted.iter().enumerate() {
            logits.extend_from_slice(last.logits.row(0));
            handed_on.extend_from_slice(&last.states);
            drafts.push(likeliest(head, &last));
            last = run(head, token, &last.states.clone(), committed + 1 + draft);
        }
        check("chain.logits", &logits);
        check("chain.hidden", &handed_on);
        rounds.push(drafts);
        read = committed;
    }
    rounds
}
