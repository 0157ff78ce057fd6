//! Sessions on disk: the tokens of a conversation with what is cached of them, so that it goes on without reading anything
//! again, in another process or on another backend of the same model.
//!
//! A file is: magic, version, header length, a JSON header, tokens (u32), tags (u8), blocks in the backends' serial form, and
//! an XXH3 checksum of all that. All numbers are little-endian. It is written aside, synced and renamed, so that the name
//! always stands for a whole session: the old one or the new one.

use super::Engine;
use super::request::{Class, SeqId};
use crate::backend::serial_bytes;
use crate::kv::{PageId, Place};
use crate::limits::SESSION_HEADER_MAX;
use crate::model::Hyper;
use crate::units::{Error, Result, TokenId, open_file};
use crate::weights::Source;
use serde::{Deserialize, Serialize};
use std::fs::{self, File};
use std::io::{self, BufReader, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use xxhash_rust::xxh3::Xxh3;

const MAGIC: &[u8; 8] = b"TEGUSESS";
/// Readers refuse any other: the layout of what follows is the version's.
const VERSION: u32 = 1;
/// Magic, version, header length.
const PREFIX_BYTES: usize = 16;
const SUM_BYTES: u64 = 8;
/// Nothing ranks below a session that is loaded: it throws no one out.
const RANK: (Class, SeqId) = (Class::Background, SeqId::MAX);

/// What a session was made with; it must be the same to be read.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Header {
    /// [`Engine::set_model_id`], as 16 hexadecimal digits.
    model: String,
    /// Element type of the cache.
    kv: String,
    /// Tokens of a block.
    block: usize,
    /// Tokens of the conversation.
    tokens: usize,
    /// Those in the cache, from the first on.
    cached: usize,
}

impl Engine {
    /// Tells models apart whose cached values mean different things; sessions carry it.
    pub fn set_model_id(&mut self, id: u64) {
        self.model_id = id;
    }

    /// Holds what is cached of `tokens` worth a write when it is evicted. Returns how many tokens are cached.
    pub fn keep(&mut self, tokens: &[TokenId]) -> usize {
        let found = self.tree.find(tokens, None);
        self.tree.keep(&found.nodes);
        found.tokens
    }

    /// Writes `tokens`, and what is cached of them, to a file. Returns `(cached tokens, bytes of the file)`.
    pub fn save_session(&mut self, path: &Path, tokens: &[TokenId]) -> Result<(usize, u64)> {
        let found = self.tree.find(tokens, None);
        let header = Header {
            model: format!("{:016x}", self.model_id),
            kv: self.backend.kv_type().name().into(),
            block: self.block_tokens(),
            tokens: tokens.len(),
            cached: found.tokens,
        };
        let header = serde_json::to_vec(&header).expect("plain fields");
        let mut out = Aside::create(path)?;
        out.write(MAGIC)?;
        out.write(&VERSION.to_le_bytes())?;
        out.write(&(header.len() as u32).to_le_bytes())?;
        out.write(&header)?;
        out.write(&tokens.iter().flat_map(|t| t.to_le_bytes()).collect::<Vec<u8>>())?;
        let mut left = found.tokens;
        for &id in &found.nodes {
            let n = left.min(self.tree.tags(id).len());
            out.write(&self.tree.tags(id)[..n])?;
            left -= n;
        }
        let mut bytes = Vec::new();
        for (i, &id) in found.nodes.iter().enumerate() {
            let n = (found.tokens - i * self.block_tokens()).min(self.block_tokens());
            self.block_bytes(id, n, &mut bytes)?;
            out.write(&bytes)?;
        }
        Ok((found.tokens, out.finish()?))
    }

    /// The first `tokens` positions of a cached block in serial form, wherever it is.
    fn block_bytes(&mut self, id: usize, tokens: usize, bytes: &mut Vec<u8>) -> Result<()> {
        bytes.clear();
        match self.tree.place(id) {
            Place::Pages(pages) => self.backend.export(pages, tokens, bytes)?,
            Place::Spilled(slot) => {
                let whole = self.tree.tags(id).len();
                self.spill.as_ref().expect("what is spilled has a file").read(*slot, bytes)?;
                if whole > tokens {
                    // The serial form is by layers: a shorter one comes from pages.
                    let pages = self.take_pages()?;
                    let imported = self.backend.import(&pages, whole, bytes);
                    bytes.clear();
                    let done = imported.and_then(|()| self.backend.export(&pages, tokens, bytes));
                    pages.into_iter().for_each(|p| self.pool.release(p));
                    done?;
                }
            }
        }
        Ok(())
    }

    /// Pages of one block, by eviction if need be.
    fn take_pages(&mut self) -> Result<Vec<PageId>> {
        if !self.make_room(self.stride, RANK, &[]) {
            return Err(Error::Limit {
                what: "key-value cache".into(),
                needs: format!("{} more pages", self.stride),
                has: "pages in use only".into(),
            });
        }
        Ok((0..self.stride).map(|_| self.pool.take().expect("room was made")).collect())
    }

    /// Reads a session into the prefix tree: a prompt that begins with its tokens finds them there. Returns the tokens and
    /// how many are cached. A file that is not whole, or another model's, is an error and changes nothing.
    pub fn load_session(&mut self, path: &Path) -> Result<(Vec<TokenId>, usize)> {
        let mut file = open_file(path)?;
        let (header, data_at) = self.check_session(path, &mut file)?;
        let read = |e| Error::io(path, "read", e);
        file.seek(SeekFrom::Start(data_at)).map_err(read)?;
        let mut file = BufReader::with_capacity(1 << 20, file);
        let mut words = vec![0; header.tokens * 4];
        file.read_exact(&mut words).map_err(read)?;
        let words = words.chunks_exact(4).map(|b| TokenId::from_le_bytes([b[0], b[1], b[2], b[3]]));
        let tokens: Vec<TokenId> = words.collect();
        super::check_tokens("session", &tokens, self.hyper.vocab)?;
        let mut tags = vec![0; header.cached];
        file.read_exact(&mut tags).map_err(read)?;
        if let Some(t) = tags.iter().find(|t| **t > 1) {
            return Err(Error::bad(path, "tags", "0 or 1", t));
        }
        let mut pages: Vec<PageId> = Vec::new();
        let loaded = self.load_blocks(path, &mut file, header.cached, &mut pages);
        if loaded.is_ok() {
            let (found, slots) =
                self.tree.insert(&mut self.pool, &tokens[..header.cached], &tags, &pages, true);
            self.free_slots(slots);
            self.tree.keep(&found.nodes);
        }
        pages.into_iter().for_each(|p| self.pool.release(p));
        loaded?;
        Ok((tokens, header.cached))
    }

    fn load_blocks(
        &mut self,
        path: &Path,
        file: &mut impl Read,
        cached: usize,
        pages: &mut Vec<PageId>,
    ) -> Result<()> {
        let mut bytes = Vec::new();
        for first in (0..cached).step_by(self.block_tokens()) {
            let n = (cached - first).min(self.block_tokens());
            bytes.resize(serial_bytes(&self.hyper, self.backend.kv_type(), n), 0);
            file.read_exact(&mut bytes).map_err(|e| Error::io(path, "read", e))?;
            let own = self.take_pages()?;
            // With the others before anything can fail, so that all are given back.
            pages.extend_from_slice(&own);
            self.backend.import(&own, n, &bytes)?;
        }
        Ok(())
    }

    /// Checks everything but the tokens themselves: header, model, lengths, checksum. Gives the header and where what follows
    /// it begins.
    fn check_session(&self, path: &Path, file: &mut File) -> Result<(Header, u64)> {
        let read = |e| Error::io(path, "read", e);
        let len = file.metadata().map_err(read)?.len();
        let mut prefix = [0; PREFIX_BYTES];
        let short = |_| Error::bad(path, "length", "a whole session", format_args!("{len} bytes"));
        file.read_exact(&mut prefix).map_err(short)?;
        if prefix[..8] != *MAGIC {
            return Err(Error::bad(path, "magic", "a session of Tegu", "something else"));
        }
        let word = |at: usize| u32::from_le_bytes(prefix[at..at + 4].try_into().expect("4 bytes"));
        if word(8) != VERSION {
            return Err(Error::bad(path, "version", VERSION, word(8)));
        }
        if word(12) > SESSION_HEADER_MAX {
            let expected = format_args!("at most {SESSION_HEADER_MAX}").to_string();
            return Err(Error::bad(path, "header length", expected, word(12)));
        }
        let mut header = vec![0; word(12) as usize];
        file.read_exact(&mut header).map_err(short)?;
        let header: Header = serde_json::from_slice(&header)
            .map_err(|e| Error::bad(path, "header", "the fields of a session", e))?;
        self.check_header(path, &header)?;
        let data_at = PREFIX_BYTES as u64 + u64::from(word(12));
        let (block, kv) = (self.block_tokens(), self.backend.kv_type());
        let whole = serial_bytes(&self.hyper, kv, block) * (header.cached / block);
        let blocks = whole + serial_bytes(&self.hyper, kv, header.cached % block);
        let want = data_at + (header.tokens * 4 + header.cached + blocks) as u64 + SUM_BYTES;
        if len != want {
            return Err(Error::bad(path, "length", format_args!("{want} bytes"), len));
        }
        check_sum(path, file, len)?;
        Ok((header, data_at))
    }

    fn check_header(&self, path: &Path, header: &Header) -> Result<()> {
        let field = |name: &str, want: &str, found: &str| {
            if want == found { Ok(()) } else { Err(Error::bad(path, name, want, found)) }
        };
        field("model", &format!("{:016x}", self.model_id), &header.model)?;
        field("kv", self.backend.kv_type().name(), &header.kv)?;
        field("block", &self.block_tokens().to_string(), &header.block.to_string())?;
        let most = self.context_tokens + 1;
        if !(1..=most).contains(&header.tokens) {
            return Err(Error::bad(path, "tokens", format_args!("1 to {most}"), header.tokens));
        }
        if header.cached > header.tokens {
            return Err(Error::bad(path, "cached", format_args!("at most {}", header.tokens), header.cached));
        }
        Ok(())
    }
}

/// A number that differs between models whose cached values mean different things: from the names, shapes and codecs of all
/// tensors and the values of the final norm.
pub fn model_id(source: &Source, h: &Hyper) -> Result<u64> {
    let mut sum = Xxh3::new();
    sum.update(format!("{h:?}").as_bytes());
    for t in source.tensors() {
        sum.update(format!("{t:?}").as_bytes());
    }
    let norm = ["output_norm.weight", "model.norm.weight"].iter().find_map(|n| source.find(n));
    if let Some(t) = norm {
        source.read_f32(t)?.iter().for_each(|x| sum.update(&x.to_le_bytes()));
    }
    Ok(sum.digest())
}

/// Compares the checksum at the end with what it should be.
fn check_sum(path: &Path, file: &mut File, len: u64) -> Result<()> {
    let read = |e| Error::io(path, "read", e);
    file.seek(SeekFrom::Start(0)).map_err(read)?;
    let (mut sum, mut left) = (Xxh3::new(), len - SUM_BYTES);
    let mut buffer = vec![0; 1 << 20];
    while left > 0 {
        let n = buffer.len().min(left as usize);
        file.read_exact(&mut buffer[..n]).map_err(read)?;
        sum.update(&buffer[..n]);
        left -= n as u64;
    }
    let mut stored = [0; SUM_BYTES as usize];
    file.read_exact(&mut stored).map_err(read)?;
    let (want, found) = (u64::from_le_bytes(stored), sum.digest());
    if want == found {
        return Ok(());
    }
    Err(Error::bad(path, "checksum", format_args!("{want:016x}"), format_args!("{found:016x}")))
}

/// Ends the name of a file that is being written.
pub const ASIDE_SUFFIX: &str = ".part";

/// A file that is written beside its place, and takes it when it is whole.
struct Aside {
    file: io::BufWriter<File>,
    sum: Xxh3,
    bytes: u64,
    aside: PathBuf,
    path: PathBuf,
    done: bool,
}

impl Aside {
    fn create(path: &Path) -> Result<Aside> {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let aside = path.with_file_name(format!(".{name}.{}{ASIDE_SUFFIX}", std::process::id()));
        let mut options = fs::OpenOptions::new();
        std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
        let file = options.write(true).create(true).truncate(true).open(&aside);
        let file = file.map_err(|e| Error::io(&aside, "create", e))?;
        let file = io::BufWriter::with_capacity(1 << 20, file);
        Ok(Aside { file, sum: Xxh3::new(), bytes: 0, aside, path: path.into(), done: false })
    }

    fn write(&mut self, bytes: &[u8]) -> Result<()> {
        self.sum.update(bytes);
        self.bytes += bytes.len() as u64;
        self.file.write_all(bytes).map_err(|e| Error::io(&self.aside, "write", e))
    }

    /// Adds the checksum and takes the place. Returns the bytes written.
    fn finish(mut self) -> Result<u64> {
        let sum = self.sum.digest();
        let written = self.file.write_all(&sum.to_le_bytes()).and_then(|()| self.file.flush());
        let synced = written.and_then(|()| self.file.get_ref().sync_all());
        synced.map_err(|e| Error::io(&self.aside, "write", e))?;
        fs::rename(&self.aside, &self.path).map_err(|e| Error::io(&self.path, "rename to", e))?;
        self.done = true;
        // The name is safe once its folder is: a system that cannot sync folders keeps its own order.
        if let Some(folder) = self.path.parent() {
            let _ = File::open(folder).and_then(|f| f.sync_all());
        }
        Ok(self.bytes + SUM_BYTES)
    }
}

impl Drop for Aside {
    fn drop(&mut self) {
        if !self.done {
            let _ = fs::remove_file(&self.aside); // what cannot be removed is swept at the next start
        }
    }
}
