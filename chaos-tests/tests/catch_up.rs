//! Standbys that are killed while they are fed, by SIGKILL at any moment: every time they come back to a whole state.

mod rig;

use std::time::Duration;

use rig::{Pool, WITHIN, expect_all, keys, pool, put_all, wait_for};
use tidepool_chaos_tests::admin;

const OBJECT_BYTES: usize = 100;
const KILLS: u64 = 20;

/// Small snapshots, often, and no log behind them, sent slowly: a standby that was away is fed a snapshot.
async fn small_snapshots() -> Pool {
    pool(|options| {
        let flags = [
            ("--snapshot-log-bytes", "128KiB"),
            ("--keep-log-entries", "0"),
            ("--checkpoint-interval", "200ms"),
            ("--snapshot-bytes-per-s", "512KiB"),
        ];
        options.master_arguments =
            flags.iter().flat_map(|(flag, value)| [flag.to_string(), value.to_string()]).collect();
    })
    .await
}

/// A number that differs from round to round, and is the same in every run.
fn drawn(round: u64, below: u64) -> u64 {
    (round.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 33) % below
}

/// Kills at moments spread over building (the standby snapshots too), transfer and install.
#[tokio::test(flavor = "multi_thread")]
async fn a_standby_killed_at_any_moment_of_catching_up_has_a_whole_state_again() {
    let mut pool = small_snapshots().await;
    let mut all = keys("first", 2_000);
    put_all(&pool.client, &all, OBJECT_BYTES, 1).await;
    let leader = pool.cluster.leader(WITHIN).await.unwrap();
    let standby = (leader + 1) % 3;
    let mut fed = 0;
    for round in 0..KILLS {
        pool.cluster.masters[standby].kill().unwrap();
        let more = keys(&format!("round/{round}"), 300);
        put_all(&pool.client, &more, OBJECT_BYTES, 1).await;
        all.extend(more);
        pool.cluster.masters[standby].start().unwrap();
        // Not a wait for something: the moment of the kill is what is drawn.
        tokio::time::sleep(Duration::from_millis(drawn(round, 900))).await;
        let status = admin::status(pool.cluster.masters[standby].rpc).await;
        fed += u64::from(status.is_ok_and(|status| status.snapshot_index > 0));
    }
    println!("{fed} of {KILLS} kills met a standby with a snapshot");
    pool.cluster.wait_caught_up(standby, WITHIN).await.unwrap();
    let digests = pool.cluster.compare_digests(WITHIN).await.unwrap();
    assert!(digests.is_equal(), "{digests:?}");
    // It leads with that state, and nothing is missing.
    pool.cluster.masters[leader].kill().unwrap();
    wait_for("the killed one or the third to lead", async || {
        let now = pool.cluster.leader(WITHIN).await.ok()?;
        (now != leader).then_some(())
    })
    .await;
    expect_all(&pool.client, &all, OBJECT_BYTES).await;
    pool.cluster.masters[leader].start().unwrap();
    pool.cluster.wait_caught_up(leader, WITHIN).await.unwrap();
}

/// A snapshot on a standby's disk whose bits flipped while it was down: it falls back to what is whole, and has the same state.
#[tokio::test(flavor = "multi_thread")]
async fn a_standby_whose_snapshot_was_damaged_on_disk_comes_back_whole() {
    let mut pool = small_snapshots().await;
    let all = keys("all", 3_000);
    put_all(&pool.client, &all, OBJECT_BYTES, 1).await;
    let leader = pool.cluster.leader(WITHIN).await.unwrap();
    let standby = (leader + 1) % 3;
    let snapshots = pool.cluster.masters[standby].data_dir.join("snapshots");
    wait_for("two agreed snapshots", async || {
        put_all(&pool.client, &keys("again", 200), OBJECT_BYTES, 1).await;
        pool.client.remove_many(&keys("again", 200), tidepool_client::RemoveMode::Force, None).await;
        let names = std::fs::read_dir(&snapshots).ok()?.filter_map(|entry| Some(entry.ok()?.path()));
        (names.filter(|path| path.extension().is_some_and(|e| e == "agreed")).count() >= 2).then_some(())
    })
    .await;
    pool.cluster.masters[standby].kill().unwrap();
    let files = std::fs::read_dir(&snapshots).unwrap().map(|entry| entry.unwrap().path());
    let newest = files.filter(|path| path.extension().is_some_and(|e| e == "snap")).max().expect("a snapshot");
    let mut bytes = std::fs::read(&newest).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 8;
    std::fs::write(&newest, bytes).unwrap();
    pool.cluster.masters[standby].start().unwrap();
    pool.cluster.wait_caught_up(standby, WITHIN).await.unwrap();
    assert!(newest.with_extension("damaged").exists(), "the damage was not noticed");
    assert!(pool.cluster.compare_digests(WITHIN).await.unwrap().is_equal());
}
