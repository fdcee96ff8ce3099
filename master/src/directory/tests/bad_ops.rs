//! Bad ops: each refused with its code and a message that names the facts; the state is as before (M1).

use super::world::{World, drain, end, register, remove};
use crate::directory::limits::{
    ADDRESS_BYTES_MAX, COPIES_MAX, DATA_TYPE_MAX, EXCLUDED_NODES_MAX, GROUP_NAME_BYTES_MAX, IDS_PER_OP_MAX,
    OUTCOMES_PER_SESSION_MAX, PREFERRED_SEGMENTS_MAX, SEGMENT_BYTES_MAX, SEGMENTS_PER_NODE_MAX, SOFT_PIN_TTL_MAX_MS,
    TASK_MESSAGE_BYTES_MAX, TASKS_RUNNING_MAX, TENANT_NAME_BYTES_MAX, TENANTS_MAX, VICTIMS_PER_OP_MAX,
};
use crate::directory::{
    ClearReplicas, Config, Contact, CopyStart, CreateTask, DataType, FEATURE_LEVEL_FIRST, Op, Outcome, PutEnd,
    PutStart, Quota, ReplicaEnd, ReplicaMode, ReplicaStatus, RetireMode, SessionId, SoftPinAction, TaskId, TaskKind,
    TaskState, TenantId, Turn,
};
use tidepool_proto::capability::Secret;
use tidepool_proto::keys::KEY_BYTES_MAX;
use tidepool_proto::object::{OBJECT_BYTES_MAX, extent_bytes};
use tidepool_proto::{ErrorCode, Incarnation, NodeId, ObjectId, ReplicaId, SegmentId};

const NODE_UNKNOWN: NodeId = NodeId(1 << 30);

#[test]
fn bad_puts_are_refused() {
    let (mut world, nodes, session) = World::with_nodes(2, 1 << 16);
    world.put(session, "complete", 100);
    world.start(session, "open", 100);
    let (long, good) = ("x".repeat(KEY_BYTES_MAX + 1), world.put_op(session, "k", 100));
    let pin = |ttl_ms| SoftPinAction::Enable { ttl_ms };
    let with = |change: &dyn Fn(&mut PutStart<'_>)| {
        let mut put = good.clone();
        change(&mut put);
        Op::PutStart(PutStart { key: good.key, ..put })
    };
    let table: Vec<(Op<'_>, ErrorCode, &str)> = vec![
        (Op::PutStart(PutStart { key: b"", ..good.clone() }), ErrorCode::InvalidKey, "empty"),
        (Op::PutStart(PutStart { key: long.as_bytes(), ..good.clone() }), ErrorCode::InvalidKey, "4097 bytes"),
        (with(&|p| p.length = 0), ErrorCode::InvalidParams, "its length is 0"),
        (with(&|p| p.length = OBJECT_BYTES_MAX + 1), ErrorCode::InvalidParams, "1 to 68719476736"),
        (with(&|p| p.length = u64::MAX), ErrorCode::InvalidParams, "1 to 68719476736"),
        (with(&|p| p.replica_num = 0), ErrorCode::InvalidParams, "copies is 0"),
        (with(&|p| p.replica_num = 16), ErrorCode::InvalidParams, "copies is 16"),
        (with(&|p| p.tenant = TenantId(1)), ErrorCode::TenantNotRegistered, "tenant 1"),
        (with(&|p| p.session = SessionId(1 << 20)), ErrorCode::SessionUnknown, "say hello"),
        (
            with(&|p| p.excluded = vec![NODE_UNKNOWN; EXCLUDED_NODES_MAX + 1].into()),
            ErrorCode::InvalidParams,
            "excluded nodes is 65",
        ),
        (with(&|p| p.victims = vec![ObjectId(1); VICTIMS_PER_OP_MAX + 1]), ErrorCode::InvalidParams, "victims is 4097"),
        (with(&|p| p.data_type = DataType(DATA_TYPE_MAX + 1)), ErrorCode::InvalidParams, "data type is 10"),
        (with(&|p| p.data_type = DataType(255)), ErrorCode::InvalidParams, "data type is 255"),
        (with(&|p| p.soft_pin = pin(0)), ErrorCode::InvalidParams, "a soft pin of 0 ms"),
        (with(&|p| p.soft_pin = pin(SOFT_PIN_TTL_MAX_MS + 1)), ErrorCode::InvalidParams, "1 to 86400000"),
        (with(&|p| p.soft_pin = pin(u64::MAX)), ErrorCode::InvalidParams, "1 to 86400000"),
        (
            with(&|p| p.preferred = vec![SegmentId(16); PREFERRED_SEGMENTS_MAX + 1].into()),
            ErrorCode::InvalidParams,
            "preferred segments is 65",
        ),
        (
            Op::PutStart(PutStart { group: &long.as_bytes()[..=GROUP_NAME_BYTES_MAX], ..good.clone() }),
            ErrorCode::InvalidParams,
            "group's name is 1025",
        ),
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
fn bad_upserts_are_refused() {
    let (mut world, _, session) = World::with_nodes(2, 1 << 16);
    world.put(session, "alone", 100);
    world.put_in(session, "g", "member", 100);
    world.remove(session, 7, 4, "none");
    let turn = Turn { sequence: 8, floor: 0 };
    world.one(Op::RemoveObjects { session, turn, objects: Vec::new(), mode: RetireMode::RetireOnly });
    let good = world.upsert_op(session, 9, "alone", 100);
    world.granted(good.clone());
    let at = |sequence, floor| PutStart { upsert: Some(Turn { sequence, floor }), ..good.clone() };
    let fresh = PutStart { token: [99; 16], ..at(10, 0) };
    let removal = |sequence| {
        let turn = Turn { sequence, floor: 0 };
        Op::RemoveObjects { session, turn, objects: Vec::new(), mode: RetireMode::RetireOnly }
    };
    let table = [
        (Op::PutStart(at(3, 0)), ErrorCode::StaleRequest, "below the floor 4"),
        (Op::PutStart(at(9, 10)), ErrorCode::StaleRequest, "below the floor 10"),
        (Op::PutStart(PutStart { session: SessionId(3), ..fresh.clone() }), ErrorCode::SessionUnknown, "hello"),
        (Op::PutStart(at(7, 0)), ErrorCode::InvalidParams, "another request"),
        (Op::PutStart(at(8, 0)), ErrorCode::InvalidParams, "another request"),
        (Op::Remove(remove(session, 9, 0, "alone")), ErrorCode::InvalidParams, "another request"),
        (Op::Remove(remove(session, 8, 0, "alone")), ErrorCode::InvalidParams, "another request"),
        (removal(7), ErrorCode::InvalidParams, "another request"),
        (removal(9), ErrorCode::InvalidParams, "another request"),
        (removal(3), ErrorCode::StaleRequest, "below the floor 4"),
        (Op::PutStart(PutStart { key: b"member", ..at(9, 0) }), ErrorCode::InvalidParams, "were used for key 'alone'"),
        (Op::PutStart(PutStart { length: 99, ..at(9, 0) }), ErrorCode::InvalidParams, "now for 99"),
        (Op::PutStart(PutStart { token: [99; 16], ..at(9, 0) }), ErrorCode::GrantLost, "has ended"),
        (
            Op::PutStart(PutStart { key: b"member", group: b"h", ..fresh.clone() }),
            ErrorCode::InvalidParams,
            "has group 'g'",
        ),
        (Op::PutStart(PutStart { group: b"g", ..fresh.clone() }), ErrorCode::InvalidParams, "cannot move it to 'g'"),
    ];
    for (op, code, words) in table {
        let message = world.refused(op, code);
        assert!(message.contains(words), "'{message}' does not say '{words}'");
    }
}

#[test]
fn bad_pins_and_tenants_are_refused() {
    let (mut world, _, session) = World::with_nodes(1, 1 << 16);
    let open = world.start(session, "open", 100).object;
    let complete = world.put(session, "complete", 100).object;
    let (a, b) = (world.tenant("a", Quota::default()), world.tenant("b", Quota::default()));
    let in_a = world.put_op(session, "k", 100);
    world.complete(PutStart { tenant: a, ..in_a });
    world.tenant("a", Quota { objects: 1, ..Quota::default() });
    world.tenant("b", Quota { bytes: extent_bytes(100) - 1, ..Quota::default() });
    let another = world.put_op(session, "another", 100);
    let long = "x".repeat(TENANT_NAME_BYTES_MAX + 1);
    let pin = |object, action| Op::SetPin { object, action };
    let soft = |ttl_ms| SoftPinAction::Enable { ttl_ms };
    let set = |name| Op::SetTenant { name, quota: Quota::default() };
    let table = [
        (pin(ObjectId(16), SoftPinAction::Disable), ErrorCode::ObjectNotFound),
        (pin(ObjectId(0), soft(5)), ErrorCode::ObjectNotFound),
        (pin(open, soft(5)), ErrorCode::NotReady),
        (pin(open, SoftPinAction::Preserve), ErrorCode::NotReady),
        (pin(complete, soft(0)), ErrorCode::InvalidParams),
        (pin(complete, soft(SOFT_PIN_TTL_MAX_MS + 1)), ErrorCode::InvalidParams),
        (set(""), ErrorCode::InvalidParams),
        (set("_ours"), ErrorCode::InvalidParams),
        (set("new\nline"), ErrorCode::InvalidParams),
        (set("bell\u{7}"), ErrorCode::InvalidParams),
        (set(&long), ErrorCode::InvalidParams),
        (Op::DropTenant { name: "default" }, ErrorCode::InvalidParams),
        (Op::DropTenant { name: "nobody" }, ErrorCode::TenantNotRegistered),
        (Op::DropTenant { name: "" }, ErrorCode::TenantNotRegistered),
        (Op::DropTenant { name: "a" }, ErrorCode::TenantNotEmpty),
        (Op::PutStart(PutStart { tenant: a, ..another.clone() }), ErrorCode::TenantQuotaExceeded),
        (Op::PutStart(PutStart { tenant: b, ..another.clone() }), ErrorCode::TenantQuotaExceeded),
        (Op::PutStart(PutStart { tenant: TenantId(3), ..another.clone() }), ErrorCode::TenantNotRegistered),
        (Op::PutStart(PutStart { tenant: TenantId(u16::MAX), ..another.clone() }), ErrorCode::TenantNotRegistered),
    ];
    for (op, code) in table {
        world.refused(op, code);
    }
    // The largest quota is one, and overflows nothing; with more copies than there is room for it is still no refusal.
    world.tenant("b", Quota { bytes: u64::MAX, objects: u64::MAX, refuse: true });
    // A session with nothing open: its first put may be of any size.
    let session = world.session(9);
    let put = PutStart { tenant: b, session, length: OBJECT_BYTES_MAX, replica_num: 15, ..another.clone() };
    world.refused(Op::PutStart(put), ErrorCode::NoSpace);
    world.complete(PutStart { tenant: b, ..another });
    let longest = "y".repeat(TENANT_NAME_BYTES_MAX);
    world.tenant(&longest, Quota::default());
    let names: Vec<String> = (4..TENANTS_MAX).map(|i| format!("t{i}")).collect();
    for names in names.chunks(1024) {
        let ops: Vec<Op<'_>> = names.iter().map(|name| set(name)).collect();
        world.apply_unchecked(&ops);
    }
    world.refused(set("one too many"), ErrorCode::ResourceExhausted);
    world.tenant(&longest, Quota { objects: 1, ..Quota::default() });
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
    // The same end again is no error, whoever asks; a revocation after the end is.
    let again = PutEnd { session: other, ..stored(&complete) };
    assert_eq!(world.one(Op::PutEnd(again)), Outcome::Ended { copies: 1, replaced: None });
    assert_eq!(world.one(Op::PutEnd(stored(&complete))), Outcome::Ended { copies: 1, replaced: None });
    world.refused(Op::PutRevoke(stored(&complete)), ErrorCode::AlreadyEnded);
    assert_eq!(world.one(Op::PutEnd(stored(&open))), Outcome::Ended { copies: 1, replaced: None });
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
    let removal = |session, sequence, floor, objects: &[ObjectId]| {
        let turn = Turn { sequence, floor };
        Op::RemoveObjects { session, turn, objects: objects.to_vec(), mode: RetireMode::RetireOnly }
    };
    let mut tenant = remove(session, 1, 0, "k");
    tenant.tenant = TenantId(3);
    let clear = |session, sequence, floor, replicas: &[ReplicaId]| {
        let turn = Turn { sequence, floor };
        Op::ClearReplicas(ClearReplicas { session, turn, object: complete.object, replicas: replicas.into() })
    };
    let there = [complete.replicas[0].replica];
    let table = vec![
        (clear(session, 1, 2, &there), ErrorCode::StaleRequest),
        (clear(SessionId(3), 1, 0, &there), ErrorCode::SessionUnknown),
        (clear(session, 1, 0, &replicas), ErrorCode::InvalidParams),
        (Op::Remove(remove(session, 1, 0, "")), ErrorCode::InvalidKey),
        (Op::Remove(remove(session, 1, 0, &long)), ErrorCode::InvalidKey),
        (Op::Remove(remove(SessionId(3), 1, 0, "k")), ErrorCode::SessionUnknown),
        (Op::Remove(remove(session, 1, 2, "k")), ErrorCode::StaleRequest),
        (Op::Remove(tenant), ErrorCode::TenantNotRegistered),
        (removal(session, 1, 0, &ids), ErrorCode::InvalidParams),
        (removal(session, 1, 2, &[complete.object]), ErrorCode::StaleRequest),
        (removal(SessionId(3), 1, 0, &[complete.object]), ErrorCode::SessionUnknown),
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
        (Op::RaiseFeatureLevel { level: 0 }, ErrorCode::InvalidParams),
        (Op::RaiseFeatureLevel { level: FEATURE_LEVEL_FIRST }, ErrorCode::InvalidParams),
    ];
    for (op, code) in table {
        world.refused(op, code);
    }
    assert_eq!(world.one(config(&|c| c.secret = Secret([1; 32]))), Outcome::Done);
    world.refused(config(&|c| c.secret = Secret([2; 32])), ErrorCode::InvalidParams);
    world.refused(config(&|_| {}), ErrorCode::InvalidParams);
}

/// Fails without the check of replicas, of moves of one replica, of the number of replicas, of the quota, of targets
/// that have one already, and without the bounds on ids, segments and messages (each tried).
#[test]
fn bad_copies_and_tasks_are_refused() {
    let (mut world, nodes, session) = World::with_nodes(3, 1 << 16);
    let segments: Vec<SegmentId> = nodes.iter().map(|n| n.2).collect();
    let open = world.start(session, "open", 100).object;
    let (one, moving) = (world.put(session, "one", 100).object, world.put(session, "moving", 100).object);
    let (there, replica) = (world.replicas(one)[0].1, world.replicas(one)[0].0);
    let away: Vec<SegmentId> = segments.iter().copied().filter(|&s| s != there).collect();
    let moved = world.replicas(moving)[0].0;
    let under_way = world.copy(moving, Some(moved), &[], TaskId(0)).unwrap();
    let quota = Quota { bytes: 2 * extent_bytes(100) - 1, ..Quota::default() };
    let tenant = world.tenant("t", quota);
    let put = world.put_op(session, "full", 100);
    let full = world.complete(PutStart { tenant, ..put }).object;
    world.create(drain(&[], 1)).unwrap_err();
    let running =
        world.create(CreateTask { kind: TaskKind::Copy, object: one, targets: away.clone(), ..drain(&[], 2) });
    let running = running.unwrap();

    let copy = |object, instead_of, targets: &[SegmentId]| {
        Op::CopyStart(CopyStart { object, instead_of, targets: targets.into(), task: TaskId(0), up_to: 0 })
    };
    let task = |kind, object, sources: &[SegmentId], targets: &[SegmentId]| {
        Op::CreateTask(CreateTask { kind, object, targets: targets.to_vec(), ..drain(sources, 3) })
    };
    let end = |task, state, message| Op::EndTask { task, state, left: 0, message };
    let many = vec![there; IDS_PER_OP_MAX + 1];
    let long = "x".repeat(TASK_MESSAGE_BYTES_MAX + 1);
    let (none, unknown) = (ReplicaId(17), SegmentId(16));
    let cancelled = world.create(drain(&[there], 4)).unwrap();
    world.one(end(cancelled, TaskState::Cancelled, ""));
    let of_task = |task| {
        let targets = away.as_slice().into();
        Op::CopyStart(CopyStart { object: one, instead_of: None, targets, task, up_to: 0 })
    };
    let up_to = |object, up_to| {
        Op::CopyStart(CopyStart { object, instead_of: None, targets: Default::default(), task: TaskId(0), up_to })
    };
    let drop_extra = |object, replica| Op::DropExtra { object, replica };
    use TaskKind::{Copy, Drain, Move};
    let table: Vec<(Op<'_>, ErrorCode, &str)> = vec![
        (of_task(cancelled), ErrorCode::TaskNotFound, "has ended"),
        (of_task(TaskId(16)), ErrorCode::TaskNotFound, "unknown"),
        (up_to(one, 1), ErrorCode::ReplicaAlreadyExists, "has 1 replicas and 0 on their way; 1 were to be"),
        (drop_extra(ObjectId(16), replica), ErrorCode::ObjectNotFound, "not in the directory"),
        (drop_extra(open, replica), ErrorCode::NotReady, "being put"),
        (drop_extra(one, none), ErrorCode::ReplicaNotFound, "no replica"),
        (drop_extra(one, moved), ErrorCode::ReplicaNotFound, "no replica"),
        (drop_extra(one, replica), ErrorCode::ReplicaNotFound, "none is extra"),
        (copy(ObjectId(16), None, &[]), ErrorCode::ObjectNotFound, "not in the directory"),
        (copy(open, None, &[]), ErrorCode::NotReady, "being put"),
        (copy(one, Some(none), &[]), ErrorCode::ReplicaNotFound, "no replica"),
        (copy(one, Some(moved), &[]), ErrorCode::ReplicaNotFound, "no replica"),
        (copy(moving, Some(under_way.replica), &[]), ErrorCode::ReplicaNotFound, "no replica"),
        (copy(moving, Some(moved), &[]), ErrorCode::ObjectHasTask, "moved already"),
        (copy(full, None, &[]), ErrorCode::TenantQuotaExceeded, "quota of tenant 't'"),
        (copy(one, None, &[there]), ErrorCode::NoSpace, "no segment has room"),
        (copy(one, Some(replica), &[there]), ErrorCode::NoSpace, "no segment has room"),
        (copy(moving, None, &[under_way.segment]), ErrorCode::NoSpace, "no segment has room"),
        (copy(one, None, &[unknown, SegmentId(0)]), ErrorCode::NoSpace, "no segment has room"),
        (copy(one, None, &many), ErrorCode::InvalidParams, "65537 targets"),
        (Op::CopyEnd { replica: none, end: ReplicaEnd::Stored }, ErrorCode::GrantLost, "not being copied"),
        (Op::CopyEnd { replica, end: ReplicaEnd::Stored }, ErrorCode::GrantLost, "not being copied"),
        (Op::CopyEnd { replica, end: ReplicaEnd::Aborted }, ErrorCode::GrantLost, "not being copied"),
        (task(Drain, one, &[], &[]), ErrorCode::InvalidParams, "names its sources"),
        (task(Drain, one, &[unknown], &[]), ErrorCode::SegmentNotFound, "is not mounted"),
        (task(Drain, one, &[there], &[unknown]), ErrorCode::SegmentNotFound, "is not mounted"),
        (task(Drain, one, &[there, there], &[]), ErrorCode::InvalidParams, "twice"),
        (task(Drain, one, &[there], &[there]), ErrorCode::InvalidParams, "twice"),
        (task(Drain, one, &many, &[]), ErrorCode::InvalidParams, "65537 segments"),
        (task(Copy, one, &[], &[]), ErrorCode::InvalidParams, "names its targets"),
        (task(Copy, one, &[], &[away[0], away[0]]), ErrorCode::InvalidParams, "twice"),
        (task(Copy, one, &[], &[there]), ErrorCode::ReplicaAlreadyExists, "a replica in segment"),
        (task(Copy, one, &[away[0]], &[away[1]]), ErrorCode::ReplicaNotFound, "no replica in segment"),
        (task(Copy, open, &[], &[away[0]]), ErrorCode::NotReady, "being put"),
        (task(Copy, ObjectId(0), &[], &[away[0]]), ErrorCode::ObjectNotFound, "not in the directory"),
        (task(Move, one, &[there], &[]), ErrorCode::InvalidParams, "one source and one target"),
        (task(Move, one, &[], &[away[0]]), ErrorCode::InvalidParams, "one source and one target"),
        (task(Move, one, &[there], &away), ErrorCode::InvalidParams, "one source and one target"),
        (task(Move, one, &[away[0]], &[there]), ErrorCode::ReplicaAlreadyExists, "a replica in segment"),
        (task(Move, one, &[away[0]], &[away[1]]), ErrorCode::ReplicaNotFound, "no replica in segment"),
        (end(TaskId(16), TaskState::Failed, ""), ErrorCode::TaskNotFound, "unknown"),
        (end(running, TaskState::Running, ""), ErrorCode::InvalidParams, "ends as running"),
        (end(running, TaskState::Failed, &long), ErrorCode::InvalidParams, "message of 1025 bytes"),
    ];
    for (op, code, words) in table {
        let message = world.refused(op, code);
        assert!(message.contains(words), "'{message}' does not say '{words}'");
    }
    assert_eq!(world.one(end(running, TaskState::Failed, &long[1..])), Outcome::Done);
}

#[test]
fn replicas_copies_and_tasks_are_bounded() {
    let (mut world, nodes, session) = World::with_nodes(17, 1 << 26);
    let grant = world.start_copies(session, "most", 14);
    world.ended(session, &grant);
    let first = world.copy(grant.object, None, &[], TaskId(0)).unwrap();
    let op =
        |instead_of, object| CopyStart { object, instead_of, targets: Default::default(), task: TaskId(0), up_to: 0 };
    let message = world.refused(Op::CopyStart(op(None, grant.object)), ErrorCode::InvalidParams);
    assert!(message.contains("15 replicas"), "{message}");
    world.end_copy(first.replica, ReplicaEnd::Stored);
    world.refused(Op::CopyStart(op(None, grant.object)), ErrorCode::InvalidParams);
    // One of 15 may be moved, or a drain would not end (was so); one at a time.
    let [one, other] = [0, 1].map(|i| Some(grant.replicas[i].replica));
    let moved = world.copy(grant.object, one, &[], TaskId(0)).unwrap();
    world.refused(Op::CopyStart(op(other, grant.object)), ErrorCode::InvalidParams);
    world.end_copy(moved.replica, ReplicaEnd::Stored);
    assert_eq!(world.replicas(grant.object).len(), 15);
    let first = world.copy(grant.object, other, &[], TaskId(0)).unwrap();
    // 14 copies each of 293 objects: with the first 4103, seven too many.
    let keys: Vec<String> = (0..293).map(|i| format!("k{i}")).collect();
    for key in &keys {
        let put = world.put_op(session, key, 1);
        let Some(Outcome::Granted(grant)) = world.apply_unchecked(&[Op::PutStart(put)]).pop() else { panic!("{key}") };
        world.apply_unchecked(&[Op::PutEnd(self::end(session, &grant, ReplicaEnd::Stored))]);
        world.apply_unchecked(&vec![Op::CopyStart(op(None, grant.object)); 14]);
    }
    assert_eq!(world.directory.copies(None, usize::MAX).len(), COPIES_MAX);
    let another = world.put(session, "another", 1).object;
    world.refused(Op::CopyStart(op(None, another)), ErrorCode::TaskLimit);
    world.end_copy(first.replica, ReplicaEnd::Aborted);
    world.copy(another, None, &[], TaskId(0)).unwrap();

    let create = |n: usize| {
        let mut token = [0; 16];
        token[..8].copy_from_slice(&n.to_le_bytes());
        Op::CreateTask(CreateTask { token, ..drain(&[nodes[0].2], 0) })
    };
    let ops: Vec<Op<'_>> = (0..TASKS_RUNNING_MAX).map(create).collect();
    for ops in ops.chunks(1024) {
        world.apply_unchecked(ops);
    }
    world.refused(create(TASKS_RUNNING_MAX), ErrorCode::TaskLimit);
    // A retry is answered all the same.
    assert!(matches!(world.one(create(7)), Outcome::TaskCreated { .. }));
    let task = world.directory.tasks()[7].0;
    world.one(Op::EndTask { task, state: TaskState::Cancelled, left: 0, message: "" });
    assert!(matches!(world.one(create(TASKS_RUNNING_MAX)), Outcome::TaskCreated { .. }));
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
