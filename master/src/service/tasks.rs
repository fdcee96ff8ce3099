//! Tasks: copies, moves and drains that operators ask for, and the healing of what lost a copy (N2). The tasks are in the
//! log; what is kept here is only how often each part was tried in this term. A new leader goes on where the old one was.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use smallvec::SmallVec;
use tidepool_proto::{Error, ErrorCode, ObjectId, ReplicaId, SegmentId, v1};

use super::core::{Service, unexpected, uuid};
use super::room::{self, Wanted};
use super::tenure::Tenure;
use crate::directory::limits::COPIES_MAX;
use crate::directory::{
    CopyStart, CopyView, CreateTask, ObjectState, Op, Outcome, Task, TaskId, TaskKind, TaskState, TenantId,
};

/// How often tasks are looked at.
pub const INTERVAL: Duration = Duration::from_millis(100);
/// Times one replica's copy is tried before it counts as failed.
const ATTEMPTS_MAX: u32 = 10;
/// Objects under way at once of a drain that does not say.
const CONCURRENCY_DEFAULT: u32 = 4;
/// Objects under way at once of any drain.
const CONCURRENCY_MAX: u32 = 256;
/// Replicas of a draining segment looked at in one round.
const REPLICAS_PER_ROUND: usize = 4_096;
/// Copies for healing that are under way at once.
const HEALING_MAX: usize = 64;
/// Rounds for which healing rests after a copy was refused.
const HEALING_REST_ROUNDS: usize = 10;
/// Bytes of a task's message; the directory refuses longer ones.
const MESSAGE_BYTES_MAX: usize = 1_000;

/// One replica of a task: of this object, to or from this segment.
type Part = (TaskId, ObjectId, SegmentId);

/// How often each part of each task was tried in this term, and why it failed last.
#[derive(Default)]
pub struct Attempts(Mutex<BTreeMap<Part, (u32, Arc<str>)>>);

impl Attempts {
    /// Counts one more; false: that was enough.
    fn more(&self, part: Part) -> bool {
        let mut parts = self.0.lock();
        let (count, _) = parts.entry(part).or_insert((0, "the datanode did not make the copy".into()));
        *count += 1;
        *count <= ATTEMPTS_MAX
    }

    /// Notes why it did not begin. What passes by itself does not count.
    fn refused(&self, part: Part, why: &Error) {
        if let Some((count, last)) = self.0.lock().get_mut(&part) {
            *last = why.to_string().into();
            if matches!(why.code(), ErrorCode::TaskLimit | ErrorCode::ObjectHasTask) {
                *count -= 1;
            }
        }
    }

    fn exhausted(&self, task: TaskId) -> BTreeMap<(ObjectId, SegmentId), Arc<str>> {
        let parts = self.0.lock();
        let of_task = parts.iter().filter(|((id, ..), (count, _))| *id == task && *count > ATTEMPTS_MAX);
        of_task.map(|((_, object, segment), (_, why))| ((*object, *segment), why.clone())).collect()
    }

    fn forget(&self, task: TaskId) {
        self.0.lock().retain(|(id, ..), _| *id != task);
    }
}

/// One round over all tasks that run.
pub async fn work(service: &Arc<Service>, tenure: &Arc<Tenure>) -> Result<(), Error> {
    super::copying::give_up(service, tenure).await?;
    for (id, task) in service.directory().tasks().into_iter().filter(|(_, task)| task.state == TaskState::Running) {
        let copies: Vec<CopyView> =
            service.directory().copies(None, COPIES_MAX).into_iter().filter(|copy| copy.task == id).collect();
        let worked = match task.kind {
            TaskKind::Copy | TaskKind::Move => place(service, tenure, id, &task, &copies).await,
            TaskKind::Drain => drain(service, tenure, id, &task, &copies).await,
        };
        match worked {
            Err(error) if error.code() == ErrorCode::NotLeader => return Err(error),
            Err(error) => tracing::warn!(task = %id, %error, "a task made no progress; it goes on"),
            Ok(()) => {}
        }
    }
    Ok(())
}

/// A copy or move: each target that has no replica yet gets one.
async fn place(service: &Service, tenure: &Tenure, id: TaskId, task: &Task, copies: &[CopyView]) -> Result<(), Error> {
    let held = service.directory().with_object_id(task.object, |view| {
        let view = view.filter(|v| v.state == ObjectState::Complete)?;
        Some(view.replicas.iter().map(|r| (r.segment, r.replica)).collect::<SmallVec<[(SegmentId, ReplicaId); 4]>>())
    });
    let Some(held) = held else {
        return end(service, tenure, id, TaskState::Failed, 1, "the object is not in the directory any more").await;
    };
    let missing = |target: &&SegmentId| !held.iter().any(|(segment, _)| segment == *target);
    let missing: Vec<SegmentId> = task.targets.iter().filter(missing).copied().collect();
    let source = task.sources.first().filter(|_| task.kind == TaskKind::Move);
    let instead_of = held.iter().find(|(segment, _)| Some(segment) == source).map(|(_, replica)| *replica);
    if missing.is_empty() && copies.is_empty() {
        if instead_of.is_some() {
            let why = "the target got a replica otherwise; the source still has its own";
            return end(service, tenure, id, TaskState::Failed, 1, why).await;
        }
        return end(service, tenure, id, TaskState::Succeeded, 0, "").await;
    }
    for target in missing {
        if copies.iter().any(|copy| copy.segment == target) {
            continue;
        }
        let part = (id, task.object, target);
        if !tenure.attempts.more(part) {
            let why = tenure.attempts.exhausted(id).remove(&(task.object, target)).unwrap_or_else(|| "".into());
            return end(service, tenure, id, TaskState::Failed, 1, &why).await;
        }
        let targets = std::iter::once(target).collect();
        let copy = CopyStart { object: task.object, instead_of, targets, task: id };
        if let Err(error) = start(service, tenure, copy).await? {
            tenure.attempts.refused(part, &error);
            if error.code() == ErrorCode::NoSpace {
                make_room(service, tenure, task.object, &BTreeSet::from([target])).await?;
            }
        }
    }
    Ok(())
}

/// A drain: replicas leave the sources, a few at a time, until none is left that can be moved.
async fn drain(
    service: &Arc<Service>,
    tenure: &Arc<Tenure>,
    id: TaskId,
    task: &Task,
    copies: &[CopyView],
) -> Result<(), Error> {
    let concurrency = task.concurrency.clamp(1, CONCURRENCY_MAX) as usize;
    let mut room = concurrency.saturating_sub(copies.len());
    let exhausted = tenure.attempts.exhausted(id);
    let (mut waiting, mut left) = (copies.len(), 0u64);
    for &source in &task.sources {
        for (_, object, replica) in replicas_in(service, source) {
            if exhausted.contains_key(&(object, source)) {
                left += 1;
                continue;
            }
            waiting += 1;
            let Some(replica) = replica else { continue };
            if room == 0 || copies.iter().any(|copy| copy.instead_of == Some(replica)) {
                continue;
            }
            room -= 1;
            let part = (id, object, source);
            if !tenure.attempts.more(part) {
                continue;
            }
            let targets: SmallVec<[SegmentId; 2]> = task.targets.iter().copied().collect();
            let copy = CopyStart { object, instead_of: Some(replica), targets, task: id };
            if let Err(error) = start(service, tenure, copy).await? {
                tenure.attempts.refused(part, &error);
                if error.code() == ErrorCode::NoSpace {
                    let targets = drain_targets(service, task);
                    make_room(service, tenure, object, &targets).await?;
                }
            }
        }
    }
    if waiting > 0 {
        return Ok(());
    }
    let state = if left == 0 { TaskState::Succeeded } else { TaskState::Failed };
    let why = exhausted.values().next().cloned().unwrap_or_else(|| "".into());
    let message =
        if left == 0 { String::new() } else { format!("{left} replicas could not be moved; the last reason: {why}") };
    if state == TaskState::Succeeded && task.unmount && !unmounted(service, tenure, &task.sources).await? {
        return Ok(());
    }
    end(service, tenure, id, state, left, &message).await
}

fn replicas_in(service: &Service, segment: SegmentId) -> Vec<(u64, ObjectId, Option<ReplicaId>)> {
    service.directory().replicas_in(segment, 0, REPLICAS_PER_ROUND)
}

fn drain_targets(service: &Service, task: &Task) -> BTreeSet<SegmentId> {
    if !task.targets.is_empty() {
        return task.targets.iter().copied().collect();
    }
    let others = service.directory().segments().into_iter().filter(|s| !s.draining);
    others.map(|s| s.segment).filter(|segment| !task.sources.contains(segment)).collect()
}

/// Evicts in the segments for an object that is to go there.
async fn make_room(
    service: &Service,
    tenure: &Tenure,
    object: ObjectId,
    segments: &BTreeSet<SegmentId>,
) -> Result<(), Error> {
    let Some(victim) = service.directory().with_object_id(object, |v| v.map(|v| v.length)) else { return Ok(()) };
    let bytes = tidepool_proto::object::extent_bytes(victim);
    let segments = segments.iter().map(|&segment| (segment, bytes)).collect();
    let wanted = Wanted { bytes, limit: room::VICTIMS_MAX, segments: Some(&segments), ..Wanted::default() };
    room::evict(service, tenure, &wanted, "task").await?;
    Ok(())
}

/// Unmounts segments that a drain emptied; false while readers may still be on something there (L1).
async fn unmounted(service: &Service, tenure: &Tenure, segments: &[SegmentId]) -> Result<bool, Error> {
    for &id in segments {
        let Some(segment) = service.directory().segment(id) else { continue };
        if segment.processing + segment.complete + segment.retired > 0 {
            return Ok(false);
        }
        let op = Op::UnmountSegment { node: segment.node, incarnation: segment.incarnation, segment: id };
        match tenure.proposer.propose_one(op, None).await? {
            Outcome::Dropped { .. } | Outcome::Refused(_) => {}
            other => return Err(unexpected("unmount_segment", &other)),
        }
    }
    Ok(true)
}

async fn start(service: &Service, tenure: &Tenure, copy: CopyStart) -> Result<Result<(), Error>, Error> {
    match tenure.proposer.propose_one(Op::CopyStart(copy), None).await? {
        Outcome::CopyGranted(_) => {
            service.metrics().copies.with_label_values(&["started"]).inc();
            Ok(Ok(()))
        }
        Outcome::Refused(error) => Ok(Err(error)),
        other => Err(unexpected("copy_start", &other)),
    }
}

async fn end(
    service: &Service,
    tenure: &Tenure,
    task: TaskId,
    state: TaskState,
    left: u64,
    message: &str,
) -> Result<(), Error> {
    let cut = (0..=MESSAGE_BYTES_MAX.min(message.len())).rev().find(|&at| message.is_char_boundary(at)).unwrap_or(0);
    let message = &message[..cut];
    let op = Op::EndTask { task, state, left, message };
    match tenure.proposer.propose_one(op, None).await? {
        Outcome::Done => {
            tracing::info!(%task, state = state.name(), left, message, "task ended");
            service.metrics().tasks_ended.with_label_values(&[state.name()]).inc();
            tenure.attempts.forget(task);
            Ok(())
        }
        Outcome::Refused(error) => Err(error),
        other => Err(unexpected("end_task", &other)),
    }
}

/// One round of healing: objects that lost a copy get one again, a few bytes at a time. It evicts nothing.
pub async fn heal(service: &Arc<Service>, tenure: &Tenure) -> Result<(), Error> {
    if tenure.healing_rests() {
        return Ok(());
    }
    let copies = service.directory().copies(None, COPIES_MAX);
    let healing = copies.iter().filter(|copy| copy.task == TaskId(0)).count();
    let mut budget = service.options().heal_bytes_per_second * INTERVAL.as_millis() as u64 / 1_000;
    let limit = HEALING_MAX.saturating_sub(healing);
    let page = service.directory().degraded(tenure.heal_cursor(), limit);
    let is_last = page.len() < limit;
    for object in page {
        tenure.set_heal_cursor(Some(object));
        if copies.iter().any(|copy| copy.object == object) {
            continue;
        }
        let Some(bytes) = service.directory().with_object_id(object, |v| v.map(|v| v.length)) else { continue };
        let copy = CopyStart { object, instead_of: None, targets: SmallVec::new(), task: TaskId(0) };
        match start(service, tenure, copy).await? {
            Ok(()) => budget = budget.saturating_sub(bytes),
            Err(error) => {
                // Likely the same for the next ones: the log is spared for a while, then the others are tried.
                tracing::debug!(%object, %error, "a lost copy is not made again yet");
                tenure.rest_healing(HEALING_REST_ROUNDS);
                return Ok(());
            }
        }
        if budget == 0 {
            return Ok(());
        }
    }
    if is_last && limit > 0 {
        tenure.set_heal_cursor(None);
    }
    Ok(())
}

/// Creates a task as an operator asks for it.
pub async fn create(service: &Arc<Service>, request: &v1::CreateTaskRequest) -> Result<TaskId, Error> {
    let tenure = service.barrier().await?;
    let kind = match v1::TaskKind::try_from(request.kind) {
        Ok(v1::TaskKind::Copy) => TaskKind::Copy,
        Ok(v1::TaskKind::Move) => TaskKind::Move,
        Ok(v1::TaskKind::Drain) => TaskKind::Drain,
        _ => return Err(Error::new(ErrorCode::InvalidParams, "a task is a copy, a move or a drain")),
    };
    let object = match kind {
        TaskKind::Drain => ObjectId(0),
        TaskKind::Copy | TaskKind::Move => object(service, &request.tenant, &request.key)?,
    };
    let create = CreateTask {
        kind,
        object,
        sources: segments(service, &request.source_segments)?,
        targets: segments(service, &request.target_segments)?,
        concurrency: if request.concurrency == 0 { CONCURRENCY_DEFAULT } else { request.concurrency },
        unmount: request.unmount,
        token: uuid(&request.token, "token")?,
    };
    match tenure.proposer.propose_one(Op::CreateTask(create), None).await? {
        Outcome::TaskCreated { task } => Ok(task),
        Outcome::Refused(error) => Err(error),
        other => Err(unexpected("create_task", &other)),
    }
}

fn object(service: &Service, tenant: &str, key: &[u8]) -> Result<ObjectId, Error> {
    let tenant = match tenant {
        "" => Some(TenantId::DEFAULT),
        name => service.directory().tenant(name),
    };
    let not_registered = || Error::new(ErrorCode::TenantNotRegistered, "the tenant is not registered");
    let found = service.directory().with_object(tenant.ok_or_else(not_registered)?, key, |view| view.map(|v| v.object));
    found.ok_or_else(|| {
        Error::new(ErrorCode::ObjectNotFound, format!("key '{}' names no object", String::from_utf8_lossy(key)))
    })
}

/// Segments by name, or by id where a name is not unique.
fn segments(service: &Service, names: &[String]) -> Result<Vec<SegmentId>, Error> {
    let mounted = service.directory().segments();
    let find = |name: &String| {
        let mut named = mounted.iter().filter(|s| *s.name == **name || s.segment.0.to_string() == *name);
        match (named.next(), named.next()) {
            (Some(segment), None) => Ok(segment.segment),
            (None, _) => Err(Error::new(ErrorCode::SegmentNotFound, format!("no segment '{name}' is mounted"))),
            (Some(_), Some(_)) => Err(Error::new(
                ErrorCode::InvalidParams,
                format!("several segments are named '{name}'; give the id that `tidepool status` shows"),
            )),
        }
    };
    names.iter().map(find).collect()
}

/// Tasks as operators see them.
pub async fn list(service: &Service, task: u64) -> Result<Vec<v1::TaskStatus>, Error> {
    let tenure = service.barrier().await?;
    let found = match task {
        0 => service.directory().tasks(),
        id => match service.directory().task(TaskId(id)) {
            Some(task) => vec![(TaskId(id), task)],
            None => {
                let message = format!("task {id} is unknown, or was forgotten after it ended");
                return Err(Error::new(ErrorCode::TaskNotFound, message));
            }
        },
    };
    let now = tenure.log_time();
    Ok(found.into_iter().map(|(id, task)| status(service, id, &task, now.0)).collect())
}

fn status(service: &Service, id: TaskId, task: &Task, now_ms: u64) -> v1::TaskStatus {
    let left = match (task.state, task.kind) {
        (TaskState::Running, TaskKind::Drain) => {
            task.sources.iter().map(|&source| replicas_in(service, source).len() as u64).sum()
        }
        (TaskState::Running, _) => (task.targets.len() as u64).saturating_sub(task.done),
        _ => task.left,
    };
    let kind = match task.kind {
        TaskKind::Copy => v1::TaskKind::Copy,
        TaskKind::Move => v1::TaskKind::Move,
        TaskKind::Drain => v1::TaskKind::Drain,
    };
    v1::TaskStatus {
        task_id: id.0,
        kind: kind as i32,
        state: task.state.name().to_owned(),
        moved: task.done,
        failed: if task.state == TaskState::Failed { task.left } else { 0 },
        left,
        message: task.message.to_string(),
        age_ms: now_ms.saturating_sub(task.created.0),
    }
}

/// Ends a task that runs; what it has done stays done.
pub async fn cancel(service: &Service, task: u64) -> Result<(), Error> {
    let tenure = service.tenure()?;
    let op = Op::EndTask { task: TaskId(task), state: TaskState::Cancelled, left: 0, message: "cancelled" };
    match tenure.proposer.propose_one(op, None).await? {
        Outcome::Done => Ok(()),
        Outcome::Refused(error) => Err(error),
        other => Err(unexpected("end_task", &other)),
    }
}
