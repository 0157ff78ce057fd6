//! The sockets: a Unix socket that is ours alone, one inherited from the service manager, a loopback port.

use super::Settings;
use crate::observe;
use crate::units::{Error, Result};
use std::fs::{File, OpenOptions, TryLockError};
use std::io::{Read, Seek, Write};
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

/// `sun_path` of a Unix address holds 108 bytes, the last of them 0 (unix(7)).
const SOCKET_PATH_MAX: usize = 107;

/// What was opened to listen on.
pub struct Listening {
    /// The Unix socket.
    pub unix: Option<UnixListener>,
    /// The loopback port.
    pub tcp: Option<std::net::TcpListener>,
    owned: Option<Owned>,
}

/// A socket file and the lock that makes it ours.
struct Owned {
    path: PathBuf,
    inode: u64,
    /// Locked for as long as it is open.
    _lock: File,
}

impl Listening {
    /// Opens what the settings ask for.
    pub fn open(settings: &Settings) -> Result<Listening> {
        let mut listening = Listening { unix: None, tcp: None, owned: None };
        match inherited()? {
            Some(socket) => {
                observe::note("listening on an inherited socket");
                listening.unix = Some(socket);
            }
            None if settings.socket.as_os_str().is_empty() => {}
            None => {
                let (socket, owned) = unix(settings)?;
                observe::note(format_args!("listening on {}", settings.socket.display()));
                listening.unix = Some(socket);
                listening.owned = Some(owned);
            }
        }
        if let Some(address) = settings.tcp {
            let at = format!("{address}");
            let socket = std::net::TcpListener::bind(address).map_err(|e| Error::io(&at, "listen", e))?;
            let bound = socket.local_addr().map_err(|e| Error::io(&at, "listen", e))?;
            observe::note(format_args!("listening on http://{bound}"));
            listening.tcp = Some(socket);
        }
        if listening.unix.is_none() && listening.tcp.is_none() {
            return Err(Error::bad("settings", "serve.socket", "a path, or serve.tcp an address", "neither"));
        }
        for nonblocking in [
            listening.unix.as_ref().map(|s| s.set_nonblocking(true)),
            listening.tcp.as_ref().map(|s| s.set_nonblocking(true)),
        ] {
            nonblocking.unwrap_or(Ok(())).map_err(|e| Error::io("socket", "make it non-blocking", e))?;
        }
        Ok(listening)
    }
}

impl Drop for Owned {
    fn drop(&mut self) {
        // Only the file that we made: another daemon may have been told to take the place by force.
        if std::fs::symlink_metadata(&self.path).is_ok_and(|m| m.ino() == self.inode) {
            drop(std::fs::remove_file(&self.path));
        }
    }
}

/// A socket that the service manager passed on (sd_listen_fds(3)).
fn inherited() -> Result<Option<UnixListener>> {
    let mut passed = listenfd::ListenFd::from_env();
    match passed.len() {
        0 => Ok(None),
        1 => passed
            .take_unix_listener(0)
            .map_err(|e| Error::io("inherited socket", "take it as a listening Unix stream socket", e)),
        n => Err(Error::bad("environment", "LISTEN_FDS", "one socket", n)),
    }
}

fn unix(settings: &Settings) -> Result<(UnixListener, Owned)> {
    let path = &settings.socket;
    // The name under which it is made has 4 bytes more.
    if path.as_os_str().len() + 4 > SOCKET_PATH_MAX {
        let expected = format!("a path of at most {} bytes", SOCKET_PATH_MAX - 4);
        return Err(Error::bad(path, "serve.socket", expected, path.as_os_str().len()));
    }
    if let Some(folder) = path.parent().filter(|f| !f.as_os_str().is_empty()) {
        std::fs::create_dir_all(folder).map_err(|e| Error::io(folder, "make the socket's folder", e))?;
    }
    let lock = lock(path)?;
    match std::fs::symlink_metadata(path) {
        // With the lock ours, no daemon is behind it: it was left by one that was killed.
        Ok(m) if m.file_type().is_socket() => {
            std::fs::remove_file(path).map_err(|e| Error::io(path, "remove the stale socket", e))?;
        }
        Ok(_) => {
            return Err(Error::bad(path, "serve.socket", "a free place or a stale socket", "another file"));
        }
        Err(_) => {}
    }
    // Made aside, so that there is no moment at which the socket is there with other rights than the settings'.
    let aside = with_suffix(path, ".new");
    drop(std::fs::remove_file(&aside));
    let socket = UnixListener::bind(&aside).map_err(|e| Error::io(path, "listen", e))?;
    let made = (|| {
        if let Some(group) = &settings.group {
            std::os::unix::fs::chown(&aside, None, Some(group_id(group)?))
                .map_err(|e| Error::io(path, format!("give it to group {group}"), e))?;
        }
        let mode = std::fs::Permissions::from_mode(settings.mode);
        std::fs::set_permissions(&aside, mode).map_err(|e| Error::io(path, "set its mode", e))?;
        let inode = std::fs::symlink_metadata(&aside).map_err(|e| Error::io(path, "look at it", e))?.ino();
        std::fs::rename(&aside, path).map_err(|e| Error::io(path, "put it in its place", e))?;
        Ok(inode)
    })();
    match made {
        Ok(inode) => Ok((socket, Owned { path: path.clone(), inode, _lock: lock })),
        Err(e) => {
            drop(std::fs::remove_file(&aside));
            Err(e)
        }
    }
}

fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    name.into()
}

/// Takes the lock beside the socket, which holds the owner's process id.
fn lock(socket: &Path) -> Result<File> {
    let path = with_suffix(socket, ".pid");
    let opened = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(&path);
    let mut file = opened.map_err(|e| Error::io(&path, "open the lock", e))?;
    match file.try_lock() {
        Ok(()) => {}
        Err(TryLockError::WouldBlock) => {
            let mut owner = String::new();
            drop((&file).take(32).read_to_string(&mut owner));
            let found = format!("process {} serves it", owner.trim());
            return Err(Error::bad(socket, "serve.socket", "a socket that no other daemon serves", found));
        }
        Err(TryLockError::Error(e)) => return Err(Error::io(&path, "lock", e)),
    }
    let write = |file: &mut File| {
        file.set_len(0)?;
        file.rewind()?;
        writeln!(file, "{}", std::process::id())
    };
    write(&mut file).map_err(|e| Error::io(&path, "write the process id", e))?;
    Ok(file)
}

/// A group's number, by name or as digits (group(5)).
pub fn group_id(name: &str) -> Result<u32> {
    if let Ok(id) = name.parse() {
        return Ok(id);
    }
    const FILE: &str = "/etc/group";
    let text = std::fs::read_to_string(FILE).map_err(|e| Error::io(FILE, "read", e))?;
    let mut rows = text.lines().map(|l| l.split(':'));
    let id = rows.find_map(|mut row| (row.next()? == name).then(|| row.nth(1)?.parse().ok())?);
    id.ok_or_else(|| Error::bad("settings", "serve.group", format!("a group of {FILE}"), format!("{name:?}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_daemon_a_socket_and_stale_ones_are_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("run").join("t.sock");
        let settings = Settings { socket: path.clone(), mode: 0o640, ..Settings::default() };
        let first = Listening::open(&settings).unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o640);
        let e = Listening::open(&settings).err().expect("it is taken").to_string();
        assert!(e.contains(&format!("process {} serves it", std::process::id())), "{e}");
        drop(first);
        assert!(!path.exists());
        // What a killed daemon leaves: the file, without a lock.
        drop(UnixListener::bind(&path).unwrap());
        assert!(path.exists());
        drop(Listening::open(&settings).unwrap());
        std::fs::write(&path, "mine").unwrap();
        let e = Listening::open(&settings).err().expect("a file is no socket").to_string();
        assert!(e.contains("found another file"), "{e}");
    }

    #[test]
    fn mistakes_are_named() {
        let say = |s: Settings| Listening::open(&s).err().expect("refused").to_string();
        let dir = tempfile::tempdir().unwrap();
        let long = dir.path().join("x".repeat(120));
        assert!(say(Settings { socket: long, ..Settings::default() }).contains("at most 103 bytes"));
        let group = Some("no-such-group".to_owned());
        let e = say(Settings { socket: dir.path().join("s"), group, ..Settings::default() });
        assert!(e.contains("serve.group"), "{e}");
        assert!(say(Settings::default()).contains("neither"));
    }
}
