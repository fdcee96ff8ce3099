//! `Model`: the directory again, as simple as can be: lists, walked every time. It predicts each outcome (of a grant
//! the number of copies and the victims; where they lie it checks) and then says what reads must answer.

mod attributes;
mod copies;
mod end;
mod gone;
mod members;
mod put;
mod reads;

use crate::directory::{
    Answered, Contact, DataType, FEATURE_LEVEL, FEATURE_LEVEL_FIRST, Op, Outcome, Quota, SessionId, SoftPinAction,
    TenantId, Token, Uuid,
};
use copies::{Copying, Tasked};
use std::collections::{BTreeMap, BTreeSet};
use tidepool_proto::object::extent_bytes;
use tidepool_proto::{ErrorCode, History, Incarnation, NodeId, ObjectId, OpId, ReplicaId, SegmentId};

#[derive(Clone, Debug)]
struct Object {
    tenant: TenantId,
    key: Vec<u8>,
    id: ObjectId,
    length: u64,
    session: SessionId,
    token: Token,
    started: u64,
    granted: usize,
    /// Replicas that it should have.
    wanted: usize,
    /// Once ended: the slots said to be stored, and the copies answered.
    ended: Option<(BTreeSet<usize>, u32)>,
    replicas: Vec<(ReplicaId, SegmentId, u64)>,
    /// An open upsert: the COMPLETE object under its key.
    replaces: Option<ObjectId>,
    /// Empty: none.
    group: Vec<u8>,
    hard_pin: bool,
    /// What becomes of the pin at the end.
    soft_pin: SoftPinAction,
    pinned_until: u64,
    data_type: DataType,
}

impl Object {
    fn bytes(&self) -> u64 {
        extent_bytes(self.length)
    }
    fn all_bytes(&self) -> u64 {
        self.bytes() * self.replicas.len() as u64
    }
}

#[derive(Clone, Debug)]
struct Segment {
    id: SegmentId,
    node: NodeId,
    name: String,
    capacity: u64,
    draining: bool,
}

#[derive(Clone, Debug)]
struct Node {
    uuid: Uuid,
    processes: Vec<Uuid>,
    id: NodeId,
    life: Incarnation,
    host: String,
    contact: Contact,
}

#[derive(Clone, Debug)]
struct Retired {
    replica: ReplicaId,
    segment: SegmentId,
    offset: u64,
    bytes: u64,
    clean: bool,
}

#[derive(Clone, Debug, Default)]
struct Session {
    floor: u64,
    outcomes: BTreeMap<u64, Answered>,
}

/// What makes an upsert the same again.
#[derive(Clone, Copy, Debug)]
pub(super) struct Retry<'m> {
    pub(super) session: SessionId,
    pub(super) sequence: u64,
    pub(super) tenant: TenantId,
    pub(super) key: &'m [u8],
    pub(super) length: u64,
    pub(super) token: Token,
}

/// See the file.
#[derive(Clone, Debug)]
pub(crate) struct Model {
    objects: Vec<Object>,
    segments: Vec<Segment>,
    nodes: Vec<Node>,
    retired: Vec<Retired>,
    copies: Vec<Copying>,
    tasks: Vec<Tasked>,
    sessions: BTreeMap<SessionId, Session>,
    session_uuids: BTreeMap<Uuid, SessionId>,
    tenants: BTreeMap<TenantId, (String, Quota)>,
    tenants_made: u16,
    /// (tenant, group, key) of members that groups miss.
    lost: BTreeSet<(TenantId, Vec<u8>, Vec<u8>)>,
    feature_level: u16,
    objects_max: u64,
    granted_bytes_min: u64,
    hard_pinned_percent_max: u64,
    clock: u64,
    /// (history, index at which the next one began).
    histories: Vec<(History, u64)>,
    /// What happened that outcomes do not tell: the generator must reach it.
    pub(super) events: BTreeSet<&'static str>,
}

const DISCARD_MS: u64 = 30_000;

impl Model {
    pub(crate) fn new() -> Model {
        Model {
            objects: Vec::new(),
            segments: Vec::new(),
            nodes: Vec::new(),
            retired: Vec::new(),
            copies: Vec::new(),
            tasks: Vec::new(),
            sessions: BTreeMap::new(),
            session_uuids: BTreeMap::new(),
            tenants_made: 0,
            tenants: [(TenantId::DEFAULT, ("default".to_owned(), Quota::default()))].into(),
            lost: BTreeSet::new(),
            feature_level: FEATURE_LEVEL_FIRST,
            objects_max: 1 << 28,
            granted_bytes_min: 1 << 28,
            hard_pinned_percent_max: 90,
            clock: 0,
            histories: Vec::new(),
            events: BTreeSet::new(),
        }
    }

    pub(crate) fn advance(&mut self, log_time: u64) {
        self.clock = self.clock.max(log_time);
    }

    /// Ids that ops may name.
    pub(super) fn object_ids(&self) -> Vec<ObjectId> {
        self.objects.iter().map(|o| o.id).collect()
    }
    pub(super) fn retired_ids(&self) -> Vec<ReplicaId> {
        self.retired.iter().map(|r| r.replica).collect()
    }
    pub(super) fn node_lives(&self) -> Vec<(NodeId, Incarnation)> {
        self.nodes.iter().map(|n| (n.id, n.life)).collect()
    }
    pub(super) fn segment_ids(&self) -> Vec<(NodeId, SegmentId)> {
        self.segments.iter().map(|s| (s.node, s.id)).collect()
    }
    /// (id, replicas granted, session) of objects.
    pub(super) fn grants(&self) -> Vec<(ObjectId, usize, SessionId)> {
        self.objects.iter().map(|o| (o.id, o.granted, o.session)).collect()
    }
    /// The same of open puts.
    pub(super) fn open_grants(&self) -> Vec<(ObjectId, usize, SessionId)> {
        self.objects.iter().filter(|o| o.ended.is_none()).map(|o| (o.id, o.granted, o.session)).collect()
    }
    /// Sequences that were answered.
    pub(super) fn answered(&self) -> Vec<(SessionId, u64)> {
        self.sessions.iter().flat_map(|(&id, s)| s.outcomes.keys().map(move |&sequence| (id, sequence))).collect()
    }
    /// Upserts that may be retried.
    pub(super) fn retries(&self) -> Vec<Retry<'_>> {
        let outcomes = self.sessions.iter().flat_map(|(&id, s)| s.outcomes.iter().map(move |(&n, &a)| (id, n, a)));
        let retry = |(session, sequence, answered)| {
            let Answered::Upsert(object) = answered else { return None };
            let open = self.object(object)?;
            let (tenant, key, length, token) = (open.tenant, &open.key[..], open.length, open.token);
            Some(Retry { session, sequence, tenant, key, length, token })
        };
        outcomes.filter_map(retry).collect()
    }

    fn object(&self, id: ObjectId) -> Option<&Object> {
        self.objects.iter().find(|o| o.id == id)
    }

    /// What is found under a key.
    fn find(&self, tenant: TenantId, key: &[u8]) -> Option<&Object> {
        self.objects.iter().find(|o| o.tenant == tenant && o.key == key && o.replaces.is_none())
    }

    /// Applies an op, comparing what it should answer with what it answered.
    pub(crate) fn apply(&mut self, at: OpId, op: &Op<'_>, outcome: &Outcome) {
        if let Op::PutStart(put) = op {
            return self.put_start(at, put, outcome);
        }
        if let Op::CopyStart(copy) = op {
            return self.copy_start(at, copy, outcome);
        }
        match (self.expected(at, op), outcome) {
            (Ok(Outcome::PutDropped(_)), Outcome::PutDropped(e)) => assert_eq!(e.code(), ErrorCode::GrantLost),
            (Ok(expected), outcome) => assert_eq!(&expected, outcome, "{op:?}"),
            (Err(code), Outcome::Refused(error)) => assert_eq!(code, error.code(), "{op:?}: {error}"),
            (Err(code), other) => panic!("{op:?} should be refused {code:?}, not {other:?}"),
        }
    }

    fn expected(&mut self, at: OpId, op: &Op<'_>) -> Result<Outcome, ErrorCode> {
        match op {
            Op::PutStart(_) | Op::CopyStart(_) => unreachable!("its outcome is compared on the way"),
            Op::RegisterNode { node_uuid, process_uuid, host_id, .. } => {
                self.register(at, node_uuid, process_uuid, host_id)
            }
            Op::MountSegment { node, incarnation, name, bytes } => self.mount(at, *node, *incarnation, name, *bytes),
            Op::UnmountSegment { node, incarnation, segment } => {
                self.check_life(*node, *incarnation)?;
                if !self.segments.iter().any(|s| s.id == *segment && s.node == *node) {
                    return Err(ErrorCode::SegmentNotFound);
                }
                Ok(self.drop_segments(|s| s.id == *segment))
            }
            Op::SetContact { node, incarnation, contact } => {
                self.check_life(*node, *incarnation)?;
                self.nodes.iter_mut().filter(|n| n.id == *node).for_each(|n| n.contact = *contact);
                Ok(Outcome::Done)
            }
            Op::DropNode { node, incarnation } => {
                self.check_life(*node, *incarnation)?;
                let dropped = self.drop_segments(|s| s.node == *node);
                self.nodes.retain(|n| n.id != *node);
                Ok(dropped)
            }
            Op::OpenSession { client_uuid, .. } => Ok(self.open_session(at, *client_uuid)),
            Op::ExpireSessions { sessions } => Ok(self.expire_sessions(sessions)),
            Op::PutEnd(end) => self.put_end(end),
            Op::PutRevoke(end) => self.put_revoke(end),
            Op::Remove(remove) => self.remove(remove),
            Op::RemoveObjects { session, turn, objects, mode } => self.remove_objects(*session, *turn, objects, *mode),
            Op::SetPin { object, action } => self.set_pin(*object, *action),
            Op::SetTenant { name, quota } => Ok(self.set_tenant(name, *quota)),
            Op::DropTenant { name } => self.drop_tenant(name),
            Op::Retire { objects, mode } => Ok(self.retire_named(objects, *mode)),
            Op::Reclaim { replicas } => Ok(self.free_retired(replicas, |_, r| r.clean)),
            Op::Discard { objects } => {
                let discarded = objects.iter().copied().filter(|&id| self.discard(id)).collect();
                Ok(Outcome::Discarded { objects: discarded })
            }
            Op::FenceAcknowledged { node, incarnation, replicas } => {
                self.check_life(*node, *incarnation)?;
                Ok(self.free_retired(replicas, |model, r| !r.clean && model.owner(r.segment) == *node))
            }
            Op::DropReplica { object, replica } => self.drop_replica(*object, *replica),
            Op::DropExtra { object, replica } => self.drop_extra(*object, *replica),
            Op::ClearReplicas(clear) => self.clear_replicas(clear),
            Op::CopyEnd { replica, end } => self.copy_end(*replica, *end),
            Op::CreateTask(create) => self.create_task(at, create),
            Op::EndTask { task, state, left, .. } => self.end_task(*task, *state, *left),
            Op::SetConfig(config) => {
                self.objects_max = config.objects_max;
                self.granted_bytes_min = config.granted_bytes_min;
                self.hard_pinned_percent_max = config.hard_pinned_percent_max;
                Ok(Outcome::Done)
            }
            Op::BeginHistory { before } => self.begin_history(at, before.1),
            Op::RaiseFeatureLevel { level } if *level <= self.feature_level || *level > FEATURE_LEVEL => {
                Err(ErrorCode::InvalidParams)
            }
            Op::RaiseFeatureLevel { level } => {
                self.feature_level = *level;
                Ok(Outcome::Done)
            }
            Op::Checkpoint { .. } | Op::Audit => Ok(Outcome::Done),
        }
    }
}
