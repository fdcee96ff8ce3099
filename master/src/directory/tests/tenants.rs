//! Tenants: name spaces and quotas.

use super::world::{World, end};
use crate::directory::{Grant, Op, Outcome, PutStart, Quota, ReplicaEnd, SessionId, TenantId};
use tidepool_proto::object::extent_bytes;
use tidepool_proto::{ErrorCode, ObjectId};

const LENGTH: u64 = 1000;

fn put_as(world: &mut World, session: SessionId, tenant: TenantId, key: &str) -> Grant {
    let put = world.put_op(session, key, LENGTH);
    world.complete(PutStart { tenant, ..put })
}

fn object(world: &World, tenant: TenantId, key: &str) -> Option<ObjectId> {
    world.directory.with_object(tenant, key.as_bytes(), |o| o.filter(|o| o.is_readable()).map(|o| o.object))
}

/// User report 110: a tenant at its quota takes nothing from another. Fails when the victims are tried as named: those
/// of B that come before the one of A go with it (tried).
#[test]
fn case_110_a_tenant_over_quota_is_refused_or_evicts_its_own_only() {
    for quota in [
        Quota { bytes: 3 * extent_bytes(LENGTH), ..Quota::default() },
        Quota { objects: 3, ..Quota::default() },
        Quota { bytes: 3 * extent_bytes(LENGTH), objects: 3, refuse: true },
    ] {
        let (mut world, _, session) = World::with_nodes(1, 1 << 16);
        let (a, b) = (world.tenant("a", quota), world.tenant("b", Quota::default()));
        let keys = ["k0", "k1", "k2"];
        let of_a: Vec<ObjectId> = keys.iter().map(|key| put_as(&mut world, session, a, key).object).collect();
        let of_b: Vec<ObjectId> = keys.iter().map(|key| put_as(&mut world, session, b, key).object).collect();
        let put = PutStart { tenant: a, ..world.put_op(session, "new", LENGTH) };
        let message = world.refused(Op::PutStart(put.clone()), ErrorCode::TenantQuotaExceeded);
        assert!(message.contains("tenant 'a' holds") && message.contains("3 objects"), "{message}");
        // Another's objects do not help, and stay.
        let put = PutStart { victims: of_b.clone(), ..put };
        world.refused(Op::PutStart(put.clone()), ErrorCode::TenantQuotaExceeded);
        let victims = [&of_b[..], &of_a[..]].concat();
        assert_eq!(world.granted(PutStart { victims, ..put }).evicted, of_a[..1]);
        assert!(keys.iter().zip(&of_b).all(|(key, id)| object(&world, b, key) == Some(*id)));
    }
}

/// Below its quota a put that lacks space takes what the leader names, whose ever it is.
#[test]
fn within_quota_another_tenants_objects_may_go() {
    let (mut world, _, session) = World::with_nodes(1, 2 * extent_bytes(LENGTH));
    let quota = Quota { objects: 9, ..Quota::default() };
    let (a, b) = (world.tenant("a", quota), world.tenant("b", quota));
    let victims: Vec<ObjectId> = ["k0", "k1"].map(|key| put_as(&mut world, session, b, key).object).into();
    let put = PutStart { tenant: a, victims: victims.clone(), ..world.put_op(session, "k0", LENGTH) };
    assert_eq!(world.granted(put).evicted, victims[..1]);
}

/// Fails when the bytes of what is preempted count twice (tried: refused).
#[test]
fn what_is_preempted_makes_room_in_the_quota() {
    let (mut world, _, session) = World::with_nodes(1, 1 << 16);
    let quota = Quota { bytes: extent_bytes(LENGTH), objects: 1, refuse: true };
    let tenant = world.tenant("a", quota);
    let put = world.put_op(session, "k", LENGTH);
    let open = world.granted(PutStart { tenant, ..put });
    let put = PutStart { tenant, ..world.upsert_op(session, 1, "k", LENGTH) };
    let upsert = world.granted(put);
    assert_eq!(upsert.preempted, Some(open.object));
    world.ended(session, &upsert);
    // Both values of an upsert count; its own old value may go for it.
    let put = PutStart { tenant, ..world.upsert_op(session, 2, "k", LENGTH) };
    world.refused(Op::PutStart(put.clone()), ErrorCode::TenantQuotaExceeded);
    let grant = world.granted(PutStart { victims: vec![upsert.object], ..put });
    assert_eq!(grant.evicted, [upsert.object]);
}

/// All replicas count, and what was not stored or was lost counts no more.
#[test]
fn a_tenant_is_charged_for_the_replicas_that_there_are() {
    let (mut world, nodes, session) = World::with_nodes(3, 1 << 16);
    let tenant = world.tenant("a", Quota::default());
    let put = PutStart { tenant, replica_num: 3, ..world.put_op(session, "k", LENGTH) };
    let grant = world.granted(put);
    let bytes = |world: &World| world.directory.tenants()[1].bytes / extent_bytes(LENGTH);
    assert_eq!(bytes(&world), 3);
    let mut ending = end(session, &grant, ReplicaEnd::Stored);
    ending.replicas[2].end = ReplicaEnd::Unknown;
    assert_eq!(world.one(Op::PutEnd(ending)), Outcome::Ended { copies: 2, replaced: None });
    assert_eq!(bytes(&world), 2);
    let (node, incarnation, segment) = *nodes.iter().find(|n| n.2 == grant.replicas[0].segment).unwrap();
    world.one(Op::UnmountSegment { node, incarnation, segment });
    assert_eq!(bytes(&world), 1);
    world.one(Op::DropReplica { object: grant.object, replica: grant.replicas[1].replica });
    assert_eq!((bytes(&world), world.directory.tenants()[1].objects), (0, 0));
}

#[test]
fn the_same_key_is_another_object_for_each_tenant() {
    let (mut world, _, session) = World::with_nodes(1, 1 << 16);
    let tenants = ["a", "b"].map(|name| world.tenant(name, Quota::default()));
    let ids = tenants.map(|tenant| put_as(&mut world, session, tenant, "k").object);
    assert_ne!(ids[0], ids[1]);
    assert_eq!(tenants.map(|tenant| object(&world, tenant, "k")), ids.map(Some));
    assert_eq!(world.readable("k"), None);
}

#[test]
fn only_an_empty_tenant_is_dropped_and_its_number_is_never_used_again() {
    let (mut world, _, session) = World::with_nodes(1, 1 << 16);
    let (a, b) = (world.tenant("a", Quota::default()), world.tenant("b", Quota::default()));
    assert_eq!((a, b), (TenantId(1), TenantId(2)));
    // A second registration sets the quota and keeps the number.
    let quota = Quota { bytes: 5, objects: 6, refuse: true };
    assert_eq!(world.tenant("a", quota), a);
    assert_eq!(world.directory.tenants()[1].quota, quota);
    world.tenant("a", Quota::default());
    let put = world.put_op(session, "k", LENGTH);
    let open = world.granted(PutStart { tenant: a, ..put });
    world.refused(Op::DropTenant { name: "a" }, ErrorCode::TenantNotEmpty);
    world.one(Op::PutRevoke(end(session, &open, ReplicaEnd::Unknown)));
    // Its space is not clean yet, but it is no object.
    assert_eq!(world.one(Op::DropTenant { name: "a" }), Outcome::Done);
    assert_eq!(world.directory.tenant("a"), None);
    let put = PutStart { tenant: a, ..world.put_op(session, "k", LENGTH) };
    world.refused(Op::PutStart(put), ErrorCode::TenantNotRegistered);
    assert_eq!(world.tenant("c", Quota::default()), TenantId(3), "a request under way for 'a' must not find 'c'");
}

#[test]
fn a_quota_that_is_lowered_stops_puts_and_evicts_nothing() {
    let (mut world, _, session) = World::with_nodes(1, 1 << 16);
    let a = world.tenant("a", Quota::default());
    let grants = ["k0", "k1", "k2"].map(|key| put_as(&mut world, session, a, key));
    world.tenant("a", Quota { objects: 2, ..Quota::default() });
    let victims: Vec<ObjectId> = grants.iter().map(|g| g.object).collect();
    let put = PutStart { tenant: a, victims: victims.clone(), ..world.put_op(session, "new", LENGTH) };
    // It is over by one, so two go for one.
    assert_eq!(world.granted(put).evicted, victims[..2]);
}

/// A second copy is over the quota unless an object of the tenant's own goes too, though its space is of no use. Fails
/// when own victims count only once the best so far is over quota (tried: one copy).
#[test]
fn an_own_victim_may_pay_for_a_copy() {
    let (mut world, nodes, session) = World::with_nodes(2, extent_bytes(LENGTH));
    let (.., small) = world.add_node(8, "h8", extent_bytes(1));
    let (a, b) = (world.tenant("a", Quota::default()), world.tenant("b", Quota::default()));
    let put = world.put_op(session, "small", 1);
    let own = world.complete(PutStart { tenant: a, preferred: [small].into_iter().collect(), ..put }).object;
    let put = world.put_op(session, "other", LENGTH);
    let other = world.complete(PutStart { tenant: b, preferred: [nodes[1].2].into_iter().collect(), ..put }).object;
    world.tenant("a", Quota { bytes: 2 * extent_bytes(LENGTH), ..Quota::default() });
    let put = PutStart { tenant: a, replica_num: 2, ..world.put_op(session, "two", LENGTH) };
    let grant = world.granted(PutStart { victims: vec![other, own], ..put });
    assert_eq!((grant.replicas.len(), grant.evicted), (2, vec![other, own]));
}
