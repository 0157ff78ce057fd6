//! Side files of a Hugging Face folder, read with a bound.

use crate::limits::JSON_FILE_MAX;
use crate::units::{Error, Result};
use std::io::Read;
use std::path::Path;

/// Reads a whole side file; `None` where there is none. A file above [`JSON_FILE_MAX`] is an error before any of it
/// is read, and one that grows while it is read is cut off there.
pub fn read_side_file(path: &Path) -> Result<Option<Vec<u8>>> {
    // Asked before it is opened: opening a pipe may wait for ever.
    match std::fs::metadata(path) {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(Error::io(path, "open", e)),
        Ok(_) => {}
    }
    let mut file = crate::units::open_file(path)?;
    let meta = file.metadata().map_err(|e| Error::io(path, "stat", e))?;
    // Devices and pipes have no length to check and may never end.
    if !meta.is_file() {
        return Err(Error::bad(path, "file type", "a regular file", "something else"));
    }
    if meta.len() > JSON_FILE_MAX {
        return Err(Error::bad(path, "size", format!("at most {JSON_FILE_MAX} bytes"), meta.len()));
    }
    let mut bytes = Vec::with_capacity(meta.len() as usize);
    file.by_ref().take(JSON_FILE_MAX).read_to_end(&mut bytes).map_err(|e| Error::io(path, "read", e))?;
    Ok(Some(bytes))
}

/// Reads a JSON side file as a value; `None` where there is none.
pub fn read_side_json(path: &Path) -> Result<Option<serde_json::Value>> {
    match read_side_file(path)? {
        None => Ok(None),
        Some(bytes) => serde_json::from_slice(&bytes)
            .map(Some)
            .map_err(|e| Error::bad(path, "JSON", "a JSON document", e)),
    }
}

/// Reads a text side file; `None` where there is none.
pub fn read_side_text(path: &Path) -> Result<Option<String>> {
    match read_side_file(path)? {
        None => Ok(None),
        Some(bytes) => {
            String::from_utf8(bytes).map(Some).map_err(|e| Error::bad(path, "text", "UTF-8", e.utf8_error()))
        }
    }
}
