//! Ops to bytes.

use super::tag;
use crate::directory::digest::soft_pin_parts;
use crate::directory::op::{
    Contact, Op, PutEnd, PutStart, Remove, ReplicaEnd, ReplicaMode, RetireMode, SoftPinAction, Turn,
};
use crate::directory::varint::{put_bytes, put_varint};
use tidepool_proto::{Incarnation, NodeId};

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
