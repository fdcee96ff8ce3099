//! The number of replicas that is wanted: what a put asked for, what tasks add, what is above it, and what clears it.

use super::replay::{replay, restored};
use super::world::{World, drain};
use crate::directory::{
    ClearReplicas, CopyStart, CreateTask, Op, Outcome, PutStart, ReplicaEnd, ReplicaMode, SessionId, TaskId, TaskKind,
    TaskState, Turn,
};
use tidepool_proto::{ErrorCode, ObjectId, ReplicaId};

const NO_TASK: TaskId = TaskId(0);

fn copy(world: &mut World, object: ObjectId) {
    let copy = world.copy(object, None, &[], NO_TASK).unwrap();
    world.end_copy(copy.replica, ReplicaEnd::Stored);
}

fn same_everywhere(world: &World) {
    for other in [restored(world.directory.freeze()), replay(&world.log)] {
        other.check_invariants().unwrap();
        assert_eq!(other.digest(), world.directory.digest());
        assert_eq!(other.degraded(None, 9), world.directory.degraded(None, 9));
        assert_eq!(other.extra(None, 9), world.directory.extra(None, 9));
    }
}

/// With one host a put for two makes one, and is made whole when there is a second. Fails when the number that was
/// asked for is not kept with the record, or not written into a snapshot (tried).
#[test]
fn what_a_best_effort_put_asked_for_is_remembered() {
    let (mut world, _, session) = World::with_nodes(1, 1 << 16);
    let grant = world.start_copies(session, "k", 2);
    assert_eq!(grant.replicas.len(), 1);
    assert!(world.directory.degraded(None, 9).is_empty(), "it is being put");
    world.ended(session, &grant);
    assert_eq!(world.directory.degraded(None, 9), [grant.object]);
    assert_eq!(world.copy(grant.object, None, &[], NO_TASK), Err(ErrorCode::NoSpace));
    same_everywhere(&world);
    world.add_node(1, "h1", 1 << 16);
    copy(&mut world, grant.object);
    assert_eq!(world.replicas(grant.object).len(), 2);
    assert!(world.directory.degraded(None, 9).is_empty() && world.directory.extra(None, 9).is_empty());
    same_everywhere(&world);
}

/// A strict put has what it asked for or nothing.
#[test]
fn a_strict_put_is_never_short() {
    let (mut world, _, session) = World::with_nodes(2, 1 << 16);
    let put = world.put_op(session, "k", 100);
    let put = PutStart { replica_num: 3, mode: ReplicaMode::Strict, ..put };
    world.refused(Op::PutStart(put), ErrorCode::NotEnoughReplicas);
    let put = world.put_op(session, "k", 100);
    let grant = world.complete(PutStart { replica_num: 2, mode: ReplicaMode::Strict, ..put });
    assert_eq!(grant.replicas.len(), 2);
    assert!(world.directory.degraded(None, 9).is_empty());
}

/// What is above the number wanted goes when it is named, down to that number and no further. Fails when DropExtra does
/// not compare the two (tried: the last wanted replica goes), or when an object with more is not noted (tried).
#[test]
fn only_what_is_above_the_number_wanted_is_extra() {
    let (mut world, nodes, session) = World::with_nodes(3, 1 << 16);
    let object = world.put(session, "hot", 100).object;
    copy(&mut world, object);
    copy(&mut world, object);
    assert_eq!(world.directory.extra(None, 9), [object]);
    same_everywhere(&world);
    let replicas: Vec<ReplicaId> = world.replicas(object).into_iter().map(|r| r.0).collect();
    let gone = world.one(Op::DropExtra { object, replica: replicas[0] });
    assert_eq!(gone, Outcome::ReplicaDropped { object_gone: false });
    // Readers may hold leases on it: it is retired, not free.
    assert_eq!(world.directory.reclaimable(None, 9).iter().map(|r| r.replica).collect::<Vec<_>>(), replicas[..1]);
    world.refused(Op::DropExtra { object, replica: replicas[0] }, ErrorCode::ReplicaNotFound);
    world.one(Op::DropExtra { object, replica: replicas[2] });
    assert!(world.directory.extra(None, 9).is_empty());
    world.refused(Op::DropExtra { object, replica: replicas[1] }, ErrorCode::ReplicaNotFound);
    assert!(world.directory.degraded(None, 9).is_empty());
    // An extra replica takes the place of one that is lost.
    copy(&mut world, object);
    let lost = world.replicas(object)[0];
    let node = nodes.iter().find(|n| n.2 == lost.1).unwrap();
    world.one(Op::DropNode { node: node.0, incarnation: node.1 });
    assert!(world.directory.extra(None, 9).is_empty() && world.directory.degraded(None, 9).is_empty());
    assert_eq!(world.remove(session, 1, 0, "hot"), crate::directory::Removal::Removed(object));
    same_everywhere(&world);
}

/// What an operator has copied is wanted: it is not extra, and it is made again when it is lost. Fails when the end of
/// a task's copy does not raise the number (tried).
#[test]
fn what_a_task_copies_is_wanted() {
    let (mut world, nodes, session) = World::with_nodes(4, 1 << 16);
    let object = world.put(session, "k", 100).object;
    copy(&mut world, object);
    let held: Vec<_> = world.replicas(object).into_iter().map(|r| r.1).collect();
    let target = nodes.iter().map(|n| n.2).find(|s| !held.contains(s)).unwrap();
    let create = CreateTask { kind: TaskKind::Copy, object, targets: vec![target], ..drain(&[], 1) };
    let task = world.create(create).unwrap();
    let made = world.copy(object, None, &[target], task).unwrap();
    world.end_copy(made.replica, ReplicaEnd::Stored);
    assert_eq!((world.replicas(object).len(), world.directory.extra(None, 9)), (3, vec![object]));
    let view = world.directory.task(task).unwrap();
    assert_eq!((view.done, view.done_bytes), (1, tidepool_proto::object::extent_bytes(100)));
    world.one(Op::DropExtra { object, replica: world.replicas(object)[0].0 });
    assert!(world.directory.extra(None, 9).is_empty(), "two are wanted");
    world.one(Op::DropReplica { object, replica: made.replica });
    assert_eq!(world.directory.degraded(None, 9), [object]);
    same_everywhere(&world);
}

/// The start of a copy that names no target says how many replicas there may be: repeated, it makes no second one.
/// Fails without the count (tried: three replicas).
#[test]
fn a_repeated_start_of_a_copy_makes_one() {
    let (mut world, _, session) = World::with_nodes(4, 1 << 16);
    let object = world.put(session, "k", 100).object;
    let start =
        Op::CopyStart(CopyStart { object, instead_of: None, targets: Default::default(), task: NO_TASK, up_to: 2 });
    let Outcome::CopyGranted(granted) = world.one(start.clone()) else { panic!("not granted") };
    world.refused(start.clone(), ErrorCode::ReplicaAlreadyExists);
    world.end_copy(granted.replica, ReplicaEnd::Stored);
    world.refused(start.clone(), ErrorCode::ReplicaAlreadyExists);
    assert_eq!(world.replicas(object).len(), 2);
    world.one(Op::DropExtra { object, replica: granted.replica });
    assert!(matches!(world.one(start), Outcome::CopyGranted(_)), "it may be made again when it is gone");
}

/// Fails when a copy starts for a task that has ended (was so).
#[test]
fn no_copy_starts_for_a_task_that_was_cancelled() {
    let (mut world, nodes, session) = World::with_nodes(2, 1 << 16);
    let grant = world.put(session, "k", 100);
    let (source, segment) = world.replicas(grant.object)[0];
    let task = world.create(drain(&[segment], 1)).unwrap();
    assert_eq!(world.directory.running_tasks().len(), 1);
    world.one(Op::EndTask { task, state: TaskState::Cancelled, left: 1, message: "" });
    assert!(world.directory.running_tasks().is_empty());
    assert_eq!(world.copy(grant.object, Some(source), &[], task), Err(ErrorCode::TaskNotFound));
    assert!(world.directory.copies(None, 9).is_empty());
    assert_eq!(world.directory.copies_to_node(nodes[1].0, None, 9), []);
}

fn clear(session: SessionId, sequence: u64, floor: u64, object: ObjectId, replicas: &[ReplicaId]) -> Op<'static> {
    Op::ClearReplicas(ClearReplicas { session, turn: Turn { sequence, floor }, object, replicas: replicas.into() })
}

/// W8: the key names another object by the time the duplicate comes. Fails when the recorded answer is not looked up
/// (tried).
#[test]
fn a_late_duplicate_of_a_clear_gets_the_first_answer_and_clears_nothing() {
    let (mut world, _, session) = World::with_nodes(3, 1 << 16);
    let first = world.start_copies(session, "k", 2);
    world.ended(session, &first);
    let here = first.replicas[0];
    assert_eq!(world.one(clear(session, 1, 1, first.object, &[here.replica])), Outcome::Cleared { cleared: true });
    assert_eq!(world.replicas(first.object).len(), 1);
    assert!(world.directory.degraded(None, 9).is_empty(), "what was cleared is not made again");
    // The replica is there again, or one of another object: the duplicate, whatever the leader found for it, answers as
    // the first did.
    world.remove(session, 2, 1, "k");
    let second = world.put(session, "k", 100);
    let there = second.replicas[0].replica;
    assert_eq!(world.one(clear(session, 1, 1, second.object, &[there])), Outcome::Cleared { cleared: true });
    assert_eq!(world.readable("k"), Some(second.object));
    // Nothing found is an answer too.
    assert_eq!(world.one(clear(session, 3, 1, second.object, &[])), Outcome::Cleared { cleared: false });
    assert_eq!(world.one(clear(session, 3, 1, second.object, &[there])), Outcome::Cleared { cleared: false });
    same_everywhere(&world);
    // Below the floor nothing is executed, and a number of another request is none.
    world.refused(clear(session, 1, 4, second.object, &[there]), ErrorCode::StaleRequest);
    world.refused(clear(session, 2, 1, second.object, &[there]), ErrorCode::InvalidParams);
    // The last one goes with its object.
    assert_eq!(world.one(clear(session, 4, 4, second.object, &[there])), Outcome::Cleared { cleared: true });
    assert_eq!(world.present("k"), None);
}
