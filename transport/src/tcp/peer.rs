//! One peer: its connections, and the dialling of missing ones.
//!
//! Payload travels over stripes, which live on the engine's own threads. What is small travels over one more connection that lives
//! where its callers do: handing over to another thread and back costs more than the transfer.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tidepool_proto::{Address, Error, ErrorCode};
use tokio::net::TcpStream;
use tokio::time::{Instant, timeout};

use super::connection::{Connection, Ended};
use super::dialer::{Backoff, Dialer};
use super::io_threads::IoThreads;
use super::options::{DataIdentity, TcpOptions};
use super::{handshake, socket};
use crate::stats::Stats;

/// A peer and its connections.
pub(super) struct Peer {
    address: Address,
    stripes: Mutex<Vec<Arc<Connection>>>,
    near: Mutex<Vec<Arc<Connection>>>,
    /// Held by whoever dials; a dial outlives the call that asked for it.
    dialling: Arc<tokio::sync::Mutex<()>>,
    /// When the peer may be dialled while nothing is connected.
    first: Dialer,
    /// When it may be dialled for one stripe more. On its own: what is refused there (a limit of connections) says
    /// nothing against the stripes that work, and must not be asked for with every batch.
    more: Dialer,
}

/// Which of the two a connection was dialled by.
#[derive(Clone, Copy)]
enum Stripe {
    First,
    More,
}

/// Where connections are driven.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Place {
    /// In the runtime of whoever dialled it.
    Near,
    /// On the engine's threads.
    Threads,
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

    fn at(&self, place: Place) -> &Mutex<Vec<Arc<Connection>>> {
        match place {
            Place::Near => &self.near,
            Place::Threads => &self.stripes,
        }
    }

    fn open(&self, place: Place) -> Vec<Arc<Connection>> {
        let mut connections = self.at(place).lock();
        connections.retain(|connection| !connection.has_ended());
        connections.iter().filter(|connection| connection.is_open()).cloned().collect()
    }

    /// What is open at the one place, or, where nothing is, at the other.
    fn open_anywhere(&self, place: Place) -> Vec<Arc<Connection>> {
        let other = if place == Place::Near { Place::Threads } else { Place::Near };
        let open = self.open(place);
        if open.is_empty() { self.open(other) } else { open }
    }

    fn dialer(&self, stripe: Stripe) -> &Dialer {
        match stripe {
            Stripe::First => &self.first,
            Stripe::More => &self.more,
        }
    }

    /// Whether nothing is connected.
    pub(super) fn is_idle(&self) -> bool {
        self.open_anywhere(Place::Threads).is_empty()
    }

    /// Closes all connections.
    pub(super) fn close(&self, error: &Error) {
        for place in [Place::Near, Place::Threads] {
            let connections = std::mem::take(&mut *self.at(place).lock());
            connections.iter().for_each(|connection| connection.close(error.clone()));
        }
    }

    /// Whether something is under way on the near connection: what comes now shall not wait behind it.
    pub(super) fn is_near_busy(&self) -> bool {
        self.near.lock().iter().any(|connection| connection.pending_bytes() > 0)
    }

    /// Open connections: at least one, up to `wanted`. While the peer is down this fails at once until the next dial
    /// is due; a peer with some connections works with those.
    pub(super) async fn connections(
        self: &Arc<Self>,
        place: Place,
        wanted: usize,
        options: &Arc<TcpOptions>,
        identity: DataIdentity,
        threads: &Arc<IoThreads>,
        stats: &Arc<Stats>,
    ) -> Result<Vec<Arc<Connection>>, Error> {
        let open = self.open(place);
        if open.len() >= wanted {
            return Ok(open);
        }
        let open = self.open_anywhere(place);
        let turn = match open.is_empty() {
            true => self.dialling.clone().lock_owned().await,
            // Somebody is adding connections already: go on with what there is.
            false => match self.dialling.clone().try_lock_owned() {
                Ok(turn) => turn,
                Err(_) => return Ok(open),
            },
        };
        let (peer, options, stats) = (self.clone(), options.clone(), stats.clone());
        let (others, here) = (threads.clone(), tokio::runtime::Handle::current());
        let dialled = threads.pick().spawn(async move {
            let _turn = turn;
            let mut thread = if place == Place::Near { here } else { tokio::runtime::Handle::current() };
            loop {
                let open = peer.open(place);
                if open.len() >= wanted {
                    return Ok(open);
                }
                let open = peer.open_anywhere(place);
                let stripe = if open.is_empty() { Stripe::First } else { Stripe::More };
                let fail = |error: Error| if open.is_empty() { Err(peer.named(&error)) } else { Ok(open.clone()) };
                if let Err(error) = peer.dialer(stripe).admit(Instant::now()) {
                    return fail(error);
                }
                // A connection lives where it is dialled; the stripes are spread over the threads.
                let dial = thread.spawn(peer.clone().dial(stripe, options.clone(), identity, stats.clone()));
                match dial.await.unwrap_or_else(|_| Err(peer.cut_short())) {
                    Ok(connection) => peer.at(place).lock().push(connection),
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

    async fn dial(
        self: Arc<Self>,
        stripe: Stripe,
        options: Arc<TcpOptions>,
        identity: DataIdentity,
        stats: Arc<Stats>,
    ) -> Result<Arc<Connection>, Error> {
        let limit = options.connect_timeout;
        let stream = match timeout(limit, self.connect(&options, identity)).await {
            Ok(stream) => stream?,
            Err(_) => {
                let what = format!("no connection within {} ms", limit.as_millis());
                return Err(Error::new(ErrorCode::TransferFailed, what));
            }
        };
        let (peer, backoff) = (Arc::downgrade(&self), backoff(&options));
        let on_end = move |ended: &Ended<'_>| {
            if let Some(peer) = peer.upgrade() {
                peer.dialer(stripe).ended(Instant::now(), backoff, ended);
            }
        };
        Ok(Connection::start(
            self.address.to_string(),
            stream,
            options.in_flight_frames_max,
            options.stall_timeout,
            stats,
            Box::new(on_end),
        ))
    }

    async fn connect(&self, options: &TcpOptions, identity: DataIdentity) -> Result<TcpStream, Error> {
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
