//! Copies and moves of replicas: what is there while they are under way, and what is left.

use super::world::{World, by_bytes, drain, victims};
use crate::directory::{CreateTask, Op, PutStart, Quota, Removal, ReplicaEnd, ReplicaMode, RetireMode, TaskId};
use tidepool_proto::object::extent_bytes;
use tidepool_proto::{ErrorCode, ObjectId, ReplicaId, SegmentId};

const NO_TASK: TaskId = TaskId(0);

fn free(world: &World) -> u64 {
    world.directory.segments().iter().map(|s| s.free).sum()
}

/// Ends a copy whose object went or that was given up.
fn lost(world: &mut World, replica: ReplicaId) {
    for end in [ReplicaEnd::Stored, ReplicaEnd::Aborted, ReplicaEnd::Unknown] {
        world.refused(Op::CopyEnd { replica, end }, ErrorCode::GrantLost);
    }
}

/// Readers may hold leases on the old replica: its space comes back by Reclaim alone. Fails when the old replica stays,
/// or is given back at once (tried).
#[test]
fn a_move_leaves_as_many_replicas_and_the_old_one_to_its_leases() {
    let (mut world, _, session) = World::with_nodes(3, 1 << 16);
    let grant = world.start_copies(session, "k", 2);
    world.ended(session, &grant);
    let (source, bytes, before) = (grant.replicas[0], extent_bytes(100), free(&world));
    let copy = world.copy(grant.object, Some(source.replica), &[], NO_TASK).unwrap();
    assert!(grant.replicas.iter().all(|r| r.segment != copy.segment));
    // Not to be read before it is there.
    assert_eq!(world.replicas(grant.object).len(), 2);
    world.end_copy(copy.replica, ReplicaEnd::Stored);
    let left = [(grant.replicas[1].replica, grant.replicas[1].segment), (copy.replica, copy.segment)];
    assert_eq!(world.replicas(grant.object), left);
    assert_eq!(free(&world), before - bytes);
    let retired = world.directory.reclaimable(None, 9);
    assert_eq!(retired.iter().map(|r| r.replica).collect::<Vec<_>>(), [source.replica]);
    world.one(Op::Reclaim { replicas: vec![source.replica] });
    assert_eq!(free(&world), before);
    assert_eq!(world.directory.tenants()[0].bytes, 2 * bytes);
    lost(&mut world, copy.replica);
}

/// An object counts as degraded until the copy is there, and a copy that fails leaves no trace but its fence. Fails when
/// a copy is not charged, or is charged for good when it fails (tried).
#[test]
fn a_lost_replica_is_made_again() {
    let (mut world, nodes, session) = World::with_nodes(3, 1 << 16);
    let bytes = extent_bytes(100);
    let grant = world.start_copies(session, "k", 2);
    world.ended(session, &grant);
    assert!(world.directory.degraded(None, 9).is_empty());
    world.one(Op::DropReplica { object: grant.object, replica: grant.replicas[0].replica });
    for end in [ReplicaEnd::Aborted, ReplicaEnd::Unknown, ReplicaEnd::Stored] {
        assert_eq!(world.directory.degraded(None, 9), [grant.object]);
        assert!(world.directory.degraded(Some(grant.object), 9).is_empty());
        let before = free(&world);
        let copy = world.copy(grant.object, None, &[], NO_TASK).unwrap();
        assert_eq!(world.directory.tenants()[0].bytes, 2 * bytes);
        world.end_copy(copy.replica, end);
        let is_unclean = end == ReplicaEnd::Unknown;
        assert_eq!(free(&world), before - if end == ReplicaEnd::Aborted { 0 } else { bytes });
        let node = nodes.iter().find(|n| n.0 == copy.node).unwrap();
        assert_eq!(world.directory.unclean(node.0, 9).len(), usize::from(is_unclean));
        if is_unclean {
            let replicas = vec![copy.replica];
            world.one(Op::Reclaim { replicas: replicas.clone() });
            assert_eq!(free(&world), before - bytes, "unclean space was reclaimed");
            world.one(Op::FenceAcknowledged { node: node.0, incarnation: node.1, replicas });
            assert_eq!(free(&world), before);
        }
        assert_eq!(world.directory.tenants()[0].bytes, if end == ReplicaEnd::Stored { 2 } else { 1 } * bytes);
    }
    assert!(world.directory.degraded(None, 9).is_empty());
}

/// However an object goes, its copies go with it, unclean. Fails when `take_object` leaves them (tried).
#[test]
fn copies_go_with_their_object() {
    type Goes = fn(&mut World, ObjectId, ReplicaId, crate::directory::SessionId);
    let ways: [Goes; 5] = [
        |world, object, _, session| assert_eq!(world.remove(session, 1, 0, "k"), Removal::Removed(object)),
        |world, object, _, _| {
            world.one(Op::Retire { objects: vec![object], mode: RetireMode::RetireAndReclaim });
        },
        |world, object, replica, _| {
            world.one(Op::DropReplica { object, replica });
        },
        |world, _, _, session| {
            let put = world.upsert_op(session, 1, "k", 50);
            let upsert = world.granted(put);
            world.ended(session, &upsert);
        },
        |world, object, _, session| {
            let put = PutStart { victims: vec![object], ..world.put_op(session, "big", 3000) };
            assert_eq!(world.granted(put).evicted, [object]);
        },
    ];
    for (i, goes) in ways.into_iter().enumerate() {
        let (mut world, nodes, session) = World::with_nodes(2, 4096);
        let grant = world.put(session, "k", 1000);
        let source = grant.replicas[0];
        let other = nodes.iter().find(|n| n.0 != source.node).unwrap();
        let copy = world.copy(grant.object, None, &[], NO_TASK).unwrap();
        assert_eq!(copy.node, other.0);
        goes(&mut world, grant.object, source.replica, session);
        assert!(world.replicas(grant.object).is_empty(), "way {i}");
        assert!(world.directory.copies(None, 9).is_empty());
        assert_eq!(world.directory.unclean(other.0, 9), [copy.replica]);
        lost(&mut world, copy.replica);
    }
}

#[test]
fn a_move_whose_source_went_leaves_what_there_is() {
    let (mut world, _, session) = World::with_nodes(3, 1 << 16);
    let grant = world.start_copies(session, "k", 2);
    world.ended(session, &grant);
    let [first, second] = [grant.replicas[0].replica, grant.replicas[1].replica];
    let copy = world.copy(grant.object, Some(first), &[], NO_TASK).unwrap();
    world.one(Op::DropReplica { object: grant.object, replica: first });
    world.end_copy(copy.replica, ReplicaEnd::Stored);
    assert_eq!(world.replicas(grant.object).iter().map(|r| r.0).collect::<Vec<_>>(), [second, copy.replica]);
    // What was copied may be moved on, at once with another.
    let on = world.copy(grant.object, Some(copy.replica), &[], NO_TASK).unwrap();
    world.copy(grant.object, Some(second), &[], NO_TASK).unwrap_err();
    world.end_copy(on.replica, ReplicaEnd::Stored);
    assert_eq!(world.replicas(grant.object).iter().map(|r| r.0).collect::<Vec<_>>(), [second, on.replica]);
}

/// Both segments of a node go, with a replica in one and the copy in the other. Fails when a copy in a segment that goes
/// is kept (tried: a panic), or given up unclean instead of given back (tried: a panic).
#[test]
fn a_node_goes_with_replicas_and_copies() {
    for first in [0, 1] {
        let (mut world, nodes, session) = World::with_nodes(1, 4096);
        let (node, incarnation, segment) = nodes[0];
        let segments = [segment, world.mount((node, incarnation), "second", 4096)];
        let put = world.put_op(session, "k", 100);
        let preferred = [segments[first]].into_iter().collect();
        let grant = world.complete(PutStart { preferred, ..put });
        let copy = world.copy(grant.object, None, &[], NO_TASK).unwrap();
        assert_eq!((grant.replicas[0].segment, copy.segment), (segments[first], segments[1 - first]));
        // Only the copy goes.
        world.one(Op::UnmountSegment { node, incarnation, segment: copy.segment });
        assert_eq!(world.replicas(grant.object).len(), 1);
        lost(&mut world, copy.replica);
        let third = world.mount((node, incarnation), "third", 4096);
        let copy = world.copy(grant.object, None, &[third], NO_TASK).unwrap();
        world.one(Op::DropNode { node, incarnation });
        assert!(world.replicas(grant.object).is_empty());
        assert_eq!(world.directory.tenants()[0].bytes, 0);
        lost(&mut world, copy.replica);
    }
}

/// A group is evicted as a whole while one of it is copied, and a copy keeps a member's place in it.
#[test]
fn members_of_groups_are_copied() {
    let (mut world, nodes, session) = World::with_nodes(2, 1 << 16);
    let members: Vec<ObjectId> = ["a", "b"].map(|key| world.put_in(session, "g", key, 100).object).into();
    let source = world.replicas(members[0])[0].0;
    let moved = world.copy(members[0], Some(source), &[], NO_TASK).unwrap();
    world.end_copy(moved.replica, ReplicaEnd::Stored);
    assert!(world.directory.group(Default::default(), b"g", &[]).unwrap().whole);
    let copy = world.copy(members[1], None, &[], NO_TASK).unwrap();
    assert_eq!(victims(&world.directory).len(), 2);
    world.one(Op::Retire { objects: members[..1].to_vec(), mode: RetireMode::RetireOnly });
    assert_eq!(world.replicas(members[0]).len(), 1, "half a group was evicted");
    world.one(Op::Retire { objects: members.clone(), mode: RetireMode::RetireOnly });
    assert!(world.directory.group(Default::default(), b"g", &[]).is_none());
    assert_eq!(nodes.iter().map(|n| world.directory.unclean(n.0, 9).len()).sum::<usize>(), 1);
    lost(&mut world, copy.replica);
}

/// Of a node with two segments the one left is no choice, however much room it has. Fails when what was drawn or walked
/// is looked at only afterwards (was so: NO_SPACE).
#[test]
fn a_move_within_a_node_finds_the_other_segment() {
    let (mut world, nodes, session) = World::with_nodes(1, 1 << 20);
    let small = world.mount((nodes[0].0, nodes[0].1), "small", 4096);
    for i in 0..8 {
        let put = world.put_op(session, "k", 100);
        let grant = world.complete(PutStart { preferred: [nodes[0].2].into_iter().collect(), ..put });
        let source = grant.replicas[0];
        assert_eq!(source.segment, nodes[0].2);
        let copy = world.copy(grant.object, Some(source.replica), &[], NO_TASK).unwrap();
        assert_eq!(copy.segment, small);
        world.remove(session, i, 0, "k");
        world.one(Op::FenceAcknowledged { node: copy.node, incarnation: nodes[0].1, replicas: vec![copy.replica] });
    }
}

/// Two replicas stay on two nodes, if only by going to another segment of the node left. Fails when any other node comes
/// before the one left (was so: both were on one node).
#[test]
fn a_move_keeps_replicas_apart() {
    let (mut world, nodes, session) = World::with_nodes(2, 1 << 16);
    for n in &nodes {
        world.mount((n.0, n.1), "second", 1 << 16);
    }
    for i in 0..8 {
        let grant = world.start_copies(session, &format!("k{i}"), 2);
        world.ended(session, &grant);
        let copy = world.copy(grant.object, Some(grant.replicas[0].replica), &[], NO_TASK).unwrap();
        assert_eq!(copy.node, grant.replicas[0].node);
        // With nothing else beside it the farther one is the other node's.
        let alone = world.put(session, &format!("alone{i}"), 100);
        let copy = world.copy(alone.object, Some(alone.replicas[0].replica), &[], NO_TASK).unwrap();
        assert_ne!(copy.node, alone.replicas[0].node);
    }
}

/// What a drain empties is chosen by no put, whatever it prefers, and no copy, whatever its targets; nor are victims
/// looked for there. Fails when `may_be_chosen` does not look at it (tried), or when the neighbourhoods do not (was so).
#[test]
fn what_is_drained_takes_nothing() {
    let (mut world, nodes, session) = World::with_nodes(2, 8 * extent_bytes(1000));
    let grant = world.put(session, "k", 1000);
    let here = grant.replicas[0].segment;
    let there = nodes.iter().map(|n| n.2).find(|&s| s != here).unwrap();
    let task = world.create(CreateTask { unmount: true, ..drain(&[there], 1) }).unwrap();
    assert_eq!(world.copy(grant.object, None, &[], task), Err(ErrorCode::NoSpace));
    assert_eq!(world.copy(grant.object, None, &[there], task), Err(ErrorCode::NoSpace));
    let preferred: smallvec::SmallVec<[SegmentId; 2]> = [there].into_iter().collect();
    for i in 0..4 {
        let key = format!("p{i}");
        let put = PutStart { preferred: preferred.clone(), replica_num: 2, ..world.put_op(session, &key, 1000) };
        let grant = world.complete(put);
        assert_eq!(grant.replicas.iter().map(|r| r.segment).collect::<Vec<_>>(), [here]);
    }
    let put = PutStart { mode: ReplicaMode::Strict, replica_num: 2, ..world.put_op(session, "two", 1000) };
    world.refused(Op::PutStart(put), ErrorCode::NotEnoughReplicas);
    let near = |world: &World| {
        world
            .directory
            .neighbour_victims(&[grant.object], extent_bytes(1000), 1024, |_| true, by_bytes)
            .map(|n| n.victims)
    };
    assert!(near(&world).is_some());
    world.create(drain(&[here], 2)).unwrap();
    assert_eq!(near(&world), None);
}

/// What is copied with a victim leaves the tenant's account too. Fails when only its replicas are counted (was so: the
/// second victim went as well).
#[test]
fn a_victims_copies_make_room_in_the_quota() {
    let (mut world, _, session) = World::with_nodes(4, 1 << 16);
    let tenant = world.tenant("t", Quota { bytes: 3 * extent_bytes(1000), ..Quota::default() });
    let mut objects = Vec::new();
    for key in ["a", "b"] {
        let put = world.put_op(session, key, 1000);
        objects.push(world.complete(PutStart { tenant, ..put }).object);
    }
    world.copy(objects[0], None, &[], NO_TASK).unwrap();
    assert_eq!(world.copy(objects[1], None, &[], NO_TASK), Err(ErrorCode::TenantQuotaExceeded));
    let put = world.put_op(session, "two", 1000);
    let put = PutStart { tenant, replica_num: 2, victims: objects.clone(), ..put };
    assert_eq!(world.granted(put).evicted, objects[..1]);
}
