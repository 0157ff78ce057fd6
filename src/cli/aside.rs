//! A file that appears under its name whole or not at all: written beside, synced, renamed.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use crate::units::{Error, Result};
use crate::weights::DirectFile;

/// A file being written beside its final name.
pub struct AsideFile {
    target: PathBuf,
    aside: PathBuf,
    /// `None` while the last steps are taken.
    out: Option<DirectFile>,
    finished: bool,
}

/// Where to write, and where beside it first. Renaming onto a device would replace the device, and onto a link the
/// link: the one is refused, the other followed.
pub fn names(target: &Path) -> Result<(PathBuf, PathBuf)> {
    let found = match fs::metadata(target) {
        Ok(m) if m.is_file() => None,
        Ok(m) if m.is_dir() => Some("a directory"),
        Ok(_) => Some("a device or pipe"),
        Err(_) => target.file_name().is_none().then_some("no name"),
    };
    if let Some(found) = found {
        return Err(Error::bad(target, "output", "a file name", found));
    }
    let target = fs::canonicalize(target).unwrap_or_else(|_| followed(target));
    let mut name = target.file_name().unwrap_or_default().to_owned();
    name.push(format!(".part-{}", std::process::id()));
    let aside = target.with_file_name(name);
    Ok((target, aside))
}

/// Where a link to nothing points, so that it is that file which appears and the link stays. Links may point to links; more
/// than a system follows are a ring, and left to fail where they are.
fn followed(target: &Path) -> PathBuf {
    let mut at = target.to_owned();
    for _ in 0..40 {
        match fs::read_link(&at) {
            Ok(to) => at = at.parent().unwrap_or(Path::new("")).join(to),
            Err(_) => return at,
        }
    }
    target.to_owned()
}

/// Refuses an output that would replace the input.
pub fn differs(target: &Path, input: &Path) -> Result<()> {
    match (fs::canonicalize(target), fs::canonicalize(input)) {
        (Ok(a), Ok(b)) if a == b => {
            Err(Error::bad(target, "output", "another file than the input", "the input"))
        }
        _ => Ok(()),
    }
}

impl AsideFile {
    /// Starts a file that will be `target`.
    pub fn create(target: &Path) -> Result<AsideFile> {
        let (target, aside) = names(target)?;
        let out = Some(DirectFile::create(&aside).map_err(|e| Error::io(&aside, "create", e))?);
        Ok(AsideFile { target, aside, out, finished: false })
    }

    /// Makes it appear; gives its size in bytes.
    pub fn finish(self) -> Result<u64> {
        self.finish_checked(|_| Ok(()))
    }

    /// As [`AsideFile::finish`], if `check`, which is given the path that the whole file has until then, lets it.
    pub fn finish_checked(mut self, check: impl FnOnce(&Path) -> Result<()>) -> Result<u64> {
        let fail = |e| Error::io(&self.aside, "write", e);
        let out = self.out.take().expect("finished once");
        let len = out.finish().map_err(fail)?;
        check(&self.aside)?;
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

#[test]
fn only_files_are_replaced_and_only_by_whole_ones() {
    let dir = tempfile::tempdir().unwrap();
    let target = dir.path().join("out");
    let link = dir.path().join("link");
    fs::write(&target, "old").unwrap();
    std::os::unix::fs::symlink(&target, &link).unwrap();
    let mut file = AsideFile::create(&link).unwrap();
    file.write_all(b"half").unwrap();
    drop(file);
    assert_eq!(fs::read(&target).unwrap(), b"old");
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 2);
    let mut file = AsideFile::create(&link).unwrap();
    file.write_all(b"whole").unwrap();
    assert_eq!(file.finish().unwrap(), 5);
    assert_eq!(fs::read(&target).unwrap(), b"whole");
    assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
    let (missing, dangling) = (dir.path().join("missing"), dir.path().join("dangling"));
    std::os::unix::fs::symlink("missing", &dangling).unwrap();
    let mut file = AsideFile::create(&dangling).unwrap();
    file.write_all(b"there").unwrap();
    let refuse = |p: &Path| Err(Error::bad(p, "check", "anything else", "this"));
    assert!(file.finish_checked(refuse).is_err() && !missing.exists());
    let mut file = AsideFile::create(&dangling).unwrap();
    file.write_all(b"there").unwrap();
    file.finish().unwrap();
    assert_eq!(fs::read(&missing).unwrap(), b"there");
    assert!(fs::symlink_metadata(&dangling).unwrap().is_symlink());
    for target in [Path::new("/dev/null"), dir.path(), Path::new("..")] {
        let e = names(target).unwrap_err().to_string();
        assert!(e.contains("output: expected a file name"), "{e}");
    }
}
