//! Limits that apply keeps by its own accounts: what a client has granted (L5), and what is pinned for good.

use super::world::{World, end};
use crate::directory::{Config, Op, Outcome, PutStart, Quota, ReplicaEnd, ReplicaMode};
use tidepool_proto::ErrorCode;
use tidepool_proto::object::extent_bytes;

const LENGTH: u64 = 1000;

fn limited(world: &mut World, change: impl FnOnce(&mut Config)) {
    let mut config = Config::default();
    change(&mut config);
    assert_eq!(world.one(Op::SetConfig(config)), Outcome::Done);
}

/// Calls of one client that were admitted side by side meet here. Fails without the check in apply (tried).
#[test]
fn a_client_is_granted_no_more_than_its_limit_whoever_let_it_pass() {
    let (mut world, _, session) = World::with_nodes(1, 1 << 20);
    let bytes = extent_bytes(LENGTH);
    // A tenth of the pool is more than this.
    let most = (1 << 20) / 100 * 10 / bytes;
    limited(&mut world, |config| config.granted_bytes_min = 2 * bytes);
    let grants: Vec<_> = (0..most).map(|i| world.start(session, &format!("k{i}"), LENGTH)).collect();
    let put = world.put_op(session, "more", LENGTH);
    let why = world.refused(Op::PutStart(put), ErrorCode::ResourceExhausted);
    assert!(why.contains("granted_bytes_min") && why.contains(&(most * bytes).to_string()), "{why}");
    let other = world.session(9);
    world.start(other, "more", LENGTH);
    world.ended(session, &grants[0]);
    world.start(session, "next", LENGTH);
    let put = world.put_op(session, "last", LENGTH);
    world.refused(Op::PutStart(put), ErrorCode::ResourceExhausted);
    // In a small pool the least holds.
    limited(&mut world, |config| config.granted_bytes_min = 1 << 20);
    world.start(session, "last", LENGTH);
}

/// One put may be larger than the limit; a retry and a takeover of one's own are no more than was there.
#[test]
fn a_first_put_a_retry_and_a_takeover_pass_the_limit() {
    let (mut world, _, session) = World::with_nodes(2, 1 << 20);
    limited(&mut world, |config| config.granted_bytes_min = 1);
    let put = world.put_op(session, "k", 400_000);
    let grant = world.granted(put.clone());
    assert!(world.granted(put).repeated);
    world.time_ms += 30_000;
    let again = world.put_op(session, "k", 300_000);
    assert_eq!(world.granted(again).preempted, Some(grant.object));
    let another = world.put_op(session, "other", 400_000);
    world.refused_after_time(Op::PutStart(another), ErrorCode::ResourceExhausted);
    // All copies that are asked for count.
    world.one(Op::PutRevoke(end(session, &grant, ReplicaEnd::Aborted)));
    let (mut world, _, session) = World::with_nodes(2, 1 << 20);
    limited(&mut world, |config| config.granted_bytes_min = 3 * extent_bytes(LENGTH));
    let most = (2 << 20) / 100 * 10 / extent_bytes(LENGTH);
    (1..most).for_each(|i| drop(world.start(session, &format!("k{i}"), LENGTH)));
    let two = PutStart { replica_num: 2, mode: ReplicaMode::BestEffort, ..world.put_op(session, "two", LENGTH) };
    world.refused(Op::PutStart(two), ErrorCode::ResourceExhausted);
    world.start(session, "one", LENGTH);
}

/// Fails without the check, and when the old value of an upsert does not count (tried).
#[test]
fn what_is_pinned_for_good_without_a_quota_fills_only_a_part_of_the_pool() {
    let (mut world, _, session) = World::with_nodes(1, 10 * extent_bytes(LENGTH));
    limited(&mut world, |config| config.hard_pinned_percent_max = 30);
    let pinned =
        |world: &mut World, key: &'static str| PutStart { hard_pin: true, ..world.put_op(session, key, LENGTH) };
    let free = world.tenant("free", Quota::default());
    let bound = world.tenant("bound", Quota { bytes: 1 << 20, ..Quota::default() });
    for key in ["a", "b"] {
        let put = pinned(&mut world, key);
        world.complete(put);
    }
    let put = PutStart { tenant: free, ..pinned(&mut world, "c") };
    let third = world.granted(put);
    let put = pinned(&mut world, "d");
    let why = world.refused(Op::PutStart(put), ErrorCode::HardPinLimit);
    assert!(why.contains("hard_pinned_percent_max") && why.contains("30 %"), "{why}");
    assert_eq!(world.directory.hard_pin_room(free), 0);
    // What is not pinned, and what a quota bounds, is not meant.
    world.put(session, "loose", LENGTH);
    let put = PutStart { tenant: bound, ..pinned(&mut world, "e") };
    world.complete(put);
    // An upsert takes the place of the old value; one of the same size is let in.
    let upsert = PutStart { hard_pin: true, ..world.upsert_op(session, 1, "a", LENGTH) };
    let grant = world.granted(upsert);
    let bigger = world.upsert_op(session, 2, "b", 3 * LENGTH);
    world.refused(Op::PutStart(bigger), ErrorCode::HardPinLimit);
    world.ended(session, &grant);
    // What goes makes room.
    world.one(Op::PutRevoke(end(session, &third, ReplicaEnd::Aborted)));
    let put = pinned(&mut world, "d");
    world.complete(put);
    world.audit();
}
