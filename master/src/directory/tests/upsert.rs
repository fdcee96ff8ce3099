//! Upserts (W7, W8): out of place, one switch at the end, the old value until then.

use super::world::{World, end, remove};
use crate::directory::{
    Grant, ListFilter, ObjectState, Op, Outcome, PutStart, Quota, Removal, ReplicaEnd, RetireMode, SessionId,
    SoftPinAction, TenantId, Turn,
};
use smallvec::SmallVec;
use tidepool_proto::object::extent_bytes;
use tidepool_proto::{ErrorCode, NodeId, ObjectId};

const TIMEOUT_MS: u64 = 30_000;
/// Fits into an empty segment, and not beside an object of 100 bytes.
const BIG: u64 = (1 << 16) - 250;

/// A node, a session, a complete object "k" and an open upsert of it under sequence 1.
fn open_upsert() -> (World, SessionId, Grant, Grant) {
    let (mut world, _, session) = World::with_nodes(2, 1 << 16);
    let old = world.put(session, "k", 100);
    let put = world.upsert_op(session, 1, "k", 200);
    let new = world.granted(put);
    (world, session, old, new)
}

/// As `open_upsert`, the two values on different nodes.
fn apart() -> (World, SessionId, Grant, Grant) {
    let (mut world, _, session) = World::with_nodes(2, 1 << 16);
    let old = world.put(session, "k", 100);
    let excluded = [old.replicas[0].node].into_iter().collect();
    let put = world.upsert_op(session, 1, "k", 200);
    let new = world.granted(PutStart { excluded, ..put });
    (world, session, old, new)
}

/// All nodes but the one where an object lies.
fn but(world: &World, object: &Grant) -> SmallVec<[NodeId; 2]> {
    world.directory.nodes().iter().map(|n| n.node).filter(|&n| n != object.replicas[0].node).collect()
}

fn state(world: &World, key: &str) -> Option<(ObjectId, ObjectState)> {
    world.directory.with_object(TenantId::DEFAULT, key.as_bytes(), |o| o.map(|o| (o.object, o.state)))
}

/// Fails when the old value is not retired at the end, or reclaimed at once, or the new one listed before (tried each).
#[test]
fn the_old_value_is_read_until_the_new_one_is_ended() {
    let (mut world, session, old, new) = open_upsert();
    assert_eq!(world.readable("k"), Some(old.object));
    let filter = ListFilter { unreadable_too: true, ..ListFilter::default() };
    assert_eq!(world.directory.list(TenantId::DEFAULT, &filter, None, 10).objects.len(), 1);
    assert_eq!(world.ended(session, &new), Some(old.object));
    assert_eq!(world.readable("k"), Some(new.object));
    // Leases may live on the old value: its space waits for Reclaim.
    let waiting: Vec<_> = world.directory.reclaimable(None, 9).iter().map(|r| r.object).collect();
    assert_eq!(waiting, [old.object]);
    // The end again answers as it did; the key is no one else's.
    let again = world.one(Op::PutEnd(end(session, &new, ReplicaEnd::Stored)));
    assert_eq!(again, Outcome::Ended { copies: 1, replaced: None });
    let put = world.upsert_op(session, 2, "k", 50);
    let third = world.granted(put);
    assert_eq!(world.ended(session, &third), Some(new.object));
    assert_eq!(world.directory.counts().objects, 1);
}

#[test]
fn an_upsert_of_a_key_that_is_not_there_is_a_put() {
    let (mut world, _, session) = World::with_nodes(1, 1 << 16);
    let put = world.upsert_op(session, 1, "k", 100);
    let grant = world.granted(put);
    assert_eq!(state(&world, "k"), Some((grant.object, ObjectState::Processing)));
    assert_eq!(world.ended(session, &grant), None);
    assert_eq!(world.readable("k"), Some(grant.object));
}

/// Fails when a turn is not looked up: the duplicate preempts the first, or replaces what another wrote since (tried).
#[test]
fn a_late_duplicate_of_an_upsert_is_never_executed() {
    let (mut world, _, session) = World::with_nodes(2, 1 << 16);
    world.put(session, "k", 100);
    let put = world.upsert_op(session, 1, "k", 200);
    let first = world.granted(put.clone());
    let again = world.granted(put.clone());
    assert!(again.repeated);
    assert_eq!((again.object, &again.replicas), (first.object, &first.replicas));
    // Mixed up: another key, another length, another token.
    world.refused(Op::PutStart(PutStart { key: b"other", ..put.clone() }), ErrorCode::InvalidParams);
    world.refused(Op::PutStart(PutStart { length: 201, ..put.clone() }), ErrorCode::InvalidParams);
    world.refused(Op::PutStart(PutStart { token: [9; 16], ..put.clone() }), ErrorCode::GrantLost);
    world.ended(session, &first);
    world.refused(Op::PutStart(put.clone()), ErrorCode::GrantLost);
    // The floor has passed it.
    world.remove(session, 5, 5, "other");
    world.refused(Op::PutStart(put), ErrorCode::StaleRequest);
    assert_eq!(world.readable("k"), Some(first.object));
}

/// A refused upsert used no turn: the client may try again under the same one.
#[test]
fn a_refused_upsert_leaves_its_turn() {
    let (mut world, _, session) = World::with_nodes(1, 1 << 16);
    world.put(session, "k", 100);
    let put = world.upsert_op(session, 1, "k", 1 << 17);
    world.refused(Op::PutStart(put.clone()), ErrorCode::NoSpace);
    world.granted(PutStart { length: 100, ..put });
}

#[test]
fn an_upsert_preempts_open_puts_and_open_upserts_at_once() {
    let (mut world, session, old, first) = open_upsert();
    let other = world.session(2);
    let put = world.upsert_op(other, 1, "k", 300);
    let second = world.granted(put);
    assert_eq!(second.preempted, Some(first.object));
    world.refused(Op::PutEnd(end(session, &first, ReplicaEnd::Stored)), ErrorCode::GrantLost);
    assert_eq!(world.readable("k"), Some(old.object));
    assert_eq!(world.ended(other, &second), Some(old.object));

    let open = world.start(session, "new", 100);
    let put = world.upsert_op(other, 2, "new", 100);
    let upsert = world.granted(put);
    assert_eq!(upsert.preempted, Some(open.object));
    world.refused(Op::PutEnd(end(session, &open, ReplicaEnd::Stored)), ErrorCode::GrantLost);
    assert_eq!(world.ended(other, &upsert), None);
}

/// A plain put does not see the upsert: the key has a COMPLETE object (W6).
#[test]
fn a_put_beside_an_open_upsert_finds_the_old_value() {
    let (mut world, session, ..) = open_upsert();
    let put = world.put_op(session, "k", 100);
    world.refused(Op::PutStart(put), ErrorCode::ObjectAlreadyExists);
}

/// Fails when an upsert is not attached as its old value goes (tried: nobody finds it after its end).
#[test]
fn an_upsert_whose_old_value_goes_becomes_a_put() {
    type Goes = fn(&mut World, SessionId, &Grant);
    let ways: [Goes; 5] = [
        |world, session, _| assert!(matches!(world.remove(session, 9, 0, "k"), Removal::Removed(_))),
        |world, session, old| {
            let turn = Turn { sequence: 9, floor: 0 };
            let mode = RetireMode::RetireOnly;
            let removed = world.one(Op::RemoveObjects { session, turn, objects: vec![old.object], mode });
            assert_eq!(removed, Outcome::RemovedObjects { objects: 1 });
        },
        |world, _, old| {
            let retire = Op::Retire { objects: vec![old.object], mode: RetireMode::RetireAndReclaim };
            assert_eq!(world.one(retire), Outcome::Retired { objects: vec![old.object] });
        },
        |world, _, old| {
            let drop = Op::DropReplica { object: old.object, replica: old.replicas[0].replica };
            assert_eq!(world.one(drop), Outcome::ReplicaDropped { object_gone: true });
        },
        |world, session, old| {
            let put = world.put_op(session, "big", BIG);
            let put = PutStart { victims: vec![old.object], excluded: but(world, old), ..put };
            assert_eq!(world.granted(put).evicted, [old.object]);
        },
    ];
    for goes in ways {
        let (mut world, session, old, new) = apart();
        goes(&mut world, session, &old);
        assert_eq!(state(&world, "k"), Some((new.object, ObjectState::Processing)));
        let put = world.put_op(session, "k", 100);
        world.refused(Op::PutStart(put), ErrorCode::PutInProgress);
        assert_eq!(world.ended(session, &new), None);
        assert_eq!(world.readable("k"), Some(new.object));
    }
}

#[test]
fn an_upsert_that_does_not_end_well_leaves_the_old_value() {
    let (mut world, session, old, new) = open_upsert();
    assert_eq!(world.one(Op::PutRevoke(end(session, &new, ReplicaEnd::Aborted))), Outcome::Revoked);
    assert_eq!(world.readable("k"), Some(old.object));
    let put = world.upsert_op(session, 2, "k", 200);
    let failed = world.granted(put);
    let outcome = world.one(Op::PutEnd(end(session, &failed, ReplicaEnd::Unknown)));
    assert!(matches!(outcome, Outcome::PutDropped(_)), "{outcome:?}");
    let put = world.upsert_op(session, 3, "k", 200);
    let stale = world.granted(put);
    world.time_ms += TIMEOUT_MS;
    let objects = vec![stale.object];
    assert_eq!(world.one(Op::Discard { objects: objects.clone() }), Outcome::Discarded { objects });
    assert_eq!(world.readable("k"), Some(old.object));
    assert_eq!(world.directory.counts().objects, 1);
    let put = world.upsert_op(session, 4, "k", 200);
    let last = world.granted(put);
    assert_eq!(world.ended(session, &last), Some(old.object));
}

/// An upsert may evict its own old value, when there is no room for both; then it is a put from the start.
#[test]
fn an_upsert_may_evict_what_it_would_replace() {
    let (mut world, _, session) = World::with_nodes(1, extent_bytes(1000));
    let old = world.put(session, "k", 1000);
    let put = world.upsert_op(session, 1, "k", 1000);
    world.refused(Op::PutStart(put.clone()), ErrorCode::NoSpace);
    let grant = world.granted(PutStart { victims: vec![old.object], ..put });
    assert_eq!((grant.evicted.clone(), state(&world, "k").map(|s| s.0)), (vec![old.object], Some(grant.object)));
    assert_eq!(world.ended(session, &grant), None);
}

/// The same beside an open upsert of the old value, which gives way too.
#[test]
fn an_upsert_evicts_the_old_value_of_an_upsert_that_it_preempts() {
    let (mut world, session, old, open) = apart();
    let put = world.upsert_op(session, 2, "k", BIG);
    let grant = world.granted(PutStart { victims: vec![old.object], excluded: but(&world, &old), ..put });
    assert_eq!((grant.preempted, &grant.evicted[..]), (Some(open.object), &[old.object][..]));
    assert_eq!(state(&world, "k"), Some((grant.object, ObjectState::Processing)));
    assert_eq!(world.ended(session, &grant), None);
    world.refused(Op::PutEnd(end(session, &open, ReplicaEnd::Stored)), ErrorCode::GrantLost);
}

/// Both values are charged until the end, and the open grant is the session's.
#[test]
fn both_values_count_until_the_end() {
    let (mut world, session, old, new) = open_upsert();
    let tenant = |world: &World| (world.directory.tenants()[0].bytes, world.directory.tenants()[0].objects);
    assert_eq!(tenant(&world), (extent_bytes(100) + extent_bytes(200), 2));
    assert_eq!(world.directory.session(session).unwrap().open_bytes, extent_bytes(200));
    world.ended(session, &new);
    assert_eq!(tenant(&world), (extent_bytes(200), 1));
    assert_eq!(world.directory.session(session).unwrap().open_bytes, 0);
    assert_ne!(old.object, new.object);
    // At a quota an upsert needs a victim as any put does.
    world.one(Op::SetTenant { name: "default", quota: Quota { objects: 1, ..Quota::default() } });
    let put = world.upsert_op(session, 2, "k", 10);
    world.refused(Op::PutStart(put), ErrorCode::TenantQuotaExceeded);
}

/// Removal and upsert share the session's sequence: neither is executed under the other's.
#[test]
fn one_sequence_is_one_request() {
    let (mut world, session, _, new) = open_upsert();
    world.refused(Op::Remove(remove(session, 1, 0, "k")), ErrorCode::InvalidParams);
    world.remove(session, 2, 0, "none");
    let put = world.upsert_op(session, 2, "k", 100);
    world.refused(Op::PutStart(put), ErrorCode::InvalidParams);
    world.ended(session, &new);
}

/// Fails when `Preserve` does not look at the old value, or a hard pin is not kept (tried both).
#[test]
fn pins_live_on_in_the_new_value() {
    let (mut world, _, session) = World::with_nodes(1, 1 << 16);
    let put = world.put_op(session, "k", 100);
    world.complete(PutStart { soft_pin: SoftPinAction::Enable { ttl_ms: 1_000 }, hard_pin: true, ..put });
    let pins = |world: &World| {
        let view = |o: Option<&crate::directory::ObjectView<'_>>| o.map(|o| (o.soft_pinned_until.0, o.hard_pinned));
        world.directory.with_object(TenantId::DEFAULT, b"k", view).unwrap()
    };
    let first = world.time_ms + 1_000;
    assert_eq!(pins(&world), (first, true));
    let upserts = [
        (SoftPinAction::Preserve, Some(first)),
        (SoftPinAction::Enable { ttl_ms: 7 }, None),
        (SoftPinAction::Disable, Some(0)),
        (SoftPinAction::Preserve, Some(0)),
    ];
    for (sequence, (soft_pin, until)) in (1..).zip(upserts) {
        world.time_ms += 10;
        let put = PutStart { soft_pin, ..world.upsert_op(session, sequence, "k", 100) };
        let grant = world.granted(put);
        world.time_ms += 10;
        world.ended(session, &grant);
        assert_eq!(pins(&world), (until.unwrap_or(world.time_ms + 7), true), "{soft_pin:?}");
    }
}
