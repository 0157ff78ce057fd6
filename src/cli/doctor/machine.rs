//! This machine's items: CUDA, NVML, rights, and how files are read.

use super::Item;
use crate::app::power::Site;
use crate::backend::cpu::Isa;
use crate::backend::cuda::{self, Device, Wait};
use crate::config::Config;
use crate::power::types::BoardKind;
use crate::power::wire::{Ask, Client, SOCKET};
use crate::weights::probe;
use std::path::{Path, PathBuf};

/// Multiprocessors of a whole module.
fn multiprocessors(kind: BoardKind) -> Option<u32> {
    match kind {
        BoardKind::AgxOrin64 => Some(16),
        BoardKind::AgxOrin32 => Some(14),
        BoardKind::OrinNx16 | BoardKind::OrinNx8 | BoardKind::OrinNano8 => Some(8),
        BoardKind::OrinNano4 => Some(4),
        _ => None,
    }
}

/// All of them.
pub fn items(site: &Site, config: &Config) -> Vec<Item> {
    let mut items = gpu(site);
    items.push(nvml(site));
    items.push(helper(site));
    items.extend(rights(site));
    items.push(io_uring());
    items.push(direct_reads(config));
    items.push(huge_pages());
    let isa = Isa::best();
    items.push(Item::ok(
        "cpu",
        format!("{} cores, {}", crate::app::cores(), isa.name()),
        "what runs where the GPU does not",
    ));
    items
}

/// The driver, the device, and whether it takes registered pages.
fn gpu(site: &Site) -> Vec<Item> {
    const WHY: &str = "the GPU runs the model; without it the CPU does";
    let is_jetson = site.board.kind.is_orin() || site.board.kind == BoardKind::Thor;
    if !cuda::driver::is_present() {
        return vec![match is_jetson {
            true => Item::fail(
                "cuda",
                "no libcuda.so.1",
                WHY,
                "install NVIDIA's driver: apt install nvidia-l4t-cuda",
            ),
            false => Item::ok("cuda", "no NVIDIA driver: models run on the CPU", WHY),
        }];
    }
    let device = match Device::open(0, Wait::Block) {
        Ok(device) => device,
        Err(e) => {
            // Without the render node the driver answers 801 on JetPack 6.
            let todo =
                "put the user into groups video and render (/dev/nvmap, /dev/dri/renderD*), then see dmesg";
            return vec![Item::fail("cuda", e.to_string(), WHY, todo)];
        }
    };
    let (major, minor) = (device.driver_version / 1000, device.driver_version % 1000 / 10);
    let mut items = vec![Item::ok(
        "cuda",
        format!("driver for CUDA {major}.{minor}, {}, sm_{}", device.name, device.sm),
        WHY,
    )];
    const UNITS_WHY: &str = "power modes switch GPU units off, and decode reads only as fast as they ask";
    let has = device.multiprocessors;
    items.push(match multiprocessors(site.board.kind) {
        Some(all) if has < all => {
            let todo = "take a power mode with more GPU units (tegu power mode), then restart the board";
            Item::warn("gpu units", format!("{has} of {all} multiprocessors"), UNITS_WHY, todo)
        }
        _ => Item::ok("gpu units", format!("{has} multiprocessors"), UNITS_WHY),
    });
    const PAGES_WHY: &str = "pages lent to the GPU spare a copy, where it pays: Orin does not cache them";
    items.push(match cuda::register::probe(&device.context) {
        Ok(r) if r.works => {
            let files = if r.read_only_supported { "too" } else { "not" };
            Item::ok("registered pages", format!("taken; read-only pages of files {files}"), PAGES_WHY)
        }
        Ok(r) => {
            let found = format!(
                "refused (the driver says {})",
                if r.supported { "that it takes them" } else { "so" }
            );
            Item::warn(
                "registered pages",
                found,
                PAGES_WHY,
                "nothing: weights are copied by direct reads instead",
            )
        }
        Err(e) => Item::warn("registered pages", e.to_string(), PAGES_WHY, "see cuda above"),
    });
    items
}

fn nvml(site: &Site) -> Item {
    const WHY: &str =
        "a discrete GPU's and Thor's sensors; on Orin it only names the GPU, and sysfs tells the rest";
    match site.nvidia() {
        Ok(n) => {
            let name = n.name().unwrap_or("no device yet");
            let use_of = if n.measures() { "" } else { ": named only" };
            Item::ok("nvml", format!("{name}, driver {}{use_of}", n.driver().unwrap_or_default()), WHY)
        }
        Err(e) if site.board.kind == BoardKind::Thor => {
            Item::warn("nvml", e.to_string(), WHY, "install nvidia-l4t-nvml")
        }
        Err(e) => Item::ok("nvml", format!("none ({e})"), WHY),
    }
}

fn helper(site: &Site) -> Item {
    const WHY: &str = "only this process may write clocks; without it the board's own governors decide";
    match Client::connect(Path::new(SOCKET)).and_then(|mut c| c.ask(&Ask::Status)) {
        Ok(status) => Item::ok("clock helper", format!("running, holds {} nodes", status.held.len()), WHY),
        Err(e) if site.board.kind == BoardKind::Unknown => {
            Item::ok("clock helper", format!("none ({e})"), WHY)
        }
        Err(e) => {
            let todo = "systemctl enable --now tegu-clocks; the user must be in group tegu";
            Item::warn("clock helper", e.to_string(), WHY, todo)
        }
    }
}

/// Rights over the device nodes that CUDA opens on a Jetson.
fn rights(site: &Site) -> Option<Item> {
    const WHY: &str = "CUDA opens these; a service's user lacks them unless it is in their groups";
    let is_jetson = site.board.kind.is_orin() || site.board.kind == BoardKind::Thor;
    if !is_jetson {
        return None;
    }
    let render = std::fs::read_dir("/dev/dri").into_iter().flatten().flatten().map(|e| e.path());
    let render = render.filter(|p| p.to_string_lossy().contains("renderD"));
    let nodes: Vec<PathBuf> = std::iter::once(PathBuf::from("/dev/nvmap")).chain(render).collect();
    let denied = |p: &&PathBuf| std::fs::OpenOptions::new().read(true).write(true).open(p).is_err();
    let denied: Vec<String> = nodes.iter().filter(denied).map(|p| p.display().to_string()).collect();
    Some(match denied.is_empty() {
        true => Item::ok("rights", format!("{} device nodes can be opened", nodes.len()), WHY),
        false => Item::fail(
            "rights",
            format!("denied: {}", denied.join(", ")),
            WHY,
            "usermod -aG video,render USER, then log in again",
        ),
    })
}

fn io_uring() -> Item {
    const WHY: &str =
        "streams experts from NVMe at depth; where it is refused a pool of reading threads does it";
    match probe::io_uring() {
        Ok(()) => Item::ok("io_uring", "works", WHY),
        Err(e) => {
            let switch = std::fs::read_to_string("/proc/sys/kernel/io_uring_disabled").unwrap_or_default();
            let todo = match switch.trim() {
                "1" | "2" => "sysctl kernel.io_uring_disabled=0",
                _ => "if this is a container: its seccomp profile refuses io_uring; else nothing",
            };
            Item::warn("io_uring", format!("refused: {e}"), WHY, todo)
        }
    }
}

/// Where models lie: the settings' folder or model, else where this program lies.
fn direct_reads(config: &Config) -> Item {
    const WHY: &str =
        "models are read past the page cache, so that a board of 8 GB never holds a model twice";
    let folder = Some(config.text("serve.models")).filter(|f| !f.is_empty()).map(PathBuf::from);
    let inside =
        folder.and_then(|f| std::fs::read_dir(f).ok()?.flatten().map(|e| e.path()).find(|p| p.is_file()));
    let model =
        Some(config.text("model")).filter(|m| !m.is_empty()).map(PathBuf::from).filter(|m| m.is_file());
    let Some(file) = inside.or(model).or_else(|| std::env::current_exe().ok()) else {
        return Item::ok("direct reads", "no file to try", WHY);
    };
    match probe::direct_read(&file) {
        Ok(()) => Item::ok("direct reads", format!("work on {}", file.display()), WHY),
        Err(e) => {
            let todo = "keep models on ext4 or xfs on NVMe; here pages are dropped after reading instead";
            Item::warn("direct reads", format!("refused on {}: {e}", file.display()), WHY, todo)
        }
    }
}

fn huge_pages() -> Item {
    const WHY: &str = "fewer page faults while a model is loaded; no gain is known for the GPU's own blocks";
    let text = std::fs::read_to_string("/sys/kernel/mm/transparent_hugepage/enabled").unwrap_or_default();
    let chosen = text.split(['[', ']']).nth(1).unwrap_or("not told");
    Item::ok("huge pages", format!("transparent: {chosen}"), WHY)
}
