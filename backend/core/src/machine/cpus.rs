//! The processors that this process may compute on: which of them are one physical core, which share a last cache, which
//! memory is near; and how much of their time control groups leave.

use super::affinity::ThreadId;
use super::cgroup::{Version, groups};
use super::{Files, of_system};
use std::path::Path;

/// A physical core.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Core {
    /// Its hardware threads that may be used, ascending.
    pub cpus: Vec<usize>,
    /// The memory that is near.
    pub node: usize,
    /// The last cache: the first processor of those that share it.
    pub cache: usize,
}

impl Core {
    /// Which of all last caches it has: those of different nodes are different.
    pub(crate) fn cache_id(&self) -> (usize, usize) {
        (self.node, self.cache)
    }
}

/// Processors that may be used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cpus {
    /// By node, then by cache, then by number; never none.
    pub(crate) cores: Vec<Core>,
    /// Cores' worth of time that control groups leave, rounded up; `None` is all.
    pub quota: Option<usize>,
}

impl Cpus {
    /// Of the calling thread: where it was bound to some processors, what it starts is too.
    pub fn of_thread() -> Self {
        Self::of_allowed(ThreadId::current().cpus())
    }

    /// Of a thread that may run on these processors; `None` is all that are there.
    pub(crate) fn of_allowed(allowed: Option<Vec<usize>>) -> Self {
        Self::of(&of_system, allowed)
    }

    /// Of a thread that may run on these processors of a machine with these files; `None` is all that are there.
    pub(super) fn of(files: Files<'_>, allowed: Option<Vec<usize>>) -> Self {
        let read = |path: &str| parse_list(files(Path::new(path))?.trim());
        let online = read("/sys/devices/system/cpu/online");
        let allowed = allowed.or(online).filter(|cpus| !cpus.is_empty()).unwrap_or(vec![0]);
        let nodes: Vec<(usize, Vec<usize>)> = read("/sys/devices/system/node/online")
            .into_iter()
            .flatten()
            .filter_map(|node| {
                Some((node, read(&format!("/sys/devices/system/node/node{node}/cpulist"))?))
            })
            .collect();
        let node_of = |cpu: usize| {
            let near = nodes.iter().find(|(_, cpus)| cpus.contains(&cpu));
            near.map_or(0, |(node, _)| *node)
        };
        let mut cores: Vec<Core> = Vec::new();
        for &cpu in &allowed {
            // What a kernel does not tell is taken for a core of its own.
            let siblings = read(&topology(cpu, "core_cpus_list"))
                .or_else(|| read(&topology(cpu, "thread_siblings_list")))
                .unwrap_or_else(|| vec![cpu]);
            if cores.iter().any(|core| core.cpus.contains(&cpu)) {
                continue;
            }
            let cpus: Vec<usize> = allowed
                .iter()
                .copied()
                .filter(|other| *other == cpu || siblings.contains(other))
                .collect();
            let cache = last_cache(files, cpu).and_then(|cpus| cpus.first().copied());
            cores.push(Core { cpus, node: node_of(cpu), cache: cache.unwrap_or(0) });
        }
        cores.sort_by_key(|core| (core.node, core.cache, core.cpus[0]));
        Self { cores, quota: quota(files) }
    }

    /// The processors of all cores, ascending.
    pub(crate) fn all(&self) -> Vec<usize> {
        let mut all: Vec<usize> =
            self.cores.iter().flat_map(|core| core.cpus.iter().copied()).collect();
        all.sort_unstable();
        all
    }

    /// Threads that compute the most: one a core, and no more than there is time for.
    pub fn threads(&self) -> usize {
        self.cores.len().min(self.quota.unwrap_or(usize::MAX)).max(1)
    }
}

fn topology(cpu: usize, name: &str) -> String {
    format!("/sys/devices/system/cpu/cpu{cpu}/topology/{name}")
}

/// Processors that share the cache of the highest level with one.
fn last_cache(files: Files<'_>, cpu: usize) -> Option<Vec<usize>> {
    let read = |idx: usize, name: &str| {
        let path = format!("/sys/devices/system/cpu/cpu{cpu}/cache/index{idx}/{name}");
        files(Path::new(&path))
    };
    let levels =
        (0..).map_while(|idx| Some((read(idx, "level")?.trim().parse::<usize>().ok()?, idx)));
    let (_, idx) = levels.max()?;
    parse_list(read(idx, "shared_cpu_list")?.trim())
}

/// The least that a control group leaves, in whole cores.
fn quota(files: Files<'_>) -> Option<usize> {
    let of_group = |group: super::cgroup::Group| {
        let number = |text: &str| text.parse::<usize>().ok();
        let (time, period) = match group.version {
            // Without a limit it is -1.
            Version::V1 => (
                number(&group.read(files, "cpu.cfs_quota_us")?)?,
                number(&group.read(files, "cpu.cfs_period_us")?)?,
            ),
            // Without a limit the time is `max`.
            Version::V2 => {
                let text = group.read(files, "cpu.max")?;
                let (time, period) = text.split_once(' ')?;
                (number(time)?, number(period)?)
            }
        };
        (period > 0).then(|| time.div_ceil(period).max(1))
    };
    groups(files, "cpu").into_iter().filter_map(of_group).min()
}

/// Numbers out of a list such as `0-3,8,10-11`, ascending. `None` if it is something else.
fn parse_list(text: &str) -> Option<Vec<usize>> {
    let mut numbers = Vec::new();
    for part in text.split(',').filter(|part| !part.is_empty()) {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let range: std::ops::RangeInclusive<usize> = first.parse().ok()?..=last.parse().ok()?;
        // A list of the system names no more processors than there can be.
        if range.end().saturating_sub(*range.start()) > 1 << 16 {
            return None;
        }
        numbers.extend(range);
    }
    Some(numbers)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashMap;

    /// Files of a machine with cores and caches spread evenly over its nodes, numbered as the kernel does: a core's
    /// second hardware thread comes behind the first ones of all cores.
    fn machine(
        nodes: usize,
        cores_a_node: usize,
        cores_a_cache: usize,
        threads: usize,
    ) -> HashMap<String, String> {
        let num_cores = nodes * cores_a_node;
        let list = |cpus: Vec<usize>| {
            let cpus: Vec<String> = cpus.iter().map(usize::to_string).collect();
            cpus.join(",") + "\n"
        };
        let of_cores = |cores: std::ops::Range<usize>| {
            list(
                (0..threads)
                    .flat_map(|thread| cores.clone().map(move |c| thread * num_cores + c))
                    .collect(),
            )
        };
        let mut files = HashMap::new();
        files.insert(
            "/sys/devices/system/cpu/online".into(),
            format!("0-{}\n", num_cores * threads - 1),
        );
        files.insert("/sys/devices/system/node/online".into(), format!("0-{}\n", nodes - 1));
        for node in 0..nodes {
            let cores = node * cores_a_node..(node + 1) * cores_a_node;
            files.insert(format!("/sys/devices/system/node/node{node}/cpulist"), of_cores(cores));
        }
        for cpu in 0..num_cores * threads {
            let core = cpu % num_cores;
            let cache = core / cores_a_cache * cores_a_cache;
            let folder = format!("/sys/devices/system/cpu/cpu{cpu}");
            files.insert(format!("{folder}/topology/core_cpus_list"), of_cores(core..core + 1));
            for (idx, level) in [(0, 1), (1, 1), (2, 2), (3, 3)] {
                let cores = if level == 3 { cache..cache + cores_a_cache } else { core..core + 1 };
                files.insert(format!("{folder}/cache/index{idx}/level"), format!("{level}\n"));
                files.insert(format!("{folder}/cache/index{idx}/shared_cpu_list"), of_cores(cores));
            }
        }
        files
    }

    fn cpus(files: &HashMap<String, String>, allowed: &[usize]) -> Cpus {
        let allowed = (!allowed.is_empty()).then(|| allowed.to_vec());
        Cpus::of(&|path: &Path| files.get(path.to_str().unwrap()).cloned(), allowed)
    }

    fn cores_by_node(cpus: &Cpus) -> Vec<usize> {
        let mut counts = Vec::new();
        for core in &cpus.cores {
            counts.resize(counts.len().max(core.node + 1), 0);
            counts[core.node] += 1;
        }
        counts
    }

    #[test]
    fn one_node_of_two_cores() {
        let cpus = cpus(&machine(1, 2, 2, 1), &[]);
        let core = |cpu| Core { cpus: vec![cpu], node: 0, cache: 0 };
        assert_eq!(cpus, Cpus { cores: vec![core(0), core(1)], quota: None });
        assert_eq!(cpus.threads(), 2);
    }

    #[test]
    fn two_nodes_of_sixty_four_cores_with_two_threads_each() {
        let cpus = cpus(&machine(2, 64, 8, 2), &[]);
        assert_eq!(cpus.threads(), 128);
        assert_eq!(cores_by_node(&cpus), [64, 64]);
        assert_eq!(cpus.cores[0], Core { cpus: vec![0, 128], node: 0, cache: 0 });
        assert_eq!(cpus.cores[77], Core { cpus: vec![77, 205], node: 1, cache: 72 });
    }

    #[test]
    fn eight_nodes_of_sixteen_cores() {
        let cpus = cpus(&machine(8, 16, 8, 1), &[]);
        assert_eq!(cpus.threads(), 128);
        assert_eq!(cores_by_node(&cpus), [16; 8]);
        assert_eq!(cpus.cores[127], Core { cpus: vec![127], node: 7, cache: 120 });
    }

    #[test]
    fn a_mask_counts_as_cores_do() {
        let files = machine(2, 64, 8, 2);
        // Two threads of one core are one core; a core of which one thread may be used is one as well.
        let some = cpus(&files, &[3, 70, 131, 200]);
        let core = |cpus: &[usize], node, cache| Core { cpus: cpus.to_vec(), node, cache };
        assert_eq!(some.cores, [core(&[3, 131], 0, 0), core(&[70], 1, 64), core(&[200], 1, 72)]);
        // The second threads of a whole node.
        let seconds: Vec<usize> = (192..256).collect();
        let seconds = cpus(&files, &seconds);
        assert_eq!((seconds.threads(), cores_by_node(&seconds)), (64, vec![0, 64]));
    }

    #[test]
    fn without_a_description_each_processor_is_a_core() {
        let cpus = cpus(&HashMap::new(), &[4, 6]);
        assert_eq!(cpus.threads(), 2);
        assert!(cpus.cores.iter().all(|core| (core.node, core.cache) == (0, 0)));
        assert_eq!(Cpus::of(&|_| None, None).threads(), 1);
        assert_eq!(Cpus::of(&|_| None, Some(Vec::new())).threads(), 1);
    }

    #[test]
    fn quotas_of_both_versions_count_rounded_up() {
        let mut files = machine(8, 16, 8, 1);
        let mut set = |path: &str, text: &str| files.insert(path.into(), text.into());
        set("/proc/self/cgroup", "2:cpu,cpuacct:/pod/server\n0::/pod/server\n");
        set(
            "/proc/self/mountinfo",
            "32 31 0:29 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct\n\
             41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n",
        );
        set("/sys/fs/cgroup/cpu/pod/server/cpu.cfs_quota_us", "-1\n");
        set("/sys/fs/cgroup/cpu/pod/server/cpu.cfs_period_us", "100000\n");
        assert_eq!(cpus(&files, &[]).quota, None);
        let mut set = |path: &str, text: &str| files.insert(path.into(), text.into());
        set("/sys/fs/cgroup/cpu/pod/cpu.cfs_quota_us", "650000\n");
        set("/sys/fs/cgroup/cpu/pod/cpu.cfs_period_us", "100000\n");
        assert_eq!((cpus(&files, &[]).quota, cpus(&files, &[]).threads()), (Some(7), 7));
        let mut set = |path: &str, text: &str| files.insert(path.into(), text.into());
        set("/sys/fs/cgroup/unified/pod/cpu.max", "max 100000\n");
        set("/sys/fs/cgroup/unified/pod/server/cpu.max", "25000 100000\n");
        assert_eq!(cpus(&files, &[]).threads(), 1);
        // Two cores of a mask are less than seven of a quota.
        files.remove("/sys/fs/cgroup/unified/pod/server/cpu.max");
        assert_eq!(cpus(&files, &[5, 9]).threads(), 2);
    }

    #[test]
    fn lists_of_processors_are_read_or_refused() {
        assert_eq!(parse_list("0-3,8,10-11"), Some(vec![0, 1, 2, 3, 8, 10, 11]));
        assert_eq!(parse_list(""), Some(vec![]));
        for wrong in ["a", "1-", "-1", "1,x", "0-18446744073709551615"] {
            assert_eq!(parse_list(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn this_machine_has_a_core() {
        let cpus = Cpus::of_thread();
        assert!(cpus.threads() >= 1 && cpus.cores.iter().all(|core| !core.cpus.is_empty()));
    }
}
