//! Puts and gets on a well cluster and on one with failing datanodes.
mod support;

use std::time::Duration;

use bytes::Bytes;
use support::engine::Mood;
use support::{FakeCluster, eventually, item, payload};
use tidepool_client::{
    Buffer, ErrorCode, GetInto, GetRange, GetRangeInto, PutItem, PutOptions, RemoveMode, ReplicaMode,
};
use tidepool_proto::{History, ObjectId, object, v1};

fn two_copies() -> PutOptions {
    PutOptions { replica_num: 2, ..PutOptions::default() }
}

/// User report 53: all sizes around the edges come back byte-exact.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn case_053_every_size_comes_back_byte_exact() {
    let cluster = FakeCluster::start(1, 2);
    let client = cluster.client().await;
    let mut sizes: Vec<usize> = (1..=4097).collect();
    for power in [13, 16, 17, 20, 22] {
        sizes.extend([(1 << power) - 1, 1 << power, (1 << power) + 1]);
    }
    let items: Vec<PutItem> = sizes.iter().map(|&n| item(&format!("k{n}"), &payload(n as u64, n))).collect();
    for outcome in client.put_many(items, PutOptions::default()).await {
        assert!(!outcome.unwrap().already_existed);
    }
    let keys: Vec<String> = sizes.iter().map(|n| format!("k{n}")).collect();
    for (&n, bytes) in sizes.iter().zip(client.get_many(&keys, None).await) {
        assert_eq!(bytes.unwrap(), payload(n as u64, n), "{n} bytes");
    }
    let exist = client.exist_many(&keys, None).await;
    assert!(exist.into_iter().all(|e| e.unwrap()));
    let metrics = client.metrics();
    assert_eq!(metrics.puts_stored, sizes.len() as u64);
    assert_eq!(metrics.gets_hit, sizes.len() as u64);
    assert_eq!(metrics.get_bytes, sizes.iter().map(|&n| n as u64).sum::<u64>());
}

/// A hot object is read from all of its replicas, also when batches are of a fixed size. Fails when the replica is
/// chosen by the object alone.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reads_of_one_object_are_spread_over_its_replicas() {
    let cluster = FakeCluster::start(1, 2);
    let client = cluster.client().await;
    for key in ["a", "b"] {
        client.put(key, "v", two_copies()).await.unwrap();
    }
    let reads = || [1, 2].map(|node| cluster.nodes.with(node, |node| node.reads));
    for keys in [vec!["a"], vec!["a", "b"]] {
        let before = reads();
        for _ in 0..100 {
            client.get_many(&keys, None).await.remove(0).unwrap();
        }
        let now = reads();
        for node in 0..2 {
            let share = now[node] - before[node];
            assert!(share >= 30, "node {node} served {share} of {} reads of {keys:?}", 100 * keys.len());
        }
    }
}

/// User report 40: exist says yes exactly when get returns one whole body, also for concurrent writers of other bodies.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn case_040_concurrent_puts_leave_one_whole_body() {
    let cluster = FakeCluster::start(1, 2);
    let (a, b) = (cluster.client().await, cluster.client().await);
    let keys: Vec<String> = (0..200).map(|i| format!("key-{i}")).collect();
    let size = |i: usize| 1 + (i * 37_813) % 200_000;
    let put = |client: tidepool_client::Client, seed: u64| {
        let items: Vec<PutItem> =
            keys.iter().enumerate().map(|(i, k)| item(k, &payload(seed + i as u64, size(i)))).collect();
        async move { client.put_many(items, PutOptions::default()).await }
    };
    let (by_a, by_b) = futures::join!(put(a.clone(), 1000), put(b.clone(), 2000));
    let bodies = a.get_many(&keys, None).await;
    let exist = b.exist_many(&keys, None).await;
    for (i, body) in bodies.into_iter().enumerate() {
        let (won_a, won_b) = (!by_a[i].clone().unwrap().already_existed, !by_b[i].clone().unwrap().already_existed);
        assert!(won_a != won_b, "key {i}: exactly one put wrote");
        let expected = payload(if won_a { 1000 } else { 2000 } + i as u64, size(i));
        assert_eq!(body.unwrap(), expected);
        assert!(*exist[i].as_ref().unwrap());
    }
}

/// User report 41: a put on an existing key is success and says so; the old body stays. Fails when it does not say so.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn case_041_put_on_an_existing_key_says_already_existed() {
    let cluster = FakeCluster::start(1, 1);
    let client = cluster.client().await;
    let first = client.put("a", "A", PutOptions::default()).await.unwrap();
    assert!(!first.already_existed && first.copies == 1 && first.object_id != 0);
    let second = client.put("a", "B", PutOptions::default()).await.unwrap();
    assert!(second.already_existed && second.copies == 0);
    assert_eq!(client.get("a", None).await.unwrap(), "A");
}

/// User report 46: a miss is a negative code and never zero bytes; an empty value is refused.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn case_046_misses_and_empty_values_have_their_codes() {
    let cluster = FakeCluster::start(1, 1);
    let client = cluster.client().await;
    let miss = client.get("missing", None).await.unwrap_err();
    assert_eq!((miss.code(), miss.code().mooncake()), (ErrorCode::ObjectNotFound, -704));
    assert!(miss.message().contains("missing"));
    let (_buffer, memory) = Buffer::zeroed(10);
    let into = vec![GetInto { key: "missing".into(), into: vec![memory] }];
    assert_eq!(client.get_into_many(into, None).await[0].as_ref().unwrap_err().code(), ErrorCode::ObjectNotFound);
    assert_eq!(client.stat("missing", None).await.unwrap_err().code(), ErrorCode::ObjectNotFound);
    assert!(!client.exist("missing", None).await.unwrap());
    let empty = client.put("e", "", PutOptions::default()).await.unwrap_err();
    assert_eq!((empty.code(), empty.code().mooncake()), (ErrorCode::InvalidParams, -600));
    assert_eq!(client.put("", "x", PutOptions::default()).await.unwrap_err().code(), ErrorCode::InvalidKey);
    assert_eq!(client.get(vec![b'k'; 4097], None).await.unwrap_err().code(), ErrorCode::InvalidKey);
    let removed = client.remove("missing", RemoveMode::RespectLease, None).await;
    assert_eq!(removed.unwrap_err().code(), ErrorCode::ObjectNotFound);
    let many = PutOptions { replica_num: 16, ..PutOptions::default() };
    assert_eq!(client.put("x", "y", many).await.unwrap_err().code(), ErrorCode::InvalidParams);
}

/// User report 112: each position of a batch has its own outcome and its own bytes, duplicates and bad keys too.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn case_112_duplicates_in_a_batch_have_their_own_outcomes() {
    let cluster = FakeCluster::start(1, 2);
    let client = cluster.client().await;
    let (small, large) = (payload(1, 4096), payload(2, 1 << 20));
    let items = vec![item("s", &small), item("l", &large), item("s", &payload(9, 4096)), item("", &small)];
    let put = client.put_many(items, PutOptions::default()).await;
    assert!(!put[0].as_ref().unwrap().already_existed && !put[1].as_ref().unwrap().already_existed);
    assert!(put[2].as_ref().unwrap().already_existed);
    assert_eq!(put[3].as_ref().unwrap_err().code(), ErrorCode::InvalidKey);

    let keys = ["s", "l", "s", "", "missing", "l"];
    let got = client.get_many(&keys, None).await;
    for (position, expected) in [(0, &small), (1, &large), (2, &small), (5, &large)] {
        assert_eq!(got[position].as_ref().unwrap(), expected, "position {position}");
    }
    assert_eq!(got[3].as_ref().unwrap_err().code(), ErrorCode::InvalidKey);
    assert_eq!(got[4].as_ref().unwrap_err().code(), ErrorCode::ObjectNotFound);

    let (buffers, into): (Vec<Buffer>, Vec<GetInto>) = ["s", "l", "s", "l"]
        .into_iter()
        .map(|key| {
            let (buffer, parts) = Buffer::lend(vec![0; 1 << 20], &[1000, 100_000, (1 << 20) - 101_000]).unwrap();
            (buffer, GetInto { key: key.into(), into: parts })
        })
        .unzip();
    let lengths = client.get_into_many(into, None).await;
    for ((buffer, length), expected) in buffers.into_iter().zip(lengths).zip([&small, &large, &small, &large]) {
        assert_eq!(length.unwrap(), expected.len() as u64);
        assert_eq!(buffer.take().unwrap()[..expected.len()], expected[..]);
    }
    let exist: Vec<bool> =
        client.exist_many(&["s", "s", "missing"], None).await.into_iter().map(Result::unwrap).collect();
    assert_eq!(exist, [true, true, false]);
    let removed = client.remove_many(&["s", "s", "missing"], RemoveMode::Force, None).await;
    let codes: Vec<Option<ErrorCode>> = removed.into_iter().map(|r| r.err().map(|e| e.code())).collect();
    assert_eq!(codes, [None, Some(ErrorCode::ObjectNotFound), Some(ErrorCode::ObjectNotFound)]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn values_in_parts_memory_too_small_stat_list_and_lease_return() {
    let cluster = FakeCluster::start(1, 2);
    let client = cluster.client().await;
    let value = vec![Bytes::from_static(b"one "), Bytes::new(), Bytes::from_static(b"two")];
    let put = client.put_many(vec![PutItem { key: "parts".into(), value, group: Bytes::new() }], two_copies()).await;
    assert_eq!(put[0].as_ref().unwrap().copies, 2);
    assert_eq!(client.get("parts", None).await.unwrap(), "one two");
    let (buffer, memory) = Buffer::zeroed(6);
    let small = client.get_into_many(vec![GetInto { key: "parts".into(), into: vec![memory] }], None).await;
    assert_eq!(small[0].as_ref().unwrap_err().code(), ErrorCode::BufferTooSmall);
    assert_eq!(buffer.take().unwrap(), [0; 6]);
    let stat = client.stat("parts", None).await.unwrap();
    assert_eq!((stat.length, stat.state.as_str(), stat.replicas.len()), (7, "COMPLETE", 2));
    assert!(stat.replicas[0].address.starts_with("node-") && stat.replicas[0].host_id.starts_with("host-"));
    let page = client.list(b"par", 0, b"", None).await.unwrap();
    assert_eq!((page.objects.len(), &page.objects[0].key[..], page.more), (1, &b"parts"[..], false));
    // Leases of the two reads are given back without anybody asking.
    eventually("leases are given back", || cluster.directory.with(|s| s.released.len()) == 2).await;
}

/// Bytes that do not verify are never returned: the next replica, else an error; and the leader is told. Fails without
/// the check of the blocks, without the check of the key hash, and when exist goes on listing the key.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn corrupt_and_foreign_bytes_go_to_the_next_replica_and_never_out() {
    for mood in [Mood::Corrupt, Mood::Foreign] {
        let cluster = FakeCluster::start(1, 2);
        let client = cluster.client().await;
        let value = payload(3, 70_000);
        client.put("k", value.clone(), two_copies()).await.unwrap();
        for bad in [1, 2] {
            cluster.nodes.mood(bad, mood);
            cluster.nodes.mood(3 - bad, Mood::Serve);
            for _ in 0..4 {
                assert_eq!(client.get("k", None).await.unwrap(), value, "{mood:?} on {bad}");
            }
        }
        eventually("the corruption is reported", || {
            cluster.directory.with(|s| s.reports.iter().any(|r| r.kind() == v1::read_report::Kind::Corrupt))
        })
        .await;
        cluster.nodes.mood(1, mood);
        cluster.nodes.mood(2, mood);
        let error = client.get("k", None).await.unwrap_err();
        assert_eq!(error.code(), ErrorCode::ChecksumMismatch);
        assert!(client.suspects().is_empty(), "a corrupt answer does not make a node unreachable");
        // LISTED-IS-READABLE: the directory still lists it, this client does not, until it could read it again.
        assert!(!client.exist("k", None).await.unwrap());
        cluster.nodes.mood(1, Mood::Serve);
        assert_eq!(client.get("k", None).await.unwrap(), value);
        assert!(client.exist("k", None).await.unwrap());
        assert!(client.metrics().reads_corrupt > 0);
    }
}

/// User report 43: a read that outlives its lease is right bytes or LEASE_EXPIRED, and is reported to nobody. Fails when
/// the lease is not looked at.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn case_043_a_read_past_its_lease_is_right_bytes_or_lease_expired() {
    let cluster = FakeCluster::start(1, 1);
    let client = cluster.client().await;
    let value = payload(4, 100_000);
    client.put("k", value.clone(), PutOptions::default()).await.unwrap();
    cluster.directory.with(|s| s.lease_ttl_max_ms = 20);
    cluster.nodes.mood(1, Mood::Slow(Duration::from_millis(100)));
    assert_eq!(client.get("k", None).await.unwrap(), value, "verified bytes are right whatever the time");
    // Another object's bytes lie there by now, as after reuse of the space.
    cluster.nodes.with(1, |node| {
        let stored = node.extents.values_mut().next().unwrap();
        let other = payload(5, 100_000);
        let hash = object::key_hash("", b"other");
        *stored = object::build_prefix(History(7), ObjectId(99), hash, &[&other]);
        stored.extend_from_slice(&other);
    });
    let (_buffer, memory) = Buffer::zeroed(100_000);
    let into = vec![GetInto { key: "k".into(), into: vec![memory] }];
    let range = vec![GetRange { key: "k".into(), offset: 70_000, length: 10 }];
    let errors = [
        client.get("k", None).await.err(),
        client.get_into_many(into, None).await.remove(0).err(),
        client.get_range_many(range, None).await.remove(0).err(),
    ];
    for error in errors {
        assert_eq!(error.unwrap().code(), ErrorCode::LeaseExpired);
    }
    assert!(client.metrics().reads_past_lease > 0);
    assert!(cluster.directory.with(|s| s.reports.is_empty()), "a read past its lease was reported");
}

/// User report 48: one of two targets fails in the middle of a put: the put ends, says how many copies there are,
/// and leaves no grant open.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn case_048_one_target_fails_mid_put_and_nothing_leaks() {
    for (mood, round) in [(Mood::Refuse, 0), (Mood::Fence, 1), (Mood::BlackHole, 2)] {
        let cluster = FakeCluster::start(1, 2);
        let client = cluster.client().await;
        cluster.nodes.mood(2, mood);
        let deadline = Some(Duration::from_secs(2));
        for i in 0..5 {
            let key = format!("k{round}-{i}");
            let options = PutOptions { deadline, ..two_copies() };
            let outcome = client.put(key.clone(), payload(i, 5000), options).await.unwrap();
            assert_eq!(outcome.copies, 1, "{mood:?}");
            assert_eq!(client.get(key, None).await.unwrap(), payload(i, 5000));
        }
        let strict =
            PutOptions { mode: ReplicaMode::Strict, deadline: Some(Duration::from_millis(300)), ..two_copies() };
        let error = client.put("strict", "x", strict).await.unwrap_err();
        assert!(
            matches!(error.code(), ErrorCode::NotEnoughReplicas | ErrorCode::NoSpace | ErrorCode::Fenced),
            "{mood:?}: {error}"
        );
        eventually("no grant is left open", || cluster.directory.with(|s| s.objects.values().all(|o| o.complete)))
            .await;
        assert!(client.metrics().puts_degraded >= 5);
    }
}

/// A put whose only target is dead is started over on another node, within the same call.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_put_on_a_dead_node_moves_to_another() {
    let cluster = FakeCluster::start(1, 3);
    let client = cluster.client().await;
    cluster.nodes.mood(1, Mood::Refuse);
    cluster.nodes.mood(2, Mood::BlackHole);
    for i in 0..12 {
        let options = PutOptions { deadline: Some(Duration::from_secs(4)), ..PutOptions::default() };
        let outcome = client.put(format!("k{i}"), payload(i, 100), options).await.unwrap();
        assert_eq!(outcome.copies, 1);
    }
    assert!(cluster.directory.with(|s| s.objects.values().all(|o| o.complete && o.replicas[0].node_id == 3)));
    let suspects: Vec<u64> = client.suspects().into_iter().map(|n| n.0).collect();
    assert_eq!(suspects, [1, 2]);
}

/// W3: a source that changes while it is sent fails its own item, and no other. Fails when such a put is started over.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_source_that_changes_fails_its_item_only() {
    use std::sync::atomic::{AtomicU8, Ordering};
    // Memory that another thread may write, as a Python buffer's is; each read of the slice sees what is there then.
    struct Shifty(&'static [AtomicU8; 64]);
    impl AsRef<[u8]> for Shifty {
        #[allow(unsafe_code)]
        fn as_ref(&self) -> &[u8] {
            // SAFETY: AtomicU8 has the layout of u8; the array is static.
            unsafe { std::slice::from_raw_parts(self.0.as_ptr().cast(), 64) }
        }
    }
    static SOURCE: [AtomicU8; 64] = [const { AtomicU8::new(1) }; 64];
    let cluster = FakeCluster::start(1, 1);
    let client = cluster.client().await;
    // The change comes between the checksum and the copy.
    cluster.nodes.mood(1, Mood::Hold);
    let items = vec![PutItem::new("shifty", Bytes::from_owner(Shifty(&SOURCE))), item("steady", &payload(1, 64))];
    let put = tokio::spawn({
        let client = client.clone();
        async move { client.put_many(items, PutOptions::default()).await }
    });
    eventually("the put is at the datanode", || cluster.nodes.with(1, |node| node.held) > 0).await;
    SOURCE[63].store(2, Ordering::SeqCst);
    cluster.nodes.mood(1, Mood::Serve);
    let results = put.await.unwrap();
    assert_eq!(results[0].as_ref().unwrap_err().code(), ErrorCode::ChecksumMismatch);
    assert_eq!(results[1].as_ref().unwrap().copies, 1);
    eventually("its grant is revoked", || cluster.directory.with(|s| s.objects.len() == 1)).await;
}

/// A full pool is waited for inside the deadline, and said to be full at its end.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_space_is_retried_inside_the_deadline() {
    let cluster = FakeCluster::start(1, 1);
    let client = cluster.client().await;
    let nodes = cluster.directory.with(|s| std::mem::take(&mut s.nodes));
    let options = PutOptions { deadline: Some(Duration::from_millis(200)), ..PutOptions::default() };
    let error = client.put("k", "v", options).await.unwrap_err();
    assert_eq!((error.code(), error.code().mooncake()), (ErrorCode::NoSpace, -200));
    let put = tokio::spawn({
        let client = client.clone();
        async move { client.put("k", "v", PutOptions::default()).await }
    });
    let before = cluster.directory.seen("put_start");
    eventually("it is tried again", || cluster.directory.seen("put_start") > before + 2).await;
    cluster.directory.with(|s| s.nodes = nodes);
    assert_eq!(put.await.unwrap().unwrap().copies, 1);
    let tokens = cluster.directory.with(|s| s.tokens.clone());
    assert_eq!(tokens[tokens.len() - 1], tokens[tokens.len() - 2], "a repeat of PutStart carries its token");
}

/// A put that is dropped midway gives its grant back. Fails when open grants are not revoked on drop.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cancelled_put_revokes_its_grant() {
    let cluster = FakeCluster::start(1, 1);
    let client = cluster.client().await;
    cluster.nodes.mood(1, Mood::BlackHole);
    let put = tokio::spawn({
        let client = client.clone();
        async move { client.put("k", "v", PutOptions::default()).await }
    });
    eventually("the put was granted", || cluster.directory.with(|s| s.objects.len()) == 1).await;
    put.abort();
    eventually("the grant is given back", || cluster.directory.with(|s| s.objects.is_empty())).await;
    let revoked = cluster.directory.with(|s| s.revoked.clone());
    assert_eq!(revoked[0].replicas[0].outcome(), v1::ReplicaOutcome::Unknown, "an unanswered write is unclean (W5)");
}

/// Parts of objects, near the edges of blocks, into new memory and into the caller's.
#[tokio::test]
async fn ranges_are_right_bytes_and_what_lies_outside_is_refused() {
    let cluster = FakeCluster::start(2, 2);
    let client = cluster.client().await;
    let value = payload(8, 300_000);
    let options = PutOptions { replica_num: 2, ..PutOptions::default() };
    client.put("k", value.clone(), options).await.unwrap();
    let ranges = [(0, 300_000), (0, 1), (65_535, 2), (65_536, 65_536), (131_000, 140_000), (299_999, 1)];
    let item =
        |(offset, length): (usize, usize)| GetRange { key: "k".into(), offset: offset as u64, length: length as u64 };
    let got = client.get_range_many(ranges.into_iter().map(item).collect(), None).await;
    for ((offset, length), got) in ranges.into_iter().zip(got) {
        assert_eq!(got.unwrap(), value[offset..offset + length], "{offset}+{length}");
    }
    let (buffer, mut memory) = Buffer::lend(vec![0; 140_007], &[7, 139_993, 7]).unwrap();
    let rest = memory.pop().unwrap();
    let items = vec![
        GetRangeInto { key: "k".into(), offset: 131_000, into: memory },
        GetRangeInto { key: "k".into(), offset: 299_993, into: vec![rest] },
    ];
    let filled: Vec<u64> = client.get_range_into_many(items, None).await.into_iter().map(Result::unwrap).collect();
    assert_eq!(filled, [140_000, 7]);
    let bytes = buffer.take().unwrap();
    assert_eq!(bytes[..140_000], value[131_000..271_000]);
    assert_eq!(bytes[140_000..], value[299_993..]);
    for (offset, length) in [(0, 0), (0, 300_001), (300_000, 1), (u64::MAX, 1), (1, u64::MAX)] {
        let outside = vec![GetRange { key: "k".into(), offset, length }];
        let error = client.get_range_many(outside, None).await.remove(0).unwrap_err();
        assert_eq!(error.code(), ErrorCode::InvalidParams, "{offset}+{length}");
        assert!(error.message().contains("300000 bytes"), "{error}");
    }
    let missing = vec![GetRange { key: "missing".into(), offset: 0, length: 1 }];
    let error = client.get_range_many(missing, None).await.remove(0).unwrap_err();
    assert_eq!(error.code(), ErrorCode::ObjectNotFound);
}
