//! Readiness that predicts: whoever says ready can be the only one left.

mod rig;

use std::collections::BTreeSet;
use std::process::Stdio;

use rig::{WITHIN, connect, expect_all, http_get, keys, pool, wait_for};
use tidepool_chaos_tests::admin;
use tidepool_chaos_tests::cluster::POLL_EVERY;
use tidepool_chaos_tests::content::value_of;
use tidepool_client::{PutItem, PutOptions};

const KEYS: usize = 50_000;
const VALUE_BYTES: usize = 64;
/// Keys of one batch.
const BATCH: usize = 1_000;

/// User report 6: a standby that said it was in step had nothing. Here a new master is taken into a quorum of 50 000 keys, of
/// which one member was down all along; its readiness is asked every 10 ms, and the leader is killed the instant that it says
/// ready. Of those that are left only the new master can lead, and it has every key.
#[tokio::test(flavor = "multi_thread")]
async fn case_006_a_master_that_says_it_is_ready_can_be_the_only_one_left() {
    let mut pool = pool(|options| options.datanodes = 1).await;
    let leader = pool.cluster.leader(WITHIN).await.unwrap();
    let [stale, leaving] = [1, 2].map(|step| (leader + step) % 3);
    // Knows nothing of what follows.
    pool.cluster.masters[stale].kill().unwrap();
    let all = keys("case-006", KEYS);
    for batch in all.chunks(BATCH) {
        let items = batch.iter().map(|key| PutItem::new(key.clone(), value_of(key, 0, VALUE_BYTES))).collect();
        let options = PutOptions { deadline: Some(WITHIN), ..PutOptions::default() };
        pool.client.put_many(items, options).await.into_iter().for_each(|put| assert!(put.is_ok(), "{put:?}"));
    }

    let new = pool.cluster.add_master().unwrap();
    let mut replace = tokio::process::Command::new(rig::binary());
    let member = format!("{}@{}", new + 1, pool.cluster.masters[new].rpc);
    replace.args(["member", "replace", &(leaving + 1).to_string(), &member, "--masters", &pool.cluster.masters_text()]);
    replace.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).kill_on_drop(true);
    let _replacing = replace.spawn().unwrap();

    let http = pool.cluster.masters[new].http;
    let mut said = BTreeSet::new();
    let report = wait_for("the new master to say that it is ready", async || {
        let (status, body) = http_get(http, "/readyz?verbose").await?;
        let report: serde_json::Value = serde_json::from_str(&body).ok()?;
        said.insert(report["reason"].as_str().unwrap_or("").chars().take(40).collect::<String>());
        (status == 200).then_some(report)
    })
    .await;
    // The instant: nothing is awaited in between.
    pool.cluster.masters[leader].kill().unwrap();
    // It may have ended by itself: it is on its way out of the quorum.
    pool.cluster.masters[leaving].kill().ok();
    println!("ready: {report}\nbefore: {said:?}");
    assert!(said.len() > 1, "it was ready from the first moment");
    assert_eq!(report["objects"].as_u64(), Some(KEYS as u64), "{report}");
    for field in ["applied_index", "leader_index", "committed_index", "lag_ms", "term", "feature_level"] {
        assert!(report[field].is_u64(), "{field} is missing: {report}");
    }

    // With the stale one there is a majority again, which only the new one can lead.
    pool.cluster.masters[stale].start().unwrap();
    let rpc = pool.cluster.masters[new].rpc;
    let status = wait_for("the new master to lead", async || {
        admin::status(rpc).await.ok().filter(|status| status.role == "leader")
    })
    .await;
    assert_eq!(status.objects, KEYS as u64);
    expect_all(&connect(&pool.cluster).await, &all, VALUE_BYTES).await;
}

/// A restarted standby knows what it had applied, and not what was committed meanwhile: it is not ready before it is level
/// with a leader it heard. Readiness is asked from its first moment on; whenever it says ready it has all keys.
#[tokio::test(flavor = "multi_thread")]
async fn a_restarted_standby_is_ready_only_with_all_that_was_put_meanwhile() {
    let mut pool = pool(|options| options.datanodes = 1).await;
    let leader = pool.cluster.leader(WITHIN).await.unwrap();
    let behind = (leader + 1) % 3;
    for round in 0..5 {
        pool.cluster.masters[behind].kill().unwrap();
        let added = keys(&format!("meanwhile-{round}"), 2_000);
        rig::put_all(&pool.client, &added, VALUE_BYTES, 1).await;
        pool.cluster.masters[behind].start().unwrap();
        let http = pool.cluster.masters[behind].http;
        let report = wait_for("it to be ready", async || {
            let (status, body) = http_get(http, "/readyz?verbose").await?;
            (status == 200).then(|| serde_json::from_str::<serde_json::Value>(&body).unwrap())
        })
        .await;
        assert_eq!(report["objects"].as_u64(), Some(2_000 * (round + 1)), "ready too early: {report}");
        tokio::time::sleep(POLL_EVERY).await;
    }
}
