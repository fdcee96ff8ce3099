//! Copies, moves, drains and healing with real datanodes, and what users saw when nodes came and went.

mod rig;

use std::time::{Duration, Instant};

use rig::{Pool, WITHIN, assert_space_adds_up, expect_all, keys, pool, put_all, wait_for};
use tidepool_chaos_tests::admin;
use tidepool_client::{PutItem, PutOptions, RemoveMode};
use tidepool_proto::Error;
use tidepool_proto::v1::{CreateTaskRequest, ListTasksRequest, TaskKind, TaskStatus};

const OBJECT_BYTES: usize = 64 << 10;

/// Asks the leader for a task.
async fn create(pool: &mut Pool, request: CreateTaskRequest) -> u64 {
    let leader = pool.cluster.leader(WITHIN).await.unwrap();
    let mut admin = admin::connect(&pool.cluster.masters[leader].rpc).await.unwrap();
    let request = CreateTaskRequest { token: rand::random::<[u8; 16]>().to_vec().into(), ..request };
    let created = admin.create_task(request).await.unwrap().into_inner();
    assert_eq!(created.error, None);
    created.task_id
}

/// Waits until a task has ended, under whichever leader.
async fn ended(pool: &mut Pool, task_id: u64) -> TaskStatus {
    let give_up = Instant::now() + WITHIN;
    loop {
        assert!(Instant::now() < give_up, "task {task_id} did not end");
        tokio::time::sleep(Duration::from_millis(50)).await;
        let Ok(leader) = pool.cluster.leader(WITHIN).await else { continue };
        let Ok(mut admin) = admin::connect(&pool.cluster.masters[leader].rpc).await else { continue };
        let Ok(answer) = admin.list_tasks(ListTasksRequest { task_id }).await else { continue };
        let answer = answer.into_inner();
        match (answer.error, answer.tasks.into_iter().next()) {
            (None, Some(task)) if task.state != "RUNNING" => return task,
            (None, _) => {}
            (Some(error), _) => tracing::debug!(error = %Error::from(error), "asking again"),
        }
    }
}

/// Segment ids by datanode, in the order of the cluster.
async fn segments(pool: &mut Pool) -> Vec<String> {
    let status = pool.cluster.leader_status(WITHIN).await.unwrap();
    let of = |address: String| {
        let node = status.nodes.iter().find(|node| node.address == address).expect("registered").node_id;
        status.segments.iter().find(|segment| segment.node_id == node).expect("mounted").segment_id.to_string()
    };
    pool.cluster.datanodes.iter().map(|node| of(node.rpc.to_string())).collect()
}

async fn holders(pool: &Pool, key: &str) -> Vec<String> {
    let stat = pool.client.stat(key, Some(WITHIN)).await.unwrap();
    stat.replicas.iter().map(|replica| replica.replica.segment_id.to_string()).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_copy_and_a_move_make_real_replicas() {
    let mut pool = pool(|options| options.datanodes = 3).await;
    let keys = keys("copied", 1);
    put_all(&pool.client, &keys, 5 << 20, 1).await;
    let segments = segments(&mut pool).await;
    let first = holders(&pool, &keys[0]).await.remove(0);
    let others: Vec<String> = segments.iter().filter(|segment| **segment != first).cloned().collect();
    let copy = CreateTaskRequest {
        kind: TaskKind::Copy as i32,
        key: keys[0].clone().into(),
        target_segments: vec![others[0].clone()],
        ..Default::default()
    };
    let copy = create(&mut pool, copy).await;
    let copied = ended(&mut pool, copy).await;
    assert_eq!((copied.state.as_str(), copied.moved, copied.left), ("SUCCEEDED", 1, 0), "{}", copied.message);
    let mut now = holders(&pool, &keys[0]).await;
    now.sort_unstable();
    let mut expected = vec![first.clone(), others[0].clone()];
    expected.sort_unstable();
    assert_eq!(now, expected);
    let moved = CreateTaskRequest {
        kind: TaskKind::Move as i32,
        key: keys[0].clone().into(),
        source_segments: vec![first.clone()],
        target_segments: vec![others[1].clone()],
        ..Default::default()
    };
    let moved = create(&mut pool, moved).await;
    let moved = ended(&mut pool, moved).await;
    assert_eq!(moved.state, "SUCCEEDED", "{}", moved.message);
    let mut now = holders(&pool, &keys[0]).await;
    now.sort_unstable();
    let mut expected = others.clone();
    expected.sort_unstable();
    assert_eq!(now, expected, "it left where it was and is where it went");
    // What the tasks made is read from the new places: the node of the first one is gone.
    let at = segments.iter().position(|segment| *segment == first).unwrap();
    pool.cluster.datanodes[at].kill().unwrap();
    expect_all(&pool.client, &keys, 5 << 20).await;
}

/// User report 72: a drain said that it succeeded and had left objects behind. Here it survives its leader, and what it
/// says is what is there.
#[tokio::test(flavor = "multi_thread")]
async fn case_072_a_drain_survives_its_leader_and_leaves_nothing_behind() {
    let mut pool = pool(|options| options.datanodes = 3).await;
    let keys = keys("drained", 300);
    put_all(&pool.client, &keys, OBJECT_BYTES, 1).await;
    let segments = segments(&mut pool).await;
    let drain = CreateTaskRequest {
        kind: TaskKind::Drain as i32,
        source_segments: vec![segments[0].clone()],
        concurrency: 2,
        ..Default::default()
    };
    let drain = create(&mut pool, drain).await;
    let leader = pool.cluster.leader(WITHIN).await.unwrap();
    pool.cluster.masters[leader].kill().unwrap();
    let task = ended(&mut pool, drain).await;
    assert_eq!((task.state.as_str(), task.left), ("SUCCEEDED", 0), "{}", task.message);
    assert!(task.moved > 0, "the node held some of the objects");
    for key in &keys {
        assert!(!holders(&pool, key).await.contains(&segments[0]), "{key} is still there");
    }
    pool.cluster.datanodes[0].kill().unwrap();
    expect_all(&pool.client, &keys, OBJECT_BYTES).await;
}

/// A drain that cannot move everything says so, with the number.
#[tokio::test(flavor = "multi_thread")]
async fn a_drain_without_room_fails_and_counts_what_is_left() {
    let mut pool = pool(|options| options.segment_bytes = 32 << 20).await;
    let weights = keys("weights", 100);
    for batch in weights.chunks(20) {
        let items = batch.iter().map(|key| PutItem::new(key.clone(), vec![7u8; 500_000])).collect();
        let options = PutOptions { hard_pin: true, deadline: Some(WITHIN), ..PutOptions::default() };
        for result in pool.client.put_many(items, options).await {
            result.unwrap();
        }
    }
    let segments = segments(&mut pool).await;
    let drain = CreateTaskRequest {
        kind: TaskKind::Drain as i32,
        source_segments: vec![segments[0].clone()],
        ..Default::default()
    };
    let drain = create(&mut pool, drain).await;
    let task = ended(&mut pool, drain).await;
    assert_eq!(task.state, "FAILED");
    assert!(task.left > 0 && task.message.contains("could not be moved"), "{task:?}");
    let mut still = 0;
    for key in &weights {
        still += u64::from(holders(&pool, key).await.contains(&segments[0]));
    }
    assert_eq!(still, task.left, "it counts what is still there");
}

/// What lost a copy with its node gets one again.
#[tokio::test(flavor = "multi_thread")]
async fn lost_copies_are_made_again() {
    let mut pool = pool(|options| {
        options.datanodes = 3;
        options.master_arguments =
            ["--node-suspect-timeout", "1s", "--node-forget-timeout", "2s"].map(String::from).to_vec();
    })
    .await;
    let keys = keys("healed", 60);
    put_all(&pool.client, &keys, OBJECT_BYTES, 2).await;
    pool.cluster.datanodes[0].kill().unwrap();
    wait_for("every object to have two copies again", async || {
        let stats = pool.client.stat_many(&keys, Some(WITHIN)).await;
        let whole = |stat: &Result<tidepool_client::ObjectStat, Error>| {
            stat.as_ref().is_ok_and(|stat| stat.replicas.iter().filter(|r| r.replica.listed).count() == 2)
        };
        stats.iter().all(whole).then_some(())
    })
    .await;
    expect_all(&pool.client, &keys, OBJECT_BYTES).await;
    assert_space_adds_up(&pool.cluster.leader_status(WITHIN).await.unwrap());
}

/// User report 97: puts timed out after a node came back under another port.
#[tokio::test(flavor = "multi_thread")]
async fn case_097_puts_go_on_while_a_node_restarts() {
    let mut pool = pool(|_| {}).await;
    put_all(&pool.client, &keys("before", 20), OBJECT_BYTES, 1).await;
    pool.cluster.datanodes[0].kill().unwrap();
    pool.cluster.datanodes[0].start().unwrap();
    for key in keys("after", 100) {
        let began = Instant::now();
        put_all(&pool.client, &[key], OBJECT_BYTES, 1).await;
        assert!(began.elapsed() < Duration::from_secs(5), "a put took {:?}", began.elapsed());
    }
    pool.cluster.wait_serving(WITHIN).await.unwrap();
    expect_all(&pool.client, &keys("after", 100), OBJECT_BYTES).await;
}

/// User report 99: stopping one of three nodes broke the others.
#[tokio::test(flavor = "multi_thread")]
async fn case_099_a_node_that_stops_takes_only_its_own_keys() {
    let mut pool = pool(|options| options.datanodes = 3).await;
    let keys = keys("case-099", 150);
    put_all(&pool.client, &keys, OBJECT_BYTES, 1).await;
    let segments = segments(&mut pool).await;
    let mut kept = Vec::new();
    for key in &keys {
        if !holders(&pool, key).await.contains(&segments[0]) {
            kept.push(key.clone());
        }
    }
    assert!(kept.len() < keys.len() && !kept.is_empty());
    pool.cluster.datanodes[0].kill().unwrap();
    put_all(&pool.client, &rig::keys("more", 50), OBJECT_BYTES, 1).await;
    expect_all(&pool.client, &kept, OBJECT_BYTES).await;
    expect_all(&pool.client, &rig::keys("more", 50), OBJECT_BYTES).await;
}

/// User report 32: an empty node that joins was sent every new put.
#[tokio::test(flavor = "multi_thread")]
async fn case_032_a_newcomer_to_a_full_pool_takes_at_most_three_times_its_share() {
    let mut pool = pool(|options| {
        options.datanodes = 4;
        options.segment_bytes = 32 << 20;
    })
    .await;
    put_all(&pool.client, &keys("old", 1_900), OBJECT_BYTES, 1).await;
    let newcomer = pool.cluster.add_datanode().unwrap();
    pool.cluster.wait_serving(WITHIN).await.unwrap();
    let new = keys("new", 300);
    put_all(&pool.client, &new, OBJECT_BYTES, 1).await;
    let segments = segments(&mut pool).await;
    let mut there = 0;
    for key in &new {
        there += usize::from(holders(&pool, key).await.contains(&segments[newcomer]));
    }
    assert!((1..=3 * new.len() / 5).contains(&there), "{there} of {} went to one node of five", new.len());
}

/// User report 47: the value disappeared when its writer exited.
#[tokio::test(flavor = "multi_thread")]
async fn case_047_a_value_outlives_its_writer() {
    let pool = pool(|_| {}).await;
    let keys = keys("case-047", 10);
    let writer = rig::connect(&pool.cluster).await;
    put_all(&writer, &keys, OBJECT_BYTES, 1).await;
    drop(writer);
    expect_all(&pool.client, &keys, OBJECT_BYTES).await;
}

/// User report 102: a load without a deadline costs more than computing again.
#[tokio::test(flavor = "multi_thread")]
async fn case_102_a_get_returns_by_its_deadline_with_what_arrived() {
    let mut pool = pool(|_| {}).await;
    let keys = keys("case-102", 40);
    put_all(&pool.client, &keys, OBJECT_BYTES, 1).await;
    let segments = segments(&mut pool).await;
    let mut slow = Vec::new();
    for key in &keys {
        slow.push(holders(&pool, key).await.contains(&segments[0]));
    }
    pool.cluster.datanodes[0].process().unwrap().pause().unwrap();
    let deadline = Duration::from_millis(250);
    let began = Instant::now();
    let results = pool.client.get_many(&keys, Some(deadline)).await;
    let took = began.elapsed();
    pool.cluster.datanodes[0].process().unwrap().resume().unwrap();
    assert!(took < deadline + Duration::from_millis(250), "the call took {took:?}");
    for ((key, result), slow) in keys.iter().zip(results).zip(slow) {
        assert_eq!(result.is_err(), slow, "{key}: {:?}", result.err());
    }
}

/// A client that is silent for longer than sessions live says hello again by itself, and puts and removes as before.
/// When each item was refused instead of the call, no client took that for the loss of its session, and none wrote again.
#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_was_idle_for_long_writes_again() {
    let pool = pool(|options| {
        options.master_arguments = vec!["--session-idle-timeout".into(), "1s".into()];
    })
    .await;
    let keys = keys("idle", 20);
    put_all(&pool.client, &keys, OBJECT_BYTES, 1).await;
    // The silence is what is tried: several times what a session lives.
    tokio::time::sleep(Duration::from_secs(4)).await;
    let removed = pool.client.remove_many(&keys[..10], RemoveMode::Force, Some(WITHIN)).await;
    assert!(removed.iter().all(Result::is_ok), "{removed:?}");
    put_all(&pool.client, &keys[..10], OBJECT_BYTES, 1).await;
    expect_all(&pool.client, &keys, OBJECT_BYTES).await;
}
