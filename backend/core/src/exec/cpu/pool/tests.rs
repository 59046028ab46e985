//! Regions on pools of every shape.

use super::*;
use crate::machine::Core;
use std::sync::atomic::AtomicUsize;
use std::time::Duration;
use team::SPIN;

fn message(payload: &(dyn Any + Send)) -> &str {
    payload.downcast_ref::<&str>().copied().unwrap_or("")
}

/// Pools of few threads and many, in trees of one level and of four: nodes, caches of each, cores of each.
fn shapes() -> impl Iterator<Item = Pool> {
    let shapes =
        [[1, 1, 1], [1, 1, 2], [1, 1, 3], [1, 1, 20], [2, 1, 2], [2, 2, 3], [3, 3, 1], [2, 2, 11]];
    shapes.into_iter().map(|[nodes, caches, cores]| {
        let core = |idx: usize| Core {
            cpus: vec![idx],
            node: idx / (caches * cores),
            cache: idx / cores * cores,
        };
        let machine: Vec<Core> = (0..nodes * caches * cores).map(core).collect();
        let seats = Seats::choose(&machine, &vec![0; machine.len()], machine.len());
        Pool::start(&seats, None)
    })
}

#[test]
fn every_worker_runs_once_a_region() {
    for pool in shapes() {
        for _ in 0..200 {
            let seen: Vec<_> = (0..pool.threads()).map(|_| AtomicUsize::new(0)).collect();
            pool.run(|worker| {
                seen[worker].fetch_add(1, Ordering::Relaxed);
            });
            assert!(seen.iter().all(|n| n.load(Ordering::Relaxed) == 1));
        }
    }
}

#[test]
fn every_task_runs_once() {
    for pool in shapes() {
        for num_tasks in [0, 1, 2, 3, 7, 100, 1001] {
            let seen: Vec<_> = (0..num_tasks).map(|_| AtomicUsize::new(0)).collect();
            let count = |i: usize| {
                seen[i].fetch_add(1, Ordering::Relaxed);
            };
            pool.for_each(num_tasks, count);
            pool.for_each_near(num_tasks, count);
            assert!(seen.iter().all(|n| n.load(Ordering::Relaxed) == 2));
        }
    }
}

/// What workers write in a region is seen by all of them in the next, however far they are from each other in the tree.
#[test]
fn a_region_sees_what_the_one_before_it_wrote() {
    for pool in shapes() {
        let threads = pool.threads();
        let values: Vec<_> = (0..threads).map(|_| AtomicUsize::new(0)).collect();
        for round in 0..50 {
            pool.run(|worker| values[worker].store(round * (worker + 1), Ordering::Relaxed));
            pool.run(|_| {
                let all = values.iter().enumerate();
                assert!(all.into_iter().all(|(w, v)| v.load(Ordering::Relaxed) == round * (w + 1)));
            });
        }
    }
}

#[test]
fn tasks_stay_on_the_node_whose_range_they_are_in() {
    let core = |idx: usize| Core { cpus: vec![idx], node: idx / 2, cache: idx / 2 };
    let machine: Vec<Core> = (0..4).map(core).collect();
    let seats = Seats::choose(&machine, &[0; 4], 4);
    assert_eq!(seats.nodes(), [0, 1]);
    let pool = Pool::start(&seats, None);
    let workers = Mutex::new(std::collections::HashMap::new());
    pool.run(|worker| {
        lock(&workers).insert(thread::current().id(), worker);
    });
    let workers = lock(&workers).clone();
    pool.for_each_near(100, |i| {
        let node = workers[&thread::current().id()] / 2;
        assert_eq!(node, i / 50, "task {i}");
        if i == 0 {
            // Its neighbour takes the rest of its range, and nobody from the other node does.
            thread::sleep(Duration::from_millis(20));
        }
    });
}

#[test]
fn a_slow_worker_loses_its_tasks_to_the_others() {
    let pool = Pool::new(2);
    let first = thread::current().id();
    let by_caller = AtomicUsize::new(0);
    pool.for_each(100, |_| {
        if thread::current().id() == first {
            by_caller.fetch_add(1, Ordering::Relaxed);
            thread::sleep(Duration::from_millis(30));
        }
    });
    assert!(by_caller.load(Ordering::Relaxed) < 50);
}

#[test]
fn chunks_cover_the_data_once() {
    let mut data = vec![0_u32; 1000];
    Pool::new(3).for_each_chunk(&mut data, 64, |i, chunk| {
        chunk.iter_mut().for_each(|v| *v += 1 + i as u32);
    });
    assert!(data.iter().enumerate().all(|(i, &v)| v == 1 + (i / 64) as u32));
}

#[test]
fn workers_wake_after_they_slept() {
    for pool in shapes() {
        for _ in 0..20 {
            thread::sleep(SPIN * 4);
            let count = AtomicUsize::new(0);
            pool.run(|_| {
                count.fetch_add(1, Ordering::Relaxed);
            });
            assert_eq!(count.load(Ordering::Relaxed), pool.threads());
        }
    }
}

/// Whoever is the last: those above it sleep, and are woken one by the other.
#[test]
fn all_wait_for_the_slowest_wherever_it_is() {
    for pool in shapes() {
        for slowest in 0..pool.threads() {
            let left = AtomicUsize::new(0);
            pool.run(|worker| {
                if worker == slowest {
                    thread::sleep(SPIN * 20);
                }
                left.fetch_add(1, Ordering::Relaxed);
            });
            assert_eq!(left.load(Ordering::Relaxed), pool.threads());
        }
    }
}

#[test]
fn a_panic_reaches_the_caller_and_the_pool_goes_on() {
    let pool = Pool::new(3);
    for culprit in 0..3 {
        let result = catch_unwind(AssertUnwindSafe(|| {
            pool.run(|worker| assert!(worker != culprit, "on purpose"));
        }));
        assert_eq!(message(&*result.unwrap_err()), "on purpose");
        let result = catch_unwind(AssertUnwindSafe(|| {
            pool.for_each(50, |i| assert!(i != culprit * 20, "one task"));
        }));
        assert_eq!(message(&*result.unwrap_err()), "one task");
        let count = AtomicUsize::new(0);
        pool.for_each(10, |_| {
            count.fetch_add(1, Ordering::Relaxed);
        });
        assert_eq!(count.load(Ordering::Relaxed), 10);
    }
}

#[test]
fn a_region_inside_a_region_runs_in_place() {
    let pool = Pool::new(2);
    let count = AtomicUsize::new(0);
    pool.run(|_| {
        pool.for_each(10, |_| {
            pool.run(|_| {
                count.fetch_add(1, Ordering::Relaxed);
            });
        });
    });
    assert_eq!(count.load(Ordering::Relaxed), 2 * 10 * 2);
}

#[test]
fn a_panic_leaves_no_thread_marked_as_inside() {
    let pool = Pool::new(2);
    let result = catch_unwind(AssertUnwindSafe(|| pool.run(|_| panic!("on purpose"))));
    assert!(result.is_err());
    let ids = Mutex::new(std::collections::HashSet::new());
    pool.run(|_| {
        lock(&ids).insert(thread::current().id());
    });
    assert_eq!(lock(&ids).len(), 2);
}

#[test]
fn two_threads_may_share_a_pool() {
    let pool = Pool::new(2);
    let count = AtomicUsize::new(0);
    thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                for _ in 0..200 {
                    pool.for_each(16, |_| {
                        count.fetch_add(1, Ordering::Relaxed);
                    });
                }
            });
        }
    });
    assert_eq!(count.load(Ordering::Relaxed), 2 * 200 * 16);
}
