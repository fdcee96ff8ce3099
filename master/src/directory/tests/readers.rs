//! Who reads while ops are applied: it gets in between two of the very many objects that one op changes, and finds no key between its old and
//! its new value.

use super::world::{World, end};
use crate::directory::{Entry, FEATURE_LEVEL, Op, Outcome, PutStart, ReplicaEnd, RetireMode, TenantId, Turn};
use std::sync::atomic::{AtomicBool, Ordering};
use tidepool_proto::{LogTime, ObjectId};

const OBJECTS: usize = 4_096;
/// A reader may not be run by the host just then.
const TRIES: usize = 50;

fn full_node() -> (World, Vec<ObjectId>) {
    let (mut world, _, session) = World::with_nodes(1, 1 << 30);
    let objects = (0..OBJECTS).map(|number| {
        let key = number.to_string();
        let put = world.put_op(session, &key, 100);
        let Some(Outcome::Granted(grant)) = world.apply_unchecked(&[Op::PutStart(put)]).pop() else {
            panic!("no grant")
        };
        world.apply_unchecked(&[Op::PutEnd(end(session, &grant, ReplicaEnd::Stored))]);
        grant.object
    });
    let objects = objects.collect();
    (world, objects)
}

/// Applies an op; whether a reader saw some of the objects gone, but not all.
fn is_seen_half_done(world: &World, op: Op<'_>) -> bool {
    let (is_done, began) = (AtomicBool::new(false), AtomicBool::new(false));
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| {
            let mut seen = false;
            while !is_done.load(Ordering::Acquire) {
                let left = world.directory.counts().objects as usize;
                seen |= 0 < left && left < OBJECTS;
                began.store(true, Ordering::Release);
            }
            seen
        });
        while !began.load(Ordering::Acquire) {
            std::thread::yield_now();
        }
        let entry = Entry { feature_level: FEATURE_LEVEL, log_time: LogTime(world.time_ms), ops: vec![op] };
        let outcomes = world.directory.apply_entry(world.log.len() as u64 + 1, 1, &entry);
        is_done.store(true, Ordering::Release);
        assert!(!matches!(outcomes[..], [Outcome::Refused(_)]), "{outcomes:?}");
        world.directory.check_invariants().unwrap();
        reader.join().unwrap()
    })
}

/// A datanode of many objects is dropped; others read meanwhile. Tried without letting them in: fails.
#[test]
fn readers_get_in_while_a_node_is_dropped() {
    let dropped = |_| {
        let (world, _) = full_node();
        let node = world.directory.nodes()[0].clone();
        is_seen_half_done(&world, Op::DropNode { node: node.node, incarnation: node.incarnation })
    };
    assert!((0..TRIES).any(dropped));
}

/// Thousands of victims are evicted by one op; others read meanwhile. Tried without letting them in: fails.
#[test]
fn readers_get_in_while_many_objects_are_retired() {
    let retired = |_| {
        let (world, objects) = full_node();
        is_seen_half_done(&world, Op::Retire { objects, mode: RetireMode::RetireOnly })
    };
    assert!((0..TRIES).any(retired));
}

/// Times that a key is replaced.
const REPLACED: u64 = 20_000;

/// W7: the key has its old value until it has the new one. A simulation, which has one thread, cannot see between two locks.
#[test]
fn a_key_that_is_replaced_is_found_at_every_moment() {
    let (mut world, _, session) = World::with_nodes(1, 1 << 30);
    let first = world.put_op(session, "k", 100);
    let grant = world.granted(first);
    world.apply_unchecked(&[Op::PutEnd(end(session, &grant, ReplicaEnd::Stored))]);
    let starts: Vec<PutStart<'_>> = (1..=REPLACED)
        .map(|n| PutStart { upsert: Some(Turn { sequence: n, floor: n }), ..world.upsert_op(session, n, "k", 100) })
        .collect();
    let (is_done, mut index) = (AtomicBool::new(false), world.log.len() as u64);
    let mut apply = |op: Op<'_>| {
        index += 1;
        let entry = Entry { feature_level: FEATURE_LEVEL, log_time: LogTime(world.time_ms), ops: vec![op] };
        world.directory.apply_entry(index, 1, &entry).pop().expect("an op has an outcome")
    };
    let (looks, missed) = std::thread::scope(|scope| {
        let reader = scope.spawn(|| {
            let (mut looks, mut missed) = (0u64, 0u64);
            while !is_done.load(Ordering::Acquire) {
                looks += 1;
                missed += u64::from(world.directory.with_object(TenantId::DEFAULT, b"k", |found| found.is_none()));
            }
            (looks, missed)
        });
        for start in starts {
            let Outcome::Granted(grant) = apply(Op::PutStart(start)) else { panic!("no grant") };
            let ended = apply(Op::PutEnd(end(session, &grant, ReplicaEnd::Stored)));
            assert!(matches!(ended, Outcome::Ended { replaced: Some(_), .. }), "{ended:?}");
        }
        is_done.store(true, Ordering::Release);
        reader.join().unwrap()
    });
    world.directory.check_invariants().unwrap();
    println!("{looks} looks");
    assert_eq!(missed, 0, "of {looks} looks");
}
