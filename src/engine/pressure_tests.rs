use super::*;

const MB: u64 = 1 << 20;
const V1: &str = "sys/fs/cgroup/memory";
const V2: &str = "sys/fs/cgroup";

/// A root with these files: a path and its text, numbers in MB where `MB` stands behind them.
fn tree(files: &[(&str, &str)]) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    files.iter().for_each(|(path, text)| put(folder.path(), path, text));
    folder
}

fn put(root: &Path, path: &str, text: &str) {
    let path = root.join(path);
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    let word = |w: &str| match w.strip_suffix("MB") {
        Some(n) => (n.parse::<u64>().unwrap() * MB).to_string(),
        None => w.to_owned(),
    };
    let line = |l: &str| l.split(' ').map(word).collect::<Vec<_>>().join(" ");
    fs::write(path, text.lines().map(line).collect::<Vec<_>>().join("\n") + "\n").unwrap();
}

/// What is wanted, in MB.
fn wanted(files: &[(&str, &str)]) -> u64 {
    let folder = tree(files);
    Watch::at(folder.path()).look(Instant::now()).unwrap() / MB
}

/// Files of a group of version 2 below its tree.
fn v2(group: &str, own: &[(&str, &str)]) -> Vec<(String, String)> {
    own.iter().map(|(f, t)| (format!("{V2}/{group}{f}"), (*t).to_owned())).collect()
}

fn wanted_v2(own: &str, groups: &[(&str, &[(&str, &str)])]) -> u64 {
    let mut files = vec![("proc/self/cgroup".to_owned(), own.to_owned())];
    files.extend(groups.iter().flat_map(|(g, own)| v2(g, own)));
    let files: Vec<(&str, &str)> = files.iter().map(|(p, t)| (p.as_str(), t.as_str())).collect();
    wanted(&files)
}

#[test]
fn version_2_by_the_kernels_documentation() {
    let own = "0::/system.slice/tegud.service\n";
    let (slice, service) = ("system.slice/", "system.slice/tegud.service/");
    let cur = "memory.current";
    let (max, high, stat) = ("memory.max", "memory.high", "memory.stat");
    // A limit of 4000 MB wants 256 free.
    for (what, groups, expected) in [
        ("far below", vec![(service, vec![(cur, "3000MB"), (max, "4000MB")])], 0),
        ("near", vec![(service, vec![(cur, "3900MB"), (max, "4000MB")])], 156),
        ("at it", vec![(service, vec![(cur, "4000MB"), (max, "4000MB")])], 256),
        ("no limit", vec![(service, vec![(cur, "3900MB"), (max, "max"), (high, "max")])], 0),
        (
            "page cache that can be dropped",
            vec![(
                service,
                vec![
                    (cur, "3900MB"),
                    (max, "4000MB"),
                    (stat, "anon 9MB\nfile 7MB\ninactive_anon 50MB\ninactive_file 100MB"),
                ],
            )],
            56,
        ),
        ("slowed down first", vec![(service, vec![(cur, "3900MB"), (max, "max"), (high, "4000MB")])], 156),
        ("the least", vec![(service, vec![(cur, "3900MB"), (max, "9000MB"), (high, "4000MB")])], 156),
        ("the least, again", vec![(service, vec![(cur, "3900MB"), (max, "4000MB"), (high, "9000MB")])], 156),
        (
            "a slice above with others in it",
            vec![
                (service, vec![(cur, "100MB"), (max, "max")]),
                (slice, vec![(cur, "3950MB"), (max, "4000MB")]),
            ],
            206,
        ),
        (
            "both near: what the tighter one wants is enough",
            vec![
                (service, vec![(cur, "990MB"), (max, "1000MB")]),
                (slice, vec![(cur, "3800MB"), (max, "4000MB")]),
            ],
            246,
        ),
        (
            "the controller is not handed down: the parent counts",
            vec![(service, vec![("cgroup.procs", "1")]), (slice, vec![(cur, "3900MB"), (max, "4000MB")])],
            156,
        ),
        ("a tiny limit keeps half", vec![(service, vec![(cur, "90MB"), (max, "100MB")])], 40),
        ("nothing may be used", vec![(service, vec![(cur, "5MB"), (max, "0")])], 5),
        ("usage missing", vec![(service, vec![(max, "4000MB")])], 0),
        ("nonsense", vec![(service, vec![(cur, "much"), (max, "-1")])], 0),
        ("no group to see", vec![], 0),
        ("the root of the tree has no files", vec![("", vec![("cgroup.controllers", "memory")])], 0),
    ] {
        let groups: Vec<(&str, &[(&str, &str)])> = groups.iter().map(|(g, f)| (*g, f.as_slice())).collect();
        assert_eq!(wanted_v2(own, &groups), expected, "{what}");
    }
}

#[test]
fn a_group_is_found_wherever_the_process_may_look_from() {
    let limited: &[(&str, &str)] = &[("memory.current", "3900MB"), ("memory.max", "4000MB")];
    // In a container with a namespace of its own the root is the group.
    assert_eq!(wanted_v2("0::/\n", &[("", limited)]), 156);
    // A process outside of its namespace's root, and one whose group is gone.
    assert_eq!(wanted_v2("0::/../other\n", &[("", limited)]), 0);
    assert_eq!(wanted_v2("0::/a (deleted)\n", &[("a/", limited)]), 0);
    // A delegated subtree: a user's service with three groups above it.
    let deep = "user.slice/user-1000.slice/user@1000.service/";
    let own = format!("0::/{deep}app.slice/tegud.service\n");
    assert_eq!(wanted_v2(&own, &[(deep, limited)]), 156);
    // Version 1 with the memory controller there, beside version 2 without: only the first counts.
    let own = "3:memory:/robot\n0::/robot\n";
    let v1 = [("limit_in_bytes", "4000MB"), ("usage_in_bytes", "3900MB")];
    let mut files: Vec<(String, &str)> =
        v1.iter().map(|(f, t)| (format!("{V1}/robot/memory.{f}"), *t)).collect();
    files.push(("proc/self/cgroup".into(), own));
    let files: Vec<(&str, &str)> = files.iter().map(|(p, t)| (p.as_str(), *t)).collect();
    assert_eq!(wanted(&files), 156);
}

#[test]
fn version_1_counts_what_is_below_too() {
    let own = ("proc/self/cgroup", "5:cpu:/x\n4:cpuset,memory:/robot/tegu\n");
    let file = |g: &str, f: &str| format!("{V1}/{g}memory.{f}");
    let of = |g: &str, usage: &str, limit: &str| {
        [(file(g, "usage_in_bytes"), usage.to_owned()), (file(g, "limit_in_bytes"), limit.to_owned())]
    };
    let look = |groups: Vec<[(String, String); 2]>, stat: &str| {
        let stat_at = file("robot/tegu/", "stat");
        let mut files = vec![own, (stat_at.as_str(), stat)];
        files.extend(groups.iter().flatten().map(|(p, t)| (p.as_str(), t.as_str())));
        wanted(&files)
    };
    let stat = "cache 5\ninactive_file 900MB\ntotal_inactive_file 100MB";
    assert_eq!(look(vec![of("robot/tegu/", "3900MB", "4000MB")], stat), 56);
    // No limit is a huge number there.
    let none = "9223372036854771712";
    let above =
        vec![of("robot/tegu/", "3900MB", none), of("robot/", "3900MB", "3000MB"), of("", "9000MB", none)];
    assert_eq!(look(above, ""), 1156);
}

#[test]
fn a_process_that_is_moved_is_watched_where_it_is() {
    let limited = |g: &str, n: &str| {
        [
            (format!("{V2}/{g}/memory.current"), n.to_owned()),
            (format!("{V2}/{g}/memory.max"), "4000MB".to_owned()),
        ]
    };
    let folder = tree(&[("proc/self/cgroup", "0::/a\n")]);
    let root = folder.path();
    limited("a", "3800MB").iter().chain(&limited("b", "4000MB")).for_each(|(p, t)| put(root, p, t));
    let mut watch = Watch::at(root);
    let mut now = Instant::now();
    let mut look = |watch: &mut Watch| {
        now += EVERY;
        watch.look(now).unwrap() / MB
    };
    assert_eq!(look(&mut watch), 56);
    put(root, "proc/self/cgroup", "0::/b\n");
    assert_eq!(look(&mut watch), 256);
    // A limit that comes later, while the process stays.
    put(root, "proc/self/cgroup", "0::/c\n");
    assert_eq!(look(&mut watch), 0);
    limited("c", "3900MB").iter().for_each(|(p, t)| put(root, p, t));
    assert_eq!(look(&mut watch), 156);
    assert_eq!(watch.look(now), None, "not again at once");
}

#[test]
fn stalls_ask_once_each_and_a_bare_system_for_nothing() {
    for file in ["proc/pressure/memory", "sys/fs/cgroup/a/memory.pressure", "sys/fs/cgroup/memory.pressure"] {
        let folder = tree(&[("proc/self/cgroup", "0::/a\n")]);
        let root = folder.path();
        let began = Instant::now();
        let mut watch = Watch::at(root);
        let mut look = |ms: u64| watch.look(began + Duration::from_millis(ms)).unwrap();
        let psi = |ms: u64| {
            let some = format!("some avg10=99.00 avg60=0.00 avg300=0.00 total={}", ms * 1000);
            put(root, file, &format!("{some}\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=999999999"));
        };
        assert_eq!(look(0), 0, "no such file");
        psi(5000);
        assert_eq!(look(100), 0, "what was before we looked is no news");
        psi(5099);
        assert_eq!(look(900), 0);
        psi(5101);
        assert_eq!(look(1000), STALL_BYTES, "{file}");
        assert_eq!(look(1100), 0, "the same stall");
        psi(5190);
        assert_eq!(look(2050), 0, "89 ms in a window");
        psi(5270);
        assert_eq!(look(2500), 0, "80 ms in the next");
        psi(5300);
        assert_eq!(look(2600), STALL_BYTES);
        put(root, file, "nonsense");
        assert_eq!(look(2700), 0);
        psi(9000);
        assert_eq!(look(2800), 0, "a file that came back begins again");
    }
    let folder = tree(&[("proc/self/cgroup", "no colons\n\n7:memory")]);
    assert_eq!(Watch::at(folder.path()).look(Instant::now()), Some(0));
    assert!(Watch::new().look(Instant::now()).is_some(), "whatever this machine says");
}

#[test]
fn what_the_groups_leave_is_the_least_of_all() {
    let stat = "anon 9MB\ninactive_anon 50MB\nactive_anon 40MB\ninactive_file 100MB\nactive_file 300MB";
    let own = ("proc/self/cgroup", "0::/a/b\n");
    let free = |files: &[(&str, &str)]| {
        let folder = tree(&[&[own], files].concat());
        Watch::at(folder.path()).free_bytes().map(|b| b / MB)
    };
    let a = |max| [("sys/fs/cgroup/a/memory.current", "1000MB"), ("sys/fs/cgroup/a/memory.max", max)];
    let b = [
        ("sys/fs/cgroup/a/b/memory.current", "900MB"),
        ("sys/fs/cgroup/a/b/memory.max", "2000MB"),
        ("sys/fs/cgroup/a/b/memory.stat", stat),
    ];
    assert_eq!(free(&b), Some(1500), "page cache is no use of memory");
    assert_eq!(free(&[&a("1200MB")[..], &b].concat()), Some(200), "the group above has less");
    assert_eq!(free(&a("max")), None);
    assert_eq!(free(&a("500MB")), Some(0), "over it already");
}
