//! Puts told as stories: retries, preemption, lost grants, fences, nodes that come and go.

use super::world::{World, end};
use crate::directory::{
    Contact, Op, Outcome, PutStart, ReplicaEnd, ReplicaMode, ReplicaStatus, RetireMode, SessionView, TenantId,
};
use std::collections::BTreeSet;
use tidepool_proto::object::extent_bytes;
use tidepool_proto::{ErrorCode, ReplicaId};

const TIMEOUT_MS: u64 = 30_000;

fn session_of(world: &World, session: crate::directory::SessionId) -> SessionView {
    world.directory.session(session).unwrap()
}

/// W8. Fails when the token is not compared (tried: the retry answered PUT_IN_PROGRESS).
#[test]
fn the_same_token_gets_the_same_grant() {
    let (mut world, _, session) = World::with_nodes(2, 1 << 16);
    let put = world.put_op(session, "k", 1000);
    let first = world.granted(put.clone());
    let again = world.granted(put.clone());
    assert!(again.repeated && !first.repeated);
    assert_eq!((again.object, &again.replicas, again.started), (first.object, &first.replicas, first.started));
    // Another session's same token is another put.
    let other = world.session(2);
    world.refused(Op::PutStart(PutStart { session: other, ..put.clone() }), ErrorCode::PutInProgress);
    world.refused(Op::PutStart(PutStart { length: 1001, ..put }), ErrorCode::InvalidParams);
}

/// User report 38: a writer that dies holds its key and space no longer than the discard timeout, and the space waits
/// for the datanode's fence only. Fails when the preempted replicas are freed at once (tried: `unclean` is empty).
#[test]
fn case_038_a_stale_put_is_preempted_and_its_space_returns_after_the_fence() {
    let (mut world, nodes, session) = World::with_nodes(1, 1 << 16);
    let (node, incarnation, segment) = nodes[0];
    let free = world.directory.segment(segment).unwrap().free;
    let stale = world.start(session, "k", 1000);
    let other = world.session(2);
    world.time_ms += TIMEOUT_MS - 1;
    let put = world.put_op(other, "k", 1000);
    let message = world.refused_after_time(Op::PutStart(put.clone()), ErrorCode::PutInProgress);
    assert!(message.contains("in 1 ms"), "{message}");
    world.time_ms += 1;
    let grant = world.granted(put);
    assert_eq!(grant.preempted, Some(stale.object));
    assert_ne!(grant.replicas[0].offset, stale.replicas[0].offset, "unclean space was handed out");
    assert_eq!(world.directory.unclean(node, 10), [stale.replicas[0].replica]);
    // The late writer's end is refused for ever (W4).
    world.refused(Op::PutEnd(end(session, &stale, ReplicaEnd::Stored)), ErrorCode::GrantLost);
    // No Reclaim frees unclean space, nor another node's fence.
    let replicas = vec![stale.replicas[0].replica];
    assert_eq!(world.one(Op::Reclaim { replicas: replicas.clone() }), Outcome::Reclaimed { replicas: 0, bytes: 0 });
    let (node_2, life_2, _) = world.add_node(50, "h9", 4096);
    let fence = Op::FenceAcknowledged { node: node_2, incarnation: life_2, replicas: replicas.clone() };
    assert_eq!(world.one(fence), Outcome::Reclaimed { replicas: 0, bytes: 0 });
    let fence = Op::FenceAcknowledged { node, incarnation, replicas };
    assert_eq!(world.one(fence), Outcome::Reclaimed { replicas: 1, bytes: extent_bytes(1000) });
    world.one(Op::PutRevoke(end(other, &grant, ReplicaEnd::Aborted)));
    assert_eq!(world.directory.segment(segment).unwrap().free, free);
}

/// User report 38 again, without another writer: the leader's sweep. T1: time without a leader does not count, since
/// only entries carry time.
#[test]
fn case_038_abandoned_puts_are_discarded_by_the_sweep() {
    let (mut world, nodes, session) = World::with_nodes(1, 1 << 20);
    let grants: Vec<_> = (0..100).map(|i| world.start(session, &format!("k{i}"), 1000)).collect();
    assert_eq!(session_of(&world, session).open_grants, 100);
    let objects: Vec<_> = grants.iter().map(|g| g.object).collect();
    assert_eq!(world.one(Op::Discard { objects: objects.clone() }), Outcome::Discarded { objects: Vec::new() });
    assert!(world.directory.discardable(world.directory.log_time(), 1000).is_empty());
    world.time_ms += TIMEOUT_MS;
    world.apply(&[]);
    assert_eq!(world.directory.discardable(world.directory.log_time(), 1000), objects);
    assert_eq!(world.directory.discardable(world.directory.log_time(), 7), objects[..7]);
    assert_eq!(world.one(Op::Discard { objects: objects.clone() }), Outcome::Discarded { objects });
    assert_eq!((session_of(&world, session).open_grants, session_of(&world, session).open_bytes), (0, 0));
    let (node, incarnation, segment) = nodes[0];
    let replicas = world.directory.unclean(node, 1000);
    assert_eq!(replicas.len(), 100);
    world.one(Op::FenceAcknowledged { node, incarnation, replicas });
    assert_eq!(world.directory.segment(segment).unwrap().free, 1 << 20);
}

/// W6: only a COMPLETE object answers ALREADY_EXISTS.
#[test]
fn an_open_put_answers_in_progress_and_is_not_readable() {
    let (mut world, _, session) = World::with_nodes(1, 1 << 16);
    let grant = world.start(session, "k", 100);
    assert_eq!((world.present("k"), world.readable("k")), (Some(grant.object), None));
    let put = world.put_op(session, "k", 100);
    world.refused(Op::PutStart(put.clone()), ErrorCode::PutInProgress);
    world.one(Op::PutEnd(end(session, &grant, ReplicaEnd::Stored)));
    assert_eq!(world.readable("k"), Some(grant.object));
    world.refused(Op::PutStart(put), ErrorCode::ObjectAlreadyExists);
}

/// User report 48: one of two targets fails. The answer says how many copies were made; a clean failure frees its
/// space at once, an unclean one after the fence.
#[test]
fn case_048_a_put_says_how_many_copies_it_made_and_leaks_nothing() {
    for (failed, unclean) in [(ReplicaEnd::Aborted, 0), (ReplicaEnd::Unknown, 1)] {
        let (mut world, _, session) = World::with_nodes(3, 1 << 16);
        let put = PutStart { replica_num: 2, ..world.put_op(session, "k", 1000) };
        let grant = world.granted(put);
        assert_eq!(grant.replicas.len(), 2);
        let mut ending = end(session, &grant, ReplicaEnd::Stored);
        ending.replicas[1].end = failed;
        assert_eq!(world.one(Op::PutEnd(ending.clone())), Outcome::Ended { copies: 1, replaced: None });
        assert_eq!(world.directory.unclean(grant.replicas[1].node, 9).len(), unclean);
        assert_eq!(world.directory.counts().complete_bytes, extent_bytes(1000));
        assert_eq!(world.directory.counts().retired_bytes, unclean as u64 * extent_bytes(1000));
        // A retry of the end answers the same, even after the copy it made was found corrupt and dropped.
        assert_eq!(world.one(Op::PutEnd(ending.clone())), Outcome::Ended { copies: 1, replaced: None });
        ending.replicas[1].end = ReplicaEnd::Stored;
        world.refused(Op::PutEnd(ending), ErrorCode::AlreadyEnded);
    }
}

#[test]
fn a_put_of_which_nothing_was_stored_is_dropped() {
    let (mut world, _, session) = World::with_nodes(1, 1 << 16);
    let grant = world.start(session, "k", 100);
    let failed = end(session, &grant, ReplicaEnd::Unknown);
    assert!(
        matches!(world.one(Op::PutEnd(failed.clone())), Outcome::PutDropped(e) if e.code() == ErrorCode::GrantLost)
    );
    assert_eq!(world.present("k"), None);
    world.refused(Op::PutEnd(failed), ErrorCode::GrantLost);
}

/// W4: the segment must still be mounted under the granted incarnation.
#[test]
fn a_new_incarnation_takes_the_old_ones_replicas_and_open_grants_along() {
    let (mut world, nodes, session) = World::with_nodes(2, 1 << 16);
    let alone = world.put(session, "alone", 100);
    let holder = alone.replicas[0].node;
    let which = nodes.iter().position(|n| n.0 == holder).unwrap() as u8;
    let open = loop {
        let grant = world.start(session, &format!("open-{}", world.log.len()), 100);
        if grant.replicas[0].node == holder {
            break grant;
        }
    };
    let both = world.start_copies(session, "both", 2);
    world.one(Op::PutEnd(end(session, &both, ReplicaEnd::Stored)));
    let (node, incarnation) = world.register(which, 200, "h0");
    assert_eq!(node, holder, "the id is the uuid's");
    assert_ne!(incarnation, nodes[usize::from(which)].1);
    assert_eq!((world.present("alone"), world.readable("both")), (None, Some(both.object)));
    world.refused(Op::PutEnd(end(session, &open, ReplicaEnd::Stored)), ErrorCode::GrantLost);
    // The end of the object that lost a copy still answers as it did.
    assert_eq!(
        world.one(Op::PutEnd(end(session, &both, ReplicaEnd::Stored))),
        Outcome::Ended { copies: 2, replaced: None }
    );
    // The same process again: the same answer.
    assert_eq!(world.register(which, 200, "h0"), (node, incarnation));
}

/// One copy stored on a segment that is gone, the other failed: the put is lost, not half there.
#[test]
fn an_end_whose_stored_copies_are_gone_drops_the_put() {
    let (mut world, nodes, session) = World::with_nodes(2, 1 << 16);
    let grant = world.start_copies(session, "k", 2);
    let (node, incarnation, segment) = *nodes.iter().find(|n| n.0 == grant.replicas[0].node).unwrap();
    world.one(Op::UnmountSegment { node, incarnation, segment });
    let mut ending = end(session, &grant, ReplicaEnd::Stored);
    ending.replicas[1].end = ReplicaEnd::Unknown;
    let Outcome::PutDropped(error) = world.one(Op::PutEnd(ending)) else { panic!() };
    assert!(error.message().contains("are gone"), "{error}");
    assert_eq!(world.directory.unclean(grant.replicas[1].node, 9), [grant.replicas[1].replica]);
}

/// Fails when `distance` ignores hosts (tried: two copies on h0).
#[test]
fn replicas_go_to_distinct_hosts_then_nodes_then_segments() {
    let mut world = World::new();
    let hosts = ["h0", "h0", "h0", "h1"];
    for (i, host) in hosts.iter().enumerate() {
        let (node, life, _) = world.add_node(i as u8, host, 1 << 16);
        world.mount((node, life), "second", 1 << 16);
    }
    let session = world.session(1);
    for i in 0..40 {
        let grant = world.start_copies(session, &format!("k{i}"), 2);
        let views: Vec<_> = grant.replicas.iter().map(|r| world.directory.node(r.node).unwrap().host_id).collect();
        assert_ne!(views[0], views[1]);
        let grant = world.start_copies(session, &format!("four{i}"), 4);
        assert_eq!(grant.replicas.iter().map(|r| r.node).collect::<BTreeSet<_>>().len(), 4);
        world.one(Op::PutRevoke(end(session, &grant, ReplicaEnd::Aborted)));
    }
    let grant = world.start_copies(session, "all", 15);
    assert_eq!(
        grant.replicas.iter().map(|r| r.segment).collect::<BTreeSet<_>>().len(),
        8,
        "best effort: one a segment"
    );
}

#[test]
fn load_spreads_over_the_segments() {
    let (mut world, nodes, session) = World::with_nodes(4, 1 << 20);
    for i in 0..400 {
        world.start(session, &format!("k{i}"), 1000);
    }
    for (_, _, segment) in nodes {
        let used = world.directory.segment(segment).unwrap().processing / extent_bytes(1000);
        assert!((80..=120).contains(&used), "{used} of 400 objects on one of 4 equal segments");
    }
}

/// N1: suspect is unlisted and not chosen, nothing is dropped, and heard again is listed again.
#[test]
fn a_suspect_node_is_unlisted_not_chosen_and_keeps_its_replicas() {
    let (mut world, nodes, session) = World::with_nodes(1, 1 << 16);
    let (node, incarnation, _) = nodes[0];
    let grant = world.put(session, "k", 100);
    world.suspect(node, incarnation, Contact::Suspect);
    assert_eq!((world.readable("k"), world.present("k")), (None, Some(grant.object)));
    assert_eq!(world.directory.largest_free(), 0);
    let put = world.put_op(session, "k2", 100);
    world.refused(Op::PutStart(put), ErrorCode::NoSpace);
    world.suspect(node, incarnation, Contact::Heard);
    assert_eq!(world.readable("k"), Some(grant.object));
}

#[test]
fn a_corrupt_replica_is_dropped_and_the_object_with_its_last() {
    let (mut world, _, session) = World::with_nodes(2, 1 << 16);
    let put = PutStart { replica_num: 2, mode: ReplicaMode::Strict, ..world.put_op(session, "k", 100) };
    let grant = world.granted(put);
    world.one(Op::PutEnd(end(session, &grant, ReplicaEnd::Stored)));
    let drop = |i: usize| Op::DropReplica { object: grant.object, replica: grant.replicas[i].replica };
    assert_eq!(world.one(drop(0)), Outcome::ReplicaDropped { object_gone: false });
    let left = world.directory.with_object(TenantId::DEFAULT, b"k", |o| o.unwrap().listed().count());
    assert_eq!(left, 1);
    assert_eq!(world.one(drop(1)), Outcome::ReplicaDropped { object_gone: true });
    // Readers may hold leases on it: the space waits for Reclaim.
    let waiting: Vec<ReplicaId> = world.directory.reclaimable(None, 9).iter().map(|r| r.replica).collect();
    assert_eq!(waiting.len(), 2);
    let bytes = 2 * extent_bytes(100);
    assert_eq!(world.one(Op::Reclaim { replicas: waiting }), Outcome::Reclaimed { replicas: 2, bytes });
}

/// L1: after Retire nobody finds it, and its space is not handed out before Reclaim.
#[test]
fn retired_space_is_not_reused_before_reclaim() {
    let (mut world, _, session) = World::with_nodes(1, 2 * extent_bytes(1000));
    let first = world.put(session, "a", 1000);
    world.put(session, "b", 1000);
    let retire = Op::Retire { objects: vec![first.object], mode: RetireMode::RetireOnly };
    assert_eq!(world.one(retire.clone()), Outcome::Retired { objects: vec![first.object] });
    assert_eq!(world.one(retire), Outcome::Retired { objects: Vec::new() });
    assert_eq!(world.present("a"), None);
    let put = world.put_op(session, "c", 1000);
    world.refused(Op::PutStart(put.clone()), ErrorCode::NoSpace);
    world.one(Op::Reclaim { replicas: vec![first.replicas[0].replica] });
    assert_eq!(world.granted(put).replicas[0].offset, first.replicas[0].offset);
}

/// T1: an entry with an older stamp does not turn log time back.
#[test]
fn log_time_never_goes_back() {
    let mut world = World::new();
    world.time_ms = 500;
    world.apply(&[]);
    world.time_ms = 400;
    world.apply(&[]);
    assert_eq!(world.directory.log_time().0, 500);
}

#[test]
fn an_end_that_names_only_some_replicas_leaves_the_others_unclean() {
    let (mut world, _, session) = World::with_nodes(2, 1 << 16);
    let grant = world.start_copies(session, "k", 2);
    let mut ending = end(session, &grant, ReplicaEnd::Stored);
    ending.replicas =
        [ReplicaStatus { replica: grant.replicas[1].replica, end: ReplicaEnd::Stored }].into_iter().collect();
    assert_eq!(world.one(Op::PutEnd(ending)), Outcome::Ended { copies: 1, replaced: None });
    assert_eq!(world.directory.unclean(grant.replicas[0].node, 9), [grant.replicas[0].replica]);
}
