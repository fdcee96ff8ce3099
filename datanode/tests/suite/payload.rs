//! Puts and gets: what is kept, what is refused, and that a refusal changes nothing.

use tidepool_proto::capability::Verb;
use tidepool_proto::object::BLOCK_BYTES;
use tidepool_proto::{ErrorCode, History, Incarnation, LogTime, NodeId, ReplicaId, SegmentId, v1};
use tidepool_transport::{Engine, ReadAccess, ReadItem, WriteAccess, WriteItem, WriteOutcome};

use crate::world::{Place, SEGMENT_BYTES, World, deadline, pattern};

/// User report 53: sizes around every edge come back byte for byte.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn case_053_every_size_comes_back_byte_for_byte() {
    let world = World::start(1).await;
    let sizes =
        [0, 1, 63, 64, 512, 4095, 4097, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1, (1 << 20) + 3, 9_000_001];
    for (i, &size) in sizes.iter().enumerate() {
        let place = world.place(size);
        let payload = pattern(size, i as u64);
        let reply = world.put(&place, &payload).await.unwrap();
        assert_eq!((reply.outcome, reply.proof), (WriteOutcome::Stored, place.proof(Verb::Stored)), "{size}");
        assert!(world.get(&place, size).await.unwrap() == payload, "{size}");
    }
    assert_eq!(world.metric("tidepool_datanode_items_total", "stored"), sizes.len() as f64);
    // An engine may split a large read.
    assert!(world.metric("tidepool_datanode_items_total", "read") >= sizes.len() as f64);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_a_client_may_not_do_is_refused_by_name() {
    let world = World::start(1).await;
    let good = world.place(1000);
    let payload = pattern(1000, 1);
    world.put(&good, &payload).await.unwrap();
    let now = world.quorum.state.lock().log_time_ms;

    type Change = fn(&mut Place, u64);
    let table: &[(&str, ErrorCode, Change)] = &[
        ("forged secret", ErrorCode::CapabilityRefused, |p, _| p.secret[0] ^= 1),
        ("another history", ErrorCode::CapabilityRefused, |p, _| p.history = History(p.history.0 ^ 1)),
        ("expired", ErrorCode::CapabilityRefused, |p, now| p.capability.expires = LogTime(now - 1)),
        ("older incarnation", ErrorCode::Fenced, |p, _| {
            p.capability.incarnation = Incarnation(p.capability.incarnation.0 - 1)
        }),
        ("newer incarnation", ErrorCode::Fenced, |p, _| {
            p.capability.incarnation = Incarnation(p.capability.incarnation.0 + 1)
        }),
        ("another node", ErrorCode::WrongCluster, |p, _| p.capability.node = NodeId(p.capability.node.0 + 1)),
        ("unknown segment", ErrorCode::SegmentNotFound, |p, _| p.capability.segment = SegmentId(7)),
        ("past the end", ErrorCode::OutOfBounds, |p, _| p.capability.offset = SEGMENT_BYTES - 64),
        ("offset near 2^64", ErrorCode::OutOfBounds, |p, _| p.capability.offset = u64::MAX - 10),
    ];
    for (what, code, change) in table {
        // A fresh replica id, so that only the change can be what is refused.
        let mut bad = good.with(|c| (c.replica, c.offset) = (ReplicaId(c.replica.0 + 100), 40 << 20));
        change(&mut bad, now);
        let refused = world.write(&bad, good.stored(&payload)).await.unwrap_err();
        assert_eq!(refused.error.code(), *code, "write, {what}: {}", refused.error);
        assert!(!refused.is_clean(), "write, {what}: a stranger gets no proof");
        let mut bad = good;
        change(&mut bad, now);
        let refused = world.read(&bad, 0, bad.capability.length).await.unwrap_err();
        assert_eq!(refused.code(), *code, "read, {what}: {refused}");
    }

    // What the engine itself would not send.
    let disk = v1::Replica { kind: v1::ReplicaKind::LocalDisk as i32, ..good.read_access().replica };
    let reads = [
        (ErrorCode::OutOfBounds, ReadAccess { offset: good.capability.length - 1, length: 2, ..good.read_access() }),
        (ErrorCode::OutOfBounds, ReadAccess { offset: 1 << 62, length: 2, ..good.read_access() }),
        (ErrorCode::NotSupported, ReadAccess { replica: disk, ..good.read_access() }),
        (ErrorCode::CapabilityRefused, ReadAccess { replica: good.write_access(0).replica, ..good.read_access() }),
    ];
    for (code, access) in reads {
        let (_, part) = tidepool_transport::Buffer::zeroed(access.length as usize);
        let item = ReadItem { access, into: vec![part] };
        let refused = world.engine.read(world.peer(), vec![item], deadline()).await.pop().unwrap().unwrap_err();
        assert_eq!(refused.code(), code, "{refused}");
    }
    let fresh = world.place(1000);
    let short = WriteAccess { length: 10, ..fresh.write_access(10) };
    let item = WriteItem { access: short, from: vec![vec![0; 10].into()] };
    let refused = world.engine.write(world.peer(), vec![item], deadline()).await.pop().unwrap().unwrap_err();
    assert_eq!(refused.error.code(), ErrorCode::OutOfBounds, "{refused}");

    assert!(world.get(&good, 1000).await.unwrap() == payload, "a refusal changed what was stored");
    assert_eq!(world.metric("tidepool_datanode_refusals_total", "FENCED"), 4.0);
    assert_eq!(world.metric("tidepool_datanode_open_writes", ""), 0.0);
}

/// W3: fails when `Ticket::leave` and `finish` do not verify (tried: the `plant` of the chaos harness).
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_arrives_corrupt_is_not_stored() {
    let world = World::start(1).await;
    let payload = pattern(200_000, 3);
    for at in [0usize, 10, 20, 50, 64, 80, 100, 70_000, 200_000 + 64 + 32 - 1] {
        let place = world.place(200_000);
        let mut bytes = place.stored(&payload);
        bytes[at] ^= 0x10;
        let refused = world.write(&place, bytes).await.unwrap_err();
        assert_eq!(refused.error.code(), ErrorCode::ChecksumMismatch, "{at}: {refused}");
        assert_eq!(refused.aborted, Some(place.proof(Verb::Aborted)), "{at}");
        let again = world.put(&place, &payload).await.unwrap_err();
        assert_eq!(again.aborted, Some(place.proof(Verb::Aborted)), "an aborted grant stays aborted: {again}");
    }
    // Whole and well-formed, but of another object, history or length.
    let place = world.place(200_000);
    let others = [place.with(|c| c.object.0 += 16), Place { history: History(place.history.0 ^ 1), ..place }];
    for (i, other) in others.iter().enumerate() {
        let mine = place.with(|c| c.replica.0 += 1_000 + i as u64);
        let refused = world.write(&mine, other.stored(&payload)).await.unwrap_err();
        assert_eq!(refused.error.code(), ErrorCode::ChecksumMismatch, "{refused}");
    }
    assert_eq!(world.metric("tidepool_datanode_items_total", "stored"), 0.0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_replayed_grant_gets_its_first_answer_and_writes_nothing() {
    let world = World::start(1).await;
    let (first, other) = (pattern(100_000, 1), pattern(100_000, 2));
    let place = world.place(100_000);
    let reply = world.put(&place, &first).await.unwrap();
    let replayed = world.put(&place, &other).await.unwrap();
    assert_eq!(replayed, reply);
    assert!(world.get(&place, 100_000).await.unwrap() == first, "a replay overwrote the object");

    // The extent now belongs to another replica; the first grant is still within its time.
    let next = place.with(|c| (c.object.0, c.replica.0) = (c.object.0 + 1600, c.replica.0 + 1600));
    world.put(&next, &other).await.unwrap();
    world.put(&place, &first).await.unwrap();
    assert!(world.get(&next, 100_000).await.unwrap() == other, "a replay overwrote the next object");
}

/// User report 77: 10 000 gets, ten at a time, need no more connections than stripes.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn case_077_many_gets_share_a_few_connections() {
    let world = World::start(1).await;
    let place = world.place(4096);
    let payload = pattern(4096, 5);
    world.put(&place, &payload).await.unwrap();
    let world = &world;
    let reader = || async move {
        for _ in 0..1000 {
            assert!(world.get(&place, 4096).await.is_ok());
        }
    };
    futures::future::join_all((0..10).map(|_| reader())).await;
    let connections = world.metric("tidepool_datanode_connections_total", "data");
    assert!(connections <= 2.0, "{connections} connections for one client");
}
