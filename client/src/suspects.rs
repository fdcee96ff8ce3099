//! Datanodes that failed this client: not asked until a probe finds them well (R3, user report 50).
//!
//! The set is this client's own. What it holds is told to the leader with every exist and locate, so that nothing is
//! reported present that this client could not read (LISTED-IS-READABLE).

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use hashbrown::HashMap;
use parking_lot::Mutex;
use tidepool_proto::{Address, Error, ErrorCode};
use tidepool_transport::{Buffer, Engine, ReadAccess, ReadItem};

use crate::metrics::Metrics;
use crate::plane::Plane;

/// Suspects remembered; beyond it the oldest is forgotten.
const SUSPECTS_MAX: usize = 256;
/// Time a probe may take.
const PROBE_MAX: Duration = Duration::from_millis(500);
/// First and longest pause between probes. The first probe is sent at once: a false alarm heals in a round trip.
const PROBE_PAUSE_FIRST: Duration = Duration::from_millis(50);
const PROBE_PAUSE_MAX: Duration = Duration::from_secs(2);
/// A node that fails probes for so long is forgotten: the directory has dropped it, or the next call finds out.
const FORGET_AFTER: Duration = Duration::from_secs(600);
/// A transfer that ran into a deadline shorter than this says nothing about its node.
const TELLING_WAIT: Duration = Duration::from_millis(20);

/// The suspect datanodes of one client.
pub(crate) struct Suspects {
    plane: Arc<Plane>,
    metrics: Arc<Metrics>,
    /// Mirrors the size of the map, so that the usual case, nobody, takes no lock.
    count: AtomicUsize,
    nodes: Mutex<HashMap<u64, Suspect>>,
}

struct Suspect {
    since: Instant,
    /// Tells this suspicion from a later one of the same node.
    serial: u64,
}

impl Suspects {
    pub(crate) fn new(plane: Arc<Plane>, metrics: Arc<Metrics>) -> Arc<Suspects> {
        Arc::new(Suspects { plane, metrics, count: AtomicUsize::new(0), nodes: Mutex::default() })
    }

    /// Whether a failure of a transfer that took `took` says that the node cannot be reached.
    pub(crate) fn is_telling(error: &Error, took: Duration) -> bool {
        match error.code() {
            ErrorCode::Unavailable | ErrorCode::TransferFailed | ErrorCode::WrongCluster => true,
            ErrorCode::DeadlineExceeded => took >= TELLING_WAIT,
            _ => false,
        }
    }

    /// Whether a transfer that failed so was one that its node did not answer, rather than refuse it.
    pub(crate) fn kept_waiting(error: &Error, took: Duration) -> bool {
        Suspects::is_telling(error, took) && took >= TELLING_WAIT
    }

    /// Forgets every node: in another history their numbers may name others.
    pub(crate) fn forget_all(&self) {
        let mut nodes = self.nodes.lock();
        nodes.clear();
        self.count.store(0, Ordering::Relaxed);
    }

    /// Suspects a node, and probes it in the background until it is well.
    pub(crate) fn suspect(self: &Arc<Self>, node: u64, address: &Address, error: &Error) {
        static SERIALS: AtomicU64 = AtomicU64::new(1);
        let serial = SERIALS.fetch_add(1, Ordering::Relaxed);
        {
            let mut nodes = self.nodes.lock();
            if nodes.contains_key(&node) {
                return;
            }
            if nodes.len() >= SUSPECTS_MAX {
                let oldest = nodes.iter().min_by_key(|(_, suspect)| suspect.serial).map(|(&id, _)| id);
                oldest.and_then(|id| nodes.remove(&id));
            }
            nodes.insert(node, Suspect { since: Instant::now(), serial });
            self.count.store(nodes.len(), Ordering::Release);
        }
        self.metrics.nodes_suspected.add(1);
        tracing::warn!(node, %address, %error, "datanode is suspect");
        tokio::spawn(probe(Arc::downgrade(self), node, serial, address.clone()));
    }

    /// A transfer succeeded: the node is well.
    pub(crate) fn clear(&self, node: u64) {
        if self.remove(node) {
            self.metrics.nodes_healed.add(1);
        }
    }

    fn remove(&self, node: u64) -> bool {
        if self.is_empty() {
            return false;
        }
        let mut nodes = self.nodes.lock();
        let removed = nodes.remove(&node).is_some();
        self.count.store(nodes.len(), Ordering::Release);
        removed
    }

    fn is_empty(&self) -> bool {
        self.count.load(Ordering::Acquire) == 0
    }

    /// Whether a node is suspect.
    pub(crate) fn contains(&self, node: u64) -> bool {
        !self.is_empty() && self.nodes.lock().contains_key(&node)
    }

    /// All of them, in order.
    pub(crate) fn list(&self) -> Vec<u64> {
        if self.is_empty() {
            return Vec::new();
        }
        let nodes = self.nodes.lock();
        let mut list: Vec<u64> = nodes.keys().copied().collect();
        list.sort_unstable();
        list
    }

    /// Since when, if this suspicion still stands.
    fn standing(&self, node: u64, serial: u64) -> Option<Instant> {
        self.nodes.lock().get(&node).filter(|s| s.serial == serial).map(|s| s.since)
    }
}

/// Asks for a byte that no grant allows: any refusal by the datanode shows that it serves.
async fn probe(suspects: Weak<Suspects>, node: u64, serial: u64, address: Address) {
    let mut pause = PROBE_PAUSE_FIRST;
    loop {
        {
            let Some(suspects) = suspects.upgrade() else { return };
            let Some(since) = suspects.standing(node, serial) else { return };
            if since.elapsed() > FORGET_AFTER {
                suspects.remove(node);
                return;
            }
            let started = Instant::now();
            let Some(engine) = suspects.plane.present() else { return };
            if answers(engine.as_ref(), &address).await {
                tracing::info!(node, %address, probe_ms = started.elapsed().as_millis() as u64, "datanode is well again");
                suspects.clear(node);
                return;
            }
        }
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(PROBE_PAUSE_MAX);
    }
}

async fn answers(engine: &dyn Engine, address: &Address) -> bool {
    let (_buffer, memory) = Buffer::zeroed(1);
    let access = ReadAccess { length: 1, ..ReadAccess::default() };
    let deadline = Instant::now() + PROBE_MAX;
    let results = engine.read(address, vec![ReadItem { access, into: vec![memory] }], deadline).await;
    match results.first() {
        Some(Err(error)) => !matches!(
            error.code(),
            ErrorCode::Unavailable | ErrorCode::TransferFailed | ErrorCode::WrongCluster | ErrorCode::DeadlineExceeded
        ),
        Some(Ok(())) => true,
        None => false,
    }
}
