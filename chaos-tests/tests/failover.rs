//! Masters that die, hang and come back, seen from a client that must not lose anything.

mod rig;

use std::time::{Duration, Instant};

use rig::{WITHIN, assert_space_adds_up, connect, expect_all, free_bytes, keys, pool, put_all, wait_for};
use tidepool_chaos_tests::admin;
use tidepool_chaos_tests::audit::remove_all;
use tidepool_chaos_tests::rogue::RogueClient;
use tidepool_client::{ErrorCode, PutOptions};

const OBJECT_BYTES: usize = 64 << 10;

/// User report 1: after the leader was killed the new one showed zero keys.
/// Fails when the standbys' data directories are wiped before the kill (nothing was replicated to them): tried.
#[tokio::test(flavor = "multi_thread")]
async fn case_001_every_acknowledged_object_survives_the_leader() {
    let mut pool = pool(|_| {}).await;
    let keys = keys("case-001", 500);
    put_all(&pool.client, &keys, OBJECT_BYTES, 1).await;
    let leader = pool.cluster.leader(WITHIN).await.unwrap();
    pool.cluster.masters[leader].kill().unwrap();
    expect_all(&pool.client, &keys, OBJECT_BYTES).await;
    assert_ne!(pool.cluster.leader(WITHIN).await.unwrap(), leader);
    // A client that never knew the old leader sees the same.
    expect_all(&connect(&pool.cluster).await, &keys, OBJECT_BYTES).await;

    pool.cluster.masters[leader].start().unwrap();
    pool.cluster.wait_caught_up(leader, WITHIN).await.unwrap();
    let digests = pool.cluster.compare_digests(WITHIN).await.unwrap();
    assert!(digests.is_equal(), "{digests:?}");

    // Nothing leaks over a failover: once everything is removed and the leases have ended, every byte is free again.
    remove_all(&pool.client, &keys.iter().map(String::as_str).collect::<Vec<_>>()).await.unwrap();
    let capacity = pool.cluster.capacity_bytes();
    wait_for("every byte to be free again", async || {
        let status = pool.cluster.leader_status(WITHIN).await.ok()?;
        assert_space_adds_up(&status);
        (free_bytes(&status) == capacity).then_some(())
    })
    .await;
}

/// User report 10: a stopped (not killed) leader kept its connections, and nobody took over. Here another takes over,
/// and the old one, when it wakes, answers nothing from its old view: requests that lay in its sockets meanwhile ask
/// for a key that exists only since. Fails when reads skip the linearizer (R2).
#[tokio::test(flavor = "multi_thread")]
async fn case_010_a_stopped_leader_is_replaced_and_answers_nothing_stale_when_it_wakes() {
    let mut pool = pool(|_| {}).await;
    put_all(&pool.client, &keys("before", 10), 1000, 1).await;
    let leader = pool.cluster.leader(WITHIN).await.unwrap();
    let old_term = admin::status(pool.cluster.masters[leader].rpc).await.unwrap().term;
    // Connected while it still answers.
    let rogue = RogueClient::open(pool.cluster.masters[leader].rpc).await.unwrap();

    let stopped = Instant::now();
    pool.cluster.masters[leader].process().unwrap().pause().unwrap();
    let during = keys("during", 20);
    put_all(&pool.client, &during, 1000, 1).await;
    let asked: Vec<_> = during
        .iter()
        .map(|key| {
            let (mut rogue, key) = (rogue.clone(), key.clone());
            tokio::spawn(async move { rogue.exists(key.as_bytes(), WITHIN).await })
        })
        .collect();
    let mut put_in_vain = rogue.clone();
    let put_in_vain = tokio::spawn(async move { put_in_vain.put_start(&[b"in-vain"], 1000, 1).await });

    // Longer than any lease of a leader, with service all the time.
    let mut round = 0;
    while stopped.elapsed() < Duration::from_secs(11) {
        put_all(&pool.client, &keys(&format!("while/{round}"), 10), 1000, 1).await;
        round += 1;
    }
    let mut others: Vec<usize> = (0..3).filter(|&at| at != leader).collect();
    let new_leader = wait_for("a leader among the others", async || {
        for &at in &others {
            if admin::status(pool.cluster.masters[at].rpc).await.is_ok_and(|status| status.role == "leader") {
                return Some(at);
            }
        }
        None
    })
    .await;
    others.clear();

    pool.cluster.masters[leader].process().unwrap().resume().unwrap();
    for (key, answer) in during.iter().zip(asked) {
        match answer.await.unwrap() {
            Ok(present) => assert!(present, "the woken leader reported {key} absent, which was acknowledged meanwhile"),
            Err(error) => assert!(is_refusal(&error), "{key}: {error:#}"),
        }
    }
    if let Ok(grants) = put_in_vain.await.unwrap() {
        let granted = grants.iter().filter(|grant| grant.error.is_none()).count();
        assert_eq!(granted, 0, "the woken leader granted space that the quorum never agreed to");
    }
    wait_for("the woken leader to step down", async || {
        let status = admin::status(pool.cluster.masters[leader].rpc).await.ok()?;
        (status.role == "standby" && status.term > old_term).then_some(())
    })
    .await;
    assert_eq!(pool.cluster.leader(WITHIN).await.unwrap(), new_leader, "waking up must not depose the new leader");
    pool.cluster.wait_caught_up(leader, WITHIN).await.unwrap();
    assert!(pool.cluster.compare_digests(WITHIN).await.unwrap().is_equal());
}

/// A refusal that a client understands: it does not lead, or it cannot tell in time.
fn is_refusal(error: &anyhow::Error) -> bool {
    match error.downcast_ref::<tidepool_client::Error>() {
        Some(error) => {
            matches!(error.code(), ErrorCode::NotLeader | ErrorCode::Unavailable | ErrorCode::DeadlineExceeded)
        }
        // The transport's own deadline, or a connection that broke.
        None => true,
    }
}

/// User report 15: masters came back and the clients had to be restarted. Here every master is killed and started again
/// under a client that stays. Fails when the client keeps its first connection (or member) for good.
#[tokio::test(flavor = "multi_thread")]
async fn case_015_a_client_outlives_a_restart_of_the_whole_control_plane() {
    let mut pool = pool(|_| {}).await;
    let keys = keys("case-015", 50);
    put_all(&pool.client, &keys, OBJECT_BYTES, 1).await;
    for master in &mut pool.cluster.masters {
        master.kill().unwrap();
    }
    // In flight while there is no control plane at all; it must end well once there is one again.
    let client = pool.client.clone();
    let waiting = tokio::spawn(async move {
        let options = PutOptions { deadline: Some(WITHIN), ..PutOptions::default() };
        client.put("put-without-a-quorum", vec![7u8; 100], options).await
    });
    for master in &mut pool.cluster.masters {
        master.start().unwrap();
    }
    pool.cluster.wait_serving(WITHIN).await.unwrap();
    waiting.await.unwrap().expect("a put that waited for the quorum");
    expect_all(&pool.client, &keys, OBJECT_BYTES).await;
}

/// User report 16: after a restart of the metadata server its data was gone and a new node could not join. Here the whole
/// control plane restarts under two living datanodes, a third joins, and everything is readable and writable.
/// Fails when masters start from empty data directories: tried.
#[tokio::test(flavor = "multi_thread")]
async fn case_016_restarted_masters_know_everything_and_a_new_datanode_joins() {
    let mut pool = pool(|_| {}).await;
    let old = keys("case-016-old", 100);
    put_all(&pool.client, &old, OBJECT_BYTES, 1).await;
    let before = pool.cluster.leader_status(WITHIN).await.unwrap();
    for master in &mut pool.cluster.masters {
        master.kill().unwrap();
    }
    for master in &mut pool.cluster.masters {
        master.start().unwrap();
    }
    pool.cluster.wait_serving(WITHIN).await.unwrap();
    pool.cluster.add_datanode().unwrap();
    pool.cluster.wait_serving(WITHIN).await.unwrap();

    let after = pool.cluster.leader_status(WITHIN).await.unwrap();
    let identity = |status: &tidepool_proto::v1::StatusResponse| {
        status.identity.as_ref().map(|identity| (identity.cluster_uuid.clone(), identity.history)).unwrap()
    };
    assert_eq!(identity(&before), identity(&after), "a restart is not a new life of the directory");
    assert_eq!(before.objects, after.objects);
    for node in &before.nodes {
        assert!(
            after.nodes.iter().any(|n| n.node_id == node.node_id && n.incarnation == node.incarnation && !n.suspect),
            "datanode {} had to register again",
            node.node_id
        );
    }
    let newcomer = connect(&pool.cluster).await;
    expect_all(&newcomer, &old, OBJECT_BYTES).await;
    let new = keys("case-016-new", 100);
    put_all(&newcomer, &new, OBJECT_BYTES, 3).await;
    expect_all(&pool.client, &new, OBJECT_BYTES).await;
}
