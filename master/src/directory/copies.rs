//! Copies under way: replicas that a datanode makes from another replica of the same object (N2).

use super::objects::SegmentSlot;
use super::op::TaskId;
use std::collections::{BTreeMap, BTreeSet};
use tidepool_proto::{LogTime, ObjectId, ReplicaId};

/// One replica being made.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct OpenCopy {
    pub(super) object: ObjectId,
    /// Set: the replica that goes when the copy is there (a move).
    pub(super) instead_of: Option<ReplicaId>,
    pub(super) segment: SegmentSlot,
    pub(super) offset: u64,
    pub(super) bytes: u64,
    pub(super) started: LogTime,
    /// The task it is part of; 0: none, the leader heals.
    pub(super) task: TaskId,
}

/// All of them, by the replica to be and by object.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub(super) struct Copies {
    pub(super) by_replica: BTreeMap<ReplicaId, OpenCopy>,
    by_object: BTreeSet<(ObjectId, ReplicaId)>,
}

impl Copies {
    pub(super) fn insert(&mut self, replica: ReplicaId, copy: OpenCopy) {
        assert!(self.by_replica.insert(replica, copy).is_none(), "copy {replica} starts twice");
        self.by_object.insert((copy.object, replica));
    }

    pub(super) fn remove(&mut self, replica: ReplicaId) -> Option<OpenCopy> {
        let copy = self.by_replica.remove(&replica)?;
        self.by_object.remove(&(copy.object, replica));
        Some(copy)
    }

    /// Copies of an object.
    pub(super) fn of(&self, object: ObjectId) -> impl Iterator<Item = (ReplicaId, &OpenCopy)> {
        let range = (object, ReplicaId(0))..=(object, ReplicaId(u64::MAX));
        self.by_object.range(range).map(|(_, replica)| (*replica, &self.by_replica[replica]))
    }

    /// Whether the index by object is that of the copies.
    pub(super) fn index_agrees(&self) -> bool {
        self.by_object == self.by_replica.iter().map(|(&replica, copy)| (copy.object, replica)).collect()
    }

    /// Copies into a segment. Walks all of them; there are few.
    pub(super) fn to_segment(&self, slot: SegmentSlot) -> Vec<ReplicaId> {
        self.by_replica.iter().filter(|(_, copy)| copy.segment == slot).map(|(&replica, _)| replica).collect()
    }
}
