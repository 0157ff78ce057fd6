//! `tegu top` on every tree of files that stands for a board, on a simulated one, and on whatever machine this is.

use super::trees::{self, Release};
use crate::support::command;

/// A picture, which must come.
fn picture(args: &[&str]) -> String {
    let mut top = command("tegu");
    top.args(["top", "--once", "--size", "80x24"]).args(args).env("LANG", "C.UTF-8").env_remove("LC_ALL");
    let out = top.output().unwrap();
    assert!(out.status.success(), "{args:?}: {}", String::from_utf8_lossy(&out.stderr));
    String::from_utf8(out.stdout).unwrap()
}

#[test]
fn every_board_has_its_picture() {
    let boards = trees::SPECS.iter().zip([Release::Six, Release::Seven].into_iter().cycle());
    let draw = |(spec, release): (&'static trees::Spec, Release)| {
        std::thread::spawn(move || {
            let tree = tempfile::tempdir().unwrap();
            trees::build(tree.path(), spec, release);
            (spec, picture(&["--root", tree.path().to_str().unwrap()]))
        })
    };
    let drawn: Vec<_> = boards.map(draw).collect();
    for thread in drawn {
        let (spec, got) = thread.join().unwrap();
        assert_eq!(got.lines().count(), 24, "{got}");
        assert!(got.contains(spec.kind.name()), "{}: the board's name\n{got}", spec.name);
        for (label, ..) in spec.rails[0].iter().filter(|r| r.0 != "NC") {
            assert!(got.contains(label), "{}: {label}\n{got}", spec.name);
        }
        let mhz = spec.gpu_cap_khz as f64 / 1e3;
        let cap_mhz =
            if mhz.fract() == 0.0 || mhz > 1e3 { format!("{mhz:.0})") } else { format!("{mhz:.1})") };
        assert!(got.contains("GPU") && got.contains(&cap_mhz), "{}: {cap_mhz}\n{got}", spec.name);
        assert!(got.contains("Temperatures") && !got.contains("no thermal zone"), "{}\n{got}", spec.name);
    }
}

#[test]
fn a_simulation_and_this_machine_have_theirs() {
    let sim = picture(&["--board", "sim:agx-orin-64"]);
    assert!(sim.contains("AGX Orin 64GB") && sim.contains("VDD_GPU_SOC"), "{sim}");
    let here = picture(&["--board", "auto", "--ascii", "--no-color"]);
    assert!(here.contains("no daemon: the board alone") && here.lines().count() == 24, "{here}");
    assert!(picture(&["--board", "sim:orin-nx-16", "--svg"]).starts_with("<svg "));
    // Asked for by name, a daemon must be there; a folder too.
    for (args, says) in [(["--at", "/no/such.sock"], "/no/such.sock"), (["--root", "/no/such"], "--root")] {
        let out = command("tegu").args(["top", "--once"]).args(args).output().unwrap();
        let said = String::from_utf8_lossy(&out.stderr).into_owned();
        assert!(out.status.code() == Some(2) && said.contains(says), "{said}");
    }
}
