//! Control groups and memory on recorded machines.

use super::Headroom;
use super::memory::Bound;
use std::path::Path;

/// Files of a machine: paths and texts.
type Tree<'a> = &'a [(&'a str, &'a str)];

const MIB: usize = 1 << 20;

/// 8000 MiB are free.
const MEMINFO: (&str, &str) = (
    "/proc/meminfo",
    "MemTotal:       16384000 kB\nMemFree:         1024000 kB\nMemAvailable:    8192000 kB\n",
);

/// Hierarchies of version 1 beside a version 2 without controllers, as systemd mounts them.
const MOUNTS_V1: (&str, &str) = (
    "/proc/self/mountinfo",
    "22 1 254:0 / / rw,relatime - ext4 /dev/vda rw\n\
     35 31 0:32 / /sys/fs/cgroup/memory rw,relatime shared:9 - cgroup cgroup rw,memory\n\
     32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw,relatime shared:8 - cgroup cgroup rw,cpu,cpuacct\n\
     41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw\n",
);

const MOUNTS_V2: (&str, &str) = (
    "/proc/self/mountinfo",
    "22 1 254:0 / / rw,relatime - ext4 /dev/vda rw\n\
     30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n",
);

fn headroom(trees: &[Tree<'_>]) -> Option<Headroom> {
    let entries = || trees.iter().flat_map(|tree| tree.iter());
    Headroom::of(&|path: &Path| {
        let found = entries().find(|(name, _)| Path::new(name) == path);
        found.map(|(_, text)| text.to_string())
    })
}

/// Bytes in MiB, and the folder that bounds them.
fn bound(trees: &[Tree<'_>]) -> (usize, String) {
    let Headroom { bytes, bound } = headroom(trees).unwrap();
    let folder = match bound {
        Bound::Machine => "machine".to_string(),
        Bound::Group { folder, .. } => folder.display().to_string(),
    };
    (bytes / MIB, folder)
}

#[test]
fn without_a_limit_the_machine_bounds() {
    assert_eq!(bound(&[&[MEMINFO]]), (8000, "machine".into()));
    let unlimited: Tree<'_> = &[
        MOUNTS_V1,
        ("/proc/self/cgroup", "4:memory:/a\n0::/a\n"),
        ("/sys/fs/cgroup/memory/a/memory.limit_in_bytes", "9223372036854771712\n"),
        ("/sys/fs/cgroup/memory/a/memory.usage_in_bytes", "104857600\n"),
    ];
    assert_eq!(bound(&[&[MEMINFO], unlimited]), (8000, "machine".into()));
    assert_eq!(headroom(&[]), None);
    assert_eq!(headroom(&[&[("/proc/meminfo", "MemAvailable: much\n")]]), None);
}

#[test]
fn a_group_of_version_1_bounds_and_so_does_one_above_it() {
    let own: Tree<'_> = &[
        MEMINFO,
        MOUNTS_V1,
        ("/proc/self/cgroup", "5:cpu,cpuacct:/\n4:memory:/pod/server\n0::/\n"),
        ("/sys/fs/cgroup/memory/pod/server/memory.limit_in_bytes", "2147483648\n"),
        ("/sys/fs/cgroup/memory/pod/server/memory.usage_in_bytes", "524288000\n"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n"),
        ("/sys/fs/cgroup/memory/memory.usage_in_bytes", "8589934592\n"),
    ];
    let folder = "/sys/fs/cgroup/memory/pod";
    assert_eq!(bound(&[own]), (2048 - 500, format!("{folder}/server")));
    // The pod has more in it than this process.
    let pod: Tree<'_> = &[
        ("/sys/fs/cgroup/memory/pod/memory.limit_in_bytes", "3221225472\n"),
        ("/sys/fs/cgroup/memory/pod/memory.usage_in_bytes", "2936012800\n"),
    ];
    assert_eq!(bound(&[own, pod]), (3072 - 2800, folder.into()));
}

#[test]
fn a_container_that_sees_its_own_group_at_the_root_is_bounded_by_it() {
    let limits: Tree<'_> = &[
        MEMINFO,
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "1073741824\n"),
        ("/sys/fs/cgroup/memory/memory.usage_in_bytes", "104857600\n"),
    ];
    let mounted = |root: &str| {
        format!("35 31 0:32 {root} /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n")
    };
    // With a namespace for groups, without one, and with a group that is not below what is mounted.
    for (root, path) in [("/", "/"), ("/docker/7", "/docker/7"), ("/", "/../other")] {
        let (mounts, path) = (mounted(root), format!("4:memory:{path}\n"));
        let seen: Tree<'_> = &[("/proc/self/mountinfo", &mounts), ("/proc/self/cgroup", &path)];
        assert_eq!(bound(&[limits, seen]), (924, "/sys/fs/cgroup/memory".into()), "{root} {path}");
    }
}

#[test]
fn groups_of_version_2_bound_by_the_least_of_all_levels() {
    let tree: Tree<'_> = &[
        MEMINFO,
        MOUNTS_V2,
        ("/proc/self/cgroup", "0::/kubepods/pod1/server\n"),
        ("/sys/fs/cgroup/kubepods/pod1/server/memory.max", "max\n"),
        ("/sys/fs/cgroup/kubepods/pod1/server/memory.high", "max\n"),
        ("/sys/fs/cgroup/kubepods/pod1/server/memory.current", "734003200\n"),
        ("/sys/fs/cgroup/kubepods/pod1/memory.max", "2147483648\n"),
        ("/sys/fs/cgroup/kubepods/pod1/memory.high", "max\n"),
        ("/sys/fs/cgroup/kubepods/pod1/memory.current", "1048576000\n"),
        ("/sys/fs/cgroup/kubepods/memory.max", "17179869184\n"),
        ("/sys/fs/cgroup/kubepods/memory.current", "5242880000\n"),
    ];
    assert_eq!(bound(&[tree]), (1048, "/sys/fs/cgroup/kubepods/pod1".into()));
}

#[test]
fn a_group_is_not_filled_beyond_where_it_is_slowed_down() {
    let tree: Tree<'_> = &[
        MEMINFO,
        MOUNTS_V2,
        ("/proc/self/cgroup", "0::/server\n"),
        ("/sys/fs/cgroup/server/memory.max", "2147483648\n"),
        ("/sys/fs/cgroup/server/memory.high", "1073741824\n"),
        ("/sys/fs/cgroup/server/memory.current", "1572864000\n"),
    ];
    assert_eq!(bound(&[tree]), (0, "/sys/fs/cgroup/server".into()));
}

#[test]
fn file_pages_that_can_be_dropped_count_as_free() {
    let v2: Tree<'_> = &[
        MEMINFO,
        MOUNTS_V2,
        ("/proc/self/cgroup", "0::/server\n"),
        ("/sys/fs/cgroup/server/memory.max", "2147483648\n"),
        ("/sys/fs/cgroup/server/memory.current", "1572864000\n"),
        (
            "/sys/fs/cgroup/server/memory.stat",
            "anon 524288000\nfile 1048576000\nfile_mapped 104857600\nfile_dirty 52428800\n\
             file_writeback 52428800\ninactive_file 629145600\nactive_file 419430400\n",
        ),
    ];
    // 1500 MiB are in use, 1000 of files, of which 100 are mapped and 100 not written yet.
    let free = (2048 - (1500 - 800), "/sys/fs/cgroup/server".to_string());
    assert_eq!(bound(&[v2]), free);
    let v1: Tree<'_> = &[
        MEMINFO,
        MOUNTS_V1,
        ("/proc/self/cgroup", "4:memory:/server\n"),
        ("/sys/fs/cgroup/memory/server/memory.limit_in_bytes", "2147483648\n"),
        ("/sys/fs/cgroup/memory/server/memory.usage_in_bytes", "1572864000\n"),
        (
            "/sys/fs/cgroup/memory/server/memory.stat",
            "cache 0\ninactive_file 1\ntotal_cache 1048576000\ntotal_mapped_file 104857600\n\
             total_dirty 52428800\ntotal_writeback 52428800\ntotal_inactive_file 629145600\n\
             total_active_file 419430400\n",
        ),
    ];
    assert_eq!(bound(&[v1]).0, free.0);
}

#[test]
fn the_group_is_named_with_its_limit_and_what_it_has_in_use() {
    let tree: Tree<'_> = &[
        MEMINFO,
        MOUNTS_V2,
        ("/proc/self/cgroup", "0::/server\n"),
        ("/sys/fs/cgroup/server/memory.max", "2147483648\n"),
        ("/sys/fs/cgroup/server/memory.current", "524288000\n"),
    ];
    assert_eq!(
        headroom(&[tree]).unwrap().bound.to_string(),
        "of the 2048 MiB of the control group /sys/fs/cgroup/server, which has 500 MiB in use"
    );
}

#[test]
fn a_mount_point_with_a_space_in_it_is_found() {
    let tree: Tree<'_> = &[
        MEMINFO,
        ("/proc/self/mountinfo", "30 23 0:26 / /my\\040groups rw - cgroup2 none rw\n"),
        ("/proc/self/cgroup", "0::/server\n"),
        ("/my groups/server/memory.max", "104857600\n"),
        ("/my groups/server/memory.current", "0\n"),
    ];
    assert_eq!(bound(&[tree]), (100, "/my groups/server".into()));
}

#[test]
fn this_machine_says_how_much_it_has() {
    let headroom = Headroom::now().unwrap();
    assert!(headroom.bytes > MIB, "{headroom:?}");
}
