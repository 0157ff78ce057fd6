//! NVIDIA's run-time compiler, bound by hand: cudarc's loader knows neither the folders that it lies in nor the name of
//! release 13, and panics where a library is missing.
//!
//! Looked for in the folder that `TEGU_NVRTC_DIR` names (a toolkit, or where `pip install --target` put the wheels), by
//! name (`LD_LIBRARY_PATH`, the loader's cache), and in the toolkits under `/usr/local/cuda*`.

use super::driver::reason;
use crate::units::{Error, Result};
use libloading::Library;
use std::ffi::{CStr, CString, c_char, c_int};
use std::path::{Path, PathBuf};
use std::ptr::{null, null_mut};

type Program = *mut std::ffi::c_void;
type Status = c_int;
type CreateProgram = unsafe extern "C" fn(
    *mut Program,
    *const c_char,
    *const c_char,
    c_int,
    *const *const c_char,
    *const *const c_char,
) -> Status;
type SizeOf = unsafe extern "C" fn(Program, *mut usize) -> Status;
type Fill = unsafe extern "C" fn(Program, *mut c_char) -> Status;

/// Names by which the loader may know it, newest release first.
const NAMES: [&str; 3] = ["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"];
/// Where a folder named by the user may hold it: itself, a toolkit's, the wheels' of releases 12 and 13.
const LIB_FOLDERS: [&str; 5] = ["", "lib64", "lib", "nvidia/cuda_nvrtc/lib", "nvidia/cu13/lib"];
/// Where headers lie, seen from the library's folder: a toolkit, a wheel of release 13, a wheel of release 12.
const INCLUDE_FOLDERS: [&str; 4] =
    ["../include", "../../include", "../../cuda_runtime/include", "../targets/aarch64-linux/include"];
/// The functions used; a library without one of them is not the compiler.
const FUNCTIONS: [&str; 11] = [
    "nvrtcVersion",
    "nvrtcCreateProgram",
    "nvrtcCompileProgram",
    "nvrtcGetCUBINSize",
    "nvrtcGetCUBIN",
    "nvrtcGetPTXSize",
    "nvrtcGetPTX",
    "nvrtcGetProgramLogSize",
    "nvrtcGetProgramLog",
    "nvrtcGetErrorString",
    "nvrtcDestroyProgram",
];

/// What a compilation makes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Output {
    /// Machine code of one architecture.
    Cubin,
    /// Assembly for the driver to translate.
    Ptx,
}

/// One compilation.
#[derive(Debug, Clone)]
pub struct Job<'a> {
    /// The file's name, for messages.
    pub name: &'a str,
    /// Its text.
    pub source: &'a str,
    /// `(name, text)` of what it may include.
    pub headers: &'a [(&'a str, &'a str)],
    /// Flags, without include folders.
    pub options: &'a [String],
    /// What to make.
    pub output: Output,
}

/// The compiler's answer.
#[derive(Debug)]
pub struct Compiled {
    /// What was asked for.
    pub code: Vec<u8>,
    /// Warnings, and with `--ptxas-options=-v` what each kernel uses.
    pub log: String,
}

/// The opened library. It is never closed: threads of its own may still run in it.
pub struct Nvrtc {
    lib: &'static Library,
    /// `(major, minor)`
    pub version: (u32, u32),
    /// Where it lies, as far as it is known.
    pub path: PathBuf,
    include: Vec<PathBuf>,
}

impl Nvrtc {
    /// Finds a compiler of at most release `major_max` (a driver refuses the code of a newer one).
    pub fn find(major_max: u32) -> Result<Nvrtc> {
        let mut seen = Vec::new();
        for path in candidates() {
            match Nvrtc::open(&path) {
                Ok(found) if found.version.0 <= major_max => return Ok(found),
                Ok(newer) => {
                    seen.push(format!("{}.{} in {}", newer.version.0, newer.version.1, path.display()))
                }
                Err(e) if path.is_absolute() => seen.push(e.to_string()),
                Err(_) => {}
            }
        }
        let release =
            if major_max == u32::MAX { "any release".into() } else { format!("CUDA {major_max} or before") };
        let expected = format!(
            "libnvrtc.so of {release} (JetPack: apt install cuda-nvrtc-12-6 cuda-cudart-dev-12-6; \
             elsewhere a toolkit or pip's wheels in TEGU_NVRTC_DIR)"
        );
        Err(Error::bad(
            "CUDA",
            "compiler",
            expected,
            if seen.is_empty() { "none".into() } else { seen.join("; ") },
        ))
    }

    /// Opens the library at `path`, or by its bare name.
    pub fn open(path: &Path) -> Result<Nvrtc> {
        let bad = |e: &dyn std::fmt::Display| Error::bad(path, "library", "CUDA's run-time compiler", e);
        if let Some(folder) = path.parent().filter(|f| f.is_dir()) {
            open_builtins(folder);
        }
        // SAFETY: loading runs the library's initializers; it is NVIDIA's own, named by the user or found where its
        // packages put it.
        let lib = unsafe { Library::new(path) }.map_err(|e| bad(&reason(&e)))?;
        let lib: &'static Library = Box::leak(Box::new(lib));
        for name in FUNCTIONS {
            // SAFETY: only asks whether the symbol exists; it is not called through this type.
            if unsafe { lib.get::<unsafe extern "C" fn()>(name.as_bytes()) }.is_err() {
                return Err(bad(&format!("no function {name}")));
            }
        }
        let mut found = Nvrtc { lib, version: (0, 0), path: path.to_owned(), include: Vec::new() };
        let (mut major, mut minor) = (0, 0);
        // SAFETY: the signature is nvrtcVersion's in every release; both pointers are valid for the call.
        let status = unsafe {
            found.function::<unsafe extern "C" fn(*mut c_int, *mut c_int) -> Status>("nvrtcVersion")(
                &mut major, &mut minor,
            )
        };
        if status != 0 {
            return Err(bad(&format!("nvrtcVersion: error {status}")));
        }
        found.version = (major as u32, minor as u32);
        if !path.is_absolute() {
            found.path = loaded_from("libnvrtc.so").unwrap_or_else(|| path.to_owned());
        }
        found.include = include_folders(&found.path);
        Ok(found)
    }

    fn function<F: Copy>(&self, name: &str) -> F {
        // SAFETY: presence was checked when opened; callers name the type that nvrtc.h declares.
        *unsafe { self.lib.get::<F>(name.as_bytes()) }.expect("checked when opened")
    }

    fn error(&self, job: &str, doing: &str, status: Status) -> Error {
        let text = self.function::<unsafe extern "C" fn(Status) -> *const c_char>("nvrtcGetErrorString");
        // SAFETY: the function takes any number and returns a static string.
        let text = unsafe { CStr::from_ptr(text(status)) }.to_string_lossy().into_owned();
        Error::bad(format!("kernel {job}"), doing, "success", text)
    }

    /// Compiles. A failure's message holds the first line of the log that is an error.
    pub fn compile(&self, job: &Job) -> Result<Compiled> {
        let program = self.create(job)?;
        let result = self.run(job, program);
        let destroy = self.function::<unsafe extern "C" fn(*mut Program) -> Status>("nvrtcDestroyProgram");
        let mut program = program;
        // SAFETY: the program was created above and is not used after.
        unsafe { destroy(&mut program) };
        result
    }

    fn create(&self, job: &Job) -> Result<Program> {
        let c = |s: &str| CString::new(s).expect("sources and names have no NUL");
        let (source, name) = (c(job.source), c(job.name));
        let texts: Vec<CString> = job.headers.iter().map(|h| c(h.1)).collect();
        let names: Vec<CString> = job.headers.iter().map(|h| c(h.0)).collect();
        let pointers = |v: &[CString]| v.iter().map(|s| s.as_ptr()).collect::<Vec<_>>();
        let (texts_p, names_p) = (pointers(&texts), pointers(&names));
        let mut program = null_mut();
        // SAFETY: nvrtc.h's signature; every pointer outlives the call, which copies what it needs.
        let status = unsafe {
            self.function::<CreateProgram>("nvrtcCreateProgram")(
                &mut program,
                source.as_ptr(),
                name.as_ptr(),
                texts_p.len() as c_int,
                texts_p.as_ptr(),
                names_p.as_ptr(),
            )
        };
        if status == 0 { Ok(program) } else { Err(self.error(job.name, "create", status)) }
    }

    fn run(&self, job: &Job, program: Program) -> Result<Compiled> {
        let include = self.include.iter().map(|p| format!("--include-path={}", p.display()));
        let options: Vec<CString> = (job.options.iter().cloned().chain(include))
            .map(|o| CString::new(o).expect("options have no NUL"))
            .collect();
        let pointers: Vec<*const c_char> = options.iter().map(|o| o.as_ptr()).collect();
        type Compile = unsafe extern "C" fn(Program, c_int, *const *const c_char) -> Status;
        let first = if pointers.is_empty() { null() } else { pointers.as_ptr() };
        // SAFETY: nvrtc.h's signature; the program is alive and the options outlive the call.
        let status = unsafe {
            self.function::<Compile>("nvrtcCompileProgram")(program, pointers.len() as c_int, first)
        };
        let log = self.bytes(job, program, "nvrtcGetProgramLogSize", "nvrtcGetProgramLog")?;
        let log = String::from_utf8_lossy(&log).trim_end_matches('\0').to_owned();
        if status != 0 {
            let line = log.lines().find(|l| l.contains("error") || l.contains("spill")).unwrap_or(&log);
            log::debug!("{}:\n{log}", job.name);
            return Err(Error::bad(format!("kernel {}", job.name), "compile", "no error", line));
        }
        let code = match job.output {
            Output::Cubin => self.bytes(job, program, "nvrtcGetCUBINSize", "nvrtcGetCUBIN")?,
            Output::Ptx => self.bytes(job, program, "nvrtcGetPTXSize", "nvrtcGetPTX")?,
        };
        Ok(Compiled { code, log })
    }

    fn bytes(&self, job: &Job, program: Program, size: &str, fill: &str) -> Result<Vec<u8>> {
        let mut n = 0usize;
        // SAFETY: the program is alive; the size function writes one number.
        let status = unsafe { self.function::<SizeOf>(size)(program, &mut n) };
        if status != 0 {
            return Err(self.error(job.name, size, status));
        }
        let mut out = vec![0u8; n];
        // SAFETY: the buffer has the size just asked for.
        let status = unsafe { self.function::<Fill>(fill)(program, out.as_mut_ptr().cast()) };
        if status == 0 { Ok(out) } else { Err(self.error(job.name, fill, status)) }
    }
}

/// Paths and names to try, best first.
fn candidates() -> Vec<PathBuf> {
    let mut out = Vec::new();
    if let Some(dir) = std::env::var_os("TEGU_NVRTC_DIR").filter(|d| !d.is_empty()) {
        // A folder named outright is the only one looked into: a slip in it should not pass unseen.
        LIB_FOLDERS.iter().for_each(|f| out.extend(libraries_in(&Path::new(&dir).join(f))));
        return out;
    }
    out.extend(NAMES.map(PathBuf::from));
    let mut toolkits: Vec<PathBuf> =
        std::fs::read_dir("/usr/local").map(|d| d.flatten().map(|e| e.path()).collect()).unwrap_or_default();
    toolkits.retain(|p| p.file_name().is_some_and(|n| n.to_string_lossy().starts_with("cuda")));
    toolkits.sort();
    for kit in toolkits.iter().rev() {
        ["lib64", "targets/aarch64-linux/lib", "targets/x86_64-linux/lib"]
            .iter()
            .for_each(|f| out.extend(libraries_in(&kit.join(f))));
    }
    out
}

/// The compilers in a folder, shortest name of each release first.
fn libraries_in(folder: &Path) -> Vec<PathBuf> {
    NAMES
        .iter()
        .map(|n| folder.join(n))
        .filter(|p| p.is_file())
        .filter_map(|p| p.canonicalize().ok())
        .collect()
}

/// The compiler opens its builtins by bare name, and finds them only if they are open already or on the loader's path.
fn open_builtins(folder: &Path) {
    let Ok(entries) = std::fs::read_dir(folder) else { return };
    for entry in entries.flatten() {
        let name = entry.file_name();
        if name.to_string_lossy().starts_with("libnvrtc-builtins.so.") {
            // SAFETY: as for the compiler itself; kept open for the process's life.
            if let Ok(lib) = unsafe { Library::new(entry.path()) } {
                std::mem::forget(lib);
            }
        }
    }
}

/// Where the loader found a library that it was given by name.
fn loaded_from(name: &str) -> Option<PathBuf> {
    let maps = std::fs::read_to_string("/proc/self/maps").ok()?;
    let path = maps
        .lines()
        .filter_map(|l| l.split_once('/'))
        .find(|(_, p)| p.rsplit('/').next().is_some_and(|f| f.starts_with(name)))?;
    Path::new(&format!("/{}", path.1)).canonicalize().ok()
}

/// Folders with CUDA's own headers beside the library.
fn include_folders(library: &Path) -> Vec<PathBuf> {
    let Some(folder) = library.parent() else { return Vec::new() };
    let beside = INCLUDE_FOLDERS.iter().map(|f| folder.join(f));
    let usual = std::iter::once(PathBuf::from("/usr/local/cuda/include"));
    beside.chain(usual).filter(|p| p.join("cuda_fp16.h").is_file()).take(1).collect()
}
