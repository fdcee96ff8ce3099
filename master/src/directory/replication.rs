//! Reads for whoever makes and drops replicas: tasks, healing, dynamic replication. Each goes by an index; none walks all copies.

use super::Directory;
use super::copies::OpenCopy;
use super::core::Core;
use super::objects::Record;
use super::op::{TaskId, Token};
use super::tasks::Task;
use super::view::CopyView;
use tidepool_proto::{LogTime, NodeId, ObjectId, ReplicaId, SegmentId};

impl Directory {
    /// Copies under way, by replica, after a cursor.
    pub fn copies(&self, after: Option<ReplicaId>, limit: usize) -> Vec<CopyView> {
        let core = self.core.read();
        let from = after.map_or(ReplicaId(0), |id| ReplicaId(id.0.saturating_add(1)));
        core.copies
            .by_replica
            .range(from..)
            .take(limit)
            .map(|(&replica, copy)| copy_view(&core, replica, copy))
            .collect()
    }

    /// One copy under way.
    pub fn copy(&self, replica: ReplicaId) -> Option<CopyView> {
        let core = self.core.read();
        core.copies.by_replica.get(&replica).map(|copy| copy_view(&core, replica, copy))
    }

    /// Copies under way that are part of a task; of task 0: of none.
    pub fn copies_of_task(&self, task: TaskId) -> Vec<CopyView> {
        let core = self.core.read();
        core.copies.of_task(task).map(|(replica, copy)| copy_view(&core, replica, copy)).collect()
    }

    /// Copies that a node makes, by replica, after a cursor.
    pub fn copies_to_node(&self, node: NodeId, after: Option<ReplicaId>, limit: usize) -> Vec<CopyView> {
        let core = self.core.read();
        let to_node = core.copies.to_node(node, after.unwrap_or(ReplicaId(0)));
        to_node.take(limit).map(|(replica, copy)| copy_view(&core, replica, copy)).collect()
    }

    /// How many copies of an object are under way.
    pub fn copies_of(&self, object: ObjectId) -> usize {
        self.core.read().copies.of(object).count()
    }

    /// Copies that started at this log time or before, the oldest first.
    pub fn copies_started_by(&self, time: LogTime, limit: usize) -> Vec<CopyView> {
        let core = self.core.read();
        // They start in the order of their ids, so the first young one ends the search.
        let old = core.copies.by_replica.iter().take_while(|(_, copy)| copy.started <= time);
        old.take(limit).map(|(&replica, copy)| copy_view(&core, replica, copy)).collect()
    }

    /// Tasks, by id.
    pub fn tasks(&self) -> Vec<(TaskId, Task)> {
        self.core.read().tasks.by_id.iter().map(|(&id, task)| (id, task.clone())).collect()
    }

    /// Tasks that run, by id.
    pub fn running_tasks(&self) -> Vec<(TaskId, Task)> {
        self.core.read().tasks.running().map(|(id, task)| (id, task.clone())).collect()
    }

    /// The task that a token made, if it is remembered.
    pub fn task_by_token(&self, token: &Token) -> Option<TaskId> {
        self.core.read().tasks.by_token(token)
    }

    /// One task.
    pub fn task(&self, id: TaskId) -> Option<Task> {
        self.core.read().tasks.by_id.get(&id).cloned()
    }

    /// COMPLETE objects with fewer replicas than are wanted, after a cursor.
    pub fn degraded(&self, after: Option<ObjectId>, limit: usize) -> Vec<ObjectId> {
        let from = after.map_or(ObjectId(0), |id| ObjectId(id.0.saturating_add(1)));
        self.core.read().degraded.range(from..).take(limit).copied().collect()
    }

    /// COMPLETE objects with more replicas than are wanted, after a cursor.
    pub fn extra(&self, after: Option<ObjectId>, limit: usize) -> Vec<ObjectId> {
        let from = after.map_or(ObjectId(0), |id| ObjectId(id.0.saturating_add(1)));
        self.core.read().extra.range(from..).take(limit).copied().collect()
    }

    /// Replicas in a segment, by address from a cursor on: where each lies, its object and itself. Those being put or
    /// copied are answered without a replica.
    pub fn replicas_in(&self, segment: SegmentId, from: u64, limit: usize) -> Vec<(u64, ObjectId, Option<ReplicaId>)> {
        let core = self.core.read();
        let Some(&slot) = core.space.by_id.get(&segment) else { return Vec::new() };
        let used = core.space.segment(slot).used.range(from..).take(limit);
        let found = used.filter_map(|(&offset, &at)| {
            let there = |r: &Record| {
                let replica = r.replicas.iter().find(|r| r.segment == slot && r.offset == offset);
                (offset, r.object, replica.filter(|_| r.is_complete()).map(|r| r.id))
            };
            self.shards.with(at, there)
        });
        found.collect()
    }

    /// How many replicas a segment has, those being put or copied included.
    pub fn replica_count(&self, segment: SegmentId) -> u64 {
        let core = self.core.read();
        core.space.by_id.get(&segment).map_or(0, |&slot| core.space.segment(slot).used.len() as u64)
    }
}

fn copy_view(core: &Core, replica: ReplicaId, copy: &OpenCopy) -> CopyView {
    let segment = core.space.segment(copy.segment);
    CopyView {
        replica,
        object: copy.object,
        task: copy.task,
        instead_of: copy.instead_of,
        started: copy.started,
        segment: segment.id,
        node: segment.node,
        incarnation: segment.incarnation,
        offset: copy.offset,
    }
}
