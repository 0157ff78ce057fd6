//! Saving a session while others go on: what is cached of it is held by reference, and handed block by block, a little
//! between two steps, to the thread that writes. Pages that someone else holds are never written, only copied
//! ([`BlockTable::reserve`]), so that the file holds what was cached when it began.
//!
//! [`BlockTable::reserve`]: crate::kv::BlockTable::reserve

use super::Engine;
use super::saver::{Part, Saved, Saver};
use super::session::{Header, MAGIC, VERSION};
use super::spill::Pinned;
use crate::backend::serial_bytes;
use crate::kv::{PageId, Place};
use crate::units::{Error, Result, TokenId};
use std::collections::VecDeque;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::sync_channel;
use std::time::{Duration, Instant};

/// A session on its way to the thread that writes.
pub(super) struct Save {
    blocks: VecDeque<Block>,
    /// Set by the thread: what is left need not come.
    failed: Arc<AtomicBool>,
    /// The parts before the blocks.
    head: Vec<Part>,
}

/// What is cached of the session's tokens, a block.
enum Block {
    /// The first tokens of pages that it holds a reference to.
    Pages(Vec<PageId>, usize),
    /// A whole block in the spill file.
    Slot(Pinned),
}

impl Engine {
    /// Begins to write `tokens`, and what is cached of them now, to a file; `saved` is told when it is there. Blocks go
    /// with [`Engine::pump_saves`]. Returns how many tokens are cached.
    ///
    /// # Errors
    /// The system refuses a thread.
    pub fn begin_save(&mut self, path: &Path, tokens: &[TokenId], saved: Saved) -> Result<usize> {
        if self.saver.is_none() {
            self.saver = Some(Saver::start()?);
        }
        let (blocks, tags) = self.hold(tokens);
        let header = Header {
            model: format!("{:016x}", self.model_id),
            kv: self.backend.kv_type().name().into(),
            block: self.block_tokens(),
            tokens: tokens.len(),
            cached: tags.len(),
        };
        let header = serde_json::to_vec(&header).expect("plain fields");
        let mut head = MAGIC.to_vec();
        head.extend(VERSION.to_le_bytes());
        head.extend((header.len() as u32).to_le_bytes());
        head.extend(&header);
        head.extend(tokens.iter().flat_map(|t| t.to_le_bytes()));
        head.extend(&tags);
        let failed = Arc::<AtomicBool>::default();
        let head = vec![Part::Begin(path.into(), saved, failed.clone()), Part::Bytes(head)];
        self.saves.push_back(Save { blocks, failed, head });
        Ok(tags.len())
    }

    /// Holds what is cached of `tokens`, with its tags.
    fn hold(&mut self, tokens: &[TokenId]) -> (VecDeque<Block>, Vec<u8>) {
        let found = self.tree.find(tokens, None);
        let (mut blocks, mut tags) = (VecDeque::new(), Vec::new());
        for &id in &found.nodes {
            let whole = self.tree.tags(id);
            let n = (found.tokens - tags.len()).min(whole.len());
            let part_of_spilled = match self.tree.place(id) {
                Place::Pages(pages) => {
                    pages.iter().for_each(|&p| self.pool.share(p));
                    blocks.push_back(Block::Pages(pages.clone(), n));
                    None
                }
                Place::Spilled(slot) => {
                    let spill = self.spill.as_ref().expect("what is spilled has a file");
                    let pinned = spill.pin(*slot);
                    if n == whole.len() {
                        blocks.push_back(Block::Slot(pinned));
                        None
                    } else {
                        Some((pinned, whole.len()))
                    }
                }
            };
            let own_tags = whole[..n].to_vec();
            if let Some((pinned, whole)) = part_of_spilled {
                // The last one. The serial form is by layers: a shorter one comes from pages.
                match self.pages_of(&pinned, whole) {
                    Ok(pages) => blocks.push_back(Block::Pages(pages, n)),
                    Err(e) => {
                        log::warn!(
                            "{e}; the session's last {n} cached tokens are read again when it is restored"
                        );
                        break;
                    }
                }
            }
            tags.extend(own_tags);
        }
        (blocks, tags)
    }

    /// A spilled block in pages that are no one else's.
    fn pages_of(&mut self, slot: &Pinned, tokens: usize) -> Result<Vec<PageId>> {
        let mut bytes = Vec::new();
        slot.read(&mut bytes)?;
        let pages = self.take_pages()?;
        if let Err(e) = self.backend.import(&pages, tokens, &bytes) {
            pages.into_iter().for_each(|p| self.pool.release(p));
            return Err(e);
        }
        Ok(pages)
    }

    /// Hands over blocks of sessions that are being saved, for `within` at most and without waiting for the disk. True if
    /// some are left.
    pub fn pump_saves(&mut self, within: Duration) -> bool {
        let until = Instant::now() + within;
        while let Some(mut save) = self.saves.pop_front() {
            if self.hand_over_blocks(&mut save, until, Duration::ZERO) {
                continue;
            }
            self.saves.push_front(save);
            return true;
        }
        false
    }

    /// Hands over all that is left, and waits for the disk meanwhile. False if nothing was.
    pub(super) fn finish_saves(&mut self) -> bool {
        let any = !self.saves.is_empty();
        while let Some(mut save) = self.saves.pop_front() {
            // Patience has no end here, but the thread may fail meanwhile, which is looked at each time.
            while !self.hand_over_blocks(&mut save, far(), Duration::from_secs(1)) {}
        }
        any
    }

    /// Hands over blocks until `until`; each waits for room in the queue for up to `patience`. True once all are gone.
    fn hand_over_blocks(&mut self, save: &mut Save, until: Instant, patience: Duration) -> bool {
        let saver = self.saver.as_ref().expect("started with the first");
        save.head.drain(..).for_each(|part| saver.push(part));
        while let Some(block) = save.blocks.front() {
            let failed = save.failed.load(Ordering::Relaxed);
            let bytes = match block {
                Block::Pages(_, tokens) if !failed => {
                    serial_bytes(&self.hyper, self.backend.kv_type(), *tokens)
                }
                _ => 0,
            };
            if !failed && !saver.room(bytes, patience) {
                return false;
            }
            self.pulse.beat();
            match save.blocks.pop_front().expect("seen above") {
                Block::Pages(pages, tokens) => {
                    let mut out = Vec::with_capacity(bytes);
                    if !failed {
                        let taken = self.backend.export(&pages, tokens, &mut out);
                        saver.push(taken.map_or_else(Part::Fail, |()| Part::Bytes(out)));
                    }
                    pages.into_iter().for_each(|p| self.pool.release(p));
                }
                Block::Slot(_) if failed => {}
                Block::Slot(slot) => saver.push(Part::Slot(slot)),
            }
            if !failed && Instant::now() >= until && !save.blocks.is_empty() {
                return false;
            }
        }
        saver.push(Part::End);
        true
    }

    /// Writes `tokens`, and what is cached of them, to a file, and waits for it. Returns `(cached tokens, bytes of the file)`.
    pub fn save_session(&mut self, path: &Path, tokens: &[TokenId]) -> Result<(usize, u64)> {
        let (sender, receiver) = sync_channel(1);
        let saved = Box::new(move |how| drop(sender.send(how))); // received below, in this function
        let cached = self.begin_save(path, tokens, saved)?;
        self.finish_saves();
        let how = receiver.recv().map_err(|_| Error::Stopped("while a session was saved".into()))?;
        Ok((cached, how?))
    }
}

/// Later than any write takes.
fn far() -> Instant {
    Instant::now() + Duration::from_secs(1 << 30)
}
