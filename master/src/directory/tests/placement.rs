//! Where replicas go, and how many there are.

use super::world::{World, end};
use crate::directory::{Config, Op, Outcome, PutStart, ReplicaEnd, ReplicaMode, Strategy};
use std::collections::BTreeSet;
use tidepool_proto::object::extent_bytes;
use tidepool_proto::{ErrorCode, ObjectId, SegmentId};

/// User report 27: two copies wanted, one segment there. Evicting everything makes no second one, so nothing is.
#[test]
fn case_027_a_copy_that_cannot_be_had_evicts_nothing() {
    let (mut world, _, session) = World::with_nodes(1, 8 * extent_bytes(1000));
    let victims: Vec<ObjectId> = (0..7).map(|i| world.put(session, &format!("k{i}"), 1000).object).collect();
    let put = PutStart { replica_num: 2, victims: victims.clone(), ..world.put_op(session, "two", 1000) };
    let strict = PutStart { mode: ReplicaMode::Strict, ..put.clone() };
    let message = world.refused(Op::PutStart(strict), ErrorCode::NotEnoughReplicas);
    assert!(message.contains("needs 2 extents") && message.contains("1 can be had"), "{message}");
    let grant = world.granted(put);
    assert_eq!((grant.replicas.len(), grant.evicted), (1, Vec::new()));
    // The pool is full now: the copy that can be had takes one victim, not all.
    let put = PutStart { replica_num: 2, victims: victims.clone(), ..world.put_op(session, "next", 1000) };
    assert_eq!(world.granted(put).evicted, victims[..1]);
    let put = PutStart { replica_num: 2, mode: ReplicaMode::Strict, victims, ..world.put_op(session, "x", 1000) };
    world.refused(Op::PutStart(put), ErrorCode::NotEnoughReplicas);
}

/// User report 49: two hosts, two segments each. The copies of every key are on both hosts, whatever is drawn and
/// preferred, and whatever the strategy.
#[test]
fn case_049_the_copies_of_every_key_are_on_distinct_hosts() {
    let mut world = World::new();
    let mut segments: Vec<SegmentId> = Vec::new();
    for i in 0..2 {
        let (node, life, segment) = world.add_node(i, &format!("h{i}"), 2 << 20);
        segments.extend([segment, world.mount((node, life), "second", 2 << 20)]);
    }
    let session = world.session(1);
    let host_of = |segment| segments.iter().position(|&s| s == segment).unwrap() / 2;
    for (n, strategy) in (0..1_000).zip(Strategy::ALL.iter().cycle()) {
        let key = format!("k{n}");
        let preferred = segments.iter().copied().filter(|_| n % 2 == 0).collect();
        let put = PutStart { replica_num: 2, preferred, ..world.put_op(session, &key, 1000) };
        let config = Config { strategy: *strategy, ..Config::default() };
        let outcome = world.apply_unchecked(&[Op::SetConfig(config), Op::PutStart(put)]).pop();
        let Some(Outcome::Granted(grant)) = outcome else { panic!("{outcome:?}") };
        let hosts: BTreeSet<usize> = grant.replicas.iter().map(|r| host_of(r.segment)).collect();
        assert_eq!((grant.replicas.len(), hosts.len()), (2, 2), "{grant:?}");
        world.apply_unchecked(&[Op::PutEnd(end(session, &grant, ReplicaEnd::Stored))]);
    }
    world.directory.check_invariants().unwrap();
}

/// Fails when preferred segments are not asked first (tried).
#[test]
fn preferred_segments_come_first_if_they_fit() {
    let (mut world, nodes, session) = World::with_nodes(4, 2 * extent_bytes(1000));
    let segments: Vec<SegmentId> = nodes.iter().map(|n| n.2).collect();
    let unknown = SegmentId(1 << 40);
    let wanted = [unknown, segments[3], segments[1]];
    let chosen = |world: &mut World, key: &str| -> Vec<SegmentId> {
        let preferred = wanted.into_iter().collect();
        let put = PutStart { replica_num: 2, preferred, ..world.put_op(session, key, 1000) };
        world.granted(put).replicas.iter().map(|r| r.segment).collect()
    };
    for key in ["a", "b"] {
        assert_eq!(chosen(&mut world, key), [segments[3], segments[1]]);
    }
    // They are full: others do.
    let rest: BTreeSet<SegmentId> = chosen(&mut world, "c").into_iter().collect();
    assert_eq!(rest, BTreeSet::from([segments[0], segments[2]]));
    // An excluded node is not chosen though its segment is preferred.
    let (mut world, nodes, session) = World::with_nodes(2, 1 << 16);
    let preferred = [nodes[0].2].into_iter().collect();
    let excluded = [nodes[0].0].into_iter().collect();
    let put = PutStart { preferred, excluded, ..world.put_op(session, "k", 100) };
    assert_eq!(world.granted(put).replicas[0].segment, nodes[1].2);
}
