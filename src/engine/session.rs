//! Sessions on disk: the tokens of a conversation with what is cached of them, so that it goes on without reading anything
//! again, in another process or on another backend of the same model.
//!
//! A file is: magic, version, header length, a JSON header, tokens (u32), tags (u8), blocks in the backends' serial form, and
//! an XXH3 checksum of all that. All numbers are little-endian. It is written aside, synced and renamed, so that the name
//! always stands for a whole session: the old one or the new one.

use super::Engine;
use super::request::{Class, SeqId};
use crate::backend::{KvType, serial_bytes};
use crate::kv::PageId;
use crate::limits::SESSION_HEADER_MAX;
use crate::model::Hyper;
use crate::units::{Error, Result, TokenId};
use crate::weights::Source;
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
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

    /// What a session must be made with to be read here.
    pub(super) fn wanted(&self) -> Wanted {
        Wanted {
            model: format!("{:016x}", self.model_id),
            kv: self.backend.kv_type(),
            block: self.block_tokens(),
            context_tokens: self.context_tokens,
            hyper: self.hyper.clone(),
        }
    }
}

/// What a session must be made with, for the thread that reads it.
pub(super) struct Wanted {
    model: String,
    pub kv: KvType,
    /// Tokens of a block.
    pub block: usize,
    context_tokens: usize,
    pub hyper: Hyper,
}

impl Wanted {
    /// Checks everything but the tokens themselves: header, model, lengths, checksum. Gives the header, where what follows
    /// it begins, and the file's bytes.
    pub fn check_session(&self, path: &Path, file: &mut File) -> Result<(Header, u64, u64)> {
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
        let (block, kv) = (self.block, self.kv);
        let whole = serial_bytes(&self.hyper, kv, block) * (header.cached / block);
        let blocks = whole + serial_bytes(&self.hyper, kv, header.cached % block);
        let want = data_at + (header.tokens * 4 + header.cached + blocks) as u64 + SUM_BYTES;
        if len != want {
            return Err(Error::bad(path, "length", format_args!("{want} bytes"), len));
        }
        check_sum(path, file, len)?;
        Ok((header, data_at, len))
    }

    fn check_header(&self, path: &Path, header: &Header) -> Result<()> {
        let field = |name: &str, want: &str, found: &str| {
            if want == found { Ok(()) } else { Err(Error::bad(path, name, want, found)) }
        };
        field("model", &self.model, &header.model)?;
        field("kv", self.kv.name(), &header.kv)?;
        field("block", &self.block.to_string(), &header.block.to_string())?;
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
