//! Tasks that operators ask for: copies, moves, drains. Replicated, so that a new leader goes on with them.

use super::op::{CreateTask, TaskId, TaskKind, Token};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use tidepool_proto::{LogTime, SegmentId};

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
    pub asked: CreateTask,
    /// When it was asked for.
    pub created: LogTime,
    /// How far it is.
    pub state: TaskState,
    /// When it ended; 0 while it runs.
    pub ended: LogTime,
    /// Replicas made for it.
    pub done: u64,
    /// Bytes of their extents.
    pub done_bytes: u64,
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
    running: BTreeSet<TaskId>,
    /// Those that ended, by when they did.
    ended: BTreeSet<(LogTime, TaskId)>,
}

impl Tasks {
    pub(super) fn by_token(&self, token: &Token) -> Option<TaskId> {
        self.by_token.get(token).copied()
    }

    /// Tasks that run, by id.
    pub(super) fn running(&self) -> impl ExactSizeIterator<Item = (TaskId, &Task)> {
        self.running.iter().map(|id| (*id, &self.by_id[id]))
    }

    /// Whether a task runs.
    pub(super) fn is_running(&self, id: TaskId) -> bool {
        self.running.contains(&id)
    }

    pub(super) fn insert(&mut self, id: TaskId, task: Task) {
        self.by_token.insert(task.asked.token, id);
        if task.state == TaskState::Running {
            self.running.insert(id);
        } else {
            self.ended.insert((task.ended, id));
        }
        assert!(self.by_id.insert(id, task).is_none(), "task {id:?} exists");
    }

    /// Notes that a task has ended.
    pub(super) fn note_ended(&mut self, id: TaskId, at: LogTime) {
        self.running.remove(&id);
        self.ended.insert((at, id));
    }

    /// Segments that drains which run are to empty.
    pub(super) fn drained(&self) -> BTreeSet<SegmentId> {
        let drains = self.running().filter(|(_, task)| task.asked.kind == TaskKind::Drain);
        drains.flat_map(|(_, task)| task.asked.sources.iter().copied()).collect()
    }

    /// Whether the indexes are those of the tasks.
    pub(super) fn indexes_agree(&self) -> bool {
        let by_token = self.by_id.iter().map(|(&id, task)| (task.asked.token, id)).collect();
        let (running, ended): (Vec<_>, Vec<_>) =
            self.by_id.iter().partition(|(_, task)| task.state == TaskState::Running);
        self.by_token == by_token
            && self.running == running.into_iter().map(|(&id, _)| id).collect()
            && self.ended == ended.into_iter().map(|(&id, task)| (task.ended, id)).collect()
    }

    /// The one that ended first, if more are remembered than `kept`.
    pub(super) fn forget_above(&mut self, kept: usize) -> Option<(TaskId, Task)> {
        if self.ended.len() <= kept {
            return None;
        }
        let (_, id) = self.ended.pop_first()?;
        let task = self.by_id.remove(&id).expect("an ended task is there");
        self.by_token.remove(&task.asked.token);
        Some((id, task))
    }
}
