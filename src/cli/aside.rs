//! A file that appears under its name whole or not at all: written beside, synced, renamed.

use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

use crate::units::{Error, Result};

/// A file being written beside its final name.
pub struct AsideFile {
    target: PathBuf,
    aside: PathBuf,
    /// `None` while the last steps are taken.
    out: Option<BufWriter<File>>,
    finished: bool,
}

/// Bytes gathered before a write.
const BUFFER_BYTES: usize = 1 << 20;

impl AsideFile {
    /// Starts a file that will be `target`.
    pub fn create(target: &Path) -> Result<AsideFile> {
        let mut name = target.file_name().unwrap_or_default().to_owned();
        if name.is_empty() || target.is_dir() {
            return Err(Error::bad(target, "output", "a file name", "a directory"));
        }
        name.push(format!(".part-{}", std::process::id()));
        let aside = target.with_file_name(name);
        let file = File::create(&aside).map_err(|e| Error::io(&aside, "create", e))?;
        let out = Some(BufWriter::with_capacity(BUFFER_BYTES, file));
        Ok(AsideFile { target: target.to_owned(), aside, out, finished: false })
    }

    /// Makes it appear; gives its size in bytes.
    pub fn finish(mut self) -> Result<u64> {
        let fail = |e| Error::io(&self.aside, "write", e);
        let out = self.out.take().expect("finished once");
        let file = out.into_inner().map_err(|e| fail(e.into_error()))?;
        file.sync_all().map_err(fail)?;
        let len = file.metadata().map_err(fail)?.len();
        fs::rename(&self.aside, &self.target).map_err(|e| Error::io(&self.target, "rename to", e))?;
        self.finished = true;
        // The new name must outlive a power cut too; not every file system can sync a folder.
        let folder = self.target.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
        if let Ok(folder) = File::open(folder) {
            let _ = folder.sync_all();
        }
        Ok(len)
    }
}

impl Write for AsideFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.out.as_mut().expect("not finished").write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.as_mut().expect("not finished").flush()
    }
}

impl Drop for AsideFile {
    fn drop(&mut self) {
        if !self.finished {
            let _ = fs::remove_file(&self.aside);
        }
    }
}
