//! Standbys that are killed while they are fed, by SIGKILL at any moment: every time they come back to a whole state.

mod rig;

use std::path::Path;
use std::time::Duration;

use rig::{Pool, WITHIN, expect_all, keys, pool, put_all, wait_for};
use tidepool_chaos_tests::admin;
use tidepool_chaos_tests::matrix::record_read_back;

const OBJECT_BYTES: usize = 100;
const KILLS: u64 = 20;
/// Objects of a snapshot of some megabytes, which arrives in several chunks.
const FED_OBJECTS: usize = 25_000;

/// Keys that take their own length in a snapshot, about.
fn long_keys(count: u64) -> Vec<String> {
    let digits = |key: u64| (0..24).map(move |at| drawn(key * 24 + at, u64::MAX));
    (0..count).map(|key| digits(key).map(|part| format!("{part:016x}")).collect()).collect()
}

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
    let mixed = round.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let mixed = (mixed ^ mixed >> 29).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    (mixed ^ mixed >> 32) % below
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
    record_read_back("F22", all.len() as u64).unwrap();
}

/// Who is killed while a standby is fed, and when: at this share of the snapshot.
#[derive(Clone, Copy, Debug)]
enum Cut {
    Receiver(f64),
    Sender(f64),
}

/// Bytes that arrived of a snapshot, on a standby's disk.
fn arrived(data_dir: &Path) -> u64 {
    std::fs::metadata(data_dir.join("snapshots/incoming.part")).map_or(0, |part| part.len())
}

/// F22. The transfer is cut near its begin, in the middle and near its end, by the death of the standby and of the leader that sends.
#[tokio::test(flavor = "multi_thread")]
async fn a_transfer_cut_at_its_begin_middle_or_end_leaves_a_whole_state() {
    let mut pool = pool(|options| {
        let flags = [
            ("--snapshot-log-bytes", "1MiB"),
            ("--keep-log-entries", "0"),
            ("--checkpoint-interval", "200ms"),
            ("--snapshot-bytes-per-s", "4MiB"),
        ];
        options.master_arguments =
            flags.iter().flat_map(|(flag, value)| [flag.to_string(), value.to_string()]).collect();
    })
    .await;
    let mut all = long_keys(FED_OBJECTS as u64);
    put_all(&pool.client, &all, 8, 1).await;
    for (round, cut) in
        [Cut::Receiver(0.0), Cut::Receiver(0.5), Cut::Receiver(0.8), Cut::Sender(0.5)].into_iter().enumerate()
    {
        let leader = pool.cluster.leader(WITHIN).await.unwrap();
        let (standby, from) = ((leader + 1) % 3, pool.cluster.masters[leader].rpc);
        pool.cluster.masters[standby].kill().unwrap();
        let last = admin::status(from).await.unwrap().last_log_index;
        for step in 0.. {
            if admin::status(from).await.unwrap().purged_index > last {
                break;
            }
            assert!(step < 500, "the log was never purged beyond {last}");
            let more = keys(&format!("round/{round}/{step}"), 500);
            put_all(&pool.client, &more, 8, 1).await;
            all.extend(more);
        }
        let data_dir = pool.cluster.masters[standby].data_dir.clone();
        let sent = newest_snapshot_bytes(&pool.cluster.masters[leader].data_dir);
        let (Cut::Receiver(share) | Cut::Sender(share)) = cut;
        pool.cluster.masters[standby].start().unwrap();
        let met = wait_for("the transfer to be as far", async || {
            let met = arrived(&data_dir);
            (met > 0 && met as f64 >= sent as f64 * share).then_some(met)
        })
        .await;
        let dies = if matches!(cut, Cut::Receiver(_)) { standby } else { leader };
        pool.cluster.masters[dies].kill().unwrap();
        println!("{cut:?}: killed when {met} of about {sent} bytes had arrived");
        pool.cluster.masters[dies].start().unwrap();
        for at in [dies, standby] {
            pool.cluster.wait_caught_up(at, WITHIN).await.unwrap();
        }
        assert!(pool.cluster.compare_digests(WITHIN).await.unwrap().is_equal(), "{cut:?}");
    }
    expect_all(&pool.client, &all[all.len() - 2_000..], 8).await;
    record_read_back("F22", 2_000).unwrap();
}

fn newest_snapshot_bytes(data_dir: &Path) -> u64 {
    let files = std::fs::read_dir(data_dir.join("snapshots")).unwrap().map(|entry| entry.unwrap().path());
    let newest = files.filter(|path| path.extension().is_some_and(|e| e == "snap")).max().expect("a snapshot");
    std::fs::metadata(newest).unwrap().len()
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
    // It or the third leads with that state.
    pool.cluster.masters[leader].kill().unwrap();
    expect_all(&pool.client, &all, OBJECT_BYTES).await;
    record_read_back("F18", all.len() as u64).unwrap();
}
