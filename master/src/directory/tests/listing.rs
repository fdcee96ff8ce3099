//! Listings and lookups.

use super::world::World;
use crate::directory::limits::LIST_SCAN_MAX;
use crate::directory::{Contact, ListFilter, Op, Outcome, PutStart, TenantId};
use std::collections::BTreeSet;
use tidepool_proto::ObjectId;

fn under(prefix: &str) -> ListFilter<'_> {
    ListFilter { prefix: prefix.as_bytes(), ..ListFilter::default() }
}

fn list_all(world: &World, prefix: &str, limit: usize) -> Vec<String> {
    let (mut keys, mut after) = (Vec::new(), None::<Box<[u8]>>);
    loop {
        let page = world.directory.list(TenantId::DEFAULT, &under(prefix), after.as_deref(), limit);
        assert!(page.objects.len() <= limit);
        keys.extend(page.objects.iter().map(|o| String::from_utf8(o.key.to_vec()).unwrap()));
        match page.next {
            Some(next) => after = Some(next),
            None => return keys,
        }
    }
}

fn filled(objects: usize) -> (World, crate::directory::SessionId) {
    let (mut world, _, session) = World::with_nodes(1, 1 << 30);
    for chunk in (0..objects).collect::<Vec<_>>().chunks(512) {
        let keys: Vec<String> = chunk.iter().map(|i| format!("{}/{i}", ["even", "odd"][i % 2])).collect();
        let puts: Vec<Op<'_>> = keys.iter().map(|key| Op::PutStart(world.put_op(session, key, 1))).collect();
        let ends: Vec<Op<'_>> = world
            .apply_unchecked(&puts)
            .iter()
            .map(|outcome| match outcome {
                Outcome::Granted(g) => Op::PutEnd(super::world::end(session, g, crate::directory::ReplicaEnd::Stored)),
                other => panic!("{other:?}"),
            })
            .collect();
        world.apply_unchecked(&ends);
    }
    world.directory.check_invariants().unwrap();
    (world, session)
}

#[test]
fn pages_hold_every_key_once_whatever_their_size() {
    let (mut world, session) = filled(2000);
    world.start(session, "even/open", 1);
    let expected: BTreeSet<String> = (0..2000).filter(|i| i % 2 == 0).map(|i| format!("even/{i}")).collect();
    for limit in [1, 7, 999, 1000, 1001, usize::MAX] {
        let keys = list_all(&world, "even/", limit);
        assert_eq!(keys.len(), expected.len(), "limit {limit}");
        assert_eq!(keys.into_iter().collect::<BTreeSet<_>>(), expected);
    }
    assert_eq!(list_all(&world, "", 100).len(), 2000);
    assert_eq!(list_all(&world, "nothing", 10), Vec::<String>::new());
}

/// A cursor stays good when its key is removed, also the last of its shard.
#[test]
fn a_listing_goes_on_after_its_cursor_was_removed() {
    let (mut world, session) = filled(300);
    let (mut seen, mut after, mut sequence) = (BTreeSet::new(), None::<Box<[u8]>>, 0);
    loop {
        let page = world.directory.list(TenantId::DEFAULT, &under(""), after.as_deref(), 10);
        for object in &page.objects {
            assert!(seen.insert(object.object), "listed twice");
            world.remove(session, sequence, sequence, std::str::from_utf8(&object.key).unwrap());
            sequence += 1;
        }
        match page.next {
            Some(next) => after = Some(next),
            None => break,
        }
    }
    assert_eq!(seen.len(), 300);
}

/// Fails when a page has no scan limit (tried), or when resuming does not get past its shard (loops).
#[test]
fn a_page_that_matches_nothing_ends_at_the_scan_limit() {
    let (world, _) = filled(2 * LIST_SCAN_MAX + 1000);
    let page = world.directory.list(TenantId::DEFAULT, &under("nothing"), None, 10);
    assert!(page.objects.is_empty() && page.next.is_some());
    assert_eq!(list_all(&world, "nothing", 10), Vec::<String>::new());
}

#[test]
fn objects_of_suspect_nodes_are_not_listed() {
    let (mut world, nodes, session) = World::with_nodes(1, 1 << 16);
    world.put(session, "k", 1);
    world.suspect(nodes[0].0, nodes[0].1, Contact::Suspect);
    assert!(list_all(&world, "", 10).is_empty());
}

#[test]
fn lookups_by_key_batch_and_id_agree() {
    let (mut world, nodes, session) = World::with_nodes(2, 1 << 16);
    let put = world.put_op(session, "both", 100);
    let grant = world.granted(PutStart { replica_num: 2, ..put });
    let directory = &world.directory;
    let by_key = directory.with_object(TenantId::DEFAULT, b"both", |o| o.map(|o| (o.object, o.replicas.clone())));
    let by_id = directory.with_object_id(grant.object, |o| o.map(|o| (o.object, o.replicas.clone())));
    assert_eq!(by_key, by_id);
    let (object, replicas) = by_key.unwrap();
    assert_eq!(object, grant.object);
    for (place, granted) in replicas.iter().zip(&grant.replicas) {
        assert_eq!((place.replica, place.segment, place.offset), (granted.replica, granted.segment, granted.offset));
        assert_eq!((place.node, place.incarnation, place.length), (granted.node, granted.incarnation, granted.length));
        assert!(!place.listed);
        assert!(nodes.iter().any(|n| n.0 == place.node && n.2 == place.segment));
    }
    let mut found = Vec::new();
    let keys = [b"both" as &[u8], b"none", b"both"];
    directory.with_objects(TenantId::DEFAULT, keys, |i, o| found.push((i, o.map(|o| o.object))));
    assert_eq!(found, [(0, Some(object)), (1, None), (2, Some(object))]);
    assert!(directory.with_object_id(ObjectId(3), |o| o.is_none()));
    assert!(directory.with_object(TenantId(5), b"both", |o| o.is_none()));
}
