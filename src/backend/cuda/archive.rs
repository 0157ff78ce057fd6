//! Kernels compiled when a package was built, so that a board needs no compiler: machine code for each GPU that is known,
//! and assembly that the driver translates for later ones. The archive is part of the program (build.rs embeds it), or a
//! file that `TEGU_KERNELS` names.
//!
//! An entry is found by the hash of everything that went into it (text, headers, flags, architecture), so that an archive
//! of other sources is never taken for this program's. Layout, little-endian: magic, count `n`, xxh3 of what is up to
//! here and of the directory; `n` directory entries of 40 bytes; LZ4 blocks.

use super::module::Unit;
use crate::units::{Bytes, Error, Result, open_file};
use std::borrow::Cow;
use std::io::Read;
use std::path::{Path, PathBuf};
use xxhash_rust::xxh3::{Xxh3, xxh3_64};

const MAGIC: &[u8; 8] = b"tegukrn1";
const HEAD_BYTES: usize = 24;
const ENTRY_BYTES: usize = 40;
/// All kernels for all architectures take some 20 MB.
const ARCHIVE_BYTES_MAX: u64 = 256 << 20;
/// Code of one unit: the largest takes half a MB.
const CODE_BYTES_MAX: usize = 64 << 20;
/// Set in an entry's architecture if it is assembly.
const PTX: u32 = 1 << 31;

/// What the package build embedded; empty without one.
static EMBEDDED: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/kernels.bin"));

/// What a piece of code is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Target {
    /// Machine code of exactly this architecture: 87 for sm_87.
    Sm(u32),
    /// Assembly for this architecture and all later ones.
    Compute(u32),
}

impl Target {
    /// As NVRTC's flag has it.
    pub fn from_name(name: &str) -> Option<Target> {
        let number = |prefix: &str| name.strip_prefix(prefix)?.parse().ok();
        number("sm_").map(Target::Sm).or(number("compute_").map(Target::Compute))
    }

    /// As NVRTC's flag has it.
    pub fn name(self) -> String {
        match self {
            Target::Sm(n) => format!("sm_{n}"),
            Target::Compute(n) => format!("compute_{n}"),
        }
    }

    fn bits(self) -> u32 {
        match self {
            Target::Sm(n) => n,
            Target::Compute(n) => n | PTX,
        }
    }

    fn from_bits(bits: u32) -> Target {
        if bits & PTX == 0 { Target::Sm(bits) } else { Target::Compute(bits & !PTX) }
    }
}

/// One entry of the directory.
#[derive(Debug, Clone, Copy)]
struct Entry {
    key: u128,
    target: Target,
    /// Bytes of code once unpacked.
    code_bytes: u32,
    at: u32,
    packed_bytes: u32,
    /// The low half of the code's xxh3.
    sum: u64,
}

/// A checked archive.
#[derive(Debug)]
pub struct Archive {
    bytes: Cow<'static, [u8]>,
    entries: Vec<Entry>,
}

impl Archive {
    /// The archive that this program is to use: `TEGU_KERNELS`, else what is embedded, if anything is.
    pub fn shipped() -> Result<Option<Archive>> {
        if let Some(path) = std::env::var_os("TEGU_KERNELS").filter(|v| !v.is_empty()) {
            return Archive::open(&PathBuf::from(path)).map(Some);
        }
        if EMBEDDED.is_empty() {
            return Ok(None);
        }
        Archive::read(Path::new("embedded kernels"), EMBEDDED.into()).map(Some)
    }

    /// Reads a file.
    pub fn open(path: &Path) -> Result<Archive> {
        let mut bytes = Vec::new();
        let mut file = open_file(path)?.take(ARCHIVE_BYTES_MAX + 1);
        file.read_to_end(&mut bytes).map_err(|e| Error::io(path, "read", e))?;
        if bytes.len() as u64 > ARCHIVE_BYTES_MAX {
            return Err(Error::bad(path, "size", format!("at most {}", Bytes(ARCHIVE_BYTES_MAX)), "more"));
        }
        Archive::read(path, bytes.into())
    }

    /// Checks the head and the directory of the archive `name`. Code is checked when it is taken out.
    pub fn read(name: &Path, bytes: Cow<'static, [u8]>) -> Result<Archive> {
        let bad = |field: &str, expected: &str, found: &dyn std::fmt::Display| {
            Error::bad(name, field, expected, found)
        };
        let head = bytes.get(..HEAD_BYTES).filter(|h| h[..8] == MAGIC[..]);
        let head = head.ok_or_else(|| bad("head", "an archive of kernels", &"something else"))?;
        let n = u64_at(head, 8);
        let end = n.checked_mul(ENTRY_BYTES as u64).and_then(|l| l.checked_add(HEAD_BYTES as u64));
        let directory = end.and_then(|end| bytes.get(HEAD_BYTES..usize::try_from(end).ok()?));
        let directory = directory.ok_or_else(|| bad("entries", "as many as fit the file", &n))?;
        if sum(&head[..16], directory) != u64_at(head, 16) {
            return Err(bad("checksum", "that of the directory", &"another"));
        }
        let entries: Vec<Entry> = directory.chunks_exact(ENTRY_BYTES).map(entry).collect();
        for e in &entries {
            let inside = e.at as usize + e.packed_bytes as usize <= bytes.len();
            if !inside || e.code_bytes as usize > CODE_BYTES_MAX {
                return Err(bad("entry", "code inside the file", &format!("{e:?}")));
            }
        }
        Ok(Archive { bytes, entries })
    }

    /// Writes pieces of code: what each was made from, what it is for, and itself.
    pub fn write(pieces: &[(u128, Target, Vec<u8>)]) -> Vec<u8> {
        let mut directory = Vec::new();
        let mut blocks = Vec::new();
        let start = HEAD_BYTES + pieces.len() * ENTRY_BYTES;
        for (key, target, code) in pieces {
            let packed = lz4_flex::block::compress(code);
            directory.extend(key.to_le_bytes());
            let at = start + blocks.len();
            for n in [target.bits() as usize, code.len(), at, packed.len()] {
                directory.extend(u32::try_from(n).expect("kernels are small").to_le_bytes());
            }
            directory.extend(xxh3_64(code).to_le_bytes());
            blocks.extend(packed);
        }
        let mut out = MAGIC.to_vec();
        out.extend((pieces.len() as u64).to_le_bytes());
        out.extend(sum(&out, &directory).to_le_bytes());
        out.extend(directory);
        out.extend(blocks);
        out
    }

    /// Code of `unit` for a GPU of architecture `sm`: its own machine code, else assembly of the latest architecture
    /// that it understands. None if there is none, or if it is damaged, which is said.
    pub fn find(&self, unit: Unit, sm: u32) -> Option<Vec<u8>> {
        self.targets(sm).into_iter().find_map(|target| {
            let key = unit.key(&target.name()).digest();
            let entry = self.entries.iter().find(|e| e.key == key && e.target == target)?;
            let code = self.code(entry);
            if code.is_none() {
                log::warn!("kernel {} {}: the packaged code is damaged", unit.file, unit.variant);
            }
            code
        })
    }

    /// What a GPU of architecture `sm` can run, best first.
    fn targets(&self, sm: u32) -> Vec<Target> {
        let mut texts: Vec<u32> = Vec::new();
        for e in &self.entries {
            if let Target::Compute(n) = e.target
                && n <= sm
                && !texts.contains(&n)
            {
                texts.push(n);
            }
        }
        texts.sort_by(|a, b| b.cmp(a));
        std::iter::once(Target::Sm(sm)).chain(texts.into_iter().map(Target::Compute)).collect()
    }

    fn code(&self, e: &Entry) -> Option<Vec<u8>> {
        let packed = &self.bytes[e.at as usize..][..e.packed_bytes as usize];
        let mut code = vec![0; e.code_bytes as usize];
        let len = lz4_flex::block::decompress_into(packed, &mut code).ok()?;
        (len == code.len() && xxh3_64(&code) == e.sum).then_some(code)
    }

    /// Entries.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// True if it holds nothing.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().expect("8 bytes"))
}

fn entry(b: &[u8]) -> Entry {
    let word = |at: usize| u32::from_le_bytes(b[at..at + 4].try_into().expect("4 bytes"));
    Entry {
        key: u128::from_le_bytes(b[..16].try_into().expect("16 bytes")),
        target: Target::from_bits(word(16)),
        code_bytes: word(20),
        at: word(24),
        packed_bytes: word(28),
        sum: u64_at(b, 32),
    }
}

fn sum(head: &[u8], directory: &[u8]) -> u64 {
    let mut hash = Xxh3::new();
    hash.update(head);
    hash.update(directory);
    hash.digest()
}

#[cfg(test)]
mod tests {
    use super::*;

    const UNIT: Unit = Unit::of("norm");

    fn piece(unit: Unit, target: Target, code: &[u8]) -> (u128, Target, Vec<u8>) {
        (unit.key(&target.name()).digest(), target, code.to_vec())
    }

    fn archive() -> Vec<u8> {
        let code = |text: &str| text.repeat(100).into_bytes();
        Archive::write(&[
            piece(UNIT, Target::Sm(87), &code("for Orin ")),
            piece(UNIT, Target::Sm(90), &code("for Hopper ")),
            piece(UNIT, Target::Compute(80), &code("older text ")),
            piece(UNIT, Target::Compute(87), &code("text ")),
        ])
    }

    fn read(bytes: Vec<u8>) -> Result<Archive> {
        Archive::read(Path::new("a"), bytes.into())
    }

    #[test]
    fn own_machine_code_comes_before_text_and_text_serves_later_gpus() {
        let a = read(archive()).unwrap();
        let begins = |sm: u32, with: &str| a.find(UNIT, sm).is_some_and(|c| c.starts_with(with.as_bytes()));
        assert!(begins(87, "for Orin") && begins(90, "for Hopper"));
        assert!(begins(120, "text") && begins(88, "text"), "the latest text");
        assert!(begins(86, "older text"), "text of a later GPU is none for an earlier one");
        assert!(a.find(UNIT, 75).is_none());
        assert!(a.find(Unit::of("silu"), 87).is_none(), "another unit");
    }

    #[test]
    fn no_damage_goes_unseen() {
        let good = archive();
        let mut seen = 0;
        for at in 0..good.len() {
            let mut bad = good.clone();
            bad[at] ^= 1;
            // Head and directory: refused. Code: not given out, so that text or the compiler steps in.
            let Ok(a) = read(bad) else { continue };
            assert!(at >= HEAD_BYTES + 4 * ENTRY_BYTES, "byte {at} of the directory");
            // A flipped bit may unpack to the same repetition; whatever is given out is one of the four pieces, whole.
            let whole =
                ["for Orin ", "for Hopper ", "older text ", "text "].map(|t| t.repeat(100).into_bytes());
            let found = [87, 90, 86, 120].map(|sm| a.find(UNIT, sm));
            assert!(found.iter().flatten().all(|c| whole.contains(c)), "byte {at}");
            let as_before = [0, 1, 2, 3].iter().filter(|&&i| found[i].as_ref() == Some(&whole[i]));
            let same = as_before.count();
            assert!(same >= 3, "byte {at}");
            seen += usize::from(same == 3);
        }
        assert!(seen > 30, "damage that changes code is seen: {seen}");
        (0..good.len()).for_each(|len| {
            assert!(read(good[..len].to_vec()).is_err(), "cut to {len}");
        });
    }

    #[test]
    fn an_absurd_directory_is_refused() {
        let mut many = archive();
        many[8..16].fill(0xff);
        assert!(read(many).is_err());
        assert!(read(Vec::new()).is_err() && read(vec![0; 100]).is_err());
    }

    #[test]
    fn targets_are_named_as_the_compiler_names_them() {
        for name in ["sm_87", "compute_87"] {
            assert_eq!(Target::from_name(name).unwrap().name(), name);
        }
        assert_eq!(Target::from_name("sm_x"), None);
    }
}
