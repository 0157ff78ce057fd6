//! One connection's socket: Unix or TCP behind one type, watched for clients that are gone and for clients that do not read.

use std::future::Future;
use std::io::{Error, ErrorKind, Result};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite, Interest, ReadBuf};
use tokio::net::{TcpStream, UnixStream};
use tokio::time::Sleep;

/// A connected socket.
pub enum Sock {
    /// Of the Unix socket.
    Unix(UnixStream),
    /// Of the loopback port.
    Tcp(TcpStream),
}

impl Sock {
    /// Who is there: processes on the Unix socket by number, others by address. Clients that share the machine evenly are
    /// told apart by this, unless they name themselves.
    pub fn peer(&self) -> String {
        match self {
            Sock::Unix(s) => match s.peer_cred() {
                Ok(c) => format!("pid {}", c.pid().unwrap_or(0)),
                Err(_) => "unix".into(),
            },
            Sock::Tcp(s) => s.peer_addr().map_or("tcp".into(), |a| a.ip().to_string()),
        }
    }

    fn poll_ready(&self, cx: &mut Context<'_>, write: bool) -> Poll<Result<()>> {
        match (self, write) {
            (Sock::Unix(s), false) => s.poll_read_ready(cx),
            (Sock::Unix(s), true) => s.poll_write_ready(cx),
            (Sock::Tcp(s), false) => s.poll_read_ready(cx),
            (Sock::Tcp(s), true) => s.poll_write_ready(cx),
        }
    }

    fn try_read(&self, buf: &mut [u8]) -> Result<usize> {
        match self {
            Sock::Unix(s) => s.try_read(buf),
            Sock::Tcp(s) => s.try_read(buf),
        }
    }

    fn try_write(&self, buf: &[u8]) -> Result<usize> {
        match self {
            Sock::Unix(s) => s.try_write(buf),
            Sock::Tcp(s) => s.try_write(buf),
        }
    }

    /// What the other side has closed, as the kernel tells it: `(sending, receiving)`.
    async fn closed(&self) -> (bool, bool) {
        let both = Interest::READABLE | Interest::WRITABLE;
        let ready = match self {
            Sock::Unix(s) => s.ready(both).await,
            Sock::Tcp(s) => s.ready(both).await,
        };
        ready.map_or((true, true), |r| (r.is_read_closed(), r.is_write_closed()))
    }
}

/// What connection and watcher share.
pub struct Watched {
    sock: Sock,
    /// It said that its request is the last.
    last: AtomicBool,
}

impl Watched {
    /// The client said that the connection ends with this request.
    pub fn is_last(&self) {
        self.last.store(true, Ordering::Relaxed);
    }

    /// Ends when the client is gone: it neither sends nor receives. A client that only half-closed still gets its
    /// answer. TCP does not tell the two apart before a write fails; there, who half-closes on purpose says that the
    /// request is the last, and who just vanishes was about to send more.
    pub async fn gone(&self) {
        const LOOK_EVERY: Duration = Duration::from_millis(100);
        loop {
            tokio::time::sleep(LOOK_EVERY).await;
            let (sending, receiving) = self.sock.closed().await;
            let vanished = matches!(self.sock, Sock::Tcp(_)) && !self.last.load(Ordering::Relaxed);
            if receiving || (sending && vanished) {
                return;
            }
        }
    }
}

/// The socket as hyper reads and writes it.
pub struct Io {
    shared: Arc<Watched>,
    write_within: Duration,
    /// Runs while the client does not read.
    stalled: Option<Pin<Box<Sleep>>>,
}

impl Io {
    /// `write_within` bounds how long a client may leave what was sent unread.
    pub fn new(sock: Sock, write_within: Duration) -> (Io, Arc<Watched>) {
        let shared = Arc::new(Watched { sock, last: AtomicBool::new(false) });
        (Io { shared: shared.clone(), write_within, stalled: None }, shared)
    }
}

impl AsyncRead for Io {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<Result<()>> {
        loop {
            ready!(self.shared.sock.poll_ready(cx, false))?;
            match self.shared.sock.try_read(buf.initialize_unfilled()) {
                Ok(n) => {
                    buf.advance(n);
                    return Poll::Ready(Ok(()));
                }
                Err(e) if e.kind() == ErrorKind::WouldBlock => {}
                Err(e) => return Poll::Ready(Err(e)),
            }
        }
    }
}

impl AsyncWrite for Io {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<Result<usize>> {
        loop {
            if self.shared.sock.poll_ready(cx, true)?.is_pending() {
                let within = self.write_within;
                let stalled = self.stalled.get_or_insert_with(|| Box::pin(tokio::time::sleep(within)));
                ready!(stalled.as_mut().poll(cx));
                return Poll::Ready(Err(Error::new(ErrorKind::TimedOut, "the client does not read")));
            }
            match self.shared.sock.try_write(buf) {
                Err(e) if e.kind() == ErrorKind::WouldBlock => {}
                done => {
                    self.stalled = None;
                    return Poll::Ready(done);
                }
            }
        }
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<()>> {
        // Dropping the socket closes it; there is no buffer of ours to empty first.
        let _ = (&mut self, cx);
        Poll::Ready(Ok(()))
    }
}
