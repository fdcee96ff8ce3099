//! When each datanode was last heard in this term, and what it has to be told (N1, R3).

use std::collections::{HashMap, VecDeque};
use std::time::Duration;

use parking_lot::Mutex;
use tidepool_proto::clock::BootInstant;
use tidepool_proto::{NodeId, v1};
use tidepool_raft::rt::watch;

use super::options::VERIFIES_PER_NODE_MAX;

/// What the leader knows of the datanodes beside the directory.
pub struct NodeTable {
    nodes: Mutex<HashMap<NodeId, Node>>,
    /// Silence counts from here at the earliest: from taking office, or from when this host woke up.
    since: Mutex<BootInstant>,
    looked: Mutex<BootInstant>,
}

#[derive(Default)]
struct Node {
    heard: Option<BootInstant>,
    verify: VecDeque<v1::VerifyReplica>,
    /// Grows when there is something to tell that should not wait for a beat.
    orders: watch::Sender<u64>,
}

impl NodeTable {
    /// Nobody was heard yet; silence counts from now, so that a failover expires no healthy node.
    pub fn new() -> NodeTable {
        NodeTable {
            nodes: Mutex::new(HashMap::new()),
            since: Mutex::new(BootInstant::now()),
            looked: Mutex::new(BootInstant::now()),
        }
    }

    /// A beat or registration of this node arrived.
    pub fn heard(&self, node: NodeId) {
        self.nodes.lock().entry(node).or_default().heard = Some(BootInstant::now());
    }

    /// Whether it was heard in this term: only then may a suspect node be listed again.
    pub fn was_heard(&self, node: NodeId) -> bool {
        self.nodes.lock().get(&node).is_some_and(|n| n.heard.is_some())
    }

    /// How long it has been silent, counted from taking office at the earliest.
    pub fn silence(&self, node: NodeId) -> Duration {
        let heard = self.nodes.lock().get(&node).and_then(|n| n.heard);
        let since = *self.since.lock();
        heard.map_or(since, |heard| heard.max(since)).elapsed()
    }

    /// Called at every look. When the last one is longer ago than `gap_max` this process was stopped or its host slept:
    /// the silence was its own, and everybody's is counted anew.
    pub fn look(&self, gap_max: Duration) {
        let now = BootInstant::now();
        let before = std::mem::replace(&mut *self.looked.lock(), now);
        if now - before > gap_max {
            *self.since.lock() = now;
        }
    }

    /// There is something to tell the node at once.
    pub fn wake(&self, node: NodeId) {
        self.nodes.lock().entry(node).or_default().orders.send_modify(|orders| *orders += 1);
    }

    /// Sees when there is.
    pub fn orders(&self, node: NodeId) -> watch::Receiver<u64> {
        self.nodes.lock().entry(node).or_default().orders.subscribe()
    }

    /// Asks the node to verify an extent in place. Returns false when its queue is full or already holds the replica.
    pub fn ask_to_verify(&self, node: NodeId, replica: v1::VerifyReplica) -> bool {
        let mut nodes = self.nodes.lock();
        let queue = &mut nodes.entry(node).or_default().verify;
        if queue.len() >= VERIFIES_PER_NODE_MAX || queue.iter().any(|v| v.replica_id == replica.replica_id) {
            return false;
        }
        queue.push_back(replica);
        true
    }

    /// Takes up to `limit` waiting verifications for a beat's answer.
    pub fn take_verifications(&self, node: NodeId, limit: usize) -> Vec<v1::VerifyReplica> {
        let mut nodes = self.nodes.lock();
        let Some(entry) = nodes.get_mut(&node) else { return Vec::new() };
        let count = entry.verify.len().min(limit);
        entry.verify.drain(..count).collect()
    }
}

impl Default for NodeTable {
    fn default() -> Self {
        NodeTable::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn silence_counts_from_taking_office_for_a_node_not_heard_yet() {
        let table = NodeTable::new();
        assert!(table.silence(NodeId(1)) < Duration::from_secs(60) && !table.was_heard(NodeId(1)));
        table.heard(NodeId(1));
        assert!(table.was_heard(NodeId(1)));
    }

    /// With `look` doing nothing, every datanode was forgotten after the host slept.
    #[test]
    fn a_stop_of_this_process_is_not_the_datanodes_silence() {
        let table = NodeTable::new();
        table.heard(NodeId(1));
        let long_ago = BootInstant::now();
        while long_ago.elapsed() < Duration::from_millis(30) {
            std::hint::spin_loop();
        }
        assert!(table.silence(NodeId(1)) >= Duration::from_millis(30));
        table.look(Duration::from_millis(20));
        assert!(table.silence(NodeId(1)) < Duration::from_millis(30));
    }

    #[test]
    fn a_replica_is_verified_once_however_many_readers_report_it() {
        let table = NodeTable::new();
        let replica = v1::VerifyReplica { replica_id: 7, ..Default::default() };
        assert!(table.ask_to_verify(NodeId(1), replica));
        assert!(!table.ask_to_verify(NodeId(1), replica));
        assert_eq!(table.take_verifications(NodeId(1), 10).len(), 1);
        assert!(table.take_verifications(NodeId(1), 10).is_empty());
    }

    #[test]
    fn reports_are_bounded_per_node() {
        let table = NodeTable::new();
        for id in 0..2 * VERIFIES_PER_NODE_MAX as u64 {
            table.ask_to_verify(NodeId(1), v1::VerifyReplica { replica_id: id, ..Default::default() });
        }
        assert_eq!(table.take_verifications(NodeId(1), usize::MAX).len(), VERIFIES_PER_NODE_MAX);
    }
}
