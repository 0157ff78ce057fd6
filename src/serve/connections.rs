//! Connections: accepted within a bound, each on a task of its own; when all places are taken, an idle one makes room.

use super::io::{Io, Sock};
use super::{Server, Settings, body, routes};
use axum::body::Body;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::net::{TcpListener, UnixListener};
use tokio::sync::{Notify, watch};

/// A request's line and headers. Cookies and tokens of local clients are far below.
const HEAD_BYTES_MAX: usize = 64 << 10;
/// Headers of a request.
const HEADERS_MAX: usize = 100;

/// One open connection, as the others see it.
struct Open {
    /// Requests that are being answered: 0 or 1.
    busy: Arc<AtomicUsize>,
    /// Closes it.
    close: Arc<Notify>,
}

/// All open connections.
#[derive(Default)]
pub struct Connections {
    open: Mutex<(u64, BTreeMap<u64, Open>)>,
    none_left: Notify,
}

impl Connections {
    fn lock(&self) -> MutexGuard<'_, (u64, BTreeMap<u64, Open>)> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        self.lock().1.len()
    }

    /// A place, if there is one or an idle connection gives up its own. Those that opened first and ask for nothing go first:
    /// a client that only holds connections open loses them to clients that use theirs.
    fn enter(&self, most: usize) -> Option<(u64, Arc<AtomicUsize>, Arc<Notify>)> {
        let mut open = self.lock();
        if open.1.len() >= most.max(1) {
            let idle = open.1.iter().find(|(_, o)| o.busy.load(Ordering::Relaxed) == 0).map(|(id, _)| *id)?;
            let gone = open.1.remove(&idle)?;
            gone.close.notify_one();
        }
        open.0 += 1;
        let (id, busy, close) = (open.0, Arc::new(AtomicUsize::new(0)), Arc::new(Notify::new()));
        open.1.insert(id, Open { busy: busy.clone(), close: close.clone() });
        Some((id, busy, close))
    }

    fn leave(&self, id: u64) {
        let mut open = self.lock();
        open.1.remove(&id);
        if open.1.is_empty() {
            self.none_left.notify_waiters();
        }
    }

    /// Waits until all are closed.
    pub async fn closed(&self) {
        loop {
            let none_left = self.none_left.notified();
            if self.count() == 0 {
                return;
            }
            none_left.await;
        }
    }
}

/// Counts a request as open until its response is sent.
struct Busy(Arc<AtomicUsize>);

impl Drop for Busy {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Accepts until told to end.
pub async fn accept(
    server: Arc<Server>,
    all: Arc<Connections>,
    unix: Option<UnixListener>,
    tcp: Option<TcpListener>,
    mut ending: watch::Receiver<bool>,
) {
    loop {
        let accepted = tokio::select! {
            _ = ending.changed() => return,
            s = accept_unix(unix.as_ref()) => s.map(Sock::Unix),
            s = accept_tcp(tcp.as_ref()) => s.map(Sock::Tcp),
        };
        match accepted {
            Ok(sock) => {
                let most = server.settings().connections;
                match all.enter(most) {
                    Some(place) => {
                        tokio::spawn(serve(server.clone(), all.clone(), sock, place, ending.clone()));
                    }
                    None => drop(tokio::spawn(turn_away(sock))),
                }
            }
            Err(e) => {
                // Out of descriptors, mostly: the places free themselves, and until then trying again helps no one.
                log::warn!("accept: {e}");
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        }
    }
}

async fn accept_unix(socket: Option<&UnixListener>) -> std::io::Result<tokio::net::UnixStream> {
    match socket {
        Some(s) => s.accept().await.map(|(stream, _)| stream),
        None => std::future::pending().await,
    }
}

async fn accept_tcp(socket: Option<&TcpListener>) -> std::io::Result<tokio::net::TcpStream> {
    match socket {
        Some(s) => {
            let (stream, _) = s.accept().await?;
            // Tokens are small and must not wait for each other.
            stream.set_nodelay(true)?;
            Ok(stream)
        }
        None => std::future::pending().await,
    }
}

/// Every place is taken by a connection with a request under way.
async fn turn_away(sock: Sock) {
    use tokio::io::AsyncWriteExt;
    const BODY: &str =
        r#"{"error":{"message":"too many connections","type":"server_error","param":null,"code":null}}"#;
    let said = format!(
        "HTTP/1.1 503 Service Unavailable\r\nretry-after: 1\r\nconnection: close\r\ncontent-type: application/json\r\n\
         content-length: {}\r\n\r\n{BODY}",
        BODY.len()
    );
    let (mut io, _) = Io::new(sock, Duration::from_secs(1));
    drop(io.write_all(said.as_bytes()).await);
}

/// HTTP within these settings' bounds.
pub fn http(settings: &Settings) -> http1::Builder {
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new())
        .header_read_timeout(settings.head_within)
        .max_buf_size(HEAD_BYTES_MAX)
        .max_headers(HEADERS_MAX)
        // A client may close its sending side and wait for the answer.
        .half_close(true);
    http
}

/// No request comes after this one.
fn says_last<B>(request: &hyper::Request<B>) -> bool {
    let close = |v: &hyper::header::HeaderValue| v.to_str().is_ok_and(|v| v.eq_ignore_ascii_case("close"));
    request.version() == hyper::Version::HTTP_10
        || request.headers().get(hyper::header::CONNECTION).is_some_and(close)
}

async fn serve(
    server: Arc<Server>,
    all: Arc<Connections>,
    sock: Sock,
    (id, busy, close): (u64, Arc<AtomicUsize>, Arc<Notify>),
    mut ending: watch::Receiver<bool>,
) {
    let settings = server.settings();
    let peer = routes::Peer { client: sock.peer(), is_tcp: matches!(sock, Sock::Tcp(_)) };
    let (io, watched) = Io::new(sock, settings.write_within);
    let answer = service_fn(|request: hyper::Request<hyper::body::Incoming>| {
        busy.fetch_add(1, Ordering::Relaxed);
        let (server, peer, held) = (server.clone(), peer.clone(), Busy(busy.clone()));
        if says_last(&request) {
            watched.is_last();
        }
        async move {
            let response = routes::answer(server, peer, request.map(Body::new)).await;
            Ok::<_, std::convert::Infallible>(body::holding(response, held))
        }
    });
    let connection = http(&settings).serve_connection(TokioIo::new(io), answer);
    let mut connection = std::pin::pin!(connection);
    let mut told = *ending.borrow();
    if told {
        connection.as_mut().graceful_shutdown();
    }
    loop {
        tokio::select! {
            // What goes wrong on one connection is the client's business: it is told, where it can be, and closed.
            done = connection.as_mut() => {
                if let Err(e) = done {
                    log::debug!("connection of {}: {e}", peer.client);
                }
                break;
            }
            _ = ending.changed(), if !told => {
                told = true;
                connection.as_mut().graceful_shutdown();
            }
            _ = close.notified() => break,
            _ = watched.gone() => break,
        }
    }
    all.leave(id);
}

#[test]
fn idle_connections_make_room_and_busy_ones_do_not() {
    let all = Connections::default();
    let first = all.enter(2).unwrap();
    let second = all.enter(2).unwrap();
    second.1.fetch_add(1, Ordering::Relaxed);
    let third = all.enter(2).unwrap();
    assert_eq!(all.count(), 2);
    third.1.fetch_add(1, Ordering::Relaxed);
    assert!(all.enter(2).is_none());
    all.leave(first.0);
    all.leave(second.0);
    assert!(all.enter(2).is_some());
}
