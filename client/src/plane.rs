//! The data plane as the client uses it: an engine for the present history, and how long a node is waited for.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tidepool_proto::{ClusterId, History};
use tidepool_transport::Engine;
use tidepool_transport::tcp::{DataIdentity, TcpEngine, TcpOptions};

use crate::deadline::Deadline;

/// How long a node may take for a small transfer before another is tried.
const PATIENCE: Duration = Duration::from_millis(300);
/// Slowest rate of a node that is still waited for when there is another.
const RATE_MIN_BYTES_PER_S: u64 = 16 << 20;
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
    present: Mutex<Option<(ClusterId, History, Arc<dyn Engine>)>>,
}

impl Plane {
    pub(crate) fn new(factory: EngineFactory) -> Plane {
        Plane { factory, present: Mutex::new(None) }
    }

    /// The engine for a history; another history's connections are dropped (I3).
    pub(crate) fn engine(&self, cluster: ClusterId, history: History) -> Arc<dyn Engine> {
        let mut present = self.present.lock();
        match present.as_ref() {
            Some((of, life, engine)) if (*of, *life) == (cluster, history) => engine.clone(),
            _ => {
                let engine = (self.factory.0)(DataIdentity { cluster, history, ..DataIdentity::default() });
                *present = Some((cluster, history, engine.clone()));
                engine
            }
        }
    }

    /// The engine in use, for probes; None before the first transfer.
    pub(crate) fn present(&self) -> Option<Arc<dyn Engine>> {
        self.present.lock().as_ref().map(|(_, _, engine)| engine.clone())
    }
}

/// When to give up on a node that is to move so many bytes, while another could be tried.
pub(crate) fn patience(deadline: Deadline, bytes: u64) -> Deadline {
    deadline.within(PATIENCE + Duration::from_millis(bytes.saturating_mul(1000) / RATE_MIN_BYTES_PER_S))
}
