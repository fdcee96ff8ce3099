//! The handle: every public call.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use rand::RngCore;
use tidepool_proto::{Address, Error, ErrorCode, NodeId};

use crate::abandoned::Abandoned;
use crate::call::Caller;
use crate::deadline::Deadline;
use crate::get::{GetInto, GetRange, GetRangeInto, Getter, Wish};
use crate::landing::{Delivered, Destination};
use crate::lookup::Lookup;
use crate::matching::{Matcher, Matching, Removed};
use crate::metrics::{Metrics, MetricsSnapshot};
use crate::options::ClientOptions;
use crate::plane::Plane;
use crate::put::{PutItem, PutOptions, PutOutcome, Putter, SoftPin};
use crate::quorum::{Quorum, QuorumSettings};
use crate::release::Releaser;
use crate::remove::{RemoveMode, Remover};
use crate::sequence::Sequences;
use crate::stat::{ListFilter, ListPage, ObjectStat};
use crate::suspects::Suspects;
use crate::unreadable::Unreadable;
use crate::writer::Writer;

/// A connection to one Tidepool cluster; cheap to clone, all clones share one stream to the leader.
///
/// Every call may be dropped at any time: what it had begun is undone or left to the masters' timeouts, and memory
/// that was lent to it is touched no more.
#[derive(Clone)]
pub struct Client {
    inner: Arc<Inner>,
}

struct Inner {
    deadline: Duration,
    quorum: Arc<Quorum>,
    suspects: Arc<Suspects>,
    metrics: Arc<Metrics>,
    putter: Putter,
    getter: Getter,
    lookup: Lookup,
    remover: Remover,
    matcher: Matcher,
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.quorum.stop();
    }
}

impl Client {
    /// Finds the leader and opens a session. Fails when no leader answered within `connect_deadline`.
    pub async fn connect(options: ClientOptions) -> Result<Client, Error> {
        if options.masters.is_empty() {
            return Err(Error::new(ErrorCode::InvalidParams, "no master address given; set at least one"));
        }
        let client = Client { inner: Arc::new(Inner::start(options.clone())) };
        client.inner.quorum.first_leader(Deadline::after(options.connect_deadline)).await?;
        Ok(client)
    }

    fn deadline(&self, deadline: Option<Duration>) -> Deadline {
        Deadline::after(deadline.unwrap_or(self.inner.deadline))
    }

    /// Stores objects; one result per item, in order.
    pub async fn put_many(&self, items: Vec<PutItem>, options: PutOptions) -> Vec<Result<PutOutcome, Error>> {
        let deadline = self.deadline(options.deadline);
        self.inner.putter.put_many(items, &options, deadline).await
    }

    /// Stores one object.
    pub async fn put(
        &self,
        key: impl Into<Bytes>,
        value: impl Into<Bytes>,
        options: PutOptions,
    ) -> Result<PutOutcome, Error> {
        only(self.put_many(vec![PutItem::new(key, value)], options).await)
    }

    /// Returns the verified payload of each key, in order. `deadline` None: the client's default.
    pub async fn get_many<K: AsRef<[u8]>>(&self, keys: &[K], deadline: Option<Duration>) -> Vec<Result<Bytes, Error>> {
        let wishes = keys.iter().map(|_| Destination::Allocate.into()).collect();
        let results = self.inner.getter.get_many(keys, wishes, self.deadline(deadline)).await;
        results.into_iter().map(|result| result.and_then(bytes_of)).collect()
    }

    /// Returns the verified payload of one key.
    pub async fn get(&self, key: impl AsRef<[u8]>, deadline: Option<Duration>) -> Result<Bytes, Error> {
        only(self.get_many(&[key], deadline).await)
    }

    /// Fills the caller's memory with the verified payload of each key; returns payload bytes, in order. A key that
    /// is not there is an error, never 0 (user report 46).
    pub async fn get_into_many(&self, items: Vec<GetInto>, deadline: Option<Duration>) -> Vec<Result<u64, Error>> {
        let (keys, wishes): (Vec<Bytes>, Vec<Wish>) =
            items.into_iter().map(|item| (item.key, Destination::Caller(item.into).into())).unzip();
        let results = self.inner.getter.get_many(&keys, wishes, self.deadline(deadline)).await;
        results.into_iter().map(|result| result.and_then(filled_of)).collect()
    }

    /// Returns parts of payloads, in order. What is read and verified is whole blocks of 64 KiB. A part that does not lie
    /// within its object is INVALID_PARAMS.
    pub async fn get_range_many(&self, items: Vec<GetRange>, deadline: Option<Duration>) -> Vec<Result<Bytes, Error>> {
        let wish = |item: GetRange| {
            let range = Some(item.offset..item.offset.saturating_add(item.length));
            (item.key, Wish { range, destination: Destination::Allocate })
        };
        let (keys, wishes): (Vec<Bytes>, Vec<Wish>) = items.into_iter().map(wish).unzip();
        let results = self.inner.getter.get_many(&keys, wishes, self.deadline(deadline)).await;
        results.into_iter().map(|result| result.and_then(bytes_of)).collect()
    }

    /// Returns a part of one payload.
    pub async fn get_range(&self, item: GetRange, deadline: Option<Duration>) -> Result<Bytes, Error> {
        only(self.get_range_many(vec![item], deadline).await)
    }

    /// Fills the caller's memory with parts of payloads; returns the bytes filled, in order.
    pub async fn get_range_into_many(
        &self,
        items: Vec<GetRangeInto>,
        deadline: Option<Duration>,
    ) -> Vec<Result<u64, Error>> {
        let wish = |item: GetRangeInto| {
            let length: u64 = item.into.iter().map(|part| part.len() as u64).sum();
            let range = Some(item.offset..item.offset.saturating_add(length));
            (item.key, Wish { range, destination: Destination::Caller(item.into) })
        };
        let (keys, wishes): (Vec<Bytes>, Vec<Wish>) = items.into_iter().map(wish).unzip();
        let results = self.inner.getter.get_many(&keys, wishes, self.deadline(deadline)).await;
        results.into_iter().map(|result| result.and_then(filled_of)).collect()
    }

    /// Whether each key is present and readable by this client. Grants read leases.
    pub async fn exist_many<K: AsRef<[u8]>>(&self, keys: &[K], deadline: Option<Duration>) -> Vec<Result<bool, Error>> {
        self.inner.lookup.exist_many(keys, self.deadline(deadline)).await
    }

    /// Whether one key is present and readable by this client.
    pub async fn exist(&self, key: impl AsRef<[u8]>, deadline: Option<Duration>) -> Result<bool, Error> {
        only(self.exist_many(&[key], deadline).await)
    }

    /// Where objects are; touches neither leases nor recency.
    pub async fn stat_many<K: AsRef<[u8]>>(
        &self,
        keys: &[K],
        deadline: Option<Duration>,
    ) -> Vec<Result<ObjectStat, Error>> {
        self.inner.lookup.stat_many(keys, self.deadline(deadline)).await
    }

    /// Where one object is.
    pub async fn stat(&self, key: impl AsRef<[u8]>, deadline: Option<Duration>) -> Result<ObjectStat, Error> {
        only(self.stat_many(&[key], deadline).await)
    }

    /// Removes objects; one result per key, in order. A key that is not there is OBJECT_NOT_FOUND.
    pub async fn remove_many<K: AsRef<[u8]>>(
        &self,
        keys: &[K],
        mode: RemoveMode,
        deadline: Option<Duration>,
    ) -> Vec<Result<(), Error>> {
        self.inner.remover.remove_many(keys, mode, self.deadline(deadline)).await
    }

    /// Removes one object.
    pub async fn remove(
        &self,
        key: impl AsRef<[u8]>,
        mode: RemoveMode,
        deadline: Option<Duration>,
    ) -> Result<(), Error> {
        only(self.remove_many(&[key], mode, deadline).await)
    }

    /// One page of keys that start with `prefix`, after `after`, in the order of the directory (by hash, stable); `limit` 0 is the server's page size.
    pub async fn list(
        &self,
        prefix: &[u8],
        limit: u32,
        after: &[u8],
        deadline: Option<Duration>,
    ) -> Result<ListPage, Error> {
        let matching = Matching { prefix: Bytes::copy_from_slice(prefix), regex: String::new() };
        self.list_matching(&ListFilter { matching, data_type: None }, limit, after, deadline).await
    }

    /// One page of the objects that a filter wants, after `after`, in the order of the directory.
    pub async fn list_matching(
        &self,
        filter: &ListFilter,
        limit: u32,
        after: &[u8],
        deadline: Option<Duration>,
    ) -> Result<ListPage, Error> {
        self.inner.lookup.list(filter, limit, after, self.deadline(deadline)).await
    }

    /// Removes what matches, after `after` in the order of the directory (None: all of it), until the end or the deadline.
    pub async fn remove_matching(
        &self,
        matching: &Matching,
        mode: RemoveMode,
        after: Option<Bytes>,
        deadline: Option<Duration>,
    ) -> Result<Removed, Error> {
        self.inner.matcher.remove(matching, mode, after, self.deadline(deadline)).await
    }

    /// Sets or ends the soft pin of each key.
    pub async fn pin_many<K: AsRef<[u8]>>(
        &self,
        keys: &[K],
        pin: SoftPin,
        deadline: Option<Duration>,
    ) -> Vec<Result<(), Error>> {
        self.inner.matcher.pin(keys, pin, self.deadline(deadline)).await
    }

    /// Removes the copies of each key on a segment ("": on all); false: it is leased, being put, or has none there.
    pub async fn clear_replicas<K: AsRef<[u8]>>(
        &self,
        keys: &[K],
        segment_name: &str,
        deadline: Option<Duration>,
    ) -> Vec<Result<bool, Error>> {
        self.inner.matcher.clear_replicas(keys, segment_name, self.deadline(deadline)).await
    }

    /// Master that leads now, as far as this client knows.
    pub fn leader(&self) -> Option<Address> {
        self.inner.quorum.leader_now().map(|leader| leader.link.address().clone())
    }

    /// Every master this client knows: configured and learned.
    pub fn members(&self) -> Vec<Address> {
        self.inner.quorum.members()
    }

    /// Datanodes this client does not ask at the moment, because they failed it.
    pub fn suspects(&self) -> Vec<NodeId> {
        self.inner.suspects.list().into_iter().map(NodeId).collect()
    }

    /// Counters.
    pub fn metrics(&self) -> MetricsSnapshot {
        self.inner.metrics.snapshot()
    }
}

impl Inner {
    fn start(options: ClientOptions) -> Inner {
        let metrics = Arc::new(Metrics::default());
        let mut client_uuid = [0u8; 16];
        rand::rng().fill_bytes(&mut client_uuid);
        let plane = Arc::new(Plane::new(options.engine));
        let suspects = Suspects::new(plane.clone(), metrics.clone());
        let unreadable = Arc::new(Unreadable::default());
        let (bygone_suspects, bygone_keys) = (suspects.clone(), unreadable.clone());
        let settings = QuorumSettings {
            new_history: Box::new(move || {
                bygone_suspects.forget_all();
                bygone_keys.forget_all();
            }),
            client_uuid,
            host_id: options.host_id.clone(),
            tenant: options.tenant.clone(),
            resolver: options.resolver,
            metrics: metrics.clone(),
        };
        let quorum = Quorum::start(settings, &options.masters);
        let caller = Arc::new(Caller::new(quorum.clone(), metrics.clone(), options.tenant));
        let sequences = Arc::new(Sequences::default());
        let writer = Writer {
            caller: caller.clone(),
            plane: plane.clone(),
            suspects: suspects.clone(),
            metrics: metrics.clone(),
        };
        Inner {
            deadline: options.deadline,
            putter: Putter {
                caller: caller.clone(),
                writer,
                abandoned: Abandoned::new(caller.clone()),
                suspects: suspects.clone(),
                unreadable: unreadable.clone(),
                metrics: metrics.clone(),
                sequences: sequences.clone(),
            },
            getter: Getter {
                caller: caller.clone(),
                plane,
                suspects: suspects.clone(),
                metrics: metrics.clone(),
                releaser: Releaser::new(caller.clone()),
                unreadable: unreadable.clone(),
                host_id: options.host_id,
            },
            lookup: Lookup { caller: caller.clone(), suspects: suspects.clone(), unreadable },
            remover: Remover::new(caller.clone(), sequences.clone()),
            matcher: Matcher { caller, sequences },
            quorum,
            suspects,
            metrics,
        }
    }
}

/// The result of a batch of one.
fn only<T>(mut results: Vec<Result<T, Error>>) -> Result<T, Error> {
    results.pop().unwrap_or_else(|| Err(Error::new(ErrorCode::Internal, "a call of one item had no result")))
}

fn bytes_of(delivered: Delivered) -> Result<Bytes, Error> {
    match delivered {
        Delivered::Bytes(bytes) => Ok(bytes),
        Delivered::Filled(_) => Err(Error::new(ErrorCode::Internal, "memory was filled that nobody gave")),
    }
}

fn filled_of(delivered: Delivered) -> Result<u64, Error> {
    match delivered {
        Delivered::Filled(length) => Ok(length),
        Delivered::Bytes(_) => Err(Error::new(ErrorCode::Internal, "the caller's memory was not used")),
    }
}
