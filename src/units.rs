//! Units, identifiers and the error type that every room shares. Imports nothing from the project.

use std::fmt;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Everything that can go wrong with input, files or the machine. Bugs assert instead.
///
/// One enum for the whole program so that a kind maps once to an exit code ([`Error::exit_code`]) and, later, once to
/// an HTTP status. A message is one line and names the file, the field, what was expected and what was found.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file, request or flag says something that cannot be right.
    #[error("{}: {field}: expected {expected}, found {found}", .file.display())]
    BadInput {
        /// The file (or flag, or request part) that is wrong.
        file: PathBuf,
        /// The field inside it.
        field: String,
        /// What would have been right.
        expected: String,
        /// What is there.
        found: String,
    },
    /// The operating system refused.
    #[error("{}: {doing}: {source}", .file.display())]
    Io {
        /// The file or device.
        file: PathBuf,
        /// What was being done, in words: "open", "read 4096 bytes at 0".
        doing: String,
        /// The system's answer.
        #[source]
        source: std::io::Error,
    },
    /// The request does not fit: memory, context length, queue.
    #[error("{what}: needs {needs}, has {has}")]
    Limit {
        /// What is limited: "context", "memory".
        what: String,
        /// The amount asked for.
        needs: String,
        /// The amount there is.
        has: String,
    },
    /// Too much is waiting already; the same request may be taken later.
    #[error("{what}: full; try again in {} ms", .retry.as_millis())]
    Busy {
        /// What is full: "request queue".
        what: String,
        /// When trying again is likely to help.
        retry: Duration,
    },
    /// The engine has ended and answers nothing more.
    #[error("engine: stopped: {0}")]
    Stopped(String),
    /// The user asked to stop.
    #[error("interrupted")]
    Interrupted,
}

/// The project's result type.
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// Builds [`Error::BadInput`].
    pub fn bad(
        file: impl AsRef<Path>,
        field: impl fmt::Display,
        expected: impl fmt::Display,
        found: impl fmt::Display,
    ) -> Self {
        Error::BadInput {
            file: file.as_ref().to_owned(),
            field: one_line(&field.to_string()),
            expected: one_line(&expected.to_string()),
            found: one_line(&found.to_string()),
        }
    }

    /// Builds [`Error::Io`].
    pub fn io(file: impl AsRef<Path>, doing: impl fmt::Display, source: std::io::Error) -> Self {
        Error::Io { file: file.as_ref().to_owned(), doing: doing.to_string(), source }
    }

    /// The same error once more, for one failure that ends several requests.
    pub fn again(&self) -> Error {
        match self {
            Error::BadInput { file, field, expected, found } => Error::BadInput {
                file: file.clone(),
                field: field.clone(),
                expected: expected.clone(),
                found: found.clone(),
            },
            Error::Io { file, doing, source } => {
                Error::io(file, doing, std::io::Error::new(source.kind(), source.to_string()))
            }
            Error::Limit { what, needs, has } => {
                Error::Limit { what: what.clone(), needs: needs.clone(), has: has.clone() }
            }
            Error::Busy { what, retry } => Error::Busy { what: what.clone(), retry: *retry },
            Error::Stopped(why) => Error::Stopped(why.clone()),
            Error::Interrupted => Error::Interrupted,
        }
    }

    /// The process exit code for this error; `--help` lists them.
    pub fn exit_code(&self) -> u8 {
        match self {
            Error::BadInput { .. } => 2,
            // A file that cannot be opened or read is bad input too: the caller named it.
            Error::Io { .. } => 2,
            Error::Limit { .. } | Error::Busy { .. } => 3,
            Error::Stopped(_) => 70,
            Error::Interrupted => 130,
        }
    }
}

/// Keeps a message on one line and short, whatever bytes a hostile file put into a name.
pub fn one_line(s: &str) -> String {
    cut(s, 240)
}

/// The same for the whole of an error's message: its parts are short, but the path that it begins with is as long as a folder's
/// owner likes, and what was found stands at the end.
pub fn message_line(s: &str) -> String {
    cut(s, 1_500)
}

fn cut(s: &str, shown_max: usize) -> String {
    let mut out = String::new();
    for c in s.chars() {
        if out.len() >= shown_max {
            out.push('…');
            break;
        }
        if c.is_control() { out.extend(c.escape_default()) } else { out.push(c) }
    }
    out
}

/// Opens a file to read it whole. Directories are refused by name, and so are pipes outside `/dev`, whose open may wait
/// for ever; `/dev/stdin` and a shell's `<(…)` are fine.
pub fn open_file(path: &Path) -> Result<std::fs::File> {
    let meta = std::fs::metadata(path).map_err(|e| Error::io(path, "open", e))?;
    if meta.is_dir() {
        return Err(Error::bad(path, "file", "a file", "a directory"));
    }
    if !meta.is_file() && !path.starts_with("/dev") {
        return Err(Error::bad(path, "file", "a file", "a pipe or device"));
    }
    std::fs::File::open(path).map_err(|e| Error::io(path, "open", e))
}

/// A byte count that prints with a binary unit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub struct Bytes(pub u64);

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
        let (mut v, mut u) = (self.0 as f64, 0);
        while v >= 1024.0 && u + 1 < UNITS.len() {
            v /= 1024.0;
            u += 1;
        }
        if u == 0 { write!(f, "{} B", self.0) } else { write!(f, "{v:.1} {}", UNITS[u]) }
    }
}

/// Index of a layer, from 0.
pub type LayerId = usize;
/// Index of a routed expert inside its layer, from 0.
pub type ExpertId = u32;
/// A token id. Ids are checked against the vocabulary where they enter.
pub type TokenId = u32;
