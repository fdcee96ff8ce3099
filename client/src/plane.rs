//! The data plane as the client uses it: an engine for the present history, and how long a node is waited for.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tidepool_proto::{Address, ClusterId, Error, ErrorCode, History};
use tidepool_transport::tcp::{DataIdentity, TcpEngine, TcpOptions};
use tidepool_transport::{Engine, ReadItem, WriteError, WriteItem, WriteReply};

use crate::deadline::Deadline;

/// How long a node may take for a small transfer before another is tried.
const PATIENCE: Duration = Duration::from_millis(300);
/// Slowest rate of a node that is still waited for when there is another.
const RATE_MIN_BYTES_PER_S: u64 = 16 << 20;
/// An engine returns by its deadline; after this much more its future is dropped. Half of the allowance of a call.
const ENGINE_ALLOWANCE: Duration = Duration::from_millis(25);
/// Pauses between dials of a datanode. Short: one that is back must be used again soon.
const DIAL_PAUSE_MIN: Duration = Duration::from_millis(50);
const DIAL_PAUSE_MAX: Duration = Duration::from_secs(1);

/// Makes the engine for a cluster and history; the default makes the tcp engine.
#[derive(Clone)]
pub struct EngineFactory(Arc<dyn Fn(DataIdentity) -> Arc<dyn Engine> + Send + Sync>);

impl EngineFactory {
    /// From a function. It is called once per history.
    pub fn new(make: impl Fn(DataIdentity) -> Arc<dyn Engine> + Send + Sync + 'static) -> EngineFactory {
        EngineFactory(Arc::new(make))
    }
}

impl Default for EngineFactory {
    fn default() -> EngineFactory {
        EngineFactory::new(|identity| {
            let options =
                TcpOptions { backoff_min: DIAL_PAUSE_MIN, backoff_max: DIAL_PAUSE_MAX, ..TcpOptions::new(identity) };
            Arc::new(TcpEngine::new(options))
        })
    }
}

impl fmt::Debug for EngineFactory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("EngineFactory(..)")
    }
}

/// The engine of the present history.
pub(crate) struct Plane {
    factory: EngineFactory,
    present: Mutex<Option<Present>>,
}

struct Present {
    cluster: ClusterId,
    history: History,
    engine: Arc<dyn Engine>,
}

impl Plane {
    pub(crate) fn new(factory: EngineFactory) -> Plane {
        Plane { factory, present: Mutex::new(None) }
    }

    /// The engine for a history; another history's connections are dropped (I3).
    pub(crate) fn engine(&self, cluster: ClusterId, history: History) -> Arc<dyn Engine> {
        let mut present = self.present.lock();
        match present.as_ref() {
            Some(present) if (present.cluster, present.history) == (cluster, history) => present.engine.clone(),
            _ => {
                let engine = (self.factory.0)(DataIdentity { cluster, history, ..DataIdentity::default() });
                *present = Some(Present { cluster, history, engine: engine.clone() });
                engine
            }
        }
    }

    /// The engine in use, for probes; None before the first transfer.
    pub(crate) fn present(&self) -> Option<Arc<dyn Engine>> {
        self.present.lock().as_ref().map(|present| present.engine.clone())
    }
}

/// Reads through an engine, and ends even if the engine does not: dropping its future takes the memory back (R4).
pub(crate) async fn read(
    engine: &dyn Engine,
    peer: &Address,
    items: Vec<ReadItem>,
    until: Deadline,
) -> Vec<Result<(), Error>> {
    let count = items.len();
    let read = engine.read(peer, items, until.instant().into_std());
    match tokio::time::timeout_at(until.instant() + ENGINE_ALLOWANCE, read).await {
        Ok(results) => results,
        Err(_) => (0..count).map(|_| Err(overdue(engine, peer))).collect(),
    }
}

/// Writes through an engine; as [`read`].
pub(crate) async fn write(
    engine: &dyn Engine,
    peer: &Address,
    items: Vec<WriteItem>,
    until: Deadline,
) -> Vec<Result<WriteReply, WriteError>> {
    let count = items.len();
    let write = engine.write(peer, items, until.instant().into_std());
    match tokio::time::timeout_at(until.instant() + ENGINE_ALLOWANCE, write).await {
        Ok(results) => results,
        Err(_) => (0..count).map(|_| Err(WriteError::unclean(overdue(engine, peer)))).collect(),
    }
}

fn overdue(engine: &dyn Engine, peer: &Address) -> Error {
    let what = format!("the {} transfer with {peer} did not end by its deadline and was dropped", engine.name());
    Error::new(ErrorCode::DeadlineExceeded, what)
}

/// When to give up on a node that is to move so many bytes, while another could be tried.
pub(crate) fn patience(deadline: Deadline, bytes: u64) -> Deadline {
    deadline.within(PATIENCE + Duration::from_millis(bytes.saturating_mul(1000) / RATE_MIN_BYTES_PER_S))
}
