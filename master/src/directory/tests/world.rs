//! `World`: a directory and the log that made it, with short forms of the ops. Every op is checked for invariants.

use crate::directory::{
    Change, Contact, CopyStart, CreateTask, DataType, Directory, Entry, EntryBuilder, Grant, GrantedReplica,
    ObjectView, Op, Outcome, PutEnd, PutStart, Quota, Removal, Remove, ReplicaEnd, ReplicaMode, ReplicaStatus,
    RetireMode, SessionId, SoftPinAction, TaskId, TaskKind, TenantId, Token, Turn, Victim,
};
use bytes::Bytes;
use tidepool_proto::{ErrorCode, History, Incarnation, LogTime, NodeId, ObjectId, ReplicaId, SegmentId};

/// The history tests run in.
pub(in crate::directory) const HISTORY: History = History(7);

/// See the file.
pub(crate) struct World {
    pub(crate) directory: Directory,
    pub(super) log: Vec<(u64, Bytes)>,
    pub(super) time_ms: u64,
    tokens: u64,
}

impl World {
    pub(super) fn new() -> World {
        World { directory: Directory::new(HISTORY), log: Vec::new(), time_ms: 1, tokens: 0 }
    }

    /// Nodes n0.. on hosts h0.., each with one segment; and one session.
    pub(crate) fn with_nodes(
        nodes: u8,
        segment_bytes: u64,
    ) -> (World, Vec<(NodeId, Incarnation, SegmentId)>, SessionId) {
        let mut world = World::new();
        let nodes = (0..nodes).map(|i| world.add_node(i, &format!("h{i}"), segment_bytes)).collect();
        let session = world.session(1);
        (world, nodes, session)
    }

    /// Applies ops as one entry, encoded and decoded on the way, and checks every invariant.
    pub(super) fn apply(&mut self, ops: &[Op<'_>]) -> Vec<Outcome> {
        let outcomes = self.apply_unchecked(ops);
        self.directory.check_invariants().unwrap();
        outcomes
    }

    /// Applies without the checks, which walk everything: to make a large state.
    pub(super) fn apply_unchecked(&mut self, ops: &[Op<'_>]) -> Vec<Outcome> {
        let level = ops.iter().map(Op::level).fold(self.directory.feature_level(), u16::max);
        let mut builder = EntryBuilder::new(level);
        for op in ops {
            builder.push(op).unwrap();
        }
        let bytes = builder.finish(LogTime(self.time_ms));
        let index = self.log.len() as u64 + 1;
        let entry = Entry::decode(&bytes).unwrap();
        assert_eq!(entry.ops, ops);
        let outcomes = self.directory.apply_entry(index, 1, &entry);
        self.log.push((index, bytes));
        assert_eq!(self.directory.take_violations(), []);
        outcomes
    }

    /// One step of the auditor, which must find nothing.
    pub(super) fn audit_step(&mut self) {
        assert_eq!(self.apply_unchecked(&[Op::Audit]), [Outcome::Done]);
    }

    /// A whole pass of the auditor from its start, which must find nothing.
    pub(super) fn audit(&mut self) {
        let until = self.directory.audit_progress().passes + 2;
        while self.directory.audit_progress().passes < until {
            self.audit_step();
        }
    }

    pub(super) fn one(&mut self, op: Op<'_>) -> Outcome {
        self.apply(&[op]).pop().unwrap()
    }

    /// Applies an op that must be refused with this code and change nothing.
    pub(super) fn refused(&mut self, op: Op<'_>, code: ErrorCode) -> String {
        let before = self.directory.digest();
        match self.one(op.clone()) {
            Outcome::Refused(error) => {
                assert_eq!(error.code(), code, "{op:?}: {error}");
                assert_eq!(self.directory.digest(), before, "{op:?} changed the state");
                error.message().to_owned()
            }
            other => panic!("{op:?} was not refused: {other:?}"),
        }
    }

    /// As `refused`, when log time has moved since the last entry.
    pub(super) fn refused_after_time(&mut self, op: Op<'_>, code: ErrorCode) -> String {
        self.apply(&[]);
        self.refused(op, code)
    }

    pub(super) fn register(&mut self, uuid: u8, process: u8, host: &str) -> (NodeId, Incarnation) {
        let op = register(uuid, process, host);
        match self.one(op) {
            Outcome::Registered { node, incarnation } => (node, incarnation),
            other => panic!("{other:?}"),
        }
    }

    pub(super) fn mount(&mut self, (node, incarnation): (NodeId, Incarnation), name: &str, bytes: u64) -> SegmentId {
        match self.one(Op::MountSegment { node, incarnation, name, bytes }) {
            Outcome::Mounted { segment } => segment,
            other => panic!("{other:?}"),
        }
    }

    pub(super) fn add_node(&mut self, uuid: u8, host: &str, bytes: u64) -> (NodeId, Incarnation, SegmentId) {
        let (node, incarnation) = self.register(uuid, uuid, host);
        (node, incarnation, self.mount((node, incarnation), "s", bytes))
    }

    pub(in crate::directory) fn session(&mut self, uuid: u8) -> SessionId {
        match self.one(Op::OpenSession { client_uuid: [uuid; 16], host_id: "c" }) {
            Outcome::Opened { session, .. } => session,
            other => panic!("{other:?}"),
        }
    }

    /// A put with a fresh token.
    pub(super) fn put_op<'a>(&mut self, session: SessionId, key: &'a str, length: u64) -> PutStart<'a> {
        self.tokens += 1;
        let mut token = [0; 16];
        token[..8].copy_from_slice(&self.tokens.to_le_bytes());
        plain_put(session, key, length, token)
    }

    /// An upsert with a fresh token.
    pub(super) fn upsert_op<'a>(
        &mut self,
        session: SessionId,
        sequence: u64,
        key: &'a str,
        length: u64,
    ) -> PutStart<'a> {
        PutStart { upsert: Some(Turn { sequence, floor: 0 }), ..self.put_op(session, key, length) }
    }

    pub(super) fn granted(&mut self, put: PutStart<'_>) -> Grant {
        match self.one(Op::PutStart(put)) {
            Outcome::Granted(grant) => grant,
            other => panic!("{other:?}"),
        }
    }

    pub(super) fn start(&mut self, session: SessionId, key: &str, length: u64) -> Grant {
        let put = self.put_op(session, key, length);
        self.granted(put)
    }

    /// A put of 100 bytes in so many copies, best effort.
    pub(super) fn start_copies(&mut self, session: SessionId, key: &str, replica_num: u8) -> Grant {
        let put = PutStart { replica_num, ..self.put_op(session, key, 100) };
        self.granted(put)
    }

    /// A complete object with one copy.
    pub(super) fn put(&mut self, session: SessionId, key: &str, length: u64) -> Grant {
        let put = self.put_op(session, key, length);
        self.complete(put)
    }

    /// Starts a put and ends it well.
    pub(super) fn complete(&mut self, put: PutStart<'_>) -> Grant {
        let session = put.session;
        let grant = self.granted(put);
        self.ended(session, &grant);
        grant
    }

    /// Ends a put well and says what it replaced.
    pub(super) fn ended(&mut self, session: SessionId, grant: &Grant) -> Option<ObjectId> {
        match self.one(Op::PutEnd(end(session, grant, ReplicaEnd::Stored))) {
            Outcome::Ended { copies, replaced } if copies as usize == grant.replicas.len() => replaced,
            other => panic!("{other:?}"),
        }
    }

    /// A complete object of a group.
    pub(in crate::directory) fn put_in(&mut self, session: SessionId, group: &str, key: &str, length: u64) -> Grant {
        let put = self.put_op(session, key, length);
        self.complete(PutStart { group: group.as_bytes(), ..put })
    }

    pub(crate) fn tenant(&mut self, name: &str, quota: Quota) -> TenantId {
        match self.one(Op::SetTenant { name, quota }) {
            Outcome::Tenant { tenant } => tenant,
            other => panic!("{other:?}"),
        }
    }

    pub(super) fn remove(&mut self, session: SessionId, sequence: u64, floor: u64, key: &str) -> Removal {
        match self.one(Op::Remove(remove(session, sequence, floor, key))) {
            Outcome::Removal(removal) => removal,
            other => panic!("{other:?}"),
        }
    }

    /// Creates a task.
    pub(super) fn create(&mut self, create: CreateTask) -> Result<TaskId, ErrorCode> {
        match self.one(Op::CreateTask(create)) {
            Outcome::TaskCreated { task } => Ok(task),
            Outcome::Refused(error) => Err(error.code()),
            other => panic!("{other:?}"),
        }
    }

    /// Starts a copy, or a move of a replica.
    pub(super) fn copy(
        &mut self,
        object: ObjectId,
        instead_of: Option<ReplicaId>,
        targets: &[SegmentId],
        task: TaskId,
    ) -> Result<GrantedReplica, ErrorCode> {
        match self.one(Op::CopyStart(CopyStart { object, instead_of, targets: targets.into(), task, up_to: 0 })) {
            Outcome::CopyGranted(granted) => Ok(granted),
            Outcome::Refused(error) => Err(error.code()),
            other => panic!("{other:?}"),
        }
    }

    /// Ends a copy that must be under way.
    pub(super) fn end_copy(&mut self, replica: ReplicaId, end: ReplicaEnd) {
        let stored = end == ReplicaEnd::Stored;
        assert_eq!(self.one(Op::CopyEnd { replica, end }), Outcome::CopyEnded { stored });
    }

    /// Replicas of an object and where they lie.
    pub(super) fn replicas(&self, object: ObjectId) -> Vec<(ReplicaId, SegmentId)> {
        let places = |o: &ObjectView<'_>| o.replicas.iter().map(|r| (r.replica, r.segment)).collect();
        self.directory.with_object_id(object, |o| o.map(places).unwrap_or_default())
    }

    pub(super) fn suspect(&mut self, node: NodeId, incarnation: Incarnation, contact: Contact) {
        assert_eq!(self.one(Op::SetContact { node, incarnation, contact }), Outcome::Done);
    }

    /// The object id under a key, if a reader can read it.
    pub(super) fn readable(&self, key: &str) -> Option<ObjectId> {
        self.directory
            .with_object(TenantId::DEFAULT, key.as_bytes(), |o| o.filter(|o| o.is_readable()).map(|o| o.object))
    }

    /// The object id under a key, readable or not.
    pub(super) fn present(&self, key: &str) -> Option<ObjectId> {
        self.directory.with_object(TenantId::DEFAULT, key.as_bytes(), |o| o.map(|o| o.object))
    }
}

pub(super) fn register(uuid: u8, process: u8, host: &str) -> Op<'_> {
    Op::RegisterNode { node_uuid: [uuid; 16], process_uuid: [process; 16], address: "10.0.0.1:9", host_id: host }
}

/// A put of one copy, best effort, with nothing special.
pub(super) fn plain_put(session: SessionId, key: &str, length: u64, token: Token) -> PutStart<'_> {
    PutStart {
        tenant: TenantId::DEFAULT,
        session,
        key: key.as_bytes(),
        length,
        token,
        replica_num: 1,
        mode: ReplicaMode::BestEffort,
        excluded: Default::default(),
        victims: Vec::new(),
        data_type: DataType::default(),
        hard_pin: false,
        soft_pin: SoftPinAction::Preserve,
        group: b"",
        preferred: Default::default(),
        upsert: None,
    }
}

/// An end with the same status for all replicas.
pub(super) fn end(session: SessionId, grant: &Grant, end: ReplicaEnd) -> PutEnd {
    let replicas = grant.replicas.iter().map(|r| ReplicaStatus { replica: r.replica, end }).collect();
    PutEnd { session, object: grant.object, replicas }
}

pub(super) fn remove(session: SessionId, sequence: u64, floor: u64, key: &str) -> Remove<'_> {
    Remove {
        tenant: TenantId::DEFAULT,
        session,
        turn: Turn { sequence, floor },
        key: key.as_bytes(),
        expected: None,
        mode: RetireMode::RetireOnly,
    }
}

/// A drain of segments; the number makes its token.
pub(super) fn drain(sources: &[SegmentId], token: u8) -> CreateTask {
    CreateTask {
        kind: TaskKind::Drain,
        object: ObjectId(0),
        sources: sources.to_vec(),
        targets: Vec::new(),
        concurrency: 1,
        unmount: false,
        token: [token; 16],
    }
}

/// Every object that may be evicted, the oldest first.
pub(super) fn victims(directory: &Directory) -> Vec<Victim> {
    let object = |change| match change {
        Change::Readable { object, .. } | Change::Gone { object, .. } => object,
    };
    directory.all_readable().into_iter().filter_map(|change| directory.as_victim(object(change))).collect()
}

/// All may go, each at the price of its bytes.
pub(super) fn by_bytes(near: &[&Victim]) -> Vec<Option<u64>> {
    near.iter().map(|victim| Some(victim.bytes())).collect()
}
