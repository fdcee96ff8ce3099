//! The handle: every public call.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use tidepool_proto::{Address, Error, ErrorCode, NodeId};

use crate::metrics::{Metrics, MetricsSnapshot};
use crate::options::ClientOptions;
use crate::put::{PutItem, PutOptions, PutOutcome};
use crate::remove::RemoveMode;
use crate::stat::{ListPage, ObjectStat};

/// A connection to one Tidepool cluster; cheap to clone, all clones share one stream to the leader.
#[derive(Clone)]
pub struct Client {
    inner: Arc<Inner>,
}

struct Inner {
    metrics: Metrics,
}

fn pending() -> Error {
    Error::new(ErrorCode::NotSupported, "not in this build")
}

impl Client {
    /// Finds the leader and opens a session. Fails when no leader answered within `connect_deadline`.
    pub async fn connect(options: ClientOptions) -> Result<Client, Error> {
        if options.masters.is_empty() {
            return Err(Error::new(ErrorCode::InvalidParams, "no master address given; set at least one"));
        }
        Ok(Client { inner: Arc::new(Inner { metrics: Metrics::default() }) })
    }

    /// Stores objects; one result per item, in order.
    pub async fn put_many(&self, items: Vec<PutItem>, _options: PutOptions) -> Vec<Result<PutOutcome, Error>> {
        items.iter().map(|_| Err(pending())).collect()
    }

    /// Stores one object.
    pub async fn put(
        &self,
        key: impl Into<Bytes>,
        value: impl Into<Bytes>,
        options: PutOptions,
    ) -> Result<PutOutcome, Error> {
        self.put_many(vec![PutItem::new(key, value)], options).await.remove(0)
    }

    /// Returns the verified payload of each key, in order. `deadline` None: the client's default.
    pub async fn get_many<K: AsRef<[u8]>>(&self, keys: &[K], _deadline: Option<Duration>) -> Vec<Result<Bytes, Error>> {
        keys.iter().map(|_| Err(pending())).collect()
    }

    /// Returns the verified payload of one key.
    pub async fn get(&self, key: impl AsRef<[u8]>, deadline: Option<Duration>) -> Result<Bytes, Error> {
        self.get_many(&[key], deadline).await.remove(0)
    }

    /// Whether each key is present and readable by this client. Grants read leases.
    pub async fn exist_many<K: AsRef<[u8]>>(&self, keys: &[K], _deadline: Option<Duration>) -> Vec<Result<bool, Error>> {
        keys.iter().map(|_| Err(pending())).collect()
    }

    /// Whether one key is present and readable by this client.
    pub async fn exist(&self, key: impl AsRef<[u8]>, deadline: Option<Duration>) -> Result<bool, Error> {
        self.exist_many(&[key], deadline).await.remove(0)
    }

    /// Where objects are; touches neither leases nor recency.
    pub async fn stat_many<K: AsRef<[u8]>>(
        &self,
        keys: &[K],
        _deadline: Option<Duration>,
    ) -> Vec<Result<ObjectStat, Error>> {
        keys.iter().map(|_| Err(pending())).collect()
    }

    /// Where one object is.
    pub async fn stat(&self, key: impl AsRef<[u8]>, deadline: Option<Duration>) -> Result<ObjectStat, Error> {
        self.stat_many(&[key], deadline).await.remove(0)
    }

    /// Removes objects; one result per key, in order. A key that is not there is OBJECT_NOT_FOUND.
    pub async fn remove_many<K: AsRef<[u8]>>(
        &self,
        keys: &[K],
        _mode: RemoveMode,
        _deadline: Option<Duration>,
    ) -> Vec<Result<(), Error>> {
        keys.iter().map(|_| Err(pending())).collect()
    }

    /// Removes one object.
    pub async fn remove(
        &self,
        key: impl AsRef<[u8]>,
        mode: RemoveMode,
        deadline: Option<Duration>,
    ) -> Result<(), Error> {
        self.remove_many(&[key], mode, deadline).await.remove(0)
    }

    /// One page of keys that start with `prefix`, after `after`, in key order; `limit` 0 is the server's page size.
    pub async fn list(
        &self,
        _prefix: &[u8],
        _limit: u32,
        _after: &[u8],
        _deadline: Option<Duration>,
    ) -> Result<ListPage, Error> {
        Err(pending())
    }

    /// Gives one lease of each object back.
    pub async fn release_leases(&self, _object_ids: &[u64], _deadline: Option<Duration>) -> Result<(), Error> {
        Err(pending())
    }

    /// Master that leads now, as far as this client knows.
    pub fn leader(&self) -> Option<Address> {
        None
    }

    /// Every master this client knows: configured and learned.
    pub fn members(&self) -> Vec<Address> {
        Vec::new()
    }

    /// Datanodes this client does not ask at the moment, because they failed it.
    pub fn suspects(&self) -> Vec<NodeId> {
        Vec::new()
    }

    /// Counters.
    pub fn metrics(&self) -> MetricsSnapshot {
        self.inner.metrics.snapshot()
    }
}
