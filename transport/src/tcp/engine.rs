//! The client side: batches in, frames out over the peer's stripes, results by the deadline.

use std::sync::Arc;
use std::time::Instant;

use futures::FutureExt;
use futures::future::BoxFuture;
use hashbrown::HashMap;
use parking_lot::Mutex;
use tidepool_proto::{Address, Error, ErrorCode};
use tokio::sync::oneshot;
use tokio::time::timeout_at;

use super::connection::Connection;
use super::exchange::{Exchange, ReadExchange, WriteExchange};
use super::frames::{self, Frame, Piece};
use super::io_threads::IoThreads;
use super::options::{DataIdentity, ITEM_BYTES_MAX, TcpOptions};
use super::peer::Peer;
use crate::engine::{Engine, ReadItem, WriteError, WriteItem};
use crate::memory::WriteReply;
use crate::stats::{Stats, StatsSnapshot};

/// The tcp engine. A clone is another handle of the same connections, which live on the engine's own threads, but for one to each
/// peer, for small transfers, that lives in the runtime of its callers. Calls may come from any tokio runtime with I/O and a timer.
#[derive(Clone)]
pub struct TcpEngine {
    shared: Arc<Shared>,
}

struct Shared {
    options: Arc<TcpOptions>,
    identity: Mutex<DataIdentity>,
    threads: Result<Arc<IoThreads>, Error>,
    peers: Mutex<HashMap<Address, Arc<Peer>>>,
    stats: Arc<Stats>,
}

/// Settles every exchange of a call when the call ends, however it ends: from then on the items' memory is the
/// caller's again.
struct Placed {
    exchanges: Vec<(Arc<Exchange>, Vec<usize>)>,
}

impl Drop for Placed {
    fn drop(&mut self) {
        let error = Error::new(ErrorCode::DeadlineExceeded, "the call was dropped");
        for (exchange, _) in &self.exchanges {
            match &**exchange {
                Exchange::Read(read) => drop(read.settle(&error)),
                Exchange::Write(write) => drop(write.settle(&error)),
            }
        }
    }
}

impl TcpEngine {
    /// An engine without connections.
    pub fn new(options: TcpOptions) -> TcpEngine {
        let identity = Mutex::new(options.identity);
        let threads = IoThreads::start("tp-data", options.io_threads).map(Arc::new);
        let options = Arc::new(options);
        let shared = Shared { options, identity, threads, peers: Mutex::default(), stats: Arc::default() };
        TcpEngine { shared: Arc::new(shared) }
    }

    /// Who dials from now on. Another cluster or history closes every connection.
    pub fn set_identity(&self, identity: DataIdentity) {
        let before = std::mem::replace(&mut *self.shared.identity.lock(), identity);
        if (before.cluster, before.history) != (identity.cluster, identity.history) {
            self.close_all();
        }
    }

    /// Closes every connection; calls in flight fail, later ones dial anew.
    pub fn close_all(&self) {
        let error = Error::new(ErrorCode::Unavailable, "the data plane's connections were closed");
        let peers = std::mem::take(&mut *self.shared.peers.lock());
        peers.values().for_each(|peer| peer.close(&error));
    }

    fn peer(&self, address: &Address) -> Arc<Peer> {
        let mut peers = self.shared.peers.lock();
        if let Some(peer) = peers.get(address) {
            return peer.clone();
        }
        if peers.len() >= self.shared.options.peers_max {
            peers.retain(|_, peer| !peer.is_idle());
        }
        let peer = Peer::new(address.clone());
        peers.insert(address.clone(), peer.clone());
        peer
    }

    /// Sends frames and waits for their outcomes.
    async fn exchange<T: Piece>(
        &self,
        address: &Address,
        items: Vec<(usize, T)>,
        placed: &mut Placed,
        place: impl Fn(Vec<T>) -> (Exchange, oneshot::Receiver<()>),
    ) -> Result<(), Error> {
        if items.is_empty() {
            return Ok(());
        }
        let total = items.iter().fold(0u64, |sum, (_, item)| sum.saturating_add(item.length()));
        let options = &self.shared.options;
        let wanted = if total >= options.stripe_bytes_min { options.stripes.max(1) } else { 1 };
        let threads = self.shared.threads.as_ref().map_err(Error::clone)?;
        let identity = *self.shared.identity.lock();
        let peer = self.peer(address);
        let stats = &self.shared.stats;
        let is_small = wanted == 1 && total <= options.near_bytes_max;
        let near = if is_small { peer.near(options, identity, stats) } else { None };
        let mut stripes = match near {
            Some(near) => vec![near],
            None => peer.connections(wanted, options, identity, threads, stats).await?,
        };
        stripes.sort_by_key(|connection| connection.pending_bytes());
        stripes.truncate(wanted);
        let frames = frames::cut(items, stripes.len());
        let mut outcomes = Vec::with_capacity(frames.len());
        let mut routes: Vec<(Arc<Connection>, Arc<Exchange>)> = Vec::with_capacity(frames.len());
        for Frame { stripe, items, indices } in frames {
            let (exchange, outcome) = place(items);
            let exchange = Arc::new(exchange);
            placed.exchanges.push((exchange.clone(), indices));
            outcomes.push(outcome);
            routes.push((stripes[stripe].clone(), exchange));
        }
        for (connection, exchange) in routes {
            connection.submit(exchange).await;
        }
        for outcome in outcomes {
            // An error means that the exchange ended without word, which settling turns into results.
            let _ended = outcome.await;
        }
        Ok(())
    }

    async fn read_batch(&self, peer: &Address, items: Vec<ReadItem>, deadline: Instant) -> Vec<Result<(), Error>> {
        let mut results: Vec<Result<(), Error>> = vec![Ok(()); items.len()];
        let mut valid = Vec::with_capacity(items.len());
        for (index, item) in items.into_iter().enumerate() {
            let local = item.into.iter().map(|part| part.len() as u64).sum();
            match check_item(item.access.length, item.access.offset, local) {
                Ok(()) => valid.push((index, item)),
                Err(error) => results[index] = Err(error),
            }
        }
        let sent: Vec<usize> = valid.iter().map(|(index, _)| *index).collect();
        let mut placed = Placed { exchanges: Vec::new() };
        let deadline = tokio::time::Instant::from_std(deadline);
        let place = |items| {
            let (exchange, outcome) = ReadExchange::new(items, deadline);
            (Exchange::Read(exchange), outcome)
        };
        let end = timeout_at(deadline, self.exchange(peer, valid, &mut placed, place)).await;
        let error = match end {
            Ok(Err(error)) => error,
            _ => Error::new(ErrorCode::DeadlineExceeded, format!("no answer from {peer} by the deadline")),
        };
        if placed.exchanges.is_empty() {
            sent.iter().for_each(|&index| results[index] = Err(error.clone()));
        }
        for (exchange, indices) in std::mem::take(&mut placed.exchanges) {
            let Exchange::Read(read) = &*exchange else { unreachable!("placed by this call") };
            for (index, result) in indices.into_iter().zip(read.settle(&error)) {
                if results[index].is_ok() {
                    results[index] = result;
                }
            }
        }
        let failed = results.iter().filter(|result| result.is_err()).count() as u64;
        Stats::add(&self.shared.stats.item_errors, failed);
        Stats::add(&self.shared.stats.reads, results.len() as u64 - failed);
        results
    }

    async fn write_batch(
        &self,
        peer: &Address,
        items: Vec<WriteItem>,
        deadline: Instant,
    ) -> Vec<Result<WriteReply, WriteError>> {
        let mut results: Vec<Option<Result<WriteReply, WriteError>>> = Vec::new();
        results.resize(items.len(), None);
        let mut valid = Vec::with_capacity(items.len());
        for (index, item) in items.into_iter().enumerate() {
            let local = item.from.iter().map(|part| part.len() as u64).sum();
            match check_item(item.access.length, 0, local) {
                Ok(()) => valid.push((index, item)),
                Err(error) => results[index] = Some(Err(WriteError::unclean(error))),
            }
        }
        let mut placed = Placed { exchanges: Vec::new() };
        let deadline = tokio::time::Instant::from_std(deadline);
        let place = |items| {
            let (exchange, outcome) = WriteExchange::new(items, deadline);
            (Exchange::Write(exchange), outcome)
        };
        let end = timeout_at(deadline, self.exchange(peer, valid, &mut placed, place)).await;
        let error = match end {
            Ok(Err(error)) => error,
            _ => Error::new(ErrorCode::DeadlineExceeded, format!("no answer from {peer} by the deadline")),
        };
        for (exchange, indices) in std::mem::take(&mut placed.exchanges) {
            let Exchange::Write(write) = &*exchange else { unreachable!("placed by this call") };
            for (index, result) in indices.into_iter().zip(write.settle(&error)) {
                results[index] = Some(result);
            }
        }
        let fill = |result: Option<_>| result.unwrap_or_else(|| Err(WriteError::unclean(error.clone())));
        let results: Vec<Result<WriteReply, WriteError>> = results.into_iter().map(fill).collect();
        let failed = results.iter().filter(|result| result.is_err()).count() as u64;
        Stats::add(&self.shared.stats.item_errors, failed);
        Stats::add(&self.shared.stats.writes, results.len() as u64 - failed);
        results
    }
}

fn check_item(length: u64, offset: u64, local: u64) -> Result<(), Error> {
    let invalid = |what| Err(Error::new(ErrorCode::InvalidParams, what));
    if length != local {
        return invalid(format!("item of {length} bytes with {local} bytes of local memory"));
    }
    if length > ITEM_BYTES_MAX {
        return invalid(format!("item of {length} bytes; {ITEM_BYTES_MAX} are taken"));
    }
    if offset.checked_add(length).is_none() {
        return invalid(format!("item of {length} bytes at {offset} ends beyond 2^64"));
    }
    Ok(())
}

impl Engine for TcpEngine {
    fn read<'a>(
        &'a self,
        peer: &'a Address,
        items: Vec<ReadItem>,
        deadline: Instant,
    ) -> BoxFuture<'a, Vec<Result<(), Error>>> {
        self.read_batch(peer, items, deadline).boxed()
    }

    fn write<'a>(
        &'a self,
        peer: &'a Address,
        items: Vec<WriteItem>,
        deadline: Instant,
    ) -> BoxFuture<'a, Vec<Result<WriteReply, WriteError>>> {
        self.write_batch(peer, items, deadline).boxed()
    }

    fn name(&self) -> &'static str {
        "tcp"
    }

    fn stats(&self) -> StatsSnapshot {
        self.shared.stats.snapshot()
    }
}
