//! Counts the instructions that a weight costs, in the compiled inner loops of the quantized products: the table in
//! `instructions.md`, and those in the heads of `avx2.rs`, `avx512.rs` and `neon.rs`.
//!
//! A pass over tiles is disassembled with objdump: with one activation row (decode), and with as many as registers hold
//! (prefill). What is counted is the loop over a tile's groups; if the compiler left a loop over rows or registers in it,
//! that one counts as often as it runs, which the number of dot products in it tells.
//!
//! After a change that is meant to move them: `TEGU_REGENERATE=1 cargo test --release --lib instructions_a_weight` (and the
//! same through tools/cross-aarch64.sh) writes the measured numbers into all of these files.

use crate::backend::cpu::Isa;
use crate::backend::cpu::kernels::simd::{Simd, SimdDot};
use crate::format::Codec;
use crate::format::layout::{GROUP, TILE_ROWS};
use std::path::{Path, PathBuf};
use std::process::Command;

/// The quantized codecs, in the tables' order.
const CODECS: [Codec; 13] = [
    Codec::Q4_0,
    Codec::Q4_1,
    Codec::Q5_0,
    Codec::Q5_1,
    Codec::Q8_0,
    Codec::Q2K,
    Codec::Q3K,
    Codec::Q4K,
    Codec::Q5K,
    Codec::Q6K,
    Codec::IQ4NL,
    Codec::IQ4XS,
    Codec::MXFP4,
];

/// The most that decoding a Q4_0 weight may cost with AVX2, whatever the table says.
const Q4_0_AVX2_MAX: f64 = 0.6;

/// An instruction set's entry points and its dot product instruction.
struct Target {
    isa: Isa,
    passes: fn(Codec) -> [usize; 2],
    rows: usize,
    dot: &'static str,
    register_bytes: usize,
    /// True if plain 4-bit codes are multiplied with coupled activations.
    coupled: bool,
    file: &'static str,
}

/// Those that this architecture has compiled: counting needs no processor that runs them.
fn targets() -> Vec<Target> {
    #[cfg(target_arch = "x86_64")]
    return vec![
        Target {
            isa: Isa::Avx2,
            passes: super::avx2::q8_passes,
            rows: super::avx2::Avx2::ROWS_Q8,
            dot: "vpmaddubsw",
            register_bytes: 32,
            coupled: <super::avx2::Avx2 as Simd>::COUPLED,
            file: "avx2.rs",
        },
        Target {
            isa: Isa::Avx512Vnni,
            passes: super::avx512::q8_passes,
            rows: super::avx512::Avx512::ROWS_Q8,
            dot: "vpdpbusd",
            register_bytes: 64,
            coupled: <super::avx512::Avx512 as Simd>::COUPLED,
            file: "avx512.rs",
        },
    ];
    #[cfg(target_arch = "aarch64")]
    return vec![Target {
        isa: Isa::NeonDot,
        passes: super::neon::q8_passes,
        rows: super::neon::NeonDot::ROWS_Q8,
        dot: "sdot",
        register_bytes: 16,
        coupled: <super::neon::NeonDot as Simd>::COUPLED,
        file: "neon.rs",
    }];
    #[allow(unreachable_code)] // no kernels on other architectures
    Vec::new()
}

/// Instructions a weight and activation row: with one row, and with many.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Cost {
    one: f64,
    many: f64,
}

/// One instruction of a disassembly.
struct Instruction {
    at: u64,
    mnemonic: String,
    /// Target of a branch.
    to: Option<u64>,
}

/// Parses the lines of `objdump -d --no-show-raw-insn`, up to the next function.
fn parse(text: &str) -> Vec<Instruction> {
    let mut function = Vec::new();
    let mut heads = 0;
    for line in text.lines() {
        heads += usize::from(line.ends_with(">:"));
        if heads > 1 {
            break;
        }
        let Some((at, rest)) = line.trim_start().split_once(":\t") else { continue };
        let Ok(at) = u64::from_str_radix(at, 16) else { continue };
        let mut words = rest.split_whitespace();
        let mnemonic = words.next().unwrap_or_default().to_owned();
        // Branches are written `jne 12ab <symbol+0x..>`, `b.ne 12ab <..>`, `cbnz x1, 12ab <..>`, `tbnz w1, #2, 12ab <..>`.
        let operands: Vec<&str> = words.collect();
        let branch = mnemonic.starts_with('j') || mnemonic.starts_with('b') || mnemonic.starts_with("cb");
        let branch = branch || mnemonic.starts_with("tb");
        let target =
            operands.iter().rposition(|o| o.starts_with('<')).and_then(|i| operands.get(i.wrapping_sub(1)));
        let to =
            target.filter(|_| branch).and_then(|t| u64::from_str_radix(t.trim_start_matches("0x"), 16).ok());
        function.push(Instruction { at, mnemonic, to });
    }
    function
}

/// Loops as (first, last) instruction: from a backward branch's target to the branch.
fn loops(function: &[Instruction]) -> Vec<(usize, usize)> {
    let index = |at: u64| function.iter().position(|i| i.at == at);
    let back = |i: &Instruction| i.to.filter(|to| *to <= i.at).and_then(index);
    function.iter().enumerate().filter_map(|(end, i)| Some((back(i)?, end))).collect()
}

/// Weights of a (tile, group).
const GROUP_WEIGHTS: usize = TILE_ROWS * GROUP;

/// Dot products of a row with a (tile, group): one takes as many weights as its register has bytes, and a weight meets two,
/// one for each half of the activation's code, or one and a half where activations are coupled.
fn dots_a_row(target: &Target, codec: Codec) -> usize {
    let coupled = target.coupled && matches!(codec, Codec::Q4_0 | Codec::Q4_1 | Codec::Q4K);
    GROUP_WEIGHTS / target.register_bytes * if coupled { 3 } else { 4 } / 2
}

/// Instructions a weight and row of a pass with `rows` rows, of which each has `a_row` dot products a (tile, group); `None` if
/// there is no such loop.
fn cost(function: &[Instruction], dot: &str, a_row: usize, rows: usize) -> Option<f64> {
    let dots = |l: &(usize, usize)| function[l.0..=l.1].iter().filter(|i| i.mnemonic == dot).count();
    let len = |l: &(usize, usize)| l.1 - l.0 + 1;
    let a_group = rows * a_row;
    let all = loops(function);
    let inner = all.iter().filter(|l| dots(l) > 0).min_by_key(|l| len(l))?;
    if dots(inner) >= a_group {
        return Some(len(inner) as f64 * a_group as f64 / dots(inner) as f64 / (rows * GROUP_WEIGHTS) as f64);
    }
    let outer =
        all.iter().filter(|l| *l != inner && l.0 <= inner.0 && inner.1 <= l.1).min_by_key(|l| len(l))?;
    if dots(outer) != dots(inner) {
        return None;
    }
    let runs = a_group as f64 / dots(inner) as f64;
    let a_group_len = (len(outer) - len(inner)) as f64 + runs * len(inner) as f64;
    Some(a_group_len / (rows * GROUP_WEIGHTS) as f64)
}

/// Where this program's file was mapped: what an address is relative to.
fn load_base(exe: &Path) -> Option<usize> {
    let maps = std::fs::read_to_string("/proc/self/maps").ok()?;
    let line = maps.lines().find(|l| l.ends_with(exe.to_str().unwrap_or("?")))?;
    usize::from_str_radix(line.split('-').next()?, 16).ok()
}

/// Disassembles the function at `address`, or says why that cannot be.
fn disassemble(address: usize) -> Result<Vec<Instruction>, String> {
    const FUNCTION_BYTES_MAX: usize = 64 << 10;
    let exe = std::env::current_exe().map_err(|e| e.to_string())?;
    let start = address - load_base(&exe).ok_or("this program's mapping is not listed")?;
    // Emulated programs find the objdump of their own architecture under this name.
    let own = format!("{}-linux-gnu-objdump", std::env::consts::ARCH);
    for program in [own.as_str(), "objdump"] {
        let ran = Command::new(program)
            .args(["-d", "--no-show-raw-insn", &format!("--start-address={start}")])
            .arg(format!("--stop-address={}", start + FUNCTION_BYTES_MAX))
            .arg(&exe)
            .output();
        if let Ok(ran) = ran
            && ran.status.success()
        {
            return Ok(parse(&String::from_utf8_lossy(&ran.stdout)));
        }
    }
    Err("no objdump for this architecture".to_owned())
}

/// Counts every codec.
fn count(target: &Target) -> Result<Vec<Cost>, String> {
    let pass = |codec: Codec, address, rows| -> Result<f64, String> {
        let cost = cost(&disassemble(address)?, target.dot, dots_a_row(target, codec), rows);
        Ok(cost.unwrap_or_else(|| panic!("{codec:?}: no loop with {} in {}", target.dot, target.file)))
    };
    let one = |codec| -> Result<Cost, String> {
        let [one, many] = (target.passes)(codec);
        Ok(Cost { one: pass(codec, one, 1)?, many: pass(codec, many, target.rows)? })
    };
    CODECS.into_iter().map(one).collect()
}

/// The numbers as table cells; parsing gives back what was rounded.
fn cells(cost: &Cost) -> [String; 2] {
    [format!("{:.3}", cost.one), format!("{:.3}", cost.many)]
}

/// The table rows in the head of a kernel file: codec, one row, many rows.
fn head_rows(costs: &[Cost]) -> Vec<String> {
    let row = |(codec, cost): (&Codec, &Cost)| {
        let [one, many] = cells(cost);
        format!("//! | {} | {one} | {many} |", codec.name())
    };
    CODECS.iter().zip(costs).map(row).collect()
}

/// The place of a codec's row and of an instruction set's column in `instructions.md`.
fn table_cell<'a>(table: &'a str, codec: Codec, isa: Isa) -> Option<&'a str> {
    let split = |line: &'a str| line.split('|').map(str::trim).collect::<Vec<_>>();
    let head = table.lines().find(|l| l.starts_with("| codec"))?;
    let column = split(head).iter().position(|c| *c == isa.name())?;
    let row = table.lines().map(split).find(|r| r.get(1) == Some(&codec.name()))?;
    row.get(column).copied()
}

/// Writes an instruction set's column.
fn with_column(table: &str, isa: Isa, costs: &[Cost]) -> String {
    let mut text = String::new();
    for line in table.lines() {
        let of = CODECS.iter().position(|c| line.split('|').nth(1).map(str::trim) == Some(c.name()));
        match of.and_then(|i| Some((table_cell(table, CODECS[i], isa)?, &costs[i], CODECS[i]))) {
            Some((_, cost, _)) => {
                let mut cells_of_row: Vec<String> = line.split('|').map(|c| c.trim().to_owned()).collect();
                let head = table.lines().find(|l| l.starts_with("| codec")).expect("a head");
                let column = head.split('|').position(|c| c.trim() == isa.name()).expect("the column");
                cells_of_row[column] = cells(cost).join(" / ");
                text += cells_of_row.join(" | ").trim();
            }
            None => text += line,
        }
        text.push('\n');
    }
    text
}

/// This folder's file of that name.
fn here(file: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("src/backend/cpu/kernels").join(file)
}

/// Puts measured numbers into the table and the head.
fn regenerate(target: &Target, costs: &[Cost]) {
    let table = std::fs::read_to_string(here("instructions.md")).unwrap();
    std::fs::write(here("instructions.md"), with_column(&table, target.isa, costs)).unwrap();
    let source = std::fs::read_to_string(here(target.file)).unwrap();
    let rows = head_rows(costs);
    let mut text = String::new();
    for line in source.lines() {
        let of = CODECS.iter().position(|c| line.starts_with(&format!("//! | {} |", c.name())));
        text += of.map_or(line, |i| &rows[i]);
        text.push('\n');
    }
    std::fs::write(here(target.file), text).unwrap();
}

/// Compares with what the files say. Compilers differ by a few moves; the tables may not flatter beyond that.
fn compare(target: &Target, costs: &[Cost]) {
    let table = std::fs::read_to_string(here("instructions.md")).unwrap();
    let source = std::fs::read_to_string(here(target.file)).unwrap();
    for (codec, cost) in CODECS.into_iter().zip(costs) {
        let what = format!("{} with {}", codec.name(), target.isa.name());
        let cell =
            table_cell(&table, codec, target.isa).unwrap_or_else(|| panic!("{what} is not in the table"));
        let stated: Vec<f64> = cell.split(" / ").map(|n| n.parse().expect("a number")).collect();
        for (stated, measured) in stated.iter().zip([cost.one, cost.many]) {
            let fits = measured <= stated * 1.1 && measured >= stated * 0.8;
            assert!(
                fits,
                "{what}: the table says {stated}, the program has {measured:.3} instructions a weight"
            );
        }
        let [one, many] = [stated[0], stated[1]].map(|n| format!("{n:.3}"));
        let row = format!("//! | {} | {one} | {many} |", codec.name());
        assert!(source.lines().any(|l| l == row), "{} lacks the line {row}", target.file);
    }
}

#[test]
fn instructions_a_weight() {
    if cfg!(debug_assertions) {
        // Checks inside the loops are not what runs.
        println!("skipped: instructions are counted in release builds");
        return;
    }
    for target in targets() {
        let costs = match count(&target) {
            Ok(costs) => costs,
            Err(why) => {
                println!("skipped: {why}");
                return;
            }
        };
        if std::env::var_os("TEGU_REGENERATE").is_some() {
            regenerate(&target, &costs);
        }
        compare(&target, &costs);
        let (isa, q4_0) = (target.isa, costs[0].one);
        assert!(
            isa != Isa::Avx2 || q4_0 <= Q4_0_AVX2_MAX,
            "Q4_0 costs {q4_0} instructions a weight with AVX2"
        );
    }
}

#[test]
fn loops_are_found_in_both_notations() {
    let x86 = "0000000000001000 <f>:\n    1000:\txor    %eax,%eax\n    1002:\tvpdpbusd %zmm1,%zmm2,%zmm3\n    \
               1008:\tvpdpbusd %zmm1,%zmm2,%zmm3\n    100e:\tadd    $1,%eax\n    1011:\tjne    1002 <f+0x2>\n    \
               1013:\tcmp    %ebx,%ecx\n    1015:\tjne    1000 <f>\n0000000000001020 <g>:\n    1020:\tret\n";
    let function = parse(x86);
    assert_eq!(function.len(), 7, "the next function is not part of it");
    assert_eq!(loops(&function), [(1, 4), (0, 6)]);
    // The inner loop of four instructions runs eight times for the 16 dot products of a group and row.
    let expected = (3.0 + 8.0 * 4.0) / 512.0;
    assert_eq!(cost(&function, "vpdpbusd", 16, 1), Some(expected));
    let arm = format!(
        "0000000000000040 <f>:\n{}  44:\tsubs\tx1, x1, #0x1\n  48:\tb.ne\t40 <f>  // b.any\n  4c:\tbl\t0 <g>\n",
        "  40:\tsdot\tv0.4s, v1.16b, v2.4b[0]\n".repeat(64)
    );
    assert_eq!(cost(&parse(&arm), "sdot", 64, 1), Some(66.0 / 512.0));
    assert_eq!(cost(&parse(&arm), "vpdpbusd", 16, 1), None);
}

#[test]
fn columns_are_written_and_read_back() {
    let table = "# Title\n\n| codec | avx2 | neon |\n|---|---|---|\n| q4_0 | 1 / 2 | x |\n";
    let costs = [Cost { one: 0.25, many: 0.125 }; CODECS.len()];
    let written = with_column(table, Isa::NeonDot, &costs);
    assert_eq!(written, table.replace("| x |", "| 0.250 / 0.125 |"));
    assert_eq!(table_cell(&written, Codec::Q4_0, Isa::NeonDot), Some("0.250 / 0.125"));
    assert_eq!(table_cell(&written, Codec::Q4_0, Isa::Avx512Vnni), None);
}
