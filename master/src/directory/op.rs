//! `Op`: one mutation of the directory, and `Entry`: the batch of them that one log entry carries.
//!
//! Keys and names borrow from the entry's bytes; see `codec` for the encoding.

use super::limits::{Config, FEATURE_LEVEL_FIRST};
use super::tasks::TaskState;
use smallvec::SmallVec;
use tidepool_proto::{ClusterId, History, Incarnation, LogTime, NodeId, ObjectId, OpId, ReplicaId, SegmentId};

/// A tenant's number, private to the directory: never used for another one.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Debug)]
pub struct TenantId(pub u16);

impl TenantId {
    /// The tenant of clients that name none. It always exists.
    pub const DEFAULT: TenantId = TenantId(0);
}

/// One client process: the OpenSession op that first named its uuid.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Debug)]
pub struct SessionId(pub u64);

impl From<OpId> for SessionId {
    fn from(id: OpId) -> SessionId {
        SessionId(id.0)
    }
}

impl std::fmt::Display for SessionId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:?}", OpId(self.0))
    }
}

/// A task: the CreateTask op that made it. 0 names none.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Debug)]
pub struct TaskId(pub u64);

impl std::fmt::Display for TaskId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:?}", OpId(self.0))
    }
}

/// What a task is to do.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum TaskKind {
    /// One more replica of an object in each target.
    Copy,
    /// An object's replica goes from the source to the target.
    Move,
    /// Every replica leaves the sources.
    Drain,
}

/// Random 16 bytes that make a repeated PutStart answer as the first did.
pub type Token = [u8; 16];
/// A persistent or per-process uuid.
pub type Uuid = [u8; 16];

/// How many copies a put must get.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ReplicaMode {
    /// At least one.
    BestEffort,
    /// All, or NOT_ENOUGH_REPLICAS.
    Strict,
}

/// Whether replicas that leave the listing give their space back in the same op.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RetireMode {
    /// Space stays retired until `Reclaim`: leases may live.
    RetireOnly,
    /// Space is free at once: the leader set the no-lease mark and saw no lease (L1).
    RetireAndReclaim,
}

/// Whether a node is heard.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Contact {
    /// Listed and chosen.
    Heard,
    /// Unlisted, not chosen, not dropped (N1).
    Suspect,
}

/// What an object holds. Kept and listed; nothing is decided by it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Debug)]
pub struct DataType(pub u8);

/// What becomes of the soft pin of a key.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub enum SoftPinAction {
    /// An upsert keeps the old value's; a new object has none.
    #[default]
    Preserve,
    /// Pinned for this long, in log time, from PutEnd.
    Enable {
        /// At least 1.
        ttl_ms: u64,
    },
    /// None.
    Disable,
}

/// A request's place in its session's sequence: what makes a late duplicate of a key-named op harmless (W8).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Turn {
    /// Number of this request in the session.
    pub sequence: u64,
    /// Every sequence below it has been answered to the caller.
    pub floor: u64,
}

/// How one replica of a put ended, as its datanode says. The proposer checked the proof (W3).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ReplicaEnd {
    /// Verified and stored.
    Stored,
    /// Not stored, and nothing more will be written (clean).
    Aborted,
    /// No answer (unclean).
    Unknown,
}

/// One replica's end.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ReplicaStatus {
    /// Replica of the grant.
    pub replica: ReplicaId,
    /// How it ended.
    pub end: ReplicaEnd,
}

/// Statuses of a put's replicas.
pub type Statuses = SmallVec<[ReplicaStatus; 2]>;

/// A put's start: key, place wanted, and what may be evicted for it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PutStart<'a> {
    /// Name space.
    pub tenant: TenantId,
    /// Writer.
    pub session: SessionId,
    /// Key, 1 to 4096 bytes.
    pub key: &'a [u8],
    /// Payload bytes, at least 1.
    pub length: u64,
    /// Retry token (W8).
    pub token: Token,
    /// Copies wanted, 1 to 15.
    pub replica_num: u8,
    /// Whether fewer will do.
    pub mode: ReplicaMode,
    /// Nodes not to choose.
    pub excluded: SmallVec<[NodeId; 2]>,
    /// COMPLETE objects that may be evicted for it, in order; only as many as needed are (W9). Over quota the tenant's own
    /// come first. Groups of which not all are named stay, and so does the group that it joins.
    pub victims: Vec<ObjectId>,
    /// What it holds.
    pub data_type: DataType,
    /// Never evicted.
    pub hard_pin: bool,
    /// Evicted only when nothing else is left.
    pub soft_pin: SoftPinAction,
    /// Name of its group; empty: none.
    pub group: &'a [u8],
    /// Segments to choose first, in this order.
    pub preferred: SmallVec<[SegmentId; 2]>,
    /// Set: an upsert (W7). The key's COMPLETE object stays until the new one is ended, and open puts give way.
    pub upsert: Option<Turn>,
}

/// A put's end or revocation, named by object id: idempotent by construction (W8).
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PutEnd {
    /// Writer; another one than started it is refused ILLEGAL_CLIENT.
    pub session: SessionId,
    /// The grant's object.
    pub object: ObjectId,
    /// What became of each replica; one not named counts as `Unknown`.
    pub replicas: Statuses,
}

/// A key-named removal with its place in the session's sequence (W8).
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Remove<'a> {
    /// Name space.
    pub tenant: TenantId,
    /// Caller.
    pub session: SessionId,
    /// Its place in the session.
    pub turn: Turn,
    /// Key.
    pub key: &'a [u8],
    /// The object the leader looked at; if another one has the key by now nothing is done.
    pub expected: Option<ObjectId>,
    /// Whether its space is free at once.
    pub mode: RetireMode,
}

/// The start of a copy (N2): room for one more replica of an object, to be filled by the datanode that has it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct CopyStart {
    /// A COMPLETE object.
    pub object: ObjectId,
    /// Set: the replica that goes when the copy is there (a move).
    pub instead_of: Option<ReplicaId>,
    /// Where it may go; empty: wherever placement chooses.
    pub targets: SmallVec<[SegmentId; 2]>,
    /// The task it is part of, which must be running; 0: none.
    pub task: TaskId,
    /// Replicas that the object may have with it, copies under way counted: what makes a repeated start harmless where no
    /// target is named. 0: no limit.
    pub up_to: u8,
}

/// Replicas of one object that a request clears, with its place in the session's sequence (W8).
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ClearReplicas {
    /// Caller.
    pub session: SessionId,
    /// Its place in the session.
    pub turn: Turn,
    /// The object that the leader looked at.
    pub object: ObjectId,
    /// Those that the leader found; none: the object is left, and a repeated request leaves it too.
    pub replicas: SmallVec<[ReplicaId; 2]>,
}

/// A task as asked for.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct CreateTask {
    /// What is to be done.
    pub kind: TaskKind,
    /// Of a copy or move: the object.
    pub object: ObjectId,
    /// Where replicas are to leave.
    pub sources: Vec<SegmentId>,
    /// Where they are to go; empty: wherever there is room.
    pub targets: Vec<SegmentId>,
    /// Objects under way at once.
    pub concurrency: u32,
    /// Of a drain: the sources are unmounted when they are empty.
    pub unmount: bool,
    /// Retry token: same token, same task.
    pub token: Token,
}

/// What a tenant may hold.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Quota {
    /// Bytes of extents, of all replicas and open puts included; 0: no limit.
    pub bytes: u64,
    /// Objects, open puts included; 0: no limit.
    pub objects: u64,
    /// A put over quota is refused; otherwise it may evict the tenant's own.
    pub refuse: bool,
}

/// One mutation.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Op<'a> {
    /// A datanode process starts a life; a repeated process uuid answers as before.
    RegisterNode {
        /// Persistent uuid of the datanode.
        node_uuid: Uuid,
        /// Uuid of this process: the retry token.
        process_uuid: Uuid,
        /// Advertised address.
        address: &'a str,
        /// Physical host.
        host_id: &'a str,
    },
    /// A datanode lends memory; a repeated name with the same size answers as before.
    MountSegment {
        /// Owner.
        node: NodeId,
        /// Its life.
        incarnation: Incarnation,
        /// Unique within the node.
        name: &'a str,
        /// Size, a multiple of 64.
        bytes: u64,
    },
    /// A datanode takes memory back: its replicas are dropped.
    UnmountSegment {
        /// Owner.
        node: NodeId,
        /// Its life.
        incarnation: Incarnation,
        /// Segment.
        segment: SegmentId,
    },
    /// Contact with a node was lost or found again (N1).
    SetContact {
        /// Node.
        node: NodeId,
        /// Its life.
        incarnation: Incarnation,
        /// What is known.
        contact: Contact,
    },
    /// A node is forgotten with all it holds.
    DropNode {
        /// Node.
        node: NodeId,
        /// Its life: a newer one is not dropped.
        incarnation: Incarnation,
    },
    /// A client process says hello; the same uuid has the same session.
    OpenSession {
        /// Uuid of the process.
        client_uuid: Uuid,
        /// Its host; may be empty.
        host_id: &'a str,
    },
    /// Sessions not heard of for long end, unless they have open puts.
    ExpireSessions {
        /// Unknown ones are skipped.
        sessions: Vec<SessionId>,
    },
    /// See [`PutStart`].
    PutStart(PutStart<'a>),
    /// See [`PutEnd`].
    PutEnd(PutEnd),
    /// Gives a grant back. Replicas stated `Stored` or `Aborted` are clean.
    PutRevoke(PutEnd),
    /// See [`Remove`].
    Remove(Remove<'a>),
    /// COMPLETE objects that a request matched leave the directory, at most once per (session, sequence) (W8).
    RemoveObjects {
        /// Caller.
        session: SessionId,
        /// Its place in the session.
        turn: Turn,
        /// Those that the leader found; others are skipped.
        objects: Vec<ObjectId>,
        /// Whether their space is free at once.
        mode: RetireMode,
    },
    /// Sets or ends the soft pin of a COMPLETE object.
    SetPin {
        /// Object.
        object: ObjectId,
        /// `Preserve` changes nothing.
        action: SoftPinAction,
    },
    /// Registers a tenant, or sets its quotas.
    SetTenant {
        /// Name.
        name: &'a str,
        /// Quotas.
        quota: Quota,
    },
    /// Forgets a tenant that holds no object.
    DropTenant {
        /// Name.
        name: &'a str,
    },
    /// COMPLETE objects leave the directory (eviction); others are skipped, and so is a group of which not all are named.
    Retire {
        /// Objects.
        objects: Vec<ObjectId>,
        /// Whether their space is free at once.
        mode: RetireMode,
    },
    /// Clean retired space becomes free: no lease lives on it (L1). Others are skipped.
    Reclaim {
        /// Retired replicas.
        replicas: Vec<ReplicaId>,
    },
    /// Open puts older than the discard timeout are dropped; others are skipped.
    Discard {
        /// Objects.
        objects: Vec<ObjectId>,
    },
    /// A datanode will write no more to these: their unclean space becomes free (W5). Others are skipped.
    FenceAcknowledged {
        /// Node.
        node: NodeId,
        /// Its life.
        incarnation: Incarnation,
        /// Retired replicas.
        replicas: Vec<ReplicaId>,
    },
    /// The owning datanode found a replica corrupt (R3).
    DropReplica {
        /// Object.
        object: ObjectId,
        /// Replica.
        replica: ReplicaId,
    },
    /// A replica above the number that is wanted goes; refused when it is not above it.
    DropExtra {
        /// A COMPLETE object.
        object: ObjectId,
        /// Replica.
        replica: ReplicaId,
    },
    /// See [`ClearReplicas`].
    ClearReplicas(ClearReplicas),
    /// See [`CopyStart`].
    CopyStart(CopyStart),
    /// How a copy ended, as its datanode says. The proposer checked the proof (W3).
    CopyEnd {
        /// The replica that was made.
        replica: ReplicaId,
        /// How it ended.
        end: ReplicaEnd,
    },
    /// See [`CreateTask`].
    CreateTask(CreateTask),
    /// A task has ended; the first end counts.
    EndTask {
        /// Task.
        task: TaskId,
        /// Not `Running`.
        state: TaskState,
        /// Replicas that it did not make.
        left: u64,
        /// Why, if it failed.
        message: &'a str,
    },
    /// Replaces the replicated settings.
    SetConfig(Config),
    /// Every master remembers its digest once it applied this, and they compare (M3). It names the checkpoint before it, and what
    /// the leader that logged this had there; that is a record for whoever reads the log, nothing is judged by it.
    Checkpoint {
        /// Log index of the checkpoint before; 0: none known.
        index: u64,
        /// The leader's digest there.
        digest: u128,
    },
    /// This log goes on from another cluster's directory (I1): what was made before belongs to that one's history, no put or
    /// copy of it is under way any more, and no node is listed until it is heard.
    BeginHistory {
        /// Cluster and history that the directory was in.
        before: (ClusterId, History),
    },
    /// From here on the log may hold what came with this level; binaries that do not know it take part no more (M6).
    RaiseFeatureLevel {
        /// Above the present one.
        level: u16,
    },
    /// Every master recomputes a bounded part of its state and compares it with what it keeps up (M2). Changes nothing.
    Audit,
}

impl Op<'_> {
    /// The feature level that brought it: a state below it refuses it, the raise itself aside (M6).
    pub fn level(&self) -> u16 {
        match self {
            Op::RaiseFeatureLevel { level } => *level,
            _ => FEATURE_LEVEL_FIRST,
        }
    }

    /// Whether a state of this level applies it.
    pub fn is_allowed_at(&self, state: u16) -> bool {
        matches!(self, Op::RaiseFeatureLevel { .. }) || self.level() <= state
    }

    /// Name for logs and metrics.
    pub fn name(&self) -> &'static str {
        match self {
            Op::RegisterNode { .. } => "register_node",
            Op::MountSegment { .. } => "mount_segment",
            Op::UnmountSegment { .. } => "unmount_segment",
            Op::SetContact { .. } => "set_contact",
            Op::DropNode { .. } => "drop_node",
            Op::OpenSession { .. } => "open_session",
            Op::ExpireSessions { .. } => "expire_sessions",
            Op::PutStart(_) => "put_start",
            Op::PutEnd(_) => "put_end",
            Op::PutRevoke(_) => "put_revoke",
            Op::Remove(_) => "remove",
            Op::RemoveObjects { .. } => "remove_objects",
            Op::SetPin { .. } => "set_pin",
            Op::SetTenant { .. } => "set_tenant",
            Op::DropTenant { .. } => "drop_tenant",
            Op::Retire { .. } => "retire",
            Op::Reclaim { .. } => "reclaim",
            Op::Discard { .. } => "discard",
            Op::FenceAcknowledged { .. } => "fence_acknowledged",
            Op::DropReplica { .. } => "drop_replica",
            Op::DropExtra { .. } => "drop_extra",
            Op::ClearReplicas(_) => "clear_replicas",
            Op::CopyStart(_) => "copy_start",
            Op::CopyEnd { .. } => "copy_end",
            Op::CreateTask(_) => "create_task",
            Op::EndTask { .. } => "end_task",
            Op::SetConfig(_) => "set_config",
            Op::Checkpoint { .. } => "checkpoint",
            Op::BeginHistory { .. } => "begin_history",
            Op::RaiseFeatureLevel { .. } => "raise_feature_level",
            Op::Audit => "audit",
        }
    }
}

/// What one log entry carries.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Entry<'a> {
    /// Rules under which its ops were proposed (M6).
    pub feature_level: u16,
    /// Log time stamped by the proposer; apply takes the later of it and the last one (T1).
    pub log_time: LogTime,
    /// At most 1024 ops, applied in order.
    pub ops: Vec<Op<'a>>,
}
