//! `tegu kernels`: the CUDA kernels that travel in this binary: compiled ahead of time, and what each needs.

use std::path::PathBuf;
use std::sync::Mutex;

use clap::{Args, Subcommand};

use super::args::Common;
use super::out::Out;
use crate::backend::cuda::module::{Unit, compile};
use crate::backend::cuda::nvrtc::Nvrtc;
use crate::backend::cuda::table::FILES;
use crate::backend::cuda::usage::{self, SHARED_BYTES_MAX, Usage};
use crate::units::{Error, Result};

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
    /// Threads; 0: one a core
    #[arg(short, long, value_name = "N", default_value_t = 0)]
    threads: usize,
}

/// Examples for `--help`.
pub const EXAMPLES: &str = "\
Examples:
  tegu kernels build --arch sm_87
  TEGU_NVRTC_DIR=wheels tegu kernels build -o cubins";

fn arch(text: &str) -> std::result::Result<String, String> {
    let number = text.strip_prefix("sm_").or(text.strip_prefix("compute_"));
    let ok = number.is_some_and(|n| n.len() <= 3 && n.parse::<u32>().is_ok_and(|n| n >= 80));
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
    report(&nvrtc, done)
}

/// Compiles one unit; writes it if asked to.
fn one(args: &BuildArgs, nvrtc: &Nvrtc, unit: Unit, arch: &str) -> Result<(Vec<Usage>, usize)> {
    let made = compile(nvrtc, unit, arch)?;
    if let Some(dir) = &args.output {
        let variant = unit.variant.rsplit('=').next().unwrap_or("").to_lowercase();
        let ending = if arch.starts_with("sm_") { "cubin" } else { "ptx" };
        let parts = [unit.file, &variant, arch, ending];
        let name: Vec<&str> = parts.into_iter().filter(|p| !p.is_empty()).collect();
        let path = dir.join(name.join("."));
        std::fs::write(&path, &made.code).map_err(|e| Error::io(&path, "write", e))?;
    }
    Ok((usage::read(&made.log), made.code.len()))
}

type Made = (Unit, String, Result<(Vec<Usage>, usize)>);

/// Prints the table; the first failure, or a kernel past a limit, is the command's.
fn report(nvrtc: &Nvrtc, done: Vec<Made>) -> Result<()> {
    let (major, minor) = nvrtc.version;
    let mut out = Out::stdout();
    out.text(&format!("NVRTC {major}.{minor}\n"))?;
    let mut failed = None;
    let (mut kernels, mut bytes) = (0, 0);
    for (unit, arch, made) in done {
        let (usages, len) = match made {
            Ok(made) => made,
            Err(e) => {
                log::error!("{} {} {arch}: {e}", unit.file, unit.variant);
                failed.get_or_insert(e);
                continue;
            }
        };
        bytes += len;
        for u in usages {
            kernels += 1;
            let name = format!("{} {} {}", unit.file, unit.variant, u.kernel);
            let uses = format!("{:3} registers {:6} bytes shared", u.registers, u.shared_bytes);
            out.text(&format!("{arch:11} {name:60} {uses}\n"))?;
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
