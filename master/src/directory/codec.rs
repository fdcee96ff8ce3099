//! The binary encoding of entries.
//!
//! ```text
//! entry: version u8 | feature level u16 | log time u64 | op count u16 | ops      (fixed integers little endian)
//! op:    tag u8 | fields in the order of `Op`: ids and numbers as LEB128 varints, keys and text as length and bytes,
//!        uuids and tokens as 16 bytes, choices as one byte, lists as count and items
//! ```
//! Decoding borrows keys and text from the entry. What is well formed but wrong is left to apply, which refuses it;
//! what is not well formed is an error of the log, not of a client.

use super::digest::soft_pin_parts;
use super::limits::{Config, FEATURE_LEVEL, Strategy};
use super::op::{
    ClearReplicas, Contact, CopyStart, CreateTask, DataType, Entry, Op, PutEnd, PutStart, Quota, Remove, ReplicaEnd,
    ReplicaMode, ReplicaStatus, RetireMode, SessionId, SoftPinAction, Statuses, TaskId, TaskKind, TenantId, Turn,
};
use super::tasks::TaskState;
pub use super::varint::DecodeError;
use super::varint::{Reader, put_bytes, put_varint};
use bytes::Bytes;
use tidepool_proto::capability::Secret;
use tidepool_proto::ids::OPS_PER_ENTRY_MAX;
use tidepool_proto::{
    ClusterId, Error, ErrorCode, History, Incarnation, LogTime, NodeId, ObjectId, ReplicaId, SegmentId,
};

/// Version of the encoding.
pub const ENTRY_VERSION: u8 = 1;
/// Bytes before the first op.
pub const HEADER_BYTES: usize = 1 + 2 + 8 + 2;

mod tag {
    pub(super) const REGISTER_NODE: u8 = 1;
    pub(super) const MOUNT_SEGMENT: u8 = 2;
    pub(super) const UNMOUNT_SEGMENT: u8 = 3;
    pub(super) const SET_CONTACT: u8 = 4;
    pub(super) const DROP_NODE: u8 = 5;
    pub(super) const OPEN_SESSION: u8 = 6;
    pub(super) const EXPIRE_SESSIONS: u8 = 7;
    pub(super) const PUT_START: u8 = 8;
    pub(super) const PUT_END: u8 = 9;
    pub(super) const PUT_REVOKE: u8 = 10;
    pub(super) const REMOVE: u8 = 11;
    pub(super) const RETIRE: u8 = 12;
    pub(super) const RECLAIM: u8 = 13;
    pub(super) const DISCARD: u8 = 14;
    pub(super) const FENCE_ACKNOWLEDGED: u8 = 15;
    pub(super) const DROP_REPLICA: u8 = 16;
    pub(super) const SET_CONFIG: u8 = 17;
    pub(super) const CHECKPOINT: u8 = 18;
    pub(super) const REMOVE_OBJECTS: u8 = 19;
    pub(super) const SET_PIN: u8 = 20;
    pub(super) const SET_TENANT: u8 = 21;
    pub(super) const DROP_TENANT: u8 = 22;
    pub(super) const COPY_START: u8 = 23;
    pub(super) const COPY_END: u8 = 24;
    pub(super) const CREATE_TASK: u8 = 25;
    pub(super) const END_TASK: u8 = 26;
    /// Of feature level 2.
    pub(super) const BEGIN_HISTORY: u8 = 36;
    pub(super) const AUDIT: u8 = 31;
    /// SET_CONFIG with the limits on what is granted and pinned; the first form leaves them at their defaults.
    pub(super) const SET_CONFIG_2: u8 = 32;
    pub(super) const DROP_EXTRA: u8 = 30;
    pub(super) const CLEAR_REPLICAS: u8 = 33;
    /// As COPY_START, which is no longer written, with the number of replicas it may make.
    pub(super) const COPY_START_UP_TO: u8 = 34;
    pub(super) const RAISE_FEATURE_LEVEL: u8 = 35;
}

/// Ops being gathered into an entry. Ops may be encoded elsewhere (`encode_op`) and only copied here.
#[derive(Debug)]
pub struct EntryBuilder {
    bytes: Vec<u8>,
    ops: usize,
}

impl EntryBuilder {
    /// An empty entry of a feature level.
    pub fn new(feature_level: u16) -> EntryBuilder {
        let mut bytes = Vec::with_capacity(1024);
        bytes.push(ENTRY_VERSION);
        bytes.extend_from_slice(&feature_level.to_le_bytes());
        bytes.resize(HEADER_BYTES, 0);
        EntryBuilder { bytes, ops: 0 }
    }

    /// Appends an op and says its ordinal.
    pub fn push(&mut self, op: &Op<'_>) -> Result<usize, Error> {
        self.admit()?;
        encode_op(op, &mut self.bytes);
        self.ops += 1;
        Ok(self.ops - 1)
    }

    /// Appends an op that `encode_op` encoded, and says its ordinal.
    pub fn push_encoded(&mut self, op: &[u8]) -> Result<usize, Error> {
        self.admit()?;
        self.bytes.extend_from_slice(op);
        self.ops += 1;
        Ok(self.ops - 1)
    }

    fn admit(&self) -> Result<(), Error> {
        if self.ops < OPS_PER_ENTRY_MAX {
            return Ok(());
        }
        Err(Error::new(ErrorCode::ResourceExhausted, format!("entry has {OPS_PER_ENTRY_MAX} ops, the most it carries")))
    }

    /// Ops so far.
    pub fn ops(&self) -> usize {
        self.ops
    }

    /// Bytes so far.
    pub fn len_bytes(&self) -> usize {
        self.bytes.len()
    }

    /// The encoded entry, stamped.
    pub fn finish(mut self, log_time: LogTime) -> Bytes {
        self.bytes[3..11].copy_from_slice(&log_time.0.to_le_bytes());
        self.bytes[11..13].copy_from_slice(&(self.ops as u16).to_le_bytes());
        self.bytes.into()
    }
}

impl<'a> Entry<'a> {
    /// Decodes an entry, borrowing from its bytes.
    pub fn decode(bytes: &'a [u8]) -> Result<Entry<'a>, DecodeError> {
        let mut reader = Reader::new(bytes);
        let feature_level = read_head(&mut reader)?;
        let log_time = LogTime(u64::from_le_bytes(reader.array("log time")?));
        let count = usize::from(u16::from_le_bytes(reader.array("op count")?));
        if count > OPS_PER_ENTRY_MAX {
            return Err(DecodeError::TooManyOps(count));
        }
        let mut ops = Vec::with_capacity(count.min(reader.remaining()));
        for _ in 0..count {
            ops.push(decode_op(&mut reader)?);
        }
        reader.finish()?;
        Ok(Entry { feature_level, log_time, ops })
    }

    /// Whether this binary can apply an entry, by its head alone (M6).
    pub fn admit(bytes: &[u8]) -> Result<(), DecodeError> {
        read_head(&mut Reader::new(bytes)).map(drop)
    }

    /// Encodes the whole entry.
    pub fn encode(&self) -> Result<Bytes, Error> {
        let mut builder = EntryBuilder::new(self.feature_level);
        for op in &self.ops {
            builder.push(op)?;
        }
        Ok(builder.finish(self.log_time))
    }
}

/// Version and feature level, if this binary has both.
fn read_head(reader: &mut Reader<'_>) -> Result<u16, DecodeError> {
    let version = reader.byte("entry version")?;
    if version != ENTRY_VERSION {
        return Err(DecodeError::Unknown { what: "entry version", value: version.into() });
    }
    let feature_level = u16::from_le_bytes(reader.array("feature level")?);
    if feature_level > FEATURE_LEVEL {
        return Err(DecodeError::FeatureLevel(feature_level));
    }
    Ok(feature_level)
}

/// Appends one op's encoding.
pub fn encode_op(op: &Op<'_>, out: &mut Vec<u8>) {
    match op {
        Op::RegisterNode { node_uuid, process_uuid, address, host_id } => {
            out.push(tag::REGISTER_NODE);
            out.extend_from_slice(node_uuid);
            out.extend_from_slice(process_uuid);
            put_bytes(out, address.as_bytes());
            put_bytes(out, host_id.as_bytes());
        }
        Op::MountSegment { node, incarnation, name, bytes } => {
            put_owner(out, tag::MOUNT_SEGMENT, *node, *incarnation);
            put_bytes(out, name.as_bytes());
            put_varint(out, *bytes);
        }
        Op::UnmountSegment { node, incarnation, segment } => {
            put_owner(out, tag::UNMOUNT_SEGMENT, *node, *incarnation);
            put_varint(out, segment.0);
        }
        Op::SetContact { node, incarnation, contact } => {
            put_owner(out, tag::SET_CONTACT, *node, *incarnation);
            out.push(match contact {
                Contact::Heard => 0,
                Contact::Suspect => 1,
            });
        }
        Op::DropNode { node, incarnation } => put_owner(out, tag::DROP_NODE, *node, *incarnation),
        Op::OpenSession { client_uuid, host_id } => {
            out.push(tag::OPEN_SESSION);
            out.extend_from_slice(client_uuid);
            put_bytes(out, host_id.as_bytes());
        }
        Op::ExpireSessions { sessions } => {
            out.push(tag::EXPIRE_SESSIONS);
            put_ids(out, sessions.iter().map(|s| s.0));
        }
        Op::PutStart(put) => encode_put_start(put, out),
        Op::PutEnd(end) => encode_put_end(tag::PUT_END, end, out),
        Op::PutRevoke(end) => encode_put_end(tag::PUT_REVOKE, end, out),
        Op::Remove(remove) => encode_remove(remove, out),
        Op::RemoveObjects { session, turn, objects, mode } => {
            out.push(tag::REMOVE_OBJECTS);
            put_varint(out, session.0);
            put_turn(out, *turn);
            put_ids(out, objects.iter().map(|o| o.0));
            out.push(retire_mode_byte(*mode));
        }
        Op::SetPin { object, action } => {
            out.push(tag::SET_PIN);
            put_varint(out, object.0);
            put_soft_pin(out, *action);
        }
        Op::SetTenant { name, quota } => {
            out.push(tag::SET_TENANT);
            put_bytes(out, name.as_bytes());
            put_varint(out, quota.bytes);
            put_varint(out, quota.objects);
            out.push(quota.refuse.into());
        }
        Op::DropTenant { name } => {
            out.push(tag::DROP_TENANT);
            put_bytes(out, name.as_bytes());
        }
        Op::Retire { objects, mode } => {
            out.push(tag::RETIRE);
            put_ids(out, objects.iter().map(|o| o.0));
            out.push(retire_mode_byte(*mode));
        }
        Op::Reclaim { replicas } => {
            out.push(tag::RECLAIM);
            put_ids(out, replicas.iter().map(|r| r.0));
        }
        Op::Discard { objects } => {
            out.push(tag::DISCARD);
            put_ids(out, objects.iter().map(|o| o.0));
        }
        Op::FenceAcknowledged { node, incarnation, replicas } => {
            put_owner(out, tag::FENCE_ACKNOWLEDGED, *node, *incarnation);
            put_ids(out, replicas.iter().map(|r| r.0));
        }
        Op::DropReplica { object, replica } => {
            out.push(tag::DROP_REPLICA);
            put_varint(out, object.0);
            put_varint(out, replica.0);
        }
        Op::CopyStart(copy) => {
            out.push(tag::COPY_START_UP_TO);
            put_varint(out, copy.object.0);
            put_varint(out, copy.instead_of.map_or(0, |r| r.0));
            put_ids(out, copy.targets.iter().map(|s| s.0));
            put_varint(out, copy.task.0);
            out.push(copy.up_to);
        }
        Op::DropExtra { object, replica } => {
            out.push(tag::DROP_EXTRA);
            put_varint(out, object.0);
            put_varint(out, replica.0);
        }
        Op::ClearReplicas(clear) => {
            out.push(tag::CLEAR_REPLICAS);
            put_varint(out, clear.session.0);
            put_turn(out, clear.turn);
            put_varint(out, clear.object.0);
            put_ids(out, clear.replicas.iter().map(|r| r.0));
        }
        Op::CopyEnd { replica, end } => {
            out.push(tag::COPY_END);
            put_varint(out, replica.0);
            out.push(replica_end_byte(*end));
        }
        Op::CreateTask(task) => {
            out.push(tag::CREATE_TASK);
            out.push(task.kind as u8);
            put_varint(out, task.object.0);
            put_ids(out, task.sources.iter().map(|s| s.0));
            put_ids(out, task.targets.iter().map(|s| s.0));
            put_varint(out, task.concurrency.into());
            out.push(task.unmount.into());
            out.extend_from_slice(&task.token);
        }
        Op::EndTask { task, state, left, message } => {
            out.push(tag::END_TASK);
            put_varint(out, task.0);
            out.push(*state as u8);
            put_varint(out, *left);
            put_bytes(out, message.as_bytes());
        }
        Op::SetConfig(config) => {
            out.push(tag::SET_CONFIG_2);
            put_varint(out, config.granted_bytes_min);
            put_varint(out, config.hard_pinned_percent_max);
            put_varint(out, config.lease_ttl_max_ms);
            put_varint(out, config.put_start_discard_timeout_ms);
            put_varint(out, config.objects_max);
            out.push(config.strategy as u8);
            out.extend_from_slice(&config.secret.0);
        }
        Op::Checkpoint { index, digest } => {
            out.push(tag::CHECKPOINT);
            put_varint(out, *index);
            out.extend_from_slice(&digest.to_le_bytes());
        }
        Op::BeginHistory { before: (cluster, history) } => {
            out.push(tag::BEGIN_HISTORY);
            out.extend_from_slice(&cluster.0);
            out.extend_from_slice(&history.0.to_le_bytes());
        }
        Op::RaiseFeatureLevel { level } => {
            out.push(tag::RAISE_FEATURE_LEVEL);
            out.extend_from_slice(&level.to_le_bytes());
        }
        Op::Audit => out.push(tag::AUDIT),
    }
}

fn put_owner(out: &mut Vec<u8>, tag: u8, node: NodeId, incarnation: Incarnation) {
    out.push(tag);
    put_varint(out, node.0);
    put_varint(out, incarnation.0);
}

fn put_ids(out: &mut Vec<u8>, ids: impl ExactSizeIterator<Item = u64>) {
    put_varint(out, ids.len() as u64);
    for id in ids {
        put_varint(out, id);
    }
}

fn retire_mode_byte(mode: RetireMode) -> u8 {
    match mode {
        RetireMode::RetireOnly => 0,
        RetireMode::RetireAndReclaim => 1,
    }
}

fn encode_put_start(put: &PutStart<'_>, out: &mut Vec<u8>) {
    out.push(tag::PUT_START);
    put_varint(out, put.tenant.0.into());
    put_varint(out, put.session.0);
    put_bytes(out, put.key);
    put_varint(out, put.length);
    out.extend_from_slice(&put.token);
    out.push(put.replica_num);
    out.push(match put.mode {
        ReplicaMode::BestEffort => 0,
        ReplicaMode::Strict => 1,
    });
    put_ids(out, put.excluded.iter().map(|n| n.0));
    put_ids(out, put.victims.iter().map(|v| v.0));
    out.push(put.data_type.0);
    out.push(put.hard_pin.into());
    put_soft_pin(out, put.soft_pin);
    put_bytes(out, put.group);
    put_ids(out, put.preferred.iter().map(|s| s.0));
    out.push(put.upsert.is_some().into());
    if let Some(turn) = put.upsert {
        put_turn(out, turn);
    }
}

fn put_turn(out: &mut Vec<u8>, turn: Turn) {
    put_varint(out, turn.sequence);
    put_varint(out, turn.floor);
}

fn put_soft_pin(out: &mut Vec<u8>, action: SoftPinAction) {
    let (action, ttl_ms) = soft_pin_parts(action);
    out.push(action);
    put_varint(out, ttl_ms);
}

fn encode_put_end(tag: u8, end: &PutEnd, out: &mut Vec<u8>) {
    out.push(tag);
    put_varint(out, end.session.0);
    put_varint(out, end.object.0);
    put_varint(out, end.replicas.len() as u64);
    for status in &end.replicas {
        put_varint(out, status.replica.0);
        out.push(replica_end_byte(status.end));
    }
}

fn replica_end_byte(end: ReplicaEnd) -> u8 {
    match end {
        ReplicaEnd::Stored => 0,
        ReplicaEnd::Aborted => 1,
        ReplicaEnd::Unknown => 2,
    }
}

fn encode_remove(remove: &Remove<'_>, out: &mut Vec<u8>) {
    out.push(tag::REMOVE);
    put_varint(out, remove.tenant.0.into());
    put_varint(out, remove.session.0);
    put_turn(out, remove.turn);
    put_bytes(out, remove.key);
    // Id 0 names nothing, so it can say "no expectation".
    put_varint(out, remove.expected.map_or(0, |o| o.0));
    out.push(retire_mode_byte(remove.mode));
}

fn decode_op<'a>(reader: &mut Reader<'a>) -> Result<Op<'a>, DecodeError> {
    Ok(match reader.byte("op tag")? {
        tag::REGISTER_NODE => Op::RegisterNode {
            node_uuid: reader.array("node uuid")?,
            process_uuid: reader.array("process uuid")?,
            address: reader.text("address")?,
            host_id: reader.text("host id")?,
        },
        tag::MOUNT_SEGMENT => {
            let (node, incarnation) = owner(reader)?;
            let (name, bytes) = (reader.text("segment name")?, reader.varint("segment bytes")?);
            Op::MountSegment { node, incarnation, name, bytes }
        }
        tag::UNMOUNT_SEGMENT => {
            let (node, incarnation) = owner(reader)?;
            Op::UnmountSegment { node, incarnation, segment: SegmentId(reader.varint("segment id")?) }
        }
        tag::SET_CONTACT => {
            let (node, incarnation) = owner(reader)?;
            let contact = choice(reader, "contact", &[Contact::Heard, Contact::Suspect])?;
            Op::SetContact { node, incarnation, contact }
        }
        tag::DROP_NODE => {
            let (node, incarnation) = owner(reader)?;
            Op::DropNode { node, incarnation }
        }
        tag::OPEN_SESSION => {
            Op::OpenSession { client_uuid: reader.array("client uuid")?, host_id: reader.text("host id")? }
        }
        tag::EXPIRE_SESSIONS => Op::ExpireSessions { sessions: reader.ids("session ids", SessionId)? },
        tag::PUT_START => Op::PutStart(decode_put_start(reader)?),
        tag::PUT_END => Op::PutEnd(decode_put_end(reader)?),
        tag::PUT_REVOKE => Op::PutRevoke(decode_put_end(reader)?),
        tag::REMOVE => Op::Remove(decode_remove(reader)?),
        tag::REMOVE_OBJECTS => Op::RemoveObjects {
            session: SessionId(reader.varint("session")?),
            turn: turn(reader)?,
            objects: reader.ids("object ids", ObjectId)?,
            mode: retire_mode(reader)?,
        },
        tag::SET_PIN => Op::SetPin { object: ObjectId(reader.varint("object id")?), action: soft_pin(reader)? },
        tag::SET_TENANT => Op::SetTenant {
            name: reader.text("tenant name")?,
            quota: Quota {
                bytes: reader.varint("quota bytes")?,
                objects: reader.varint("quota objects")?,
                refuse: choice(reader, "quota policy", &[false, true])?,
            },
        },
        tag::DROP_TENANT => Op::DropTenant { name: reader.text("tenant name")? },
        tag::RETIRE => Op::Retire { objects: reader.ids("object ids", ObjectId)?, mode: retire_mode(reader)? },
        tag::RECLAIM => Op::Reclaim { replicas: reader.ids("replica ids", ReplicaId)? },
        tag::DISCARD => Op::Discard { objects: reader.ids("object ids", ObjectId)? },
        tag::FENCE_ACKNOWLEDGED => {
            let (node, incarnation) = owner(reader)?;
            Op::FenceAcknowledged { node, incarnation, replicas: reader.ids("replica ids", ReplicaId)? }
        }
        tag::DROP_REPLICA => Op::DropReplica {
            object: ObjectId(reader.varint("object id")?),
            replica: ReplicaId(reader.varint("replica id")?),
        },
        tag::COPY_START => Op::CopyStart(copy_start(reader)?),
        tag::COPY_START_UP_TO => {
            let copy = copy_start(reader)?;
            Op::CopyStart(CopyStart { up_to: reader.byte("number of replicas")?, ..copy })
        }
        tag::DROP_EXTRA => Op::DropExtra {
            object: ObjectId(reader.varint("object id")?),
            replica: ReplicaId(reader.varint("replica id")?),
        },
        tag::CLEAR_REPLICAS => Op::ClearReplicas(ClearReplicas {
            session: SessionId(reader.varint("session")?),
            turn: turn(reader)?,
            object: ObjectId(reader.varint("object id")?),
            replicas: reader.ids("replica ids", ReplicaId)?.into(),
        }),
        tag::COPY_END => Op::CopyEnd { replica: ReplicaId(reader.varint("replica id")?), end: replica_end(reader)? },
        tag::CREATE_TASK => Op::CreateTask(CreateTask {
            kind: choice(reader, "task kind", &[TaskKind::Copy, TaskKind::Move, TaskKind::Drain])?,
            object: ObjectId(reader.varint("object id")?),
            sources: reader.ids("source segments", SegmentId)?,
            targets: reader.ids("target segments", SegmentId)?,
            concurrency: small(reader, "concurrency")?,
            unmount: choice(reader, "unmount", &[false, true])?,
            token: reader.array("token")?,
        }),
        tag::END_TASK => Op::EndTask {
            task: TaskId(reader.varint("task id")?),
            state: choice(reader, "task state", &TaskState::ALL)?,
            left: reader.varint("left")?,
            message: reader.text("message")?,
        },
        tag::SET_CONFIG => Op::SetConfig(decode_config(reader, Config::default())?),
        tag::SET_CONFIG_2 => {
            let granted_bytes_min = reader.varint("granted bytes")?;
            let hard_pinned_percent_max = reader.varint("hard-pinned percent")?;
            let limits = Config { granted_bytes_min, hard_pinned_percent_max, ..Config::default() };
            Op::SetConfig(decode_config(reader, limits)?)
        }
        tag::BEGIN_HISTORY => Op::BeginHistory {
            before: (ClusterId(reader.array("cluster uuid")?), History(u64::from_le_bytes(reader.array("history")?))),
        },
        tag::RAISE_FEATURE_LEVEL => Op::RaiseFeatureLevel { level: u16::from_le_bytes(reader.array("feature level")?) },
        tag::AUDIT => Op::Audit,
        tag::CHECKPOINT => Op::Checkpoint {
            index: reader.varint("checkpoint index")?,
            digest: u128::from_le_bytes(reader.array("checkpoint digest")?),
        },
        other => return Err(DecodeError::Unknown { what: "op tag", value: other.into() }),
    })
}

/// The first form of a configuration; what it does not have is that of `limits`.
fn decode_config(reader: &mut Reader<'_>, limits: Config) -> Result<Config, DecodeError> {
    Ok(Config {
        lease_ttl_max_ms: reader.varint("lease ttl")?,
        put_start_discard_timeout_ms: reader.varint("discard timeout")?,
        objects_max: reader.varint("objects max")?,
        strategy: choice(reader, "strategy", &Strategy::ALL)?,
        secret: Secret(reader.array("secret")?),
        ..limits
    })
}

fn copy_start(reader: &mut Reader<'_>) -> Result<CopyStart, DecodeError> {
    Ok(CopyStart {
        object: ObjectId(reader.varint("object id")?),
        instead_of: Some(ReplicaId(reader.varint("replica id")?)).filter(|r| r.0 != 0),
        targets: reader.ids("target segments", SegmentId)?.into(),
        task: TaskId(reader.varint("task id")?),
        up_to: 0,
    })
}

fn owner(reader: &mut Reader<'_>) -> Result<(NodeId, Incarnation), DecodeError> {
    Ok((NodeId(reader.varint("node id")?), Incarnation(reader.varint("incarnation")?)))
}

pub(super) fn choice<T: Copy>(reader: &mut Reader<'_>, what: &'static str, choices: &[T]) -> Result<T, DecodeError> {
    let byte = reader.byte(what)?;
    choices.get(usize::from(byte)).copied().ok_or(DecodeError::Unknown { what, value: byte.into() })
}

fn replica_end(reader: &mut Reader<'_>) -> Result<ReplicaEnd, DecodeError> {
    choice(reader, "replica end", &[ReplicaEnd::Stored, ReplicaEnd::Aborted, ReplicaEnd::Unknown])
}

pub(super) fn small(reader: &mut Reader<'_>, what: &'static str) -> Result<u32, DecodeError> {
    u32::try_from(reader.varint(what)?).map_err(|_| DecodeError::Overflow(what))
}

fn retire_mode(reader: &mut Reader<'_>) -> Result<RetireMode, DecodeError> {
    choice(reader, "retire mode", &[RetireMode::RetireOnly, RetireMode::RetireAndReclaim])
}

pub(super) fn turn(reader: &mut Reader<'_>) -> Result<Turn, DecodeError> {
    Ok(Turn { sequence: reader.varint("sequence")?, floor: reader.varint("floor")? })
}

pub(super) fn soft_pin(reader: &mut Reader<'_>) -> Result<SoftPinAction, DecodeError> {
    let (action, ttl_ms) = (reader.byte("soft pin")?, reader.varint("soft pin time")?);
    match action {
        0 => Ok(SoftPinAction::Preserve),
        1 => Ok(SoftPinAction::Enable { ttl_ms }),
        2 => Ok(SoftPinAction::Disable),
        other => Err(DecodeError::Unknown { what: "soft pin", value: other.into() }),
    }
}

pub(super) fn tenant(reader: &mut Reader<'_>) -> Result<TenantId, DecodeError> {
    u16::try_from(reader.varint("tenant")?).map(TenantId).map_err(|_| DecodeError::Overflow("tenant"))
}

fn decode_put_start<'a>(reader: &mut Reader<'a>) -> Result<PutStart<'a>, DecodeError> {
    Ok(PutStart {
        tenant: tenant(reader)?,
        session: SessionId(reader.varint("session")?),
        key: reader.bytes("key")?,
        length: reader.varint("length")?,
        token: reader.array("token")?,
        replica_num: reader.byte("replica number")?,
        mode: choice(reader, "replica mode", &[ReplicaMode::BestEffort, ReplicaMode::Strict])?,
        excluded: reader.ids("excluded nodes", NodeId)?.into(),
        victims: reader.ids("victims", ObjectId)?,
        data_type: DataType(reader.byte("data type")?),
        hard_pin: choice(reader, "hard pin", &[false, true])?,
        soft_pin: soft_pin(reader)?,
        group: reader.bytes("group")?,
        preferred: reader.ids("preferred segments", SegmentId)?.into(),
        upsert: match choice(reader, "upsert", &[false, true])? {
            true => Some(turn(reader)?),
            false => None,
        },
    })
}

fn decode_put_end(reader: &mut Reader<'_>) -> Result<PutEnd, DecodeError> {
    let session = SessionId(reader.varint("session")?);
    let object = ObjectId(reader.varint("object id")?);
    let count = reader.count(2, "replica statuses")?;
    let mut replicas = Statuses::with_capacity(count);
    for _ in 0..count {
        let replica = ReplicaId(reader.varint("replica id")?);
        let end = replica_end(reader)?;
        replicas.push(ReplicaStatus { replica, end });
    }
    Ok(PutEnd { session, object, replicas })
}

fn decode_remove<'a>(reader: &mut Reader<'a>) -> Result<Remove<'a>, DecodeError> {
    Ok(Remove {
        tenant: tenant(reader)?,
        session: SessionId(reader.varint("session")?),
        turn: turn(reader)?,
        key: reader.bytes("key")?,
        expected: Some(ObjectId(reader.varint("expected object")?)).filter(|id| id.0 != 0),
        mode: retire_mode(reader)?,
    })
}
