//! What goes on after masters were lost and restored: datanodes that were restarted find the cluster that goes on, and there is an end
//! to how often it can.

mod rig;

use std::path::Path;
use std::process::Output;

use rig::saved::{OBJECT_BYTES, cluster_directory, expect_all, lose_masters, restore, restore_from, save, saved_pool};
use rig::{WITHIN, assert_space_adds_up, keys, put_all};

/// Histories that a directory may have had before the present one.
const HISTORIES_MAX: usize = 64;

/// A datanode that was restarted in a restored cluster finds its way when that one is lost too and the same snapshot is restored again,
/// into a third cluster that knows nothing of the second. Tried with the
/// present cluster alone remembered on disk: fails.
#[tokio::test(flavor = "multi_thread")]
async fn a_datanode_restarted_between_two_restores_of_one_snapshot_goes_on() {
    let mut pool = saved_pool(|options| options.masters = 1).await;
    let objects = keys("first", 40);
    put_all(&pool.client, &objects, OBJECT_BYTES, 2).await;
    save(&mut pool.cluster).await;
    let first = cluster_directory(&mut pool.cluster).await;
    lose_masters(&mut pool.cluster);
    restore(&mut pool.cluster).await;
    pool.cluster.datanodes[1].kill().unwrap();
    pool.cluster.datanodes[1].start().unwrap();
    pool.cluster.wait_serving(WITHIN).await.unwrap();
    lose_masters(&mut pool.cluster);
    restore_from(&mut pool.cluster, &first).await;
    expect_all(&pool.client, &objects, OBJECT_BYTES).await;
    let status = pool.cluster.leader_status(WITHIN).await.unwrap();
    assert_eq!(status.nodes.iter().filter(|node| !node.suspect).count(), 2);
    assert_space_adds_up(&status);
}

async fn recover(data_dir: &Path) -> Output {
    let mut command = tokio::process::Command::new(rig::binary());
    command.args(["member", "recover", "--from-this-node", "--accept-data-loss", "--data-dir"]);
    command.arg(data_dir).kill_on_drop(true).output().await.unwrap()
}

/// One recovery too many is refused before anything changes, and the master starts as it was. Tried
/// without the count: fails.
#[tokio::test(flavor = "multi_thread")]
async fn one_history_too_many_is_refused_while_nothing_is_changed() {
    let mut pool = saved_pool(|options| (options.masters, options.datanodes) = (1, 1)).await;
    let objects = keys("kept", 10);
    put_all(&pool.client, &objects, OBJECT_BYTES, 1).await;
    // Some of them are in the snapshot, the rest in the log.
    for until in [HISTORIES_MAX / 2, HISTORIES_MAX] {
        pool.cluster.masters[0].stop(WITHIN).await.unwrap();
        for _ in until - HISTORIES_MAX / 2..until {
            let output = recover(&pool.cluster.masters[0].data_dir).await;
            assert!(output.status.success(), "{output:?}");
        }
        if until < HISTORIES_MAX {
            pool.cluster.masters[0].start().unwrap();
            pool.cluster.wait_serving(WITHIN).await.unwrap();
        }
    }
    let refused = recover(&pool.cluster.masters[0].data_dir).await;
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(!refused.status.success() && said.contains("nothing was changed"), "{said}");
    assert!(said.contains("64") && said.contains("--accept-data-loss"), "{said}");
    pool.cluster.masters[0].start().unwrap();
    pool.cluster.wait_serving(WITHIN).await.unwrap();
    let status = pool.cluster.leader_status(WITHIN).await.unwrap();
    assert_eq!(status.identity.unwrap().ancestors.len(), HISTORIES_MAX);
    expect_all(&pool.client, &objects, OBJECT_BYTES).await;
}
