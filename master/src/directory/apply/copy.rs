//! Copies and moves of replicas (N2), and the tasks they are part of.

use super::release::Dropped;
use super::{Applied, Apply, Charge, Sign, check_count, invalid};
use crate::directory::copies::OpenCopy;
use crate::directory::limits::{COPIES_MAX, TASK_MESSAGE_BYTES_MAX, TASKS_ENDED_KEPT, TASKS_RUNNING_MAX};
use crate::directory::objects::{Record, Replica};
use crate::directory::op::{CopyStart, CreateTask, ReplicaEnd, RetireMode, TaskId, TaskKind};
use crate::directory::outcome::{GrantedReplica, Outcome};
use crate::directory::placement::{Plan, Request, place_beside};
use crate::directory::space::{Retired, Use};
use crate::directory::tasks::{Task, TaskState};
use std::collections::BTreeSet;
use tidepool_proto::ids::REPLICAS_PER_OBJECT_MAX;
use tidepool_proto::object::stored_bytes;
use tidepool_proto::{Error, ErrorCode, LogTime, ObjectId, ReplicaId, SegmentId};

impl Apply<'_> {
    pub(super) fn copy_start(&mut self, copy: &CopyStart) -> Applied {
        check_count("targets", copy.targets.len())?;
        let record = self.complete_record(copy.object)?;
        if self.core.copies.by_replica.len() >= COPIES_MAX {
            return Err(Error::new(
                ErrorCode::TaskLimit,
                format!("{COPIES_MAX} copies are under way, the limit; wait for some"),
            ));
        }
        if copy.task.0 != 0 && !self.core.tasks.is_running(copy.task) {
            return Err(Error::new(
                ErrorCode::TaskNotFound,
                format!("task {} has ended or is unknown: no copy starts for it", copy.task),
            ));
        }
        let coming = self.core.copies.of(copy.object).filter(|(_, other)| other.instead_of.is_none()).count();
        if copy.up_to > 0 && copy.instead_of.is_none() && record.replicas.len() + coming >= copy.up_to.into() {
            return Err(Error::new(
                ErrorCode::ReplicaAlreadyExists,
                format!(
                    "object {} has {} replicas and {coming} on their way; {} were to be",
                    copy.object,
                    record.replicas.len(),
                    copy.up_to
                ),
            ));
        }
        if let Some(source) = copy.instead_of
            && !record.replicas.iter().any(|r| r.id == source)
        {
            return Err(replica_not_found(copy.object, source));
        }
        let mut taken: Plan =
            record.replicas.iter().filter(|r| Some(r.id) != copy.instead_of).map(|r| r.segment).collect();
        let leaving = record.replicas.iter().filter(|r| Some(r.id) == copy.instead_of).map(|r| r.segment);
        let leaving: Plan = leaving.collect();
        for (_, other) in self.core.copies.of(copy.object) {
            if other.instead_of.is_some() && other.instead_of == copy.instead_of {
                return Err(Error::new(
                    ErrorCode::ObjectHasTask,
                    format!("object {}: its replica is being moved already", copy.object),
                ));
            }
            taken.push(other.segment);
        }
        // A move takes one for the one that it makes.
        if taken.len() >= REPLICAS_PER_OBJECT_MAX {
            return Err(invalid(format!("object {} has {REPLICAS_PER_OBJECT_MAX} replicas, the limit", copy.object)));
        }
        let bytes = record.extent_bytes();
        let tenant = self.core.tenants.get(record.tenant).expect("an object's tenant is registered");
        if copy.instead_of.is_none() && !tenant.allows(tenant.bytes.saturating_add(bytes), tenant.objects) {
            return Err(Error::new(
                ErrorCode::TenantQuotaExceeded,
                format!("object {}: another copy is above the quota of tenant '{}'", copy.object, tenant.name),
            ));
        }
        let request = Request {
            bytes,
            copies: 1,
            excluded: &[],
            preferred: &copy.targets,
            leaving: &leaving,
            strategy: self.core.config.config.strategy,
        };
        let only_targets = !copy.targets.is_empty();
        let chosen = place_beside(&self.core.space, self.at, &request, &taken, only_targets);
        let Some(segment) = chosen else {
            return Err(Error::new(
                ErrorCode::NoSpace,
                format!("object {} with {bytes} bytes: no segment has room for another copy", copy.object),
            ));
        };
        let at = self.core.index[&copy.object];
        let offset = self.core.space.allocate(segment, bytes);
        self.core.space.note_used(segment, offset, at);
        self.charge(record.tenant, Charge::Take { bytes, objects: 0 });
        let replica = ReplicaId::from(self.at.with_slot(1));
        let open = OpenCopy {
            object: copy.object,
            instead_of: copy.instead_of,
            segment,
            node: self.core.space.segment(segment).node,
            offset,
            bytes,
            started: self.core.clock,
            task: copy.task,
        };
        self.core.copies.insert(replica, open);
        let core = &mut *self.core;
        core.digest.add(|c| c.copy(replica, &open, &core.space));
        let place = self.core.space.segment(segment);
        Ok(Outcome::CopyGranted(GrantedReplica {
            replica,
            segment: place.id,
            node: place.node,
            incarnation: place.incarnation,
            offset,
            length: stored_bytes(record.length),
        }))
    }

    pub(super) fn copy_end(&mut self, replica: ReplicaId, end: ReplicaEnd) -> Applied {
        let Some(copy) = self.forget_copy(replica) else {
            return Err(Error::new(
                ErrorCode::GrantLost,
                format!("replica {replica} is not being copied (any more): its object went, or the copy was given up"),
            ));
        };
        let at = self.core.index[&copy.object];
        let tenant = self.with_record(at, |r| r.tenant);
        if end != ReplicaEnd::Stored {
            self.charge(tenant, Charge::Return { bytes: copy.bytes, objects: 0 });
            self.release_copy(replica, &copy, end);
            return Ok(Outcome::CopyEnded { stored: false });
        }
        self.core.space.convert(copy.segment, copy.offset, copy.bytes, Use::Processing, Use::Complete);
        let mut shard = self.shards.write(at.shard());
        let record = shard.record_mut(at.slot()).expect("the index names a record");
        self.digest_record(at, record, Sign::Sub);
        if copy.task.0 != 0 && copy.instead_of.is_none() {
            // An operator wants one more; what is above the number wanted now stays above it.
            let above = record.replicas.len().saturating_sub(record.asked.wanted().into());
            record.asked = record.asked.at_least(record.replicas.len() + 1 - above);
        }
        record.replicas.push(Replica { id: replica, offset: copy.offset, segment: copy.segment });
        let gone = copy.instead_of.and_then(|id| record.replicas.iter().position(|r| r.id == id));
        let gone = gone.map(|place| record.replicas.remove(place));
        self.digest_record(at, record, Sign::Add);
        self.core.note_copies(record);
        drop(shard);
        if let Some(gone) = gone {
            self.charge(tenant, Charge::Return { bytes: copy.bytes, objects: 0 });
            // Readers may hold leases on it.
            self.retire_readable(copy.object, gone, copy.bytes, RetireMode::RetireOnly);
        }
        self.count_done(copy.task, copy.bytes);
        Ok(Outcome::CopyEnded { stored: true })
    }

    /// Drops a replica above the number wanted. Readers may hold leases on it.
    pub(super) fn drop_extra(&mut self, object: ObjectId, replica: ReplicaId) -> Applied {
        let record = self.complete_record(object)?;
        let found = record.replicas.iter().copied().find(|r| r.id == replica);
        let found = found.ok_or_else(|| replica_not_found(object, replica))?;
        let (held, wanted) = (record.replicas.len(), record.asked.wanted());
        if held <= wanted.into() {
            return Err(Error::new(
                ErrorCode::ReplicaNotFound,
                format!("object {object} has {held} replicas and wants {wanted}: none is extra"),
            ));
        }
        self.drop_one_of_several(self.core.index[&object], found, Dropped::Lost);
        Ok(Outcome::ReplicaDropped { object_gone: false })
    }

    /// Takes a copy off the books; its extent is the caller's.
    pub(super) fn forget_copy(&mut self, replica: ReplicaId) -> Option<OpenCopy> {
        let copy = self.core.copies.remove(replica)?;
        let core = &mut *self.core;
        core.digest.sub(|c| c.copy(replica, &copy, &core.space));
        Some(copy)
    }

    /// The copies of an object that goes are given up: their datanodes must be fenced first (W5). The bytes leave the
    /// account of the object's tenant.
    pub(super) fn drop_copies(&mut self, record: &Record) {
        let copies: Vec<ReplicaId> = self.core.copies.of(record.object).map(|(replica, _)| replica).collect();
        for replica in copies {
            let copy = self.forget_copy(replica).expect("just listed");
            self.charge(record.tenant, Charge::Return { bytes: copy.bytes, objects: 0 });
            self.release_copy(replica, &copy, ReplicaEnd::Unknown);
        }
    }

    /// Copies into a segment that goes.
    pub(super) fn lose_copies(&mut self, slot: u32) {
        let node = self.core.space.segment(slot).node;
        for replica in self.core.copies.to_segment(node, slot) {
            let copy = self.forget_copy(replica).expect("just listed");
            let tenant = self.with_record(self.core.index[&copy.object], |r| r.tenant);
            self.charge(tenant, Charge::Return { bytes: copy.bytes, objects: 0 });
            self.core.space.give(slot, copy.offset, copy.bytes, Use::Processing);
        }
    }

    fn release_copy(&mut self, replica: ReplicaId, copy: &OpenCopy, end: ReplicaEnd) {
        if end == ReplicaEnd::Aborted {
            self.core.space.give(copy.segment, copy.offset, copy.bytes, Use::Processing);
            return;
        }
        self.core.space.convert(copy.segment, copy.offset, copy.bytes, Use::Processing, Use::Retired);
        let OpenCopy { object, segment, offset, bytes, .. } = *copy;
        self.core.retire(replica, Retired { object, segment, offset, bytes, clean: false });
    }

    pub(super) fn create_task(&mut self, create: &CreateTask) -> Applied {
        if let Some(task) = self.core.tasks.by_token(&create.token) {
            return Ok(Outcome::TaskCreated { task });
        }
        check_count("segments", create.sources.len() + create.targets.len())?;
        if self.core.tasks.running().len() >= TASKS_RUNNING_MAX {
            return Err(Error::new(
                ErrorCode::TaskLimit,
                format!("{TASKS_RUNNING_MAX} tasks are running, the limit; wait for some, or cancel them"),
            ));
        }
        let mut named = BTreeSet::new();
        for &segment in create.sources.iter().chain(&create.targets) {
            self.core.space.slot(segment)?;
            if !named.insert(segment) {
                return Err(invalid(format!("segment {segment} is named twice in one task")));
            }
        }
        match create.kind {
            TaskKind::Copy if create.targets.is_empty() => return Err(invalid("a copy names its targets".into())),
            TaskKind::Move if create.sources.len() != 1 || create.targets.len() != 1 => {
                return Err(invalid("a move names one source and one target".into()));
            }
            TaskKind::Drain if create.sources.is_empty() => return Err(invalid("a drain names its sources".into())),
            TaskKind::Copy | TaskKind::Move => self.check_places(create)?,
            TaskKind::Drain => create.sources.iter().for_each(|&segment| self.set_draining(segment, true)),
        }
        let id = TaskId(self.at.0);
        let task = Task {
            asked: CreateTask { concurrency: create.concurrency.max(1), ..create.clone() },
            created: self.core.clock,
            state: TaskState::Running,
            ended: LogTime(0),
            done: 0,
            done_bytes: 0,
            left: 0,
            message: "".into(),
        };
        self.core.digest.add(|c| c.task(id, &task));
        self.core.tasks.insert(id, task);
        Ok(Outcome::TaskCreated { task: id })
    }

    /// A copy or move is of an object that is there, to where it is not, and from where it is.
    fn check_places(&self, create: &CreateTask) -> Result<(), Error> {
        let record = self.complete_record(create.object)?;
        let holds =
            |segment: SegmentId| record.replicas.iter().any(|r| self.core.space.segment(r.segment).id == segment);
        if let Some(target) = create.targets.iter().find(|&&target| holds(target)) {
            return Err(Error::new(
                ErrorCode::ReplicaAlreadyExists,
                format!("object {} has a replica in segment {target} already", create.object),
            ));
        }
        match create.sources.iter().find(|&&source| !holds(source)) {
            Some(source) => Err(Error::new(
                ErrorCode::ReplicaNotFound,
                format!("object {} has no replica in segment {source}", create.object),
            )),
            None => Ok(()),
        }
    }

    pub(super) fn end_task(&mut self, id: TaskId, state: TaskState, left: u64, message: &str) -> Applied {
        let core = &mut *self.core;
        let Some(task) = core.tasks.by_id.get_mut(&id) else { return Err(task_not_found(id)) };
        if task.state != TaskState::Running {
            // Ended before: the first end counts.
            return Ok(Outcome::Done);
        }
        if state == TaskState::Running {
            return Err(invalid(format!("task {id} ends as running")));
        }
        if message.len() > TASK_MESSAGE_BYTES_MAX {
            let bytes = message.len();
            return Err(invalid(format!("task {id}: message of {bytes} bytes; the limit is {TASK_MESSAGE_BYTES_MAX}")));
        }
        core.digest.sub(|c| c.task(id, task));
        (task.state, task.ended, task.left, task.message) = (state, core.clock, left, message.into());
        core.digest.add(|c| c.task(id, task));
        let (kind, sources, unmount) = (task.asked.kind, task.asked.sources.clone(), task.asked.unmount);
        core.tasks.note_ended(id, core.clock);
        while let Some((old, task)) = core.tasks.forget_above(TASKS_ENDED_KEPT) {
            core.digest.sub(|c| c.task(old, &task));
        }
        // What is empty and to be unmounted takes no puts until it is; all else is as any segment again, unless another
        // drain has it too.
        if kind == TaskKind::Drain && !(state == TaskState::Succeeded && unmount) {
            let drained = self.core.tasks.drained();
            let free = sources.into_iter().filter(|segment| !drained.contains(segment));
            free.for_each(|segment| self.set_draining(segment, false));
        }
        Ok(Outcome::Done)
    }

    fn count_done(&mut self, id: TaskId, bytes: u64) {
        let core = &mut *self.core;
        if let Some(task) = core.tasks.by_id.get_mut(&id) {
            core.digest.sub(|c| c.task(id, task));
            task.done += 1;
            task.done_bytes += bytes;
            core.digest.add(|c| c.task(id, task));
        }
    }

    fn set_draining(&mut self, segment: SegmentId, draining: bool) {
        let core = &mut *self.core;
        let Some(&slot) = core.space.by_id.get(&segment) else { return };
        let place = core.space.segment(slot);
        core.digest.sub(|c| c.segment(place));
        core.space.set_draining(slot, draining);
        let place = core.space.segment(slot);
        core.digest.add(|c| c.segment(place));
    }

    fn complete_record(&self, object: ObjectId) -> Result<Record, Error> {
        let not_found = || Error::new(ErrorCode::ObjectNotFound, format!("object {object} is not in the directory"));
        let &at = self.core.index.get(&object).ok_or_else(not_found)?;
        let record = self.with_record(at, Record::clone);
        if record.is_complete() {
            return Ok(record);
        }
        Err(Error::new(ErrorCode::NotReady, format!("object {object} is being put")))
    }
}

fn replica_not_found(object: ObjectId, replica: ReplicaId) -> Error {
    Error::new(ErrorCode::ReplicaNotFound, format!("object {object} has no replica {replica} (any more)"))
}

fn task_not_found(id: TaskId) -> Error {
    Error::new(ErrorCode::TaskNotFound, format!("task {id} is unknown, or was forgotten after it ended"))
}
