//! Masters that come and go under clients that stay: real processes, the real command line, not one failed call.

mod rig;

use std::process::{Output, Stdio};
use std::time::Duration;

use rig::{Pool, WITHIN, connect, expect_all, keys, pool, put_all, wait_for};
use serde_json::Value;
use tidepool_chaos_tests::clock::monotonic_ns;
use tidepool_chaos_tests::cluster::Cluster;
use tidepool_chaos_tests::fleet::{Fleet, FleetOptions};
use tidepool_chaos_tests::record::CallOutcome;
use tidepool_chaos_tests::{admin, digests};

const OBJECT_BYTES: usize = 10_000;
/// Exit code of a master that left its quorum.
const REMOVED: i32 = 8;

/// `tidepool member ...` as an operator runs it.
async fn member(cluster: &Cluster, arguments: &[&str]) -> Output {
    let mut command = tokio::process::Command::new(rig::binary());
    command.args(["member"]).args(arguments).args(["-o", "json", "--masters", &running(cluster)]);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true);
    tokio::time::timeout(WITHIN * 2, command.output()).await.expect("the command ends").unwrap()
}

/// As `member`, which must succeed.
async fn done(cluster: &Cluster, arguments: &[&str]) -> Value {
    let output = member(cluster, arguments).await;
    let (text, errors) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "member {arguments:?} failed ({}):\n{text}\n{errors}", output.status);
    serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text}"))
}

/// All masters that were ever started: what an operator's script may still name.
fn running(cluster: &Cluster) -> String {
    cluster.masters_text()
}

fn at(cluster: &Cluster, index: usize) -> String {
    format!("{}@{}", index + 1, cluster.masters[index].rpc)
}

/// Waits for the end that a removed master chooses by itself.
async fn ends_as_removed(cluster: &mut Cluster, index: usize) {
    let process = cluster.masters[index].process().unwrap();
    let status = process.wait(WITHIN).await.unwrap();
    assert_eq!(status.code(), Some(REMOVED), "{}", process.log_tail());
    assert!(process.log_tail().contains("left the quorum"), "{}", process.log_tail());
}

fn load(pool: &Pool) -> Fleet {
    Fleet::start(&FleetOptions {
        binary: rig::binary(),
        directory: pool.directory.path().join("load"),
        masters: pool.cluster.masters_text(),
        tenant: String::new(),
        writers: 2,
        readers: 2,
        rate_per_s: 50.0,
        value_bytes: vec![1_000, 20_000],
        prefix: "load".into(),
        seed: 11,
        deadline: Duration::from_secs(10),
        replica_num: 1,
        recent_bytes: 8 << 20,
        bulk: None,
    })
    .unwrap()
}

/// One master becomes three, each of the three is replaced, and three become one: the clients were told of the first master
/// alone and never of another. Fails when clients are not told of new members: the last ones are strangers to them.
#[tokio::test(flavor = "multi_thread")]
async fn a_quorum_grows_is_replaced_and_shrinks_under_load_without_one_failed_call() {
    let mut pool = pool(|options| options.masters = 1).await;
    let before = keys("before", 50);
    put_all(&pool.client, &before, OBJECT_BYTES, 1).await;
    let mut fleet = load(&pool);
    let mut progress = fleet.progress(monotonic_ns());
    progress.wait_for(20, 20, WITHIN).await.unwrap();

    for _ in 0..2 {
        let index = pool.cluster.add_master().unwrap();
        let new = at(&pool.cluster, index);
        let planned = done(&pool.cluster, &["add", &new, "--dry-run"]).await;
        assert_eq!(planned["steps"].as_array().unwrap().len(), 4, "{planned}");
        let did = done(&pool.cluster, &["add", &new]).await;
        assert_eq!(planned["steps"], did["steps"]);
        pool.cluster.wait_caught_up(index, WITHIN).await.unwrap();
    }
    pool.cluster.wait_serving(WITHIN).await.unwrap();
    assert_eq!(done(&pool.cluster, &["list"]).await.as_array().unwrap().len(), 3);

    // All three, one after the other; the leader is among them.
    for old in 0..3 {
        let index = pool.cluster.add_master().unwrap();
        let (leaves, new) = ((old + 1).to_string(), at(&pool.cluster, index));
        done(&pool.cluster, &["replace", &leaves, &new]).await;
        ends_as_removed(&mut pool.cluster, old).await;
        let seen = monotonic_ns();
        fleet.progress(seen).wait_for(20, 20, WITHIN).await.unwrap();
    }
    let masters: Vec<_> = (3..6).map(|index| pool.cluster.masters[index].rpc).collect();
    assert!(digests::compare(&masters, WITHIN).await.unwrap().is_equal());

    // Nobody that a client was told of at its start is left; kill the leader, so that only what it learned helps.
    let leader = pool.cluster.leader(WITHIN).await.unwrap();
    pool.cluster.masters[leader].kill().unwrap();
    let seen = monotonic_ns();
    fleet.progress(seen).wait_for(20, 20, WITHIN).await.unwrap();
    let dead = (leader + 1).to_string();
    done(&pool.cluster, &["remove", &dead]).await;
    let leader = pool.cluster.leader(WITHIN).await.unwrap();
    done(&pool.cluster, &["remove", &(leader + 1).to_string()]).await;
    ends_as_removed(&mut pool.cluster, leader).await;
    let list = done(&pool.cluster, &["list"]).await;
    assert_eq!((list.as_array().unwrap().len(), &list[0]["role"]), (1, &Value::from("leader")), "{list}");

    let seen = monotonic_ns();
    fleet.progress(seen).wait_for(50, 50, WITHIN).await.unwrap();
    fleet.expect_running().unwrap();
    let logs = fleet.stop().await.unwrap();
    let calls = logs.iter().flatten().count();
    let failed: Vec<_> = logs.iter().flatten().filter(|call| call.outcome != CallOutcome::Ok).take(5).collect();
    let longest = logs.iter().flatten().map(|call| call.done_ns - call.sent_ns).max().unwrap_or(0) / 1_000_000;
    println!("{calls} calls, the longest took {longest} ms");
    assert!(failed.is_empty() && calls > 500, "of {calls} calls failed: {failed:?}");
    // The first client outlived all of it too, and a datanode that only ever knew the first master still serves.
    expect_all(&pool.client, &before, OBJECT_BYTES).await;
    let after = keys("after", 20);
    put_all(&pool.client, &after, OBJECT_BYTES, 2).await;
    expect_all(&pool.client, &after, OBJECT_BYTES).await;
}

/// User report 19: a crashed master could not be removed from the quorum. Here it is removed with two of three alive, a
/// fourth is taken in whose log begins with a snapshot, and its old id is refused for ever.
#[tokio::test(flavor = "multi_thread")]
async fn case_019_a_crashed_master_is_removed_and_a_fourth_takes_its_place() {
    let mut pool = pool(|options| options.master_arguments = vec!["--keep-log-entries".into(), "0".into()]).await;
    let objects = keys("case-019", 100);
    put_all(&pool.client, &objects, OBJECT_BYTES, 1).await;
    let leader = pool.cluster.leader(WITHIN).await.unwrap();
    let dead = (0..3).find(|&index| index != leader).unwrap();
    pool.cluster.masters[dead].kill().unwrap();
    let dead_id = (dead + 1).to_string();
    done(&pool.cluster, &["remove", &dead_id, "--deadline", "10s"]).await;
    let leads = pool.cluster.masters[leader].rpc;
    // The log goes behind the older of two snapshots, once the masters agree on what they cover.
    wait_for("the log to be purged", async || {
        put_all(&pool.client, &keys("between", 1), OBJECT_BYTES, 1).await;
        admin::compact(leads).await.unwrap();
        tokio::time::sleep(Duration::from_secs(1)).await;
        admin::status(leads).await.ok().filter(|status| status.purged_index > 0)
    })
    .await;

    let fourth = pool.cluster.add_master().unwrap();
    let new = at(&pool.cluster, fourth);
    done(&pool.cluster, &["add", &new]).await;
    pool.cluster.wait_caught_up(fourth, WITHIN).await.unwrap();
    let status = admin::status(pool.cluster.masters[fourth].rpc).await.unwrap();
    assert!(status.snapshot_index > 0, "it caught up without a snapshot");

    let again = format!("{dead_id}@127.0.0.1:1");
    let refused = member(&pool.cluster, &["add", &again]).await;
    assert_eq!(refused.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&refused.stderr).contains("MEMBER_ID_USED"), "{refused:?}");
    // Started again, the dead one is told, and ends.
    pool.cluster.masters[dead].start().unwrap();
    ends_as_removed(&mut pool.cluster, dead).await;

    // The new one counts.
    pool.cluster.masters[leader].kill().unwrap();
    wait_for("another leader", async || {
        let now = pool.cluster.leader(WITHIN).await.ok()?;
        (now != leader).then_some(())
    })
    .await;
    expect_all(&connect(&pool.cluster).await, &objects, OBJECT_BYTES).await;
    put_all(&pool.client, &keys("after", 20), OBJECT_BYTES, 1).await;
}
