//! Copies under way and tasks in a snapshot.

use super::codec::{choice, small};
use super::copies::OpenCopy;
use super::core::Core;
use super::objects::{Record, Shards};
use super::op::{CreateTask, TaskId, TaskKind};
use super::snapshot::{RestoreError, read_extent};
use super::space::Use;
use super::tasks::{Task, TaskState};
use super::varint::{Reader, put_bytes, put_varint};
use tidepool_proto::{LogTime, ObjectId, ReplicaId, SegmentId};

pub(super) fn write_copies(core: &Core, out: &mut Vec<u8>) {
    put_varint(out, core.copies.by_replica.len() as u64);
    for (replica, copy) in &core.copies.by_replica {
        put_varint(out, replica.0);
        put_varint(out, copy.object.0);
        put_varint(out, copy.instead_of.map_or(0, |r| r.0));
        put_varint(out, core.space.segment(copy.segment).id.0);
        put_varint(out, copy.offset);
        put_varint(out, copy.started.0);
        put_varint(out, copy.task.0);
    }
}

pub(super) fn write_tasks(core: &Core, out: &mut Vec<u8>) {
    put_varint(out, core.tasks.by_id.len() as u64);
    for (id, task) in &core.tasks.by_id {
        let asked = &task.asked;
        put_varint(out, id.0);
        out.push(asked.kind as u8);
        out.push(task.state as u8);
        out.push(asked.unmount.into());
        out.extend_from_slice(&asked.token);
        put_varint(out, asked.object.0);
        for segments in [&asked.sources, &asked.targets] {
            put_varint(out, segments.len() as u64);
            segments.iter().for_each(|segment| put_varint(out, segment.0));
        }
        put_varint(out, asked.concurrency.into());
        put_varint(out, task.created.0);
        put_varint(out, task.ended.0);
        put_varint(out, task.done);
        put_varint(out, task.done_bytes);
        put_varint(out, task.left);
        put_bytes(out, task.message.as_bytes());
    }
}

pub(super) fn read_copies(reader: &mut Reader<'_>, core: &mut Core, shards: &Shards) -> Result<(), RestoreError> {
    for _ in 0..reader.count(7, "copies")? {
        let replica = ReplicaId(reader.varint("replica id")?);
        let object = ObjectId(reader.varint("object id")?);
        let instead_of = Some(ReplicaId(reader.varint("replica id")?)).filter(|r| r.0 != 0);
        let Some(&at) = core.index.get(&object) else {
            return Err(RestoreError::Inconsistent(format!("copy {replica} is of an object that is not there")));
        };
        let record = shards.with(at, Record::clone).expect("the index names a record");
        let (bytes, tenant) = (record.extent_bytes(), record.tenant);
        if !record.is_complete() {
            return Err(RestoreError::Inconsistent(format!("copy {replica} is of an object that is being put")));
        }
        let (segment, offset) = read_extent(reader, core, bytes, Use::Processing, replica)?;
        core.space.note_used(segment, offset, at);
        let started = LogTime(reader.varint("started")?);
        let task = TaskId(reader.varint("task id")?);
        let node = core.space.segment(segment).node;
        let copy = OpenCopy { object, instead_of, segment, node, offset, bytes, started, task };
        if core.copies.by_replica.contains_key(&replica) {
            return Err(RestoreError::Inconsistent(format!("copy {replica} comes twice")));
        }
        core.tenants.get_mut(tenant).expect("an object's tenant is registered").bytes += bytes;
        core.copies.insert(replica, copy);
        core.digest.add(|c| c.copy(replica, &copy, &core.space));
    }
    Ok(())
}

pub(super) fn read_tasks(reader: &mut Reader<'_>, core: &mut Core) -> Result<(), RestoreError> {
    for _ in 0..reader.count(27, "tasks")? {
        let id = TaskId(reader.varint("task id")?);
        let kind = choice(reader, "task kind", &[TaskKind::Copy, TaskKind::Move, TaskKind::Drain])?;
        let state = choice(reader, "task state", &TaskState::ALL)?;
        let asked = CreateTask {
            kind,
            unmount: reader.byte("unmount")? != 0,
            token: reader.array("token")?,
            object: ObjectId(reader.varint("object id")?),
            sources: reader.ids("source segments", SegmentId)?,
            targets: reader.ids("target segments", SegmentId)?,
            concurrency: small(reader, "concurrency")?,
        };
        let task = Task {
            asked,
            created: LogTime(reader.varint("created")?),
            state,
            ended: LogTime(reader.varint("ended")?),
            done: reader.varint("done")?,
            done_bytes: reader.varint("done bytes")?,
            left: reader.varint("left")?,
            message: reader.text("message")?.into(),
        };
        if core.tasks.by_id.contains_key(&id) || core.tasks.by_token(&task.asked.token).is_some() {
            return Err(RestoreError::Inconsistent(format!("task {id} comes twice")));
        }
        core.digest.add(|c| c.task(id, &task));
        core.tasks.insert(id, task);
    }
    Ok(())
}
