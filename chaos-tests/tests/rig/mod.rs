//! What every process test needs: the binary, a pool under a temporary directory, a client, and waiting for a condition.
#![allow(dead_code)] // each test file uses a part

pub mod memory;
pub mod s3;
pub mod saved;

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use tempfile::TempDir;
use tidepool_chaos_tests::clock::monotonic_ns;
use tidepool_chaos_tests::cluster::{Cluster, ClusterOptions, POLL_EVERY};
use tidepool_chaos_tests::content::value_of;
use tidepool_chaos_tests::fleet::{Fleet, FleetOptions};
use tidepool_chaos_tests::matrix::never;
use tidepool_chaos_tests::record::{CallOutcome, CallRecord};
use tidepool_client::{Client, ClientOptions, PutItem, PutOptions};
use tidepool_proto::ErrorCode;
use tidepool_proto::v1::StatusResponse;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

/// Longest wait for anything on a slow, shared machine.
pub const WITHIN: Duration = Duration::from_secs(60);

/// The tidepool binary: `TIDEPOOL_BINARY`, else beside the directory of this test's executable.
pub fn binary() -> PathBuf {
    if let Ok(path) = std::env::var("TIDEPOOL_BINARY") {
        return PathBuf::from(path);
    }
    let test = std::env::current_exe().expect("this test has an executable");
    let path = test.parent().and_then(Path::parent).expect("target/PROFILE/deps/TEST").join("tidepool");
    assert!(path.exists(), "{} is missing; build it: cargo build --release -p tidepool-cli", path.display());
    path
}

/// A pool, its directory and a client of it.
pub struct Pool {
    pub cluster: Cluster,
    pub client: Client,
    pub directory: TempDir,
}

/// Starts 3 masters and 2 datanodes, changed as the test needs it.
pub async fn pool(change: impl FnOnce(&mut ClusterOptions)) -> Pool {
    let directory = tempfile::tempdir().expect("temporary directory");
    let mut options = ClusterOptions::new(&binary(), &directory.path().join("pool"));
    change(&mut options);
    let cluster = Cluster::start(options).await.expect("the pool starts");
    let client = connect(&cluster).await;
    Pool { cluster, client, directory }
}

/// A client of a running pool.
pub async fn connect(cluster: &Cluster) -> Client {
    let mut options = ClientOptions::new(ClientOptions::parse_masters(&cluster.masters_text()).expect("addresses"));
    options.connect_deadline = WITHIN;
    options.deadline = Duration::from_secs(10);
    Client::connect(options).await.expect("a leader answers")
}

/// Keys `prefix/0 ..`.
pub fn keys(prefix: &str, count: usize) -> Vec<String> {
    (0..count).map(|i| format!("{prefix}/{i}")).collect()
}

/// Puts self-generated values of `bytes`; every put must be acknowledged.
pub async fn put_all(client: &Client, keys: &[String], bytes: usize, replica_num: u32) {
    for batch in keys.chunks(64) {
        let items = batch.iter().map(|key| PutItem::new(key.clone(), value_of(key, 0, bytes))).collect();
        let options = PutOptions { replica_num, deadline: Some(WITHIN), ..PutOptions::default() };
        for (key, result) in batch.iter().zip(client.put_many(items, options).await) {
            result.unwrap_or_else(|error| panic!("put of {key}: {error}"));
        }
    }
}

/// Gets every key; each must have the bytes that were put.
pub async fn expect_all(client: &Client, keys: &[String], bytes: usize) {
    for batch in keys.chunks(64) {
        for (key, result) in batch.iter().zip(client.get_many(batch, Some(WITHIN)).await) {
            let value = match result {
                Ok(value) => value,
                Err(error) if error.code() == ErrorCode::ObjectNotFound => {
                    panic!("{}", never(format!("{key} is lost")))
                }
                Err(error) => panic!("get of {key}: {error}"),
            };
            if value != value_of(key, 0, bytes) {
                panic!("{}", never(format!("{key} came back with other bytes")));
            }
        }
    }
}

/// A load of 2 writers and 2 readers against a pool, from processes of their own.
pub fn load(pool: &Pool, rate_per_s: f64) -> Fleet {
    Fleet::start(&FleetOptions {
        binary: binary(),
        directory: pool.directory.path().join("load"),
        masters: pool.cluster.masters_text(),
        tenant: String::new(),
        writers: 2,
        readers: 2,
        rate_per_s,
        value_bytes: vec![1_000, 20_000],
        prefix: "load".into(),
        seed: 11,
        deadline: Duration::from_secs(10),
        replica_num: 1,
        recent_bytes: 8 << 20,
        bulk: None,
    })
    .expect("the load starts")
}

/// Ends a load, of which no call may have failed; answers its logs.
pub async fn not_one_failed(mut fleet: Fleet, at_least: usize) -> Vec<Vec<CallRecord>> {
    fleet.expect_running().unwrap();
    let logs = fleet.stop().await.unwrap();
    let failed: Vec<_> = logs.iter().flatten().filter(|call| call.outcome != CallOutcome::Ok).take(5).collect();
    let calls = logs.iter().flatten().count();
    assert!(failed.is_empty() && calls >= at_least, "of {calls} calls failed: {failed:?}");
    let longest = logs.iter().flatten().map(|call| call.done_ns - call.sent_ns).max().unwrap_or(0) / 1_000_000;
    println!("{calls} calls, none failed; the longest took {longest} ms");
    logs
}

/// Waits for calls of a load that were sent from now on.
pub async fn goes_on(fleet: &Fleet) {
    fleet.progress(monotonic_ns()).wait_for(20, 20, WITHIN).await.unwrap();
}

/// GET of a role's HTTP port: status and body.
pub async fn http_get(address: SocketAddr, path: &str) -> Option<(u16, String)> {
    let mut stream = TcpStream::connect(address).await.ok()?;
    let request = format!("GET {path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).await.ok()?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.ok()?;
    let status = answer.split(' ').nth(1)?.parse().ok()?;
    Some((status, answer.split_once("\r\n\r\n")?.1.to_owned()))
}

/// Polls until `look` finds what it looks for.
pub async fn wait_for<T>(what: &str, mut look: impl AsyncFnMut() -> Option<T>) -> T {
    let give_up = Instant::now() + WITHIN;
    loop {
        if let Some(found) = look().await {
            return found;
        }
        assert!(Instant::now() < give_up, "waited {WITHIN:?} for {what}");
        tokio::time::sleep(POLL_EVERY).await;
    }
}

/// Bytes of the pool that hold nothing.
pub fn free_bytes(status: &StatusResponse) -> u64 {
    status.segments.iter().map(|segment| segment.free_bytes).sum()
}

/// SPACE-ADDS-UP, as the leader reports it.
pub fn assert_space_adds_up(status: &StatusResponse) {
    for s in &status.segments {
        let sum = s.free_bytes + s.processing_bytes + s.complete_bytes + s.retired_bytes;
        assert_eq!(sum, s.capacity_bytes, "segment {} does not add up: {s:?}", s.name);
    }
}
