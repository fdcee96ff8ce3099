//! Tasks that operators ask for: copies, moves, drains. Replicated, so that a new leader goes on with them.

use super::op::{TaskId, TaskKind, Token};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use tidepool_proto::{LogTime, ObjectId, SegmentId};

/// How far a task is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum TaskState {
    /// Being worked on.
    Running,
    /// All of it was done.
    Succeeded,
    /// Some of it was not done; the message says what.
    Failed,
    /// An operator ended it.
    Cancelled,
}

impl TaskState {
    /// All, in the order of their numbers.
    pub const ALL: [TaskState; 4] = [TaskState::Running, TaskState::Succeeded, TaskState::Failed, TaskState::Cancelled];

    /// Name in answers.
    pub fn name(self) -> &'static str {
        match self {
            TaskState::Running => "RUNNING",
            TaskState::Succeeded => "SUCCEEDED",
            TaskState::Failed => "FAILED",
            TaskState::Cancelled => "CANCELLED",
        }
    }
}

/// One task.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Task {
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
    /// Retry token.
    pub token: Token,
    /// When it was asked for.
    pub created: LogTime,
    /// How far it is.
    pub state: TaskState,
    /// When it ended; 0 while it runs.
    pub ended: LogTime,
    /// Replicas made for it.
    pub done: u64,
    /// Replicas that it did not make, when it ended.
    pub left: u64,
    /// Why, if it failed.
    pub message: Arc<str>,
}

/// All tasks: those that run, and the last ones that ended.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub(super) struct Tasks {
    pub(super) by_id: BTreeMap<TaskId, Task>,
    by_token: BTreeMap<Token, TaskId>,
    /// Those that ended, by when they did.
    ended: BTreeSet<(LogTime, TaskId)>,
}

impl Tasks {
    pub(super) fn by_token(&self, token: &Token) -> Option<TaskId> {
        self.by_token.get(token).copied()
    }

    /// Tasks that run.
    pub(super) fn running(&self) -> usize {
        self.by_id.len() - self.ended.len()
    }

    pub(super) fn insert(&mut self, id: TaskId, task: Task) {
        self.by_token.insert(task.token, id);
        if task.state != TaskState::Running {
            self.ended.insert((task.ended, id));
        }
        assert!(self.by_id.insert(id, task).is_none(), "task {id:?} exists");
    }

    /// Notes that a task has ended.
    pub(super) fn note_ended(&mut self, id: TaskId, at: LogTime) {
        self.ended.insert((at, id));
    }

    /// Segments that drains which run are to empty.
    pub(super) fn drained(&self) -> BTreeSet<SegmentId> {
        let drains = |task: &&Task| task.kind == TaskKind::Drain && task.state == TaskState::Running;
        self.by_id.values().filter(drains).flat_map(|task| task.sources.iter().copied()).collect()
    }

    /// Whether the indexes are those of the tasks.
    pub(super) fn indexes_agree(&self) -> bool {
        let by_token = self.by_id.iter().map(|(&id, task)| (task.token, id)).collect();
        let ended = self.by_id.iter().filter(|(_, task)| task.state != TaskState::Running);
        self.by_token == by_token && self.ended == ended.map(|(&id, task)| (task.ended, id)).collect()
    }

    /// The one that ended first, if more are remembered than `kept`.
    pub(super) fn forget_above(&mut self, kept: usize) -> Option<(TaskId, Task)> {
        if self.ended.len() <= kept {
            return None;
        }
        let (_, id) = self.ended.pop_first()?;
        let task = self.by_id.remove(&id).expect("an ended task is there");
        self.by_token.remove(&task.token);
        Some((id, task))
    }
}
