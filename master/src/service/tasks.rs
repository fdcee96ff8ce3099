//! Tasks: copies, moves and drains that operators ask for (N2). The tasks are in the log; what is kept here is only how
//! often each part failed in this term. A new leader goes on where the old one was.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use smallvec::SmallVec;
use tidepool_proto::{Error, ErrorCode, ObjectId, ReplicaId, SegmentId, v1};

use super::copying::start;
use super::core::{Service, unexpected, uuid};
use super::room::{self, Wanted};
use super::tenure::Tenure;
use crate::directory::{
    CopyStart, CopyView, CreateTask, ObjectState, Op, Outcome, Task, TaskId, TaskKind, TaskState, TenantId,
};

/// How often tasks are looked at.
pub const INTERVAL: Duration = Duration::from_millis(100);
/// Times one replica's copy may fail before it counts as not to be had.
const ATTEMPTS_MAX: u32 = 10;
/// Pause before it is tried again: it doubles from the first to the last.
const PAUSE_MIN_MS: u64 = 50;
const PAUSE_MAX_MS: u64 = 500;
/// Objects under way at once of a drain that does not say.
const CONCURRENCY_DEFAULT: u32 = 4;
/// Objects under way at once of any drain.
const CONCURRENCY_MAX: u32 = 256;
/// Replicas of a draining segment looked at under one lock.
const REPLICAS_PER_PAGE: usize = 1_024;
/// Bytes of a task's message; the directory refuses longer ones.
const MESSAGE_BYTES_MAX: usize = 1_000;

/// One replica of a task: of this object, and the replica that is to go or, where none is, the segment it is to go to.
type Part = (TaskId, ObjectId, u64);

fn part(task: TaskId, object: ObjectId, instead_of: Option<ReplicaId>, target: SegmentId) -> Part {
    (task, object, instead_of.map_or(target.0, |replica| replica.0))
}

/// The parts that failed in this term: what did not fail is not remembered.
#[derive(Default)]
pub struct Attempts(Mutex<BTreeMap<Part, Failed>>);

struct Failed {
    count: u32,
    why: Arc<str>,
    /// Leader's clock from which on it may be tried again.
    next_ms: u64,
}

/// What is to be done about a part.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Turn {
    Try,
    Wait,
    GivenUp,
}

impl Attempts {
    /// Notes that a copy under way came to nothing.
    pub fn copy_failed(&self, copy: &CopyView, why: &str, now_ms: u64) {
        if copy.task != TaskId(0) {
            self.failed(part(copy.task, copy.object, copy.instead_of, copy.segment), why, now_ms);
        }
    }

    fn failed(&self, part: Part, why: &str, now_ms: u64) {
        let mut parts = self.0.lock();
        let failed = parts.entry(part).or_insert(Failed { count: 0, why: "".into(), next_ms: 0 });
        failed.count += 1;
        failed.why = why.into();
        failed.next_ms = now_ms + (PAUSE_MIN_MS << (failed.count - 1).min(16)).min(PAUSE_MAX_MS);
    }

    fn turn(&self, part: Part, now_ms: u64) -> Turn {
        match self.0.lock().get(&part) {
            Some(failed) if failed.count >= ATTEMPTS_MAX => Turn::GivenUp,
            Some(failed) if failed.next_ms > now_ms => Turn::Wait,
            _ => Turn::Try,
        }
    }

    /// Why a part, or any of a task's, failed last.
    fn why(&self, task: TaskId, of: Option<Part>) -> Arc<str> {
        let parts = self.0.lock();
        let failed = match of {
            Some(part) => parts.get(&part),
            None => parts.range((task, ObjectId(0), 0)..=(task, ObjectId(u64::MAX), u64::MAX)).next().map(|(_, f)| f),
        };
        failed.map_or_else(|| "".into(), |failed| failed.why.clone())
    }

    /// Parts of a task that failed and are tried again.
    fn blocked(&self, task: TaskId) -> u64 {
        let parts = self.0.lock();
        let of_task = parts.range((task, ObjectId(0), 0)..=(task, ObjectId(u64::MAX), u64::MAX));
        of_task.filter(|(_, failed)| failed.count < ATTEMPTS_MAX).count() as u64
    }

    fn forget(&self, task: TaskId) {
        self.0.lock().retain(|(id, ..), _| *id != task);
    }
}

/// One round over all tasks that run.
pub async fn work(service: &Arc<Service>, tenure: &Arc<Tenure>) -> Result<(), Error> {
    super::copying::give_up(service, tenure).await?;
    for (id, task) in service.directory().running_tasks() {
        let worked = match task.asked.kind {
            TaskKind::Copy | TaskKind::Move => place(service, tenure, id, &task).await,
            TaskKind::Drain => drain(service, tenure, id, &task).await,
        };
        match worked {
            // The whole round: every other task would be refused alike.
            Err(error) if matches!(error.code(), ErrorCode::NotLeader | ErrorCode::StateDiverged) => return Err(error),
            Err(error) => tracing::warn!(task = %id, %error, "a task made no progress; it goes on"),
            Ok(()) => {}
        }
    }
    Ok(())
}

/// A copy or move: each target that has no replica yet gets one.
async fn place(service: &Service, tenure: &Tenure, id: TaskId, task: &Task) -> Result<(), Error> {
    let asked = &task.asked;
    // Read before the replicas: a copy that ends in between is a replica then.
    let copies = service.directory().copies_of_task(id);
    let held = service.directory().with_object_id(asked.object, |view| {
        let view = view.filter(|v| v.state == ObjectState::Complete)?;
        Some(view.replicas.iter().map(|r| (r.segment, r.replica)).collect::<SmallVec<[(SegmentId, ReplicaId); 4]>>())
    });
    let Some(held) = held else {
        return end(service, tenure, id, TaskState::Failed, 1, "the object is not in the directory any more").await;
    };
    let missing = |target: &&SegmentId| !held.iter().any(|(segment, _)| segment == *target);
    let missing: Vec<SegmentId> = asked.targets.iter().filter(missing).copied().collect();
    let source = asked.sources.first().filter(|_| asked.kind == TaskKind::Move);
    let instead_of = held.iter().find(|(segment, _)| Some(segment) == source).map(|(_, replica)| *replica);
    if missing.is_empty() && copies.is_empty() {
        if instead_of.is_some() {
            let why = "the target got a replica otherwise; the source still has its own";
            return end(service, tenure, id, TaskState::Failed, 1, why).await;
        }
        return end(service, tenure, id, TaskState::Succeeded, 0, "").await;
    }
    let mut starts = Vec::new();
    for target in missing {
        if copies.iter().any(|copy| copy.segment == target) {
            continue;
        }
        let part = part(id, asked.object, instead_of, target);
        match tenure.attempts.turn(part, tenure.now_ms()) {
            Turn::Wait => {}
            Turn::GivenUp => {
                let why = tenure.attempts.why(id, Some(part));
                return end(service, tenure, id, TaskState::Failed, 1, &why).await;
            }
            Turn::Try => {
                let targets = std::iter::once(target).collect();
                starts.push((part, CopyStart { object: asked.object, instead_of, targets, task: id, up_to: 0 }));
            }
        }
    }
    start_all(service, tenure, starts, |start| start.targets.iter().copied().collect()).await
}

/// A drain: replicas leave the sources, a few at a time, until none is left that can be moved.
async fn drain(service: &Service, tenure: &Tenure, id: TaskId, task: &Task) -> Result<(), Error> {
    let asked = &task.asked;
    let under_way = service.directory().copies_of_task(id);
    let room = (asked.concurrency.clamp(1, CONCURRENCY_MAX) as usize).saturating_sub(under_way.len());
    if room == 0 {
        return Ok(());
    }
    let moving: BTreeSet<ReplicaId> = under_way.iter().filter_map(|copy| copy.instead_of).collect();
    let (mut starts, mut given_up) = (Vec::new(), 0u64);
    let seen_all = 'walk: {
        for &source in &asked.sources {
            let mut from = 0;
            loop {
                let page = service.directory().replicas_in(source, from, REPLICAS_PER_PAGE);
                let Some(&(last, ..)) = page.last() else { break };
                from = last + 1;
                for (_, object, replica) in page {
                    // What is being put or copied there is waited for.
                    let Some(replica) = replica.filter(|replica| !moving.contains(replica)) else { continue };
                    let part = part(id, object, Some(replica), source);
                    match tenure.attempts.turn(part, tenure.now_ms()) {
                        Turn::GivenUp => given_up += 1,
                        Turn::Wait => {}
                        Turn::Try => {
                            let targets: SmallVec<[SegmentId; 2]> = asked.targets.iter().copied().collect();
                            let instead_of = Some(replica);
                            starts.push((part, CopyStart { object, instead_of, targets, task: id, up_to: 0 }));
                        }
                    }
                    if starts.len() == room {
                        break 'walk false;
                    }
                }
            }
        }
        true
    };
    let left: u64 = asked.sources.iter().map(|&source| service.directory().replica_count(source)).sum();
    if !seen_all || !starts.is_empty() || left > given_up {
        return start_all(service, tenure, starts, |_| drain_targets(service, task)).await;
    }
    if left > 0 {
        let why = tenure.attempts.why(id, None);
        let message = format!("{left} replicas could not be moved; the last reason: {why}");
        return end(service, tenure, id, TaskState::Failed, left, &message).await;
    }
    if asked.unmount && !unmounted(service, tenure, &asked.sources).await? {
        return Ok(());
    }
    end(service, tenure, id, TaskState::Succeeded, 0, "").await
}

fn drain_targets(service: &Service, task: &Task) -> BTreeSet<SegmentId> {
    if !task.asked.targets.is_empty() {
        return task.asked.targets.iter().copied().collect();
    }
    let others = service.directory().segments().into_iter().filter(|s| !s.draining);
    others.map(|s| s.segment).filter(|segment| !task.asked.sources.contains(segment)).collect()
}

/// Starts copies in one proposal. For what finds no space some is made where it may go.
async fn start_all(
    service: &Service,
    tenure: &Tenure,
    starts: Vec<(Part, CopyStart)>,
    may_go_to: impl Fn(&CopyStart) -> BTreeSet<SegmentId>,
) -> Result<(), Error> {
    let (parts, copies): (Vec<Part>, Vec<CopyStart>) = starts.into_iter().unzip();
    for ((part, copy), outcome) in parts.into_iter().zip(&copies).zip(start(service, tenure, &copies).await?) {
        match outcome {
            Ok(()) => {}
            // These pass by themselves.
            Err(error) if matches!(error.code(), ErrorCode::TaskLimit | ErrorCode::ObjectHasTask) => {}
            Err(error) => {
                tenure.attempts.failed(part, &error.to_string(), tenure.now_ms());
                if error.code() == ErrorCode::NoSpace {
                    make_room(service, tenure, copy.object, &may_go_to(copy)).await?;
                }
            }
        }
    }
    Ok(())
}

/// Evicts in the segments for an object that is to go there.
async fn make_room(
    service: &Service,
    tenure: &Tenure,
    object: ObjectId,
    segments: &BTreeSet<SegmentId>,
) -> Result<(), Error> {
    let Some(length) = service.directory().with_object_id(object, |v| v.map(|v| v.length)) else { return Ok(()) };
    let bytes = tidepool_proto::object::extent_bytes(length);
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
        match tenure.proposer.commit(op).await? {
            Outcome::Dropped { .. } | Outcome::Refused(_) => {}
            other => return Err(unexpected("unmount_segment", &other)),
        }
    }
    Ok(true)
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
    match tenure.proposer.commit(op).await? {
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

/// Creates a task as an operator asks for it.
pub async fn create(service: &Arc<Service>, request: &v1::CreateTaskRequest) -> Result<TaskId, Error> {
    let tenure = service.barrier().await?;
    let kind = match v1::TaskKind::try_from(request.kind) {
        Ok(v1::TaskKind::Copy) => TaskKind::Copy,
        Ok(v1::TaskKind::Move) => TaskKind::Move,
        Ok(v1::TaskKind::Drain) => TaskKind::Drain,
        _ => return Err(Error::new(ErrorCode::InvalidParams, "a task is a copy, a move or a drain")),
    };
    let token = uuid(&request.token, "token")?;
    // By the time a request is repeated its object or segments may be gone: the token alone says which task it is.
    if let Some(task) = service.directory().task_by_token(&token) {
        return Ok(task);
    }
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
        token,
    };
    match tenure.proposer.commit(Op::CreateTask(create)).await? {
        Outcome::TaskCreated { task } => {
            tenure.note_copy_ended();
            Ok(task)
        }
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
    Ok(found.into_iter().map(|(id, task)| status(service, &tenure, id, &task)).collect())
}

fn status(service: &Service, tenure: &Tenure, id: TaskId, task: &Task) -> v1::TaskStatus {
    let (asked, now_ms) = (&task.asked, tenure.log_time().0);
    let runs = task.state == TaskState::Running;
    let left = match asked.kind {
        _ if !runs => task.left,
        TaskKind::Drain => asked.sources.iter().map(|&source| service.directory().replica_count(source)).sum(),
        TaskKind::Copy | TaskKind::Move => (asked.targets.len() as u64).saturating_sub(task.done),
    };
    let kind = match asked.kind {
        TaskKind::Copy => v1::TaskKind::Copy,
        TaskKind::Move => v1::TaskKind::Move,
        TaskKind::Drain => v1::TaskKind::Drain,
    };
    let name = |id: &SegmentId| service.directory().segment(*id).map_or(id.0.to_string(), |s| s.name.to_string());
    v1::TaskStatus {
        task_id: id.0,
        kind: kind as i32,
        state: task.state.name().to_owned(),
        moved: task.done,
        failed: if task.state == TaskState::Failed { task.left } else { 0 },
        left,
        message: task.message.to_string(),
        age_ms: now_ms.saturating_sub(task.created.0),
        source_segments: asked.sources.iter().map(name).collect(),
        under_way: if runs { service.directory().copies_of_task(id).len() as u64 } else { 0 },
        blocked: if runs { tenure.attempts.blocked(id) } else { 0 },
        moved_bytes: task.done_bytes,
        ended_age_ms: if runs { 0 } else { now_ms.saturating_sub(task.ended.0).max(1) },
    }
}

/// Ends a task that runs; what it has done stays done, and what is under way ends by itself.
pub async fn cancel(service: &Service, task: u64) -> Result<(), Error> {
    let tenure = service.tenure()?;
    let running = service.directory().task(TaskId(task)).filter(|task| task.state == TaskState::Running);
    let left = running.map_or(0, |running| status(service, &tenure, TaskId(task), &running).left);
    let op = Op::EndTask { task: TaskId(task), state: TaskState::Cancelled, left, message: "cancelled" };
    match tenure.proposer.commit(op).await? {
        Outcome::Done => {
            tenure.attempts.forget(TaskId(task));
            Ok(())
        }
        Outcome::Refused(error) => Err(error),
        other => Err(unexpected("end_task", &other)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What failed waits longer each time, and is given up after its attempts; what did not fail is not remembered.
    #[test]
    fn attempts_are_counted_by_failure_and_spaced() {
        let attempts = Attempts::default();
        let (task, object) = (TaskId(1), ObjectId(2));
        let [one, other] = [3, 4].map(|n| part(task, object, Some(ReplicaId(n)), SegmentId(9)));
        let mut now_ms = 0;
        for count in 1..ATTEMPTS_MAX {
            assert_eq!(attempts.turn(one, now_ms), Turn::Try);
            attempts.failed(one, "no space", now_ms);
            assert_eq!(attempts.turn(one, now_ms), Turn::Wait, "attempt {count}");
            now_ms += PAUSE_MAX_MS;
        }
        assert_eq!((attempts.blocked(task), attempts.turn(other, now_ms)), (1, Turn::Try));
        attempts.failed(one, "still none", now_ms);
        assert_eq!(attempts.turn(one, u64::MAX), Turn::GivenUp);
        assert_eq!((attempts.blocked(task), &*attempts.why(task, None)), (0, "still none"));
        attempts.forget(task);
        assert_eq!(attempts.turn(one, now_ms), Turn::Try);
    }
}
