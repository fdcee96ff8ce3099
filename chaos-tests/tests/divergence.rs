//! A master whose state is not what it should be (M3): bits that flip in its memory, in real processes. It starts over by itself, in
//! place, and nothing of what it held spreads or is published. Needs the right to write another process's memory.

mod rig;

use std::net::SocketAddr;
use std::path::Path;
use std::process::Output;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use rig::{Pool, WITHIN, expect_all, goes_on, keys, load, memory, not_one_failed, pool, put_all, wait_for};
use tidepool_chaos_tests::admin;
use tidepool_chaos_tests::cluster::{Cluster, ClusterOptions, Role};
use tidepool_chaos_tests::process::{Input, Launch, Lifetime, Process};
use tidepool_client::{Client, ClientOptions};

const OBJECT_BYTES: usize = 100;
/// Time for checkpoints to make a snapshot an agreed one.
const AGREED_WITHIN: Duration = Duration::from_secs(3);
/// Exit code of damaged local storage.
const CORRUPT: i32 = 7;
/// Exit code of a master that cannot start over any more.
const DIVERGED: i32 = 9;
/// The key whose record is hit; nothing else in a process looks like it.
const MARKED: &str = "marked/0f1e2d3c4b5a69788796a5b4c3d2e1f0/key";

/// Checkpoints and the auditor come often, snapshots are small, no log is kept behind them.
async fn watched_pool(change: impl FnOnce(&mut ClusterOptions)) -> Pool {
    pool(|options| {
        // So that on a busy machine nobody but the test changes who leads.
        options.election = "wan".to_owned();
        let flags = [
            ("--snapshot-log-bytes", "1MiB"),
            ("--keep-log-entries", "0"),
            ("--checkpoint-interval", "200ms"),
            ("--audit-interval", "50ms"),
        ];
        options.master_arguments =
            flags.iter().flat_map(|(flag, value)| [flag.to_string(), value.to_string()]).collect();
        change(options);
    })
    .await
}

/// Starts a master again after its log has let go of everything so far: what it knows it has from its snapshot.
async fn know_from_a_snapshot(cluster: &mut Cluster, at: usize) {
    let last = admin::status(cluster.masters[at].rpc).await.unwrap().last_log_index;
    let rpc = cluster.masters[at].rpc;
    let mut asked = None;
    wait_for("the log to go", async || {
        let status = admin::status(rpc).await.ok()?;
        // One that is asked for at once again replaces the one before it can be agreed.
        if asked.is_none_or(|at: Instant| at.elapsed() > AGREED_WITHIN) {
            asked = Some(Instant::now());
            admin::compact(rpc).await.ok()?;
        }
        (status.purged_index >= last).then_some(())
    })
    .await;
    cluster.masters[at].stop(WITHIN).await.unwrap();
    cluster.masters[at].start().unwrap();
    cluster.wait_serving(WITHIN).await.unwrap();
    cluster.wait_caught_up(at, WITHIN).await.unwrap();
}

/// A bit of the marked key flips in this master's memory. None: this is not allowed here.
fn flip(cluster: &mut Cluster, at: usize) -> Option<()> {
    match memory::flip(cluster.masters[at].process().unwrap(), MARKED.as_bytes()) {
        Err(error) if error.kind() == std::io::ErrorKind::PermissionDenied => {
            eprintln!("skipped: this user may not write another process's memory: {error}");
            None
        }
        flipped => {
            assert!(flipped.unwrap() > 0, "the key is nowhere in memory");
            Some(())
        }
    }
}

fn log_of(role: &Role) -> String {
    std::fs::read_to_string(role.log()).unwrap_or_default()
}

/// Waits until this master has started over, as the same process, and has the others' state.
async fn starts_over(cluster: &mut Cluster, at: usize, id: Option<u32>) {
    let path = cluster.masters[at].data_dir.join("DIVERGED");
    wait_for("it to start over", async || {
        let noted = std::fs::read_to_string(&path).ok()?;
        noted.lines().last()?.starts_with("done ").then_some(())
    })
    .await;
    assert_eq!(cluster.masters[at].id(), id);
    assert!(cluster.masters[at].is_running().unwrap(), "{}", log_of(&cluster.masters[at]));
    cluster.wait_caught_up(at, WITHIN).await.unwrap();
    assert!(cluster.compare_digests(WITHIN).await.unwrap().is_equal());
    let log = log_of(&cluster.masters[at]);
    assert!(log.contains("starts over from the last agreed snapshot"), "{log}");
}

/// Makes it lead. On a busy machine another election may come between.
async fn leader_is(cluster: &mut Cluster, at: usize) {
    wait_for("it to lead", async || {
        let leader = cluster.leader(WITHIN).await.ok()?;
        if leader == at {
            return Some(());
        }
        // Refused while it is not level yet.
        admin::transfer_leader(cluster.masters[leader].rpc, at as u64 + 1).await.ok();
        None
    })
    .await;
}

/// A bit flips in a standby and then in the leader, under load: the auditor finds it, the one hit starts over in place, the leader
/// after it has handed over; no call fails, and what was hit is there again when the one that was hit leads.
#[tokio::test(flavor = "multi_thread")]
async fn a_master_whose_memory_is_wrong_starts_over_in_place_and_costs_no_call() {
    let mut pool = watched_pool(|_| {}).await;
    let mut all = keys("all", 500);
    all.push(MARKED.to_owned());
    put_all(&pool.client, &all, OBJECT_BYTES, 2).await;
    let fleet = load(&pool, 50.0);
    goes_on(&fleet).await;
    for is_leader in [false, true] {
        let leader = pool.cluster.leader(WITHIN).await.unwrap();
        let hit = (leader + 1) % 3;
        know_from_a_snapshot(&mut pool.cluster, hit).await;
        if is_leader {
            leader_is(&mut pool.cluster, hit).await;
        }
        let id = pool.cluster.masters[hit].id();
        if flip(&mut pool.cluster, hit).is_none() {
            return;
        }
        starts_over(&mut pool.cluster, hit, id).await;
        if is_leader {
            let log = log_of(&pool.cluster.masters[hit]);
            assert!(log.contains("handed over"), "{log}");
        }
        goes_on(&fleet).await;
        leader_is(&mut pool.cluster, hit).await;
        expect_all(&pool.client, &all, OBJECT_BYTES).await;
    }
    not_one_failed(fleet, 100).await;
}

/// The one that is asked for a snapshot holds a wrong record, and no auditor looks: writing the image finds it. Nothing is published, it
/// starts over in place, and then the snapshot is right.
#[tokio::test(flavor = "multi_thread")]
async fn a_snapshot_of_a_wrong_record_is_not_published() {
    let mut pool = watched_pool(|options| {
        let place = options.work_dir.parent().expect("below the test's directory").join("snapshots");
        let url = format!("file://{}", place.display());
        let own = [
            "--snapshot-url",
            &url,
            "--snapshot-interval",
            "0",
            "--snapshot-on-shutdown=false",
            "--audit-interval",
            "0",
        ];
        options.master_arguments.truncate(6);
        options.master_arguments.extend(own.iter().map(|word| word.to_string()));
    })
    .await;
    let place = pool.directory.path().join("snapshots");
    let mut all = keys("all", 200);
    all.push(MARKED.to_owned());
    put_all(&pool.client, &all, OBJECT_BYTES, 1).await;
    let hit = (pool.cluster.leader(WITHIN).await.unwrap() + 1) % 3;
    know_from_a_snapshot(&mut pool.cluster, hit).await;
    let id = pool.cluster.masters[hit].id();
    let before = admin::status(pool.cluster.masters[hit].rpc).await.unwrap().applied_index;
    if flip(&mut pool.cluster, hit).is_none() {
        return;
    }
    let error = admin::take_snapshot(pool.cluster.masters[hit].rpc).await.expect_err("it is wrong");
    println!("{error:#}");
    // What it wrote before is published without being asked for.
    let published = listed(&place).await;
    assert!(published.iter().all(|one| one["index"].as_u64() <= Some(before)), "{published:?} after {before}");
    starts_over(&mut pool.cluster, hit, id).await;
    wait_for("a snapshot", async || admin::take_snapshot(pool.cluster.masters[hit].rpc).await.ok()).await;
    let verified = snapshots(&["verify"], &place).await;
    assert!(verified.status.success(), "{verified:?}");
    // What is restored from it is all there.
    pool.cluster.masters.iter_mut().for_each(|master| _ = master.kill().unwrap());
    let url = format!("file://{}", place.display());
    for master in &mut pool.cluster.masters {
        std::fs::remove_dir_all(&master.data_dir).unwrap();
        master.set_argument("--restore-from", &url);
        master.start().unwrap();
    }
    pool.cluster.wait_serving(WITHIN).await.unwrap();
    wait_for("all to be listed", async || {
        let there = pool.client.exist_many(&all, Some(WITHIN)).await;
        there.into_iter().all(|there| there.is_ok_and(|there| there)).then_some(())
    })
    .await;
    expect_all(&pool.client, &all, OBJECT_BYTES).await;
}

async fn snapshots(what: &[&str], place: &Path) -> Output {
    let mut command = tokio::process::Command::new(rig::binary());
    command.arg("snapshot").args(what).args(["--from", &format!("file://{}", place.display())]).kill_on_drop(true);
    command.output().await.unwrap()
}

/// What lies there, whole or not.
async fn listed(place: &Path) -> Vec<serde_json::Value> {
    let output = snapshots(&["list", "-o", "json"], place).await;
    let shown: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    shown["snapshots"].as_array().cloned().unwrap_or_default()
}

/// A bit flips wherever the key is in a standby's memory: in its state, and in what it keeps of its log. It starts over in place with what is
/// on its disk, or ends and says that its log is damaged; what it publishes is right, and the others go on.
#[tokio::test(flavor = "multi_thread")]
async fn a_standby_hit_in_its_state_and_its_log_starts_over_or_ends_and_says_why() {
    let mut pool = watched_pool(|options| {
        let place = options.work_dir.parent().expect("below the test's directory").join("snapshots");
        let url = format!("file://{}", place.display());
        let own = ["--snapshot-url", &url, "--snapshot-interval", "0", "--snapshot-on-shutdown=false"];
        options.master_arguments.extend(own.iter().map(|word| word.to_string()));
    })
    .await;
    let place = pool.directory.path().join("snapshots");
    let mut all = keys("all", 300);
    all.push(MARKED.to_owned());
    put_all(&pool.client, &all, OBJECT_BYTES, 1).await;
    let hit = (pool.cluster.leader(WITHIN).await.unwrap() + 1) % 3;
    pool.cluster.wait_caught_up(hit, WITHIN).await.unwrap();
    let id = pool.cluster.masters[hit].id();
    if flip(&mut pool.cluster, hit).is_none() {
        return;
    }
    let noted = pool.cluster.masters[hit].data_dir.join("DIVERGED");
    wait_for("it to start over, or to end", async || {
        let done = std::fs::read_to_string(&noted).is_ok_and(|text| text.starts_with("done "));
        (done || !pool.cluster.masters[hit].is_running().unwrap()).then_some(())
    })
    .await;
    if pool.cluster.masters[hit].is_running().unwrap() {
        starts_over(&mut pool.cluster, hit, id).await;
        let rpc = pool.cluster.masters[hit].rpc;
        wait_for("a snapshot", async || admin::take_snapshot(rpc).await.ok()).await;
    } else {
        let ended = pool.cluster.masters[hit].process().unwrap().wait(WITHIN).await.unwrap();
        let log = log_of(&pool.cluster.masters[hit]);
        assert!(ended.code() == Some(CORRUPT) && log.contains("STORAGE_CORRUPT"), "{ended:?}: {log}");
        let leader = pool.cluster.leader(WITHIN).await.unwrap();
        let rpc = pool.cluster.masters[leader].rpc;
        wait_for("a snapshot", async || admin::take_snapshot(rpc).await.ok()).await;
    }
    let verified = snapshots(&["verify"], &place).await;
    assert!(verified.status.success(), "{verified:?}");
    expect_all(&pool.client, &all, OBJECT_BYTES).await;
}

/// Ports of a pool in one process, as it wrote them down last.
fn ports(file: &Path) -> Option<SocketAddr> {
    let ports: serde_json::Value = serde_json::from_slice(&std::fs::read(file).ok()?).ok()?;
    ports["rpc"].as_str()?.parse().ok()
}

/// `tidepool dev` over a data directory: a wrong record makes it start over as the same process, and then it serves as before.
#[tokio::test(flavor = "multi_thread")]
async fn a_pool_in_one_process_starts_over_in_place() {
    let directory = tempfile::tempdir().unwrap();
    let (data_dir, port_file) = (directory.path().join("data"), directory.path().join("ports"));
    let (data, file) = (data_dir.display().to_string(), port_file.display().to_string());
    let words = ["dev", "--free-ports", "--dram", "64MiB", "--data-dir", &data, "--port-file", &file];
    let launch = Launch {
        name: "dev".to_owned(),
        binary: rig::binary(),
        arguments: words.map(str::to_owned).to_vec(),
        environment: Vec::new(),
        namespace: None,
        log: directory.path().join("dev.log"),
    };
    let mut process = Process::spawn(&launch, Lifetime::WithOwner, Input::Null).unwrap();
    // Over again its ports are others.
    let serves = async || {
        wait_for("it to lead a datanode", async || {
            let rpc = ports(&port_file)?;
            let status = admin::status(rpc).await.ok()?;
            let ready = status.role == "leader" && status.segments.iter().any(|segment| segment.free_bytes > 0);
            ready.then_some(rpc)
        })
        .await
    };
    let masters = serves().await.to_string();
    let client = Client::connect(ClientOptions::new(ClientOptions::parse_masters(&masters).unwrap())).await.unwrap();
    put_all(&client, &[MARKED.to_owned()], OBJECT_BYTES, 1).await;
    drop(client);
    match memory::flip(&mut process, MARKED.as_bytes()) {
        Err(error) if error.kind() == std::io::ErrorKind::PermissionDenied => {
            eprintln!("skipped: this user may not write another process's memory: {error}");
            return;
        }
        flipped => assert!(flipped.unwrap() > 0, "the key is nowhere in memory"),
    }
    let noted = data_dir.join("master").join("DIVERGED");
    wait_for("it to start over", async || std::fs::read_to_string(&noted).ok()?.starts_with("done ").then_some(()))
        .await;
    let masters = serves().await.to_string();
    process.expect_running().unwrap();
    let log = std::fs::read_to_string(&launch.log).unwrap();
    assert!(log.contains("starts over from the last agreed snapshot"), "{log}");
    let client = Client::connect(ClientOptions::new(ClientOptions::parse_masters(&masters).unwrap())).await.unwrap();
    let after = keys("after", 20);
    put_all(&client, &after, OBJECT_BYTES, 1).await;
    expect_all(&client, &after, OBJECT_BYTES).await;
    assert!(process.terminate(WITHIN).await.unwrap().success());
}

/// A host whose memory is wrong again and again: after the third time in ten minutes the master ends with its own code and says
/// why, and the others go on.
#[tokio::test(flavor = "multi_thread")]
async fn a_master_that_differs_again_and_again_stays_down_and_says_so() {
    let mut pool = watched_pool(|_| {}).await;
    let mut all = keys("all", 100);
    all.push(MARKED.to_owned());
    put_all(&pool.client, &all, OBJECT_BYTES, 1).await;
    let hit = (pool.cluster.leader(WITHIN).await.unwrap() + 1) % 3;
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs();
    let before: String = (0..3).map(|_| format!("done {now} 7 a digest that differs\n")).collect();
    std::fs::write(pool.cluster.masters[hit].data_dir.join("DIVERGED"), before).unwrap();
    know_from_a_snapshot(&mut pool.cluster, hit).await;
    if flip(&mut pool.cluster, hit).is_none() {
        return;
    }
    let ended = pool.cluster.masters[hit].process().unwrap().wait(WITHIN).await.unwrap();
    let log = log_of(&pool.cluster.masters[hit]);
    assert_eq!(ended.code(), Some(DIVERGED), "{log}");
    assert!(log.contains("4 times") && log.contains("member replace"), "{log}");
    expect_all(&pool.client, &all, OBJECT_BYTES).await;
}

/// `tidepool member recover --start-over`: refused while the master runs; then the next start begins with the agreed snapshot and has
/// the others' state.
#[tokio::test(flavor = "multi_thread")]
async fn an_operator_has_a_master_start_over() {
    let mut pool = watched_pool(|_| {}).await;
    let all = keys("all", 300);
    put_all(&pool.client, &all, OBJECT_BYTES, 1).await;
    let at = (pool.cluster.leader(WITHIN).await.unwrap() + 1) % 3;
    know_from_a_snapshot(&mut pool.cluster, at).await;
    let recover = async |data_dir: &Path| {
        let mut command = tokio::process::Command::new(rig::binary());
        command.args(["member", "recover", "--start-over", "--data-dir"]).arg(data_dir).kill_on_drop(true);
        command.output().await.unwrap()
    };
    let refused = recover(&pool.cluster.masters[at].data_dir).await;
    assert!(!refused.status.success(), "{refused:?}");
    assert!(!pool.cluster.masters[at].data_dir.join("DIVERGED").exists());
    pool.cluster.masters[at].stop(WITHIN).await.unwrap();
    let noted = recover(&pool.cluster.masters[at].data_dir).await;
    assert!(noted.status.success(), "{noted:?}");
    assert!(String::from_utf8_lossy(&noted.stdout).contains("next: start it"), "{noted:?}");
    let more = keys("more", 100);
    put_all(&pool.client, &more, OBJECT_BYTES, 1).await;
    pool.cluster.masters[at].start().unwrap();
    let id = pool.cluster.masters[at].id();
    starts_over(&mut pool.cluster, at, id).await;
    leader_is(&mut pool.cluster, at).await;
    expect_all(&pool.client, &all, OBJECT_BYTES).await;
    expect_all(&pool.client, &more, OBJECT_BYTES).await;
}
