//! Victims: inline in a put (W9), and as the leader finds them.

use super::world::{World, by_bytes, victims};
use crate::directory::{Config, Grant, Op, PutStart, SessionId, TenantId, Victim};
use tidepool_proto::object::extent_bytes;
use tidepool_proto::{ErrorCode, ObjectId, SegmentId};

const LENGTH: u64 = 1000;

/// One segment full of equal objects, in address order.
fn full(objects: u64) -> (World, SessionId, Vec<Grant>) {
    let (mut world, _, session) = World::with_nodes(1, objects * extent_bytes(LENGTH));
    let grants: Vec<Grant> = (0..objects).map(|i| world.put(session, &format!("k{i}"), LENGTH)).collect();
    assert!(grants.iter().enumerate().all(|(i, g)| g.replicas[0].offset == i as u64 * extent_bytes(LENGTH)));
    (world, session, grants)
}

fn with_victims(world: &mut World, session: SessionId, length: u64, victims: Vec<ObjectId>) -> PutStart<'static> {
    PutStart { victims, ..world.put_op(session, "new", length) }
}

/// Fails when victims are given up beyond the fit and kept.
#[test]
fn only_as_many_victims_go_as_are_needed() {
    let (mut world, session, grants) = full(8);
    let victims: Vec<ObjectId> = grants.iter().map(|g| g.object).collect();
    let put = with_victims(&mut world, session, LENGTH, victims.clone());
    assert_eq!(world.granted(put).evicted, victims[..1]);
    assert!(world.readable("k1").is_some());
}

/// Three extents' worth needs three neighbours, and names between them that do not help are given back... only at the
/// end: a victim is kept when a later one makes it part of the fit.
#[test]
fn a_larger_put_takes_neighbours_until_they_merge() {
    let (mut world, session, grants) = full(8);
    let victims = [2, 4, 3].map(|i: usize| grants[i].object).to_vec();
    let put = with_victims(&mut world, session, 3 * LENGTH, victims.clone());
    let grant = world.granted(put);
    assert_eq!(grant.evicted, victims);
    assert_eq!(grant.replicas[0].offset, grants[2].replicas[0].offset);
}

/// Fails when victims are not given back after a refusal (tried: digest changes).
#[test]
fn victims_that_do_not_suffice_stay() {
    let (mut world, session, grants) = full(8);
    let victims = [0, 2, 4, 6].map(|i: usize| grants[i].object).to_vec();
    let put = with_victims(&mut world, session, 3 * LENGTH, victims);
    world.refused(Op::PutStart(put), ErrorCode::NoSpace);
    assert!((0..8).all(|i| world.readable(&format!("k{i}")).is_some()));
}

#[test]
fn victims_that_are_not_complete_under_that_id_are_passed_over() {
    let (mut world, _, session) = World::with_nodes(1, 4 * extent_bytes(LENGTH));
    let gone = world.put(session, "gone", LENGTH);
    world.remove(session, 0, 0, "gone");
    let waiting = world.directory.reclaimable(None, 9).iter().map(|r| r.replica).collect();
    world.one(Op::Reclaim { replicas: waiting });
    let again = world.put(session, "gone", LENGTH);
    let open = world.start(session, "open", LENGTH);
    let last = world.put(session, "last", LENGTH);
    world.put(session, "fill", LENGTH);
    let victims = vec![gone.object, open.object, ObjectId(0), last.object, last.object, again.object];
    let put = with_victims(&mut world, session, LENGTH, victims);
    assert_eq!(world.granted(put).evicted, [last.object]);
    assert_eq!(world.readable("gone"), Some(again.object));
}

#[test]
fn at_the_object_limit_a_put_needs_a_victim() {
    let (mut world, _, session) = World::with_nodes(1, 1 << 20);
    let first = world.put(session, "a", 1);
    world.put(session, "b", 1);
    world.one(Op::SetConfig(Config { objects_max: 2, ..Config::default() }));
    let put = world.put_op(session, "c", 1);
    let message = world.refused(Op::PutStart(put), ErrorCode::ResourceExhausted);
    assert!(message.contains("objects_max"), "{message}");
    let put = with_victims(&mut world, session, 1, vec![first.object]);
    assert_eq!(world.granted(put).evicted, [first.object]);
}

/// W9: mixed sizes. The oldest objects are scattered, so evicting them frees no extent that is large enough; a
/// neighbourhood does. Fails when the oldest are named instead (shown here).
#[test]
fn a_neighbourhood_frees_one_large_extent() {
    let (mut world, session, grants) = full(64);
    // Of each pair the second is put anew, so it is young: old and young alternate.
    for (i, grant) in grants.iter().enumerate().filter(|(i, _)| i % 2 == 1) {
        world.remove(session, i as u64, 0, &format!("k{i}"));
        world.one(Op::Reclaim { replicas: vec![grant.replicas[0].replica] });
        assert_eq!(world.put(session, &format!("y{i}"), LENGTH).replicas[0].offset, grant.replicas[0].offset);
    }
    let need = extent_bytes(4 * LENGTH);
    let oldest: Vec<ObjectId> = victims(&world.directory).iter().map(|v| v.object).collect();
    let named = oldest[..8].to_vec();
    let put = with_victims(&mut world, session, 4 * LENGTH, named);
    world.refused(Op::PutStart(put.clone()), ErrorCode::NoSpace);
    let near = world.directory.neighbour_victims(&oldest, need, 1024, |_| true, by_bytes).unwrap().victims;
    let bytes: u64 = near.iter().map(|v| v.bytes()).sum();
    assert!(bytes < need + extent_bytes(LENGTH), "{bytes} bytes evicted for {need}");
    let put = PutStart { victims: near.iter().map(|v| v.object).collect(), ..put };
    assert_eq!(world.granted(put).evicted.len(), near.len());
}

#[test]
fn a_neighbourhood_avoids_what_is_open_or_refused() {
    let (mut world, session, grants) = full(8);
    // k3 is leased, k6 becomes an open put: 4 and 5 are too few, 0, 1, 2 are what is left.
    world.remove(session, 0, 0, "k6");
    world.one(Op::Reclaim { replicas: vec![grants[6].replicas[0].replica] });
    world.start(session, "open", LENGTH);
    let leased = grants[3].object;
    let seeds: Vec<ObjectId> = victims(&world.directory).iter().map(|v| v.object).collect();
    let near = |extents: u64| {
        let bytes = extents * extent_bytes(LENGTH);
        world.directory.neighbour_victims(
            &seeds,
            bytes,
            1024,
            |_| true,
            |near| near.iter().map(|v| (v.object != leased).then(|| v.bytes())).collect(),
        )
    };
    let expected: Vec<ObjectId> = grants[..3].iter().map(|g| g.object).collect();
    assert_eq!(near(3).unwrap().victims.iter().map(|v| v.object).collect::<Vec<_>>(), expected);
    assert_eq!(near(4), None);
}

/// Fails when the run with the fewest bytes is taken.
#[test]
fn a_neighbourhood_is_the_cheapest_one() {
    let (world, _, grants) = full(8);
    let seeds: Vec<ObjectId> = grants.iter().map(|g| g.object).collect();
    let dear = &seeds[..5];
    let price = |v: &&Victim| Some(if dear.contains(&v.object) { v.bytes() << 3 } else { v.bytes() });
    let bytes = 2 * extent_bytes(LENGTH);
    let near = world
        .directory
        .neighbour_victims(&seeds, bytes, 1024, |_| true, |near| near.iter().map(price).collect())
        .unwrap()
        .victims;
    assert_eq!(near.iter().map(|v| v.object).collect::<Vec<_>>(), seeds[5..7]);
}

/// Free space beside victims counts.
#[test]
fn a_neighbourhood_uses_the_free_space_beside_it() {
    let (mut world, session, grants) = full(8);
    world.remove(session, 0, 0, "k1");
    world.one(Op::Reclaim { replicas: vec![grants[1].replicas[0].replica] });
    let bytes = 2 * extent_bytes(LENGTH);
    let near = world.directory.neighbour_victims(&[grants[0].object], bytes, 1024, |_| true, by_bytes).unwrap().victims;
    assert_eq!(near.len(), 1);
    let put = with_victims(&mut world, session, 2 * LENGTH, near.iter().map(|v| v.object).collect());
    world.granted(put);
}

/// A put that may not use a segment gains nothing by what lies there. Fails when the segment is not asked about.
#[test]
fn a_neighbourhood_lies_in_a_segment_that_may_be_used() {
    let (mut world, nodes, session) = World::with_nodes(2, 8 * extent_bytes(LENGTH));
    let grants: Vec<Grant> = (0..16).map(|i| world.put(session, &format!("k{i}"), LENGTH)).collect();
    let seeds: Vec<ObjectId> = grants.iter().map(|g| g.object).collect();
    for (_, _, segment) in nodes {
        let bytes = 3 * extent_bytes(LENGTH);
        let near = world.directory.neighbour_victims(&seeds, bytes, 1024, |id| id == segment, by_bytes).unwrap();
        assert_eq!(near.segment, segment);
        assert!(near.victims.iter().all(|victim| victim.replicas[0].1 == segment));
    }
    assert_eq!(world.directory.neighbour_victims(&seeds, 1, 1024, |_| false, by_bytes), None);
}

/// Fails when a page begins where the last one ended, or names what is open or pinned for good.
#[test]
fn a_walk_through_a_segment_meets_each_victim_once() {
    let (mut world, nodes, session) = World::with_nodes(1, 8 * extent_bytes(LENGTH));
    let mut grants: Vec<Grant> = (0..7).map(|i| world.put(session, &format!("k{i}"), LENGTH)).collect();
    world.start(session, "open", LENGTH);
    world.remove(session, 0, 0, "k2");
    grants.remove(2);
    let (mut from, mut met) = (0, Vec::new());
    loop {
        let (page, next) = world.directory.victims_in(nodes[0].2, from, 3);
        met.extend(page.iter().map(|victim| (victim.key, victim.object)));
        let Some(next) = next else { break };
        from = next;
    }
    let keys = (0..7).filter(|i| *i != 2).map(|i| format!("k{i}"));
    let hashes = keys.map(|key| world.directory.key_hash(TenantId::DEFAULT, key.as_bytes()));
    let expected: Vec<_> = hashes.zip(grants.iter().map(|grant| grant.object)).collect();
    assert_eq!(met, expected);
    assert_eq!(world.directory.victims_in(SegmentId(1), 0, 9), (Vec::new(), None));
}
