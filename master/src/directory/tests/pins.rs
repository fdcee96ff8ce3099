//! Hard and soft pins.

use super::world::{World, by_bytes, remove, victims};
use crate::directory::{Config, Op, Outcome, PutStart, Removal, RetireMode, SoftPinAction, TenantId, Turn};
use tidepool_proto::object::extent_bytes;
use tidepool_proto::{ErrorCode, ObjectId};

const LENGTH: u64 = 1000;

/// User report 35: what is pinned for good is never evicted, not even when nothing else is left. Fails when
/// `evictable_together` does not look at the pin (tried).
#[test]
fn case_035_hard_pinned_objects_are_never_victims() {
    let (mut world, nodes, session) = World::with_nodes(1, 4 * extent_bytes(LENGTH));
    world.one(Op::SetConfig(Config { hard_pinned_percent_max: 100, ..Config::default() }));
    let pinned: Vec<ObjectId> = (0..4)
        .map(|i| {
            let key = format!("k{i}");
            let put = world.put_op(session, &key, LENGTH);
            world.complete(PutStart { hard_pin: true, ..put }).object
        })
        .collect();
    assert!(victims(&world.directory).is_empty());
    assert!(world.directory.neighbour_victims(&pinned, extent_bytes(LENGTH), 1024, |_| true, by_bytes).is_none());
    assert!(world.directory.as_victim(pinned[0]).is_none());
    let retire = |mode| Op::Retire { objects: pinned.clone(), mode };
    for mode in [RetireMode::RetireOnly, RetireMode::RetireAndReclaim] {
        assert_eq!(world.one(retire(mode)), Outcome::Retired { objects: Vec::new() });
    }
    let put = PutStart { victims: pinned.clone(), ..world.put_op(session, "new", LENGTH) };
    world.refused(Op::PutStart(put.clone()), ErrorCode::NoSpace);
    // One that is not pinned, named last, is the one that goes.
    world.one(Op::Remove(remove(session, 1, 0, "k3")));
    let waiting = world.directory.reclaimable(None, 9).iter().map(|r| r.replica).collect();
    world.one(Op::Reclaim { replicas: waiting });
    let loose = world.put(session, "loose", LENGTH);
    let victims = pinned.iter().copied().chain([loose.object]).collect();
    assert_eq!(world.granted(PutStart { victims, ..put }).evicted, [loose.object]);
    assert!((0..3).all(|i| world.readable(&format!("k{i}")).is_some()));
    // Its last copy may be lost all the same.
    let (node, incarnation, segment) = nodes[0];
    world.one(Op::UnmountSegment { node, incarnation, segment });
    assert_eq!(world.directory.counts().objects, 0);
}

#[test]
fn hard_pinned_objects_are_removed_when_asked() {
    let (mut world, _, session) = World::with_nodes(1, 1 << 16);
    let mut pin = |key: &str| {
        let put = world.put_op(session, key, LENGTH);
        world.complete(PutStart { hard_pin: true, ..put }).object
    };
    let (a, b) = (pin("a"), pin("b"));
    assert_eq!(world.remove(session, 1, 0, "a"), Removal::Removed(a));
    let turn = Turn { sequence: 2, floor: 0 };
    let removal = Op::RemoveObjects { session, turn, objects: vec![a, b], mode: RetireMode::RetireOnly };
    assert_eq!(world.one(removal.clone()), Outcome::RemovedObjects { objects: 1 });
    assert_eq!((world.present("a"), world.present("b")), (None, None));
    // The same turn again answers the same and takes nothing.
    let later = world.put(session, "later", LENGTH).object;
    let again = Op::RemoveObjects { session, turn, objects: vec![later], mode: RetireMode::RetireOnly };
    assert_eq!(world.one(again), Outcome::RemovedObjects { objects: 1 });
    assert_eq!(world.readable("later"), Some(later));
}

#[test]
fn a_soft_pin_is_set_and_ended_and_runs_in_log_time() {
    let (mut world, _, session) = World::with_nodes(1, 1 << 16);
    let put = world.put_op(session, "k", LENGTH);
    let grant = world.granted(PutStart { soft_pin: SoftPinAction::Enable { ttl_ms: 500 }, ..put });
    let until = |world: &World| {
        world.directory.with_object(TenantId::DEFAULT, b"k", |o| o.map(|o| o.soft_pinned_until.0)).unwrap()
    };
    assert_eq!(until(&world), 0);
    world.refused(Op::SetPin { object: grant.object, action: SoftPinAction::Disable }, ErrorCode::NotReady);
    world.time_ms += 100;
    world.ended(session, &grant);
    let end = world.time_ms + 500;
    assert_eq!(until(&world), end);
    let object = grant.object;
    world.one(Op::SetPin { object, action: SoftPinAction::Preserve });
    assert_eq!(until(&world), end);
    assert_eq!(world.directory.as_victim(object).unwrap().soft_pinned_until.0, end);
    world.time_ms += 50;
    world.one(Op::SetPin { object, action: SoftPinAction::Enable { ttl_ms: 9 } });
    assert_eq!(until(&world), world.time_ms + 9);
    world.one(Op::SetPin { object, action: SoftPinAction::Disable });
    assert_eq!(until(&world), 0);
    // A soft pin does not bind apply: the leader decides when nothing else is left.
    world.one(Op::SetPin { object, action: SoftPinAction::Enable { ttl_ms: 9 } });
    let retire = Op::Retire { objects: vec![object], mode: RetireMode::RetireOnly };
    assert_eq!(world.one(retire), Outcome::Retired { objects: vec![object] });
}

/// Log time may be anything that an entry says; no pin overflows it.
#[test]
fn a_pin_at_the_end_of_time_does_not_overflow() {
    let (mut world, _, session) = World::with_nodes(1, 1 << 16);
    let object = world.put(session, "k", LENGTH).object;
    world.time_ms = u64::MAX - 1;
    let action = SoftPinAction::Enable { ttl_ms: 1_000 };
    assert_eq!(world.one(Op::SetPin { object, action }), Outcome::Done);
    let put = world.put_op(session, "other", LENGTH);
    world.complete(PutStart { soft_pin: action, ..put });
}
