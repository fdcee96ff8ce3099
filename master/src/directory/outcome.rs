//! `Outcome`: what an op did, the same on every master.

use super::op::{SessionId, TaskId, TenantId};
use smallvec::SmallVec;
use tidepool_proto::{Error, Incarnation, LogTime, NodeId, ObjectId, ReplicaId, SegmentId};

/// A replica that a put may fill.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct GrantedReplica {
    /// Replica.
    pub replica: ReplicaId,
    /// Where it lies.
    pub segment: SegmentId,
    /// Owner of the segment.
    pub node: NodeId,
    /// The owner's life.
    pub incarnation: Incarnation,
    /// Bytes from the segment's start.
    pub offset: u64,
    /// Stored bytes: header, checksum table and payload.
    pub length: u64,
}

/// What PutStart granted.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Grant {
    /// The new object.
    pub object: ObjectId,
    /// Replicas to fill, at least one.
    pub replicas: SmallVec<[GrantedReplica; 2]>,
    /// Log time of the start: the grant may be preempted the discard timeout after it.
    pub started: LogTime,
    /// Whether this answers a retry with the first grant.
    pub repeated: bool,
    /// The open put that was preempted; its space waits for the datanodes' fences.
    pub preempted: Option<ObjectId>,
    /// The victims that were used; the others stay.
    pub evicted: Vec<ObjectId>,
}

/// What a key-named op did; recorded in the session, so a late duplicate gets the same answer and does nothing.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Answered {
    /// Remove.
    Removal(Removal),
    /// RemoveObjects: how many left the directory.
    Removed {
        /// Objects.
        objects: u64,
    },
    /// PutStart of an upsert: the grant's object.
    Upsert(ObjectId),
    /// ClearReplicas: whether any went.
    Cleared(bool),
}

/// What a removal did.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Removal {
    /// This object left the directory.
    Removed(ObjectId),
    /// The key named nothing.
    NotFound,
    /// The key's object is still being put.
    NotReady,
}

/// Result of one op.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Outcome {
    /// A bad op: refused, the state is as before (M1).
    Refused(Error),
    /// RegisterNode.
    Registered {
        /// Stable while the node is known.
        node: NodeId,
        /// This life.
        incarnation: Incarnation,
    },
    /// MountSegment.
    Mounted {
        /// Segment, new or as first answered.
        segment: SegmentId,
    },
    /// UnmountSegment, DropNode: what went with it.
    Dropped {
        /// Replicas whose space is gone.
        replicas: u64,
        /// Objects that had no other.
        objects: u64,
    },
    /// OpenSession.
    Opened {
        /// Session, new or as first answered.
        session: SessionId,
        /// Its floor: the client continues its sequence from here at least.
        floor: u64,
    },
    /// PutStart.
    Granted(Grant),
    /// PutEnd: the object is COMPLETE.
    Ended {
        /// Copies made.
        copies: u32,
        /// What it replaced, retired by the same op.
        replaced: Option<ObjectId>,
    },
    /// PutEnd that could not complete: the put was dropped, the error says why.
    PutDropped(Error),
    /// PutRevoke: the grant is gone.
    Revoked,
    /// Remove.
    Removal(Removal),
    /// Remove with an expectation that no longer holds: nothing was done, the leader looks again.
    RemoveChanged {
        /// Who has the key now.
        actual: ObjectId,
    },
    /// RemoveObjects: how many left the directory.
    RemovedObjects {
        /// Objects.
        objects: u64,
    },
    /// SetTenant.
    Tenant {
        /// New, or as first answered.
        tenant: TenantId,
    },
    /// Retire: those that were retired.
    Retired {
        /// In the order named.
        objects: Vec<ObjectId>,
    },
    /// Discard: those that were dropped.
    Discarded {
        /// In the order named.
        objects: Vec<ObjectId>,
    },
    /// Reclaim, FenceAcknowledged: space that became free.
    Reclaimed {
        /// Replicas.
        replicas: u64,
        /// Bytes of their extents.
        bytes: u64,
    },
    /// DropReplica, DropExtra.
    ReplicaDropped {
        /// Whether the object went with its last copy.
        object_gone: bool,
    },
    /// ClearReplicas.
    Cleared {
        /// Whether any went.
        cleared: bool,
    },
    /// CopyStart: the replica to fill.
    CopyGranted(GrantedReplica),
    /// CopyEnd.
    CopyEnded {
        /// Whether the copy is there.
        stored: bool,
    },
    /// CreateTask.
    TaskCreated {
        /// New, or as first answered.
        task: TaskId,
    },
    /// ExpireSessions.
    Expired {
        /// How many ended.
        sessions: u64,
    },
    /// SetContact, SetConfig, SetPin, DropTenant, EndTask, Checkpoint, RaiseFeatureLevel, Audit.
    Done,
}
