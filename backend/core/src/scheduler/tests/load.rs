//! The scheduler under random load: texts, pages, budgets and order.

use super::super::*;
use super::world::{World, config, prompt};
use crate::draft_len::DraftPolicy;
use crate::pages::PageKey;
use crate::scheduler::fake::{self, Fake};
use crate::sequence::{FinishReason, Limits, Shares};
use proptest::prelude::*;
use std::collections::BTreeSet;
use std::sync::Arc;

#[derive(Clone, Debug)]
enum Action {
    Add {
        family: u64,
        prompt_len: usize,
        max_tokens: usize,
        draft_len: usize,
        given: Option<(usize, usize)>,
        priority: u32,
        row: usize,
        shares: Shares,
        ends: bool,
        told: bool,
    },
    Step,
    Cancel(u64),
    Preempt(u64),
}

fn actions() -> impl Strategy<Value = Vec<Action>> {
    // Prompts of a family begin alike.
    let row = prop_oneof![3 => Just(0usize), 1 => 1usize..4];
    let numbers = (0u64..4, 1usize..50, 1usize..50, 0usize..6, 0u32..3, row);
    let given = prop::option::weighted(0.3, (1usize..8, 0usize..8));
    let told = prop::bool::weighted(0.3);
    let salted = |salt: &str| PageKey::of_salt(salt.as_bytes()).map_or(Shares::All, Shares::Behind);
    let shares = prop_oneof![
        4 => Just(Shares::All),
        2 => Just(Shares::NoOne),
        2 => prop_oneof![Just("a"), Just("b")].prop_map(salted),
    ];
    let add = (numbers, given, shares, any::<bool>(), told).prop_map(
        |(
            (family, prompt_len, max_tokens, draft_len, priority, row),
            given,
            shares,
            ends,
            told,
        )| {
            Action::Add {
                family,
                prompt_len,
                max_tokens,
                draft_len,
                given,
                priority,
                row,
                shares,
                ends,
                told,
            }
        },
    );
    let action = prop_oneof![
        4 => add,
        8 => Just(Action::Step),
        1 => (1u64..30).prop_map(Action::Cancel),
        1 => (1u64..30).prop_map(Action::Preempt),
    ];
    prop::collection::vec(action, 1..80)
}

/// What a request generates, as many tokens, up to one that is wrong.
fn given(
    sequence: &Sequence,
    blocks: Option<PromptBlocks>,
    (len, wrong_at): (usize, usize),
) -> Vec<u32> {
    let mut given: Vec<u32> = fake::expected(sequence, blocks).into_iter().take(len).collect();
    if let Some(token) = given.get_mut(wrong_at) {
        *token = (*token + 1) % fake::VOCAB_SIZE;
    }
    given
}

fn configs() -> impl Strategy<Value = SchedulerConfig> {
    let long_prompts = (1usize..20, any::<bool>());
    let sizes = (1usize..7, 1usize..50, 20usize..110, 0usize..6, 1usize..16, 1usize..12);
    let lookahead = prop_oneof![Just(0usize), 1usize..40];
    let flags = any::<[bool; 2]>();
    let tree = (1usize..4, prop_oneof![Just(usize::MAX), 1usize..12]);
    let blocks = (1usize..30, 1usize..30)
        .prop_map(|(len, least)| PromptBlocks { len, least: least.min(len) });
    let blocks = prop::option::of(blocks);
    (sizes, tree, lookahead, long_prompts, blocks, flags).prop_map(
        |(
            sizes,
            (width, max_tree_tokens),
            lookahead,
            long,
            prompt_blocks,
            [drafter_caches, guaranteed],
        )| {
            let (max_batch_size, max_num_tokens, max_seq_len, max_draft_len, num_pages, max_queue) =
                sizes;
            SchedulerConfig {
                max_batch_size,
                max_num_tokens,
                max_seq_len,
                max_draft_len,
                // Who looks ahead drafts chains.
                draft_width: if lookahead > 0 { 1 } else { width },
                max_tree_tokens,
                whole_branches: guaranteed,
                num_pages,
                max_queue,
                admission: match guaranteed {
                    true => AdmissionPolicy::GuaranteedNoEvict,
                    false => AdmissionPolicy::MaxUtilization,
                },
                drafter_caches,
                usual_draft_rows: 1 + max_draft_len,
                lookahead,
                long_prompts: LongPrompts { rows_beside_others: long.0, give_way: long.1 },
                prompt_blocks,
            }
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn every_load_is_served_in_order_within_its_budgets(
        config in configs(),
        actions in actions(),
        adaptive in any::<bool>(),
        [forced, hurried, by_head] in any::<[bool; 3]>(),
        percent in prop_oneof![Just(0u64), Just(100), 0u64..100],
    ) {
        let policy = if adaptive { DraftPolicy::Adaptive } else { DraftPolicy::Fixed };
        let blocks = config.prompt_blocks;
        let mut world = World::new(config, policy, percent);
        if by_head && world.config.drafter_caches {
            world.executor = Fake::new(percent, 7, true).with_blocks(blocks).with_head();
        }
        world.forced = forced;
        world.hurried = hurried;
        let mut cancelled = BTreeSet::new();
        let mut id = 0;
        for action in actions {
            match action {
                Action::Add {
                    family,
                    prompt_len,
                    max_tokens,
                    draft_len,
                    given,
                    priority,
                    row,
                    shares,
                    ends,
                    told,
                } => {
                    id += 1;
                    let end_tokens = if ends { vec![fake::END_TOKEN, 1, 2] } else { Vec::new() };
                    let limits =
                        Limits { priority, row, end_tokens, ..fake::limits(max_tokens, draft_len) };
                    let mut sequence = fake::sequence(id, prompt(family, prompt_len), limits);
                    sequence.shares = shares;
                    if told {
                        sequence.sampler = fake::telling();
                    }
                    sequence.given = given.map_or_else(Vec::new, |kind| self::given(&sequence, blocks, kind));
                    // Refused where it cannot fit; what is admitted must finish.
                    let _ = world.add_sequence(sequence);
                }
                Action::Step => drop(world.step()),
                Action::Cancel(id) => cancelled.extend(world.scheduler.finish(id, FinishReason::Cancelled).map(|s| s.id)),
                Action::Preempt(id) if forced => drop(world.scheduler.preempt(id)),
                Action::Preempt(_) => {}
            }
        }
        world.run();
        world.check_texts(&cancelled);
        world.check_told();
        if world.config.admission == AdmissionPolicy::GuaranteedNoEvict && !forced {
            prop_assert_eq!(world.scheduler.usage().preemptions, 0);
        }
    }

    /// Pages have the names of their own text, whatever prompt came before it and whoever shares it.
    #[test]
    fn texts_of_one_prompt_share_its_tokens_and_the_names_of_its_pages(
        adds in prop::collection::vec((0usize..3, 0usize..4, any::<bool>()), 1..40),
    ) {
        let prompts: [Arc<Vec<u32>>; 3] = [(1, 70), (1, 60), (2, 70)].map(|(id, len)| prompt(id, len).into());
        let salted = |salt: &str| PageKey::of_salt(salt.as_bytes()).map(Shares::Behind).unwrap();
        let shares = [Shares::All, Shares::NoOne, salted("a"), salted("b")];
        let mut world = World::fixed(config());
        let mut last = None;
        for (id, (idx, kind, steps)) in (1..).zip(adds) {
            let sequence = fake::sequence(id, Vec::new(), fake::limits(30, 2));
            let tokens = prompts[idx].clone();
            let prompt_len = tokens.len();
            let sequence = Sequence { tokens, prompt_len, shares: shares[kind], ..sequence };
            world.add_sequence(sequence).unwrap();
            let added = &world.scheduler.waiting[&world.scheduler.keys[&id]];
            prop_assert!(Arc::ptr_eq(&added.tokens, &prompts[idx]));
            let mut expected = Vec::new();
            match shares[kind] {
                Shares::NoOne => {}
                Shares::All => PageKey::extend(&mut expected, None, &prompts[idx], 0),
                Shares::Behind(key) => {
                    PageKey::extend(&mut expected, Some(&key), &prompts[idx], 0);
                },
            }
            prop_assert_eq!(&*added.page_keys, &expected);
            let page_keys = added.page_keys.clone();
            if let Some((before, last_keys)) = last.filter(|_| !steps) {
                prop_assert_eq!(before == (idx, kind), Arc::ptr_eq(&page_keys, &last_keys));
            }
            last = Some(((idx, kind), page_keys));
            if steps {
                world.step();
            }
        }
        world.run();
        world.check_texts(&BTreeSet::new());
        prop_assert_eq!(&*prompts[0], &prompt(1, 70), "what is generated is nobody else's");
    }

    /// Older requests are not overtaken for ever, however many come after them.
    #[test]
    fn a_steady_stream_starves_no_one(
        num_pages in 6usize..12,
        max_num_tokens in 8usize..40,
        draft_len in 0usize..5,
    ) {
        let mut world = World::fixed(SchedulerConfig { num_pages, max_num_tokens, ..config() });
        world.add(1, 40, fake::limits(50, draft_len)).unwrap();
        for id in 2..80 {
            let _ = world.add(id, 1 + (id as usize * 7) % 30, fake::limits(10, draft_len));
            world.step();
        }
        // A first sequence is never set back: 40 rows in steps of at least 8, then a token a step.
        prop_assert!(world.finished.contains_key(&1));
        prop_assert_eq!(world.finished[&1].counters.preemptions, 0);
        world.run();
        world.check_texts(&BTreeSet::new());
    }
}
