//! Replicas that the leader makes and drops by itself, and drain jobs over HTTP, with real datanodes.

mod rig;

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use rig::{Pool, WITHIN, assert_space_adds_up, expect_all, keys, pool, put_all, wait_for};
use serde_json::Value;
use tidepool_chaos_tests::admin;
use tidepool_proto::v1::{CreateTaskRequest, ListTasksRequest, TaskKind};

const OBJECT_BYTES: usize = 64 << 10;
const WINDOW: Duration = Duration::from_secs(2);

async fn replicas(pool: &Pool, key: &str) -> usize {
    pool.client.stat(key, Some(WITHIN)).await.map_or(0, |stat| stat.replicas.len())
}

async fn read(pool: &Pool, key: &str, times: usize) {
    for _ in 0..times {
        pool.client.get(key.to_owned(), Some(WITHIN)).await.unwrap();
    }
}

/// The new leader knows which replicas are extra from the directory alone: it keeps them while their object is read, and
/// drops them when it is cold. Fails when a new leader takes everything for cold at once.
#[tokio::test(flavor = "multi_thread")]
async fn a_hot_object_keeps_its_extra_replica_through_a_failover_and_loses_it_when_cold() {
    let mut pool = pool(|options| {
        options.datanodes = 3;
        let window = format!("{}s", WINDOW.as_secs());
        let arguments =
            ["--dynamic-replication", "enforce", "--dynamic-replication-reads", "20", "--dynamic-replication-window"];
        options.master_arguments = arguments.into_iter().map(String::from).chain([window]).collect();
    })
    .await;
    let keys = keys("hot", 3);
    put_all(&pool.client, &keys, OBJECT_BYTES, 1).await;
    wait_for("the hot object to have a second replica", async || {
        read(&pool, &keys[0], 20).await;
        (replicas(&pool, &keys[0]).await == 2).then_some(())
    })
    .await;
    assert_eq!((replicas(&pool, &keys[1]).await, replicas(&pool, &keys[2]).await), (1, 1));
    let leader = pool.cluster.leader(WITHIN).await.unwrap();
    pool.cluster.masters[leader].kill().unwrap();
    let until = Instant::now() + 4 * WINDOW;
    while Instant::now() < until {
        read(&pool, &keys[0], 20).await;
        assert_eq!(replicas(&pool, &keys[0]).await, 2, "a failover lost, or doubled, the extra replica");
    }
    wait_for("the extra replica to go", async || (replicas(&pool, &keys[0]).await == 1).then_some(())).await;
    expect_all(&pool.client, &keys, OBJECT_BYTES).await;
    assert_space_adds_up(&pool.cluster.leader_status(WITHIN).await.unwrap());
}

/// Asks a master's HTTP port, for JSON.
fn http(address: SocketAddr, method: &str, path: &str, body: &str) -> (u16, Value) {
    let (status, body) = ask(address, method, path, body);
    (status, serde_json::from_str(&body).unwrap_or_else(|error| panic!("{error}: {body}")))
}

fn ask(address: SocketAddr, method: &str, path: &str, body: &str) -> (u16, String) {
    let mut stream = TcpStream::connect(address).expect("the HTTP port answers");
    stream.set_read_timeout(Some(WITHIN)).expect("timeout");
    let length = body.len();
    let request = format!(
        "{method} {path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\nContent-Length: {length}\r\n\r\n{body}"
    );
    stream.write_all(request.as_bytes()).expect("request");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).expect("answer");
    let status = answer.split(' ').nth(1).and_then(|code| code.parse().ok()).expect("a status");
    (status, answer.split_once("\r\n\r\n").map_or(String::new(), |(_, body)| body.to_owned()))
}

/// Any master takes a drain job, and answers for it; the same token is the same job.
#[tokio::test(flavor = "multi_thread")]
async fn drain_jobs_are_asked_for_at_any_master() {
    let mut pool = pool(|options| options.datanodes = 3).await;
    let keys = keys("drained", 60);
    put_all(&pool.client, &keys, OBJECT_BYTES, 1).await;
    let status = pool.cluster.leader_status(WITHIN).await.unwrap();
    let segment = &status.segments[0];
    let masters: Vec<SocketAddr> = pool.cluster.masters.iter().map(|master| master.http).collect();
    for &master in &masters {
        // A pool serves as soon as a majority does.
        wait_for("the role to be up", async || (ask(master, "GET", "/api/v1/drain_jobs", "").0 == 200).then_some(()))
            .await;
    }
    let body = format!(
        r#"{{"segments": ["{}"], "max_concurrency": 8, "token": "00112233445566778899aabbccddeeff"}}"#,
        segment.segment_id
    );
    let jobs: Vec<String> = masters
        .iter()
        .map(|&master| {
            let (status, created) = http(master, "POST", "/api/v1/drain_jobs", &body);
            assert_eq!((status, &created["success"], &created["status"]), (200, &true.into(), &"CREATED".into()));
            created["job_id"].as_str().expect("a job id").to_owned()
        })
        .collect();
    assert!(jobs.iter().all(|job| *job == jobs[0]), "{jobs:?}");
    for &master in &masters {
        let path = format!("/api/v1/drain_jobs/query?job_id={}", jobs[0]);
        let job = wait_for("the job to end", async || {
            let (status, job) = http(master, "GET", &path, "");
            assert_eq!(status, 200, "{job}");
            (job["status_name"] != "RUNNING").then_some(job)
        })
        .await;
        assert_eq!(
            (&job["status_name"], &job["status"], &job["left_units"]),
            (&"SUCCEEDED".into(), &3.into(), &0.into())
        );
        assert!(job["succeeded_units"].as_u64() > Some(0) && job["migrated_bytes"].as_u64() > Some(0), "{job}");
        let (_, all) = http(master, "GET", "/api/v1/drain_jobs", "");
        assert_eq!(all["jobs"].as_array().map(Vec::len), Some(1));
        let (status, refused) = http(master, "POST", &format!("/api/v1/drain_jobs/cancel?job_id={}", jobs[0]), "");
        assert_eq!((status, &refused["success"]), (400, &false.into()), "it has ended");
        let (status, unknown) = http(master, "GET", "/api/v1/drain_jobs/query?job_id=7", "");
        assert_eq!((status, &unknown["error_code"]), (404, &(-1400).into()), "{unknown}");
        let (status, wrong) = http(master, "POST", "/api/v1/drain_jobs", r#"{"segments": ["no such"]}"#);
        assert_eq!((status, &wrong["error_code"]), (404, &(-101).into()), "{wrong}");
        assert_eq!(http(master, "POST", "/api/v1/drain_jobs", "garbage").0, 400);
        assert_eq!(http(master, "GET", "/api/v1/drain_jobs/query", "").0, 400);
    }
    expect_all(&pool.client, &keys, OBJECT_BYTES).await;
}

/// How many tiny objects a second a drain moves, by concurrency.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "measures; run alone"]
async fn measure_a_drain_of_tiny_objects() {
    for (concurrency, count) in [(4, 400), (64, 4_000)] {
        let mut pool = pool(|_| {}).await;
        put_all(&pool.client, &keys("tiny", count), 100, 1).await;
        let status = pool.cluster.leader_status(WITHIN).await.unwrap();
        let leader = pool.cluster.leader(WITHIN).await.unwrap();
        let mut admin = admin::connect(&pool.cluster.masters[leader].rpc).await.unwrap();
        let began = Instant::now();
        let drain = CreateTaskRequest {
            kind: TaskKind::Drain as i32,
            source_segments: vec![status.segments[0].segment_id.to_string()],
            concurrency,
            token: rand::random::<[u8; 16]>().to_vec().into(),
            ..Default::default()
        };
        let task_id = admin.create_task(drain).await.unwrap().into_inner().task_id;
        let task = loop {
            let listed = admin.list_tasks(ListTasksRequest { task_id }).await.unwrap().into_inner();
            let task = listed.tasks.into_iter().next().expect("the task");
            if task.state != "RUNNING" || began.elapsed() > WITHIN {
                break task;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        };
        let rate = task.moved as f64 / began.elapsed().as_secs_f64();
        println!("concurrency {concurrency}: {} objects, {}, {rate:.0} objects/s", task.moved, task.state);
    }
}
