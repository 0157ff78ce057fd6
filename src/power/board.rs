//! Which board this is, by the device tree's `compatible`: the only name that carrier vendors leave alone.

use super::nodes::{Nodes, name, text};
use super::types::{Board, BoardKind, JetPack, L4t};
use crate::units::{Error, Result};

const COMPATIBLE: &str = "/proc/device-tree/compatible";
const MODEL: &str = "/proc/device-tree/model";
const RELEASE: &str = "/etc/nv_tegra_release";

/// Modules by part number (NVIDIA's device trees for R35 to R39).
const MODULES: &[(&str, BoardKind)] = &[
    // The first developer kit: 32 GB once, 64 GB since; its clocks and power modes are those of the 64GB module.
    ("p3701-0000", BoardKind::AgxOrin64),
    // IGX Orin's module is an AGX 64GB with other firmware.
    ("p3701-0002", BoardKind::AgxOrin64),
    ("p3701-0004", BoardKind::AgxOrin32),
    ("p3701-0005", BoardKind::AgxOrin64),
    // Industrial.
    ("p3701-0008", BoardKind::AgxOrin64),
    ("p3767-0000", BoardKind::OrinNx16),
    ("p3767-0001", BoardKind::OrinNx8),
    // Without the slot for a card.
    ("p3767-0002", BoardKind::OrinNx16),
    ("p3767-0003", BoardKind::OrinNano8),
    ("p3767-0004", BoardKind::OrinNano4),
    // The module of the developer kit.
    ("p3767-0005", BoardKind::OrinNano8),
    ("p3834-0008", BoardKind::Thor),
];

impl Board {
    /// Looks at the device tree and the release file. A machine without them is [`BoardKind::Unknown`].
    pub fn detect(nodes: &dyn Nodes) -> Board {
        let compatible = nodes.read(COMPATIBLE).unwrap_or_default();
        let names: Vec<&str> = compatible.split('\0').filter(|n| !n.trim().is_empty()).collect();
        // "nvidia,p3768-0000+p3767-0005-super": the carrier, then the module that decides.
        let parts = || names.iter().flat_map(|n| n.split([',', '+']));
        let known = parts().find_map(|part| {
            let (number, kind) = MODULES.iter().find(|(m, _)| part.starts_with(m))?;
            Some((number.to_string(), *kind))
        });
        let kind = match &known {
            Some((_, kind)) => *kind,
            None if names.contains(&"nvidia,tegra264") => BoardKind::Thor,
            None => BoardKind::Unknown,
        };
        let l4t = text(nodes, RELEASE).and_then(|t| L4t::parse(&t));
        Board {
            kind,
            is_super: kind.is_orin() && parts().any(|p| p.ends_with("-super")),
            module: known.map(|(number, _)| number),
            model: name(nodes, MODEL).filter(|m| !m.is_empty()),
            jetpack: l4t.as_ref().map_or(JetPack::Other, L4t::jetpack),
            l4t,
            simulation: None,
        }
    }

    /// Refuses JetPack 5, by name.
    pub fn check(&self) -> Result<()> {
        match (self.jetpack, &self.l4t) {
            (JetPack::Five, Some(l4t)) => {
                let expected = "JetPack 6 or 7 (Jetson Linux R36 or later)";
                let found =
                    format!("Jetson Linux {l4t} of JetPack 5, whose CUDA 11.4 lacks what the kernels use");
                Err(Error::bad(RELEASE, "release", expected, found))
            }
            _ => Ok(()),
        }
    }

    /// One line for a person: name, module, release.
    pub fn title(&self) -> String {
        let mut title = self.kind.name().to_owned();
        if self.is_super {
            title += " Super";
        }
        if let Some(module) = &self.module {
            title += &format!(" ({module})");
        }
        if let Some(l4t) = &self.l4t {
            title += &format!(", Jetson Linux {l4t}");
        }
        if let Some(simulation) = &self.simulation {
            title += &format!(", simulated ({simulation})");
        }
        title
    }
}

impl L4t {
    /// From the first line of `/etc/nv_tegra_release`: `# R36 (release), REVISION: 4.7, GCID: …`.
    pub fn parse(line: &str) -> Option<L4t> {
        let (head, rest) = line.lines().next()?.split_once("REVISION:")?;
        let release = head.trim_start_matches('#').trim_start().strip_prefix('R')?;
        let release = release.split(|c: char| !c.is_ascii_digit()).next()?.parse().ok()?;
        let revision = rest.split(',').next()?.trim();
        let is_number =
            |r: &str| !r.is_empty() && r.len() < 16 && r.chars().all(|c| c.is_ascii_digit() || c == '.');
        is_number(revision).then(|| L4t { release, revision: revision.to_owned() })
    }

    /// The generation of JetPack that a release belongs to.
    pub fn jetpack(&self) -> JetPack {
        match self.release {
            34 | 35 => JetPack::Five,
            36 => JetPack::Six,
            // R38 is Thor's alone; Orin came back with R39.
            38 | 39 => JetPack::Seven,
            _ => JetPack::Other,
        }
    }
}

#[test]
fn releases_are_read() {
    let parse = |s: &str| L4t::parse(s).map(|l| (l.to_string(), l.jetpack()));
    let six = "# R36 (release), REVISION: 4.7, GCID: 42132812, BOARD: generic, EABI: aarch64";
    assert_eq!(parse(six), Some(("R36.4.7".into(), JetPack::Six)));
    assert_eq!(parse("# R35 (release), REVISION: 3.1, GCID: 1"), Some(("R35.3.1".into(), JetPack::Five)));
    assert_eq!(parse("# R39 (release), REVISION: 2.0"), Some(("R39.2.0".into(), JetPack::Seven)));
    for bad in ["", "R36", "# R (release), REVISION: 1", "# R36 (release), REVISION: x,", "# R36, REVISION:"]
    {
        assert_eq!(parse(bad), None, "{bad:?}");
    }
}
