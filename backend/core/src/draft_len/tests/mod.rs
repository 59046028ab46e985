//! The tuner against simulated engines: whether it finds the right lengths, and what it costs to.

mod simulation;

use super::*;
use proptest::prelude::*;
use simulation::MAX_DRAFT_LEN;
pub(super) use simulation::{MEMORY_BOUND, Run, Truth, World};

#[test]
fn certain_acceptance_goes_to_the_longest_draft() {
    for num in [1, 8, 32] {
        let mut run = Run::new(MEMORY_BOUND, &vec![1.0; num]);
        run.steps(60);
        assert!(run.lens.iter().all(|lens| lens.model == MAX_DRAFT_LEN), "{num}: {:?}", run.lens);
    }
}

#[test]
fn no_acceptance_goes_to_plain_decoding() {
    for num in [1, 8, 32] {
        let mut run = Run::new(MEMORY_BOUND, &vec![0.0; num]);
        run.steps(200);
        assert!(run.mean_len(0, 200) < 0.3);
        assert!(run.steps(1000).speedup() >= 0.98, "{num}: {}", run.speedup());
    }
}

#[test]
fn each_sequence_gets_what_its_acceptance_is_worth() {
    let mut run = Run::new(World { row_ms: 0.5, ..MEMORY_BOUND }, &[0.95, 0.0, 0.95, 0.5]);
    run.steps(300);
    let lens: Vec<f64> = (0..4).map(|idx| run.mean_len(idx, 100)).collect();
    assert!(lens[0] > 4.0 && lens[2] > 4.0, "{lens:?}");
    assert!(lens[1] < 1.0, "{lens:?}");
    assert!(lens[3] > lens[1] && lens[3] < lens[0], "{lens:?}");
}

#[test]
fn one_whose_drafts_are_fixed_leaves_the_others_what_pays() {
    let mut run = Run::new(MEMORY_BOUND, &[0.0, 0.0]);
    run.steps(300);
    let [mut fixed, other] = [0, 1].map(|idx| run.candidates()[idx]);
    fixed.is_fixed = true;
    let mut choose = |candidates: &[Candidate], max_extra| {
        let lens = run.tuner.choose(candidates, candidates.len(), max_extra);
        lens.into_iter().map(|lens| lens.model).collect::<Vec<_>>()
    };
    let drafting = (0..100).filter(|_| choose(&[fixed, other], 64)[1] > 0).count();
    assert!(drafting < 20, "the other drafts in {drafting} of 100 steps, and is never right");
    assert_eq!(choose(&[fixed, other], 64)[0], MAX_DRAFT_LEN);
    assert_eq!(choose(&[fixed], 64), [MAX_DRAFT_LEN]);
    assert_eq!(choose(&[fixed, fixed], 5), [3, 2], "rows are short");
    fixed.limit = 2;
    assert_eq!(choose(&[fixed], 64), [2]);
}

/// As where a step began before it was asked for, and did what the step before did.
#[test]
fn what_was_not_carried_out_is_asked_for_again() {
    let candidates =
        [Candidate { id: 7, limit: MAX_DRAFT_LEN, is_fixed: false, is_read: true, positions: 0 }];
    let mut run = Run::new(MEMORY_BOUND, &[0.0]);
    (0..500).for_each(|_| run.step());
    let mut tuner = run.tuner;
    let choose = |tuner: &mut Tuner| tuner.choose(&candidates, 1, MAX_DRAFT_LEN)[0].model;
    // Of a sequence that was seen just now nothing is known, but that its like is seldom right.
    let probe = (0..500).find(|_| choose(&mut tuner) > 0);
    assert!(probe.is_some(), "a probe comes in the end");
    let mut carried_out = tuner.clone();
    tuner.ask_again();
    assert!(choose(&mut tuner) > 0, "it was not carried out");
    assert_eq!(choose(&mut carried_out), 0, "it was, and rests");
}

#[test]
fn a_plain_step_that_was_not_carried_out_is_asked_for_again() {
    let candidates =
        [Candidate { id: 0, limit: MAX_DRAFT_LEN, is_fixed: false, is_read: true, positions: 0 }];
    let mut tuner = Run::new(MEMORY_BOUND, &[1.0]).tuner;
    let choose = |tuner: &mut Tuner| tuner.choose(&candidates, 1, MAX_DRAFT_LEN)[0].model;
    assert_eq!(choose(&mut tuner), 0, "the first of its size");
    tuner.ask_again();
    assert_eq!(choose(&mut tuner), 0, "it was not carried out");
    assert!(choose(&mut tuner) > 0, "it was");
    tuner.ask_again();
    assert!(choose(&mut tuner) > 0, "nothing was to be found out");
}

#[test]
fn probes_notice_that_acceptance_has_recovered() {
    let mut run = Run::new(MEMORY_BOUND, &[0.0]);
    run.steps(400);
    assert!(run.mean_len(0, 100) < 0.3);
    run.truths[0].accepted.model = 0.95;
    run.steps(600);
    assert!(run.mean_len(0, 100) > 4.0);
}

#[test]
fn a_drafter_that_turns_dear_is_dropped() {
    let mut run = Run::new(MEMORY_BOUND, &[0.6]);
    assert!(run.steps(200).speedup() > 1.3, "{}", run.speedup());
    run.world.draft_ms = 20.0;
    run.steps(300);
    assert!(run.steps(500).speedup() > 0.97, "{}", run.speedup());
}

#[test]
fn rows_that_cost_as_much_as_tokens_are_not_drafted() {
    let compute_bound = World { target_ms: 1.0, row_ms: 1.0, draft_ms: 0.5 };
    let mut run = Run::new(compute_bound, &vec![0.7; 32]);
    run.steps(300);
    assert!(run.steps(500).speedup() >= 0.98, "{}", run.speedup());
}

#[test]
fn a_second_token_of_a_position_has_to_bring_what_its_row_costs() {
    for row_ms in [0.05, 0.3, 1.0] {
        let mut run = Run::new(World { row_ms, ..MEMORY_BOUND }, &[0.8, 0.8]);
        let world = run.world;
        let rows = [1usize, 64];
        let step_ms = rows.map(|rows| world.target_ms + row_ms * rows as f64).to_vec();
        let target = CostTable { rows: rows.to_vec(), step_ms, ..CostTable::default() };
        let step_ms = vec![world.draft_ms; 2];
        let draft = CostTable { rows: rows.to_vec(), step_ms, ..CostTable::default() };
        let pass = PassCost::Measured(&draft);
        run.tuner = Tuner::new(DraftPolicy::Adaptive, MAX_DRAFT_LEN, Some(&target), pass);
        (0..400).for_each(|_| run.step());
        let (tokens, ms) = (run.tokens, run.ms);
        (0..400).for_each(|_| run.step());
        let expected = row_ms * (run.tokens - tokens) / (run.ms - ms);
        let found = f64::from(run.tuner.min_likelihood());
        assert!((0.8..1.25).contains(&(found / expected)), "{found}, not {expected}");
    }
}

#[test]
fn drafts_that_branch_are_shorter_where_rows_are_dear() {
    let longest = |(breadth, most)| {
        let mut run = Run::new(World { row_ms: 0.8, ..MEMORY_BOUND }, &[0.9]);
        (run.breadth, run.max_tree_tokens) = (breadth, most);
        run.tuner = run.tuner.with_trees_up_to(most);
        (0..400).for_each(|_| run.step());
        run.lens[0].model
    };
    let any = usize::MAX;
    let [chain, tree, bounded] = [(1, any), (4, any), (4, MAX_DRAFT_LEN)].map(longest);
    assert!(0 < tree && tree < chain, "{chain}, and with branches {tree}");
    assert!(tree < bounded, "{tree}, and {bounded} where no more rows are taken");
}

#[test]
fn drafts_of_one_pass_are_as_long_as_their_rows_allow() {
    // A pass is as dear as half a step: one for each token would not pay.
    let dear = World { draft_ms: 5.0, ..MEMORY_BOUND };
    let longest = |at_once: bool| {
        let mut run = Run::new(dear, &[0.7]);
        run.at_once = at_once;
        if at_once {
            run.tuner = run.tuner.drafting_at_once();
        }
        (0..400).for_each(|_| run.step());
        run.lens[0].model
    };
    let [by_passes, at_once] = [false, true].map(longest);
    assert!(by_passes <= 1 && at_once >= 4, "{by_passes}, and {at_once} in one pass");
}

#[test]
fn a_model_that_stops_by_itself_may_draft_on_where_it_is_sure() {
    let lens_with = |tuner: Tuner, rates: &[f64]| {
        let mut run = Run { tuner, ..Run::new(MEMORY_BOUND, rates) };
        let mean = run.steps(300).mean_len(0, 200);
        (mean, run.tuner.pass_worth, run.tuner.min_confidence())
    };
    let tuner = || Tuner::new(DraftPolicy::Adaptive, MAX_DRAFT_LEN, None, PassCost::Unknown);
    let (whole, worth, of_plain_steps) = lens_with(tuner(), &[0.7]);
    assert!(worth.is_none() && of_plain_steps > 0.0, "{worth:?} {of_plain_steps}");
    let (cut, worth, confidence) = lens_with(tuner().stopping_early(), &[0.7]);
    assert!(cut > whole + 0.3, "{cut} after {whole}");
    assert_eq!(worth.map(|worth| worth as f32), Some(confidence));
    // Tokens come faster than by plain steps.
    assert!(confidence > 1.5 * of_plain_steps, "{confidence} after {of_plain_steps}");
    let (_, worth, _) = lens_with(tuner().stopping_early(), &[0.7, 0.7]);
    assert_eq!(worth, None, "passes are shared");
    let (_, worth, _) = lens_with(tuner().drafting_at_once().stopping_early(), &[0.7]);
    assert_eq!(worth, None, "one pass");
    let (wrong, _, _) = lens_with(tuner().stopping_early(), &[0.02]);
    assert!(wrong < 0.2, "{wrong}: a draft has to pay to begin with");
}

#[test]
fn a_fixed_policy_drafts_what_is_allowed() {
    let mut tuner = Tuner::new(DraftPolicy::Fixed, 4, None, PassCost::Unknown);
    let candidates = [(1, 9), (2, 0), (3, 2)].map(|(id, limit)| Candidate {
        id,
        limit,
        is_fixed: false,
        is_read: true,
        positions: 0,
    });
    let asked = DraftLens { lookup: 0, model: 4 };
    let wrong = Drafted { source: DraftSource::Model, tokens: 4, len: 4, accepted: 0 };
    (0..50).for_each(|_| tuner.record(1, asked, Some(wrong), false));
    let mut lens = |max_extra| -> Vec<[usize; 2]> {
        let lens = tuner.choose(&candidates, 3, max_extra);
        lens.iter().map(|lens| [lens.lookup, lens.model]).collect()
    };
    assert_eq!(lens(100), [[0, 4], [0, 0], [0, 2]]);
    assert_eq!(lens(3), [[0, 2], [0, 0], [0, 1]]);
    tuner = tuner.with_lookup();
    let both = [4, 0, 2].map(DraftLens::both);
    assert_eq!(tuner.choose(&candidates, 3, 100), both);
    let mut lookup = Tuner::new(DraftPolicy::Fixed, 4, None, PassCost::Free);
    assert_eq!(lookup.choose(&candidates, 3, 100), both.map(|lens| DraftLens { model: 0, ..lens }));
}

#[test]
fn a_sequence_that_left_is_forgotten() {
    let mut run = Run::new(MEMORY_BOUND, &[0.5, 0.5]);
    run.steps(10);
    (0..2).for_each(|id| run.tuner.forget(id));
    assert!(run.tuner.states.is_empty());
}

/// Texts that repeat themselves, of a kind that the model cannot write.
#[test]
fn a_look_up_that_is_right_is_long_beside_a_model_that_is_wrong() {
    for num in [1, 8] {
        let accepted = PerSource { lookup: 1.0, model: 0.0 };
        let mut run = Run::combined(MEMORY_BOUND, &vec![Truth { hit_rate: 0.5, accepted }; num]);
        run.steps(400);
        let lens = run.mean_lens(0, 200);
        assert!(lens.lookup > 0.9 * MAX_DRAFT_LEN as f64, "{num}: {lens:?}");
        assert!(lens.model < 0.3, "{num}: {lens:?}");
        assert!(run.steps(500).speedup() > 2.5, "{num}: {}", run.speedup());
    }
}

#[test]
fn a_model_that_is_right_is_long_and_a_look_up_that_is_wrong_is_not_asked() {
    for num in [1, 8] {
        let accepted = PerSource { lookup: 0.0, model: 1.0 };
        let mut run = Run::combined(MEMORY_BOUND, &vec![Truth { hit_rate: 0.5, accepted }; num]);
        run.steps(400);
        let lens = run.mean_lens(0, 200);
        assert!(lens.model > 0.9 * MAX_DRAFT_LEN as f64, "{num}: {lens:?}");
        assert!(lens.lookup < 0.5, "{num}: {lens:?}");
    }
}

#[test]
fn a_good_look_up_and_a_fair_model_draft_by_their_own_lengths() {
    let accepted = PerSource { lookup: 0.97, model: 0.5 };
    let mut run = Run::combined(MEMORY_BOUND, &[Truth { hit_rate: 0.3, accepted }]);
    run.steps(400);
    let lens = run.mean_lens(0, 400);
    assert!(lens.lookup > 6.0 && lens.model > 0.5 && lens.model < 4.0, "{lens:?}");
}

#[test]
fn a_model_that_does_not_pay_is_tried_again_while_look_ups_go_on() {
    let accepted = PerSource { lookup: 0.9, model: 0.0 };
    let mut run = Run::combined(MEMORY_BOUND, &[Truth { hit_rate: 0.2, accepted }]);
    run.steps(400);
    let lens = run.mean_lens(0, 400);
    assert!(lens.lookup > 4.0 && lens.model < 0.3, "{lens:?}");
    run.truths[0].accepted.model = 0.95;
    run.steps(1500);
    let lens = run.mean_lens(0, 400);
    assert!(lens.lookup > 4.0 && lens.model > 3.0, "{lens:?}");
}

#[test]
fn a_look_up_that_was_wrong_is_tried_again() {
    let accepted = PerSource { lookup: 0.0, model: 0.6 };
    let mut run = Run::combined(MEMORY_BOUND, &[Truth { hit_rate: 0.5, accepted }]);
    run.steps(400);
    assert!(run.mean_lens(0, 200).lookup < 0.5);
    run.truths[0].accepted.lookup = 0.98;
    run.steps(1500);
    let lens = run.mean_lens(0, 400);
    assert!(lens.lookup > 4.0, "{lens:?}");
}

fn truths() -> impl Strategy<Value = Truth> {
    let rate = 0.0f64..1.0;
    (rate.clone(), rate.clone(), rate).prop_map(|(hit_rate, lookup, model)| Truth {
        hit_rate,
        accepted: PerSource { lookup, model },
    })
}

fn worlds() -> impl Strategy<Value = World> {
    (0.5f64..20.0, 0.0f64..2.0, 0.01f64..10.0).prop_map(|(target_ms, row_ms, draft_ms)| World {
        target_ms,
        row_ms,
        draft_ms,
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn lengths_promise_no_less_than_plain_decoding_but_for_bounded_probes(
        world in worlds(),
        truths in prop::collection::vec(truths(), 1..6),
    ) {
        let mut run = Run::combined(world, &truths);
        let (mut probe_ms, mut total_ms) = (0.0, 0.0);
        for _ in 0..400 {
            let candidates = run.candidates();
            let mut twin = run.tuner.clone();
            let outlooks = twin.outlooks(&candidates);
            let positions = vec![0; truths.len()];
            let batch = Batch { outlooks: &outlooks, positions: &positions, num_alike: 1, base_rows: truths.len(), max_extra: 1024, breadth: 1.0, max_tree_tokens: usize::MAX, at_once: false };
            let settled = twin.settle(&candidates, batch);
            let plain = batch.throughput(&twin.costs, &vec![DraftLens::default(); truths.len()]);
            prop_assert!(batch.throughput(&twin.costs, &settled) >= 0.98 * plain);

            let costs = run.tuner.costs.clone();
            run.step();
            let more = |source| {
                let mut pairs = run.lens.iter().zip(&settled);
                pairs.any(|(lens, settled)| lens.of(source) > settled.of(source))
            };
            let (chosen, settled) = (batch.expect(&costs, &run.lens), batch.expect(&costs, &settled));
            if DraftSource::ALL.into_iter().any(more) {
                // What it costs to have as many tokens as without.
                let lost = (settled.tokens - chosen.tokens).max(0.0) / settled.tokens;
                probe_ms += chosen.ms(&costs) - settled.ms(&costs) * (1.0 - lost);
            }
            total_ms += chosen.ms(&costs);
        }
        prop_assert!(probe_ms <= 0.02 * total_ms, "{probe_ms} of {total_ms} ms");
    }

    #[test]
    fn budget_and_limits_are_held(
        limits in prop::collection::vec(0usize..10, 1..9),
        max_extra in 0usize..20,
        fixed in any::<bool>(),
        looks_up in any::<bool>(),
        rounds in 1usize..20,
    ) {
        let policy = if fixed { DraftPolicy::Fixed } else { DraftPolicy::Adaptive };
        let mut tuner = Tuner::new(policy, MAX_DRAFT_LEN, None, PassCost::Unknown);
        tuner = if looks_up { tuner.with_lookup() } else { tuner };
        let candidates: Vec<_> =
            limits.iter().zip(0..).map(|(&limit, id)| Candidate { id, limit, is_fixed: false, is_read: true, positions: 0 }).collect();
        for round in 0..rounds {
            let lens = tuner.choose(&candidates, limits.len() + round % 3, max_extra);
            prop_assert_eq!(lens.len(), limits.len());
            prop_assert!(lens.iter().map(DraftLens::longest).sum::<usize>() <= max_extra);
            prop_assert!(lens.iter().zip(&limits).all(|(lens, &limit)| lens.longest() <= limit.min(MAX_DRAFT_LEN)));
            prop_assert!(looks_up || lens.iter().all(|lens| lens.lookup == 0));
            for (&asked, id) in lens.iter().zip(0..) {
                let source = DraftSource::ALL[(round + id as usize) % 2];
                let len = *asked.of(source);
                let accepted = len / (1 + id as usize % 3);
                let draft = Drafted { source, tokens: len, len, accepted };
                tuner.record(id, asked, (len > 0).then_some(draft), false);
            }
        }
    }
}
