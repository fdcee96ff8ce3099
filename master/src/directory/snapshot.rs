//! The whole state as bytes, and back into an equal state.
//!
//! Everything is written in the order of ids, so equal states have equal bytes. Free extents, indexes and counters are
//! not written: they follow from the rest, and the stored digest (which covers them) must come out again.

use super::Directory;
use super::codec::{choice, soft_pin, tenant};
use super::core::{Core, OpenPut};
use super::digest::{answered_parts, soft_pin_parts};
use super::free_space::FreeSpace;
use super::frozen::{FrozenDirectory, Objects, References, Source};
use super::limits::{Config, ConfigState, SHARDS, Strategy};
use super::nodes::{EARLIER_PROCESSES_MAX, Node};
use super::objects::{Asked, Record, Replica, Shards};
use super::op::{Contact, DataType, Quota, SessionId, TenantId};
use super::outcome::{Answered, Removal};
use super::sessions::Session;
use super::snapshot_tasks::{read_copies, read_tasks, write_copies, write_tasks};
use super::space::{Retired, Segment, Use};
use super::varint::{DecodeError, Reader, put_bytes, put_varint};
use smallvec::SmallVec;
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::Arc;
use tidepool_proto::capability::Secret;
use tidepool_proto::ids::REPLICAS_PER_OBJECT_MAX;
use tidepool_proto::object::extent_bytes;
use tidepool_proto::{Incarnation, LogTime, NodeId, ObjectId, ReplicaId, SegmentId};
use xxhash_rust::xxh3::xxh3_128;

pub(super) const MAGIC: [u8; 8] = *b"TPDIR\0\0\x02";
const TRAILER_BYTES: usize = 32;
/// Why a snapshot was not installed. The state is as before.
#[derive(Debug, thiserror::Error)]
pub enum RestoreError {
    /// Reading failed.
    #[error("snapshot could not be read: {0}")]
    Io(#[from] io::Error),
    /// Not a snapshot of this version.
    #[error("not a directory snapshot of this version")]
    Version,
    /// Bytes are missing or changed.
    #[error("snapshot of {0} bytes does not match its checksum")]
    Checksum(usize),
    /// A value is malformed.
    #[error("snapshot is damaged: {0}")]
    Malformed(#[from] DecodeError),
    /// Its parts contradict each other.
    #[error("snapshot contradicts itself: {0}")]
    Inconsistent(String),
    /// The state read has another digest than the state written.
    #[error("snapshot has digest {read:032x}, it was written as {written:032x}")]
    Digest {
        /// In the snapshot.
        written: u128,
        /// Of what was read.
        read: u128,
    },
}

impl Directory {
    /// The state at the applied index. Apply waits for what is small and for the start of the undo lists, not for the
    /// objects; those are encoded by `write_to`, beside it. A second freeze before the first is dropped encodes all of
    /// them at once.
    pub fn freeze(&self) -> FrozenDirectory {
        let core = self.core.read();
        let (mut before_objects, mut after_objects) = (Vec::new(), Vec::new());
        write_head(&core, &mut before_objects);
        write_members(&core, &mut before_objects);
        write_retired(&core, &mut after_objects);
        after_objects.extend_from_slice(&core.digest().to_le_bytes());
        let references = References { segments: core.space.ids_by_slot(), open: core.open.clone() };
        let source = if self.shards.freeze() {
            Source::Shards(Arc::clone(&self.shards), self.shards.epoch())
        } else {
            let mut objects = Objects::default();
            for number in 0..SHARDS {
                self.shards.read(number).records().for_each(|record| objects.push(record, &references));
            }
            Source::Encoded(objects)
        };
        FrozenDirectory { before_objects, references, source, after_objects }
    }

    /// Replaces the whole state by a frozen one, after checking it wholly.
    pub fn restore(&self, input: &mut dyn io::Read) -> Result<(), RestoreError> {
        let mut bytes = Vec::new();
        input.read_to_end(&mut bytes)?;
        let shards = self.shards.empty_like();
        let core = read(&bytes, &shards)?;
        let mut place = self.core.write();
        let mut topology = self.topology.write();
        self.shards.replace(shards);
        *topology = core.topology();
        let changes = place.changes.take();
        *place = Core { changes: changes.map(|_| Vec::new()), ..core };
        Ok(())
    }
}

fn write_head(core: &Core, out: &mut Vec<u8>) {
    let (index, term) = core.applied.unwrap_or((0, 0));
    out.push(core.applied.is_some().into());
    put_varint(out, index);
    put_varint(out, term);
    put_varint(out, core.clock.0);
    let ConfigState { config, lease_ttl_max_before_ms, lease_ttl_lowered_at } = core.config;
    put_varint(out, config.lease_ttl_max_ms);
    put_varint(out, config.put_start_discard_timeout_ms);
    put_varint(out, config.objects_max);
    out.push(config.strategy as u8);
    out.extend_from_slice(&config.secret.0);
    put_varint(out, lease_ttl_max_before_ms);
    put_varint(out, lease_ttl_lowered_at.0);
    let (index, digest) = core.checkpoint.unwrap_or((0, 0));
    out.push(core.checkpoint.is_some().into());
    put_varint(out, index);
    out.extend_from_slice(&digest.to_le_bytes());
}

fn write_members(core: &Core, out: &mut Vec<u8>) {
    put_varint(out, core.tenants.next.into());
    put_varint(out, core.tenants.len() as u64);
    for (id, tenant) in core.tenants.iter() {
        put_varint(out, id.0.into());
        put_bytes(out, tenant.name.as_bytes());
        put_varint(out, tenant.quota.bytes);
        put_varint(out, tenant.quota.objects);
        out.push(tenant.quota.refuse.into());
    }
    put_varint(out, core.nodes.by_id.len() as u64);
    for (id, node) in &core.nodes.by_id {
        put_varint(out, id.0);
        out.extend_from_slice(&node.node_uuid);
        out.extend_from_slice(&node.process_uuid);
        put_varint(out, node.incarnation.0);
        put_bytes(out, node.address.as_bytes());
        put_bytes(out, node.host_id.as_bytes());
        out.push(node.contact as u8);
        put_varint(out, node.earlier_processes.len() as u64);
        for uuid in &node.earlier_processes {
            out.extend_from_slice(uuid);
        }
    }
    put_varint(out, core.space.by_id.len() as u64);
    for (_, segment) in core.space.iter() {
        put_varint(out, segment.id.0);
        put_varint(out, segment.node.0);
        put_bytes(out, segment.name.as_bytes());
        put_varint(out, segment.capacity);
        out.push(segment.draining.into());
    }
    put_varint(out, core.sessions.by_id.len() as u64);
    for (id, session) in &core.sessions.by_id {
        put_varint(out, id.0);
        out.extend_from_slice(&session.client_uuid);
        put_bytes(out, session.host_id.as_bytes());
        put_varint(out, session.floor);
        put_varint(out, session.outcomes.len() as u64);
        for (&sequence, &answered) in &session.outcomes {
            put_varint(out, sequence);
            let (answer, number) = answered_parts(answered);
            out.push(answer);
            put_varint(out, number);
        }
    }
}

pub(super) fn write_object(references: &References, record: &Record, out: &mut Vec<u8>) {
    put_varint(out, record.object.0);
    put_varint(out, record.tenant.0.into());
    put_bytes(out, &record.key);
    put_varint(out, record.length);
    put_varint(out, record.started.0);
    put_varint(out, record.stored_slots.into());
    out.push(record.asked.granted());
    out.push(record.asked.wanted());
    out.push(record.copies);
    out.push(record.data_type.0);
    out.push(record.hard_pinned.into());
    put_varint(out, record.soft_pinned_until().0);
    put_bytes(out, record.group().map_or(&[][..], |name| name));
    if record.copies == 0 {
        let open = references.open.get(&record.object).expect("a PROCESSING object is open");
        out.extend_from_slice(&open.token);
        put_varint(out, open.session.0);
        put_varint(out, open.replaces.map_or(0, |old| old.0));
        let (action, ttl_ms) = soft_pin_parts(open.soft_pin);
        out.push(action);
        put_varint(out, ttl_ms);
    }
    out.push(record.replicas.len() as u8);
    for replica in &record.replicas {
        put_varint(out, replica.id.0);
        put_varint(out, references.segments[replica.segment as usize].0);
        put_varint(out, replica.offset);
    }
}

fn write_retired(core: &Core, out: &mut Vec<u8>) {
    put_varint(out, core.retired.len() as u64);
    for (id, retired) in &core.retired {
        put_varint(out, id.0);
        put_varint(out, retired.object.0);
        put_varint(out, core.space.segment(retired.segment).id.0);
        put_varint(out, retired.offset);
        put_varint(out, retired.bytes);
        out.push(retired.clean.into());
    }
    let lost = core.groups.by_name.iter().filter(|(_, group)| !group.lost.is_empty());
    put_varint(out, lost.clone().count() as u64);
    for ((tenant, name), group) in lost {
        put_varint(out, tenant.0.into());
        put_bytes(out, name);
        put_varint(out, group.lost.len() as u64);
        group.lost.iter().for_each(|key| put_bytes(out, key));
    }
    write_copies(core, out);
    write_tasks(core, out);
}

/// Reads a whole snapshot into a new core and empty shards.
fn read(bytes: &[u8], shards: &Shards) -> Result<Core, RestoreError> {
    if bytes.len() < MAGIC.len() + TRAILER_BYTES || bytes[..MAGIC.len()] != MAGIC {
        return Err(RestoreError::Version);
    }
    let (body, checksum) = bytes.split_at(bytes.len() - 16);
    if xxh3_128(body).to_le_bytes() != *checksum {
        return Err(RestoreError::Checksum(bytes.len()));
    }
    let (body, digest) = body.split_at(body.len() - 16);
    let mut reader = Reader::new(&body[MAGIC.len()..]);
    let mut core = Core::new();
    read_head(&mut reader, &mut core)?;
    read_tenants(&mut reader, &mut core)?;
    read_nodes(&mut reader, &mut core)?;
    read_segments(&mut reader, &mut core)?;
    read_sessions(&mut reader, &mut core)?;
    for _ in 0..reader.count(16, "objects")? {
        read_object(&mut reader, &mut core, shards)?;
    }
    read_retired(&mut reader, &mut core)?;
    read_copies(&mut reader, &mut core, shards)?;
    read_tasks(&mut reader, &mut core)?;
    reader.finish()?;
    let written = u128::from_le_bytes(digest.try_into().expect("16 bytes"));
    let read = core.digest();
    if written != read {
        return Err(RestoreError::Digest { written, read });
    }
    Ok(core)
}

fn read_head(reader: &mut Reader<'_>, core: &mut Core) -> Result<(), RestoreError> {
    let applied = reader.byte("applied")? != 0;
    let position = (reader.varint("applied index")?, reader.varint("applied term")?);
    core.applied = applied.then_some(position);
    core.advance_clock(LogTime(reader.varint("log time")?));
    core.digest.sub(|c| c.config(&core.config));
    core.config = ConfigState {
        config: Config {
            lease_ttl_max_ms: reader.varint("lease ttl")?,
            put_start_discard_timeout_ms: reader.varint("discard timeout")?,
            objects_max: reader.varint("objects max")?,
            strategy: choice(reader, "strategy", &Strategy::ALL)?,
            secret: Secret(reader.array("secret")?),
        },
        lease_ttl_max_before_ms: reader.varint("lease ttl before")?,
        lease_ttl_lowered_at: LogTime(reader.varint("lease ttl lowered")?),
    };
    core.digest.add(|c| c.config(&core.config));
    let checkpoint = reader.byte("checkpoint")? != 0;
    let (index, digest) = (reader.varint("checkpoint index")?, u128::from_le_bytes(reader.array("checkpoint digest")?));
    if checkpoint {
        core.checkpoint = Some((index, digest));
        core.digest.add(|c| c.checkpoint(index, digest));
    }
    Ok(())
}

fn read_tenants(reader: &mut Reader<'_>, core: &mut Core) -> Result<(), RestoreError> {
    let TenantId(next) = tenant(reader)?;
    for _ in 0..reader.count(5, "tenants")? {
        let id = tenant(reader)?;
        let name: Arc<str> = reader.text("tenant name")?.into();
        let quota = Quota {
            bytes: reader.varint("quota bytes")?,
            objects: reader.varint("quota objects")?,
            refuse: reader.byte("quota policy")? != 0,
        };
        if let Some(present) = core.tenants.get_mut(id).filter(|_| id == TenantId::DEFAULT) {
            core.digest.sub(|c| c.tenant(id, present));
            present.quota = quota;
        } else if core.tenants.get(id).is_some() || core.tenants.by_name.contains_key(&name) {
            return Err(RestoreError::Inconsistent(format!("tenant '{name}' comes twice")));
        } else {
            core.tenants.insert(id, name, quota);
        }
        let present = core.tenants.get(id).expect("just set");
        core.digest.add(|c| c.tenant(id, present));
    }
    core.digest.sub(|c| c.next_tenant(1));
    core.tenants.next = next;
    core.digest.add(|c| c.next_tenant(next));
    Ok(())
}

fn read_nodes(reader: &mut Reader<'_>, core: &mut Core) -> Result<(), RestoreError> {
    for _ in 0..reader.count(32, "nodes")? {
        let id = NodeId(reader.varint("node id")?);
        let mut node = Node {
            node_uuid: reader.array("node uuid")?,
            process_uuid: reader.array("process uuid")?,
            incarnation: Incarnation(reader.varint("incarnation")?),
            address: reader.text("address")?.into(),
            host_id: reader.text("host id")?.into(),
            contact: match reader.byte("contact")? {
                0 => Contact::Heard,
                _ => Contact::Suspect,
            },
            earlier_processes: Default::default(),
            segments: BTreeSet::new(),
        };
        for _ in 0..reader.count(16, "earlier processes")?.min(EARLIER_PROCESSES_MAX) {
            node.earlier_processes.push_back(reader.array("process uuid")?);
        }
        core.digest.add(|c| c.node(id, &node));
        let is_new = core.nodes.by_uuid.insert(node.node_uuid, id).is_none();
        if core.nodes.by_id.insert(id, node).is_some() || !is_new {
            return Err(RestoreError::Inconsistent(format!("node {id} comes twice")));
        }
    }
    Ok(())
}

fn read_segments(reader: &mut Reader<'_>, core: &mut Core) -> Result<(), RestoreError> {
    for _ in 0..reader.count(4, "segments")? {
        let id = SegmentId(reader.varint("segment id")?);
        let node = NodeId(reader.varint("node id")?);
        let name = reader.text("segment name")?;
        let capacity = reader.varint("segment bytes")?;
        let owner = core.nodes.by_id.get_mut(&node);
        let owner = owner.ok_or_else(|| RestoreError::Inconsistent(format!("segment {id} of unknown node {node}")))?;
        if core.space.by_id.contains_key(&id) {
            return Err(RestoreError::Inconsistent(format!("segment {id} comes twice")));
        }
        owner.segments.insert(id);
        let segment = Segment {
            id,
            node,
            incarnation: owner.incarnation,
            name: name.into(),
            host_id: owner.host_id.clone(),
            contact: owner.contact,
            draining: reader.byte("draining")? != 0,
            capacity,
            free: FreeSpace::new(id, capacity),
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

fn read_sessions(reader: &mut Reader<'_>, core: &mut Core) -> Result<(), RestoreError> {
    for _ in 0..reader.count(20, "sessions")? {
        let id = SessionId(reader.varint("session id")?);
        let mut session = Session {
            client_uuid: reader.array("client uuid")?,
            host_id: reader.text("host id")?.into(),
            floor: reader.varint("floor")?,
            outcomes: BTreeMap::new(),
            open_grants: 0,
            open_bytes: 0,
        };
        core.digest.add(|c| c.session(id, &session));
        for _ in 0..reader.count(3, "outcomes")? {
            let sequence = reader.varint("sequence")?;
            let answered = match (reader.byte("outcome")?, reader.varint("outcome")?) {
                (0, object) => Answered::Removal(Removal::Removed(ObjectId(object))),
                (1, _) => Answered::Removal(Removal::NotFound),
                (2, _) => Answered::Removal(Removal::NotReady),
                (3, objects) => Answered::Removed { objects },
                (4, object) => Answered::Upsert(ObjectId(object)),
                (5, cleared) => Answered::Cleared(cleared != 0),
                (other, _) => return Err(DecodeError::Unknown { what: "outcome", value: other.into() }.into()),
            };
            core.digest.add(|c| c.answered(id, sequence, answered));
            session.outcomes.insert(sequence, answered);
        }
        let is_new = core.sessions.by_uuid.insert(session.client_uuid, id).is_none();
        if core.sessions.by_id.insert(id, session).is_some() || !is_new {
            return Err(RestoreError::Inconsistent(format!("session {id} comes twice")));
        }
    }
    Ok(())
}

fn read_object(reader: &mut Reader<'_>, core: &mut Core, shards: &Shards) -> Result<(), RestoreError> {
    let object = ObjectId(reader.varint("object id")?);
    let owner = tenant(reader)?;
    let mut record = Record {
        key: reader.bytes("key")?.into(),
        object,
        length: reader.varint("length")?,
        started: LogTime(reader.varint("started")?),
        replicas: SmallVec::new(),
        extras: None,
        tenant: owner,
        stored_slots: reader.varint("stored slots")? as u16,
        asked: {
            let (granted, wanted) = (reader.byte("granted")?, reader.byte("wanted")?);
            let many = || RestoreError::Inconsistent(format!("object {object} wants {wanted} of {granted} replicas"));
            Asked::of(wanted, granted).ok_or_else(many)?
        },
        copies: reader.byte("copies")?,
        data_type: DataType(reader.byte("data type")?),
        hard_pinned: reader.byte("hard pin")? != 0,
    };
    record.soft_pin(LogTime(reader.varint("soft pin")?));
    let group = reader.bytes("group")?;
    if !group.is_empty() {
        record.extras.get_or_insert_default().group = Some(core.groups.shared_name(owner, group));
    }
    if record.length > tidepool_proto::object::OBJECT_BYTES_MAX {
        return Err(RestoreError::Inconsistent(format!("object {object} has {} bytes", record.length)));
    }
    if core.tenants.get(owner).is_none() {
        return Err(RestoreError::Inconsistent(format!("object {object} is of an unknown tenant")));
    }
    let open = if record.copies == 0 { Some(read_open(reader)?) } else { None };
    let bytes = extent_bytes(record.length);
    let used_for = if record.is_complete() { Use::Complete } else { Use::Processing };
    let replicas = usize::from(reader.byte("replicas")?);
    if replicas == 0 || replicas > REPLICAS_PER_OBJECT_MAX {
        return Err(RestoreError::Inconsistent(format!("object {object} has {replicas} replicas")));
    }
    record.replicas.reserve_exact(replicas.saturating_sub(1));
    for _ in 0..replicas {
        let id = ReplicaId(reader.varint("replica id")?);
        let (segment, offset) = read_extent(reader, core, bytes, used_for, id)?;
        record.replicas.push(Replica { id, offset, segment });
    }
    let replaces = open.and_then(|open| open.replaces);
    if let Some(open) = open {
        core.open.insert(object, open);
        if let Some(session) = core.sessions.by_id.get_mut(&open.session) {
            session.open_grants += 1;
            session.open_bytes += bytes * replicas as u64;
        }
    }
    core.digest.add(|c| c.object(&record, open.as_ref(), &core.space));
    core.note_copies(&record);
    let account = core.tenants.get_mut(owner).expect("checked before");
    account.bytes += record.all_bytes();
    account.objects += 1;
    if let Some(name) = record.group() {
        core.groups.join((owner, name.clone()), object, replaces.is_some());
    }
    let hash = shards.hash(record.tenant, &record.key);
    let elder = shards.locate(hash, record.tenant, &record.key);
    let elder = elder.and_then(|at| shards.with(at, |r| (r.object, r.is_complete())));
    if elder != replaces.map(|old| (old, true)) {
        return Err(RestoreError::Inconsistent(format!("object {object} has another object's key")));
    }
    let extents: SmallVec<[Replica; 2]> = record.replicas.iter().copied().collect();
    let at = match replaces {
        None => shards.insert(hash, record),
        Some(old) => {
            if core.upserts.insert(old, object).is_some() {
                return Err(RestoreError::Inconsistent(format!("object {old} has two upserts")));
            }
            shards.insert_detached(hash, record)
        }
    };
    for replica in extents {
        core.space.note_used(replica.segment, replica.offset, at);
    }
    if core.index.insert(object, at).is_some() {
        return Err(RestoreError::Inconsistent(format!("object {object} comes twice")));
    }
    Ok(())
}

fn read_open(reader: &mut Reader<'_>) -> Result<OpenPut, RestoreError> {
    let (token, session) = (reader.array("token")?, SessionId(reader.varint("session")?));
    let replaces = Some(ObjectId(reader.varint("replaced object")?)).filter(|old| old.0 != 0);
    Ok(OpenPut { token, session, replaces, soft_pin: soft_pin(reader)? })
}

/// Reads where a replica lies and takes its extent.
pub(super) fn read_extent(
    reader: &mut Reader<'_>,
    core: &mut Core,
    bytes: u64,
    used_for: Use,
    replica: ReplicaId,
) -> Result<(u32, u64), RestoreError> {
    let segment = SegmentId(reader.varint("segment id")?);
    let offset = reader.varint("offset")?;
    let slot = core.space.slot(segment).map_err(|e| RestoreError::Inconsistent(e.to_string()))?;
    if bytes == 0 || !core.space.restore(slot, offset, bytes, used_for) {
        return Err(RestoreError::Inconsistent(format!(
            "replica {replica} at {offset}+{bytes} of segment {segment} overlaps another"
        )));
    }
    Ok((slot, offset))
}

fn read_retired(reader: &mut Reader<'_>, core: &mut Core) -> Result<(), RestoreError> {
    for _ in 0..reader.count(6, "retired replicas")? {
        let id = ReplicaId(reader.varint("replica id")?);
        let object = ObjectId(reader.varint("object id")?);
        let segment = SegmentId(reader.varint("segment id")?);
        let offset = reader.varint("offset")?;
        let bytes = reader.varint("bytes")?;
        let clean = reader.byte("clean")? != 0;
        let slot = core.space.slot(segment).map_err(|e| RestoreError::Inconsistent(e.to_string()))?;
        if bytes == 0 || core.retired.contains_key(&id) || !core.space.restore(slot, offset, bytes, Use::Retired) {
            return Err(RestoreError::Inconsistent(format!("retired replica {id} overlaps another")));
        }
        core.retire(id, Retired { object, segment: slot, offset, bytes, clean });
    }
    for _ in 0..reader.count(4, "groups")? {
        let name = (tenant(reader)?, reader.bytes("group")?.into());
        let Some(group) = core.groups.by_name.get_mut(&name) else {
            return Err(RestoreError::Inconsistent("a group without members has lost one".into()));
        };
        for _ in 0..reader.count(1, "lost members")? {
            let key = reader.bytes("key")?;
            core.digest.add(|c| c.lost_member(&name, key));
            group.lost.insert(key.into());
        }
    }
    Ok(())
}
