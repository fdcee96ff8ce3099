//! `Model`: the directory again, as simple as can be: lists, walked every time. It predicts each outcome (of a grant
//! the number of copies and the victims; where they lie it checks) and then says what reads must answer.

use crate::directory::{
    Contact, Directory, Grant, ObjectState, Op, Outcome, PutEnd, PutStart, Removal, Remove, ReplicaEnd, ReplicaMode,
    RetireMode, SessionId, TenantId, Uuid,
};
use std::collections::{BTreeMap, BTreeSet};
use tidepool_proto::object::extent_bytes;
use tidepool_proto::{ErrorCode, Incarnation, NodeId, ObjectId, OpId, ReplicaId, SegmentId};

#[derive(Clone, Debug)]
struct Object {
    key: Vec<u8>,
    id: ObjectId,
    length: u64,
    session: SessionId,
    token: [u8; 16],
    started: u64,
    granted: usize,
    /// Once ended: the slots said to be stored, and the copies answered.
    ended: Option<(BTreeSet<usize>, u32)>,
    replicas: Vec<(ReplicaId, SegmentId, u64)>,
}

#[derive(Clone, Debug)]
struct Segment {
    id: SegmentId,
    node: NodeId,
    name: String,
    capacity: u64,
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
    outcomes: BTreeMap<u64, Removal>,
}

/// See the file.
#[derive(Clone, Debug, Default)]
pub(super) struct Model {
    objects: Vec<Object>,
    segments: Vec<Segment>,
    nodes: Vec<Node>,
    retired: Vec<Retired>,
    sessions: BTreeMap<SessionId, Session>,
    session_uuids: BTreeMap<Uuid, SessionId>,
    clock: u64,
}

const DISCARD_MS: u64 = 30_000;

impl Model {
    pub(super) fn advance(&mut self, log_time: u64) {
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

    /// Applies an op, comparing what it should answer with what it answered.
    pub(super) fn apply(&mut self, at: OpId, op: &Op<'_>, outcome: &Outcome) {
        let expected = match op {
            Op::PutStart(put) => return self.put_start(at, put, outcome),
            Op::RegisterNode { node_uuid, process_uuid, host_id, .. } => {
                self.register(at, node_uuid, process_uuid, host_id)
            }
            Op::MountSegment { node, incarnation, name, bytes } => self.mount(at, *node, *incarnation, name, *bytes),
            Op::UnmountSegment { node, incarnation, segment } => self.check_life(*node, *incarnation).and_then(|()| {
                if !self.segments.iter().any(|s| s.id == *segment && s.node == *node) {
                    return Err(ErrorCode::SegmentNotFound);
                }
                Ok(self.drop_segments(|s| s.id == *segment))
            }),
            Op::SetContact { node, incarnation, contact } => self.check_life(*node, *incarnation).map(|()| {
                self.nodes.iter_mut().filter(|n| n.id == *node).for_each(|n| n.contact = *contact);
                Outcome::Done
            }),
            Op::DropNode { node, incarnation } => self.check_life(*node, *incarnation).map(|()| {
                let dropped = self.drop_segments(|s| s.node == *node);
                self.nodes.retain(|n| n.id != *node);
                dropped
            }),
            Op::OpenSession { client_uuid, .. } => {
                let session = *self.session_uuids.entry(*client_uuid).or_insert(SessionId(at.0));
                Ok(Outcome::Opened { session, floor: self.sessions.entry(session).or_default().floor })
            }
            Op::ExpireSessions { sessions } => {
                let known = sessions.iter().filter(|s| self.sessions.remove(s).is_some()).count() as u64;
                self.session_uuids.retain(|_, s| self.sessions.contains_key(s));
                Ok(Outcome::Expired { sessions: known })
            }
            Op::PutEnd(end) => self.put_end(end),
            Op::PutRevoke(end) => self.put_revoke(end),
            Op::Remove(remove) => self.remove(remove),
            Op::Retire { objects, mode } => {
                let retired = objects.iter().copied().filter(|&id| self.retire(id, *mode)).collect();
                Ok(Outcome::Retired { objects: retired })
            }
            Op::Reclaim { replicas } => Ok(self.free_retired(replicas, |_, r| r.clean)),
            Op::Discard { objects } => {
                let discarded = objects.iter().copied().filter(|&id| self.discard(id)).collect();
                Ok(Outcome::Discarded { objects: discarded })
            }
            Op::FenceAcknowledged { node, incarnation, replicas } => self
                .check_life(*node, *incarnation)
                .map(|()| self.free_retired(replicas, |model, r| !r.clean && model.owner(r.segment) == *node)),
            Op::DropReplica { object, replica } => self.drop_replica(*object, *replica),
            Op::SetConfig(_) | Op::Checkpoint { .. } => Ok(Outcome::Done),
        };
        match (expected, outcome) {
            (Ok(expected), outcome) => match (&expected, outcome) {
                (Outcome::PutDropped(_), Outcome::PutDropped(e)) => assert_eq!(e.code(), ErrorCode::GrantLost),
                _ => assert_eq!(&expected, outcome, "{op:?}"),
            },
            (Err(code), Outcome::Refused(error)) => assert_eq!(code, error.code(), "{op:?}: {error}"),
            (Err(code), other) => panic!("{op:?} should be refused {code:?}, not {other:?}"),
        }
    }

    fn check_life(&self, node: NodeId, life: Incarnation) -> Result<(), ErrorCode> {
        match self.nodes.iter().find(|n| n.id == node) {
            None => Err(ErrorCode::NodeUnknown),
            Some(n) if n.life != life => Err(ErrorCode::Fenced),
            Some(_) => Ok(()),
        }
    }

    fn owner(&self, segment: SegmentId) -> NodeId {
        self.segments.iter().find(|s| s.id == segment).unwrap().node
    }

    fn register(&mut self, at: OpId, uuid: &Uuid, process: &Uuid, host: &str) -> Result<Outcome, ErrorCode> {
        let life = Incarnation(at.0);
        let Some(i) = self.nodes.iter().position(|n| n.uuid == *uuid) else {
            let (id, host, processes) = (NodeId(at.0), host.to_owned(), vec![*process]);
            self.nodes.push(Node { uuid: *uuid, processes, id, life, host, contact: Contact::Heard });
            return Ok(Outcome::Registered { node: id, incarnation: life });
        };
        let id = self.nodes[i].id;
        if self.nodes[i].processes.last() == Some(process) {
            return Ok(Outcome::Registered { node: id, incarnation: self.nodes[i].life });
        }
        if self.nodes[i].processes.contains(process) {
            return Err(ErrorCode::Fenced);
        }
        self.drop_segments(|s| s.node == id);
        let node = &mut self.nodes[i];
        node.processes.push(*process);
        (node.life, node.host, node.contact) = (life, host.to_owned(), Contact::Heard);
        Ok(Outcome::Registered { node: id, incarnation: life })
    }

    fn mount(
        &mut self,
        at: OpId,
        node: NodeId,
        life: Incarnation,
        name: &str,
        bytes: u64,
    ) -> Result<Outcome, ErrorCode> {
        self.check_life(node, life)?;
        match self.segments.iter().find(|s| s.node == node && s.name == name) {
            Some(s) if s.capacity == bytes => return Ok(Outcome::Mounted { segment: s.id }),
            Some(_) => return Err(ErrorCode::SegmentAlreadyExists),
            None => {}
        }
        let id = SegmentId(at.0);
        self.segments.push(Segment { id, node, name: name.to_owned(), capacity: bytes });
        Ok(Outcome::Mounted { segment: id })
    }

    fn drop_segments(&mut self, which: impl Fn(&Segment) -> bool) -> Outcome {
        let gone: BTreeSet<SegmentId> = self.segments.iter().filter(|s| which(s)).map(|s| s.id).collect();
        self.segments.retain(|s| !gone.contains(&s.id));
        self.retired.retain(|r| !gone.contains(&r.segment));
        let (mut replicas, before) = (0, self.objects.len() as u64);
        for object in &mut self.objects {
            let had = object.replicas.len();
            object.replicas.retain(|r| !gone.contains(&r.1));
            replicas += (had - object.replicas.len()) as u64;
        }
        self.objects.retain(|o| !o.replicas.is_empty());
        Outcome::Dropped { replicas, objects: before - self.objects.len() as u64 }
    }

    /// Used extents of a segment, sorted, without those of some objects.
    fn used(&self, segment: SegmentId, without: &[ObjectId]) -> Vec<(u64, u64)> {
        let mut used: Vec<(u64, u64)> = self
            .objects
            .iter()
            .filter(|o| !without.contains(&o.id))
            .flat_map(|o| o.replicas.iter().map(move |r| (r.1, r.2, extent_bytes(o.length))))
            .chain(self.retired.iter().map(|r| (r.segment, r.offset, r.bytes)))
            .filter(|r| r.0 == segment)
            .map(|r| (r.1, r.2))
            .collect();
        used.sort_unstable();
        used
    }

    /// Free extents of a segment as (length, offset), sorted: best fit takes the first that fits.
    fn free(&self, segment: &Segment, without: &[ObjectId]) -> Vec<(u64, u64)> {
        let (mut at, mut free) = (0, Vec::new());
        for (offset, bytes) in self.used(segment.id, without).into_iter().chain([(segment.capacity, 0)]) {
            assert!(offset >= at, "extents overlap");
            if offset > at {
                free.push((offset - at, at));
            }
            at = offset + bytes;
        }
        free.sort_unstable();
        free
    }

    /// Segments on which an extent fits.
    fn fitting(&self, put: &PutStart<'_>, without: &[ObjectId]) -> Vec<&Segment> {
        let chosen = |s: &&Segment| {
            let node = self.nodes.iter().find(|n| n.id == s.node).unwrap();
            node.contact == Contact::Heard
                && !put.excluded.contains(&s.node)
                && self.free(s, without).last().is_some_and(|f| f.0 >= extent_bytes(put.length))
        };
        self.segments.iter().filter(chosen).collect()
    }

    fn put_start(&mut self, at: OpId, put: &PutStart<'_>, outcome: &Outcome) {
        let refused = |code: ErrorCode| match outcome {
            Outcome::Refused(error) => assert_eq!(error.code(), code, "{put:?}: {error}"),
            other => panic!("{put:?} should be refused {code:?}, not {other:?}"),
        };
        if !self.sessions.contains_key(&put.session) {
            return refused(ErrorCode::SessionUnknown);
        }
        let mut preempted = None;
        if let Some(object) = self.objects.iter().find(|o| o.key == put.key) {
            if object.ended.is_some() {
                return refused(ErrorCode::ObjectAlreadyExists);
            }
            if object.session == put.session && object.token == put.token {
                if object.length != put.length {
                    return refused(ErrorCode::InvalidParams);
                }
                let Outcome::Granted(grant) = outcome else { panic!("{put:?}: {outcome:?}") };
                assert!(grant.repeated && grant.object == object.id && grant.evicted.is_empty());
                let replicas: Vec<_> = grant.replicas.iter().map(|r| (r.replica, r.segment, r.offset)).collect();
                assert_eq!(replicas, object.replicas, "{put:?}");
                return;
            }
            if self.clock - object.started < DISCARD_MS {
                return refused(ErrorCode::PutInProgress);
            }
            preempted = Some(object.id);
        }
        let mut victims: Vec<ObjectId> = Vec::new();
        for &victim in &put.victims {
            if self.objects.iter().any(|o| o.id == victim && o.ended.is_some()) && !victims.contains(&victim) {
                victims.push(victim);
            }
        }
        let want = usize::from(put.replica_num);
        let copies = |k: usize| self.fitting(put, &victims[..k]).len().min(want);
        // The fewest victims with which the most copies fit.
        let used = (0..=victims.len()).max_by_key(|&k| (copies(k), usize::MAX - k)).unwrap();
        let most = copies(used);
        if most == 0 {
            return refused(ErrorCode::NoSpace);
        }
        if put.mode == ReplicaMode::Strict && most < want {
            return refused(ErrorCode::NotEnoughReplicas);
        }
        let Outcome::Granted(grant) = outcome else { panic!("{put:?} should get {most} copies: {outcome:?}") };
        assert!(!grant.repeated && grant.object == ObjectId(at.0) && grant.preempted == preempted);
        assert_eq!((grant.replicas.len(), &grant.evicted[..]), (most, &victims[..used]), "{put:?}");
        self.check_placement(put, grant);
        self.objects.retain(|o| !grant.evicted.contains(&o.id));
        if let Some(id) = preempted {
            self.drop_put(id, &BTreeSet::new());
        }
        self.objects.push(Object {
            key: put.key.to_vec(),
            id: grant.object,
            length: put.length,
            session: put.session,
            token: put.token,
            started: self.clock,
            granted: most,
            ended: None,
            replicas: grant.replicas.iter().map(|r| (r.replica, r.segment, r.offset)).collect(),
        });
    }

    /// Each replica in another segment, where best fit puts it, and on as many hosts and nodes as possible.
    fn check_placement(&self, put: &PutStart<'_>, grant: &Grant) {
        let fitting = self.fitting(put, &grant.evicted);
        let host = |node: NodeId| &self.nodes.iter().find(|n| n.id == node).unwrap().host;
        for replica in &grant.replicas {
            let segment = fitting.iter().find(|s| s.id == replica.segment).expect("a segment that fits");
            let free = self.free(segment, &grant.evicted);
            let best = free.iter().find(|f| f.0 >= extent_bytes(put.length)).unwrap();
            assert_eq!(replica.offset, best.1, "best fit in {}", segment.id);
            assert_eq!(replica.node, segment.node);
        }
        let segments: BTreeSet<_> = grant.replicas.iter().map(|r| r.segment).collect();
        assert_eq!(segments.len(), grant.replicas.len(), "two replicas in one segment");
        let hosts = |nodes: &mut dyn Iterator<Item = NodeId>| nodes.map(host).collect::<BTreeSet<_>>().len();
        let possible = hosts(&mut fitting.iter().map(|s| s.node)).min(grant.replicas.len());
        assert_eq!(hosts(&mut grant.replicas.iter().map(|r| r.node)), possible, "{put:?}: {grant:?}");
    }

    fn drop_put(&mut self, id: ObjectId, clean: &BTreeSet<usize>) {
        let i = self.objects.iter().position(|o| o.id == id).unwrap();
        let object = self.objects.remove(i);
        self.retire_unclean(&object, &object.replicas, clean);
    }

    fn retire_unclean(&mut self, object: &Object, replicas: &[(ReplicaId, SegmentId, u64)], clean: &BTreeSet<usize>) {
        for &(replica, segment, offset) in replicas.iter().filter(|r| !clean.contains(&r.0.op().slot())) {
            let bytes = extent_bytes(object.length);
            self.retired.push(Retired { replica, segment, offset, bytes, clean: false });
        }
    }

    /// The object and the slots said to be stored and aborted.
    fn ending(&self, end: &PutEnd) -> Result<(usize, BTreeSet<usize>, BTreeSet<usize>), ErrorCode> {
        let i = self.objects.iter().position(|o| o.id == end.object).ok_or(ErrorCode::GrantLost)?;
        if self.objects[i].session != end.session {
            return Err(ErrorCode::IllegalClient);
        }
        let slots = |wanted| -> BTreeSet<usize> {
            end.replicas.iter().filter(|s| s.end == wanted).map(|s| s.replica.op().slot()).collect()
        };
        let granted = |s: ReplicaId| {
            s.op().with_slot(0) == end.object.op() && (1..=self.objects[i].granted).contains(&s.op().slot())
        };
        let named: BTreeSet<ReplicaId> = end.replicas.iter().map(|s| s.replica).collect();
        if named.len() < end.replicas.len() || !named.into_iter().all(granted) {
            return Err(ErrorCode::InvalidParams);
        }
        Ok((i, slots(ReplicaEnd::Stored), slots(ReplicaEnd::Aborted)))
    }

    fn put_end(&mut self, end: &PutEnd) -> Result<Outcome, ErrorCode> {
        let (i, stored, aborted) = self.ending(end)?;
        if let Some((before, copies)) = &self.objects[i].ended {
            return if *before == stored {
                Ok(Outcome::Ended { copies: *copies })
            } else {
                Err(ErrorCode::AlreadyEnded)
            };
        }
        let object = self.objects[i].clone();
        let (kept, lost): (Vec<_>, Vec<_>) =
            object.replicas.iter().copied().partition(|r| stored.contains(&r.0.op().slot()));
        if kept.is_empty() {
            self.drop_put(end.object, &aborted);
            return Ok(Outcome::PutDropped(tidepool_proto::Error::new(ErrorCode::GrantLost, "")));
        }
        self.retire_unclean(&object, &lost, &aborted);
        let copies = kept.len() as u32;
        self.objects[i].replicas = kept;
        self.objects[i].ended = Some((stored, copies));
        Ok(Outcome::Ended { copies })
    }

    fn put_revoke(&mut self, end: &PutEnd) -> Result<Outcome, ErrorCode> {
        let (i, stored, aborted) = self.ending(end)?;
        if self.objects[i].ended.is_some() {
            return Err(ErrorCode::AlreadyEnded);
        }
        self.drop_put(end.object, &stored.union(&aborted).copied().collect());
        Ok(Outcome::Revoked)
    }

    fn discard(&mut self, id: ObjectId) -> bool {
        let old = |o: &&Object| o.id == id && o.ended.is_none() && self.clock - o.started >= DISCARD_MS;
        let found = self.objects.iter().any(|o| old(&o));
        if found {
            self.drop_put(id, &BTreeSet::new());
        }
        found
    }

    fn retire(&mut self, id: ObjectId, mode: RetireMode) -> bool {
        let Some(i) = self.objects.iter().position(|o| o.id == id && o.ended.is_some()) else { return false };
        let object = self.objects.remove(i);
        if mode == RetireMode::RetireOnly {
            for &(replica, segment, offset) in &object.replicas {
                let bytes = extent_bytes(object.length);
                self.retired.push(Retired { replica, segment, offset, bytes, clean: true });
            }
        }
        true
    }

    fn free_retired(&mut self, ids: &[ReplicaId], which: impl Fn(&Model, &Retired) -> bool) -> Outcome {
        let snapshot = self.clone();
        let (gone, kept): (Vec<_>, Vec<_>) =
            self.retired.drain(..).partition(|r| ids.contains(&r.replica) && which(&snapshot, r));
        self.retired = kept;
        Outcome::Reclaimed { replicas: gone.len() as u64, bytes: gone.iter().map(|r| r.bytes).sum() }
    }

    fn drop_replica(&mut self, id: ObjectId, replica: ReplicaId) -> Result<Outcome, ErrorCode> {
        let object = self.objects.iter_mut().find(|o| o.id == id).ok_or(ErrorCode::ObjectNotFound)?;
        let i = object.replicas.iter().position(|r| r.0 == replica).ok_or(ErrorCode::ReplicaUnavailable)?;
        if object.ended.is_none() {
            return Err(ErrorCode::NotReady);
        }
        let (replica, segment, offset) = object.replicas.remove(i);
        let (bytes, object_gone) = (extent_bytes(object.length), object.replicas.is_empty());
        self.retired.push(Retired { replica, segment, offset, bytes, clean: true });
        self.objects.retain(|o| !o.replicas.is_empty());
        Ok(Outcome::ReplicaDropped { object_gone })
    }

    fn remove(&mut self, remove: &Remove<'_>) -> Result<Outcome, ErrorCode> {
        let session = self.sessions.get(&remove.session).ok_or(ErrorCode::SessionUnknown)?;
        let floor = session.floor.max(remove.floor);
        if remove.sequence < floor {
            return Err(ErrorCode::StaleRequest);
        }
        if let Some(&recorded) = session.outcomes.get(&remove.sequence) {
            return Ok(Outcome::Removal(recorded));
        }
        let present = self.objects.iter().find(|o| o.key == remove.key).map(|o| (o.id, o.ended.is_some()));
        let removal = match (present, remove.expected) {
            (None, _) => Removal::NotFound,
            (Some((actual, _)), Some(expected)) if actual != expected => return Ok(Outcome::RemoveChanged { actual }),
            (Some((actual, true)), None) if remove.mode == RetireMode::RetireAndReclaim => {
                return Ok(Outcome::RemoveChanged { actual });
            }
            (Some((_, false)), _) => Removal::NotReady,
            (Some((id, true)), _) => {
                self.retire(id, remove.mode);
                Removal::Removed(id)
            }
        };
        let session = self.sessions.get_mut(&remove.session).unwrap();
        session.floor = floor;
        session.outcomes.retain(|&s, _| s >= floor);
        session.outcomes.insert(remove.sequence, removal);
        Ok(Outcome::Removal(removal))
    }

    /// Every read answers what the model knows.
    pub(super) fn check_reads(&self, directory: &Directory, keys: &[&str]) {
        for key in keys {
            let expected = self.objects.iter().find(|o| o.key == key.as_bytes());
            directory.with_object(TenantId::DEFAULT, key.as_bytes(), |view| {
                assert_eq!(view.map(|v| v.object), expected.map(|o| o.id), "{key}");
                let (Some(view), Some(object)) = (view, expected) else { return };
                let heard = |s| self.nodes.iter().any(|n| n.id == self.owner(s) && n.contact == Contact::Heard);
                let replicas: Vec<_> = view.replicas.iter().map(|r| (r.replica, r.segment, r.offset)).collect();
                assert_eq!(replicas, object.replicas);
                let ended = object.ended.is_some();
                assert_eq!(view.state, if ended { ObjectState::Complete } else { ObjectState::Processing });
                assert!(view.replicas.iter().all(|r| r.listed == (ended && heard(r.segment))), "{view:?}");
            });
        }
        let expected: BTreeSet<ReplicaId> = self.retired.iter().filter(|r| r.clean).map(|r| r.replica).collect();
        let clean: BTreeSet<ReplicaId> = directory.reclaimable(None, usize::MAX).iter().map(|r| r.replica).collect();
        assert_eq!(clean, expected);
        for node in &self.nodes {
            let of_node = self.retired.iter().filter(|r| !r.clean && self.owner(r.segment) == node.id);
            let expected: BTreeSet<ReplicaId> = of_node.map(|r| r.replica).collect();
            assert_eq!(directory.unclean(node.id, usize::MAX).into_iter().collect::<BTreeSet<_>>(), expected);
        }
        let mut victims: Vec<ObjectId> = self.objects.iter().filter(|o| o.ended.is_some()).map(|o| o.id).collect();
        victims.sort_unstable();
        let oldest = directory.oldest_victims(None, u64::MAX, usize::MAX, |_| true).victims;
        assert_eq!(oldest.iter().map(|v| v.object).collect::<Vec<_>>(), victims);
        for segment in &self.segments {
            let view = directory.segment(segment.id).unwrap();
            let free = self.free(segment, &[]);
            assert_eq!(view.free, free.iter().map(|f| f.0).sum::<u64>());
            assert_eq!(view.largest_free, free.last().map_or(0, |f| f.0));
        }
        assert_eq!(directory.counts().objects as usize, self.objects.len());
    }
}
