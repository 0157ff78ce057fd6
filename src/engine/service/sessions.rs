//! Named conversations of the service: their tokens in memory, what is cached of them in the prefix tree, and files.

use super::{Limits, RequestId};
use crate::engine::Engine;
use crate::engine::load::{Loaded, Loading};
use crate::engine::saver::{ASIDE_SUFFIX, Saved};
use crate::limits::{SESSION_NAME_MAX, SESSIONS_MAX};
use crate::units::{Error, Result, TokenId};
use std::collections::{BTreeMap, VecDeque};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::mpsc::SyncSender;
use std::time::Duration;

const SUFFIX: &str = ".session";

/// A session, for listings.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SessionInfo {
    /// Its name.
    pub name: String,
    /// Its tokens; 0 for one that is only on disk.
    pub tokens: usize,
    /// Those in the cache.
    pub cached_tokens: usize,
    /// Bytes of its file, if it was saved.
    pub file_bytes: Option<u64>,
}

/// What is asked about sessions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum SessionOp {
    Save,
    Restore,
    Delete,
    Tokens,
}

/// Refuses a name that could be anything but a plain file name.
pub fn check_session_name(name: &str) -> Result<()> {
    let plain = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
    if (1..=SESSION_NAME_MAX).contains(&name.len()) && !name.starts_with('.') && name.chars().all(plain) {
        return Ok(());
    }
    let expected = format!("1 to {SESSION_NAME_MAX} letters, digits, '.', '_' or '-', no '.' in front");
    Err(Error::bad("request", "session", expected, name))
}

/// Who asked, and waits.
pub(super) type Reply = SyncSender<Result<(SessionInfo, Vec<TokenId>)>>;

/// A session in memory.
struct Conversation {
    tokens: Vec<TokenId>,
    /// Its file holds these tokens.
    saved: bool,
}

/// A session that is being written. What is asked about its file meanwhile waits, so that a restore reads the new file and
/// a deleted one does not come back.
struct Saving {
    cached_tokens: usize,
    /// Went on since: what is written is not the last word.
    stale: bool,
    /// `None`: no one asked, the service ends.
    reply: Option<Reply>,
    later: VecDeque<(SessionOp, Reply)>,
}

/// A session that is being read, or waits for its turn. What is asked about it meanwhile waits too.
struct Restoring {
    name: String,
    /// `None`: its turn has not come.
    loading: Option<Loading>,
    /// Went on since: what the file holds is not the last word.
    stale: bool,
    /// Who asked for it by name.
    reply: Option<Reply>,
    /// Requests that name it and begin once it is there.
    requests: Vec<RequestId>,
    later: VecDeque<(SessionOp, Reply)>,
}

/// What waited for a session to be read, and may go on.
pub(super) struct Waited {
    pub name: String,
    pub requests: Vec<RequestId>,
    pub later: VecDeque<(SessionOp, Reply)>,
}

/// The sessions of a service.
pub(super) struct Sessions {
    folder: Option<PathBuf>,
    open: BTreeMap<String, Conversation>,
    saving: BTreeMap<String, Saving>,
    /// One after the other: they come from one disk.
    restoring: VecDeque<Restoring>,
}

impl Sessions {
    /// Sweeps what an earlier process left half written.
    pub fn new(limits: &Limits) -> Sessions {
        if let Some(folder) = &limits.session_folder {
            for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
                let name = entry.file_name().to_string_lossy().into_owned();
                if name.starts_with('.') && name.ends_with(ASIDE_SUFFIX) && name.contains(SUFFIX) {
                    let _ = fs::remove_file(entry.path()); // another start will try again
                }
            }
        }
        Sessions {
            folder: limits.session_folder.clone(),
            open: BTreeMap::new(),
            saving: BTreeMap::new(),
            restoring: VecDeque::new(),
        }
    }

    fn file(&self, name: &str) -> Result<PathBuf> {
        match &self.folder {
            Some(folder) => Ok(folder.join(format!("{name}{SUFFIX}"))),
            None => Err(Error::bad("settings", "session folder", "a folder", "none")),
        }
    }

    /// A request names its session. False: it is only on disk, and the request begins when it has been read.
    pub fn begin(&mut self, name: &str, request: RequestId) -> Result<bool> {
        if self.open.contains_key(name) {
            return Ok(true);
        }
        if let Some(restoring) = self.restoring_mut(name) {
            restoring.requests.push(request);
            return Ok(false);
        }
        if self.open.len() + self.restoring.len() >= SESSIONS_MAX {
            let has = format!("{SESSIONS_MAX} at most; delete one");
            return Err(Error::Limit { what: "sessions".into(), needs: (SESSIONS_MAX + 1).to_string(), has });
        }
        let is_there = self.folder.is_some() && self.file(name)?.exists();
        if is_there {
            self.read(name, None, vec![request]);
        }
        Ok(!is_there)
    }

    fn restoring_mut(&mut self, name: &str) -> Option<&mut Restoring> {
        self.restoring.iter_mut().find(|r| r.name == name)
    }

    fn read(&mut self, name: &str, reply: Option<Reply>, requests: Vec<RequestId>) {
        let (name, loading, later) = (name.to_owned(), None, VecDeque::new());
        self.restoring.push_back(Restoring { name, loading, stale: false, reply, requests, later });
    }

    /// The requests that wait for a session.
    pub fn waiting(&self) -> impl Iterator<Item = RequestId> + '_ {
        self.restoring.iter().flat_map(|r| r.requests.iter().copied())
    }

    /// A request does not wait any more.
    pub fn forget(&mut self, request: RequestId) {
        self.restoring.iter_mut().for_each(|r| r.requests.retain(|id| *id != request));
    }

    /// An answer has ended: the session goes on from there.
    pub fn update(&mut self, engine: &mut Engine, name: &str, tokens: &[TokenId]) {
        engine.keep(tokens);
        self.open.insert(name.to_owned(), Conversation { tokens: tokens.to_vec(), saved: false });
        if let Some(saving) = self.saving.get_mut(name) {
            saving.stale = true;
        }
        if let Some(restoring) = self.restoring_mut(name) {
            restoring.stale = true;
        }
    }

    /// Puts off what is asked about a session that is being written or read; gives it back if it may be answered now.
    pub fn put_off(&mut self, op: SessionOp, name: &str, reply: Reply) -> Option<Reply> {
        if let Some(restoring) = self.restoring_mut(name) {
            restoring.later.push_back((op, reply));
            return None;
        }
        match self.saving.get_mut(name).filter(|_| op != SessionOp::Tokens) {
            Some(saving) => {
                saving.later.push_back((op, reply));
                None
            }
            None => Some(reply),
        }
    }

    /// Begins to write a session; [`Sessions::saved`] is to be called with what `saved` is told. On an error nothing has
    /// begun, and whoever asked knows.
    pub fn save(&mut self, engine: &mut Engine, name: &str, saved: Saved, reply: Option<Reply>) {
        let begun = self.file(name).and_then(|file| {
            let tokens = &self.open.get(name).ok_or_else(|| no_session(name))?.tokens;
            engine.begin_save(&file, tokens, saved)
        });
        match begun {
            Ok(cached_tokens) => {
                let saving = Saving { cached_tokens, stale: false, reply, later: VecDeque::new() };
                self.saving.insert(name.into(), saving);
            }
            Err(e) => answer(reply, name, Err(e)),
        }
    }

    /// A session's file is there, or is not. Gives back what was asked meanwhile.
    pub fn saved(&mut self, name: &str, how: Result<u64>) -> VecDeque<(SessionOp, Reply)> {
        let Some(saving) = self.saving.remove(name) else { return VecDeque::new() };
        let mut tokens = 0;
        if let Some(open) = self.open.get_mut(name) {
            open.saved = how.is_ok() && !saving.stale;
            tokens = open.tokens.len();
        }
        let info = how.map(|bytes| SessionInfo {
            name: name.into(),
            tokens,
            cached_tokens: saving.cached_tokens,
            file_bytes: Some(bytes),
        });
        answer(saving.reply, name, info.map(|i| (i, Vec::new())));
        saving.later
    }

    /// Sessions that are being written, and what was asked about them since.
    pub fn unwritten(&self) -> usize {
        self.saving.values().map(|s| 1 + s.later.len()).sum()
    }

    /// True while any session is being written.
    pub fn is_saving(&self) -> bool {
        !self.saving.is_empty()
    }

    /// The engine has ended: whoever waits for a write or a read waits for nothing.
    pub fn give_up(&mut self) {
        self.saving.clear();
        self.restoring.clear();
    }

    /// Begins to read a session; [`Sessions::pump`] goes on with it.
    pub fn restore(&mut self, name: &str, reply: Reply) {
        match self.file(name) {
            Ok(file) if file.exists() => self.read(name, Some(reply), Vec::new()),
            Ok(_) => answer(Some(reply), name, Err(no_session(name))),
            Err(e) => answer(Some(reply), name, Err(e)),
        }
    }

    /// True while any session is being read.
    pub fn is_restoring(&self) -> bool {
        !self.restoring.is_empty()
    }

    /// Takes what has been read of a session, for `within` at most and without waiting for the disk. Gives back what waited for
    /// one that has ended.
    pub fn pump(&mut self, engine: &mut Engine, within: Duration) -> Option<Waited> {
        let file = self.file(&self.restoring.front()?.name);
        let front = self.restoring.front_mut()?;
        let how = match &mut front.loading {
            Some(loading) => engine.pump_load(loading, within)?,
            None => match file.and_then(|file| engine.begin_load(&file)) {
                Ok(loading) => {
                    front.loading = Some(loading);
                    return None;
                }
                Err(e) => Err(e),
            },
        };
        let Restoring { name, stale, reply, requests, later, .. } = self.restoring.pop_front()?;
        if let (None, Err(e)) = (&reply, &how) {
            // Another model's, or damaged: the request has all the text itself, and its answer's session takes the file's
            // place.
            log::warn!("session {name} begins anew: {e}");
        }
        let info = how.map(|Loaded { tokens, cached_tokens, file_bytes }| {
            let (name, count) = (name.clone(), tokens.len());
            if !stale {
                self.open.insert(name.clone(), Conversation { tokens, saved: true });
            }
            (SessionInfo { name, tokens: count, cached_tokens, file_bytes: Some(file_bytes) }, Vec::new())
        });
        if let Some(reply) = reply {
            answer(Some(reply), &name, info);
        }
        Some(Waited { name, requests, later })
    }

    pub fn delete(&mut self, name: &str) -> Result<SessionInfo> {
        let tokens = self.open.remove(name).map(|c| c.tokens);
        let file = self.folder.is_some().then(|| self.file(name)).transpose()?.filter(|f| f.exists());
        if tokens.is_none() && file.is_none() {
            return Err(no_session(name));
        }
        if let Some(f) = &file {
            fs::remove_file(f).map_err(|e| Error::io(f, "remove", e))?;
        }
        let tokens = tokens.map_or(0, |t| t.len());
        Ok(SessionInfo { name: name.into(), tokens, cached_tokens: 0, file_bytes: None })
    }

    /// The tokens of a session in memory.
    pub fn tokens(&self, name: &str) -> Result<Vec<TokenId>> {
        self.open.get(name).map(|c| c.tokens.clone()).ok_or_else(|| no_session(name))
    }

    /// All sessions, in memory and on disk, by name.
    pub fn list(&self, engine: &mut Engine) -> Vec<SessionInfo> {
        let mut all: BTreeMap<String, SessionInfo> = BTreeMap::new();
        for (name, Conversation { tokens, .. }) in &self.open {
            let cached_tokens = engine.keep(tokens);
            let info =
                SessionInfo { name: name.clone(), tokens: tokens.len(), cached_tokens, file_bytes: None };
            all.insert(name.clone(), info);
        }
        let entries = self.folder.iter().flat_map(|f| fs::read_dir(f).into_iter().flatten().flatten());
        for entry in entries {
            let file = entry.file_name().to_string_lossy().into_owned();
            let Some(name) = file.strip_suffix(SUFFIX).filter(|n| check_session_name(n).is_ok()) else {
                continue;
            };
            let new = SessionInfo { name: name.into(), tokens: 0, cached_tokens: 0, file_bytes: None };
            all.entry(name.into()).or_insert(new).file_bytes = bytes_of(&entry.path());
        }
        all.into_values().collect()
    }

    /// What is in memory and not in its file, where there is a folder for files.
    pub fn unsaved(&self) -> Vec<String> {
        let has_file = |name: &String| self.file(name).is_ok_and(|f| f.exists());
        let unsaved = self.open.iter().filter(|(name, c)| !(c.saved && has_file(name)));
        unsaved.filter(|_| self.folder.is_some()).map(|(name, _)| name.clone()).collect()
    }
}

/// Tells who asked, if anyone did; the log otherwise.
fn answer(reply: Option<Reply>, name: &str, how: Result<(SessionInfo, Vec<TokenId>)>) {
    match (reply, how) {
        (Some(reply), how) => drop(reply.send(how)), // who asked may be gone
        (None, Err(e)) => log::error!("session {name} is not saved: {e}"),
        (None, Ok(_)) => {}
    }
}

fn no_session(name: &str) -> Error {
    Error::bad("request", "session", "the name of a session", name)
}

fn bytes_of(file: &Path) -> Option<u64> {
    fs::metadata(file).ok().map(|m| m.len())
}
