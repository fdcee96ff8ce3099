//! The laboratory itself: its links, disks and built-in faults do what they say, and nothing of it is left afterwards.

mod rig;

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rig::{WITHIN, binary, connect, expect_all, keys, put_all, wait_for};
use tidepool_chaos_tests::cluster::{Cluster, ClusterOptions, Ground};
use tidepool_chaos_tests::lab::{Direction, Lab, cleanup};

/// Set for the copy of this test's process that is killed.
const VICTIM: &str = "TIDEPOOL_LAB_VICTIM";

async fn pool_in(lab: Lab, disk_bytes: Option<u64>) -> anyhow::Result<(Cluster, tidepool_client::Client)> {
    let mut options = ClusterOptions::new(&binary(), &lab.directory().join("pool"));
    options.ground = Ground::Lab(lab);
    options.disk_bytes = disk_bytes;
    let cluster = Cluster::start(options).await?;
    let client = connect(&cluster).await;
    Ok((cluster, client))
}

/// Mounts, loop devices, control groups and directories of laboratories, as this host sees them.
fn traces() -> BTreeSet<String> {
    let mounts = std::fs::read_to_string("/proc/self/mounts").unwrap_or_default();
    let loops = Command::new("losetup").arg("-a").output().map(|o| String::from_utf8_lossy(&o.stdout).into_owned());
    let spaces = Command::new("ip").args(["netns", "list"]).output();
    let spaces = spaces.map(|o| String::from_utf8_lossy(&o.stdout).into_owned()).unwrap_or_default();
    let text = format!("{mounts}\n{}\n{spaces}", loops.unwrap_or_default());
    text.lines()
        .filter(|line| ["tidepool-lab", "master-", "datanode-"].iter().any(|word| line.contains(word)))
        .map(str::to_owned)
        .collect()
}

/// Two at once on one host, each with addresses, links and disks of its own, under the same names.
#[test]
fn two_labs_at_once_do_not_see_each_other() {
    let one = || {
        Lab::in_namespaces(async |lab: Lab| {
            let (mut cluster, client) = pool_in(lab, Some(256 << 20)).await?;
            let objects = keys("lab", 50);
            put_all(&client, &objects, 10_000, 2).await;
            expect_all(&client, &objects, 10_000).await;
            assert!(cluster.compare_digests(WITHIN).await?.is_equal());
            Ok(cluster.masters[0].rpc)
        })
    };
    let other = std::thread::spawn(one);
    let (mine, theirs) = (one(), other.join().unwrap());
    let (Ok(mine), Ok(theirs)) = (mine, theirs) else {
        eprintln!("skipped: no laboratory here");
        return;
    };
    assert_eq!(mine.unwrap(), theirs.unwrap(), "both have the same addresses, in namespaces of their own");
    assert_eq!(traces(), BTreeSet::new());
}

/// Where no namespaces may be had: links are cut, for clients too, and mended, and disks are refused.
#[test]
fn behind_proxies_links_are_cut_and_mended() {
    let outcome = Lab::behind_proxies(async |lab: Lab| {
        let (mut cluster, client) = pool_in(lab.clone(), None).await?;
        let before = keys("before", 50);
        put_all(&client, &before, 10_000, 2).await;
        let (old, network) = (cluster.leader(WITHIN).await?, lab.network());
        let name = |at: usize| format!("master-{}", at + 1);
        for other in (0..3).filter(|other| *other != old) {
            network.cut(&name(old), &name(other), Direction::Both)?;
        }
        wait_for("another leads", async || cluster.leader(WITHIN).await.ok().filter(|leads| *leads != old)).await;
        anyhow::ensure!(network.dropped()? > 0, "nothing was held back");
        let since = keys("since", 50);
        put_all(&client, &since, 10_000, 2).await;
        network.heal()?;
        network.set_link("datanode-1", false)?;
        let answer = tidepool_chaos_tests::admin::status(cluster.masters[old].rpc).await;
        anyhow::ensure!(answer.is_ok(), "a link that is whole: {answer:?}");
        network.cut_from_clients(&name(old), false, false)?;
        let answer = tidepool_chaos_tests::admin::status(cluster.masters[old].rpc).await;
        anyhow::ensure!(answer.is_err(), "{} hears no client and answers", name(old));
        network.heal()?;
        cluster.wait_serving(WITHIN).await?;
        for at in 0..3 {
            cluster.wait_caught_up(at, WITHIN).await?;
        }
        expect_all(&client, &since, 10_000).await;
        assert!(cluster.compare_digests(WITHIN).await?.is_equal());
        Ok(())
    });
    outcome.unwrap().unwrap();
    let refused = Lab::behind_proxies(async |lab: Lab| lab.add_disk("master-1", 1 << 20).map(|_| ()));
    assert!(refused.unwrap_err().0.contains("need"), "a disk of its own");
}

/// A harness that is killed leaves no namespace, mount, loop device or process; its directory goes with the next cleanup, and
/// what belongs to a laboratory that lives is left alone.
#[test]
fn nothing_is_left_of_a_lab_whose_owner_was_killed() {
    if let Ok(mark) = std::env::var(VICTIM) {
        let ended = Lab::in_namespaces(async move |lab: Lab| {
            let (mut cluster, _client) = pool_in(lab, Some(256 << 20)).await?;
            let ids =
                cluster.masters.iter_mut().chain(&mut cluster.datanodes).map(|role| role.id().unwrap().to_string());
            let ids = ids.collect::<Vec<_>>().join(" ");
            let writing = PathBuf::from(&mark).with_extension("new");
            std::fs::write(&writing, ids)?;
            std::fs::rename(&writing, &mark)?;
            std::future::pending::<anyhow::Result<()>>().await
        });
        panic!("it ended: {ended:?}");
    }
    if Lab::in_namespaces(async |_| Ok(())).is_err() {
        eprintln!("skipped: no laboratory here");
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let mark = directory.path().join("ids");
    let mut victim = Command::new(std::env::current_exe().unwrap())
        .args(["nothing_is_left_of_a_lab_whose_owner_was_killed", "--exact", "--nocapture"])
        .env(VICTIM, &mark)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let until = Instant::now() + WITHIN;
    let ids = loop {
        if let Ok(text) = std::fs::read_to_string(&mark) {
            break text;
        }
        assert!(victim.try_wait().unwrap().is_none() && Instant::now() < until, "the laboratory did not start");
        std::thread::sleep(Duration::from_millis(10));
    };
    assert!(ids.split(' ').count() >= 5, "{ids}");
    assert_eq!(cleanup::run().unwrap(), Vec::<PathBuf>::new(), "its owner lives");
    victim.kill().unwrap();
    victim.wait().unwrap();
    // Not even a process: the kernel ends them with their owner, and takes mounts and devices with the last of them.
    let gone = || ids.split(' ').all(|id| !PathBuf::from(format!("/proc/{id}")).exists()) && traces().is_empty();
    while !gone() {
        assert!(Instant::now() < until, "left: {:?}", traces());
        std::thread::sleep(Duration::from_millis(10));
    }
    let removed = cleanup::run().unwrap();
    assert!(!removed.is_empty() && cleanup::left_over().is_empty(), "{removed:?}");
    assert_eq!(cleanup::run().unwrap(), Vec::<PathBuf>::new(), "a second time there is nothing");
}
