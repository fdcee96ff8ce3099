//! What reads of the directory answer: copies, taken under a shard's lock and let go.

use super::op::{Contact, DataType, Quota, SessionId, TaskId, TenantId, Uuid};
use smallvec::SmallVec;
use std::sync::Arc;
use tidepool_proto::{Incarnation, LogTime, NodeId, ObjectId, ReplicaId, SegmentId};

/// Whether an object can be read.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ObjectState {
    /// Being put: granted, not ended.
    Processing,
    /// Readable.
    Complete,
}

/// One replica and where it lies.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ReplicaPlace {
    /// Replica.
    pub replica: ReplicaId,
    /// Segment.
    pub segment: SegmentId,
    /// Owner of the segment.
    pub node: NodeId,
    /// The owner's life.
    pub incarnation: Incarnation,
    /// Bytes from the segment's start.
    pub offset: u64,
    /// Stored bytes: header, checksum table and payload.
    pub length: u64,
    /// COMPLETE, and its node is not suspect: may be handed to readers.
    pub listed: bool,
}

/// One object, as a reader of the directory sees it while the shard's lock is held.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ObjectView<'a> {
    /// Name space.
    pub tenant: TenantId,
    /// Key.
    pub key: &'a [u8],
    /// The put that made it.
    pub object: ObjectId,
    /// Payload bytes.
    pub length: u64,
    /// Whether it can be read.
    pub state: ObjectState,
    /// What it holds.
    pub data_type: DataType,
    /// Never evicted.
    pub hard_pinned: bool,
    /// Log time until which it is soft-pinned; 0: it is not.
    pub soft_pinned_until: LogTime,
    /// Name of its group.
    pub group: Option<&'a [u8]>,
    /// Log time of its PutStart.
    pub started: LogTime,
    /// All replicas that have not been dropped.
    pub replicas: SmallVec<[ReplicaPlace; 2]>,
    /// Replicas that it should have: with fewer it is healed, those above go first.
    pub wanted: usize,
    /// Copies that its put made; 0 while it is being put.
    pub made: usize,
}

impl ObjectView<'_> {
    /// Replicas that may be handed to readers.
    pub fn listed(&self) -> impl Iterator<Item = &ReplicaPlace> {
        self.replicas.iter().filter(|r| r.listed)
    }
    /// Whether a reader can read it now.
    pub fn is_readable(&self) -> bool {
        self.listed().next().is_some()
    }
}

/// One line of a listing.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ListedObject {
    /// Key.
    pub key: Box<[u8]>,
    /// The put that made it.
    pub object: ObjectId,
    /// Payload bytes.
    pub length: u64,
    /// Listed replicas, at least one.
    pub replicas: u32,
    /// What it holds.
    pub data_type: DataType,
    /// Never evicted.
    pub hard_pinned: bool,
}

/// Says whether a key is wanted. It runs under no lock.
pub type KeyTest<'a> = &'a dyn Fn(&[u8]) -> bool;

/// Which objects a listing wants.
#[derive(Clone, Copy, Default)]
pub struct ListFilter<'a> {
    /// Keys under it.
    pub prefix: &'a [u8],
    /// Keys that it accepts.
    pub matches: Option<KeyTest<'a>>,
    /// Objects that hold this.
    pub data_type: Option<DataType>,
    /// Also objects that cannot be read now: being put, or on suspect nodes only.
    pub unreadable_too: bool,
}

/// One tenant and what it holds.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct TenantView {
    /// Number.
    pub tenant: TenantId,
    /// Name.
    pub name: Arc<str>,
    /// Its limits.
    pub quota: Quota,
    /// Bytes of extents, open puts included.
    pub bytes: u64,
    /// Objects, open puts included.
    pub objects: u64,
}

/// A group that was asked about.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct GroupView {
    /// Objects of it.
    pub members: usize,
    /// Every member is readable, and none was lost.
    pub whole: bool,
}

/// A page of a listing. Pages come in hash order: stable, each key at most once, resumable after any key.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct ListPage {
    /// Readable objects under the prefix. May be empty while `next` is set: the scan limit of a page was reached.
    pub objects: Vec<ListedObject>,
    /// Resume after this key (which need not be in the listing); none: this was the last page.
    pub next: Option<Box<[u8]>>,
}

/// One registered datanode.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct NodeView {
    /// Node.
    pub node: NodeId,
    /// Its life.
    pub incarnation: Incarnation,
    /// Persistent uuid.
    pub node_uuid: Uuid,
    /// Advertised address.
    pub address: Arc<str>,
    /// Physical host.
    pub host_id: Arc<str>,
    /// Whether it is heard.
    pub contact: Contact,
    /// Mounted segments.
    pub segments: usize,
}

/// One mounted segment. free + processing + complete + retired = capacity (SPACE-ADDS-UP).
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SegmentView {
    /// Segment.
    pub segment: SegmentId,
    /// Owner.
    pub node: NodeId,
    /// The owner's life.
    pub incarnation: Incarnation,
    /// Name within the node.
    pub name: Arc<str>,
    /// Whether its node is heard.
    pub contact: Contact,
    /// Replicas are to leave it.
    pub draining: bool,
    /// Bytes.
    pub capacity: u64,
    /// Bytes that may be allocated.
    pub free: u64,
    /// Bytes of open grants.
    pub processing: u64,
    /// Bytes of readable replicas.
    pub complete: u64,
    /// Bytes unlisted and not yet free.
    pub retired: u64,
    /// Largest free extent.
    pub largest_free: u64,
    /// Free extents.
    pub free_extents: u64,
}

/// One client session.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SessionView {
    /// Session.
    pub session: SessionId,
    /// Uuid of the client process.
    pub client_uuid: Uuid,
    /// Its host; may be empty.
    pub host_id: Arc<str>,
    /// Sequences below it were answered.
    pub floor: u64,
    /// Open grants.
    pub open_grants: u64,
    /// Bytes of their extents, all replicas counted.
    pub open_bytes: u64,
    /// Answers of numbered removals that are remembered.
    pub outcomes: usize,
}

/// A retired replica whose space waits for `Reclaim` or for a fence.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RetiredView {
    /// Replica.
    pub replica: ReplicaId,
    /// Object it belonged to.
    pub object: ObjectId,
    /// Segment.
    pub segment: SegmentId,
    /// Owner.
    pub node: NodeId,
    /// Bytes from the segment's start.
    pub offset: u64,
    /// Bytes of the extent.
    pub bytes: u64,
}

/// An object that may be evicted.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Victim {
    /// Object.
    pub object: ObjectId,
    /// Name space.
    pub tenant: TenantId,
    /// Hash of tenant and key.
    pub key: u64,
    /// Log time until which it is soft-pinned; 0: it is not.
    pub soft_pinned_until: LogTime,
    /// Its replicas: id, segment, extent bytes.
    pub replicas: SmallVec<[(ReplicaId, SegmentId, u64); 2]>,
}

impl Victim {
    /// Bytes that come free with it.
    pub fn bytes(&self) -> u64 {
        self.replicas.iter().map(|r| r.2).sum()
    }
}

/// A copy under way.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CopyView {
    /// The replica being made.
    pub replica: ReplicaId,
    /// Object.
    pub object: ObjectId,
    /// The task it is part of; 0: none.
    pub task: TaskId,
    /// Set: the replica that goes when it is there.
    pub instead_of: Option<ReplicaId>,
    /// When it was granted.
    pub started: LogTime,
    /// Where it goes.
    pub segment: SegmentId,
    /// Who makes it.
    pub node: NodeId,
    /// Its life.
    pub incarnation: Incarnation,
    /// Bytes from the segment's start.
    pub offset: u64,
}

/// An object that became readable, or went.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Change {
    /// It was put.
    Readable {
        /// Name space.
        tenant: TenantId,
        /// Hash of tenant and key.
        key: u64,
        /// Object.
        object: ObjectId,
        /// Bytes of all its extents.
        bytes: u64,
        /// Hash of its group's name.
        group: Option<u64>,
    },
    /// It left the directory.
    Gone {
        /// Name space.
        tenant: TenantId,
        /// Hash of tenant and key.
        key: u64,
        /// Object.
        object: ObjectId,
    },
}

/// How much of everything there is.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Counts {
    /// Objects in any state.
    pub objects: u64,
    /// Of them, being put.
    pub processing: u64,
    /// Registered nodes.
    pub nodes: u64,
    /// Of them, suspect.
    pub suspect_nodes: u64,
    /// Mounted segments.
    pub segments: u64,
    /// Open sessions.
    pub sessions: u64,
    /// Retired replicas that wait for `Reclaim`.
    pub retired_clean: u64,
    /// Retired replicas that wait for a fence.
    pub retired_unclean: u64,
    /// Bytes of all segments.
    pub capacity_bytes: u64,
    /// Bytes that may be allocated.
    pub free_bytes: u64,
    /// Bytes of open grants.
    pub processing_bytes: u64,
    /// Bytes of readable replicas.
    pub complete_bytes: u64,
    /// Bytes unlisted and not yet free.
    pub retired_bytes: u64,
}
