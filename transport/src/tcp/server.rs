//! The server side: connections that were handed over, their handshake, and the loop that answers frames in order.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use hashbrown::HashMap;
use parking_lot::Mutex;
use tidepool_proto::{Error, ErrorCode};
use tokio::io::Interest;
use tokio::net::TcpStream;
use tokio::sync::watch;
use tokio::task::AbortHandle;
use tokio::time::{Instant, timeout};

use super::io_threads::IoThreads;
use super::options::{DataIdentity, TcpServerOptions};
use super::socket::{Ranges, Window, send, send_bytes, wait};
use super::wire::{self, HEADER_BYTES, Kind, Request};
use super::{handshake, server_read, server_write, socket};
use crate::memory::Memory;
use crate::stats::{Stats, StatsSnapshot};

/// Serves a [`Memory`] to whoever proves to be of the same cluster and history. A clone is another handle.
#[derive(Clone)]
pub struct TcpServer {
    shared: Arc<Shared>,
    _last: Arc<CloseOnDrop>,
}

/// Connections hold the server's insides; they end with its last handle.
struct CloseOnDrop(Arc<Shared>);

impl Drop for CloseOnDrop {
    fn drop(&mut self) {
        self.0.close_all();
    }
}

struct Shared {
    options: TcpServerOptions,
    identity: Mutex<DataIdentity>,
    memory: Arc<dyn Memory>,
    threads: Result<IoThreads, Error>,
    connections: Mutex<HashMap<u64, AbortHandle>>,
    next: AtomicU64,
    open: watch::Sender<usize>,
    stats: Arc<Stats>,
}

/// One connection, as its frames see it.
pub(super) struct Session {
    pub(super) stream: TcpStream,
    pub(super) memory: Arc<dyn Memory>,
    pub(super) stats: Arc<Stats>,
    pub(super) options: TcpServerOptions,
}

/// Why a connection ends.
pub(super) enum End {
    /// The socket failed or the peer left.
    Socket(io::Error),
    /// The peer broke the protocol; it is told before the connection closes.
    Refused(Error),
}

impl From<io::Error> for End {
    fn from(error: io::Error) -> End {
        End::Socket(error)
    }
}

impl From<Error> for End {
    fn from(error: Error) -> End {
        End::Refused(error)
    }
}

/// Takes the connection out of the registry when its task ends, also by abort.
struct Registered {
    shared: Arc<Shared>,
    id: u64,
}

impl Drop for Registered {
    fn drop(&mut self) {
        self.shared.connections.lock().remove(&self.id);
        self.shared.open.send_modify(|open| *open -= 1);
        Stats::sub(&self.shared.stats.connections_open, 1);
    }
}

impl TcpServer {
    /// A server without connections.
    pub fn new(options: TcpServerOptions, memory: Arc<dyn Memory>) -> TcpServer {
        let shared = Shared {
            identity: Mutex::new(options.identity),
            threads: IoThreads::start("tp-serve", options.io_threads),
            options,
            memory,
            connections: Mutex::default(),
            next: AtomicU64::new(0),
            open: watch::Sender::new(0),
            stats: Arc::default(),
        };
        let shared = Arc::new(shared);
        TcpServer { _last: Arc::new(CloseOnDrop(shared.clone())), shared }
    }

    /// Serves a fresh connection on one of the server's threads. The data plane's magic may have been peeked but not
    /// read.
    pub fn serve(&self, stream: TcpStream) {
        let thread = match &self.shared.threads {
            Ok(threads) => threads.pick(),
            Err(error) => return tracing::error!(%error, "data connection refused"),
        };
        // The stream leaves the runtime that accepted it.
        let stream = match stream.into_std() {
            Ok(stream) => stream,
            Err(error) => return tracing::debug!(%error, "data connection lost before its handshake"),
        };
        let shared = self.shared.clone();
        let id = shared.next.fetch_add(1, Ordering::Relaxed);
        let admit = match *shared.open.borrow() {
            open if open < shared.options.connections_max => Ok(()),
            open => Err(Error::new(
                ErrorCode::ResourceExhausted,
                format!("{open} data connections are open, connections_max; reuse one or raise it"),
            )),
        };
        shared.open.send_modify(|open| *open += 1);
        Stats::add(&shared.stats.connections_opened, 1);
        Stats::add(&shared.stats.connections_open, 1);
        let registered = Registered { shared: shared.clone(), id };
        // Held over the spawn, so that a task that ends at once finds its entry to remove.
        let mut connections = self.shared.connections.lock();
        let task = thread.spawn(async move {
            let _registered = registered;
            match TcpStream::from_std(stream) {
                Ok(stream) => shared.run(stream, admit).await,
                Err(error) => tracing::debug!(%error, "data connection lost before its handshake"),
            }
        });
        connections.insert(id, task.abort_handle());
    }

    /// Who serves from now on. Another cluster, history, node or incarnation closes every connection (I3).
    pub fn set_identity(&self, identity: DataIdentity) {
        let before = std::mem::replace(&mut *self.shared.identity.lock(), identity);
        if before != identity {
            self.close_all();
        }
    }

    /// Ends every connection; puts that were arriving end as not received.
    pub fn close_all(&self) {
        self.shared.close_all();
    }

    /// Ends every connection and waits until their tasks, and with them all tickets and guards, are gone.
    pub async fn shutdown(&self) {
        self.close_all();
        let mut open = self.shared.open.subscribe();
        // Fails only if the sender is gone, which self holds.
        let _closed = open.wait_for(|&open| open == 0).await;
    }

    /// Connections now.
    pub fn connections(&self) -> usize {
        *self.shared.open.borrow()
    }

    /// Counters since the server was made.
    pub fn stats(&self) -> StatsSnapshot {
        self.shared.stats.snapshot()
    }
}

impl Shared {
    fn close_all(&self) {
        self.connections.lock().values().for_each(AbortHandle::abort);
    }

    async fn run(&self, stream: TcpStream, admit: Result<(), Error>) {
        let peer = stream.peer_addr().map_or_else(|_| "an unknown peer".to_owned(), |peer| peer.to_string());
        let options = &self.options;
        let (idle, unacknowledged) = (options.keepalive_idle, options.unacknowledged_timeout);
        if let Err(error) = socket::configure(&stream, idle, unacknowledged, options.socket_buffer_bytes) {
            tracing::debug!(%peer, %error, "data connection lost before its handshake");
            return;
        }
        let identity = *self.identity.lock();
        let stall = options.handshake_timeout;
        let greeted = match timeout(stall, handshake::accept(&stream, identity, admit, stall)).await {
            Ok(greeted) => greeted,
            Err(_) => Err(Error::new(ErrorCode::DeadlineExceeded, "no handshake in time")),
        };
        // The identity may have changed meanwhile, and close_all may have come before this task was registered.
        let greeted = greeted.and_then(|()| match *self.identity.lock() == identity {
            true => Ok(()),
            false => Err(Error::new(ErrorCode::WrongCluster, "this datanode changed its identity")),
        });
        if let Err(error) = greeted {
            Stats::add(&self.stats.connections_failed, 1);
            if error.code() == ErrorCode::BadFrame {
                Stats::add(&self.stats.bad_frames, 1);
            }
            tracing::debug!(%peer, %error, "data connection refused");
            return;
        }
        let session =
            Session { stream, memory: self.memory.clone(), stats: self.stats.clone(), options: options.clone() };
        match session.run().await {
            End::Socket(error) => tracing::debug!(%peer, %error, "data connection ended"),
            End::Refused(error) => {
                Stats::add(&self.stats.bad_frames, 1);
                tracing::warn!(%peer, %error, "data connection closed");
                // Best effort: the peer may be gone, and is wrong anyway.
                let _gone = send_bytes(&session.stream, &wire::refusal(&error), options.handshake_timeout).await;
            }
        }
    }
}

impl Session {
    async fn run(&self) -> End {
        let mut buffers = Buffers::default();
        loop {
            if let Err(end) = self.answer(&mut buffers).await {
                return end;
            }
            // A peer that always has the next frame there must not keep this thread from its other connections.
            tokio::task::coop::consume_budget().await;
        }
    }

    async fn answer(&self, buffers: &mut Buffers) -> Result<(), End> {
        let mut header = [0u8; HEADER_BYTES];
        let first = self.receive_first(&mut header).await?;
        self.receive(&mut header[first..]).await?;
        let received = Instant::now();
        let request = Request::decode(&header)?;
        buffers.records.resize(request.items * request.record_bytes, 0);
        self.receive(&mut buffers.records).await?;
        buffers.accesses.clear();
        for record in buffers.records.chunks_exact(request.record_bytes) {
            buffers.accesses.push(wire::get_record(record)?);
        }
        let deadline = received + std::time::Duration::from_millis(request.remaining_ms.into());
        match request.kind {
            Kind::Read => server_read::answer(self, &request, deadline, buffers).await,
            _ => server_write::answer(self, &request, deadline, buffers).await,
        }
    }

    /// The first bytes of a frame. Between frames a connection may be idle as long as it likes; keepalive finds out
    /// whether the peer is still there.
    async fn receive_first(&self, bytes: &mut [u8]) -> io::Result<usize> {
        loop {
            match self.stream.try_read(bytes) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => self.stream.readable().await?,
                result => return result,
            }
        }
    }

    async fn receive(&self, bytes: &mut [u8]) -> io::Result<()> {
        socket::receive_bytes(&self.stream, bytes, self.options.stall_timeout).await
    }

    /// Sends `head` and then the payload ranges, whose memory the caller holds.
    pub(super) async fn send(&self, head: &[u8], payload: &mut Ranges, window: &mut Window) -> io::Result<()> {
        let mut first = Ranges::default();
        first.push(head.as_ptr(), head.len());
        while first.bytes() + payload.bytes() > 0 {
            // SAFETY: `head` is borrowed and the caller holds the payload's guards until this returns.
            #[allow(unsafe_code)]
            let sent = unsafe { send(&self.stream, &first, payload, super::options::CALL_BYTES_MAX, window) };
            match sent {
                Ok(n) => {
                    let of_head = (n as u64).min(first.bytes()) as usize;
                    first.advance(of_head);
                    payload.advance(n - of_head);
                    Stats::add(&self.stats.bytes_out, (n - of_head) as u64);
                    tokio::task::coop::consume_budget().await;
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    wait(&self.stream, Interest::WRITABLE, self.options.stall_timeout).await?;
                }
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}

/// Reused between frames.
#[derive(Default)]
pub(super) struct Buffers {
    pub(super) records: Vec<u8>,
    pub(super) accesses: Vec<crate::access::ReadAccess>,
    pub(super) answer: Vec<u8>,
    pub(super) body: Vec<u8>,
    pub(super) ranges: Ranges,
    pub(super) window: Window,
    pub(super) scratch: Vec<u8>,
}
