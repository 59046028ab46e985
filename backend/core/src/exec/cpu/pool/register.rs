//! The pools of this process, and on which processors each of their threads runs. Pools that compute at the same time on
//! the same cores wait for each other at the end of every region, so they get different cores, and each thread its own;
//! where they cannot, no thread is bound to a core. Threads stay near the memory of their seats in any case.

use super::lock;
use super::seats::Seats;
use crate::machine::{Cpus, ThreadId};
use std::marker::PhantomData;
use std::str::FromStr;
use std::sync::{Arc, Mutex};

/// Whether threads are bound to cores.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Pinning {
    /// Where there are several last caches, and the pools of the process use all cores that it may use, and none twice.
    /// Within one cache a thread loses nothing by moving, and has to where another process takes its core; cores that
    /// are left over to others stay the system's to share out.
    #[default]
    Auto,
    /// Where no core is used twice.
    On,
    /// Never, nor to a node.
    Off,
}

impl FromStr for Pinning {
    /// What is expected.
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "auto" => Ok(Self::Auto),
            "on" => Ok(Self::On),
            "off" => Ok(Self::Off),
            _ => Err("auto, on or off"),
        }
    }
}

static POOLS: Mutex<Vec<Entry>> = Mutex::new(Vec::new());

/// Processors that the calling thread may use, or might if no pool had bound it.
pub(super) fn cpus_of_caller() -> Cpus {
    let thread = ThreadId::current();
    let pools = lock(&POOLS);
    let members = pools.iter().flat_map(|pool| pool.threads.iter().flatten());
    let before = members.into_iter().find(|member| member.thread == thread);
    Cpus::of_allowed(before.map(|member| member.before.clone()).or_else(|| thread.cpus()))
}

/// A pool's place among the others, until it is dropped.
pub(super) struct Claim {
    id: u64,
}

/// A thread that is a worker of a pool, and runs where that is to run, until this is dropped.
pub struct Pinned {
    claim: Arc<Claim>,
    worker: usize,
    /// Of the thread that made it.
    _not_send: PhantomData<*const ()>,
}

struct Entry {
    id: u64,
    team: Placed,
    /// By worker.
    threads: Vec<Option<Member>>,
}

/// What decides where the threads of a pool run.
struct Placed {
    cpus: Cpus,
    seats: Seats,
    pinning: Pinning,
}

/// A thread of a pool.
struct Member {
    thread: ThreadId,
    /// Where it runs when it is not told where.
    before: Vec<usize>,
    /// Where it was told to run.
    bound: Option<Vec<usize>>,
}

impl Claim {
    /// Enters a pool of so many threads.
    pub(super) fn new(cpus: Cpus, threads: usize, pinning: Pinning) -> (Self, Seats) {
        let mut pools = lock(&POOLS);
        let taken: Vec<usize> = cpus.cores.iter().map(|core| taken(&pools, core.cpus[0])).collect();
        let seats = Seats::choose(&cpus.cores, &taken, threads);
        let id = pools.last().map_or(0, |last| last.id + 1);
        let team = Placed { cpus, seats: seats.clone(), pinning };
        pools.push(Entry { id, team, threads: (0..threads).map(|_| None).collect() });
        apply(&mut pools);
        (Self { id }, seats)
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        let mut pools = lock(&POOLS);
        pools.retain(|pool| pool.id != self.id);
        apply(&mut pools);
    }
}

impl Pinned {
    /// Takes the calling thread for a worker; `None` where another thread is that worker, or it cannot be bound.
    pub(super) fn enter(claim: &Arc<Claim>, worker: usize) -> Option<Self> {
        let thread = ThreadId::current();
        let here = thread.cpus()?;
        let mut pools = lock(&POOLS);
        let pool = pools.iter_mut().find(|pool| pool.id == claim.id)?;
        let seat = pool.threads.get_mut(worker).filter(|seat| seat.is_none())?;
        *seat = Some(match worker {
            0 => Member { thread, before: here, bound: None },
            // Where whoever started it was bound is none of its business.
            _ => Member { thread, before: pool.team.cpus.all(), bound: Some(here) },
        });
        apply(&mut pools);
        Some(Self { claim: Arc::clone(claim), worker, _not_send: PhantomData })
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        let mut pools = lock(&POOLS);
        let pool = pools.iter_mut().find(|pool| pool.id == self.claim.id);
        if let Some(member) = pool.and_then(|pool| pool.threads[self.worker].take())
            && member.bound.is_some()
        {
            // What cannot be undone is no worse than it was.
            let _ = member.thread.bind(&member.before);
        }
    }
}

/// Workers of all pools that sit on the core with this processor.
fn taken(pools: &[Entry], cpu: usize) -> usize {
    let sits_there = |pool: &Entry| {
        let cores = &pool.team.cpus.cores;
        pool.team.seats.iter().filter(|seat| cores[seat.core].cpus.contains(&cpu)).count()
    };
    pools.iter().map(sits_there).sum()
}

/// Has every thread run where it is to run, as far as the system allows.
fn apply(pools: &mut [Entry]) {
    let masks = masks(&pools.iter().map(|pool| &pool.team).collect::<Vec<_>>());
    for (pool, masks) in pools.iter_mut().zip(masks) {
        for (member, mask) in pool.threads.iter_mut().zip(masks) {
            let Some(member) = member.as_mut().filter(|member| member.bound != mask) else {
                continue;
            };
            if member.thread.bind(mask.as_ref().unwrap_or(&member.before)) {
                member.bound = mask;
            }
        }
    }
}

/// The processors of every worker of every pool; `None` leaves it where it was.
fn masks(pools: &[&Placed]) -> Vec<Vec<Option<Vec<usize>>>> {
    let seats = || pools.iter().flat_map(|pool| pool.seats.iter().map(|seat| pool.home(seat.core)));
    let mut used: Vec<usize> = seats().flatten().copied().collect();
    let num_used = used.len();
    used.sort_unstable();
    used.dedup();
    let is_exclusive = used.len() == num_used;
    let masks = |pool: &&Placed| {
        let is_free = |cpu: &usize| used.binary_search(cpu).is_err();
        let cores = &pool.cpus.cores;
        let num_free = cores.iter().filter(|core| core.cpus.iter().all(is_free)).count();
        let has_time = pool.cpus.quota.is_none_or(|quota| quota >= pool.cpus.cores.len());
        let is_pinned = match pool.pinning {
            // Cores that are left over because they cannot be shared out evenly do not count.
            Pinning::Auto => {
                let has_far = cores.iter().any(|core| core.cache_id() != cores[0].cache_id());
                has_far && is_exclusive && has_time && num_free < pools.len()
            }
            Pinning::On => is_exclusive,
            Pinning::Off => return vec![None; pool.seats.len()],
        };
        let mask = |core: usize| match is_pinned {
            true => Some(pool.home(core).to_vec()),
            false => pool.near(core),
        };
        pool.seats.iter().map(|seat| mask(seat.core)).collect()
    };
    pools.iter().map(masks).collect()
}

impl Placed {
    /// Processors of a core.
    fn home(&self, core: usize) -> &[usize] {
        &self.cpus.cores[core].cpus
    }

    /// Processors near the same memory as a core, where not all are.
    fn near(&self, core: usize) -> Option<Vec<usize>> {
        let cores = &self.cpus.cores;
        let node = cores[core].node;
        let mut near: Vec<usize> = cores
            .iter()
            .filter(|other| other.node == node)
            .flat_map(|other| other.cpus.iter().copied())
            .collect();
        near.sort_unstable();
        cores.iter().any(|other| other.node != node).then_some(near)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::machine::Core;

    /// Cores of one hardware thread each, spread evenly over nodes.
    fn cpus(nodes: usize, a_node: usize) -> Cpus {
        let core = |idx| Core { cpus: vec![idx], node: idx / a_node, cache: idx / a_node };
        Cpus { cores: (0..nodes * a_node).map(core).collect(), quota: None }
    }

    /// Pools that came one after the other.
    fn placed(cpus: &Cpus, pools: &[(usize, Pinning)]) -> Vec<Placed> {
        let mut placed: Vec<Placed> = Vec::new();
        for &(threads, pinning) in pools {
            let mut taken = vec![0; cpus.cores.len()];
            placed.iter().flat_map(|p| p.seats.iter()).for_each(|seat| taken[seat.core] += 1);
            let seats = Seats::choose(&cpus.cores, &taken, threads);
            placed.push(Placed { cpus: cpus.clone(), seats, pinning });
        }
        placed
    }

    fn of(cpus: &Cpus, pools: &[(usize, Pinning)]) -> Vec<Vec<Option<Vec<usize>>>> {
        masks(&placed(cpus, pools).iter().collect::<Vec<_>>())
    }

    fn is_pinned(masks: &[Option<Vec<usize>>]) -> bool {
        masks.iter().all(|mask| mask.as_ref().is_some_and(|cpus| cpus.len() == 1))
    }

    const AUTO: Pinning = Pinning::Auto;

    #[test]
    fn a_pool_that_uses_all_cores_has_a_thread_on_each() {
        assert_eq!(of(&cpus(1, 2), &[(2, Pinning::On)]), [[Some(vec![0]), Some(vec![1])]]);
        let masks = &of(&cpus(8, 16), &[(128, AUTO)])[0];
        assert_eq!(*masks, (0..128).map(|cpu| Some(vec![cpu])).collect::<Vec<_>>());
    }

    #[test]
    fn threads_that_share_one_cache_may_move() {
        assert_eq!(of(&cpus(1, 2), &[(2, AUTO)]), [[None, None]]);
        // Two caches of one node.
        let mut two = cpus(1, 2);
        two.cores[1].cache = 1;
        assert_eq!(of(&two, &[(2, AUTO)]), [[Some(vec![0]), Some(vec![1])]]);
    }

    #[test]
    fn both_hardware_threads_of_a_core_are_its_own() {
        let mut two = cpus(1, 2);
        two.cores[0].cpus = vec![0, 2];
        two.cores[1].cpus = vec![1, 3];
        assert_eq!(of(&two, &[(2, Pinning::On)]), [[Some(vec![0, 2]), Some(vec![1, 3])]]);
    }

    #[test]
    fn pools_get_different_cores_and_the_same_part_of_each_node() {
        let masks = of(&cpus(2, 8), &[(8, AUTO), (8, AUTO)]);
        assert!(masks.iter().all(|masks| is_pinned(masks)));
        let mut all: Vec<usize> = masks.iter().flatten().flatten().flatten().copied().collect();
        all.sort_unstable();
        assert_eq!(all, (0..16).collect::<Vec<_>>());
        for masks in &masks {
            assert_eq!(masks.iter().flatten().flatten().filter(|&&cpu| cpu < 8).count(), 4);
        }
        // Three into sixteen leaves one over.
        assert!(of(&cpus(2, 8), &[(5, AUTO); 3]).iter().all(|masks| is_pinned(masks)));
    }

    #[test]
    fn pools_that_do_not_fit_beside_each_other_are_not_pinned() {
        let on = (4, Pinning::On);
        assert_eq!(of(&cpus(1, 4), &[on, on]), [vec![None; 4], vec![None; 4]]);
        let node = |first: usize| Some((first..first + 4).collect::<Vec<_>>());
        let masks = of(&cpus(2, 4), &[(8, AUTO), (1, AUTO)]);
        assert_eq!(masks[0][..4], [const { &None::<()> }; 4].map(|_| node(0)));
        assert_eq!((masks[0][7].clone(), masks[1][0].clone()), (node(4), node(0)));
        // Neither beside one that is not bound to anything.
        let pools = [(2, Pinning::On), (2, Pinning::Off)];
        assert_eq!(of(&cpus(1, 2), &pools), [[None, None], [None, None]]);
    }

    #[test]
    fn cores_that_are_left_to_others_are_not_chosen_against_the_system() {
        assert!(
            of(&cpus(2, 32), &[(4, AUTO)])[0]
                .iter()
                .all(|cpus| cpus.as_ref().is_some_and(|cpus| cpus.len() == 32))
        );
        assert!(is_pinned(&of(&cpus(1, 64), &[(4, Pinning::On)])[0]));
        assert_eq!(of(&cpus(1, 2), &[(2, Pinning::Off)]), [[None, None]]);
    }

    #[test]
    fn where_there_is_less_time_than_cores_nobody_is_pinned() {
        let mut four = cpus(2, 2);
        four.quota = Some(3);
        assert!(
            of(&four, &[(3, AUTO)])[0]
                .iter()
                .all(|cpus| cpus.as_ref().is_some_and(|cpus| cpus.len() == 2))
        );
        four.quota = Some(4);
        assert!(is_pinned(&of(&four, &[(4, AUTO)])[0]));
    }

    #[test]
    fn threads_that_a_bound_thread_starts_are_not_bound_with_it() {
        std::thread::spawn(|| {
            let all = Cpus::of_thread();
            let one = Cpus { cores: vec![all.cores[0].clone()], quota: None };
            let claim = Arc::new(Claim::new(one, 1, Pinning::On).0);
            let _pinned = Pinned::enter(&claim, 0);
            // Two threads on each core: they are not bound to any.
            let pool = super::super::Pool::on_machine(Some(2 * all.cores.len()), Pinning::On);
            let seen = Mutex::new(Vec::new());
            pool.run(|worker| lock(&seen).push((worker, ThreadId::current().cpus().unwrap())));
            let seen = seen.into_inner().unwrap();
            assert_eq!(seen.len(), 2 * all.cores.len());
            for (worker, cpus) in seen {
                assert!(
                    worker == 0 || cpus.len() > 1 || all.all().len() == 1,
                    "{worker}: {cpus:?}"
                );
            }
        })
        .join()
        .unwrap();
    }

    #[test]
    fn pinning_is_read_or_refused() {
        assert_eq!("auto".parse(), Ok(Pinning::Auto));
        assert_eq!("on".parse(), Ok(Pinning::On));
        assert_eq!("off".parse(), Ok(Pinning::Off));
        assert_eq!("On".parse::<Pinning>(), Err("auto, on or off"));
    }

    #[test]
    fn a_thread_runs_where_its_pool_says_and_goes_back() {
        std::thread::spawn(|| {
            let here = Cpus::of_thread();
            let own = here.cores[0].cpus.clone();
            let one = Cpus { cores: vec![here.cores[0].clone()], quota: None };
            let thread = ThreadId::current();
            let before = thread.cpus().unwrap();
            let claim = Arc::new(Claim::new(one, 1, Pinning::On).0);
            let pinned = Pinned::enter(&claim, 0).unwrap();
            assert!(Pinned::enter(&claim, 0).is_none(), "worker 0 is there");
            assert!(Pinned::enter(&claim, 1).is_none(), "there is no worker 1");
            let bound = thread.cpus().unwrap();
            // Another test may have a pool on the same core at this moment.
            assert!(bound == own || bound == before, "{bound:?}");
            assert_eq!(cpus_of_caller(), here, "what a pool binds does not count");
            drop(pinned);
            assert_eq!(thread.cpus().unwrap(), before);
            drop(Pinned::enter(&claim, 0).unwrap());
            drop(claim);
        })
        .join()
        .unwrap();
    }
}
