//! A small blocking HTTP/1.1 client for the command line: over the daemon's Unix socket or a loopback port, one request a
//! connection, responses whole or line by line as they come.

use crate::units::{Error, Result};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::Duration;

/// Bytes of a response's status line and headers.
const HEAD_BYTES_MAX: u64 = 64 << 10;
/// Bytes of a response that is taken whole.
const BODY_BYTES_MAX: u64 = 64 << 20;
/// Bytes of one line of a streamed response.
const LINE_BYTES_MAX: u64 = 4 << 20;

/// Where a server listens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Address {
    /// A Unix socket.
    Unix(PathBuf),
    /// `host:port`.
    Tcp(String),
}

impl std::fmt::Display for Address {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Address::Unix(path) => write!(f, "{}", path.display()),
            Address::Tcp(host) => write!(f, "http://{host}"),
        }
    }
}

impl Address {
    /// A path, `unix:PATH`, `http://HOST:PORT` or `HOST:PORT`.
    pub fn parse(text: &str) -> Address {
        if let Some(path) = text.strip_prefix("unix:") {
            return Address::Unix(path.into());
        }
        let host = text.strip_prefix("http://").unwrap_or(text).trim_end_matches('/');
        let port = host.rsplit_once(':').is_some_and(|(_, p)| p.parse::<u16>().is_ok());
        if port && !host.contains('/') { Address::Tcp(host.into()) } else { Address::Unix(text.into()) }
    }
}

/// Reads and writes a connection.
trait Duplex: Read + Write + Send {}
impl Duplex for UnixStream {}
impl Duplex for TcpStream {}

/// Asks one server.
#[derive(Debug, Clone)]
pub struct Client {
    address: Address,
    /// Shown as `Authorization: Bearer …`.
    token: Option<String>,
    /// The longest silence.
    within: Duration,
}

/// A response whose body is still to be read.
pub struct Response {
    /// HTTP's status.
    pub status: u16,
    address: String,
    body: Body,
}

/// How a body's end is known.
enum Body {
    Length(std::io::Take<BufReader<Box<dyn Duplex>>>),
    Chunked { from: BufReader<Box<dyn Duplex>>, left: u64, ended: bool },
    UntilClosed(BufReader<Box<dyn Duplex>>),
}

impl Client {
    /// For a server; `within` bounds every wait for it.
    pub fn new(address: Address, token: Option<String>, within: Duration) -> Client {
        Client { address, token, within }
    }

    /// Where it asks.
    pub fn address(&self) -> &Address {
        &self.address
    }

    fn error(&self, doing: &str, e: std::io::Error) -> Error {
        Error::io(self.address.to_string(), doing, e)
    }

    fn connect(&self) -> Result<Box<dyn Duplex>> {
        let fail = |e| self.error("connect to the daemon (is it running?)", e);
        let within = Some(self.within);
        let stream: Box<dyn Duplex> = match &self.address {
            Address::Unix(path) => {
                let s = UnixStream::connect(path).map_err(fail)?;
                s.set_read_timeout(within).and_then(|()| s.set_write_timeout(within)).map_err(fail)?;
                Box::new(s)
            }
            Address::Tcp(host) => {
                let s = TcpStream::connect(host).map_err(fail)?;
                s.set_read_timeout(within).and_then(|()| s.set_write_timeout(within)).map_err(fail)?;
                Box::new(s)
            }
        };
        Ok(stream)
    }

    /// Sends a request and reads the response's head. A body is sent as JSON.
    pub fn send(&self, method: &str, path: &str, body: Option<&[u8]>) -> Result<Response> {
        let mut stream = self.connect()?;
        let host = match &self.address {
            Address::Unix(_) => "localhost",
            Address::Tcp(host) => host,
        };
        let mut head = format!("{method} {path} HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n");
        if let Some(token) = &self.token {
            head += &format!("authorization: Bearer {token}\r\n");
        }
        if let Some(body) = body {
            head += &format!("content-type: application/json\r\ncontent-length: {}\r\n", body.len());
        }
        head += "\r\n";
        let sent =
            stream.write_all(head.as_bytes()).and_then(|()| stream.write_all(body.unwrap_or_default()));
        sent.and_then(|()| stream.flush()).map_err(|e| self.error("send a request", e))?;
        self.read_head(BufReader::new(stream))
    }

    fn read_head(&self, mut from: BufReader<Box<dyn Duplex>>) -> Result<Response> {
        let mut left = HEAD_BYTES_MAX;
        let mut line = |from: &mut BufReader<Box<dyn Duplex>>| -> Result<String> {
            let mut bytes = Vec::new();
            let read = from.by_ref().take(left).read_until(b'\n', &mut bytes);
            left -= read.map_err(|e| self.error("read a response", e))? as u64;
            if !bytes.ends_with(b"\n") {
                return Err(Error::bad(
                    self.address.to_string(),
                    "response",
                    "an HTTP head",
                    "less, or more than fits",
                ));
            }
            Ok(String::from_utf8_lossy(&bytes).trim_end().to_owned())
        };
        let first = line(&mut from)?;
        let status = first.strip_prefix("HTTP/1.").and_then(|r| r.get(2..5)?.parse().ok());
        let bad = |field: &str, found: &str| {
            Error::bad(self.address.to_string(), field, "an HTTP/1.1 response", found)
        };
        let status: u16 = status.ok_or_else(|| bad("status", &first))?;
        let (mut length, mut chunked) = (None, false);
        loop {
            let header = line(&mut from)?;
            if header.is_empty() {
                break;
            }
            let (name, value) = header.split_once(':').ok_or_else(|| bad("header", &header))?;
            match name.to_ascii_lowercase().as_str() {
                "content-length" => {
                    length = Some(value.trim().parse().map_err(|_| bad("content-length", value))?)
                }
                "transfer-encoding" => chunked = value.trim().eq_ignore_ascii_case("chunked"),
                _ => {}
            }
        }
        let body = match length {
            _ if chunked => Body::Chunked { from, left: 0, ended: false },
            Some(bytes) => Body::Length(from.take(bytes)),
            None => Body::UntilClosed(from),
        };
        Ok(Response { status, address: self.address.to_string(), body })
    }
}

impl Read for Body {
    fn read(&mut self, buf: &mut [u8]) -> std::io::Result<usize> {
        match self {
            Body::Length(from) => from.read(buf),
            Body::UntilClosed(from) => from.read(buf),
            Body::Chunked { from, left, ended } => {
                let wrong = || std::io::Error::new(std::io::ErrorKind::InvalidData, "a malformed chunk");
                if *ended {
                    return Ok(0);
                }
                if *left == 0 {
                    let mut line = String::new();
                    from.by_ref().take(64).read_line(&mut line)?;
                    let size = line.trim().split(';').next().unwrap_or_default();
                    *left = u64::from_str_radix(size, 16).map_err(|_| wrong())?;
                    if *left == 0 {
                        *ended = true;
                        return Ok(0);
                    }
                }
                let most = buf.len().min(usize::try_from(*left).unwrap_or(usize::MAX));
                let n = from.read(&mut buf[..most])?;
                *left -= n as u64;
                if n == 0 && most > 0 {
                    return Err(std::io::ErrorKind::UnexpectedEof.into());
                }
                if *left == 0 {
                    let mut end = [0; 2];
                    from.read_exact(&mut end)?;
                    if &end != b"\r\n" {
                        return Err(wrong());
                    }
                }
                Ok(n)
            }
        }
    }
}

impl Response {
    /// The body whole.
    pub fn bytes(self) -> Result<Vec<u8>> {
        let mut bytes = Vec::new();
        let read = self.body.take(BODY_BYTES_MAX).read_to_end(&mut bytes);
        read.map_err(|e| Error::io(&self.address, "read a response", e))?;
        Ok(bytes)
    }

    /// The body's lines as they come, without their ends.
    pub fn lines(self) -> impl Iterator<Item = Result<String>> {
        let address = self.address;
        let mut from = BufReader::new(self.body);
        let mut failed = false;
        std::iter::from_fn(move || {
            if failed {
                return None;
            }
            let mut bytes = Vec::new();
            match from.by_ref().take(LINE_BYTES_MAX).read_until(b'\n', &mut bytes) {
                Ok(0) => None,
                Ok(_) => Some(Ok(String::from_utf8_lossy(&bytes).trim_end_matches(['\r', '\n']).to_owned())),
                Err(e) => {
                    failed = true;
                    Some(Err(Error::io(&address, "read a response", e)))
                }
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;

    /// A server that says this to whoever connects, once.
    fn server(said: &'static [u8]) -> Client {
        let socket = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = socket.local_addr().unwrap().to_string();
        std::thread::spawn(move || {
            let (mut stream, _) = socket.accept().unwrap();
            let mut head = [0; 256];
            let _ = stream.read(&mut head).unwrap();
            stream.write_all(said).unwrap();
        });
        Client::new(Address::parse(&address), None, Duration::from_secs(60))
    }

    #[test]
    fn bodies_end_in_three_ways() {
        for said in [
            &b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\na\nb\ncdMORE"[..],
            b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n4\r\na\nb\n\r\n2;x=y\r\ncd\r\n0\r\n\r\n",
            b"HTTP/1.0 200 OK\r\n\r\na\nb\ncd",
        ] {
            let response = server(said).send("GET", "/", None).unwrap();
            assert_eq!(response.status, 200);
            let lines: Vec<String> = response.lines().map(|l| l.unwrap()).collect();
            assert_eq!(lines, ["a", "b", "cd"]);
            assert_eq!(server(said).send("POST", "/", Some(b"{}")).unwrap().bytes().unwrap(), b"a\nb\ncd");
        }
    }

    #[test]
    fn what_is_no_http_is_refused() {
        for said in [
            &b"SSH-2.0\r\n\r\n"[..],
            b"HTTP/1.1 200 OK\r\nno colon\r\n\r\n",
            b"HTTP/1.1 200 OK\r\ncontent-length: x\r\n\r\n",
            b"",
        ] {
            assert!(server(said).send("GET", "/", None).is_err(), "{said:?}");
        }
        let cut = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n";
        assert!(server(cut).send("GET", "/", None).unwrap().bytes().is_err());
        let none = Client::new(Address::Unix("no/such.sock".into()), None, Duration::from_secs(1));
        let e = none.send("GET", "/", None).err().unwrap().to_string();
        assert!(e.starts_with("no/such.sock: connect to the daemon"), "{e}");
    }

    #[test]
    fn addresses_are_told_apart() {
        assert_eq!(Address::parse("/run/a.sock"), Address::Unix("/run/a.sock".into()));
        assert_eq!(Address::parse("http://localhost:80/"), Address::Tcp("localhost:80".into()));
        assert_eq!(Address::parse("127.0.0.1:8080"), Address::Tcp("127.0.0.1:8080".into()));
        assert_eq!(Address::parse("unix:a:1"), Address::Unix("a:1".into()));
    }
}
