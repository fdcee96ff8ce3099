//! Sessions: late duplicates of removals are answered, not executed (W8).

use super::world::{World, remove};
use crate::directory::{Op, Outcome, Removal, RetireMode};
use tidepool_proto::ErrorCode;

/// Fails when the recorded outcome is not looked up (tried: the late duplicate removes the second object).
#[test]
fn a_late_duplicate_gets_the_first_answer_and_removes_nothing() {
    let (mut world, _, session) = World::with_nodes(1, 1 << 16);
    let first = world.put(session, "k", 100);
    assert_eq!(world.remove(session, 1, 1, "k"), Removal::Removed(first.object));
    let second = world.put(session, "k", 100);
    assert_eq!(world.remove(session, 1, 1, "k"), Removal::Removed(first.object));
    assert_eq!(world.readable("k"), Some(second.object));
    // So is a NOT_FOUND.
    assert_eq!(world.remove(session, 2, 1, "gone"), Removal::NotFound);
    let third = world.put(session, "gone", 100);
    assert_eq!(world.remove(session, 2, 1, "gone"), Removal::NotFound);
    assert_eq!(world.readable("gone"), Some(third.object));
}

/// Fails when the floor is not compared (tried: the duplicate is executed).
#[test]
fn below_the_floor_nothing_is_executed() {
    let (mut world, _, session) = World::with_nodes(1, 1 << 16);
    world.put(session, "k", 100);
    world.remove(session, 1, 0, "k");
    world.remove(session, 2, 2, "other");
    let second = world.put(session, "k", 100);
    world.refused(Op::Remove(remove(session, 1, 0, "k")), ErrorCode::StaleRequest);
    assert_eq!(world.readable("k"), Some(second.object));
}

#[test]
fn the_floor_survives_hello_and_is_per_session() {
    let (mut world, _, session) = World::with_nodes(1, 1 << 16);
    world.remove(session, 7, 5, "k");
    let again = world.one(Op::OpenSession { client_uuid: [1; 16], host_id: "c" });
    assert_eq!(again, Outcome::Opened { session, floor: 5 });
    let other = world.session(2);
    assert_ne!(other, session);
    assert_eq!(world.remove(other, 0, 0, "k"), Removal::NotFound);
}

/// The leader's look may be older than the op: it must not free space of an object whose leases it did not look at.
#[test]
fn a_removal_of_another_object_than_the_leader_saw_does_nothing() {
    let (mut world, _, session) = World::with_nodes(1, 1 << 16);
    let first = world.put(session, "k", 100);
    world.remove(session, 0, 0, "k");
    let second = world.put(session, "k", 100);
    let mut op = remove(session, 1, 0, "k");
    (op.expected, op.mode) = (Some(first.object), RetireMode::RetireAndReclaim);
    assert_eq!(world.one(Op::Remove(op.clone())), Outcome::RemoveChanged { actual: second.object });
    op.expected = None;
    assert_eq!(world.one(Op::Remove(op.clone())), Outcome::RemoveChanged { actual: second.object });
    // Nothing was recorded: the leader looks again and proposes under the same sequence.
    op.expected = Some(second.object);
    assert_eq!(world.one(Op::Remove(op)), Outcome::Removal(Removal::Removed(second.object)));
}

#[test]
fn an_open_put_is_not_removed() {
    let (mut world, _, session) = World::with_nodes(1, 1 << 16);
    world.start(session, "k", 100);
    assert_eq!(world.remove(session, 0, 0, "k"), Removal::NotReady);
    assert!(world.present("k").is_some());
}

#[test]
fn a_session_with_an_open_put_stays_and_an_expired_one_must_say_hello_again() {
    let (mut world, _, session) = World::with_nodes(1, 1 << 16);
    let open = world.start(session, "k", 100);
    let expire = || Op::ExpireSessions { sessions: vec![session, session] };
    assert_eq!(world.one(expire()), Outcome::Expired { sessions: 0 }, "it put something meanwhile");
    world.time_ms += 30_000;
    assert_eq!(
        world.one(Op::Discard { objects: vec![open.object] }),
        Outcome::Discarded { objects: vec![open.object] }
    );
    assert_eq!(world.one(expire()), Outcome::Expired { sessions: 1 });
    world.refused(Op::Remove(remove(session, 0, 0, "k")), ErrorCode::SessionUnknown);
    assert_ne!(world.session(1), session);
}
