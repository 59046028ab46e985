//! Where the workers of a pool sit, and what follows from it: who wakes whom, and who takes whose tasks. Pure.

use crate::machine::Core;
use std::ops::Range;

/// Workers that one worker wakes and waits for next to it; more would take as long as one level more.
const FANOUT: usize = 8;
/// Workers of its own cache, of the rest of its node and of other nodes whose tasks a worker takes. To look at the tasks
/// of another takes a transfer between caches: on a large machine nobody looks at all of them.
const VICTIMS: [usize; 3] = [15, 8, 7];

/// A worker's place.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Seat {
    /// The memory that is near.
    pub(super) node: usize,
    /// The last cache.
    pub(super) cache: usize,
    /// Index of the physical core.
    pub(super) core: usize,
}

/// The places of all workers, by node, cache and core: neighbours in number are neighbours on the machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Seats(Vec<Seat>);

impl Seats {
    /// Workers of whom nothing is known but that they are near each other.
    pub(super) fn together(threads: usize) -> Self {
        Self((0..threads).map(|core| Seat { node: 0, cache: 0, core }).collect())
    }

    /// Places for `threads` workers, where `taken` workers of others sit on each core: on the cores that are the least
    /// taken, and among those on each node and cache the same share of its cores. So pools that share weights have the
    /// same part of them near.
    pub(super) fn choose(cores: &[Core], taken: &[usize], threads: usize) -> Self {
        let count = |of: &dyn Fn(&Core) -> bool| cores.iter().filter(|core| of(core)).count();
        let node_cores: Vec<usize> =
            cores.iter().map(|c| count(&|other| other.node == c.node)).collect();
        let is_near = |c: &Core, other: &Core| other.cache_id() == c.cache_id();
        let cache_cores: Vec<usize> =
            cores.iter().map(|c| count(&|other| is_near(c, other))).collect();
        let mut sat = vec![0; cores.len()];
        for _ in 0..threads {
            let sat_where = |of: &dyn Fn(&Core) -> bool| -> usize {
                cores.iter().zip(&sat).filter(|(core, _)| of(core)).map(|(_, sat)| sat).sum()
            };
            // Shares are compared as fractions with the same denominator.
            let share = |part: usize, whole: usize| part * cores.len() * cores.len() / whole;
            let cost = |&idx: &usize| {
                let core = &cores[idx];
                let node = sat_where(&|other| other.node == core.node);
                let cache = sat_where(&|other| is_near(core, other));
                let shares = (share(node, node_cores[idx]), share(cache, cache_cores[idx]));
                (taken[idx] + sat[idx], shares, idx)
            };
            let best = (0..cores.len()).min_by_key(cost).expect("there is a core");
            sat[best] += 1;
        }
        let seat = |(core, &Core { node, cache, .. }): (usize, &Core)| Seat { node, cache, core };
        let seats = cores.iter().enumerate().map(seat).zip(sat);
        let mut seats: Vec<Seat> =
            seats.flat_map(|(seat, count)| std::iter::repeat_n(seat, count)).collect();
        seats.sort();
        Self(seats)
    }

    /// Workers.
    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    /// The places, in the order of the workers.
    pub(super) fn iter(&self) -> impl Iterator<Item = &Seat> {
        self.0.iter()
    }

    /// The nodes that workers sit at, each once.
    #[cfg(test)]
    pub(super) fn nodes(&self) -> Vec<usize> {
        let mut nodes: Vec<usize> = self.0.iter().map(|seat| seat.node).collect();
        nodes.dedup();
        nodes
    }

    /// Who wakes a worker and waits for it: a tree below worker 0, by node, then by cache, then in blocks.
    pub(super) fn parents(&self) -> Vec<usize> {
        let mut parents = vec![0; self.len()];
        for node in ranges(&self.0, |seat| seat.node) {
            for cache in ranges(&self.0[node.clone()], |seat| seat.cache) {
                let cache = node.start + cache.start..node.start + cache.end;
                for first in cache.clone().step_by(FANOUT) {
                    parents[first..cache.end.min(first + FANOUT)].fill(first);
                    parents[first] = cache.start;
                }
                parents[cache.start] = node.start;
            }
            parents[node.start] = 0;
        }
        parents
    }

    /// Whose tasks a worker takes when it has none left, the nearest first.
    pub(super) fn victims(&self, worker: usize) -> Vec<usize> {
        let own = self.0[worker];
        let others = || (worker + 1..self.len()).chain(0..worker);
        let distance = |other: usize| {
            let seat = self.0[other];
            if seat.node != own.node { 2 } else { usize::from(seat.cache != own.cache) }
        };
        let mut victims = Vec::new();
        for (level, most) in VICTIMS.into_iter().enumerate() {
            let there: Vec<usize> = others().filter(|&other| distance(other) == level).collect();
            // Evenly spread, so that each worker is somebody's victim.
            let step = there.len().div_ceil(most).max(1);
            victims.extend(there.into_iter().step_by(step));
        }
        victims
    }
}

/// Runs of equal keys.
fn ranges(seats: &[Seat], key: impl Fn(&Seat) -> usize) -> Vec<Range<usize>> {
    let mut ranges: Vec<Range<usize>> = Vec::new();
    for (idx, seat) in seats.iter().enumerate() {
        match ranges.last_mut() {
            Some(last) if key(&seats[last.start]) == key(seat) => last.end = idx + 1,
            _ => ranges.push(idx..idx + 1),
        }
    }
    ranges
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Cores spread evenly over nodes and caches.
    fn cores(nodes: usize, a_node: usize, a_cache: usize) -> Vec<Core> {
        let core =
            |idx| Core { cpus: vec![idx], node: idx / a_node, cache: idx / a_cache * a_cache };
        (0..nodes * a_node).map(core).collect()
    }

    fn all(cores: &[Core]) -> Seats {
        Seats::choose(cores, &vec![0; cores.len()], cores.len())
    }

    fn by_node(seats: &Seats) -> Vec<usize> {
        let count = |node| seats.iter().filter(|seat| seat.node == node).count();
        seats.nodes().into_iter().map(count).collect()
    }

    fn depth(parents: &[usize], mut worker: usize) -> usize {
        let mut depth = 0;
        while worker != 0 {
            worker = parents[worker];
            depth += 1;
        }
        depth
    }

    fn num_children(parents: &[usize], worker: usize) -> usize {
        (1..parents.len()).filter(|&child| parents[child] == worker).count()
    }

    #[test]
    fn two_workers_of_one_node_are_flat() {
        let seats = all(&cores(1, 2, 2));
        assert_eq!(seats.parents(), [0, 0]);
        assert_eq!((seats.victims(0), seats.victims(1)), (vec![1], vec![0]));
        assert_eq!(seats, Seats::together(2));
    }

    #[test]
    fn two_nodes_of_sixty_four_cores() {
        let seats = all(&cores(2, 64, 8));
        assert_eq!(by_node(&seats), [64, 64]);
        let parents = seats.parents();
        assert_eq!(
            (parents[1], parents[8], parents[64], parents[72], parents[73]),
            (0, 0, 0, 64, 72)
        );
        assert_eq!((0..128).map(|worker| depth(&parents, worker)).max(), Some(3));
        // Seven of its cache, seven caches of its node, and the other node.
        assert_eq!(num_children(&parents, 0), 7 + 7 + 1);
        let victims = seats.victims(66);
        assert_eq!(victims[..7], [67, 68, 69, 70, 71, 64, 65]);
        assert!(victims[7..14].iter().all(|victim| (72..128).contains(victim)));
        assert!(victims[15..].iter().all(|&victim| victim < 64));
    }

    #[test]
    fn eight_nodes_of_sixteen_cores() {
        let cores = cores(8, 16, 8);
        let seats = all(&cores);
        assert_eq!(by_node(&seats), [16; 8]);
        assert_eq!((0..128).map(|worker| depth(&seats.parents(), worker)).max(), Some(3));
        // Fewer threads than cores sit on all nodes alike, and so do those of the next pool, on other cores.
        let first = Seats::choose(&cores, &[0; 128], 24);
        assert_eq!(by_node(&first), [3; 8]);
        let mut taken = vec![0; 128];
        first.iter().for_each(|seat| taken[seat.core] += 1);
        let second = Seats::choose(&cores, &taken, 104);
        assert_eq!(by_node(&second), [13; 8]);
        assert!(second.iter().all(|seat| taken[seat.core] == 0));
    }

    #[test]
    fn many_cores_behind_one_cache_are_waited_for_in_blocks() {
        let parents = all(&cores(1, 60, 60)).parents();
        assert_eq!((parents[7], parents[8], parents[15], parents[59]), (0, 0, 8, 56));
        assert_eq!(num_children(&parents, 0), 7 + 7);
    }

    #[test]
    fn more_threads_than_cores_share_them_evenly() {
        let seats = Seats::choose(&cores(2, 2, 2), &[0; 4], 10);
        let on = |core| seats.iter().filter(|seat| seat.core == core).count();
        assert_eq!(seats.len(), 10);
        assert!((0..4).all(|core| (2..=3).contains(&on(core))));
    }

    proptest! {
        #[test]
        fn seats_of_any_machine_make_a_tree_and_know_their_neighbours(
            // Cores of each cache of each node: odd masks.
            machine in prop::collection::vec(prop::collection::vec(1usize..20, 1..5), 1..9),
            threads in 1usize..200,
        ) {
            let mut cores = Vec::new();
            for (node, caches) in machine.iter().enumerate() {
                for &num in caches {
                    let cache = cores.len();
                    cores.extend((0..num).map(|i| Core { cpus: vec![cache + i], node, cache }));
                }
            }
            let seats = Seats::choose(&cores, &vec![0; cores.len()], threads);
            prop_assert_eq!(seats.len(), threads);
            let seat: Vec<Seat> = seats.iter().copied().collect();
            prop_assert!(seat.is_sorted());
            let on = |core: usize| seat.iter().filter(|seat| seat.core == core).count();
            let counts: Vec<usize> = (0..cores.len()).map(on).collect();
            prop_assert!(counts.iter().max().unwrap() - counts.iter().min().unwrap() <= 1);

            let parents = seats.parents();
            for worker in 1..threads {
                let parent = parents[worker];
                prop_assert!(parent < worker, "worker {} below {}", worker, parent);
                prop_assert!(depth(&parents, worker) <= 4);
                prop_assert!(num_children(&parents, worker) <= 8 + 8 + 8 + 8);
            }
            // Only one worker of a node, and of a cache, is woken from outside of it.
            for node in seats.nodes() {
                let from_outside = (1..threads)
                    .filter(|&w| seat[w].node == node && seat[parents[w]].node != node)
                    .count();
                prop_assert_eq!(from_outside, usize::from(seat[0].node != node));
            }

            for worker in 0..threads {
                let victims = seats.victims(worker);
                let distance = |victim: &usize| {
                    let (a, b) = (seat[worker], seat[*victim]);
                    (a.node != b.node, a.cache != b.cache)
                };
                prop_assert!(victims.is_sorted_by_key(distance));
                prop_assert!(victims.len() <= VICTIMS.iter().sum());
                let mut unique = victims.clone();
                unique.sort_unstable();
                unique.dedup();
                prop_assert_eq!(unique.len(), victims.len());
                prop_assert!(!victims.contains(&worker));
                if threads <= 16 && machine.len() == 1 && machine[0].len() == 1 {
                    prop_assert_eq!(victims.len(), threads - 1);
                }
            }
        }
    }
}
