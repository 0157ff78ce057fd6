//! The screen, rendered to a buffer: sizes, surroundings, boards that tell much and boards that tell nothing.

use ratatui::Terminal;
use ratatui::backend::TestBackend;
use ratatui::buffer::Buffer;

use super::draw;
use super::history::History;
use super::keys::{Key, Ui};
use super::look::Look;
use super::panels::View;
use super::snapshot::{svg, text};
use crate::power::status::{Allowed, PhaseEnergy, Served, Status};
use crate::power::types::*;

const PLAIN: Look = Look { color: true, ascii: false };
const ASCII: Look = Look { color: false, ascii: true };

/// An Orin Nano Super's sensors at work; `n` is the number of the look.
fn sample(n: u64) -> Sample {
    let rail =
        |label: &str, power_mw: u64| Rail { label: label.into(), power_mw: power_mw as u32, volt_mv: None };
    let zone = |kind: &str, temp_mc| Zone { kind: format!("{kind}-thermal"), temp_mc };
    let wave = (n % 7) * 400;
    Sample {
        rails: vec![
            rail("VDD_IN", 14_000 + wave),
            rail("VDD_CPU_GPU_CV", 6_500 + wave / 2),
            rail("VDD_SOC", 2_840),
        ],
        total_mw: Some((14_000 + wave) as u32),
        zones: vec![
            zone("cpu", 61_250),
            zone("gpu", 85_750),
            zone("soc0", 60_000),
            zone("soc1", 59_500),
            zone("soc2", 60_250),
            zone("tj", 96_000),
        ],
        gpu_hz: Some(918_000_000),
        gpu_min_hz: Some(306_000_000),
        gpu_max_hz: Some(1_020_000_000),
        gpu_load_permille: Some(874),
        emc_hz: Some(2_133_000_000),
        emc_locked: Some(true),
        emc_cap_hz: Some(3_199_000_000),
        throttle: Throttle {
            active: vec!["cpufreq-cpu0".into()],
            oc_counts: [Some(0), Some(3), None],
            ..Throttle::default()
        },
        fan: Some(Fan { pwm: Some(128), rpm: Some(2_150) }),
        cpus: vec![
            CpuClock { policy: 0, cur_hz: 1_728_000_000, max_hz: 1_728_000_000 },
            CpuClock { policy: 4, cur_hz: 729_600_000, max_hz: 1_728_000_000 },
        ],
        memory: Some(Memory {
            total_bytes: 7_990 << 20,
            available_bytes: 2_900 << 20,
            gpu_bytes: Some(3_100 << 20),
            swap_total_bytes: 3_995 << 20,
            swap_used_bytes: 12 << 20,
        }),
        faults: vec![SensorFault { sensor: "cv0-thermal".into(), fault: Fault::Frozen }],
        ..Sample::default()
    }
}

/// The whole board.
fn nano(n: u64) -> Status {
    let energy = |phase, energy_mj, time_us| PhaseEnergy { phase, energy_mj, time_us, error_permille: None };
    Status {
        board: "Jetson Orin Nano 8GB Super (p3767-0005), Jetson Linux R36.4.7".into(),
        mode: Some("MAXN_SUPER".into()),
        modes: ["15W", "25W", "MAXN_SUPER"].map(String::from).into(),
        profile: Some("balanced".into()),
        profiles: ["balanced", "latency", "efficiency", "silent", "battery"].map(String::from).into(),
        hands: "helper".into(),
        phase: Some(Phase::Decode),
        sample: sample(n),
        cores_permille: vec![Some(310), Some(50), Some(1000), Some(0), Some(120), None],
        asked: Some(Clocks {
            gpu_cap_hz: Some(918_000_000),
            emc_floor_hz: Some(2_133_000_000),
            ..Clocks::default()
        }),
        reasons: vec!["gpu zone at 85.8 C: step 1".into()],
        allowed: Some(Allowed { max_batch: 4, prefill_chunk: 128, pause: false }),
        energy: vec![
            energy(Phase::Prefill, 81_400, 5_000_000),
            energy(Phase::Decode, 1_912_000, 130_000_000),
            energy(Phase::Idle, 12_345, 2_000_000),
        ],
        energy_method: Some("rails".into()),
        served: Some(Served {
            model: Some("qwen2.5-1.5b-instruct".into()),
            uptime_us: n * 1_000_000,
            open: 3,
            prefilling: 1,
            decoding: 2,
            prefill_tokens: 900 * n,
            generated_tokens: (30 + n % 5) * n,
            requests: 9,
        }),
    }
}

fn picture(status: &Status, history: &History, look: Look, ui: &Ui, size: (u16, u16)) -> Buffer {
    let mut terminal = Terminal::new(TestBackend::new(size.0, size.1)).unwrap();
    let view = View { status, history, look };
    terminal.draw(|f| draw::screen(&view, ui, f.area(), f.buffer_mut())).unwrap();
    terminal.backend().buffer().clone()
}

fn busy(look: Look, ui: &Ui, size: (u16, u16)) -> Buffer {
    let mut history = History::default();
    (0..60).for_each(|n| history.take(&nano(n)));
    picture(&nano(59), &history, look, ui, size)
}

/// The picture as it stands in a file, so that it can be looked at and a change shows in review. To take new ones:
/// `TEGU_NEW_PICTURES=1 cargo test --lib top::`.
fn as_kept(name: &str, got: &str) {
    let file = format!("{}/tests/data/reports/{name}", env!("CARGO_MANIFEST_DIR"));
    if std::env::var_os("TEGU_NEW_PICTURES").is_some() {
        std::fs::write(&file, got).unwrap();
    }
    let kept = std::fs::read_to_string(&file).unwrap_or_default();
    assert!(kept == got, "{name} differs from the picture that was reviewed; now:\n{got}");
}

#[test]
fn the_usual_terminal() {
    let got = text(&busy(PLAIN, &Ui::default(), (80, 24)));
    for said in [
        "Jetson Orin Nano 8GB Super",
        "mode MAXN_SUPER   profile balanced   clocks: helper",
        " 2 ███",
        "100%",
        " 5 off",
        "87% 918 MHz (306-1020)",
        "2133 MHz held (cap 3199)",
        "VDD_IN",
        "VDD_SOC          2.84 W",
        "J: prefill 81.4 decode 1912 idle 12.3",
        "gpu",
        "85.8 C!",
        "96.0 C!!",
        "held by  cpufreq-cpu0",
        "OC1 0  OC2 3  OC3 -",
        "cv0-thermal is frozen",
        "qwen2.5-1.5b-instruct",
        "decode; 3 open (1 in, 2 out)",
        "in 900/s, out 92.0/s",
        "GPU to 918, memory from 2133",
        "q quit   p profile   m power mode",
    ] {
        assert!(got.contains(said), "{said:?} is missing from\n{got}");
    }
    as_kept("top-80x24.txt", &got);
}

#[test]
fn a_wide_terminal_shows_all() {
    let wide = busy(PLAIN, &Ui::default(), (140, 30));
    let got = text(&wide);
    for said in [
        "fan      50%  2150 rpm",
        "because gpu zone at 85.8 C: step 1",
        "4 rows, chunks of 128",
        "12.0 MiB of 3.9 GiB",
    ] {
        assert!(got.contains(said), "{said:?} is missing from\n{got}");
    }
    as_kept("top-140x30.txt", &got);
    as_kept("top-140x30.svg", &svg(&wide));
}

#[test]
fn plain_ascii_and_no_colour() {
    let buffer = busy(ASCII, &Ui::default(), (80, 24));
    let got = text(&buffer);
    assert!(got.is_ascii(), "{got}");
    assert!(got.contains("+ Power -") && got.contains("|||"), "{got}");
    let colors = buffer.content().iter().filter(|c| c.fg != ratatui::style::Color::Reset).count();
    assert_eq!(colors, 0);
}

#[test]
fn a_board_that_tells_nothing() {
    let nothing = Status { board: "unknown board".into(), ..Status::default() };
    let got = text(&picture(&nothing, &History::default(), PLAIN, &Ui::default(), (80, 24)));
    for said in [
        "no power sensor",
        "no thermal zone",
        "no processor tells",
        "memory is not told",
        "no daemon",
        "mode -",
    ] {
        assert!(got.contains(said), "{said:?} is missing from\n{got}");
    }
    assert!(!got.contains(" 0 MHz") && !got.contains("0.00 W") && !got.contains("0.0 C"), "{got}");
}

/// Every size, the silly ones too, and every dialog: nothing panics, nothing runs over.
#[test]
fn any_size_and_any_dialog() {
    let mut hostile = nano(3);
    hostile.board = "a\u{1b}[31mb\n\t世界 ".repeat(50);
    hostile.sample.rails[0].label = "世".repeat(90);
    hostile.sample.zones.extend((0..60).map(|i| Zone { kind: format!("z{i}"), temp_mc: i32::MIN + i }));
    hostile.cores_permille = vec![Some(u16::MAX); 300];
    hostile.profiles = (0..200).map(|i| format!("profile-{i}-{}", "x".repeat(i))).collect();
    hostile.sample.memory =
        Some(Memory { swap_used_bytes: u64::MAX, swap_total_bytes: 1, ..Memory::default() });
    for status in [nano(1), hostile, Status::default()] {
        let mut history = History::default();
        history.take(&status);
        for keys in
            [vec![], vec![Key::Char('?')], vec![Key::Char('p'), Key::Down], vec![Key::Char('m'), Key::Enter]]
        {
            let mut ui = Ui { trouble: Some("the daemon is gone\u{7}".into()), ..Ui::default() };
            keys.iter().for_each(|k| drop(ui.key(*k, &status)));
            for width in [1, 30, 75, 76, 120, 200] {
                for height in [1, 8, 9, 40] {
                    let shown = text(&picture(&status, &history, PLAIN, &ui, (width, height)));
                    assert!(!shown.contains(['\u{1b}', '\u{7}']), "{width}x{height}");
                }
            }
        }
    }
}

#[test]
fn dialogs_lie_over_the_screen() {
    let mut ui = Ui::default();
    let status = nano(1);
    ui.key(Key::Char('p'), &status);
    let list = text(&busy(PLAIN, &ui, (80, 24)));
    assert!(list.contains("* balanced") && list.contains("  efficiency"), "{list}");
    ui.key(Key::Down, &status);
    ui.key(Key::Enter, &status);
    let asked = text(&busy(PLAIN, &ui, (80, 24)));
    assert!(asked.contains("Switch the profile to latency?"), "{asked}");
    ui.key(Key::Escape, &status);
    [Key::Char('m'), Key::Enter].iter().for_each(|k| drop(ui.key(*k, &status)));
    assert!(text(&busy(PLAIN, &ui, (80, 24))).contains("takes effect after a reboot"));
}

#[test]
fn a_picture_is_whole() {
    let buffer = busy(PLAIN, &Ui::default(), (140, 30));
    let drawn = svg(&buffer);
    assert!(drawn.starts_with("<svg ") && drawn.ends_with("</svg>\n"));
    assert!(!drawn.contains("href") && !drawn.contains("url("), "nothing from elsewhere");
    assert_eq!(text(&buffer).lines().count(), 30);
}
