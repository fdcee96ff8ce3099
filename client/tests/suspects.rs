//! Datanodes that fail a client: not asked while others are there, told to the masters, asked again as a last resort.
mod support;

use std::time::{Duration, Instant};

use bytes::Bytes;
use support::engine::Mood;
use support::{FakeCluster, eventually, item, payload};
use tidepool_client::{Client, ClientOptions, ErrorCode, PutOptions};
use tidepool_proto::{Error, NodeId};
use tokio::task::JoinHandle;

const SHORT: Option<Duration> = Some(Duration::from_millis(400));

/// User report 50: the first failed get makes the node suspect; later gets do not ask it, exist says no for what only
/// it holds, other keys are untouched, and a false alarm heals by itself.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn case_050_a_dead_node_costs_one_slow_call() {
    for mood in [Mood::Refuse, Mood::BlackHole] {
        let cluster = FakeCluster::start(1, 2);
        let client = cluster.client().await;
        let keys: Vec<String> = (0..40).map(|i| format!("k{i}")).collect();
        let items = keys.iter().map(|k| item(k, &payload(1, 100))).collect();
        for outcome in client.put_many(items, PutOptions::default()).await {
            outcome.unwrap();
        }
        let on_node = |node: u64| {
            let held = |k: &&String| cluster.directory.with(|s| s.objects[k.as_bytes()].replicas[0].node_id == node);
            keys.iter().filter(held).cloned().collect::<Vec<String>>()
        };
        let (dead, alive) = (on_node(1), on_node(2));
        assert!(!dead.is_empty() && !alive.is_empty());
        cluster.nodes.mood(1, mood);
        let first = client.get(&dead[0], SHORT).await.unwrap_err();
        assert!(first.code().is_retryable(), "{first}");
        assert_eq!(client.suspects().len(), 1, "{mood:?}");
        eventually("the leader is told", || cluster.directory.with(|s| !s.reports.is_empty())).await;
        // A node that is asked would hold the call until its deadline of ten seconds.
        let started = Instant::now();
        for key in &dead {
            assert_eq!(client.get(key, None).await.unwrap_err().code(), ErrorCode::ReplicaUnavailable);
            assert!(!client.exist(key, None).await.unwrap(), "exist lists what get cannot read");
        }
        assert!(started.elapsed() < Duration::from_secs(5), "suspect nodes were asked");
        for key in &alive {
            assert_eq!(client.get(key, None).await.unwrap(), payload(1, 100));
            assert!(client.exist(key, None).await.unwrap());
        }
        client.put("new", "v", PutOptions::default()).await.unwrap();
        cluster.nodes.mood(1, Mood::Serve);
        eventually("the node is found well", || client.suspects().is_empty()).await;
        assert!(client.exist(&dead[0], None).await.unwrap());
        assert_eq!(client.get(&dead[0], None).await.unwrap(), payload(1, 100));
    }
}

/// The client leaves its suspects alone also when the master names them. Fails when suspects are asked, also when they are turned to
/// before any other copy was tried.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_suspect_is_not_asked_although_the_master_names_it() {
    let cluster = FakeCluster::start(1, 1);
    let client = cluster.client().await;
    client.put("k", "v", PutOptions::default()).await.unwrap();
    cluster.directory.with(|s| s.deaf_to_suspects = true);
    cluster.nodes.mood(1, Mood::BlackHole);
    client.get("k", SHORT).await.unwrap_err();
    // A node that is asked would hold the call until its deadline of ten seconds.
    let started = Instant::now();
    assert_eq!(client.get("k", None).await.unwrap_err().code(), ErrorCode::ReplicaUnavailable);
    assert!(started.elapsed() < Duration::from_secs(5), "the suspect was asked");
}

/// All copies but one are on suspects, and the datanode of that one says nothing: the read turns to a suspect before its time is over.
/// Tried with all of its time given to that node, and without asking for suspects: fails.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_read_turns_to_a_suspect_when_the_last_other_node_hangs() {
    for copies in [2u32, 3] {
        let cluster = FakeCluster::start(1, copies as usize);
        let client = cluster.client().await;
        client.put("k", payload(1, 1000), PutOptions { replica_num: copies, ..PutOptions::default() }).await.unwrap();
        let suspects = 2..=u64::from(copies);
        suspects.clone().for_each(|node| cluster.nodes.mood(node, Mood::Refuse));
        while client.suspects().len() < suspects.clone().count() {
            assert_eq!(client.get("k", None).await.unwrap(), payload(1, 1000));
        }
        cluster.nodes.mood(1, Mood::Hold);
        let read = hold_up(&cluster, &client, 1).await;
        // Well again, and no probe finds it so: the read has to try.
        cluster.nodes.mood(2, Mood::DeafToProbes);
        assert_eq!(read.await.unwrap().unwrap(), payload(1, 1000), "{copies} copies");
    }
}

/// So it does when the other copy's node failed within the same read. Tried with only the copies counted that were not tried yet: fails.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_read_turns_back_to_a_node_that_refused_when_the_other_one_hangs() {
    let cluster = FakeCluster::start(1, 2);
    let near = ClientOptions { host_id: "host-1".to_owned(), ..cluster.options() };
    let client = Client::connect(near).await.unwrap();
    client.put("k", payload(1, 1000), PutOptions { replica_num: 2, ..PutOptions::default() }).await.unwrap();
    cluster.nodes.mood(1, Mood::Refuse);
    cluster.nodes.mood(2, Mood::Hold);
    let read = hold_up(&cluster, &client, 2).await;
    cluster.nodes.mood(1, Mood::DeafToProbes);
    assert_eq!(read.await.unwrap().unwrap(), payload(1, 1000));
}

/// Where no suspect has a copy, the only node that has one is given the whole time. Tried with half of it whenever anybody is
/// suspect: fails.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_single_copy_is_waited_for_whoever_is_suspect() {
    let cluster = FakeCluster::start(1, 2);
    let client = cluster.client().await;
    client.put("both", "b", PutOptions { replica_num: 2, ..PutOptions::default() }).await.unwrap();
    client.put("one", "v", PutOptions::default()).await.unwrap();
    let holder = cluster.directory.with(|s| s.objects[&b"one"[..]].replicas[0].node_id);
    cluster.nodes.mood(3 - holder, Mood::Refuse);
    while client.suspects().is_empty() {
        client.get("both", None).await.unwrap();
    }
    cluster.nodes.mood(holder, Mood::Slow(Duration::from_millis(2_500)));
    assert_eq!(client.get("one", Some(Duration::from_secs(4))).await.unwrap(), "v");
}

/// A key whose only copy is on a node that says nothing is waited for to the end. The other keys of its batch have turned to other
/// copies by then, those on suspects included. Tried with all of them read side by side: fails.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_key_with_a_single_copy_holds_up_no_other_key_of_its_batch() {
    let cluster = FakeCluster::start(1, 3);
    let client = cluster.client().await;
    for key in ["well", "suspect"] {
        client.put(key, payload(1, 1000), PutOptions { replica_num: 3, ..PutOptions::default() }).await.unwrap();
    }
    client.put("one", "v", PutOptions::default()).await.unwrap();
    let holder = cluster.directory.with(|s| {
        let holder = s.objects[&b"one"[..]].replicas[0].node_id;
        let other = holder % 3 + 1;
        s.objects.get_mut(&b"well"[..]).unwrap().replicas.retain(|r| r.node_id == holder || r.node_id == other);
        s.objects.get_mut(&b"suspect"[..]).unwrap().replicas.retain(|r| r.node_id != other);
        holder
    });
    let suspect = 6 - holder - (holder % 3 + 1);
    cluster.nodes.mood(suspect, Mood::Refuse);
    while client.suspects().is_empty() {
        client.get("suspect", None).await.unwrap();
    }
    cluster.nodes.mood(holder, Mood::Hold);
    let reader = client.clone();
    let keys = ["one", "well", "suspect"];
    let read = tokio::spawn(async move { reader.get_many(&keys, Some(Duration::from_secs(4))).await });
    eventually("the node is asked", || cluster.nodes.with(holder, |n| n.held) > 0).await;
    cluster.nodes.mood(suspect, Mood::DeafToProbes);
    let results = read.await.unwrap();
    assert_eq!(results[0].as_ref().unwrap_err().code(), ErrorCode::DeadlineExceeded);
    for result in &results[1..] {
        assert_eq!(*result.as_ref().unwrap(), payload(1, 1000));
    }
}

/// A read of "k" that a node keeps waiting.
async fn hold_up(cluster: &FakeCluster, client: &Client, node: u64) -> JoinHandle<Result<Bytes, Error>> {
    let reader = client.clone();
    let read = tokio::spawn(async move { reader.get("k", Some(Duration::from_secs(4))).await });
    eventually("the node is asked", || cluster.nodes.with(node, |n| n.held) > 0).await;
    read
}

/// User report 96: whatever nodes do, a key that exists is readable, or does not exist any more after the first
/// failed get. Fails when suspects are not told to the master.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn case_096_listed_is_readable_or_not_listed_any_more() {
    let cluster = FakeCluster::start(1, 3);
    let client = cluster.client().await;
    for i in 0..12u64 {
        let options = PutOptions { replica_num: 1 + (i % 2) as u32, ..PutOptions::default() };
        client.put(format!("k{i}"), payload(i, 1000), options).await.unwrap();
    }
    for round in 0..24u64 {
        for node in 1..=3u64 {
            let mood = if (round >> (node - 1)) & 1 == 1 { Mood::Refuse } else { Mood::Serve };
            cluster.nodes.mood(node, mood);
        }
        // Which, not how many: one that was found well between a failed get and the look after it would be listed, and rightly so.
        let is_well = |node: &NodeId| (round >> (node.0 - 1)) & 1 == 0;
        eventually("well nodes are not suspect", || !client.suspects().iter().any(is_well)).await;
        for i in 0..12u64 {
            let key = format!("k{i}");
            if !client.exist(&key, None).await.unwrap() {
                continue;
            }
            match client.get(&key, None).await {
                Ok(bytes) => assert_eq!(bytes, payload(i, 1000)),
                Err(_) => {
                    assert!(!client.exist(&key, None).await.unwrap(), "round {round}: {key} is listed, not readable")
                }
            }
        }
    }
}
