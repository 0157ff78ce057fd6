//! NVML: what a GPU with a driver of its own tells and takes. On Orin it only names the device, whatever it answers.

use super::sane::{Sanity, Unit};
use super::sensors::GpuProcess;
use super::types::{Rail, Sample, Zone};
use crate::units::{Error, Result};
use nvml_wrapper::bitmasks::device::ThrottleReasons;
use nvml_wrapper::enum_wrappers::device::{Clock, ClockId, TemperatureSensor};
use nvml_wrapper::enums::device::{GpuLockedClocksSetting, UsedGpuMemory};
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::{Device, Nvml};
use std::ffi::OsStr;

/// Names of the library: by the loader, then where JetPack keeps it, which is not always in the loader's cache.
pub const LIBRARIES: [&str; 3] = [
    "libnvidia-ml.so.1",
    "/usr/lib/aarch64-linux-gnu/nvidia/libnvidia-ml.so.1",
    "/usr/lib/aarch64-linux-gnu/tegra/libnvidia-ml.so.1",
];

/// The driver's library, and the first GPU that it shows: by now or later.
pub struct Nvidia {
    nvml: Nvml,
    /// The device's name, once there is a device.
    name: Option<String>,
}

/// The clock that a discrete GPU was asked for, and what it says of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Locked {
    /// Lowest and highest asked for.
    pub asked_hz: (u64, u64),
    /// The clock right after.
    pub got_hz: Option<u64>,
}

impl Nvidia {
    /// Opens the first of `libraries` that loads and starts.
    pub fn open(libraries: &[&str]) -> Result<Nvidia> {
        let mut first = None;
        for library in libraries {
            match Nvml::builder().lib_path(OsStr::new(library)).init() {
                Ok(nvml) => {
                    let mut nvidia = Nvidia { nvml, name: None };
                    nvidia.look();
                    return Ok(nvidia);
                }
                Err(e) => drop(first.get_or_insert((library, e))),
            }
        }
        let (library, e) = first.expect("at least one name was tried");
        Err(failed(library, "open", e))
    }

    /// Looks for the device if none was there yet: a driver's device can come late.
    fn look(&mut self) {
        if self.name.is_none() {
            self.name = self.device().ok().and_then(|d| d.name().ok());
        }
    }

    fn device(&self) -> std::result::Result<Device<'_>, NvmlError> {
        self.nvml.device_by_index(0)
    }

    /// The device's name.
    pub fn name(&self) -> Option<&str> {
        self.name.as_deref()
    }

    /// The driver's version.
    pub fn driver(&self) -> Option<String> {
        self.nvml.sys_driver_version().ok()
    }

    /// Whether its numbers mean anything. Under "(nvgpu)" some boards answer zeros and invented process ids where others
    /// say that they do not support the question.
    pub fn measures(&self) -> bool {
        self.name.as_ref().is_some_and(|n| !n.contains("(nvgpu)"))
    }

    /// Energy since the driver was loaded, in mJ: the GPU's own integral, exact where there is one.
    pub fn energy_mj(&self) -> Option<u64> {
        if !self.measures() {
            return None;
        }
        self.device().ok()?.total_energy_consumption().ok()
    }

    /// Adds the GPU's power, temperature, clocks and load to a sample.
    pub fn add_to(&mut self, sample: &mut Sample, sanity: &mut Sanity) {
        self.look();
        if !self.measures() {
            return;
        }
        let Ok(device) = self.device() else {
            sanity.check("GPU", Unit::Board, sample.at_us, None, false);
            return;
        };
        let mw = device.power_usage().ok().map(i64::from);
        if let Some(mw) = sanity.check("GPU", Unit::Board, sample.at_us, mw, false) {
            sample.rails.push(Rail { label: "GPU".into(), power_mw: mw as u32, volt_mv: None });
            // A board's own meter, where there is one, contains the GPU (Thor).
            sample.total_mw.get_or_insert(mw as u32);
        }
        let c = device.temperature(TemperatureSensor::Gpu).ok();
        let mc = c.map(|c| i64::from(c) * 1000);
        if let Some(mc) = sanity.check("gpu", Unit::Temperature, sample.at_us, mc, false) {
            sample.zones.push(Zone { kind: "gpu".into(), temp_mc: mc as i32 });
        }
        let hz = |mhz: std::result::Result<u32, NvmlError>| mhz.ok().map(|m| u64::from(m) * 1_000_000);
        sample.gpu_hz = sample.gpu_hz.or(hz(device.clock_info(Clock::SM)));
        sample.gpu_max_hz = sample.gpu_max_hz.or(hz(device.max_clock_info(Clock::SM)));
        sample.emc_hz = sample.emc_hz.or(hz(device.clock_info(Clock::Memory)));
        let load = device.utilization_rates().ok().map(|u| (u.gpu.min(100) * 10) as u16);
        sample.gpu_load_permille = sample.gpu_load_permille.or(load);
        let reasons = device.current_throttle_reasons().unwrap_or(ThrottleReasons::empty());
        // Idle clocks, and clocks that someone asked for, hold nothing back.
        let normal =
            ThrottleReasons::GPU_IDLE | ThrottleReasons::APPLICATIONS_CLOCKS_SETTING | ThrottleReasons::NONE;
        let held = (reasons - normal).iter_names().map(|(name, _)| name.to_lowercase());
        sample.throttle.gpu_reasons = held.collect();
    }

    /// Used and all bytes of the GPU's own memory.
    pub fn memory_bytes(&self) -> Option<(u64, u64)> {
        let info = self.measures().then(|| self.device().ok()?.memory_info().ok()).flatten()?;
        Some((info.used, info.total))
    }

    /// Processes with a compute context.
    pub fn processes(&self) -> Vec<GpuProcess> {
        let found = self.device().and_then(|d| d.running_compute_processes()).unwrap_or_default();
        let bytes = |m| if let UsedGpuMemory::Used(b) = m { Some(b) } else { None };
        let one = |p: nvml_wrapper::struct_wrappers::device::ProcessInfo| GpuProcess {
            pid: p.pid,
            name: String::new(),
            gpu_bytes: bytes(p.used_gpu_memory),
        };
        found.into_iter().map(one).collect()
    }

    /// Clocks that the GPU can be locked to, low to high, in Hz; empty where it does not say.
    pub fn clocks_hz(&self) -> Vec<u64> {
        let all = || -> std::result::Result<Vec<u32>, NvmlError> {
            let device = self.device()?;
            let memory = device.clock(Clock::Memory, ClockId::CustomerMaxBoost).ok();
            let memory = memory.map_or_else(|| device.max_clock_info(Clock::Memory), Ok)?;
            device.supported_graphics_clocks(memory)
        };
        let mut hz: Vec<u64> = all().unwrap_or_default().iter().map(|m| u64::from(*m) * 1_000_000).collect();
        hz.sort_unstable();
        hz
    }

    /// Locks the GPU's clock between two bounds. Needs root; a reboot or a driver reload clears it.
    pub fn lock_gpu(&self, low_hz: u64, high_hz: u64) -> Result<Locked> {
        let mhz = |hz: u64| (hz / 1_000_000).min(u64::from(u32::MAX)) as u32;
        let setting =
            GpuLockedClocksSetting::Numeric { min_clock_mhz: mhz(low_hz), max_clock_mhz: mhz(high_hz) };
        let mut device = self.device().map_err(|e| failed("NVML", "device", e))?;
        device.set_gpu_locked_clocks(setting).map_err(|e| failed("NVML", "lock the GPU's clock", e))?;
        let got = device.clock_info(Clock::Graphics).ok();
        Ok(Locked { asked_hz: (low_hz, high_hz), got_hz: got.map(|m| u64::from(m) * 1_000_000) })
    }

    /// Gives the GPU's clock back.
    pub fn unlock_gpu(&self) -> Result<()> {
        let mut device = self.device().map_err(|e| failed("NVML", "device", e))?;
        device.reset_gpu_locked_clocks().map_err(|e| failed("NVML", "unlock the GPU's clock", e))
    }

    /// Locks the memory's clock between two bounds. Ampere and later, and not every board. Asked for by name only: on
    /// some GPUs a finite ceiling lowers other clocks too.
    pub fn lock_memory(&self, low_hz: u64, high_hz: u64) -> Result<Locked> {
        let mhz = |hz: u64| (hz / 1_000_000).min(u64::from(u32::MAX)) as u32;
        let mut device = self.device().map_err(|e| failed("NVML", "device", e))?;
        let done = device.set_mem_locked_clocks(mhz(low_hz), mhz(high_hz));
        done.map_err(|e| failed("NVML", "lock the memory's clock", e))?;
        let got = device.clock_info(Clock::Memory).ok();
        Ok(Locked { asked_hz: (low_hz, high_hz), got_hz: got.map(|m| u64::from(m) * 1_000_000) })
    }

    /// Gives the memory's clock back.
    pub fn unlock_memory(&self) -> Result<()> {
        let mut device = self.device().map_err(|e| failed("NVML", "device", e))?;
        device.reset_mem_locked_clocks().map_err(|e| failed("NVML", "unlock the memory's clock", e))
    }
}

/// NVML's refusal as an error of ours, of the kind that it is.
fn failed(what: &str, doing: &str, e: NvmlError) -> Error {
    use std::io::ErrorKind;
    let kind = match &e {
        NvmlError::NotSupported | NvmlError::FailedToLoadSymbol(_) => ErrorKind::Unsupported,
        NvmlError::NoPermission => ErrorKind::PermissionDenied,
        NvmlError::LibloadingError(_) | NvmlError::LibraryNotFound => ErrorKind::NotFound,
        _ => ErrorKind::Other,
    };
    let said = match &e {
        // The loader's own words: which file, and what is wrong with it.
        NvmlError::LibloadingError(inner) => inner.to_string(),
        other => other.to_string(),
    };
    Error::io(what, doing, std::io::Error::new(kind, said))
}
