//! Copies under way: replicas that a datanode makes from another replica of the same object (N2).

use super::objects::SegmentSlot;
use super::op::TaskId;
use std::collections::{BTreeMap, BTreeSet};
use tidepool_proto::{LogTime, NodeId, ObjectId, ReplicaId};

/// One replica being made.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct OpenCopy {
    pub(super) object: ObjectId,
    /// Set: the replica that goes when the copy is there (a move).
    pub(super) instead_of: Option<ReplicaId>,
    pub(super) segment: SegmentSlot,
    /// Owner of the segment: who makes it.
    pub(super) node: NodeId,
    pub(super) offset: u64,
    pub(super) bytes: u64,
    pub(super) started: LogTime,
    /// The task it is part of; 0: none, the leader heals or adds.
    pub(super) task: TaskId,
}

/// All of them, by the replica to be (which is by when they started), and by object, task and node.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub(super) struct Copies {
    pub(super) by_replica: BTreeMap<ReplicaId, OpenCopy>,
    by_object: BTreeSet<(ObjectId, ReplicaId)>,
    by_task: BTreeSet<(TaskId, ReplicaId)>,
    by_node: BTreeSet<(NodeId, ReplicaId)>,
}

/// The part of an index that belongs to one.
fn range<K: Copy + Ord>(
    index: &BTreeSet<(K, ReplicaId)>,
    of: K,
    after: ReplicaId,
) -> impl Iterator<Item = ReplicaId> + '_ {
    let from = (of, ReplicaId(after.0.saturating_add(1)));
    index.range(from..=(of, ReplicaId(u64::MAX))).map(|(_, replica)| *replica)
}

impl Copies {
    pub(super) fn insert(&mut self, replica: ReplicaId, copy: OpenCopy) {
        assert!(self.by_replica.insert(replica, copy).is_none(), "copy {replica} starts twice");
        self.by_object.insert((copy.object, replica));
        self.by_task.insert((copy.task, replica));
        self.by_node.insert((copy.node, replica));
    }

    pub(super) fn remove(&mut self, replica: ReplicaId) -> Option<OpenCopy> {
        let copy = self.by_replica.remove(&replica)?;
        self.by_object.remove(&(copy.object, replica));
        self.by_task.remove(&(copy.task, replica));
        self.by_node.remove(&(copy.node, replica));
        Some(copy)
    }

    fn named(&self, replicas: impl Iterator<Item = ReplicaId>) -> impl Iterator<Item = (ReplicaId, &OpenCopy)> {
        replicas.map(|replica| (replica, &self.by_replica[&replica]))
    }

    /// Copies of an object.
    pub(super) fn of(&self, object: ObjectId) -> impl Iterator<Item = (ReplicaId, &OpenCopy)> {
        self.named(range(&self.by_object, object, ReplicaId(0)))
    }

    /// Copies that are part of a task.
    pub(super) fn of_task(&self, task: TaskId) -> impl Iterator<Item = (ReplicaId, &OpenCopy)> {
        self.named(range(&self.by_task, task, ReplicaId(0)))
    }

    /// Copies that a node makes, after a cursor.
    pub(super) fn to_node(&self, node: NodeId, after: ReplicaId) -> impl Iterator<Item = (ReplicaId, &OpenCopy)> {
        self.named(range(&self.by_node, node, after))
    }

    /// Copies into a segment of a node.
    pub(super) fn to_segment(&self, node: NodeId, slot: SegmentSlot) -> Vec<ReplicaId> {
        let to_node = self.to_node(node, ReplicaId(0));
        to_node.filter(|(_, copy)| copy.segment == slot).map(|(replica, _)| replica).collect()
    }

    /// Whether the indexes are those of the copies.
    pub(super) fn indexes_agree(&self) -> bool {
        let copies = || self.by_replica.iter();
        self.by_object == copies().map(|(&replica, copy)| (copy.object, replica)).collect()
            && self.by_task == copies().map(|(&replica, copy)| (copy.task, replica)).collect()
            && self.by_node == copies().map(|(&replica, copy)| (copy.node, replica)).collect()
    }
}
