//! Bytes to ops.

use super::tag;
use crate::directory::limits::{Config, Strategy};
use crate::directory::op::{
    ClearReplicas, Contact, CopyStart, CreateTask, DataType, Op, PutEnd, PutStart, Quota, Remove, ReplicaEnd,
    ReplicaMode, ReplicaStatus, RetireMode, SessionId, SoftPinAction, Statuses, TaskId, TaskKind, TenantId, Turn,
};
use crate::directory::tasks::TaskState;
use crate::directory::varint::{DecodeError, Reader};
use tidepool_proto::capability::Secret;
use tidepool_proto::{ClusterId, History, Incarnation, NodeId, ObjectId, ReplicaId, SegmentId};

pub(super) fn decode_op<'a>(reader: &mut Reader<'a>) -> Result<Op<'a>, DecodeError> {
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

fn choice<T: Copy>(reader: &mut Reader<'_>, what: &'static str, choices: &[T]) -> Result<T, DecodeError> {
    let byte = reader.byte(what)?;
    choices.get(usize::from(byte)).copied().ok_or(DecodeError::Unknown { what, value: byte.into() })
}

fn replica_end(reader: &mut Reader<'_>) -> Result<ReplicaEnd, DecodeError> {
    choice(reader, "replica end", &[ReplicaEnd::Stored, ReplicaEnd::Aborted, ReplicaEnd::Unknown])
}

fn small(reader: &mut Reader<'_>, what: &'static str) -> Result<u32, DecodeError> {
    u32::try_from(reader.varint(what)?).map_err(|_| DecodeError::Overflow(what))
}

fn retire_mode(reader: &mut Reader<'_>) -> Result<RetireMode, DecodeError> {
    choice(reader, "retire mode", &[RetireMode::RetireOnly, RetireMode::RetireAndReclaim])
}

fn turn(reader: &mut Reader<'_>) -> Result<Turn, DecodeError> {
    Ok(Turn { sequence: reader.varint("sequence")?, floor: reader.varint("floor")? })
}

fn soft_pin(reader: &mut Reader<'_>) -> Result<SoftPinAction, DecodeError> {
    let (action, ttl_ms) = (reader.byte("soft pin")?, reader.varint("soft pin time")?);
    match action {
        0 => Ok(SoftPinAction::Preserve),
        1 => Ok(SoftPinAction::Enable { ttl_ms }),
        2 => Ok(SoftPinAction::Disable),
        other => Err(DecodeError::Unknown { what: "soft pin", value: other.into() }),
    }
}

fn tenant(reader: &mut Reader<'_>) -> Result<TenantId, DecodeError> {
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
