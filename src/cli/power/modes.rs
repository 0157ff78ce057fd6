//! `tegu power mode`, `tegu power fan`: NVIDIA's own power modes and fan profiles.

use clap::Args;
use serde_json::json;

use super::{Shown, Where};
use crate::cli::out::{Out, table};
use crate::power::modes::{Modes, SystemPrograms};
use crate::units::{Error, Result};

/// Arguments of `tegu power mode`.
#[derive(Debug, Args)]
pub struct ModeArgs {
    /// Name or number of the mode to switch to [default: show them all]
    name: Option<String>,
    #[command(flatten)]
    shown: Shown,
    #[command(flatten)]
    place: Where,
}

/// Arguments of `tegu power fan`.
#[derive(Debug, Args)]
pub struct FanArgs {
    /// The profile: quiet or cool on most boards
    profile: String,
    #[command(flatten)]
    place: Where,
}

fn open(place: &Where) -> Result<(Modes, bool)> {
    let site = place.open()?;
    Ok((Modes::new(site.nodes, Box::new(SystemPrograms), false), site.is_here))
}

/// NVIDIA's programs steer this machine, whatever folder is looked at; and in a mount namespace of its own nvpmodel only
/// pretends.
fn only_here(is_here: bool, what: &str) -> Result<()> {
    if !is_here {
        return Err(Error::bad(
            "command line",
            "--root",
            format!("this machine, to switch its {what}"),
            "a folder",
        ));
    }
    let namespace = |pid: &str| std::fs::read_link(format!("/proc/{pid}/ns/mnt")).ok();
    match (namespace("self"), namespace("1")) {
        (Some(ours), Some(first)) if ours != first => {
            let expected = "the system's own mount namespace (no sandbox, no container)";
            Err(Error::bad("process", "mount namespace", expected, ours.display()))
        }
        _ => Ok(()),
    }
}

/// Shows the modes, or switches.
pub fn mode(args: &ModeArgs) -> Result<()> {
    let (mut modes, is_here) = open(&args.place)?;
    if let Some(name) = &args.name {
        only_here(is_here, "power mode")?;
        let said = modes.switch(name)?;
        let mut out = Out::stdout();
        return if args.shown.json {
            out.json(&json!({ "said": said }))
        } else {
            out.text(&format!("{said}\n"))
        };
    }
    let (all, now) = (modes.table()?, modes.current());
    if args.shown.json {
        return Out::stdout().json(&json!({ "modes": all.modes, "default": all.default, "current": now }));
    }
    let mhz = |hz: Option<u64>| hz.map_or("-".to_owned(), |hz| format!("{}", hz as f64 / 1e6));
    let mut rows = vec![["MODE", "ID", "GPU MHz", "MEMORY MHz", "CPU MHz", ""].map(String::from).to_vec()];
    for m in &all.modes {
        let mark = match (now == Some(m.id), all.default == Some(m.id)) {
            (true, _) => "now",
            (_, true) => "default",
            _ => "",
        };
        let cells = [m.id.to_string(), mhz(m.gpu_max_hz), mhz(m.emc_max_hz), mhz(m.cpu_max_hz), mark.into()];
        rows.push(std::iter::once(m.name.clone()).chain(cells).collect());
    }
    Out::stdout().text(&table(&rows))
}

/// Switches the fan's profile.
pub fn fan(args: &FanArgs) -> Result<()> {
    let (mut modes, is_here) = open(&args.place)?;
    only_here(is_here, "fan profile")?;
    Out::stdout().text(&format!("{}\n", modes.fan(&args.profile)?))
}
