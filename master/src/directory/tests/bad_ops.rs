//! Bad ops: each refused with its code and a message that names the facts; the state is as before (M1).

use super::world::{World, end, register, remove};
use crate::directory::limits::{
    ADDRESS_BYTES_MAX, EXCLUDED_NODES_MAX, IDS_PER_OP_MAX, OUTCOMES_PER_SESSION_MAX, SEGMENT_BYTES_MAX,
    SEGMENTS_PER_NODE_MAX, VICTIMS_PER_OP_MAX,
};
use crate::directory::{
    Config, Contact, Op, Outcome, PutEnd, PutStart, ReplicaEnd, ReplicaMode, ReplicaStatus, RetireMode, SessionId,
    TenantId,
};
use tidepool_proto::capability::Secret;
use tidepool_proto::keys::KEY_BYTES_MAX;
use tidepool_proto::object::OBJECT_BYTES_MAX;
use tidepool_proto::{ErrorCode, Incarnation, NodeId, ObjectId, ReplicaId, SegmentId};

const NODE_UNKNOWN: NodeId = NodeId(1 << 30);

#[test]
fn bad_puts_are_refused() {
    let (mut world, nodes, session) = World::with_nodes(2, 1 << 16);
    world.put(session, "complete", 100);
    world.start(session, "open", 100);
    let (long, good) = ("x".repeat(KEY_BYTES_MAX + 1), world.put_op(session, "k", 100));
    let with = |change: &dyn Fn(&mut PutStart<'_>)| {
        let mut put = good.clone();
        change(&mut put);
        Op::PutStart(PutStart { key: good.key, ..put })
    };
    let table: Vec<(Op<'_>, ErrorCode, &str)> = vec![
        (Op::PutStart(PutStart { key: b"", ..good.clone() }), ErrorCode::InvalidKey, "empty"),
        (Op::PutStart(PutStart { key: long.as_bytes(), ..good.clone() }), ErrorCode::InvalidKey, "4097 bytes"),
        (with(&|p| p.length = 0), ErrorCode::InvalidParams, "0 bytes"),
        (with(&|p| p.length = OBJECT_BYTES_MAX + 1), ErrorCode::InvalidParams, "1 to 68719476736"),
        (with(&|p| p.length = u64::MAX), ErrorCode::InvalidParams, "1 to 68719476736"),
        (with(&|p| p.replica_num = 0), ErrorCode::InvalidParams, "0 copies"),
        (with(&|p| p.replica_num = 16), ErrorCode::InvalidParams, "16 copies"),
        (with(&|p| p.tenant = TenantId(1)), ErrorCode::TenantNotRegistered, "tenant 1"),
        (with(&|p| p.session = SessionId(1 << 20)), ErrorCode::SessionUnknown, "say hello"),
        (
            with(&|p| p.excluded = vec![NODE_UNKNOWN; EXCLUDED_NODES_MAX + 1].into()),
            ErrorCode::InvalidParams,
            "65 nodes",
        ),
        (with(&|p| p.victims = vec![ObjectId(1); VICTIMS_PER_OP_MAX + 1]), ErrorCode::InvalidParams, "4097 victims"),
        (with(&|p| p.length = 1 << 17), ErrorCode::NoSpace, "largest free extent has"),
        (with(&|p| p.excluded = nodes.iter().map(|n| n.0).collect()), ErrorCode::NoSpace, "2 nodes excluded"),
        (
            with(&|p| (p.replica_num, p.mode) = (3, ReplicaMode::Strict)),
            ErrorCode::NotEnoughReplicas,
            "needs 3 extents of",
        ),
        (Op::PutStart(PutStart { key: b"complete", ..good.clone() }), ErrorCode::ObjectAlreadyExists, "'complete'"),
        (Op::PutStart(PutStart { key: b"open", ..good.clone() }), ErrorCode::PutInProgress, "in 30000 ms"),
    ];
    for (op, code, words) in table {
        let message = world.refused(op, code);
        assert!(message.contains(words), "'{message}' does not say '{words}'");
    }
}

#[test]
fn bad_ends_are_refused() {
    let (mut world, _, session) = World::with_nodes(2, 1 << 16);
    let other = world.session(2);
    let complete = world.put(session, "complete", 100);
    let open = world.start(session, "open", 100);
    let lost = world.start(session, "lost", 100);
    world.one(Op::PutRevoke(end(session, &lost, ReplicaEnd::Aborted)));
    let stored = |grant| end(session, grant, ReplicaEnd::Stored);
    let status = |replica| ReplicaStatus { replica, end: ReplicaEnd::Stored };
    let naming = |replicas: Vec<ReplicaStatus>| PutEnd { session, object: open.object, replicas: replicas.into() };
    let good = open.replicas[0].replica;
    let twice = naming(vec![status(good), status(good)]);
    let not_granted = naming(vec![status(ReplicaId(good.0 + 1))]);
    let anothers = naming(vec![status(complete.replicas[0].replica)]);
    let slot_0 = naming(vec![status(ReplicaId(open.object.0))]);
    let table = [
        (PutEnd { object: ObjectId(1 << 30), ..stored(&open) }, ErrorCode::GrantLost),
        (PutEnd { object: ObjectId(0), ..stored(&open) }, ErrorCode::GrantLost),
        (stored(&lost), ErrorCode::GrantLost),
        (PutEnd { session: other, ..stored(&open) }, ErrorCode::IllegalClient),
        (PutEnd { session: other, ..stored(&complete) }, ErrorCode::IllegalClient),
        (PutEnd { session: SessionId(0), ..stored(&open) }, ErrorCode::IllegalClient),
        (twice, ErrorCode::InvalidParams),
        (not_granted, ErrorCode::InvalidParams),
        (anothers, ErrorCode::InvalidParams),
        (slot_0, ErrorCode::InvalidParams),
        // Ended before, with another result.
        (end(session, &complete, ReplicaEnd::Aborted), ErrorCode::AlreadyEnded),
    ];
    for (bad, code) in table {
        world.refused(Op::PutEnd(bad.clone()), code);
        world.refused(Op::PutRevoke(bad), code);
    }
    // The same end again is no error; a revocation after the end is.
    assert_eq!(world.one(Op::PutEnd(stored(&complete))), Outcome::Ended { copies: 1 });
    world.refused(Op::PutRevoke(stored(&complete)), ErrorCode::AlreadyEnded);
    assert_eq!(world.one(Op::PutEnd(stored(&open))), Outcome::Ended { copies: 1 });
}

#[test]
fn bad_membership_ops_are_refused() {
    let (mut world, nodes, _) = World::with_nodes(2, 4096);
    let (node, old, segment) = nodes[0];
    let (other, other_life, _) = nodes[1];
    let (_, incarnation) = world.register(0, 100, "h0");
    let segment_2 = world.mount((node, incarnation), "s", 4096);
    let long = "x".repeat(ADDRESS_BYTES_MAX + 1);
    let mount = |name, bytes| Op::MountSegment { node, incarnation, name, bytes };
    let contact = Contact::Suspect;
    let table = vec![
        (register(0, 0, "h0"), ErrorCode::Fenced),
        (
            Op::RegisterNode { node_uuid: [9; 16], process_uuid: [9; 16], address: "", host_id: "h" },
            ErrorCode::InvalidParams,
        ),
        (
            Op::RegisterNode { node_uuid: [9; 16], process_uuid: [9; 16], address: &long, host_id: "h" },
            ErrorCode::InvalidParams,
        ),
        (
            Op::RegisterNode { node_uuid: [9; 16], process_uuid: [9; 16], address: "a:1", host_id: "" },
            ErrorCode::InvalidParams,
        ),
        (mount("s", 8192), ErrorCode::SegmentAlreadyExists),
        (mount("t", 0), ErrorCode::InvalidParams),
        (mount("t", 100), ErrorCode::InvalidParams),
        (mount("t", SEGMENT_BYTES_MAX + 64), ErrorCode::InvalidParams),
        (mount("", 4096), ErrorCode::InvalidParams),
        (Op::MountSegment { node, incarnation: old, name: "t", bytes: 4096 }, ErrorCode::Fenced),
        (Op::MountSegment { node: NODE_UNKNOWN, incarnation, name: "t", bytes: 4096 }, ErrorCode::NodeUnknown),
        (Op::UnmountSegment { node, incarnation: old, segment: segment_2 }, ErrorCode::Fenced),
        (Op::UnmountSegment { node, incarnation, segment }, ErrorCode::SegmentNotFound),
        (Op::UnmountSegment { node, incarnation, segment: SegmentId(0) }, ErrorCode::SegmentNotFound),
        // Another node's segment.
        (Op::UnmountSegment { node: other, incarnation: other_life, segment: segment_2 }, ErrorCode::SegmentNotFound),
        (Op::SetContact { node, incarnation: old, contact }, ErrorCode::Fenced),
        (Op::SetContact { node: NODE_UNKNOWN, incarnation, contact }, ErrorCode::NodeUnknown),
        (Op::DropNode { node, incarnation: old }, ErrorCode::Fenced),
        (Op::DropNode { node: NODE_UNKNOWN, incarnation }, ErrorCode::NodeUnknown),
        (Op::FenceAcknowledged { node, incarnation: old, replicas: Vec::new() }, ErrorCode::Fenced),
        (
            Op::FenceAcknowledged { node: NodeId(0), incarnation: Incarnation(0), replicas: Vec::new() },
            ErrorCode::NodeUnknown,
        ),
        (Op::OpenSession { client_uuid: [5; 16], host_id: &long }, ErrorCode::InvalidParams),
    ];
    for (op, code) in table {
        world.refused(op, code);
    }
    for i in 1..SEGMENTS_PER_NODE_MAX {
        world.mount((node, incarnation), &format!("more-{i}"), 64);
    }
    world.refused(mount("one-too-many", 64), ErrorCode::ResourceExhausted);
}

#[test]
fn bad_removals_and_space_ops_are_refused() {
    let (mut world, _, session) = World::with_nodes(1, 1 << 16);
    let open = world.start(session, "open", 100);
    let complete = world.put(session, "complete", 100);
    let long = "x".repeat(KEY_BYTES_MAX + 1);
    let ids = vec![ObjectId(1); IDS_PER_OP_MAX + 1];
    let replicas = vec![ReplicaId(1); IDS_PER_OP_MAX + 1];
    let drop = |object, replica| Op::DropReplica { object, replica };
    let config = |change: &dyn Fn(&mut Config)| {
        let mut config = Config::default();
        change(&mut config);
        Op::SetConfig(config)
    };
    let mut tenant = remove(session, 1, 0, "k");
    tenant.tenant = TenantId(3);
    let table = vec![
        (Op::Remove(remove(session, 1, 0, "")), ErrorCode::InvalidKey),
        (Op::Remove(remove(session, 1, 0, &long)), ErrorCode::InvalidKey),
        (Op::Remove(remove(SessionId(3), 1, 0, "k")), ErrorCode::SessionUnknown),
        (Op::Remove(remove(session, 1, 2, "k")), ErrorCode::StaleRequest),
        (Op::Remove(tenant), ErrorCode::TenantNotRegistered),
        (Op::Retire { objects: ids.clone(), mode: RetireMode::RetireOnly }, ErrorCode::InvalidParams),
        (Op::Discard { objects: ids }, ErrorCode::InvalidParams),
        (Op::Reclaim { replicas }, ErrorCode::InvalidParams),
        (Op::ExpireSessions { sessions: vec![SessionId(9); IDS_PER_OP_MAX + 1] }, ErrorCode::InvalidParams),
        (drop(ObjectId(1), ReplicaId(1)), ErrorCode::ObjectNotFound),
        (drop(open.object, open.replicas[0].replica), ErrorCode::NotReady),
        (drop(complete.object, open.replicas[0].replica), ErrorCode::ReplicaUnavailable),
        (config(&|c| c.lease_ttl_max_ms = 0), ErrorCode::InvalidParams),
        (config(&|c| c.put_start_discard_timeout_ms = 0), ErrorCode::InvalidParams),
        (config(&|c| c.put_start_discard_timeout_ms = u64::MAX), ErrorCode::InvalidParams),
        (config(&|c| c.objects_max = 0), ErrorCode::InvalidParams),
        (Op::Checkpoint { index: 1 << 40, digest: 1 }, ErrorCode::InvalidParams),
    ];
    for (op, code) in table {
        world.refused(op, code);
    }
    assert_eq!(world.one(config(&|c| c.secret = Secret([1; 32]))), Outcome::Done);
    world.refused(config(&|c| c.secret = Secret([2; 32])), ErrorCode::InvalidParams);
    world.refused(config(&|_| {}), ErrorCode::InvalidParams);
}

/// Without the bound a client that never raises its floor would grow the state for ever.
#[test]
fn the_outcome_window_of_a_session_is_bounded() {
    let (mut world, _, session) = World::with_nodes(1, 4096);
    let ops: Vec<Op<'_>> =
        (0..OUTCOMES_PER_SESSION_MAX as u64).map(|s| Op::Remove(remove(session, s, 0, "k"))).collect();
    for ops in ops.chunks(1024) {
        world.apply(ops);
    }
    let next = OUTCOMES_PER_SESSION_MAX as u64;
    world.refused(Op::Remove(remove(session, next, 0, "k")), ErrorCode::ResourceExhausted);
    world.remove(session, next, 1, "k");
    world.refused(Op::Remove(remove(session, next + 1, 1, "k")), ErrorCode::ResourceExhausted);
    world.remove(session, next + 1, next, "k");
}

/// The log index only grows: an entry applied twice is a bug of the log, and stops the node.
#[test]
#[should_panic(expected = "after")]
fn an_entry_applied_twice_stops_the_node() {
    let (world, ..) = World::with_nodes(1, 4096);
    let (index, bytes) = world.log.last().unwrap();
    world.directory.apply_entry(*index, 1, &crate::directory::Entry::decode(bytes).unwrap());
}
