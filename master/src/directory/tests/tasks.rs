//! Tasks: retries, drains, and what is remembered of those that ended.

use super::world::{World, drain};
use crate::directory::limits::TASKS_ENDED_KEPT;
use crate::directory::{CreateTask, Op, Outcome, ReplicaEnd, TaskId, TaskKind, TaskState};
use tidepool_proto::{ObjectId, SegmentId};

fn is_draining(world: &World, segment: SegmentId) -> bool {
    world.directory.segment(segment).unwrap().draining
}

fn end(world: &mut World, task: TaskId, state: TaskState) {
    let outcome = world.one(Op::EndTask { task, state, left: 0, message: "" });
    assert_eq!(outcome, Outcome::Done);
}

/// A drain that ends gives its segments back, unless they are empty and to be unmounted.
#[test]
fn a_drain_that_ends_gives_its_segments_back() {
    for (state, unmount, stays) in [
        (TaskState::Failed, false, false),
        (TaskState::Cancelled, false, false),
        (TaskState::Succeeded, false, false),
        (TaskState::Failed, true, false),
        (TaskState::Cancelled, true, false),
        (TaskState::Succeeded, true, true),
    ] {
        let (mut world, nodes, session) = World::with_nodes(1, 4096);
        let segment = nodes[0].2;
        let task = world.create(CreateTask { unmount, ..drain(&[segment], 1) }).unwrap();
        assert!(is_draining(&world, segment));
        end(&mut world, task, state);
        assert_eq!(is_draining(&world, segment), stays, "{state:?} {unmount}");
        assert_eq!(world.directory.task(task).unwrap().state, state);
        if !stays {
            world.put(session, "k", 100);
            continue;
        }
        // An operator who wants it back drains it once more and cancels that.
        let task = world.create(drain(&[segment], 2)).unwrap();
        end(&mut world, task, TaskState::Cancelled);
        assert!(!is_draining(&world, segment));
    }
}

/// Fails when the first of two drains that ends gives the segment back (was so).
#[test]
fn a_segment_of_two_drains_waits_for_both() {
    let (mut world, nodes, _) = World::with_nodes(3, 4096);
    let segments: Vec<SegmentId> = nodes.iter().map(|n| n.2).collect();
    let one = world.create(drain(&segments[..2], 1)).unwrap();
    let other = world.create(drain(&segments[1..], 2)).unwrap();
    end(&mut world, one, TaskState::Cancelled);
    assert_eq!(segments.iter().map(|&s| is_draining(&world, s)).collect::<Vec<_>>(), [false, true, true]);
    // The first end counts.
    end(&mut world, one, TaskState::Succeeded);
    assert_eq!(world.directory.task(one).unwrap().state, TaskState::Cancelled);
    end(&mut world, other, TaskState::Failed);
    assert!(segments.iter().all(|&s| !is_draining(&world, s)));
}

/// A segment that comes back is another one, and no drain's.
#[test]
fn a_drain_ends_with_its_segments_gone() {
    let (mut world, nodes, _) = World::with_nodes(2, 4096);
    let (node, incarnation, segment) = nodes[0];
    let task = world.create(drain(&[segment, nodes[1].2], 1)).unwrap();
    world.one(Op::UnmountSegment { node, incarnation, segment });
    let again = world.mount((node, incarnation), "s", 4096);
    assert!(!is_draining(&world, again) && is_draining(&world, nodes[1].2));
    end(&mut world, task, TaskState::Failed);
    assert!(!is_draining(&world, nodes[1].2));
}

/// A retry is the same task, whatever became of it and whatever else it asks for.
#[test]
fn one_token_is_one_task() {
    let (mut world, nodes, session) = World::with_nodes(3, 4096);
    let object = world.put(session, "k", 100).object;
    let here = world.replicas(object)[0].1;
    let targets: Vec<SegmentId> = nodes.iter().map(|n| n.2).filter(|&s| s != here).collect();
    let create = CreateTask { kind: TaskKind::Copy, object, targets: targets.clone(), ..drain(&[], 1) };
    let task = world.create(create.clone()).unwrap();
    assert_eq!(world.create(create.clone()), Ok(task));
    for &target in &targets {
        let copy = world.copy(object, None, &[target], task).unwrap();
        world.end_copy(copy.replica, ReplicaEnd::Stored);
    }
    assert_eq!((world.directory.task(task).unwrap().done, world.replicas(object).len()), (2, 3));
    // By now there is a replica in each target, and then no object at all.
    assert_eq!(world.create(create.clone()), Ok(task));
    end(&mut world, task, TaskState::Succeeded);
    world.remove(session, 1, 0, "k");
    assert_eq!(world.create(create), Ok(task));
    assert_eq!(world.directory.tasks().len(), 1);
}

/// The first that ended is forgotten first. Fails when the first that was created is (was so: a drain that took long
/// was forgotten as it ended), or when its token is kept (tried).
#[test]
fn tasks_that_ended_are_forgotten_in_turn() {
    let (mut world, nodes, _) = World::with_nodes(2, 4096);
    let long = world.create(drain(&[nodes[0].2], 1)).unwrap();
    let create = |n: usize| {
        let mut token = [2; 16];
        token[..8].copy_from_slice(&n.to_le_bytes());
        CreateTask { token, ..drain(&[nodes[1].2], 0) }
    };
    let mut tasks = Vec::new();
    for n in 0..TASKS_ENDED_KEPT {
        world.time_ms += 1;
        let Some(Outcome::TaskCreated { task }) = world.apply_unchecked(&[Op::CreateTask(create(n))]).pop() else {
            panic!("not created");
        };
        world.apply_unchecked(&[Op::EndTask { task, state: TaskState::Failed, left: 0, message: "" }]);
        tasks.push(task);
    }
    assert_eq!(world.directory.tasks().len(), TASKS_ENDED_KEPT + 1);
    world.time_ms += 1;
    end(&mut world, long, TaskState::Succeeded);
    assert_eq!(world.directory.tasks().len(), TASKS_ENDED_KEPT);
    assert!(world.directory.task(long).is_some() && world.directory.task(tasks[0]).is_none());
    assert_eq!(world.directory.task(tasks[1]).unwrap().asked.object, ObjectId(0));
    // The token of what was forgotten makes a new task.
    let again = world.create(create(0)).unwrap();
    assert!(!tasks.contains(&again));
    let state = TaskState::Failed;
    world.refused(Op::EndTask { task: tasks[0], state, left: 0, message: "" }, tidepool_proto::ErrorCode::TaskNotFound);
}
