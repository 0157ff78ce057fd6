//! What a kernel's inner loop asks of an SM: machine code of sm_80 to sm_90 read just far enough to count instructions by
//! pipe. An instruction is 16 bytes; the low 9 bits of the first are what it does, whatever its operands are (read off
//! nvdisasm's listings of our own kernels). Pure: bytes in, counts out.

use serde::{Deserialize, Serialize};

/// Instructions by the pipe that takes them. All of them pass the one issue slot of a scheduler.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Pipes {
    /// Integer, logic, moves, comparisons, dot products of bytes.
    pub int: u32,
    /// Floats, and conversions from and to them.
    pub fp: u32,
    /// Loads, stores, shuffles.
    pub lsu: u32,
    /// Matrix multiply-accumulate.
    pub tensor: u32,
    /// Branches, barriers and what is left.
    pub control: u32,
}

impl Pipes {
    /// All of them: what is issued.
    pub fn issue(&self) -> u32 {
        self.int + self.fp + self.lsu + self.tensor + self.control
    }
}

/// One innermost loop.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Loop {
    /// Its instructions.
    pub pipes: Pipes,
    /// Of them: byte dot products (IDP.4A).
    pub dots: u32,
    /// Of them: f32 multiply-adds.
    pub fmas: u32,
}

impl Loop {
    /// Multiplications of any kind: what tells the loop that does a kernel's work from one that prepares it.
    fn weight(&self) -> u32 {
        16 * self.pipes.tensor + 4 * self.dots + self.fmas
    }
}

// The low 9 bits of instructions that are looked for by name.
const IDP: u16 = 0x026;
const FFMA: u16 = 0x023;
const BRA: u16 = 0x147;
const FP: [u16; 19] = [
    0x008, 0x009, 0x00b, 0x020, 0x021, 0x023, 0x030, 0x031, 0x032, 0x035, 0x03e, 0x045, 0x102, 0x105, 0x106,
    0x108, 0x110, 0x111, 0x113,
];
const DOUBLE: [u16; 4] = [0x028, 0x029, 0x02a, 0x02b];
const LSU: [u16; 16] = [
    0x03b, 0x180, 0x181, 0x182, 0x184, 0x185, 0x186, 0x188, 0x189, 0x18c, 0x18d, 0x18e, 0x18f, 0x1a8, 0x1ae,
    0x1af,
];
const TENSOR: [u16; 4] = [0x03c, 0x037, 0x03d, 0x03f];
const CONTROL: [u16; 17] = [
    0x118, 0x11a, 0x11d, 0x141, 0x142, 0x144, 0x145, 0x146, 0x147, 0x148, 0x14d, 0x150, 0x155, 0x156, 0x192,
    0x1ab, 0x15b,
];

/// What instruction starts at `code`, by its low 9 bits.
fn operation(code: &[u8]) -> u16 {
    u16::from_le_bytes([code[0], code[1]]) & 0x1ff
}

/// Where a branch goes, in bytes from the instruction after it: 50 bits, signed, from bit 32 on.
fn offset(code: &[u8; 16]) -> i64 {
    let word = u128::from_le_bytes(*code);
    (((word >> 32) as i64) << 14) >> 14
}

/// The loop of a function's code that does most of its multiplications, and in which no smaller loop multiplies; none if it
/// has no loop.
pub fn inner_loop(code: &[u8]) -> Option<Loop> {
    let all = code.as_chunks::<16>().0;
    // A branch back to an instruction before it closes a loop; the trap after a function's end branches to itself.
    let back = all.iter().enumerate().filter(|(_, c)| operation(&c[..]) == BRA).filter_map(|(i, c)| {
        let to = (i as i64 + 1) + offset(c) / 16;
        (0..i as i64).contains(&to).then_some((to as usize, i))
    });
    let loops: Vec<((usize, usize), Loop)> = back.map(|l| (l, count(&all[l.0..=l.1]))).collect();
    let holds_another = |a: &(usize, usize)| {
        loops.iter().any(|(b, of_b)| b != a && a.0 <= b.0 && b.1 <= a.1 && of_b.weight() > 0)
    };
    let inner = loops.iter().filter(|(l, _)| !holds_another(l)).map(|(_, counted)| *counted);
    inner.max_by_key(|l| (l.weight(), l.pipes.issue()))
}

fn count(code: &[[u8; 16]]) -> Loop {
    let mut out = Loop::default();
    for c in code {
        let op = operation(&c[..]);
        out.dots += u32::from(op == IDP);
        out.fmas += u32::from(op == FFMA);
        let p = &mut out.pipes;
        let pipe = match op {
            _ if TENSOR.contains(&op) => &mut p.tensor,
            _ if LSU.contains(&op) => &mut p.lsu,
            _ if FP.contains(&op) || DOUBLE.contains(&op) => &mut p.fp,
            _ if CONTROL.contains(&op) => &mut p.control,
            _ => &mut p.int,
        };
        *pipe += 1;
    }
    out
}

/// The code of each kernel of a cubin: sections `.text.NAME` of a 64-bit little-endian ELF file. Nothing, if it is none.
pub fn functions(elf: &[u8]) -> Vec<(String, &[u8])> {
    read_functions(elf).unwrap_or_default()
}

fn read_functions(elf: &[u8]) -> Option<Vec<(String, &[u8])>> {
    let number = |at: usize, len: usize| -> Option<usize> {
        let bytes = elf.get(at..at.checked_add(len)?)?;
        let value = bytes.iter().rev().fold(0u64, |n, b| n << 8 | u64::from(*b));
        usize::try_from(value).ok()
    };
    if elf.get(..6)? != b"\x7fELF\x02\x01" {
        return None;
    }
    // e_shoff, e_shentsize, e_shnum, e_shstrndx of the ELF header; sh_name, sh_offset, sh_size of a section's.
    let (table, each, n, names) = (number(0x28, 8)?, number(0x3a, 2)?, number(0x3c, 2)?, number(0x3e, 2)?);
    let section = |i: usize| -> Option<(usize, usize, usize)> {
        let at = table.checked_add(i.checked_mul(each)?)?;
        Some((number(at, 4)?, number(at.checked_add(0x18)?, 8)?, number(at.checked_add(0x20)?, 8)?))
    };
    let (_, names_at, names_len) = section(names)?;
    let names = elf.get(names_at..names_at.checked_add(names_len)?)?;
    let mut out = Vec::new();
    for i in 0..n {
        let (name, at, len) = section(i)?;
        let name = names.get(name..)?.split(|b| *b == 0).next()?;
        if let Some(kernel) = name.strip_prefix(b".text.") {
            let code = elf.get(at..at.checked_add(len)?)?;
            out.push((String::from_utf8_lossy(kernel).into_owned(), code));
        }
    }
    Some(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An instruction by its low 12 bits, as nvdisasm prints it in hex.
    fn op(code: u16) -> [u8; 16] {
        let mut c = [0; 16];
        c[..2].copy_from_slice(&(0x7000 | code).to_le_bytes());
        c
    }

    fn branch(instructions: i64) -> [u8; 16] {
        let bytes = (instructions * 16) as u128 & ((1 << 50) - 1);
        (u128::from(0x7947u16) | bytes << 32).to_le_bytes()
    }

    #[test]
    fn the_loop_that_multiplies_is_found_and_counted() {
        let listing = [
            op(0x919), // S2R
            op(0x981), // LDG: a loop that prepares
            branch(-2),
            op(0x981), // LDG, of the outer loop
            op(0x981), // LDG: the loop that works
            op(0x226), // IDP
            op(0x226),
            op(0x812), // LOP3
            op(0x223), // FFMA
            op(0x245), // I2FP
            branch(1), // forward
            op(0x388), // STS
            branch(-9),
            branch(-11), // the outer loop
            op(0x94d),   // EXIT
            branch(-1),  // the trap
        ];
        let code = listing.concat();
        let found = inner_loop(&code).unwrap();
        let pipes = Pipes { int: 3, fp: 2, lsu: 2, tensor: 0, control: 2 };
        assert_eq!(found, Loop { pipes, dots: 2, fmas: 1 });
        assert_eq!(found.pipes.issue(), 9);
        assert_eq!(inner_loop(&op(0x94d)), None);
    }

    #[test]
    fn a_branch_is_read_as_the_disassembler_reads_it() {
        // BRA to itself, as it stands after every function: 0xfffffff000007947, 0x000fc0000383ffff.
        let trap = (0x000f_c000_0383_ffff_u128 << 64 | 0xffff_fff0_0000_7947).to_le_bytes();
        assert_eq!(offset(&trap), -16);
    }

    #[test]
    fn bytes_that_are_no_cubin_have_no_functions() {
        let mut elf = b"\x7fELF\x02\x01".to_vec();
        elf.resize(64, 0xff);
        for len in 0..=elf.len() {
            assert!(functions(&elf[..len]).is_empty());
        }
        elf[6..].fill(0);
        assert!(functions(&elf).is_empty());
    }
}
