//! Kernels from source to functions: compile (or find compiled) by unit, load, launch.

use super::archive::Archive;
use super::cache::{Cache, Key};
use super::driver::{Context, Device, Wait, failed};
use super::nvrtc::{Compiled, Job, Nvrtc, Output};
use super::params::Params;
use super::table::{FILES, HEADERS, KernelFile};
use crate::units::Result;
use cudarc::driver::{result, sys};
use std::cell::{OnceCell, RefCell};
use std::collections::HashMap;
use std::ffi::CString;
use std::sync::Mutex;

/// One module: a kernel file under one define (`""` for none).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Unit {
    /// The file's name without the ending.
    pub file: &'static str,
    /// One of its variants.
    pub variant: &'static str,
}

impl Unit {
    /// A file without variants.
    pub const fn of(file: &'static str) -> Unit {
        Unit { file, variant: "" }
    }

    fn table_row(&self) -> &'static KernelFile {
        let row = FILES.iter().find(|f| f.name == self.file && f.variants.contains(&self.variant));
        row.unwrap_or_else(|| panic!("{self:?} is no row of the kernel table"))
    }

    /// Everything that decides what it is compiled to for `arch`, but for the compiler's release.
    pub fn key(&self, arch: &str) -> Key {
        let mut key = Key::default();
        key.add(self.table_row().source);
        HEADERS.iter().for_each(|(name, text)| {
            key.add(name);
            key.add(text);
        });
        options(arch, self.variant).iter().for_each(|o| key.add(o));
        key
    }
}

/// A launch's shape.
#[derive(Debug, Clone, Copy)]
pub struct Grid {
    /// Blocks in x, y, z.
    pub blocks: [u32; 3],
    /// Threads of a block.
    pub threads: u32,
    /// Dynamic shared memory of a block.
    pub shared_bytes: u32,
}

/// Flags of every compilation. Spills and local memory are errors: a kernel that needs them on the smallest target is
/// written wrong.
pub fn options(arch: &str, variant: &str) -> Vec<String> {
    let mut all: Vec<String> = vec![
        format!("--gpu-architecture={arch}"),
        "--std=c++17".into(),
        "-default-device".into(),
        "--ptxas-options=-v".into(),
        "--ptxas-options=-Werror".into(),
        "--ptxas-options=-warn-spills".into(),
        "--ptxas-options=-warn-lmem-usage".into(),
    ];
    if !variant.is_empty() {
        all.push(format!("--define-macro={variant}"));
    }
    all
}

/// Compiles a unit for `arch`: `sm_87` gives machine code, `compute_87` assembly.
pub fn compile(nvrtc: &Nvrtc, unit: Unit, arch: &str) -> Result<Compiled> {
    let row = unit.table_row();
    let output = if arch.starts_with("compute") { Output::Ptx } else { Output::Cubin };
    let mut options = options(arch, unit.variant);
    if output == Output::Ptx {
        options.retain(|o| !o.starts_with("--ptxas"));
    }
    let name = format!("{}.cu", unit.file);
    let mut made = nvrtc.compile(&Job {
        name: &name,
        source: row.source,
        headers: HEADERS,
        options: &options,
        output,
    })?;
    // The driver takes assembly as a C string.
    if output == Output::Ptx && made.code.last() != Some(&0) {
        made.code.push(0);
    }
    Ok(made)
}

/// A loaded module's function.
#[derive(Debug, Clone, Copy)]
struct Function {
    raw: sys::CUfunction,
    /// Dynamic shared memory it was prepared for.
    shared_bytes: u32,
}

#[derive(Debug)]
struct Module {
    raw: sys::CUmodule,
    functions: HashMap<String, Function>,
}

/// Dynamic shared memory that needs no asking.
const SHARED_BYTES_FREE: u32 = 48 << 10;

/// A GPU with its kernels.
pub struct Gpu {
    /// The GPU.
    pub device: Device,
    modules: RefCell<HashMap<Unit, Module>>,
    cache: Cache,
    /// Kernels that a package brought along.
    archive: Option<Archive>,
    nvrtc: OnceCell<Nvrtc>,
    /// What is launched, while somebody wants to know.
    trace: RefCell<Option<Vec<(Unit, String)>>>,
}

// SAFETY: a Gpu has one owner at a time; the handles inside may move between threads with it (`Device` says why).
unsafe impl Send for Gpu {}

impl Gpu {
    /// Wraps an opened device; kernels are compiled as they are asked for.
    pub fn new(device: Device, cache: Cache) -> Gpu {
        Gpu {
            device,
            modules: RefCell::default(),
            cache,
            archive: None,
            nvrtc: OnceCell::new(),
            trace: RefCell::default(),
        }
    }

    /// The first GPU, with where its kernels come from: what is missing is said before anything is loaded.
    pub fn open(wait: Wait) -> Result<Gpu> {
        let mut gpu = Gpu::new(Device::open(0, wait)?, Cache::of_user());
        gpu.archive = Archive::shipped()?;
        // One unit stands for all: an archive holds every unit of one version of the kernels.
        if let Some(archive) = &gpu.archive {
            if archive
                .find(Unit { file: FILES[0].name, variant: FILES[0].variants[0] }, gpu.device.sm)
                .is_some()
            {
                return Ok(gpu);
            }
            log::warn!("the packaged kernels are of another version or for other GPUs: compiling them here");
        }
        gpu.nvrtc()?;
        Ok(gpu)
    }

    /// Its context.
    pub fn context(&self) -> &std::sync::Arc<Context> {
        &self.device.context
    }

    /// The compiler, opened at first need.
    fn nvrtc(&self) -> Result<&Nvrtc> {
        if let Some(found) = self.nvrtc.get() {
            return Ok(found);
        }
        let found = Nvrtc::find(self.device.driver_version as u32 / 1000)?;
        log::debug!("kernels: NVRTC {}.{} in {}", found.version.0, found.version.1, found.path.display());
        Ok(self.nvrtc.get_or_init(|| found))
    }

    /// Finds or compiles, on several threads, and loads those of `units` that are not loaded yet.
    pub fn prepare(&self, units: &[Unit]) -> Result<()> {
        self.context().bind()?;
        let mut todo: Vec<Unit> = Vec::new();
        for u in units {
            if !self.modules.borrow().contains_key(u) && !todo.contains(u) {
                todo.push(*u);
            }
        }
        if let Some(archive) = &self.archive {
            let mut without = Vec::new();
            for unit in todo {
                match archive.find(unit, self.device.sm) {
                    Some(code) => self.load(unit, &code)?,
                    None => without.push(unit),
                }
            }
            todo = without;
        }
        if todo.is_empty() { Ok(()) } else { self.compile_and_load(&todo) }
    }

    /// Compiles, or finds in the cache, and loads.
    fn compile_and_load(&self, todo: &[Unit]) -> Result<()> {
        let (nvrtc, cache) = (self.nvrtc()?, &self.cache);
        let arch = format!("sm_{}", self.device.sm);
        let queue = Mutex::new(todo.iter().rev().copied().collect::<Vec<_>>());
        let made = Mutex::new(Vec::new());
        let work = || {
            loop {
                let Some(unit) = queue.lock().expect("no worker panics").pop() else { return };
                let code = self::code(nvrtc, cache, unit, &arch);
                made.lock().expect("no worker panics").push((unit, code));
            }
        };
        let threads = std::thread::available_parallelism().map_or(1, |n| n.get()).min(todo.len());
        std::thread::scope(|s| (0..threads).for_each(|_| drop(s.spawn(work))));
        for (unit, code) in made.into_inner().expect("no worker panics") {
            self.load(unit, &code?)?;
        }
        Ok(())
    }

    fn load(&self, unit: Unit, code: &[u8]) -> Result<()> {
        // SAFETY: the image is whole machine code, or text with its NUL (the compiler's, or one whose checksum holds), and
        // the context is current.
        let raw = unsafe { result::module::load_data(code.as_ptr().cast()) }
            .map_err(|e| failed(format!("load kernel {} {}", unit.file, unit.variant), e))?;
        self.modules.borrow_mut().insert(unit, Module { raw, functions: HashMap::new() });
        Ok(())
    }

    /// The function `name` of a unit, ready for `shared_bytes` of dynamic shared memory.
    fn function(&self, unit: Unit, name: &str, shared_bytes: u32) -> Result<sys::CUfunction> {
        if !self.modules.borrow().contains_key(&unit) {
            self.prepare(&[unit])?;
        }
        let mut modules = self.modules.borrow_mut();
        let module = modules.get_mut(&unit).expect("just prepared");
        if let Some(f) = module.functions.get(name)
            && f.shared_bytes >= shared_bytes
        {
            return Ok(f.raw);
        }
        let c_name = CString::new(name).expect("kernel names have no NUL");
        // SAFETY: the module is loaded.
        let raw = unsafe { result::module::get_function(module.raw, c_name) }
            .map_err(|e| failed(format!("find kernel {name} in {} {}", unit.file, unit.variant), e))?;
        if shared_bytes > SHARED_BYTES_FREE {
            let attribute = sys::CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            // SAFETY: the function is the module's.
            unsafe { result::function::set_function_attribute(raw, attribute, shared_bytes as i32) }
                .map_err(|e| {
                    failed(format!("give kernel {name} {shared_bytes} bytes of shared memory"), e)
                })?;
        }
        let shared_bytes = shared_bytes.max(SHARED_BYTES_FREE);
        module.functions.insert(name.to_owned(), Function { raw, shared_bytes });
        Ok(raw)
    }

    /// The kernels that `work` launches, in order.
    pub fn traced(&self, work: impl FnOnce() -> Result<()>) -> Result<Vec<(Unit, String)>> {
        *self.trace.borrow_mut() = Some(Vec::new());
        let done = work();
        let launched = self.trace.borrow_mut().take().unwrap_or_default();
        done.map(|()| launched)
    }

    /// Machine code of a unit for any architecture, from the archive or the compiler.
    pub fn machine_code(&self, unit: Unit, sm: u32) -> Result<Vec<u8>> {
        let packaged = self.archive.as_ref().and_then(|a| a.find(unit, sm));
        match packaged.filter(|code| code.starts_with(b"\x7fELF")) {
            Some(code) => Ok(code),
            None => code(self.nvrtc()?, &self.cache, unit, &format!("sm_{sm}")),
        }
    }

    /// Puts a kernel on the stream.
    pub fn launch<P: Params>(&self, unit: Unit, name: &str, grid: Grid, params: &P) -> Result<()> {
        if let Some(trace) = self.trace.borrow_mut().as_mut() {
            trace.push((unit, name.to_owned()));
        }
        let function = self.function(unit, name, grid.shared_bytes)?;
        let [x, y, z] = grid.blocks;
        assert!(x > 0 && y > 0 && z > 0 && y < 65536 && z < 65536, "{name}: grid {:?}", grid.blocks);
        let mut args = [std::ptr::from_ref(params).cast_mut().cast::<std::ffi::c_void>()];
        // SAFETY: the kernel takes one struct of this layout (`Params`), which the driver copies before it returns.
        unsafe {
            result::launch_kernel(
                function,
                (x, y, z),
                (grid.threads, 1, 1),
                grid.shared_bytes,
                self.device.stream(),
                &mut args,
            )
        }
        .map_err(|e| failed(format!("launch {name}"), e))
    }
}

impl Drop for Gpu {
    fn drop(&mut self) {
        if self.context().bind().is_err() {
            return;
        }
        for (_, m) in self.modules.borrow_mut().drain() {
            // SAFETY: loaded once, unloaded once; nothing is launched after.
            let _ = unsafe { result::module::unload(m.raw) };
        }
    }
}

/// A unit's machine code, from the cache if it is there.
fn code(nvrtc: &Nvrtc, cache: &Cache, unit: Unit, arch: &str) -> Result<Vec<u8>> {
    let mut key = unit.key(arch);
    key.add(&format!("{}.{} {}", nvrtc.version.0, nvrtc.version.1, env!("CARGO_PKG_VERSION")));
    cache.get(&key.name(unit.file), || Ok(compile(nvrtc, unit, arch)?.code))
}
