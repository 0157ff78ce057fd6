//! `tegu kernels`: the CUDA kernels that travel in this binary: compiled ahead of time, and what each needs.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Mutex;

use clap::{Args, Subcommand};

use super::args::Common;
use super::out::Out;
use crate::backend::cuda::archive::{Archive, Target};
use crate::backend::cuda::module::{Unit, compile};
use crate::backend::cuda::nvrtc::Nvrtc;
use crate::backend::cuda::sass::{self, Loop};
use crate::backend::cuda::table::FILES;
use crate::backend::cuda::usage::{self, SHARED_BYTES_MAX, Usage};
use crate::units::{Bytes, Error, Result};

/// Arguments of `tegu kernels`.
#[derive(Debug, Args)]
pub struct KernelsArgs {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, Subcommand)]
enum What {
    /// Compile every kernel with NVRTC, for GPUs that need not be here; fails if one spills registers
    Build(BuildArgs),
}

#[derive(Debug, Args)]
struct BuildArgs {
    /// Targets: sm_NN for machine code, compute_NN for PTX
    #[arg(long, value_name = "ARCH,…", value_delimiter = ',', value_parser = arch)]
    #[arg(default_value = "sm_80,sm_86,sm_87,sm_89,sm_90,compute_87")]
    arch: Vec<String>,
    /// Only these files
    #[arg(long, value_name = "NAME,…", value_delimiter = ',')]
    only: Vec<String>,
    /// Folder to write FILE.VARIANT.ARCH.cubin (or .ptx) into; without, only the table is printed
    #[arg(short, long, value_name = "DIR")]
    output: Option<PathBuf>,
    /// One file of all of it: a build with TEGU_KERNELS=FILE embeds it, a run with TEGU_KERNELS=FILE uses it
    #[arg(long, value_name = "FILE", conflicts_with = "only")]
    archive: Option<PathBuf>,
    /// Threads; 0: one a core
    #[arg(short, long, value_name = "N", default_value_t = 0)]
    threads: usize,
}

/// Examples for `--help`.
pub const EXAMPLES: &str = "\
Examples:
  tegu kernels build --arch sm_87
  TEGU_NVRTC_DIR=wheels tegu kernels build -o cubins
  tegu kernels build --archive kernels.tgk && TEGU_KERNELS=$PWD/kernels.tgk cargo build --release";

fn arch(text: &str) -> std::result::Result<String, String> {
    let number = text.strip_prefix("sm_").or(text.strip_prefix("compute_"));
    let ok = number.is_some_and(|n| n.len() <= 3 && n.parse::<u32>().is_ok_and(|n| n >= 80));
    debug_assert!(!ok || Target::from_name(text).is_some());
    if ok { Ok(text.to_owned()) } else { Err("expected sm_NN or compute_NN, 80 or later".into()) }
}

/// Runs the command.
pub fn run(args: &KernelsArgs, common: &Common) -> Result<()> {
    common.config(Vec::new())?;
    let What::Build(args) = &args.what;
    build(args)
}

fn build(args: &BuildArgs) -> Result<()> {
    // Any release will do here: no driver has to load the result.
    let nvrtc = Nvrtc::find(u32::MAX)?;
    if let Some(dir) = &args.output {
        std::fs::create_dir_all(dir).map_err(|e| Error::io(dir, "make the folder", e))?;
    }
    let mut jobs = Vec::new();
    for f in FILES.iter().filter(|f| args.only.is_empty() || args.only.iter().any(|n| n == f.name)) {
        for variant in f.variants {
            jobs.extend(args.arch.iter().map(|a| (Unit { file: f.name, variant }, a.clone())));
        }
    }
    if jobs.is_empty() {
        let names: Vec<&str> = FILES.iter().map(|f| f.name).collect();
        return Err(Error::bad("--only", "file", names.join(", "), args.only.join(",")));
    }
    let queue = Mutex::new(jobs.iter().rev().cloned().collect::<Vec<_>>());
    let done = Mutex::new(Vec::new());
    let work = || {
        loop {
            let Some((unit, arch)) = queue.lock().expect("no worker panics").pop() else { return };
            let made = one(args, &nvrtc, unit, &arch);
            done.lock().expect("no worker panics").push((unit, arch, made));
        }
    };
    let threads = if args.threads == 0 { crate::app::cores() } else { args.threads };
    std::thread::scope(|s| (0..threads.min(jobs.len())).for_each(|_| drop(s.spawn(work))));
    let mut done = done.into_inner().expect("no worker panics");
    done.sort_by_key(|(u, a, _)| (u.file, u.variant, a.clone()));
    let archive = args.archive.as_deref().map(|path| (path, pieces(&mut done)));
    report(&nvrtc, done)?;
    // Only if nothing failed: what is embedded is whole.
    let Some((path, pieces)) = archive else { return Ok(()) };
    let bytes = Archive::write(&pieces);
    std::fs::write(path, &bytes).map_err(|e| Error::io(path, "write", e))?;
    Out::stdout().text(&format!(
        "{}: {} modules, {}\n",
        path.display(),
        pieces.len(),
        Bytes(bytes.len() as u64)
    ))
}

/// What an archive takes of what was compiled.
fn pieces(done: &mut [Made]) -> Vec<(u128, Target, Vec<u8>)> {
    let of = |(unit, arch, made): &mut Made| {
        let code = std::mem::take(&mut made.as_mut().ok()?.code);
        Some((unit.key(arch).digest(), Target::from_name(arch)?, code))
    };
    done.iter_mut().filter_map(of).collect()
}

/// Compiles one unit; writes it if asked to.
fn one(args: &BuildArgs, nvrtc: &Nvrtc, unit: Unit, arch: &str) -> Result<One> {
    let made = compile(nvrtc, unit, arch)?;
    if let Some(dir) = &args.output {
        let variant = unit.variant.rsplit('=').next().unwrap_or("").to_lowercase();
        let ending = if arch.starts_with("sm_") { "cubin" } else { "ptx" };
        let parts = [unit.file, &variant, arch, ending];
        let name: Vec<&str> = parts.into_iter().filter(|p| !p.is_empty()).collect();
        let path = dir.join(name.join("."));
        std::fs::write(&path, &made.code).map_err(|e| Error::io(&path, "write", e))?;
    }
    // Assembly has no machine code to count.
    let loops = sass::functions(&made.code).into_iter();
    let loops = loops.filter_map(|(name, code)| Some((name, sass::inner_loop(code)?))).collect();
    Ok(One { usages: usage::read(&made.log), loops, bytes: made.code.len(), code: made.code })
}

/// One compiled unit.
struct One {
    usages: Vec<Usage>,
    /// The inner loop of each kernel that has one.
    loops: HashMap<String, Loop>,
    bytes: usize,
    code: Vec<u8>,
}

type Made = (Unit, String, Result<One>);

/// Prints the table; the first failure, or a kernel past a limit, is the command's.
fn report(nvrtc: &Nvrtc, done: Vec<Made>) -> Result<()> {
    let (major, minor) = nvrtc.version;
    let mut out = Out::stdout();
    out.text(&format!("NVRTC {major}.{minor}\n"))?;
    let mut failed = None;
    let (mut kernels, mut bytes) = (0, 0);
    for (unit, arch, made) in done {
        let made = match made {
            Ok(made) => made,
            Err(e) => {
                log::error!("{} {} {arch}: {e}", unit.file, unit.variant);
                failed.get_or_insert(e);
                continue;
            }
        };
        bytes += made.bytes;
        for u in made.usages {
            kernels += 1;
            let name = format!("{} {} {}", unit.file, unit.variant, u.kernel);
            let uses = format!("{:3} registers {:6} bytes shared", u.registers, u.shared_bytes);
            let inner = made.loops.get(&u.kernel).map_or(String::new(), |l| {
                let p = l.pipes;
                format!(
                    ", inner loop {}: INT {} FP {} LSU {} tensor {}",
                    p.issue(),
                    p.int,
                    p.fp,
                    p.lsu,
                    p.tensor
                )
            });
            out.text(&format!("{arch:11} {name:60} {uses}{inner}\n"))?;
            if u.local_bytes > 0 || u.shared_bytes > SHARED_BYTES_MAX {
                let expected = format!("no local memory and at most {SHARED_BYTES_MAX} bytes shared");
                let found = format!("{} bytes local, {} shared", u.local_bytes, u.shared_bytes);
                failed.get_or_insert(Error::bad(format!("kernel {name}"), arch.as_str(), expected, found));
            }
        }
    }
    out.text(&format!("{kernels} kernels, {bytes} bytes\n"))?;
    failed.map_or(Ok(()), Err)
}
