//! A rolling upgrade, and the way back: the previous release's binary and this one in one loaded quorum. Run by
//! `scripts/test --upgrade`, which builds the previous release and names it in `TIDEPOOL_OLD_BINARY`.

mod rig;

use std::path::{Path, PathBuf};
use std::process::{Output, Stdio};

use rig::{Pool, WITHIN, expect_all, goes_on, keys, load, not_one_failed, pool, put_all, wait_for};
use tidepool_chaos_tests::admin;
use tidepool_chaos_tests::audit::{Expected, read_back};
use tidepool_chaos_tests::fleet::{Fleet, acknowledged_puts};
use tidepool_chaos_tests::matrix::record_read_back;

const OBJECT_BYTES: usize = 10_000;

fn old_binary() -> PathBuf {
    let path = std::env::var("TIDEPOOL_OLD_BINARY").expect("TIDEPOOL_OLD_BINARY names the previous release's binary");
    PathBuf::from(path)
}

/// Every master to another binary, one after the other, the leader last and handed over; the load goes on all the time.
async fn roll(pool: &mut Pool, fleet: &Fleet, binary: &Path) {
    for at in [0, 1, 2] {
        let leader = pool.cluster.leader(WITHIN).await.unwrap();
        if leader == at {
            admin::transfer_leader(pool.cluster.masters[at].rpc, 0).await.unwrap();
        }
        let master = &mut pool.cluster.masters[at];
        master.stop(WITHIN).await.unwrap();
        master.set_binary(binary);
        master.start().unwrap();
        pool.cluster.wait_serving(WITHIN).await.unwrap();
        pool.cluster.wait_caught_up(at, WITHIN).await.unwrap();
        goes_on(fleet).await;
        // Mixed as they are now, they have one state.
        assert!(pool.cluster.compare_digests(WITHIN).await.unwrap().is_equal(), "after master {}", at + 1);
    }
}

async fn levels(pool: &Pool) -> Vec<u32> {
    let mut levels = Vec::new();
    for master in &pool.cluster.masters {
        // A binary that does not say it has the first.
        levels.push(admin::status(master.rpc).await.unwrap().feature_level.max(1));
    }
    levels
}

/// `tidepool feature-level ...` of the new binary.
async fn feature_level(pool: &Pool, arguments: &[&str]) -> Output {
    let mut command = tokio::process::Command::new(rig::binary());
    command.arg("feature-level").args(arguments).args(["-o", "json", "--masters", &pool.cluster.masters_text()]);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true);
    tokio::time::timeout(WITHIN, command.output()).await.expect("the command ends").unwrap()
}

/// To the new binary, back to the old one, forward again, then the level is raised, and the old binary takes part no more: not
/// one call fails, and all masters have one state at every step.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs the previous release's binary: scripts/test --upgrade"]
async fn a_loaded_quorum_rolls_to_the_new_binary_and_back() {
    let (old, new) = (old_binary(), rig::binary());
    let mut pool = pool(|options| options.binary = old.clone()).await;
    let before = keys("before", 100);
    put_all(&pool.client, &before, OBJECT_BYTES, 2).await;
    let fleet = load(&pool, 50.0);
    goes_on(&fleet).await;

    roll(&mut pool, &fleet, &new).await;
    assert_eq!(levels(&pool).await, [1, 1, 1], "an upgrade of the binaries raises nothing");
    roll(&mut pool, &fleet, &old).await;
    // Half-way: one old master is enough to refuse.
    pool.cluster.masters[2].stop(WITHIN).await.unwrap();
    pool.cluster.masters[2].set_binary(&new);
    pool.cluster.masters[2].start().unwrap();
    pool.cluster.wait_caught_up(2, WITHIN).await.unwrap();
    let leader = pool.cluster.leader(WITHIN).await.unwrap();
    if leader != 2 {
        admin::transfer_leader(pool.cluster.masters[leader].rpc, 3).await.unwrap();
    }
    let refused = feature_level(&pool, &["raise", "--to", "2"]).await;
    assert!(String::from_utf8_lossy(&refused.stderr).contains("FEATURE_LEVEL"), "{refused:?}");
    roll(&mut pool, &fleet, &new).await;

    // Datanodes keep their content only by a drain; here they stay on the old binary, which speaks with both.
    let raised = feature_level(&pool, &["raise"]).await;
    assert!(raised.status.success(), "{raised:?}");
    wait_for("all to have applied the raise", async || (levels(&pool).await == [2, 2, 2]).then_some(())).await;
    goes_on(&fleet).await;
    assert!(pool.cluster.compare_digests(WITHIN).await.unwrap().is_equal());

    let leader = pool.cluster.leader(WITHIN).await.unwrap();
    let back = (leader + 1) % 3;
    let master = &mut pool.cluster.masters[back];
    master.stop(WITHIN).await.unwrap();
    master.set_binary(&old);
    master.start().unwrap();
    let process = master.process().unwrap();
    let status = process.wait(WITHIN).await.unwrap();
    let tail = process.log_tail();
    assert!(!status.success() && tail.contains("feature level 2"), "{status}: {tail}");
    goes_on(&fleet).await;
    let master = &mut pool.cluster.masters[back];
    master.set_binary(&new);
    master.start().unwrap();
    pool.cluster.wait_caught_up(back, WITHIN).await.unwrap();
    let logs = not_one_failed(fleet, 500).await;
    assert!(pool.cluster.compare_digests(WITHIN).await.unwrap().is_equal());
    expect_all(&pool.client, &before, OBJECT_BYTES).await;
    let expected: Vec<Expected> = acknowledged_puts(&logs).into_iter().map(Expected::from).collect();
    let audit = read_back(&pool.client, &expected).await.unwrap();
    assert_eq!(audit.lost(), 0, "{:?} {:?}", audit.absent, audit.wrong);
    record_read_back("F21", before.len() as u64 + audit.checked).unwrap();
}
