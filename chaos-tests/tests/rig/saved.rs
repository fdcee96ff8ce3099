//! Pools that publish snapshots, whose masters are lost and restored from them.

use std::path::{Path, PathBuf};

use bytes::Bytes;
use tidepool_chaos_tests::admin;
use tidepool_chaos_tests::cluster::{Cluster, ClusterOptions};
use tidepool_chaos_tests::content::value_of;
use tidepool_client::Client;
use tidepool_proto::{Error, ErrorCode};

use super::{Pool, WITHIN, pool, wait_for};

/// Bytes of an object, unless a test says otherwise.
pub const OBJECT_BYTES: usize = 20_000;

/// A pool that publishes below its own directory, only when it is asked to.
pub async fn saved_pool(change: impl FnOnce(&mut ClusterOptions)) -> Pool {
    pool(|options| {
        let snapshots = snapshots(&options.work_dir);
        let own = [
            "--snapshot-url",
            &format!("file://{}", snapshots.display()),
            "--snapshot-interval",
            "0",
            "--snapshot-on-shutdown=false",
        ];
        options.master_arguments = own.iter().map(|word| word.to_string()).collect();
        change(options);
    })
    .await
}

pub fn snapshots(work_dir: &Path) -> PathBuf {
    work_dir.parent().expect("below the test's directory").join("snapshots")
}

pub async fn save(cluster: &mut Cluster) -> u64 {
    let leader = cluster.leader(WITHIN).await.unwrap();
    admin::take_snapshot(cluster.masters[leader].rpc).await.unwrap()
}

pub fn kill_masters(cluster: &mut Cluster) {
    cluster.masters.iter_mut().for_each(|master| _ = master.kill().unwrap());
}

/// Every master is killed and its data is gone.
pub fn lose_masters(cluster: &mut Cluster) {
    kill_masters(cluster);
    for master in &cluster.masters {
        std::fs::remove_dir_all(&master.data_dir).unwrap();
    }
}

/// Every master is started again, told to restore.
pub async fn restore(cluster: &mut Cluster) {
    restore_from(cluster, "").await;
}

/// The same, from what lies in this directory below the place of the snapshots.
pub async fn restore_from(cluster: &mut Cluster, below: &str) {
    start_restoring(cluster, below);
    cluster.wait_serving(WITHIN).await.unwrap();
}

/// The same, without waiting for anything.
pub fn start_restoring(cluster: &mut Cluster, below: &str) {
    let url = format!("file://{}{below}", snapshots(cluster.work_dir()).display());
    for master in &mut cluster.masters {
        master.set_argument("--restore-from", &url);
        master.start().unwrap();
    }
}

/// Reads a key. On a busy machine a datanode may be silent for a moment: what is merely out of reach is asked for again.
pub async fn read(client: &Client, key: &str) -> Result<Bytes, Error> {
    wait_for("the key's datanode", async || match client.get(key, Some(WITHIN)).await {
        Err(error) if error.code() == ErrorCode::ReplicaUnavailable => None,
        outcome => Some(outcome),
    })
    .await
}

/// Every key has the bytes that were put.
pub async fn expect_all(client: &Client, keys: &[String], bytes: usize) {
    for key in keys {
        let value = read(client, key).await.unwrap_or_else(|error| panic!("get of {key}: {error}"));
        assert!(value == value_of(key, 0, bytes), "{key} came back with other bytes");
    }
}

/// None of these keys has any bytes; at most a datanode must look before the directory knows.
pub async fn expect_misses(client: &Client, keys: &[String]) {
    for key in keys {
        let error = read(client, key).await.expect_err("it was not saved");
        assert_eq!(error.code(), ErrorCode::ObjectNotFound, "{key}: {error}");
    }
}

/// Where the snapshots of the present cluster lie, below the place of all.
pub async fn cluster_directory(cluster: &mut Cluster) -> String {
    let uuid = cluster.leader_status(WITHIN).await.unwrap().identity.unwrap().cluster_uuid;
    uuid.iter().fold("/".to_owned(), |name, byte| format!("{name}{byte:02x}"))
}
