//! Draft lengths against naive searches and sums.

use super::super::cost::{PassCost, StepShape};
use super::*;
use crate::draft_source::PerSource;
use crate::engine::CostTable;
use proptest::prelude::*;

/// Every combination of so many lengths of each sequence.
fn combinations(of_each: impl Iterator<Item = Vec<DraftLens>>) -> Vec<Vec<DraftLens>> {
    of_each.fold(vec![Vec::new()], |all, own| {
        let longer = |lens: &Vec<DraftLens>| -> Vec<Vec<DraftLens>> {
            own.iter().map(|&own| [lens.as_slice(), &[own]].concat()).collect()
        };
        all.iter().flat_map(longer).collect()
    })
}

/// Every combination of draft lengths.
fn naive_best(batch: &Batch<'_>, costs: &Costs) -> f64 {
    let of_each = batch.outlooks.iter().map(|outlook| {
        let PerSource { lookup, model } = &outlook.gains;
        let lens = |lookup| (0..=model.len()).map(move |model| DraftLens { lookup, model });
        (0..=lookup.len()).flat_map(lens).collect()
    });
    let all = combinations(of_each);
    let fitting = all.iter().filter(|lens| batch.fits(lens));
    fitting.map(|lens| batch.throughput(costs, lens)).fold(0.0, f64::max)
}

/// Who hits and who misses, case by case: expected tokens, and expected milliseconds.
fn naive_expectation(batch: &Batch<'_>, costs: &Costs, lens: &[DraftLens]) -> [f64; 2] {
    let mut sums = [0.0; 2];
    for case in 0..1usize << lens.len() {
        let (mut chance, mut tokens) = (1.0, 0.0);
        let mut shape = StepShape { rows: batch.base_rows, ..StepShape::default() };
        let (mut others, mut other_positions) = (0.0, 0.0);
        for (idx, (lens, outlook)) in lens.iter().zip(batch.outlooks).enumerate() {
            let is_hit = case >> idx & 1 == 1;
            let hit_rate = if lens.lookup > 0 { outlook.hit_rate } else { 0.0 };
            chance *= if is_hit { hit_rate } else { 1.0 - hit_rate };
            let source = if is_hit { DraftSource::Lookup } else { DraftSource::Model };
            let len = *lens.of(source);
            tokens += 1.0 + outlook.gains.of(source)[..len].iter().sum::<f64>();
            // Several tokens of each position are drafted by a model that branches.
            let breadth = if is_hit { 1.0 } else { batch.breadth };
            others += (breadth - 1.0) * len as f64;
            other_positions += (breadth - 1.0) * (len * batch.positions[idx]) as f64;
            shape.rows += len;
            shape.positions += (1 + len) * batch.positions[idx];
            if !is_hit && len > 0 {
                shape.drafting += 1;
                shape.draft_positions += batch.positions[idx];
                shape.draft_passes = shape.draft_passes.max(len);
            }
        }
        sums[0] += chance * tokens;
        let row_ms = costs.target_ms(batch.base_rows + 1) - costs.target_ms(batch.base_rows);
        let others_ms = others * row_ms + other_positions * costs.target_position_ms();
        sums[1] += chance * (costs.step_ms(shape) + others_ms);
    }
    sums
}

/// The longest draft that may be asked for.
fn longest(outlook: &Outlook) -> usize {
    outlook.gains.lookup.len().max(outlook.gains.model.len())
}

fn gains() -> impl Strategy<Value = Vec<f64>> {
    prop::collection::vec(0.01f64..1.0, 0..5).prop_map(|rates| {
        let product = |gain: &mut f64, rate: f64| {
            *gain *= rate;
            Some(*gain)
        };
        rates.into_iter().scan(1.0, product).collect()
    })
}

fn outlook() -> impl Strategy<Value = Outlook> {
    (0.01f64..0.99, gains(), gains()).prop_map(|(hit_rate, lookup, model)| Outlook {
        hit_rate,
        gains: PerSource { lookup, model },
    })
}

fn model_alone() -> impl Strategy<Value = Outlook> {
    let of = |model| Outlook { hit_rate: 0.2, gains: PerSource { lookup: Vec::new(), model } };
    gains().prop_map(of)
}

fn lookup_alone() -> impl Strategy<Value = Outlook> {
    let of = |lookup| Outlook { hit_rate: 1.0, gains: PerSource { lookup, model: Vec::new() } };
    gains().prop_map(of)
}

/// One drafter for all sequences.
fn alone() -> impl Strategy<Value = Vec<Outlook>> {
    prop_oneof![
        prop::collection::vec(model_alone(), 1..4),
        prop::collection::vec(lookup_alone(), 1..4),
    ]
}

proptest! {
    #[test]
    fn the_best_is_found_for_one_drafter(
        outlooks in alone(),
        prefill in 0usize..20,
        max_extra in 0usize..12,
        step_ms in (1.0f64..2.0, 2.0f64..3.0, 3.0f64..9.0),
        draft_ms in 0.01f64..1.5,
        position_ns in 0.0f64..500.0,
    ) {
        let target = CostTable { rows: vec![1, 4, 12], step_ms: vec![step_ms.0, step_ms.1, step_ms.2], position_ns, ..CostTable::default() };
        // A drafter pass must cost the same for any number of sequences here: how many draft
        // is not told by the longest draft and the sum, and `best` takes the ones of most gain.
        // And every sequence has as much in the cache.
        let draft = CostTable { rows: vec![1, 9], step_ms: vec![draft_ms, draft_ms], ..CostTable::default() };
        let costs = Costs::new(Some(&target), PassCost::Measured(&draft));
        let positions = vec![2000; outlooks.len()];
        let base_rows = outlooks.len() + prefill;
        let batch = Batch { outlooks: &outlooks, positions: &positions, num_alike: 1, base_rows, max_extra, breadth: 1.0, max_tree_tokens: usize::MAX, at_once: false };
        let lens = batch.best(&costs);
        prop_assert!(batch.fits(&lens));
        for source in DraftSource::ALL {
            let mut pairs = lens.iter().zip(&outlooks);
            prop_assert!(pairs.all(|(lens, of)| *lens.of(source) <= of.gains.of(source).len()));
        }
        let (found, best) = (batch.throughput(&costs, &lens), naive_best(&batch, &costs));
        prop_assert!(found >= best * (1.0 - 1e-12), "{found} of {best} with {lens:?}");
    }

    #[test]
    fn two_drafters_are_the_best_for_one_sequence_and_never_worse_than_one(
        outlooks in prop::collection::vec(outlook(), 1..3),
        max_extra in 0usize..12,
        row_ms in 0.0f64..0.5,
        draft_ms in 0.01f64..1.5,
    ) {
        let step_ms = vec![2.0, 2.0 + 63.0 * row_ms];
        let target = CostTable { rows: vec![1, 64], step_ms, ..CostTable::default() };
        let draft = CostTable { rows: vec![1, 9], step_ms: vec![draft_ms, draft_ms], ..CostTable::default() };
        let costs = Costs::new(Some(&target), PassCost::Measured(&draft));
        let positions = vec![0; outlooks.len()];
        let batch = Batch { outlooks: &outlooks, positions: &positions, num_alike: 1, base_rows: outlooks.len(), max_extra, breadth: 1.0, max_tree_tokens: usize::MAX, at_once: false };
        let lens = batch.best(&costs);
        prop_assert!(batch.fits(&lens));
        let found = batch.throughput(&costs, &lens);
        for source in DraftSource::ALL {
            let without = |of: &Outlook| {
                let mut of = of.clone();
                of.gains.of_mut(source).clear();
                of
            };
            let outlooks: Vec<Outlook> = outlooks.iter().map(without).collect();
            let alone = Batch { outlooks: &outlooks, ..batch };
            let lens = alone.best(&costs);
            prop_assert!(found >= alone.throughput(&costs, &lens) * (1.0 - 1e-12), "without {source:?}");
        }
        let best = naive_best(&batch, &costs);
        // Short rows go to the likeliest tokens, however seldom their source drafts.
        let is_short = batch.outlooks.iter().map(longest).sum::<usize>() > max_extra;
        let is_exact = outlooks.len() == 1 && !is_short;
        prop_assert!(!is_exact || found >= 0.999 * best, "{found} of {best} with {lens:?}");
    }

    /// Times that grow evenly with rows, and a longest draft that is the same for all.
    #[test]
    fn expectations_are_those_of_all_hits_and_misses(
        outlooks in prop::collection::vec(outlook(), 1..4),
        asked in prop::collection::vec((0usize..5, any::<bool>()), 4),
        row_ms in 0.0f64..0.5,
    ) {
        let step_ms = vec![2.0, 2.0 + 63.0 * row_ms];
        let target = CostTable { rows: vec![1, 64], step_ms, position_ns: 300.0, ..CostTable::default() };
        let draft = CostTable { rows: vec![1, 9], step_ms: vec![0.4, 0.4], ..CostTable::default() };
        let costs = Costs::new(Some(&target), PassCost::Measured(&draft));
        let positions: Vec<usize> = (1..=outlooks.len()).map(|idx| 700 * idx).collect();
        let lens: Vec<DraftLens> = outlooks.iter().zip(&asked).map(|(outlook, &(lookup, drafts))| DraftLens {
            lookup: lookup.min(outlook.gains.lookup.len()),
            model: usize::from(drafts).min(outlook.gains.model.len()),
        }).collect();
        let batch = Batch { outlooks: &outlooks, positions: &positions, num_alike: 1, base_rows: outlooks.len(), max_extra: 99, breadth: 1.0, max_tree_tokens: usize::MAX, at_once: false };
        let expected = batch.expect(&costs, &lens);
        let [tokens, ms] = naive_expectation(&batch, &costs, &lens);
        prop_assert!((expected.tokens - tokens).abs() < 1e-9, "{} or {tokens}", expected.tokens);
        prop_assert!((expected.ms(&costs) - ms).abs() < 1e-9, "{} or {ms}", expected.ms(&costs));
    }

    #[test]
    fn one_that_stands_for_many_promises_what_they_do(
        outlook in outlook(),
        num in 1usize..6,
        lookup in 0usize..5,
        model in 0usize..5,
        max_extra in 0usize..20,
    ) {
        let target = CostTable { rows: vec![1, 8, 64], step_ms: vec![2.0, 3.0, 20.0], position_ns: 300.0, ..CostTable::default() };
        let draft = CostTable { rows: vec![1, 9], step_ms: vec![0.4, 0.9], position_ns: 40.0, ..CostTable::default() };
        let costs = Costs::new(Some(&target), PassCost::Measured(&draft));
        let own = DraftLens { lookup: lookup.min(outlook.gains.lookup.len()), model: model.min(outlook.gains.model.len()) };
        let (outlooks, positions) = (vec![outlook.clone(); num], vec![700; num]);
        let each = Batch { outlooks: &outlooks, positions: &positions, num_alike: 1, base_rows: num, max_extra, breadth: 1.0, max_tree_tokens: usize::MAX, at_once: false };
        let one = Batch { outlooks: &outlooks[..1], positions: &[700], num_alike: num, ..each };
        prop_assert_eq!(one.fits(&[own]), each.fits(&vec![own; num]));
        let (all, few) = (each.throughput(&costs, &vec![own; num]), one.throughput(&costs, &[own]));
        prop_assert!((all / few - 1.0).abs() < 1e-9, "{all} or {few}");
        let best = one.best(&costs);
        prop_assert!(one.fits(&best));
        let plain = one.throughput(&costs, &[DraftLens::default()]);
        prop_assert!(one.throughput(&costs, &best) >= plain * (1.0 - 1e-12));
    }
}

#[test]
fn the_order_in_which_positions_are_added_does_not_count() {
    let gains = PerSource { lookup: vec![0.9, 0.8], model: vec![0.7, 0.4] };
    let outlooks = [Outlook { hit_rate: 0.3, gains }];
    let batch = Batch {
        outlooks: &outlooks,
        positions: &[100],
        num_alike: 1,
        base_rows: 1,
        max_extra: 9,
        breadth: 1.0,
        max_tree_tokens: usize::MAX,
        at_once: false,
    };
    let costs = Costs::new(None, PassCost::Unknown);
    let last = batch.expect(&costs, &[DraftLens::both(2)]);
    let mut first = Expected::new(batch, 2);
    for source in [DraftSource::Model, DraftSource::Lookup] {
        (0..2).for_each(|_| first.add(&costs, 0, source));
    }
    assert_eq!(first.num_extra, 2);
    assert!((first.tokens - last.tokens).abs() < 1e-12);
    assert!((first.ms(&costs) - last.ms(&costs)).abs() < 1e-12);
}

/// Eight sequences whose drafts are right so often, beside so many rows of a prompt, where each row takes as long.
fn beside_a_prompt(gain: f64, prompt_rows: usize, [first_ms, row_ms]: [f64; 2]) -> usize {
    let table = CostTable {
        rows: vec![1, 512],
        step_ms: vec![first_ms, first_ms + 511.0 * row_ms],
        ..CostTable::default()
    };
    let costs = Costs::new(Some(&table), PassCost::Free);
    let gains = PerSource { lookup: vec![gain], model: Vec::new() };
    let outlooks = vec![Outlook { hit_rate: 1.0, gains }; 8];
    let batch = Batch {
        outlooks: &outlooks,
        positions: &[0; 8],
        num_alike: 1,
        base_rows: 8 + prompt_rows,
        max_extra: 64,
        breadth: 1.0,
        max_tree_tokens: usize::MAX,
        at_once: false,
    };
    batch.best(&costs).iter().map(DraftLens::longest).sum()
}

#[test]
fn a_prompt_beside_them_makes_no_draft_cheaper() {
    // A row takes nearly as long as a token of eight in a plain step: only what is nearly sure pays.
    let by_the_row = [1.0, 0.8];
    for prompt_rows in [0, 200] {
        assert_eq!(beside_a_prompt(0.4, prompt_rows, by_the_row), 0, "{prompt_rows}");
        assert_eq!(beside_a_prompt(0.99, prompt_rows, by_the_row), 8, "{prompt_rows}");
    }
}

#[test]
fn drafts_are_as_good_beside_a_prompt_where_rows_are_cheap() {
    for prompt_rows in [0, 200] {
        assert_eq!(beside_a_prompt(0.4, prompt_rows, [10.0, 0.05]), 8, "{prompt_rows}");
    }
}

#[test]
fn short_rows_are_shared_evenly() {
    assert_eq!(Batch::longest(&[4, 0, 4, 2], 5), [2, 0, 2, 1]);
    assert_eq!(Batch::longest(&[4, 0, 4, 2], 99), [4, 0, 4, 2]);
    assert_eq!(Batch::longest(&[], 5), Vec::<usize>::new());
}
