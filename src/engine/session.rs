//! Sessions on disk: the tokens of a conversation with what is cached of them, so that it goes on without reading anything
//! again, in another process or on another backend of the same model.
//!
//! A file is: magic, version, header length, a JSON header, tokens (u32), tags (u8), blocks in the backends' serial form, and
//! an XXH3 checksum of all that. All numbers are little-endian. It is written aside, synced and renamed, so that the name
//! always stands for a whole session: the old one or the new one.

use super::Engine;
use super::request::{Class, SeqId};
use crate::backend::serial_bytes;
use crate::kv::PageId;
use crate::limits::SESSION_HEADER_MAX;
use crate::model::Hyper;
use crate::units::{Error, Result, TokenId, open_file};
use crate::weights::Source;
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::io::{BufReader, Read, Seek, SeekFrom};
use std::path::Path;
use xxhash_rust::xxh3::Xxh3;

pub(super) const MAGIC: &[u8; 8] = b"TEGUSESS";
/// Readers refuse any other: the layout of what follows is the version's.
pub(super) const VERSION: u32 = 1;
/// Magic, version, header length.
const PREFIX_BYTES: usize = 16;
pub(super) const SUM_BYTES: u64 = 8;
/// Nothing ranks below a session that is loaded: it throws no one out.
const RANK: (Class, SeqId) = (Class::Background, SeqId::MAX);

/// What a session was made with; it must be the same to be read.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Header {
    /// [`Engine::set_model_id`], as 16 hexadecimal digits.
    pub model: String,
    /// Element type of the cache.
    pub kv: String,
    /// Tokens of a block.
    pub block: usize,
    /// Tokens of the conversation.
    pub tokens: usize,
    /// Those in the cache, from the first on.
    pub cached: usize,
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

    /// Pages of one block, by eviction if need be.
    pub(super) fn take_pages(&mut self) -> Result<Vec<PageId>> {
        // What a session that is being saved still holds is the last that can be had.
        let mut has_room = self.make_room(self.stride, RANK, &[]);
        if !has_room && self.finish_saves() {
            has_room = self.make_room(self.stride, RANK, &[]);
        }
        if !has_room {
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
            self.pulse.beat();
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
