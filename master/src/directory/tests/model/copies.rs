//! Copies and tasks of the model.

use super::{Model, Object, Retired, Segment};
use crate::directory::{
    Answered, ClearReplicas, CopyStart, CreateTask, GrantedReplica, Outcome, ReplicaEnd, TaskId, TaskKind, TaskState,
    Token,
};
use std::collections::BTreeSet;
use tidepool_proto::object::stored_bytes;
use tidepool_proto::{ErrorCode, NodeId, ObjectId, OpId, ReplicaId, SegmentId};

/// A replica being made.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Copying {
    pub(super) replica: ReplicaId,
    pub(super) object: ObjectId,
    pub(super) instead_of: Option<ReplicaId>,
    pub(super) segment: SegmentId,
    pub(super) offset: u64,
    pub(super) bytes: u64,
    pub(super) started: u64,
    pub(super) task: TaskId,
}

#[derive(Clone, Debug)]
pub(super) struct Tasked {
    pub(super) id: TaskId,
    pub(super) kind: TaskKind,
    pub(super) concurrency: u32,
    pub(super) sources: Vec<SegmentId>,
    pub(super) unmount: bool,
    pub(super) token: Token,
    pub(super) state: TaskState,
    pub(super) done: u64,
    pub(super) done_bytes: u64,
    pub(super) left: u64,
}

impl Model {
    /// Bytes of an object's replicas and of its copies.
    pub(super) fn held_bytes(&self, object: &Object) -> u64 {
        let copies = self.copies.iter().filter(|c| c.object == object.id).map(|c| c.bytes);
        object.all_bytes() + copies.sum::<u64>()
    }

    pub(super) fn copy_start(&mut self, at: OpId, copy: &CopyStart, outcome: &Outcome) {
        let object = match self.copyable(copy) {
            Ok(object) => object,
            Err(code) => {
                return match outcome {
                    Outcome::Refused(error) => assert_eq!(error.code(), code, "{copy:?}: {error}"),
                    other => panic!("{copy:?} should be refused {code:?}, not {other:?}"),
                };
            }
        };
        let (taken, leaving) = self.places(&object, copy);
        let usable = |s: &&Segment| s.fits(self, object.bytes()) && !taken.contains(&s.id) && leaving != Some(s.id);
        let usable: Vec<&Segment> = self.segments.iter().filter(usable).collect();
        let chosen = match (copy.targets.is_empty(), outcome) {
            (false, _) => copy.targets.iter().find_map(|id| usable.iter().find(|s| s.id == *id).copied()),
            (true, Outcome::CopyGranted(granted)) => usable.iter().find(|s| s.id == granted.segment).copied(),
            (true, _) => None,
        };
        let Some(chosen) = chosen else {
            let Outcome::Refused(error) = outcome else { panic!("{copy:?}: {outcome:?} is no place for it") };
            assert_eq!(error.code(), ErrorCode::NoSpace, "{copy:?}");
            assert!(usable.is_empty() || !copy.targets.is_empty(), "{copy:?} could go to {usable:?}");
            return;
        };
        if copy.targets.is_empty() {
            self.check_far(&usable, chosen, &taken, leaving);
        }
        let offset = self.free(chosen, &[]).iter().find(|f| f.0 >= object.bytes()).unwrap().1;
        let replica = ReplicaId(at.with_slot(1).0);
        let (segment, node) = (chosen.id, chosen.node);
        let incarnation = self.nodes.iter().find(|n| n.id == node).unwrap().life;
        let length = stored_bytes(object.length);
        let granted = GrantedReplica { replica, segment, node, incarnation, offset, length };
        assert_eq!(*outcome, Outcome::CopyGranted(granted), "{copy:?}");
        let (instead_of, bytes, started, task) = (copy.instead_of, object.bytes(), self.clock, copy.task);
        let object = object.id;
        self.copies.push(Copying { replica, object, instead_of, segment, offset, bytes, started, task });
    }

    /// The object of a copy that may start, if there is a place for it.
    fn copyable(&mut self, copy: &CopyStart) -> Result<Object, ErrorCode> {
        let object = self.complete(copy.object)?.clone();
        let runs = |t: &Tasked| t.id == copy.task && t.state == TaskState::Running;
        if copy.task.0 != 0 && !self.tasks.iter().any(runs) {
            if self.tasks.iter().any(|t| t.id == copy.task) {
                self.events.insert("a copy of an ended task does not start");
            }
            return Err(ErrorCode::TaskNotFound);
        }
        let coming = self.copies.iter().filter(|c| c.object == object.id && c.instead_of.is_none()).count();
        let full = object.replicas.len() + coming >= copy.up_to.into();
        if copy.up_to > 0 && copy.instead_of.is_none() && full {
            self.events.insert(if coming > 0 { "a copy is asked for again" } else { "a copy is one too many" });
            return Err(ErrorCode::ReplicaAlreadyExists);
        }
        if copy.instead_of.is_some_and(|source| !object.replicas.iter().any(|r| r.0 == source)) {
            return Err(ErrorCode::ReplicaNotFound);
        }
        if copy.instead_of.is_some() && self.copies.iter().any(|c| c.instead_of == copy.instead_of) {
            return Err(ErrorCode::ObjectHasTask);
        }
        let own = self.objects.iter().filter(|o| o.tenant == object.tenant);
        let held: u64 = own.map(|o| self.held_bytes(o)).sum();
        let quota = self.tenants[&object.tenant].1;
        // A move needs the room of the copy only until the old replica goes.
        let exceeds = quota.bytes > 0 && held + object.bytes() > quota.bytes;
        let own_objects = self.objects.iter().filter(|o| o.tenant == object.tenant).count() as u64;
        if copy.instead_of.is_none() && (exceeds || quota.objects > 0 && own_objects > quota.objects) {
            return Err(ErrorCode::TenantQuotaExceeded);
        }
        if exceeds {
            self.events.insert("a move is above the quota for a while");
        }
        Ok(object)
    }

    /// Segments that have the object, or will; and the one from which a replica goes.
    fn places(&self, object: &Object, copy: &CopyStart) -> (Vec<SegmentId>, Option<SegmentId>) {
        let leaving = object.replicas.iter().find(|r| Some(r.0) == copy.instead_of).map(|r| r.1);
        let stay = object.replicas.iter().filter(|r| Some(r.0) != copy.instead_of).map(|r| r.1);
        let coming = self.copies.iter().filter(|c| c.object == object.id).map(|c| c.segment);
        (stay.chain(coming).collect(), leaving)
    }

    /// Nothing is farther from the other replicas; and of what is as far, another node's than the one left.
    fn check_far(&self, usable: &[&Segment], chosen: &Segment, taken: &[SegmentId], leaving: Option<SegmentId>) {
        let host = |node: NodeId| &self.nodes.iter().find(|n| n.id == node).unwrap().host;
        let distance = |s: &Segment| {
            let near = |id: &SegmentId| match self.owner(*id) {
                node if node == s.node => 0,
                node if host(node) == host(s.node) => 1,
                _ => 2,
            };
            taken.iter().map(near).min().unwrap_or(2)
        };
        let farthest = usable.iter().map(|s| distance(s)).max().unwrap();
        assert_eq!(distance(chosen), farthest, "a farther place is free");
        let left = leaving.map(|id| self.owner(id));
        let away = usable.iter().any(|s| distance(s) == farthest && Some(s.node) != left);
        assert!(!away || Some(chosen.node) != left, "the copy stays on its node");
    }

    pub(super) fn copy_end(&mut self, replica: ReplicaId, end: ReplicaEnd) -> Result<Outcome, ErrorCode> {
        let i = self.copies.iter().position(|c| c.replica == replica).ok_or(ErrorCode::GrantLost)?;
        let copy = self.copies.remove(i);
        match end {
            ReplicaEnd::Aborted => return Ok(Outcome::CopyEnded { stored: false }),
            ReplicaEnd::Unknown => {
                self.give_up(&copy);
                return Ok(Outcome::CopyEnded { stored: false });
            }
            ReplicaEnd::Stored => {}
        }
        let object = self.objects.iter_mut().find(|o| o.id == copy.object).unwrap();
        let before = object.replicas.len();
        if copy.task.0 != 0 && copy.instead_of.is_none() {
            let extra = before.saturating_sub(object.wanted);
            object.wanted = object.wanted.max(before + 1 - extra);
        }
        object.replicas.push((replica, copy.segment, copy.offset));
        let source = object.replicas.iter().position(|r| Some(r.0) == copy.instead_of);
        if let Some(source) = source {
            let (replica, segment, offset) = object.replicas.remove(source);
            assert_eq!(object.replicas.len(), before);
            self.retired.push(Retired { replica, segment, offset, bytes: copy.bytes, clean: true });
        }
        let event = match (copy.instead_of, source) {
            (Some(_), Some(_)) => "a replica is moved",
            (Some(_), None) => "a replica that was being moved was dropped",
            (None, _) => "a replica is added",
        };
        self.events.insert(event);
        if !object.group.is_empty() {
            self.events.insert("a copy of a group's member");
        }
        let made = object.ended.as_ref().unwrap().1 as usize;
        if before < made && object.replicas.len() > before {
            self.events.insert("a lost replica is made again");
        }
        if before < object.wanted && before >= made && object.replicas.len() > before && copy.task.0 == 0 {
            self.events.insert("a replica that was never made is made");
        }
        if object.replicas.len() > object.wanted {
            self.events.insert("an object has more replicas than are wanted");
        }
        for task in self.tasks.iter_mut().filter(|t| t.id == copy.task) {
            task.done += 1;
            task.done_bytes += copy.bytes;
        }
        Ok(Outcome::CopyEnded { stored: true })
    }

    /// Nobody may use the space until the datanode says that it writes no more.
    pub(super) fn give_up(&mut self, copy: &Copying) {
        let Copying { replica, segment, offset, bytes, .. } = *copy;
        self.retired.push(Retired { replica, segment, offset, bytes, clean: false });
    }

    /// A replica above the number that is wanted goes.
    pub(super) fn drop_extra(&mut self, id: ObjectId, replica: ReplicaId) -> Result<Outcome, ErrorCode> {
        let object = self.complete(id)?;
        let there = object.replicas.iter().any(|r| r.0 == replica);
        if !there || object.replicas.len() <= object.wanted {
            return Err(ErrorCode::ReplicaNotFound);
        }
        self.drop_replica(id, replica)
    }

    pub(super) fn clear_replicas(&mut self, clear: &ClearReplicas) -> Result<Outcome, ErrorCode> {
        match self.check_turn(clear.session, clear.turn)? {
            None => {}
            Some(Answered::Cleared(cleared)) => {
                self.events.insert("a late duplicate clears nothing");
                return Ok(Outcome::Cleared { cleared });
            }
            Some(_) => return Err(ErrorCode::InvalidParams),
        }
        let mut cleared = false;
        for &replica in &clear.replicas {
            if self.drop_replica(clear.object, replica).is_ok() {
                cleared = true;
                // One less is wanted, and at least one.
                for object in self.objects.iter_mut().filter(|o| o.id == clear.object) {
                    object.wanted = (object.wanted - 1).max(1);
                }
            }
        }
        self.record(clear.session, clear.turn, Answered::Cleared(cleared));
        Ok(Outcome::Cleared { cleared })
    }

    pub(super) fn create_task(&mut self, at: OpId, create: &CreateTask) -> Result<Outcome, ErrorCode> {
        if let Some(task) = self.tasks.iter().find(|t| t.token == create.token) {
            self.events.insert("a task is asked for again");
            return Ok(Outcome::TaskCreated { task: task.id });
        }
        let named: Vec<SegmentId> = create.sources.iter().chain(&create.targets).copied().collect();
        let known = |id: &SegmentId| self.segments.iter().any(|s| s.id == *id);
        // The first segment at fault says which fault it is.
        for (i, segment) in named.iter().enumerate() {
            if !known(segment) {
                return Err(ErrorCode::SegmentNotFound);
            }
            if named[..i].contains(segment) {
                return Err(ErrorCode::InvalidParams);
            }
        }
        let counts = (create.sources.len(), create.targets.len());
        match (create.kind, counts) {
            (TaskKind::Copy, (_, 0)) | (TaskKind::Drain, (0, _)) => return Err(ErrorCode::InvalidParams),
            (TaskKind::Move, counts) if counts != (1, 1) => return Err(ErrorCode::InvalidParams),
            (TaskKind::Copy | TaskKind::Move, _) => {
                let object = self.complete(create.object)?;
                let has: BTreeSet<SegmentId> = object.replicas.iter().map(|r| r.1).collect();
                if create.targets.iter().any(|target| has.contains(target)) {
                    return Err(ErrorCode::ReplicaAlreadyExists);
                }
                if !create.sources.iter().all(|source| has.contains(source)) {
                    return Err(ErrorCode::ReplicaNotFound);
                }
            }
            (TaskKind::Drain, _) => {
                for segment in self.segments.iter_mut().filter(|s| create.sources.contains(&s.id)) {
                    segment.draining = true;
                }
            }
        }
        let (kind, sources, unmount) = (create.kind, create.sources.clone(), create.unmount);
        let (id, token, state) = (TaskId(at.0), create.token, TaskState::Running);
        let concurrency = create.concurrency.max(1);
        let (done, done_bytes, left) = (0, 0, 0);
        self.tasks.push(Tasked { id, kind, concurrency, sources, unmount, token, state, done, done_bytes, left });
        Ok(Outcome::TaskCreated { task: id })
    }

    pub(super) fn end_task(&mut self, id: TaskId, state: TaskState, left: u64) -> Result<Outcome, ErrorCode> {
        let task = self.tasks.iter_mut().find(|t| t.id == id).ok_or(ErrorCode::TaskNotFound)?;
        if task.state != TaskState::Running {
            self.events.insert("a task ends again");
            return Ok(Outcome::Done);
        }
        if state == TaskState::Running {
            return Err(ErrorCode::InvalidParams);
        }
        (task.state, task.left) = (state, left);
        let ended = task.clone();
        if ended.kind != TaskKind::Drain || state == TaskState::Succeeded && ended.unmount {
            return Ok(Outcome::Done);
        }
        for segment in self.segments.iter_mut().filter(|s| ended.sources.contains(&s.id)) {
            let runs = |t: &Tasked| t.kind == TaskKind::Drain && t.state == TaskState::Running;
            segment.draining = self.tasks.iter().any(|t| runs(t) && t.sources.contains(&segment.id));
            self.events.insert(if segment.draining { "another drain has the segment" } else { "a drain ended" });
        }
        Ok(Outcome::Done)
    }

    fn complete(&self, id: ObjectId) -> Result<&Object, ErrorCode> {
        let object = self.object(id).ok_or(ErrorCode::ObjectNotFound)?;
        if object.ended.is_some() { Ok(object) } else { Err(ErrorCode::NotReady) }
    }

    /// Objects that are being copied.
    pub(in crate::directory::tests) fn copied(&self) -> Vec<ObjectId> {
        self.copies.iter().map(|c| c.object).collect()
    }
    /// Tasks that run.
    pub(in crate::directory::tests) fn running(&self) -> Vec<TaskId> {
        self.tasks.iter().filter(|t| t.state == TaskState::Running).map(|t| t.id).collect()
    }
    /// Copies under way.
    pub(in crate::directory::tests) fn copying(&self) -> Vec<ReplicaId> {
        self.copies.iter().map(|c| c.replica).collect()
    }
    /// Replicas of an object and their segments.
    pub(in crate::directory::tests) fn replicas(&self, id: ObjectId) -> Vec<(ReplicaId, SegmentId)> {
        self.object(id).map(|o| o.replicas.iter().map(|r| (r.0, r.1)).collect()).unwrap_or_default()
    }
    pub(in crate::directory::tests) fn task_ids(&self) -> Vec<TaskId> {
        self.tasks.iter().map(|t| t.id).collect()
    }
}

impl Segment {
    /// Whether it may be chosen for an extent.
    pub(super) fn fits(&self, model: &Model, bytes: u64) -> bool {
        !self.draining && model.heard(self.id) && model.free(self, &[]).last().is_some_and(|f| f.0 >= bytes)
    }
}
