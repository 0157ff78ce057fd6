//! What the CUDA backend does around its kernels, on a driver and a compiler that are files of `tests/fakes`: opening and
//! refusing, planning and loading, recording and replaying, and every way in which the driver, the compiler or the cache
//! of compiled kernels can fail. Each test starts the real program with the fakes on the loader's path. Needs a C
//! compiler; what is computed is tested where there is a GPU.

use crate::support::{self, data, skipped};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::OnceLock;

/// A folder with the two fakes, built once for all tests; none where that is impossible.
fn fakes() -> Option<&'static Path> {
    static BUILT: OnceLock<Option<PathBuf>> = OnceLock::new();
    let build = || {
        // An emulated program would need fakes of its own processor.
        let has_compiler = || Command::new("cc").arg("--version").output().is_ok_and(|o| o.status.success());
        if support::emulated() || !has_compiler() {
            return None;
        }
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("fakes");
        compile("libcuda.c", &folder.join("libcuda.so.1"), &[]);
        compile("libnvrtc.c", &folder.join("libnvrtc.so.12"), &[]);
        Some(folder)
    };
    BUILT.get_or_init(build).as_deref()
}

fn compile(source: &str, to: &Path, flags: &[&str]) {
    std::fs::create_dir_all(to.parent().unwrap()).unwrap();
    let source = data().parent().unwrap().join("fakes").join(source);
    let mut cc = Command::new("cc");
    // Made aside: another run of the tests may have the old one open.
    let aside = to.with_extension(std::process::id().to_string());
    cc.args(["-O1", "-shared", "-fPIC", "-pthread"]).args(flags).arg("-o").arg(&aside).arg(source);
    assert!(cc.status().unwrap().success());
    std::fs::rename(&aside, to).unwrap();
}

/// A run of the program on the fakes: its folder, and settings for both.
struct Fake {
    folder: tempfile::TempDir,
    settings: Vec<(&'static str, String)>,
}

/// What a run left behind.
struct Ran {
    output: Output,
    /// The fake driver's counters.
    counts: BTreeMap<String, u64>,
    /// Kernels compiled.
    compiled: Vec<String>,
}

impl Fake {
    /// None, and the reason printed, where fakes cannot be built.
    fn new(test: &str) -> Option<Fake> {
        let Some(fakes) = fakes() else {
            skipped(test, "no C compiler, or programs are emulated");
            return None;
        };
        let path = fakes.display().to_string();
        let settings = vec![("LD_LIBRARY_PATH", path.clone()), ("TEGU_NVRTC_DIR", path)];
        Some(Fake { folder: tempfile::tempdir().unwrap(), settings })
    }

    fn with(mut self, name: &'static str, value: impl ToString) -> Fake {
        self.settings.retain(|(n, _)| *n != name);
        self.settings.push((name, value.to_string()));
        self
    }

    fn set(&mut self, name: &'static str, value: impl ToString) {
        self.settings.retain(|(n, _)| *n != name);
        self.settings.push((name, value.to_string()));
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// The program with `args`, ready to be started.
    fn command(&self, args: &[&str]) -> Command {
        self.environment(support::command("tegu"), args)
    }

    fn environment(&self, mut command: Command, args: &[&str]) -> Command {
        for name in ["TEGU_MODEL", "TEGU_BACKEND", "TEGU_LOG", "HOME", "CACHE_DIRECTORY", "XDG_CACHE_HOME"] {
            command.env_remove(name);
        }
        command.env("XDG_CONFIG_HOME", "no-such-folder").stdin(Stdio::null());
        command.env("TEGU_CACHE_DIR", self.path("cache"));
        command.env("FAKE_CUDA_LOG", self.path("driver")).env("FAKE_NVRTC_LOG", self.path("compiler"));
        command.envs(self.settings.iter().map(|(n, v)| (n, v))).args(args);
        command
    }

    fn finish(&self, output: Output) -> Ran {
        let take = |name: &str| {
            let text = std::fs::read_to_string(self.path(name)).unwrap_or_default();
            let _ = std::fs::remove_file(self.path(name));
            text
        };
        let counts = take("driver");
        let counts = counts.lines().filter_map(|l| l.split_once(' '));
        let counts = counts.map(|(n, v)| (n.to_owned(), v.parse().unwrap())).collect();
        let compiled = take("compiler").lines().map(str::to_owned).collect();
        Ran { output, counts, compiled }
    }

    fn run(&self, args: &[&str]) -> Ran {
        self.finish(self.command(args).output().expect("the program starts"))
    }

    /// A benchmark of a small MLA and MoE model on the GPU: prefill, then decode far enough to reach a second page.
    fn bench(&self, backend: &str) -> Ran {
        let args = ["--backend", backend, "--pp", "40", "--tg", "36", "--reps", "1", "--roof-mib", "0"];
        self.run(&[&["bench", &model()], &args[..]].concat())
    }
}

fn model() -> String {
    data().join("oracles/deepseek-v3").display().to_string()
}

impl Ran {
    fn said(&self) -> String {
        String::from_utf8_lossy(&self.output.stderr).into_owned()
    }

    fn count(&self, name: &str) -> u64 {
        self.counts.get(name).copied().unwrap_or(0)
    }

    fn assert_ok(&self, what: &str) {
        assert!(self.output.status.success(), "{what}: {} {}", self.output.status, self.said());
    }

    /// An ordinary error that says all of `words`, in one line, by exit code `code`.
    fn assert_refused(&self, what: &str, code: i32, words: &[&str]) {
        let said = self.said();
        assert_eq!(self.output.status.code(), Some(code), "{what}: {said}");
        let mut lines =
            said.lines().filter(|l| l.starts_with("tegu: ") && !l.contains("warn") && !l.contains("note"));
        let line = lines.next().unwrap_or_else(|| panic!("{what}: {said}"));
        assert_eq!(lines.next(), None, "{what}: one line");
        words.iter().for_each(|w| assert!(line.contains(w), "{what}: {w:?} is not in {line}"));
    }

    /// Everything that was taken was given back.
    fn assert_nothing_forgotten(&self, what: &str) {
        for (taken, given) in [
            ("cuModuleLoadData", "cuModuleUnload"),
            ("cuStreamCreate", "cuStreamDestroy_v2"),
            ("cuEventCreate", "cuEventDestroy_v2"),
            ("cuGraphInstantiateWithFlags", "cuGraphExecDestroy"),
            ("cuDevicePrimaryCtxRetain", "cuDevicePrimaryCtxRelease_v2"),
        ] {
            assert_eq!(self.count(taken), self.count(given), "{what}: {taken}");
        }
        for bytes in ["forgotten_bytes", "forgotten_host_bytes"] {
            assert_eq!(self.count(bytes), 0, "{what}: {bytes}");
        }
    }
}

#[test]
fn a_model_is_planned_loaded_and_run() {
    let Some(fake) = Fake::new("a_model_is_planned_loaded_and_run") else { return };
    let ran = fake.bench("cuda");
    ran.assert_ok("bench");
    ran.assert_nothing_forgotten("bench");
    assert!(ran.count("kernels") > 1000 && ran.count("bad_launches") == 0, "{:?}", ran.counts);
    assert_eq!(ran.count("copies_outside_memory"), 0);
    assert_eq!(ran.count("blocking"), 1, "the cores belong to the robot's programs");
    // Memory in segments, all of it before the first kernel, and no more than the plan said.
    assert_eq!(ran.count("allocations_over_256_mib") + ran.count("allocations_after_a_kernel"), 0);
    let planned = planned_bytes(&ran.said());
    let allocated = ran.count("allocated_bytes") as f64;
    assert!((0.9..1.02).contains(&(allocated / planned)), "planned {planned}, allocated {allocated}");
    assert!(ran.count("bytes_in") > 2_000_000, "the weights went in: {}", ran.count("bytes_in"));
}

/// The plan's total: `memory: 69.2 MiB (…`.
fn planned_bytes(said: &str) -> f64 {
    let line = said.lines().find_map(|l| l.strip_prefix("memory: ")).expect("a plan");
    let words: Vec<&str> = line.split_whitespace().take(2).collect();
    let unit = ["KiB", "MiB", "GiB"].iter().position(|u| *u == words[1]).expect("a unit");
    words[0].parse::<f64>().unwrap() * 1024f64.powi(unit as i32 + 1)
}

#[test]
fn a_step_is_recorded_once_for_each_shape() {
    let Some(fake) = Fake::new("a_step_is_recorded_once_for_each_shape") else { return };
    let model = model();
    let decode = |batch: &str, tokens: &str| {
        let args = ["bench", &model, "--backend", "cuda", "--pp", "0", "--reps", "1", "--roof-mib", "0"];
        let ran = fake.run(&[&args[..], &["--tg", tokens, "--batch", batch]].concat());
        ran.assert_ok(batch);
        ran.assert_nothing_forgotten(batch);
        assert_eq!(ran.count("cuStreamBeginCapture_v2"), ran.count("cuGraphInstantiateWithFlags"));
        (ran.count("cuStreamBeginCapture_v2"), ran.count("cuGraphLaunch"))
    };
    // One page: one shape. Its first step runs as it is, its second is recorded, and all others replay that.
    let (recorded, replayed) = decode("1", "20");
    assert_eq!(recorded, 1);
    assert!(replayed >= 2 * 20 - 1, "{replayed}");
    // A second and a third page (tables are made for powers of two); many more steps do not change the count.
    assert_eq!(decode("1", "40").0, 2);
    assert_eq!(decode("1", "90").0, 3);
    // Rows are a shape too: sequences start one after another, so that four pass through one, two and three.
    let (recorded, replayed) = decode("4", "20");
    assert!((1..=4).contains(&recorded), "{recorded}");
    assert!(replayed >= 2 * 20 - 1, "{replayed}");
}

/// A name, a folder of libraries, a setting of the fakes, and words of the error.
type Case<'a, F> = (&'a str, F, (&'static str, &'a str), &'a [&'a str]);

#[test]
fn a_machine_that_cannot_serve_is_refused_with_the_reason() {
    let name = "a_machine_that_cannot_serve_is_refused_with_the_reason";
    let Some(fakes) = fakes() else { return skipped(name, "no C compiler, or programs are emulated") };
    let folder = tempfile::tempdir().unwrap();
    let place = |what: &str| folder.path().join(what);
    let library = |what: &str| place(what).join("libcuda.so.1");
    compile("libcuda.c", &library("lacks"), &["-DcuGraphLaunch=cuGraphLaunch_of_tomorrow"]);
    std::fs::create_dir_all(place("garbage")).unwrap();
    std::fs::write(library("garbage"), "no library").unwrap();
    std::fs::create_dir_all(place("other")).unwrap();
    // A library, but none of a driver's: the fake compiler under the driver's name.
    compile("libnvrtc.c", &library("other"), &[]);
    // Where the folder is the fakes' own the driver is whole and a setting makes it fail.
    let cases: [Case<&Path>; 10] = [
        ("JetPack 5", fakes, ("FAKE_CUDA_VERSION", "11040"), &["11.4", "JetPack 5", "JetPack 6"]),
        ("an old driver", fakes, ("FAKE_CUDA_VERSION", "12010"), &["12.2 or later", "12.1"]),
        ("Xavier", fakes, ("FAKE_CUDA_SM", "72"), &["compute capability 8.0", "Fake Orin, 7.2"]),
        ("no device", fakes, ("FAKE_CUDA_DEVICES", "0"), &["a GPU number 0", "0 GPUs"]),
        (
            "cuInit: none",
            fakes,
            ("FAKE_CUDA_FAIL", "cuInit@1=100"),
            &["start the driver", "no CUDA-capable device"],
        ),
        ("cuInit: 999", fakes, ("FAKE_CUDA_FAIL", "cuInit@1=999"), &["start the driver", "unknown error"]),
        (
            "no context",
            fakes,
            ("FAKE_CUDA_FAIL", "cuDevicePrimaryCtxRetain@1=2"),
            &["make a context", "out of memory"],
        ),
        (
            "a function lacks",
            &place("lacks"),
            ("FAKE_CUDA_SM", "87"),
            &["function cuGraphLaunch", "CUDA 12.2"],
        ),
        ("garbage", &place("garbage"), ("FAKE_CUDA_SM", "87"), &["libcuda.so.1", "file too short"]),
        ("another library", &place("other"), ("FAKE_CUDA_SM", "87"), &["function cuDriverGetVersion"]),
    ];
    for (what, driver, (setting, value), words) in cases {
        let fake = Fake::new(name).unwrap().with("LD_LIBRARY_PATH", driver.display()).with(setting, value);
        fake.bench("cuda").assert_refused(what, 2, words);
        // Left to itself the program says so once and runs on the CPU.
        let ran = fake.bench("auto");
        ran.assert_ok(what);
        let said = ran.said();
        assert_eq!(said.matches("running on the CPU").count(), 1, "{what}: {said}");
        words.iter().for_each(|w| assert!(said.contains(w), "{what}: {w:?} is not in {said}"));
    }
}

#[test]
fn without_a_driver_one_line_says_so() {
    let name = "without_a_driver_one_line_says_so";
    if tegu::backend::cuda::driver::absent().is_none() {
        return skipped(name, "this machine has a driver");
    }
    let Some(fake) = Fake::new(name) else { return };
    let fake = fake.with("LD_LIBRARY_PATH", "");
    fake.bench("cuda").assert_refused("no driver", 2, &["libcuda.so.1, which NVIDIA's driver installs"]);
    let ran = fake.bench("auto");
    ran.assert_ok("no driver");
    assert_eq!(ran.said().matches("no NVIDIA driver (libcuda.so.1): running on the CPU").count(), 1);
}

#[test]
fn memory_that_another_program_holds_is_an_error_with_the_plan() {
    let name = "memory_that_another_program_holds_is_an_error_with_the_plan";
    let Some(mut fake) = Fake::new(name) else { return };
    let plan = ["GPU memory", "weights", "KV", "scratch", "free of 8.0 GiB"];
    // Known beforehand: nothing is taken.
    let most = (8u64 << 30) - (20 << 20);
    fake.set("FAKE_CUDA_TAKEN", most);
    let ran = fake.bench("cuda");
    ran.assert_refused("taken before", 3, &[&plan[..], &["20.0 MiB free"]].concat());
    assert_eq!(ran.count("cuMemAlloc_v2"), 0);
    // Taken by the other while the model is loaded: what was allocated is given back.
    fake.set("FAKE_CUDA_TAKEN", 0);
    fake.set("FAKE_CUDA_HIDDEN", most);
    let ran = fake.bench("cuda");
    ran.assert_refused("taken meanwhile", 3, &[&plan[..], &["more ("]].concat());
    assert!(ran.count("cuMemAlloc_v2") > 1);
    ran.assert_nothing_forgotten("taken meanwhile");
    // In whichever segment it happens.
    fake.set("FAKE_CUDA_HIDDEN", 0);
    let segments = fake.bench("cuda").count("cuMemAlloc_v2");
    for n in 1..=segments {
        fake.set("FAKE_CUDA_FAIL", format!("cuMemAlloc_v2@{n}=2"));
        let ran = fake.bench("cuda");
        ran.assert_refused("a segment", 3, &plan);
        ran.assert_nothing_forgotten("a segment");
    }
}

/// Calls whose failure may pass: they give back what ends with the process anyway, or ask for what the driver may refuse.
const HARMLESS: [&str; 9] = [
    "cuDevicePrimaryCtxSetFlags_v2",
    "cuMemFree_v2",
    "cuMemFreeHost",
    "cuModuleUnload",
    "cuEventDestroy_v2",
    "cuStreamDestroy_v2",
    "cuDevicePrimaryCtxRelease_v2",
    "cuGraphExecDestroy",
    "cuGraphDestroy",
];

#[test]
fn each_call_that_fails_is_an_error_and_no_crash() {
    let Some(mut fake) = Fake::new("each_call_that_fails_is_an_error_and_no_crash") else { return };
    let normal = fake.bench("cuda");
    normal.assert_ok("bench");
    let calls: Vec<(&String, &u64)> = normal.counts.iter().filter(|(n, _)| n.starts_with("cu")).collect();
    let calls: Vec<_> = calls.into_iter().filter(|(n, _)| *n != "cubins").collect();
    assert!(calls.len() > 30, "{calls:?}");
    for (call, &n) in calls {
        // The first time, in the midst of the work, and the last time.
        for at in [1, n / 2 + 1, n] {
            // 999 is an error that passes; 719, a kernel that died, leaves a context that answers nothing any more.
            for code in [999, 719] {
                fake.set("FAKE_CUDA_FAIL", format!("{call}@{at}={code}"));
                let ran = fake.bench("cuda");
                let (what, said) = (format!("{call} number {at} of {n}: {code}"), ran.said());
                assert!(!said.contains("panicked"), "{what}: {said}");
                let harmless = HARMLESS.contains(&call.as_str());
                match ran.output.status.code() {
                    Some(0) => {
                        assert!(harmless || call == "cuCtxSetCurrent" && at > 1, "{what} passed unseen")
                    }
                    Some(2) => ran.assert_refused(&what, 2, &["CUDA: "]),
                    // Asked for memory, not told how much is free.
                    Some(3) if call.starts_with("cuMem") => ran.assert_refused(&what, 3, &["GPU memory"]),
                    other => panic!("{what}: {other:?} {said}"),
                }
                if code == 999 && !harmless && call != "cuCtxSetCurrent" {
                    ran.assert_nothing_forgotten(&what);
                }
            }
        }
    }
}

#[test]
fn a_compiler_that_is_missing_too_new_or_refuses_is_named() {
    let name = "a_compiler_that_is_missing_too_new_or_refuses_is_named";
    let Some(mut fake) = Fake::new(name) else { return };
    let empty = fake.path("empty");
    std::fs::create_dir(&empty).unwrap();
    let fakes = fakes().unwrap().display().to_string();
    let cases: [Case<&str>; 3] = [
        (
            "missing",
            empty.to_str().unwrap(),
            ("FAKE_NVRTC_MAJOR", "12"),
            &["libnvrtc.so", "apt install cuda-nvrtc", "none"],
        ),
        ("too new", &fakes, ("FAKE_NVRTC_MAJOR", "13"), &["of CUDA 12 or before", "found 13.6 in "]),
        (
            "refuses",
            &fakes,
            ("FAKE_NVRTC_FAIL", "norm.cu"),
            &["kernel norm.cu", "identifier \"warp\" is undefined"],
        ),
    ];
    for (what, folder, (setting, value), words) in cases {
        fake.set("TEGU_NVRTC_DIR", folder);
        fake.set(setting, value);
        let ran = fake.bench("cuda");
        ran.assert_refused(what, 2, words);
        ran.assert_nothing_forgotten(what);
        if what != "refuses" {
            let ran = fake.bench("auto");
            ran.assert_ok(what);
            assert!(ran.said().contains("running on the CPU"), "{what}: {}", ran.said());
        }
        fake.set("FAKE_NVRTC_MAJOR", "12");
    }
}

#[test]
fn compiled_kernels_are_kept_and_heal() {
    let Some(fake) = Fake::new("compiled_kernels_are_kept_and_heal") else { return };
    let first = fake.bench("cuda");
    first.assert_ok("first");
    let n = first.compiled.len();
    assert!(n > 10 && n as u64 == first.count("cubins"), "{n}");
    assert!(first.compiled.iter().all(|l| l.contains("--gpu-architecture=sm_87")), "{:?}", first.compiled);
    assert_eq!(fake.bench("cuda").compiled.len(), 0, "the second start compiles nothing");
    // Every entry damaged: cut near its start, cut at its end, a bit turned.
    let is_entry = |p: &PathBuf| p.extension().is_some_and(|e| e == "cubin");
    let entries = std::fs::read_dir(fake.path("cache")).unwrap().map(|e| e.unwrap().path());
    let mut entries: Vec<PathBuf> = entries.filter(is_entry).collect();
    entries.sort();
    assert_eq!(entries.len(), n);
    for (i, path) in entries.iter().enumerate() {
        let mut bytes = std::fs::read(path).unwrap();
        match i % 3 {
            0 => bytes.truncate(i),
            1 => bytes.truncate(bytes.len() - 1),
            _ => *bytes.last_mut().unwrap() ^= 0x10,
        }
        std::fs::write(path, bytes).unwrap();
    }
    let healed = fake.bench("cuda");
    healed.assert_ok("damaged");
    assert_eq!(healed.compiled.len(), n);
    assert!(healed.said().contains("damaged; compiling it again"), "{}", healed.said());
    assert_eq!(fake.bench("cuda").compiled.len(), 0, "and are whole again");
    // Another GPU takes none of them.
    let other = fake.with("FAKE_CUDA_SM", 90).bench("cuda");
    assert_eq!(other.compiled.len(), n);
}

#[test]
fn a_cache_that_cannot_be_written_costs_only_time() {
    let name = "a_cache_that_cannot_be_written_costs_only_time";
    let Some(mut fake) = Fake::new(name) else { return };
    let warned = "compiled kernels cannot be kept here";
    // No folder can be made below a file, whoever asks.
    std::fs::write(fake.path("file"), "").unwrap();
    fake.set("TEGU_CACHE_DIR", fake.path("file/below").display());
    for _ in 0..2 {
        let ran = fake.bench("cuda");
        ran.assert_ok("no folder");
        assert_eq!(ran.said().matches(warned).count(), 1, "{}", ran.said());
        assert!(!ran.compiled.is_empty());
    }
    // A full disk: no byte can be written to any file. The fakes' logs cannot be, either.
    fake.set("TEGU_CACHE_DIR", fake.path("full").display());
    let program = support::program("tegu").join(" ");
    let script = format!("trap '' XFSZ; ulimit -f 0; exec {program} \"$@\"");
    let args = [
        "-c",
        &script,
        "sh",
        "bench",
        &model(),
        "--backend",
        "cuda",
        "--pp",
        "40",
        "--tg",
        "2",
        "--roof-mib",
        "0",
    ];
    let mut command = fake.environment(Command::new("sh"), &args);
    let output = command.env_remove("FAKE_NVRTC_LOG").env_remove("FAKE_CUDA_LOG").output().unwrap();
    let ran = fake.finish(output);
    ran.assert_ok("full");
    assert_eq!(ran.said().matches(warned).count(), 1, "{}", ran.said());
    let left = std::fs::read_dir(fake.path("full")).unwrap().map(|e| e.unwrap().file_name());
    let left: Vec<_> = left.filter(|n| !n.to_string_lossy().ends_with(".lock")).collect();
    assert!(left.is_empty(), "no half entry stays: {left:?}");
}

#[test]
fn two_starts_compile_each_kernel_once() {
    let Some(fake) = Fake::new("two_starts_compile_each_kernel_once") else { return };
    let fake = fake.with("FAKE_NVRTC_MS", 30);
    let args = ["bench", &model(), "--backend", "cuda", "--pp", "40", "--tg", "2", "--roof-mib", "0"];
    let start = || fake.command(&args).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let mut both = [start(), start()];
    both.iter_mut().for_each(|c| assert!(c.wait().unwrap().success()));
    let compiled = std::fs::read_to_string(fake.path("compiler")).unwrap();
    let mut lines: Vec<&str> = compiled.lines().collect();
    let all = lines.len();
    lines.sort();
    lines.dedup();
    assert_eq!(lines.len(), all, "none was compiled by both");
}

#[test]
fn packaged_kernels_need_no_compiler() {
    let Some(mut fake) = Fake::new("packaged_kernels_need_no_compiler") else { return };
    let file = |name: &str| fake.path(name).display().to_string();
    let (whole, hopper, damaged, garbage) = (file("all"), file("hopper"), file("damaged"), file("garbage"));
    fake.run(&["kernels", "build", "--archive", &whole]).assert_ok("build");
    fake.run(&["kernels", "build", "--arch", "sm_90", "--archive", &hopper]).assert_ok("build for one");
    let mut bytes = std::fs::read(&whole).unwrap();
    // Every block of code: what follows the head and the directory.
    let n = u64::from_le_bytes(bytes[8..16].try_into().unwrap()) as usize;
    assert_eq!(n % 6, 0, "six architectures");
    bytes[24 + 40 * n..].iter_mut().for_each(|b| *b ^= 0x55);
    std::fs::write(&damaged, bytes).unwrap();
    std::fs::write(&garbage, "no archive").unwrap();
    let compiler = fakes().unwrap().display().to_string();
    let none = file("no-compiler");
    std::fs::create_dir(&none).unwrap();
    fake.set("TEGU_NVRTC_DIR", &none);
    fake.set("TEGU_KERNELS", &whole);
    // Machine code where it is the GPU's own, text for one that is newer than the package.
    for (sm, own) in [(80, true), (86, true), (87, true), (89, true), (90, true), (88, false), (120, false)] {
        fake.set("FAKE_CUDA_SM", sm);
        let ran = fake.bench("cuda");
        ran.assert_ok("packaged");
        assert!(ran.compiled.is_empty());
        let (code, text) = (ran.count("cubins"), ran.count("ptx"));
        assert!(if own { code > 10 && text == 0 } else { text > 10 && code == 0 }, "{sm}: {code}, {text}");
    }
    // What cannot be used is said, and compiled here where that is possible.
    fake.set("FAKE_CUDA_SM", 87);
    for (archive, words) in [(&hopper, "for other GPUs: compiling them here"), (&damaged, "code is damaged")]
    {
        fake.set("TEGU_KERNELS", archive);
        fake.set("TEGU_NVRTC_DIR", &none);
        let ran = fake.bench("cuda");
        ran.assert_refused(archive, 2, &["compiler", "libnvrtc.so"]);
        assert!(ran.said().contains(words), "{archive}: {}", ran.said());
        fake.set("TEGU_NVRTC_DIR", &compiler);
        let ran = fake.bench("cuda");
        ran.assert_ok(archive);
        assert!(ran.count("cubins") > 10, "{archive}");
    }
    fake.set("TEGU_KERNELS", &garbage);
    fake.bench("cuda").assert_refused("garbage", 2, &["garbage", "an archive of kernels"]);
}

/// Times on the fake say nothing; that every launch is one that the driver takes does.
#[test]
fn each_kernel_of_the_benchmark_can_be_launched_and_recorded() {
    let Some(fake) = Fake::new("each_kernel_of_the_benchmark_can_be_launched_and_recorded") else { return };
    let svg = fake.path("picture.svg").display().to_string();
    let args = ["bench", "--kernels=Q4_0", "--backend", "cuda", "--pp", "64", "--json", "--svg", &svg];
    let ran = fake.run(&args);
    ran.assert_ok("bench");
    ran.assert_nothing_forgotten("bench");
    assert_eq!(ran.count("bad_launches") + ran.count("copies_outside_memory"), 0);
    let json: serde_json::Value = serde_json::from_slice(&ran.output.stdout).unwrap();
    let results = json["reports"][0]["results"].as_array().unwrap();
    assert!(results.len() > 40, "{}", results.len());
    for r in results {
        assert!(r["bytes"].as_u64().unwrap() > 0 && !r["kernel"].as_str().unwrap().is_empty(), "{r}");
    }
    assert!(std::fs::read_to_string(&svg).unwrap().contains("</svg>"));
    // The same, shown again without a GPU.
    std::fs::write(fake.path("report.json"), &ran.output.stdout).unwrap();
    let path = fake.path("report.json").display().to_string();
    let again = fake.run(&["bench", "--kernels", "--recorded", &path]);
    again.assert_ok("recorded");
    assert!(again.counts.is_empty(), "no driver was opened");
    assert!(String::from_utf8_lossy(&again.output.stdout).contains("deepseek-v2-lite decode"));
}
