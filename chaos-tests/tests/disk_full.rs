//! The leader's disk is full: it says so and ends, another leads, and when there is space again nothing is lost or corrupt.

mod rig;

use std::fs::{self, File};
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use rig::{WITHIN, connect, expect_all, goes_on, keys, load, not_one_failed, put_all, wait_for};
use tidepool_chaos_tests::admin;
use tidepool_chaos_tests::cluster::{Cluster, ClusterOptions};

/// A small file system in memory; unmounted in the end.
struct SmallDisk(PathBuf);

impl SmallDisk {
    /// None where this user may not mount.
    fn mount(at: &Path, size: &str) -> Option<SmallDisk> {
        fs::create_dir_all(at).unwrap();
        let mut mount = Command::new("mount");
        mount.args(["-t", "tmpfs", "-o", &format!("size={size}"), "tidepool-test"]).arg(at).stderr(Stdio::null());
        mount.status().is_ok_and(|status| status.success()).then(|| SmallDisk(at.to_owned()))
    }

    /// Takes all the space that is left.
    fn fill(&self) -> PathBuf {
        let path = self.0.join("filler");
        let mut file = File::create(&path).unwrap();
        for size in [1 << 20, 4096, 1] {
            let chunk = vec![1u8; size];
            loop {
                match file.write(&chunk) {
                    Ok(written) if written > 0 => {}
                    Ok(_) => break,
                    Err(error) if error.kind() == ErrorKind::StorageFull => break,
                    Err(error) => panic!("{}: {error}", path.display()),
                }
            }
        }
        path
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        // Lazily: whatever still has it open lets go of it later.
        let _ = Command::new("umount").arg("-l").arg(&self.0).stderr(Stdio::null()).status();
    }
}

/// User report 21: the leader's disk was full, and the whole cluster stalled. Here its data directory is a tmpfs (of 192 MiB: a log that
/// is opened writes its newest part once more) that is filled under load: the leader says that there is no space and ends, another
/// leads, not one call fails. With space again it goes on from what it has, and all masters have one state. Needs the right to mount;
/// without it nothing is tested.
#[tokio::test(flavor = "multi_thread")]
async fn case_021_a_leader_whose_disk_is_full_steps_aside_and_loses_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let work = directory.path().join("pool");
    let Some(disk) = SmallDisk::mount(&work.join("master-1"), "192m") else {
        eprintln!("skipped: this user may not mount a tmpfs");
        return;
    };
    let options = ClusterOptions::new(&rig::binary(), &work);
    let mut cluster = Cluster::describe(options).unwrap();
    for role in cluster.masters.iter_mut().chain(cluster.datanodes.iter_mut()) {
        role.start().unwrap();
    }
    cluster.wait_serving(WITHIN).await.unwrap();
    let client = connect(&cluster).await;
    let before = keys("before", 200);
    put_all(&client, &before, 1_000, 2).await;
    let leader = cluster.leader(WITHIN).await.unwrap();
    if leader != 0 {
        admin::transfer_leader(cluster.masters[leader].rpc, 1).await.unwrap();
    }
    let mut pool = rig::Pool { cluster, client, directory };
    let fleet = load(&pool, 50.0);
    goes_on(&fleet).await;

    let filler = disk.fill();
    // What the log's file has reserved lasts for a while: long keys use it up.
    let mut round = 0;
    while pool.cluster.masters[0].is_running().unwrap() {
        let long: Vec<String> = (0..64).map(|at| format!("{round}-{at}-{}", "x".repeat(3_000))).collect();
        put_all(&pool.client, &long, 64, 1).await;
        round += 1;
    }
    let status = pool.cluster.masters[0].process().unwrap().wait(WITHIN).await.unwrap();
    let tail = pool.cluster.masters[0].process().unwrap().log_tail();
    assert!(!status.success() && tail.contains("No space left on device"), "{status}: {tail}");
    assert!(tail.contains("free space on the file system"), "{tail}");
    println!("the leader's last words:\n{}", tail.lines().rev().take(3).collect::<Vec<_>>().join("\n"));
    wait_for("another leader", async || pool.cluster.leader(WITHIN).await.ok().filter(|&leader| leader != 0)).await;
    goes_on(&fleet).await;
    let during = keys("during", 100);
    put_all(&pool.client, &during, 1_000, 2).await;

    fs::remove_file(filler).unwrap();
    pool.cluster.masters[0].start().unwrap();
    pool.cluster.wait_caught_up(0, WITHIN).await.unwrap();
    goes_on(&fleet).await;
    not_one_failed(fleet, 300).await;
    assert!(pool.cluster.compare_digests(WITHIN).await.unwrap().is_equal());
    expect_all(&pool.client, &before, 1_000).await;
    expect_all(&pool.client, &during, 1_000).await;
    drop(pool);
    drop(disk);
}

/// There is no space for a standby's image: it names the reason and ends, the half image counts for nothing, no call fails; with space
/// again it goes on from what it had. Here only the directory of its images is small.
#[tokio::test(flavor = "multi_thread")]
async fn an_image_that_finds_no_space_leaves_the_one_before() {
    let directory = tempfile::tempdir().unwrap();
    let work = directory.path().join("pool");
    let images = work.join("master-1/snapshots");
    let Some(disk) = SmallDisk::mount(&images, "4m") else {
        eprintln!("skipped: this user may not mount a tmpfs");
        return;
    };
    let mut options = ClusterOptions::new(&rig::binary(), &work);
    options.master_arguments = ["--checkpoint-interval", "200ms"].map(str::to_owned).to_vec();
    let mut cluster = Cluster::describe(options).unwrap();
    for role in cluster.masters.iter_mut().chain(cluster.datanodes.iter_mut()) {
        role.start().unwrap();
    }
    cluster.wait_serving(WITHIN).await.unwrap();
    let client = connect(&cluster).await;
    let before = keys("before", 500);
    put_all(&client, &before, 1_000, 1).await;
    if cluster.leader(WITHIN).await.unwrap() == 0 {
        admin::transfer_leader(cluster.masters[0].rpc, 0).await.unwrap();
    }
    let first = admin::compact(cluster.masters[0].rpc).await.unwrap();
    let mut pool = rig::Pool { cluster, client, directory };
    let fleet = load(&pool, 50.0);
    goes_on(&fleet).await;

    let filler = disk.fill();
    let refused = admin::compact(pool.cluster.masters[0].rpc).await.expect_err("there is no space");
    println!("{refused:#}");
    let ended = pool.cluster.masters[0].process().unwrap().wait(WITHIN).await.unwrap();
    let tail = pool.cluster.masters[0].process().unwrap().log_tail();
    assert!(!ended.success() && tail.contains("No space left on device"), "{ended}: {tail}");
    goes_on(&fleet).await;
    fs::remove_file(filler).unwrap();
    pool.cluster.masters[0].start().unwrap();
    pool.cluster.wait_caught_up(0, WITHIN).await.unwrap();
    let names = fs::read_dir(&images).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let names: Vec<String> = names.collect();
    assert!(names.iter().any(|name| name.ends_with(".snap")), "{names:?}");
    assert!(!names.iter().any(|name| name.ends_with(".tmp")), "{names:?}");
    assert!(admin::compact(pool.cluster.masters[0].rpc).await.unwrap() > first);
    not_one_failed(fleet, 50).await;
    assert!(pool.cluster.compare_digests(WITHIN).await.unwrap().is_equal());
    expect_all(&pool.client, &before, 1_000).await;
    drop(pool);
    drop(disk);
}
