//! Reading a session while others go on: a thread checks the file and reads it, a few blocks ahead; the engine takes them a
//! little between two steps. Nothing is held from one step to the next: a block is in the prefix tree as soon as it is read,
//! and whoever needs its room more may have it.

use super::Engine;
use super::session::Wanted;
use crate::backend::serial_bytes;
use crate::kv::PageId;
use crate::units::{Error, Result, TokenId, open_file};
use std::io::{BufReader, Read, Seek, SeekFrom};
use std::path::Path;
use std::sync::mpsc::{Receiver, SyncSender, TryRecvError, sync_channel};
use std::time::{Duration, Instant};

/// Blocks that are read and not yet taken.
const BLOCKS_AHEAD: usize = 4;

/// Of a file, in this order; after a failure nothing comes.
enum Part {
    Head(Head),
    Block(Vec<u8>),
    Failed(Error),
}

/// What is known of a file that is whole and this model's.
struct Head {
    tokens: Vec<TokenId>,
    /// How each cached token was computed.
    tags: Vec<u8>,
    file_bytes: u64,
}

/// A session on its way from its file. Dropping it ends the reading.
pub struct Loading {
    parts: Receiver<Part>,
    head: Option<Head>,
    /// Cached tokens that have been taken.
    taken: usize,
}

/// A session that was read.
#[derive(Debug, PartialEq, Eq)]
pub struct Loaded {
    /// The conversation.
    pub tokens: Vec<TokenId>,
    /// Those in the cache now.
    pub cached_tokens: usize,
    /// Of the file.
    pub file_bytes: u64,
}

impl Engine {
    /// Begins to read a session into the prefix tree: a prompt that begins with its tokens will find them there. What is read
    /// is taken by [`Engine::pump_load`].
    ///
    /// # Errors
    /// The system refuses a thread.
    pub fn begin_load(&self, path: &Path) -> Result<Loading> {
        let (sender, parts) = sync_channel(BLOCKS_AHEAD);
        let (path, wanted) = (path.to_owned(), self.wanted());
        let read = move || {
            if let Err(e) = read(&path, &wanted, &sender) {
                let _ = sender.send(Part::Failed(e)); // who asked may not want it any more
            }
        };
        // Not joined: one whose disk stands still ends when that does, and no one waits for it.
        let thread = std::thread::Builder::new().name("tegu-restore".into()).spawn(read);
        thread.map_err(|e| Error::io("sessions", "start a thread", e))?;
        Ok(Loading { parts, head: None, taken: 0 })
    }

    /// Takes what has been read, for `within` at most and without waiting for the disk. Something once it has ended: a file
    /// that is not whole, or another model's, is an error and changes nothing.
    pub fn pump_load(&mut self, load: &mut Loading, within: Duration) -> Option<Result<Loaded>> {
        let until = Instant::now() + within;
        loop {
            let part = match load.parts.try_recv() {
                Ok(part) => part,
                Err(TryRecvError::Empty) => return None,
                Err(TryRecvError::Disconnected) => return Some(Err(lost())),
            };
            match self.take_part(load, part) {
                Ok(None) if Instant::now() < until => {}
                Ok(None) => return None,
                Ok(Some(loaded)) => return Some(Ok(loaded)),
                Err(e) => return Some(Err(e)),
            }
        }
    }

    /// Reads a session and waits for it. Returns the tokens and how many of them are cached; errors are those of
    /// [`Engine::pump_load`].
    pub fn load_session(&mut self, path: &Path) -> Result<(Vec<TokenId>, usize)> {
        let mut load = self.begin_load(path)?;
        loop {
            let part = load.parts.recv().map_err(|_| lost())?;
            if let Some(loaded) = self.take_part(&mut load, part)? {
                return Ok((loaded.tokens, loaded.cached_tokens));
            }
        }
    }

    fn take_part(&mut self, load: &mut Loading, part: Part) -> Result<Option<Loaded>> {
        self.pulse.beat();
        match part {
            Part::Failed(e) => return Err(e),
            Part::Head(head) => load.head = Some(head),
            Part::Block(bytes) => {
                let head = load.head.as_ref().expect("the head comes first");
                let end = (load.taken + self.block_tokens()).min(head.tags.len());
                let goes_on = self.take_block(&head.tokens[..end], &head.tags[..end], load.taken, &bytes)?;
                // Without what is before it, a block is of no use: the rest is read again when it is needed.
                load.taken = if goes_on { end } else { head.tags.len() };
            }
        }
        let is_whole = load.head.as_ref().is_some_and(|h| load.taken == h.tags.len());
        Ok(load.head.take_if(|_| is_whole).map(|head| {
            let cached_tokens = self.keep(&head.tokens[..head.tags.len()]);
            Loaded { tokens: head.tokens, cached_tokens, file_bytes: head.file_bytes }
        }))
    }

    /// Adds the block of `tokens` from `first` on to the tree. False if what is before it is not there any more, or not as it
    /// was computed.
    fn take_block(&mut self, tokens: &[TokenId], tags: &[u8], first: usize, bytes: &[u8]) -> Result<bool> {
        let own: Vec<PageId> = self.take_pages()?;
        let imported = self.backend.import(&own, tokens.len() - first, bytes);
        // Only now: making room may have cost blocks of this very path.
        let before = self.tree.find(&tokens[..first], Some(&tags[..first]));
        let mut goes_on = before.tokens == first;
        if imported.is_ok() && goes_on {
            let parent = before.nodes.last().copied();
            let (node, slots) =
                self.tree.insert_after(&mut self.pool, parent, &tokens[first..], &tags[first..], &own);
            self.free_slots(slots);
            self.tree.keep(node.as_slice());
            goes_on = node.is_some();
        }
        own.into_iter().for_each(|p| self.pool.release(p));
        imported.map(|()| goes_on)
    }
}

/// A thread that ends without a word panicked, which is a bug.
fn lost() -> Error {
    Error::Stopped("while a session was read".into())
}

/// Reads a file to its end, or until no one takes its parts any more.
fn read(path: &Path, wanted: &Wanted, parts: &SyncSender<Part>) -> Result<()> {
    let mut file = open_file(path)?;
    let (header, data_at, file_bytes) = wanted.check_session(path, &mut file)?;
    let failed = |e| Error::io(path, "read", e);
    file.seek(SeekFrom::Start(data_at)).map_err(failed)?;
    let mut file = BufReader::with_capacity(1 << 20, file);
    let mut words = vec![0; header.tokens * 4];
    file.read_exact(&mut words).map_err(failed)?;
    let words = words.chunks_exact(4).map(|b| TokenId::from_le_bytes([b[0], b[1], b[2], b[3]]));
    let tokens: Vec<TokenId> = words.collect();
    super::check_tokens("session", &tokens, wanted.hyper.vocab)?;
    let mut tags = vec![0; header.cached];
    file.read_exact(&mut tags).map_err(failed)?;
    if let Some(t) = tags.iter().find(|t| **t > 1) {
        return Err(Error::bad(path, "tags", "0 or 1", t));
    }
    if parts.send(Part::Head(Head { tokens, tags, file_bytes })).is_err() {
        return Ok(());
    }
    for first in (0..header.cached).step_by(wanted.block) {
        let n = (header.cached - first).min(wanted.block);
        let mut bytes = vec![0; serial_bytes(&wanted.hyper, wanted.kv, n)];
        file.read_exact(&mut bytes).map_err(failed)?;
        if parts.send(Part::Block(bytes)).is_err() {
            return Ok(());
        }
    }
    Ok(())
}
