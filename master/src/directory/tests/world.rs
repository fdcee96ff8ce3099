//! `World`: a directory and the log that made it, with short forms of the ops. Every op is checked for invariants.

use crate::directory::{
    Contact, Directory, Entry, EntryBuilder, FEATURE_LEVEL, Grant, Op, Outcome, PutEnd, PutStart, Removal, Remove,
    ReplicaEnd, ReplicaMode, ReplicaStatus, RetireMode, SessionId, TenantId,
};
use bytes::Bytes;
use tidepool_proto::{ErrorCode, History, Incarnation, LogTime, NodeId, ObjectId, SegmentId};

/// The history tests run in.
pub(super) const HISTORY: History = History(7);

/// See the file.
pub(super) struct World {
    pub(super) directory: Directory,
    pub(super) log: Vec<(u64, Bytes)>,
    pub(super) time_ms: u64,
    tokens: u64,
}

impl World {
    pub(super) fn new() -> World {
        World { directory: Directory::new(HISTORY), log: Vec::new(), time_ms: 1, tokens: 0 }
    }

    /// Nodes n0.. on hosts h0.., each with one segment; and one session.
    pub(super) fn with_nodes(
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
        let mut builder = EntryBuilder::new(FEATURE_LEVEL);
        for op in ops {
            builder.push(op).unwrap();
        }
        let bytes = builder.finish(LogTime(self.time_ms));
        let index = self.log.len() as u64 + 1;
        let entry = Entry::decode(&bytes).unwrap();
        assert_eq!(entry.ops, ops);
        let outcomes = self.directory.apply_entry(index, 1, &entry);
        self.log.push((index, bytes));
        outcomes
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

    pub(super) fn session(&mut self, uuid: u8) -> SessionId {
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
        }
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
        let grant = self.start(session, key, length);
        let outcome = self.one(Op::PutEnd(end(session, &grant, ReplicaEnd::Stored)));
        assert_eq!(outcome, Outcome::Ended { copies: grant.replicas.len() as u32 });
        grant
    }

    pub(super) fn remove(&mut self, session: SessionId, sequence: u64, floor: u64, key: &str) -> Removal {
        match self.one(Op::Remove(remove(session, sequence, floor, key))) {
            Outcome::Removal(removal) => removal,
            other => panic!("{other:?}"),
        }
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

/// An end with the same status for all replicas.
pub(super) fn end(session: SessionId, grant: &Grant, end: ReplicaEnd) -> PutEnd {
    let replicas = grant.replicas.iter().map(|r| ReplicaStatus { replica: r.replica, end }).collect();
    PutEnd { session, object: grant.object, replicas }
}

pub(super) fn remove(session: SessionId, sequence: u64, floor: u64, key: &str) -> Remove<'_> {
    Remove {
        tenant: TenantId::DEFAULT,
        session,
        sequence,
        floor,
        key: key.as_bytes(),
        expected: None,
        mode: RetireMode::RetireOnly,
    }
}
