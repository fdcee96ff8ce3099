//! From bytes to a state: nodes and segments first, then the shards, several at once, then what is under way.

use super::frame::{Frame, Kind, LEVEL_BYTES, MAGIC, cut_short, decode_level};
use super::manifest::{FORMAT_VERSION, Manifest, Part, PartSum};
use super::rows::{CopyRow, SegmentsPart, SessionRow, TasksPart};
use super::shard::{GroupNames, Loaded, array, decode};
use super::{RestoreError, inconsistent};
use crate::directory::ancestors::{Ancestor, Ancestors};
use crate::directory::copies::OpenCopy;
use crate::directory::core::Core;
use crate::directory::free_space::FreeSpace;
use crate::directory::limits::{
    Config, ConfigState, FEATURE_LEVEL, FEATURE_LEVEL_FIRST, POOL_BYTES_MAX, SHARDS, Strategy,
};
use crate::directory::nodes::{EARLIER_PROCESSES_MAX, Node};
use crate::directory::objects::{Location, Record, Shards};
use crate::directory::op::{Contact, CreateTask, Quota, SessionId, TaskId, TaskKind, TenantId};
use crate::directory::outcome::{Answered, Removal};
use crate::directory::sessions::Session;
use crate::directory::space::{Extent, Retired, Segment, Use};
use crate::directory::tasks::{Task, TaskState};
use parking_lot::Mutex;
use std::collections::{BTreeMap, BTreeSet};
use std::io::Read;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use tidepool_proto::capability::Secret;
use tidepool_proto::{ClusterId, History, Incarnation, LogTime, NodeId, ObjectId, ReplicaId, SegmentId};

/// Threads that decode shards.
const WORKERS_MAX: usize = 8;
/// Shards read ahead of them.
const AHEAD: usize = 16;

/// Reads an image's head: whether this binary can read the rest. Answers its feature level.
pub(super) fn read_head(input: &mut dyn Read) -> Result<u16, RestoreError> {
    let mut magic = [0; MAGIC.len()];
    input.read_exact(&mut magic).map_err(cut_short)?;
    if &magic != MAGIC {
        return Err(RestoreError::Version("this is not an image of a directory, or not of this version".to_owned()));
    }
    read_level(input)
}

/// Reads a whole image into a new core and empty shards.
pub(super) fn load(input: &mut dyn Read, shards: &Shards) -> Result<(Core, Manifest), RestoreError> {
    let level = read_head(input)?;
    let first = Frame::read(input)?;
    let (mut core, mut extents) = expect(&first, Kind::Segments).and_then(|()| read_segments(&first.stored, level))?;
    let (loaded, metadata, tasks) = read_shards(input, &core)?;
    expect(&tasks, Kind::Tasks)?;
    let last = Frame::read(input)?;
    expect(&last, Kind::Manifest)?;
    let manifest = read_manifest(&last)?;
    for (name, seen, written) in [
        ("segments", first.part(), manifest.segments),
        ("metadata", metadata, manifest.metadata),
        ("task_manager", tasks.part(), manifest.task_manager),
    ] {
        if seen != written {
            return Err(RestoreError::Damaged(format!("{name} is not what the manifest says: {seen:?}, {written:?}")));
        }
    }
    if input.read(&mut [0])? != 0 {
        return Err(RestoreError::Damaged("bytes follow its end".to_owned()));
    }
    let part: SegmentsPart<'_> = unpack(&first.stored, "segments")?;
    merge(&mut core, loaded, shards, &mut extents)?;
    read_lost(&mut core, &part)?;
    read_copies(&mut core, shards, &tasks.stored, &mut extents)?;
    core.space.fill(extents).map_err(inconsistent)?;
    // Their records name the segments' space, which is only now theirs.
    read_tasks(&mut core, &tasks.stored)?;
    if (manifest.format, manifest.feature_level) != (FORMAT_VERSION, level) {
        return Err(RestoreError::Damaged("the manifest is of another version than the head".to_owned()));
    }
    if manifest.applied != core.applied {
        return Err(inconsistent("the manifest has another log index than the state"));
    }
    if manifest.digest != core.digest() {
        return Err(RestoreError::Digest { written: manifest.digest, read: core.digest() });
    }
    Ok((core, manifest))
}

fn expect(frame: &Frame, kind: Kind) -> Result<(), RestoreError> {
    if frame.header.kind != kind {
        return Err(RestoreError::Damaged(format!("{} came where {kind:?} was next", frame.header.name())));
    }
    Ok(())
}

/// Format version and feature level: whether the rest can be read at all. Answers the level.
fn read_level(input: &mut dyn Read) -> Result<u16, RestoreError> {
    let mut bytes = [0; LEVEL_BYTES];
    input.read_exact(&mut bytes).map_err(cut_short)?;
    let (format, level) = decode_level(&bytes)?;
    if format != FORMAT_VERSION {
        return Err(RestoreError::Version(format!(
            "the image has format {format}, this binary reads {FORMAT_VERSION}; use the binary that wrote it"
        )));
    }
    if level > FEATURE_LEVEL {
        return Err(RestoreError::Version(format!(
            "the image has feature level {level}, this binary knows {FEATURE_LEVEL}; use a newer binary"
        )));
    }
    if level < FEATURE_LEVEL_FIRST {
        return Err(RestoreError::Damaged(format!("its feature level is {level}, below the first")));
    }
    Ok(level)
}

fn read_manifest(frame: &Frame) -> Result<Manifest, RestoreError> {
    let text =
        std::str::from_utf8(&frame.stored).map_err(|_| RestoreError::Damaged("the manifest is no text".into()))?;
    let manifest: Manifest = text.parse().map_err(RestoreError::Damaged)?;
    Ok(manifest)
}

fn unpack<'a, T: serde::Deserialize<'a>>(bytes: &'a [u8], name: &str) -> Result<T, RestoreError> {
    rmp_serde::from_slice(bytes).map_err(|e| RestoreError::Damaged(format!("{name}: {e}")))
}

/// Shards, decoded by several threads as they are read; with them the part's sum and the frame that follows.
fn read_shards(input: &mut dyn Read, core: &Core) -> Result<(Vec<Loaded>, Part, Frame), RestoreError> {
    let workers = std::thread::available_parallelism().map_or(1, usize::from).min(WORKERS_MAX);
    let (loaded, failure) = (Mutex::new(Vec::with_capacity(SHARDS)), Mutex::new(None));
    let failed = AtomicBool::new(false);
    let fail = |error| {
        failed.store(true, Ordering::Relaxed);
        failure.lock().get_or_insert(error);
    };
    let names = GroupNames::default();
    let (sender, receiver) = mpsc::sync_channel::<Frame>(AHEAD);
    let receiver = Arc::new(Mutex::new(receiver));
    let work = |receiver: Arc<Mutex<mpsc::Receiver<Frame>>>| {
        while !failed.load(Ordering::Relaxed) {
            let Ok(frame) = receiver.lock().recv() else { return };
            let Frame { header, .. } = frame;
            match frame.raw().and_then(|raw| decode(header.shard.into(), header.rows, &raw, core, &names)) {
                Ok(shard) => loaded.lock().push(shard),
                Err(error) => fail(error),
            }
        }
    };
    let read = std::thread::scope(|scope| {
        // The workers alone hold the receiver, so that nobody waits for them once they are gone.
        for _ in 0..workers {
            let (receiver, work) = (receiver.clone(), &work);
            scope.spawn(move || work(receiver));
        }
        drop(receiver);
        let read = read_frames(input, &sender);
        if read.is_err() {
            failed.store(true, Ordering::Relaxed);
        }
        drop(sender);
        read
    });
    match (failure.into_inner(), read?) {
        (Some(error), _) => Err(error),
        (None, None) => Err(RestoreError::Damaged("the threads that read it ended early".to_owned())),
        (None, Some((part, frame))) => Ok((loaded.into_inner(), part, frame)),
    }
}

/// Hands on the frames of shards; gives their sum and the frame that follows, or None when nobody takes them any more.
fn read_frames(input: &mut dyn Read, shards: &mpsc::SyncSender<Frame>) -> Result<Option<(Part, Frame)>, RestoreError> {
    let (mut sum, mut next) = (PartSum::default(), 0);
    loop {
        let frame = Frame::read(input)?;
        if frame.header.kind != Kind::Shard {
            return Ok(Some((sum.part(), frame)));
        }
        let number = usize::from(frame.header.shard);
        if number < next || number >= SHARDS || frame.header.rows == 0 {
            return Err(RestoreError::Damaged(format!("shard {number} is out of order or empty")));
        }
        next = number + 1;
        sum.add(&frame.encoded_header());
        sum.add(&frame.stored);
        sum.rows(frame.header.rows.into());
        if shards.send(frame).is_err() {
            return Ok(None);
        }
    }
}

/// Puts the shards into place and what follows from them into the core.
fn merge(
    core: &mut Core,
    mut loaded: Vec<Loaded>,
    shards: &Shards,
    extents: &mut Vec<Extent>,
) -> Result<(), RestoreError> {
    loaded.sort_unstable_by_key(|shard| shard.number);
    let objects = loaded.iter().map(|shard| shard.index.len()).sum();
    let mut index: Vec<(ObjectId, Location)> = Vec::with_capacity(objects);
    loaded.iter().for_each(|shard| index.extend(&shard.index));
    index.sort_unstable_by_key(|&(object, _)| object);
    if let Some(pair) = index.windows(2).find(|pair| pair[0].0 == pair[1].0) {
        return Err(inconsistent(format!("object {} comes twice", pair[0].0)));
    }
    core.index = index.into_iter().collect();
    extents.reserve(loaded.iter().map(|shard| shard.extents.len()).sum());
    for shard in loaded {
        *shards.write(shard.number) = shard.shard;
        extents.extend(shard.extents);
        core.objects.load(shard.number, shard.cells);
        for (tenant, account) in shard.tenants {
            let tenant = core.tenants.get_mut(tenant).expect("each row's tenant was looked up");
            tenant.bytes += account.bytes;
            tenant.objects += account.objects;
            tenant.hard_pinned_bytes += account.hard_pinned_bytes;
        }
        for (name, object, joins) in shard.joins {
            core.groups.join(name, object, joins);
        }
        for (object, open, bytes) in shard.open {
            if let Some(session) = core.sessions.by_id.get_mut(&open.session) {
                session.open_grants += 1;
                session.open_bytes += bytes;
            }
            if let Some(old) = open.replaces
                && core.upserts.insert(old, object).is_some()
            {
                return Err(inconsistent(format!("object {old} has two upserts")));
            }
            core.open.insert(object, open);
        }
        core.degraded.extend(shard.degraded);
        core.extra.extend(shard.extra);
    }
    Ok(())
}

/// A core with all of `segments` but the lost members, and the extents of retired replicas.
pub(super) fn read_segments(bytes: &[u8], level: u16) -> Result<(Core, Vec<Extent>), RestoreError> {
    let part: SegmentsPart<'_> = unpack(bytes, "segments")?;
    let mut core = Core::new();
    core.applied = part.applied;
    core.advance_clock(LogTime(part.clock));
    let said = part.since_level_2.as_ref().map_or(FEATURE_LEVEL_FIRST, |since| since.feature_level);
    if said != level {
        return Err(inconsistent(format!("its head has feature level {level}, its state {said}")));
    }
    core.set_feature_level(level);
    read_config(&mut core, &part)?;
    read_ancestors(&mut core, &part)?;
    read_tenants(&mut core, &part)?;
    read_nodes(&mut core, &part)?;
    mount(&mut core, &part)?;
    part.sessions.iter().try_for_each(|row| read_session(&mut core, row))?;
    let extents = read_retired(&mut core, &part)?;
    Ok((core, extents))
}

/// A core with the digests of all that does not lie in shards, lost members and copies included. `copy_bytes`: of the copies under
/// way, whose objects are not read.
pub(super) fn read_small(segments: &[u8], tasks: &[u8], level: u16, copy_bytes: &[u64]) -> Result<Core, RestoreError> {
    let (mut core, _) = read_segments(segments, level)?;
    let part: SegmentsPart<'_> = unpack(segments, "segments")?;
    for row in &part.lost {
        let name = (TenantId(row.tenant), row.group.0.into());
        row.keys.iter().for_each(|key| core.parts.lost_members.add(&name, |c| c.lost_member(&name, key.0)));
    }
    let part: TasksPart<'_> = unpack(tasks, "task_manager")?;
    if part.copies.len() != copy_bytes.len() {
        return Err(inconsistent(format!("{} copies of {} are there", part.copies.len(), copy_bytes.len())));
    }
    for (row, bytes) in part.copies.iter().zip(copy_bytes) {
        let copy = read_copy(&core, row, *bytes)?;
        core.digest.add(|c| c.copy(ReplicaId(row.replica), &copy, &core.space));
    }
    read_tasks(&mut core, tasks)?;
    Ok(core)
}

fn read_copy(core: &Core, row: &CopyRow, bytes: u64) -> Result<OpenCopy, RestoreError> {
    let segment = core.space.slot(SegmentId(row.segment)).map_err(|e| inconsistent(e.to_string()))?;
    Ok(OpenCopy {
        object: ObjectId(row.object),
        instead_of: Some(ReplicaId(row.instead_of)).filter(|r| r.0 != 0),
        segment,
        node: core.space.segment(segment).node,
        offset: row.offset,
        bytes,
        started: LogTime(row.started),
        task: TaskId(row.task),
    })
}

fn read_config(core: &mut Core, part: &SegmentsPart<'_>) -> Result<(), RestoreError> {
    let row = &part.config;
    core.digest.sub(|c| c.config(&core.config));
    core.config = ConfigState {
        config: Config {
            lease_ttl_max_ms: row.lease_ttl_max_ms,
            put_start_discard_timeout_ms: row.put_start_discard_timeout_ms,
            objects_max: row.objects_max,
            granted_bytes_min: row.granted_bytes_min,
            hard_pinned_percent_max: row.hard_pinned_percent_max,
            strategy: numbered(&Strategy::ALL, row.strategy, "strategy")?,
            secret: Secret(array(row.secret, "secret")?),
        },
        lease_ttl_max_before_ms: row.lease_ttl_max_before_ms,
        lease_ttl_lowered_at: LogTime(row.lease_ttl_lowered_at),
    };
    core.digest.add(|c| c.config(&core.config));
    if let Some((index, digest)) = part.checkpoint {
        let digest = u128::from_le_bytes(array(digest, "checkpoint")?);
        core.checkpoint = Some((index, digest));
        core.digest.add(|c| c.checkpoint(index, digest));
    }
    Ok(())
}

fn numbered<T: Copy>(all: &[T], number: u8, what: &str) -> Result<T, RestoreError> {
    all.get(usize::from(number)).copied().ok_or_else(|| inconsistent(format!("unknown {what} {number}")))
}

fn read_ancestors(core: &mut Core, part: &SegmentsPart<'_>) -> Result<(), RestoreError> {
    let mut ancestors = Ancestors::default();
    for row in part.since_level_2.iter().flat_map(|since| &since.ancestors) {
        let cluster = ClusterId(array(row.cluster, "cluster uuid")?);
        let ancestor = Ancestor { cluster, history: History(row.history), until: row.until };
        ancestors.push(ancestor).map_err(|error| inconsistent(error.message()))?;
        core.digest.add(|c| c.ancestor(&ancestor));
    }
    core.ancestors = ancestors.into();
    Ok(())
}

fn read_tenants(core: &mut Core, part: &SegmentsPart<'_>) -> Result<(), RestoreError> {
    for row in &part.tenants {
        let (id, name): (_, Arc<str>) = (TenantId(row.tenant), row.name.into());
        let quota = Quota { bytes: row.quota_bytes, objects: row.quota_objects, refuse: row.refuse };
        if let Some(present) = core.tenants.get_mut(id).filter(|_| id == TenantId::DEFAULT) {
            core.digest.sub(|c| c.tenant(id, present));
            present.quota = quota;
        } else if core.tenants.get(id).is_some() || core.tenants.by_name.contains_key(&name) {
            return Err(inconsistent(format!("tenant '{name}' comes twice")));
        } else if id.0 >= part.next_tenant {
            return Err(inconsistent(format!("tenant '{name}' has a number that was not given yet")));
        } else {
            core.tenants.insert(id, name, quota);
        }
        let present = core.tenants.get(id).expect("just set");
        core.digest.add(|c| c.tenant(id, present));
    }
    core.digest.sub(|c| c.next_tenant(1));
    core.tenants.next = part.next_tenant;
    core.digest.add(|c| c.next_tenant(part.next_tenant));
    Ok(())
}

fn read_nodes(core: &mut Core, part: &SegmentsPart<'_>) -> Result<(), RestoreError> {
    for row in &part.nodes {
        let id = NodeId(row.node);
        let earlier = row.earlier_processes.iter().take(EARLIER_PROCESSES_MAX);
        let node = Node {
            node_uuid: array(row.node_uuid, "node uuid")?,
            process_uuid: array(row.process_uuid, "process uuid")?,
            incarnation: Incarnation(row.incarnation),
            address: row.address.into(),
            host_id: row.host_id.into(),
            contact: numbered(&[Contact::Heard, Contact::Suspect], row.contact, "contact")?,
            earlier_processes: earlier.map(|&uuid| array(uuid, "process uuid")).collect::<Result<_, _>>()?,
            segments: BTreeSet::new(),
        };
        core.digest.add(|c| c.node(id, &node));
        let is_new = core.nodes.by_uuid.insert(node.node_uuid, id).is_none();
        if core.nodes.by_id.insert(id, node).is_some() || !is_new {
            return Err(inconsistent(format!("node {id} comes twice")));
        }
    }
    Ok(())
}

fn mount(core: &mut Core, part: &SegmentsPart<'_>) -> Result<(), RestoreError> {
    for row in &part.segments {
        let (id, node) = (SegmentId(row.segment), NodeId(row.node));
        let owner = core.nodes.by_id.get_mut(&node);
        let owner = owner.ok_or_else(|| inconsistent(format!("segment {id} of unknown node {node}")))?;
        if core.space.by_id.contains_key(&id) {
            return Err(inconsistent(format!("segment {id} comes twice")));
        }
        if row.capacity > POOL_BYTES_MAX - core.space.capacity() {
            return Err(inconsistent(format!("segment {id} of {} bytes is above what a pool may have", row.capacity)));
        }
        owner.segments.insert(id);
        let segment = Segment {
            id,
            node,
            incarnation: owner.incarnation,
            name: row.name.into(),
            host_id: owner.host_id.clone(),
            contact: owner.contact,
            draining: row.draining,
            capacity: row.capacity,
            free: FreeSpace::new(id, row.capacity),
            processing: 0,
            complete: 0,
            retired: 0,
            used: BTreeMap::new(),
        };
        core.digest.add(|c| c.segment(&segment));
        core.space.mount(segment);
    }
    Ok(())
}

fn read_session(core: &mut Core, row: &SessionRow<'_>) -> Result<(), RestoreError> {
    let id = SessionId(row.session);
    let mut session = Session {
        client_uuid: array(row.client_uuid, "client uuid")?,
        host_id: row.host_id.into(),
        floor: row.floor,
        outcomes: BTreeMap::new(),
        open_grants: 0,
        open_bytes: 0,
    };
    core.parts.sessions.add(&id, |c| c.session(id, &session));
    for &(sequence, kind, number) in &row.outcomes {
        let answered = match (kind, number) {
            (0, object) => Answered::Removal(Removal::Removed(ObjectId(object))),
            (1, _) => Answered::Removal(Removal::NotFound),
            (2, _) => Answered::Removal(Removal::NotReady),
            (3, objects) => Answered::Removed { objects },
            (4, object) => Answered::Upsert(ObjectId(object)),
            (5, cleared) => Answered::Cleared(cleared != 0),
            (other, _) => return Err(inconsistent(format!("unknown outcome {other}"))),
        };
        core.parts.sessions.add(&id, |c| c.answered(id, sequence, answered));
        session.outcomes.insert(sequence, answered);
    }
    let is_new = core.sessions.by_uuid.insert(session.client_uuid, id).is_none();
    if core.sessions.by_id.insert(id, session).is_some() || !is_new {
        return Err(inconsistent(format!("session {id} comes twice")));
    }
    Ok(())
}

fn read_retired(core: &mut Core, part: &SegmentsPart<'_>) -> Result<Vec<Extent>, RestoreError> {
    let mut extents = Vec::with_capacity(part.retired.len());
    for row in &part.retired {
        let id = ReplicaId(row.replica);
        let segment = core.space.slot(SegmentId(row.segment)).map_err(|e| inconsistent(e.to_string()))?;
        let (offset, bytes) = (row.offset, row.bytes);
        let object = ObjectId(row.object);
        if core.retired.contains_key(&id) {
            return Err(inconsistent(format!("retired replica {id} comes twice")));
        }
        core.retire(id, Retired { object, segment, offset, bytes, clean: row.clean });
        extents.push(Extent { segment, offset, bytes, used_for: Use::Retired, owner: None });
    }
    Ok(extents)
}

fn read_lost(core: &mut Core, part: &SegmentsPart<'_>) -> Result<(), RestoreError> {
    for row in &part.lost {
        let name = (TenantId(row.tenant), row.group.0.into());
        let Some(group) = core.groups.by_name.get_mut(&name) else {
            return Err(inconsistent("a group without members has lost one"));
        };
        for key in &row.keys {
            core.parts.lost_members.add(&name, |c| c.lost_member(&name, key.0));
            group.lost.insert(key.0.into());
        }
    }
    Ok(())
}

fn read_copies(core: &mut Core, shards: &Shards, bytes: &[u8], extents: &mut Vec<Extent>) -> Result<(), RestoreError> {
    let part: TasksPart<'_> = unpack(bytes, "task_manager")?;
    for row in &part.copies {
        let (replica, object) = (ReplicaId(row.replica), ObjectId(row.object));
        let Some(&at) = core.index.get(&object) else {
            return Err(inconsistent(format!("copy {replica} is of an object that is not there")));
        };
        let record = shards.with(at, Record::clone).expect("the index names a record");
        if !record.is_complete() {
            return Err(inconsistent(format!("copy {replica} is of an object that is being put")));
        }
        let bytes = record.extent_bytes();
        let copy = read_copy(core, row, bytes)?;
        let segment = copy.segment;
        if core.copies.by_replica.contains_key(&replica) {
            return Err(inconsistent(format!("copy {replica} comes twice")));
        }
        extents.push(Extent { segment, offset: row.offset, bytes, used_for: Use::Processing, owner: Some(at) });
        core.tenants.get_mut(record.tenant).expect("an object's tenant is registered").bytes += bytes;
        core.digest.add(|c| c.copy(replica, &copy, &core.space));
        core.copies.insert(replica, copy);
    }
    Ok(())
}

fn read_tasks(core: &mut Core, bytes: &[u8]) -> Result<(), RestoreError> {
    let part: TasksPart<'_> = unpack(bytes, "task_manager")?;
    for row in &part.tasks {
        let id = TaskId(row.task);
        let asked = CreateTask {
            kind: numbered(&[TaskKind::Copy, TaskKind::Move, TaskKind::Drain], row.kind, "task kind")?,
            unmount: row.unmount,
            token: array(row.token, "token")?,
            object: ObjectId(row.object),
            sources: row.sources.iter().copied().map(SegmentId).collect(),
            targets: row.targets.iter().copied().map(SegmentId).collect(),
            concurrency: row.concurrency,
        };
        let task = Task {
            asked,
            created: LogTime(row.created),
            state: numbered(&TaskState::ALL, row.state, "task state")?,
            ended: LogTime(row.ended),
            done: row.done,
            done_bytes: row.done_bytes,
            left: row.left,
            message: row.message.into(),
        };
        if core.tasks.by_id.contains_key(&id) || core.tasks.by_token(&task.asked.token).is_some() {
            return Err(inconsistent(format!("task {id} comes twice")));
        }
        core.digest.add(|c| c.task(id, &task));
        core.tasks.insert(id, task);
    }
    Ok(())
}
