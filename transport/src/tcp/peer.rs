//! One peer: its connections, and the dialling of missing ones.
//!
//! Payload travels over stripes, which live on the engine's own threads. What is small travels over one more connection, the near
//! one, which lives in the runtime of its callers: handing over to another thread and back costs more than a small transfer. It
//! is dialled beside a stripe that works, in the background; nothing waits for it, and its fate says nothing of the peer.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tidepool_proto::{Address, Error, ErrorCode};
use tokio::net::TcpStream;
use tokio::runtime::{Handle, Id};
use tokio::time::{Instant, timeout};

use super::connection::{Connection, Ended};
use super::dialer::{Backoff, Dialer};
use super::io_threads::IoThreads;
use super::options::{DataIdentity, TcpOptions};
use super::{handshake, socket};
use crate::stats::Stats;

/// Pause before a near connection is dialled again that could not be had.
const NEAR_PAUSE: Duration = Duration::from_secs(10);

/// A peer and its connections.
pub(super) struct Peer {
    address: Address,
    stripes: Mutex<Vec<Arc<Connection>>>,
    near: Mutex<Near>,
    /// Held by whoever dials; a dial outlives the call that asked for it.
    dialling: Arc<tokio::sync::Mutex<()>>,
    /// When the peer may be dialled while nothing is connected.
    first: Dialer,
    /// When it may be dialled for one stripe more. On its own: what is refused there (a limit of connections) says
    /// nothing against the stripes that work, and must not be asked for with every batch.
    more: Dialer,
}

/// The near connection.
#[derive(Default)]
struct Near {
    /// It, and the runtime that it lives in.
    connection: Option<(Id, Arc<Connection>)>,
    dialling: bool,
    not_before: Option<Instant>,
}

/// Ends a dial of the near connection however it ends, with its runtime too.
struct NearDial(Arc<Peer>);

impl Drop for NearDial {
    fn drop(&mut self) {
        self.0.near.lock().dialling = false;
    }
}

/// Which of the two a connection was dialled by.
#[derive(Clone, Copy)]
enum Stripe {
    First,
    More,
}

impl Peer {
    pub(super) fn new(address: Address) -> Arc<Peer> {
        Arc::new(Peer {
            address,
            stripes: Mutex::default(),
            near: Mutex::default(),
            dialling: Arc::default(),
            first: Dialer::default(),
            more: Dialer::default(),
        })
    }

    fn open_stripes(&self) -> Vec<Arc<Connection>> {
        let mut stripes = self.stripes.lock();
        stripes.retain(|connection| !connection.has_ended());
        stripes.iter().filter(|connection| connection.is_open()).cloned().collect()
    }

    fn dialer(&self, stripe: Stripe) -> &Dialer {
        match stripe {
            Stripe::First => &self.first,
            Stripe::More => &self.more,
        }
    }

    /// Whether nothing is connected.
    pub(super) fn is_idle(&self) -> bool {
        self.open_stripes().is_empty()
    }

    /// Closes all connections.
    pub(super) fn close(&self, error: &Error) {
        let mut connections = std::mem::take(&mut *self.stripes.lock());
        connections.extend(self.near.lock().connection.take().map(|(_, near)| near));
        connections.iter().for_each(|connection| connection.close(error.clone()));
    }

    /// The near connection, if it lives in this runtime and nothing is under way on it: what comes now shall not wait behind that.
    /// Where there is none, one is dialled for those who come later.
    pub(super) fn near(
        self: &Arc<Self>,
        options: &Arc<TcpOptions>,
        identity: DataIdentity,
        stats: &Arc<Stats>,
    ) -> Option<Arc<Connection>> {
        let here = Handle::current();
        let mut near = self.near.lock();
        if let Some((runtime, connection)) = near.connection.as_ref().filter(|(_, near)| near.is_open()) {
            return (*runtime == here.id() && connection.pending_bytes() == 0).then(|| connection.clone());
        }
        let now = Instant::now();
        if near.dialling || near.not_before.is_some_and(|at| now < at) || self.open_stripes().is_empty() {
            return None;
        }
        (near.dialling, near.connection) = (true, None);
        let (dial, options, stats) = (NearDial(self.clone()), options.clone(), stats.clone());
        let runtime = here.id();
        // A runtime that is going drops the task here, which takes this lock.
        drop(near);
        here.spawn(async move {
            let dialled = dial.0.dial(None, &options, identity, &stats).await;
            {
                let mut near = dial.0.near.lock();
                match dialled {
                    Ok(connection) => near.connection = Some((runtime, connection)),
                    Err(_) => near.not_before = Some(now + NEAR_PAUSE),
                }
            }
            drop(dial);
        });
        None
    }

    /// Open connections: at least one, up to `wanted`. While the peer is down this fails at once until the next dial
    /// is due; a peer with some stripes works with those.
    pub(super) async fn connections(
        self: &Arc<Self>,
        wanted: usize,
        options: &Arc<TcpOptions>,
        identity: DataIdentity,
        threads: &Arc<IoThreads>,
        stats: &Arc<Stats>,
    ) -> Result<Vec<Arc<Connection>>, Error> {
        let open = self.open_stripes();
        if open.len() >= wanted {
            return Ok(open);
        }
        let turn = match open.is_empty() {
            true => self.dialling.clone().lock_owned().await,
            // Somebody is adding stripes already: go on with what there is.
            false => match self.dialling.clone().try_lock_owned() {
                Ok(turn) => turn,
                Err(_) => return Ok(open),
            },
        };
        let (peer, options, stats) = (self.clone(), options.clone(), stats.clone());
        let others = threads.clone();
        let dialled = threads.pick().spawn(async move {
            let _turn = turn;
            let mut thread = tokio::runtime::Handle::current();
            loop {
                let open = peer.open_stripes();
                if open.len() >= wanted {
                    return Ok(open);
                }
                let stripe = if open.is_empty() { Stripe::First } else { Stripe::More };
                let fail = |error: Error| if open.is_empty() { Err(peer.named(&error)) } else { Ok(open.clone()) };
                if let Err(error) = peer.dialer(stripe).admit(Instant::now()) {
                    return fail(error);
                }
                // A connection lives on the thread that dials it; the stripes are spread over the threads.
                let (dialler, settings, counts) = (peer.clone(), options.clone(), stats.clone());
                let dial = async move { dialler.dial(Some(stripe), &settings, identity, &counts).await };
                match thread.spawn(dial).await.unwrap_or_else(|_| Err(peer.cut_short())) {
                    Ok(connection) => peer.stripes.lock().push(connection),
                    Err(error) => {
                        Stats::add(&stats.connections_failed, 1);
                        peer.dialer(stripe).failed(Instant::now(), backoff(&options), &error);
                        return fail(error);
                    }
                }
                thread = others.pick().clone();
            }
        });
        dialled.await.unwrap_or_else(|_| Err(self.cut_short()))
    }

    fn cut_short(&self) -> Error {
        Error::new(ErrorCode::Unavailable, format!("dialling {} was cut short", self.address))
    }

    fn named(&self, error: &Error) -> Error {
        Error::new(error.code(), format!("data plane of {}: {}", self.address, error.message()))
            .retry_after(error.retry_after_ms())
    }

    /// Connects, here. What becomes of a stripe tells the dialer when to dial again.
    async fn dial(
        self: &Arc<Self>,
        stripe: Option<Stripe>,
        options: &TcpOptions,
        identity: DataIdentity,
        stats: &Arc<Stats>,
    ) -> Result<Arc<Connection>, Error> {
        let limit = options.connect_timeout;
        let stream = match timeout(limit, self.open(options, identity)).await {
            Ok(stream) => stream?,
            Err(_) => {
                let what = format!("no connection within {} ms", limit.as_millis());
                return Err(Error::new(ErrorCode::TransferFailed, what));
            }
        };
        let (peer, backoff) = (Arc::downgrade(self), backoff(options));
        let on_end = move |ended: &Ended<'_>| {
            if let (Some(peer), Some(stripe)) = (peer.upgrade(), stripe) {
                peer.dialer(stripe).ended(Instant::now(), backoff, ended);
            }
        };
        Ok(Connection::start(
            self.address.to_string(),
            stream,
            options.in_flight_frames_max,
            options.stall_timeout,
            stats.clone(),
            Box::new(on_end),
        ))
    }

    async fn open(&self, options: &TcpOptions, identity: DataIdentity) -> Result<TcpStream, Error> {
        let failed = |e: std::io::Error| Error::new(ErrorCode::TransferFailed, e.to_string());
        let addresses = tokio::net::lookup_host((self.address.host(), self.address.port())).await.map_err(failed)?;
        let mut last = Error::new(ErrorCode::TransferFailed, "the name has no address");
        let addresses: Vec<_> = addresses.collect();
        // A name with several addresses must not spend the whole limit on the first.
        let each = options.connect_timeout / addresses.len().max(1) as u32;
        for address in addresses {
            match timeout(each, TcpStream::connect(address)).await {
                Ok(Ok(stream)) => {
                    let (idle, unacknowledged) = (options.keepalive_idle, options.unacknowledged_timeout);
                    socket::configure(&stream, idle, unacknowledged, options.socket_buffer_bytes).map_err(failed)?;
                    handshake::dial(&stream, identity, Duration::from_secs(3600)).await?;
                    return Ok(stream);
                }
                Ok(Err(error)) => last = failed(error),
                Err(_) => last = failed(std::io::ErrorKind::TimedOut.into()),
            }
        }
        Err(last)
    }
}

fn backoff(options: &TcpOptions) -> Backoff {
    Backoff { min: options.backoff_min, max: options.backoff_max }
}
