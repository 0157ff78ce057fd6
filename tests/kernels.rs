//! Every kernel, in every variant, through NVIDIA's compiler, which needs no GPU: no spill and no local memory (the flags
//! make both an error), and registers and static shared memory within the table below. Runs where `TEGU_KERNEL_ARCHS`
//! names architectures (`sm_87,sm_90`); `TEGU_NVRTC_DIR` says which compiler. `.ci/run kernels` gives both releases.

use crate::support::skipped;
use std::collections::BTreeMap;
use std::sync::Mutex;
use tegu::backend::cuda::Unit;
use tegu::backend::cuda::module::compile;
use tegu::backend::cuda::nvrtc::Nvrtc;
use tegu::backend::cuda::sass;
use tegu::backend::cuda::table::{FILES, HEADERS, KernelFile};

/// Most registers of a thread and bytes of static shared memory of a block, by file. An SM of Orin has 65,536 registers:
/// a file's bound is what its blocks are meant to share it by.
const LIMITS: [(&str, u32, u32); 14] = [
    // The exact kernels, where speed is not the point, take what there is; the rest stay under 226. Sums of 8 rows.
    ("gemv", 255, 20_480),
    ("expert", 128, 4_608),
    // Three blocks of 128 threads to an SM.
    ("gemm", 168, 0),
    ("embed", 40, 0),
    ("quantize", 40, 64),
    ("group", 40, 16_640),
    ("norm", 128, 1_024),
    ("rope", 64, 256),
    // Sums of a head's values, and the tensor cores' fragments.
    ("attend", 168, 4_096),
    ("flash", 255, 0),
    ("mla", 40, 0),
    ("silu", 40, 0),
    ("sample", 40, 16_640),
    ("roof", 64, 0),
];
/// The same for files that are not in the table: what a thread and a block can have at all.
const LIMITS_OF_OTHERS: (u32, u32) = (255, 49_152);

/// What one kernel uses.
#[derive(Debug, Clone, Copy, Default)]
struct Use {
    registers: u32,
    shared_bytes: u32,
}

/// The number before `unit` in a line of ptxas: `Used 32 registers, used 1 barriers, 1536 bytes smem`.
fn number_before(line: &str, unit: &str) -> u32 {
    let before = line.split(unit).next().filter(|b| b.len() < line.len());
    before.and_then(|b| b.split_whitespace().last()).and_then(|n| n.parse().ok()).unwrap_or(0)
}

/// What each kernel of a log of `--ptxas-options=-v` uses.
fn uses(log: &str) -> BTreeMap<String, Use> {
    let mut out = BTreeMap::new();
    let mut name = String::new();
    for line in log.lines() {
        if let Some(found) = line.split("entry function '").nth(1) {
            name = found.split('\'').next().unwrap_or_default().to_owned();
        } else if line.contains("Used ") && line.contains(" registers") {
            let shared_bytes = number_before(line, " bytes smem");
            out.insert(name.clone(), Use { registers: number_before(line, " registers"), shared_bytes });
        } else if line.contains("bytes stack frame") {
            assert!(
                ["stack frame", "spill stores", "spill loads"]
                    .iter()
                    .all(|u| number_before(line, &format!(" bytes {u}")) == 0),
                "{name}: {line}"
            );
        }
    }
    out
}

/// Compiles all units on all cores; the most that a kernel of each file uses.
fn compile_all(nvrtc: &Nvrtc, arch: &str) -> BTreeMap<&'static str, Use> {
    let units = FILES.iter().flat_map(|f| f.variants.iter().map(move |v| (f, *v)));
    let queue: Mutex<Vec<(&KernelFile, &'static str)>> = Mutex::new(units.collect());
    let most = Mutex::new(BTreeMap::<&'static str, Use>::new());
    let work = || {
        loop {
            let Some((file, variant)) = queue.lock().unwrap().pop() else { return };
            let made = compile(nvrtc, Unit { file: file.name, variant }, arch)
                .unwrap_or_else(|e| panic!("{variant}: {e}"));
            assert!(made.code.starts_with(b"\x7fELF"), "{} {variant}: no machine code", file.name);
            let kernels = uses(&made.log);
            assert!(!kernels.is_empty(), "{} {variant}: no kernel in the log:\n{}", file.name, made.log);
            let of_file = LIMITS.iter().find(|l| l.0 == file.name).map(|l| (l.1, l.2));
            let (registers, shared_bytes) = of_file.unwrap_or(LIMITS_OF_OTHERS);
            for (name, used) in kernels {
                let within = used.registers <= registers && used.shared_bytes <= shared_bytes;
                assert!(
                    within,
                    "{arch} {} {variant} {name}: {used:?}, at most {registers}, {shared_bytes}",
                    file.name
                );
                let mut most = most.lock().unwrap();
                let m = most.entry(file.name).or_default();
                m.registers = m.registers.max(used.registers);
                m.shared_bytes = m.shared_bytes.max(used.shared_bytes);
            }
        }
    };
    let threads = std::thread::available_parallelism().map_or(1, |n| n.get());
    std::thread::scope(|s| (0..threads).for_each(|_| drop(s.spawn(work))));
    most.into_inner().unwrap()
}

/// One text for all architectures: what compiles for sm_80 and sm_87 has no instruction that they lack, and no branch
/// gives a later one another.
#[test]
fn no_kernel_asks_which_architecture_it_is_for() {
    let texts = FILES.iter().map(|f| (f.name, f.source)).chain(HEADERS.iter().copied());
    for (name, text) in texts {
        assert!(!text.contains("__CUDA_ARCH"), "{name}");
    }
}

/// Most instructions a weight and lane that the inner loop of a decode product may issue on sm_87, all pipes together, by
/// codec: what keeps it bound by memory where an SM's share of the bandwidth is highest (the low power modes). MXFP4 looks its
/// values up in a table.
/// The second is for 2 to 8 rows, whose kernel unpacks a weight once for all of them.
const ISSUE_A_WEIGHT: [(&str, f64, f64); 4] = [
    ("CODEC=CODEC_Q4_0", 1.75, 2.1),
    ("CODEC=CODEC_Q8_0", 1.6, 2.3),
    ("CODEC=CODEC_Q4_K", 1.9, 3.8),
    ("CODEC=CODEC_MXFP4", 5.0, 5.7),
];

#[test]
fn a_weight_costs_few_instructions() {
    let name = "a_weight_costs_few_instructions";
    if !std::env::var("TEGU_KERNEL_ARCHS").is_ok_and(|a| a.contains("sm_87")) {
        return skipped(name, "TEGU_KERNEL_ARCHS does not name sm_87");
    }
    let nvrtc = Nvrtc::find(u32::MAX).unwrap();
    for (variant, one, few) in ISSUE_A_WEIGHT {
        let made = compile(&nvrtc, Unit { file: "gemv", variant }, "sm_87").unwrap();
        let functions = sass::functions(&made.code);
        for (kernel, most) in [("gemv_r1", one), ("gemv_r8", few), ("swiglu_r8", few)] {
            let (_, code) = functions.iter().find(|(name, _)| name == kernel).expect(kernel);
            let inner = sass::inner_loop(code).expect("a loop over the columns");
            // Four weights a byte dot product, 16 x 32 an mma for a warp's 32 lanes; two of either for the activation's
            // two halves.
            let (dots, mmas) = (inner.dots, inner.pipes.tensor);
            assert!(if most == one { dots >= 64 && mmas == 0 } else { dots == 0 && mmas >= 8 }, "{inner:?}");
            let issue = f64::from(inner.pipes.issue()) / (f64::from(dots) * 2.0 + f64::from(mmas) * 8.0);
            println!("NVRTC {:?} {variant} {kernel}: {issue:.2} a weight: {:?}", nvrtc.version, inner.pipes);
            assert!(issue <= most, "{variant} {kernel}: {issue:.2} instructions a weight, at most {most}");
        }
    }
}

#[test]
fn kernels_compile_within_their_limits() {
    let name = "kernels_compile_within_their_limits";
    let Ok(archs) = std::env::var("TEGU_KERNEL_ARCHS") else {
        return skipped(name, "TEGU_KERNEL_ARCHS names no architecture");
    };
    let nvrtc = match Nvrtc::find(u32::MAX) {
        Ok(found) => found,
        Err(e) => panic!("TEGU_KERNEL_ARCHS is {archs}: {e}"),
    };
    assert!(archs.split(',').all(|a| a.starts_with("sm_")), "TEGU_KERNEL_ARCHS: {archs}");
    for arch in archs.split(',') {
        for (file, most) in compile_all(&nvrtc, arch) {
            println!("NVRTC {:?} {arch} {file}: at most {most:?}", nvrtc.version);
        }
    }
}
