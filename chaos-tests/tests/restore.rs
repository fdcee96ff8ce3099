//! All masters are lost and a published snapshot is restored, under datanodes and clients that were never stopped: what was saved is
//! there again byte for byte, what was not is a miss, and nothing is ever another object's bytes.

mod rig;

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use rig::saved::{
    OBJECT_BYTES, cluster_directory, expect_all, expect_misses, kill_masters, lose_masters, read, restore,
    restore_from, save, saved_pool, snapshots,
};
use rig::{Pool, WITHIN, assert_space_adds_up, binary, connect, free_bytes, keys, pool, put_all, wait_for};
use tidepool_chaos_tests::admin;

use tidepool_chaos_tests::content::value_of;
use tidepool_chaos_tests::process::Signal;
use tidepool_client::{Client, PutItem, PutOptions, RemoveMode};
use tidepool_proto::{ErrorCode, ObjectId};

fn used_and_capacity(status: &tidepool_proto::v1::StatusResponse) -> (u64, u64) {
    let used = status.segments.iter().map(|s| s.complete_bytes).sum();
    (used, status.segments.iter().map(|s| s.capacity_bytes).sum())
}

/// User reports 4, 16 and 23: a restore that brings nothing back once leases have run out, a control plane whose restart strands
/// the data of live nodes, and figures that are wrong after it. Then all of it again: two histories, one on the other.
#[tokio::test(flavor = "multi_thread")]
async fn case_004_case_016_case_023_all_that_was_saved_is_there_and_the_quorum_is_whole() {
    let mut pool = saved_pool(|options| {
        options.master_arguments.extend(["--lease-ttl".to_owned(), "200ms".to_owned()]);
    })
    .await;
    let saved = keys("saved", 100);
    put_all(&pool.client, &saved, OBJECT_BYTES, 1).await;
    expect_all(&pool.client, &saved, OBJECT_BYTES).await;
    save(&mut pool.cluster).await;
    let before = pool.cluster.leader_status(WITHIN).await.unwrap();
    let lost = keys("lost", 30);
    put_all(&pool.client, &lost, OBJECT_BYTES, 1).await;

    let mut all = saved;
    for round in 0..2 {
        lose_masters(&mut pool.cluster);
        restore(&mut pool.cluster).await;
        // The client and the datanodes were never stopped, and nobody told them anything.
        expect_all(&pool.client, &all, OBJECT_BYTES).await;
        expect_misses(&pool.client, &lost).await;
        let log = std::fs::read_to_string(pool.cluster.masters[0].log()).unwrap();
        assert!(log.contains(&format!("objects: {} in, {} kept", all.len(), all.len())), "{log}");
        let status = pool.cluster.leader_status(WITHIN).await.unwrap();
        assert_space_adds_up(&status);
        if round == 0 {
            assert_eq!(used_and_capacity(&status), used_and_capacity(&before));
        }
        let identity = status.identity.unwrap();
        assert_eq!(identity.ancestors.len(), round + 1);
        wait_for("three voters", async || {
            let status = pool.cluster.leader_status(WITHIN).await.ok()?;
            (status.members.iter().filter(|member| member.voter).count() == 3).then_some(())
        })
        .await;
        let again = keys(&format!("round-{round}"), 30);
        put_all(&pool.client, &again, OBJECT_BYTES, 1).await;
        all.extend(again);
        save(&mut pool.cluster).await;
    }
    // A node that joins later reads through the directory what the others hold.
    pool.cluster.add_datanode().unwrap();
    pool.cluster.wait_serving(WITHIN).await.unwrap();
    expect_all(&connect(&pool.cluster).await, &all, OBJECT_BYTES).await;
}

/// The space of what was saved is given to others before the masters are lost; and then puts make log indexes, and with them ids,
/// places and keys, meet those of the lost end of the log.
#[tokio::test(flavor = "multi_thread")]
async fn space_that_was_reused_is_a_miss_and_never_other_bytes() {
    let mut pool = saved_pool(|options| {
        options.masters = 1;
        options.datanodes = 1;
        options.segment_bytes = 32 << 20;
        options.master_arguments.extend(["--audit-interval".to_owned(), "0".to_owned()]);
    })
    .await;
    const BYTES: usize = 60_000;
    let (a, b) = (keys("a", 150), keys("b", 150));
    put_all(&pool.client, &a, BYTES, 1).await;
    save(&mut pool.cluster).await;
    for result in pool.client.remove_many(&a, RemoveMode::Force, Some(WITHIN)).await {
        result.unwrap();
    }
    wait_for("the space of a", async || {
        let status = pool.cluster.leader_status(WITHIN).await.ok()?;
        (used_and_capacity(&status).0 == 0 && free_bytes(&status) == used_and_capacity(&status).1).then_some(())
    })
    .await;
    put_all(&pool.client, &b, BYTES, 1).await;
    // Far beyond what is logged after the restore until the same keys are put.
    for _ in 0..500 {
        let _missing = pool.client.remove("nothing", RemoveMode::Force, Some(WITHIN)).await;
    }
    let tail = keys("tail", 60);
    for key in &tail {
        put_all(&pool.client, std::slice::from_ref(key), BYTES, 1).await;
    }
    let lost_ids = ids(&pool.client, &tail).await;

    lose_masters(&mut pool.cluster);
    restore(&mut pool.cluster).await;
    expect_misses(&pool.client, &b).await;
    expect_misses(&pool.client, &tail).await;
    let (mut right, mut missed) = (0, 0);
    for key in &a {
        match read(&pool.client, key).await {
            Ok(bytes) => {
                assert!(bytes == value_of(key, 0, BYTES), "{key} came back with other bytes");
                right += 1;
            }
            Err(error) => {
                assert_eq!(error.code(), ErrorCode::ObjectNotFound, "{key}: {error}");
                missed += 1;
            }
        }
    }
    println!("of 150 restored objects {missed} were overwritten, {right} not");
    assert!(missed >= 140, "b lay elsewhere: {missed}");
    // What a datanode finds to be another object leaves the directory.
    wait_for("a to leave the directory", async || {
        let status = pool.cluster.leader_status(WITHIN).await.ok()?;
        (status.objects as usize == right).then_some(())
    })
    .await;
    // The same keys and sizes, other values: ids and places meet those of before.
    for seed in 1..4u64 {
        for batch in b.chunks(50) {
            let items = batch.iter().map(|key| PutItem::new(key.clone(), value_of(key, seed, BYTES))).collect();
            let options = PutOptions { replace: true, deadline: Some(WITHIN), ..PutOptions::default() };
            for result in pool.client.put_many(items, options).await {
                result.unwrap();
            }
            for key in batch {
                let bytes = read(&pool.client, key).await.unwrap();
                assert!(bytes == value_of(key, seed, BYTES), "{key} came back with other bytes");
            }
        }
        assert_space_adds_up(&pool.cluster.leader_status(WITHIN).await.unwrap());
    }
    for key in &tail {
        let options = PutOptions { deadline: Some(WITHIN), ..PutOptions::default() };
        pool.client.put(key.clone(), value_of(key, 9, BYTES), options).await.unwrap();
        let bytes = read(&pool.client, key).await.unwrap();
        assert!(bytes == value_of(key, 9, BYTES), "{key} came back with other bytes");
    }
    let new_ids = ids(&pool.client, &tail).await;
    let same = new_ids.iter().filter(|id| lost_ids.contains(id)).count();
    println!("{same} of {} objects have an id that was lost", new_ids.len());
    assert!(new_ids.iter().min() < lost_ids.iter().max(), "log indexes did not meet");
}

/// Two branches of one past: the same ids, keys, lengths and places under two histories. The snapshot of the one is restored while
/// memory holds the other. Fails when the client does not compare the header's history (tried).
#[tokio::test(flavor = "multi_thread")]
async fn another_branch_of_the_same_past_is_told_apart_by_its_history() {
    let mut pool = saved_pool(|options| {
        (options.masters, options.datanodes) = (1, 1);
        options.master_arguments.extend(["--audit-interval".to_owned(), "0".to_owned()]);
    })
    .await;
    put_all(&pool.client, &keys("base", 10), OBJECT_BYTES, 1).await;
    save(&mut pool.cluster).await;
    let first = cluster_directory(&mut pool.cluster).await;
    let tail = keys("tail", 40);

    lose_masters(&mut pool.cluster);
    restore(&mut pool.cluster).await;
    // Room for the other branch to reach the same indexes.
    for _ in 0..60 {
        let _missing = pool.client.remove("nothing", RemoveMode::Force, Some(WITHIN)).await;
    }
    let one = branch(&mut pool, &tail, 1, None).await;
    save(&mut pool.cluster).await;
    let second = cluster_directory(&mut pool.cluster).await;

    lose_masters(&mut pool.cluster);
    restore_from(&mut pool.cluster, &first).await;
    expect_misses(&pool.client, &tail[..5]).await;
    let other = branch(&mut pool, &tail, 2, Some(&one)).await;
    let same = one.iter().filter(|place| other.contains(place)).count();
    println!("{same} of {} objects have the same id and place in both branches", tail.len());
    assert!(same > 0, "the branches did not meet");

    lose_masters(&mut pool.cluster);
    restore_from(&mut pool.cluster, &second).await;
    for key in &tail {
        match read(&pool.client, key).await {
            Ok(bytes) => assert!(bytes == value_of(key, 1, OBJECT_BYTES), "{key} came back with other bytes"),
            Err(error) => assert_eq!(error.code(), ErrorCode::ObjectNotFound, "{key}: {error}"),
        }
    }
    expect_all(&pool.client, &keys("base", 10), OBJECT_BYTES).await;
}

/// Puts the keys one by one; with another branch, each at the log index that it had there, where that is still to come. Answers id and
/// offset of each.
async fn branch(pool: &mut Pool, tail: &[String], seed: u64, other: Option<&[(u64, u64)]>) -> Vec<(u64, u64)> {
    for (at, key) in tail.iter().enumerate() {
        if let Some((id, _)) = other.map(|other| other[at]) {
            while admin::status(pool.cluster.masters[0].rpc).await.unwrap().last_log_index + 1
                < ObjectId(id).op().log_index()
            {
                let _missing = pool.client.remove("nothing", RemoveMode::Force, Some(WITHIN)).await;
            }
        }
        let options = PutOptions { deadline: Some(WITHIN), ..PutOptions::default() };
        pool.client.put(key.clone(), value_of(key, seed, OBJECT_BYTES), options).await.unwrap();
    }
    let stats = pool.client.stat_many(tail, Some(WITHIN)).await;
    let place = |stat: tidepool_client::ObjectStat| (stat.object_id, stat.replicas[0].replica.offset);
    stats.into_iter().map(|stat| place(stat.unwrap())).collect()
}

async fn ids(client: &Client, keys: &[String]) -> Vec<u64> {
    let stats = client.stat_many(keys, Some(WITHIN)).await;
    stats.into_iter().map(|stat| stat.unwrap().object_id).collect()
}

/// Puts go on while the masters are lost and restored: whatever was acknowledged by the restored ones is there, and no get has
/// other bytes.
#[tokio::test(flavor = "multi_thread")]
async fn writes_in_flight_across_a_restore_end_right() {
    let mut pool = saved_pool(|options| options.masters = 1).await;
    let saved = keys("saved", 50);
    // Pinned: what is put meanwhile would evict them, in either history.
    let items = saved.iter().map(|key| PutItem::new(key.clone(), value_of(key, 0, OBJECT_BYTES))).collect();
    let options = PutOptions { hard_pin: true, deadline: Some(WITHIN), ..PutOptions::default() };
    for result in pool.client.put_many(items, options).await {
        result.unwrap();
    }
    save(&mut pool.cluster).await;
    let restored = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
    let writers: Vec<_> = (0..4)
        .map(|writer| {
            let (client, restored) = (pool.client.clone(), restored.clone());
            tokio::spawn(async move {
                let (mut after, mut failed) = (Vec::new(), 0);
                for i in 0.. {
                    let key = format!("flight/{writer}/{i}");
                    let began_after = restored.load(std::sync::atomic::Ordering::Acquire);
                    let value = value_of(&key, 0, 1 << 20);
                    let options = PutOptions { deadline: Some(Duration::from_secs(20)), ..PutOptions::default() };
                    let put = client.put(key.clone(), value, options).await;
                    match put {
                        Ok(_) if began_after => after.push(key),
                        Ok(_) => {}
                        Err(_) => failed += 1,
                    }
                    if after.len() >= 5 {
                        break;
                    }
                }
                (after, failed)
            })
        })
        .collect();
    tokio::time::sleep(Duration::from_millis(200)).await;
    lose_masters(&mut pool.cluster);
    restore(&mut pool.cluster).await;
    restored.store(true, std::sync::atomic::Ordering::Release);
    for writer in writers {
        let (after, failed) = tokio::time::timeout(WITHIN * 2, writer).await.expect("the writers go on").unwrap();
        println!("{failed} puts failed on the way");
        for key in &after {
            let bytes = read(&pool.client, key).await.unwrap();
            assert!(bytes == value_of(key, 0, 1 << 20), "{key} came back with other bytes");
        }
    }
    expect_all(&pool.client, &saved, OBJECT_BYTES).await;
    assert_space_adds_up(&pool.cluster.leader_status(WITHIN).await.unwrap());
}

/// One datanode is a new process when the masters come back, one was away: what the one held is lost, what the other holds is
/// listed as soon as it is heard.
#[tokio::test(flavor = "multi_thread")]
async fn a_restarted_datanode_lost_its_content_and_a_late_one_keeps_it() {
    let mut pool = saved_pool(|options| options.masters = 1).await;
    let objects = keys("both", 60);
    put_all(&pool.client, &objects, OBJECT_BYTES, 1).await;
    save(&mut pool.cluster).await;
    let holders = holders(&pool.client, &objects).await;
    let restarted = pool.cluster.datanodes[1].rpc.to_string();
    pool.cluster.datanodes[1].kill().unwrap();
    pool.cluster.datanodes[1].start().unwrap();
    pool.cluster.wait_serving(WITHIN).await.unwrap();

    pool.cluster.datanodes[0].process().unwrap().signal(Signal::STOP).unwrap();
    lose_masters(&mut pool.cluster);
    let url = format!("file://{}", snapshots(pool.cluster.work_dir()).display());
    pool.cluster.masters[0].add_arguments(&["--restore-from", &url]);
    pool.cluster.masters[0].start().unwrap();
    wait_for("the restarted datanode alone", async || {
        let status = pool.cluster.leader_status(WITHIN).await.ok()?;
        let heard = status.nodes.iter().filter(|node| !node.suspect).count();
        (heard == 1).then_some(())
    })
    .await;
    let early = connect(&pool.cluster).await;
    assert!(early.exist_many(&objects, None).await.into_iter().all(|there| !there.unwrap()), "nobody confirmed it");
    pool.cluster.datanodes[0].process().unwrap().signal(Signal::CONT).unwrap();
    pool.cluster.wait_serving(WITHIN).await.unwrap();
    let (mut kept, mut gone) = (Vec::new(), Vec::new());
    for (key, holder) in objects.iter().zip(holders) {
        if holder == restarted { gone.push(key.clone()) } else { kept.push(key.clone()) }
    }
    assert!(!kept.is_empty() && !gone.is_empty());
    expect_all(&pool.client, &kept, OBJECT_BYTES).await;
    expect_misses(&pool.client, &gone).await;
}

/// Address of the one node that has each object.
async fn holders(client: &Client, objects: &[String]) -> Vec<String> {
    let stats = client.stat_many(objects, Some(WITHIN)).await;
    stats.into_iter().map(|stat| stat.unwrap().replicas[0].address.clone()).collect()
}

/// A majority is lost for ever: the last master goes on alone, datanodes and clients follow with all they hold.
#[tokio::test(flavor = "multi_thread")]
async fn datanodes_and_clients_follow_a_forced_recovery() {
    let mut pool = pool(|_| {}).await;
    let objects = keys("recovered", 60);
    put_all(&pool.client, &objects, OBJECT_BYTES, 2).await;
    let leader = pool.cluster.leader(WITHIN).await.unwrap();
    pool.cluster.wait_caught_up(0, WITHIN).await.unwrap();
    let _was = leader;
    kill_masters(&mut pool.cluster);
    for lost in 1..3 {
        std::fs::remove_dir_all(&pool.cluster.masters[lost].data_dir).unwrap();
    }
    let mut command = tokio::process::Command::new(binary());
    command.args(["member", "recover", "--from-this-node", "--accept-data-loss", "--data-dir"]);
    command.arg(&pool.cluster.masters[0].data_dir).stdin(Stdio::null()).kill_on_drop(true);
    let output = command.output().await.unwrap();
    assert!(output.status.success(), "{output:?}");
    pool.cluster.masters[0].start().unwrap();
    wait_for("the survivor and both datanodes", async || {
        let status = admin::status(pool.cluster.masters[0].rpc).await.ok()?;
        let heard = status.nodes.iter().filter(|node| !node.suspect).count();
        (status.role == "leader" && heard == 2).then_some(())
    })
    .await;
    expect_all(&pool.client, &objects, OBJECT_BYTES).await;
    put_all(&pool.client, &keys("after", 20), OBJECT_BYTES, 2).await;
}

/// A unit file keeps `--restore-from`. A member that comes back with an empty disk while another one still has the cluster makes no
/// second cluster beside it, and says what to do.
#[tokio::test(flavor = "multi_thread")]
async fn a_member_without_data_restores_nothing_beside_one_that_has_some() {
    let mut pool = saved_pool(|_| {}).await;
    put_all(&pool.client, &keys("saved", 10), OBJECT_BYTES, 1).await;
    save(&mut pool.cluster).await;
    pool.cluster.wait_caught_up(2, WITHIN).await.unwrap();
    for lost in 0..2 {
        pool.cluster.masters[lost].kill().unwrap();
    }
    let url = format!("file://{}", snapshots(pool.cluster.work_dir()).display());
    let first = &mut pool.cluster.masters[0];
    std::fs::remove_dir_all(&first.data_dir).unwrap();
    first.set_argument("--restore-from", &url);
    first.start().unwrap();
    let ended = first.process().unwrap().wait(WITHIN).await.unwrap();
    let log = std::fs::read_to_string(first.log()).unwrap();
    assert!(!ended.success() && log.contains("nothing is restored: node 3") && log.contains("member replace"), "{log}");
    assert!(!first.data_dir.join("identity").exists(), "a cluster was made");
    // With the second one back the cluster goes on as it was.
    pool.cluster.masters[1].start().unwrap();
    wait_for("a leader of the two", async || {
        let status = admin::status(pool.cluster.masters[2].rpc).await.ok()?;
        let other = admin::status(pool.cluster.masters[1].rpc).await.ok()?;
        (status.role == "leader" || other.role == "leader").then_some(())
    })
    .await;
}

/// A cluster that publishes only on demand begins with the image of the one before: that is not its own, and never bears its name.
#[tokio::test(flavor = "multi_thread")]
async fn an_image_from_before_the_history_is_not_published_under_its_name() {
    let mut pool = saved_pool(|options| options.masters = 1).await;
    put_all(&pool.client, &keys("saved", 10), OBJECT_BYTES, 1).await;
    let before = save(&mut pool.cluster).await;
    lose_masters(&mut pool.cluster);
    restore(&mut pool.cluster).await;
    // It has looked at what is to be published several times by then.
    wait_for("some time without a publication", async || {
        let status = pool.cluster.leader_status(WITHIN).await.ok()?.snapshot?;
        (status.since_ms > 4_000 || status.published_index > 0).then_some(())
    })
    .await;
    let own = cluster_directory(&mut pool.cluster).await;
    let own = snapshots(pool.cluster.work_dir()).join(&own[1..]);
    assert!(!own.exists(), "the image of the cluster before was published");
    assert!(save(&mut pool.cluster).await > before);
    assert!(own.exists());
}

/// Killed at any moment, a restore leaves a directory that the next start makes anew. Each kill waits for a state of the directory, and
/// most of them must have caught a restore.
#[tokio::test(flavor = "multi_thread")]
async fn a_restore_that_is_killed_begins_again() {
    let mut pool = saved_pool(|options| options.masters = 1).await;
    let objects = keys("killed", 100);
    put_all(&pool.client, &objects, OBJECT_BYTES, 1).await;
    save(&mut pool.cluster).await;
    lose_masters(&mut pool.cluster);
    let url = format!("file://{}", snapshots(pool.cluster.work_dir()).display());
    pool.cluster.masters[0].add_arguments(&["--restore-from", &url]);
    const ROUNDS: usize = 20;
    const CAUGHT_MIN: usize = ROUNDS / 2;
    let data_dir = pool.cluster.masters[0].data_dir.clone();
    let mark = data_dir.join("unfinished");
    let signs = ["unfinished", "snapshots", "log", "log/STORE", "identity"];
    let mut caught = 0;
    for round in 0..ROUNDS {
        let sign = data_dir.join(signs[round % signs.len()]);
        pool.cluster.masters[0].start().unwrap();
        let since = std::time::Instant::now();
        while !sign.exists() && since.elapsed() < WITHIN {
            std::thread::yield_now();
        }
        pool.cluster.masters[0].kill().unwrap();
        assert!(sign.exists(), "no {} within {WITHIN:?}", sign.display());
        caught += usize::from(mark.exists());
        if !mark.exists() {
            // It was done: the next one needs an empty directory again.
            std::fs::remove_dir_all(&data_dir).unwrap();
        }
    }
    println!("{caught} of {ROUNDS} kills caught a restore");
    assert!(caught >= CAUGHT_MIN, "only {caught} of {ROUNDS} kills caught a restore");
    pool.cluster.masters[0].start().unwrap();
    pool.cluster.wait_serving(WITHIN).await.unwrap();
    // A leader that was away longer than datanodes may be silent suspects them until they have found it.
    wait_for("all of them to be listed", async || {
        let there = pool.client.exist_many(&objects, Some(WITHIN)).await;
        there.into_iter().all(|there| there.is_ok_and(|there| there)).then_some(())
    })
    .await;
    expect_all(&pool.client, &objects, OBJECT_BYTES).await;
}

/// A damaged snapshot is passed over for an older one, and it is said; without the word nobody begins empty beside snapshots.
#[tokio::test(flavor = "multi_thread")]
async fn a_damaged_snapshot_is_passed_over_and_an_empty_start_is_refused() {
    let mut pool = saved_pool(|options| options.masters = 1).await;
    let (old, new) = (keys("old", 30), keys("new", 30));
    put_all(&pool.client, &old, OBJECT_BYTES, 1).await;
    save(&mut pool.cluster).await;
    put_all(&pool.client, &new, OBJECT_BYTES, 1).await;
    let newest = save(&mut pool.cluster).await;
    lose_masters(&mut pool.cluster);
    let master = &mut pool.cluster.masters[0];
    master.start().unwrap();
    let ended = master.process().unwrap().wait(WITHIN).await.unwrap();
    let log = std::fs::read_to_string(master.log()).unwrap();
    assert!(!ended.success() && log.contains("--restore-from") && log.contains("--accept-data-loss"), "{log}");

    let metadata =
        find(&snapshots(pool.directory.path().join("pool").as_path()), &format!("{newest:020}-"), "metadata");
    let mut bytes = std::fs::read(&metadata).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    std::fs::write(&metadata, bytes).unwrap();
    restore(&mut pool.cluster).await;
    expect_all(&pool.client, &old, OBJECT_BYTES).await;
    expect_misses(&pool.client, &new).await;
    let log = std::fs::read_to_string(pool.cluster.masters[0].log()).unwrap();
    assert!(log.contains("skipped: ") && log.contains("objects: 30 in, 30 kept"), "{log}");
}

/// User report 13: after a recovery what was just read was evicted before what nobody asked for, and space was lost.
#[tokio::test(flavor = "multi_thread")]
async fn case_013_what_is_read_after_a_restore_outlives_what_is_not() {
    let mut pool = saved_pool(|options| {
        (options.masters, options.datanodes, options.segment_bytes) = (1, 1, 16 << 20);
        options.master_arguments.extend(["--lease-ttl".to_owned(), "200ms".to_owned()]);
    })
    .await;
    let objects = keys("cold", 700);
    put_all(&pool.client, &objects, OBJECT_BYTES, 1).await;
    save(&mut pool.cluster).await;
    let before = used_and_capacity(&pool.cluster.leader_status(WITHIN).await.unwrap());
    lose_masters(&mut pool.cluster);
    restore(&mut pool.cluster).await;
    let status = pool.cluster.leader_status(WITHIN).await.unwrap();
    assert_eq!(used_and_capacity(&status), before);
    assert_space_adds_up(&status);
    // The oldest of all, so that only the reads speak for them.
    let (read, unread) = objects.split_at(100);
    for _ in 0..3 {
        expect_all(&pool.client, read, OBJECT_BYTES).await;
    }
    put_all(&pool.client, &keys("more", 300), OBJECT_BYTES, 1).await;
    let there = async |keys: &[String]| {
        let stats = pool.client.stat_many(keys, Some(WITHIN)).await;
        stats.into_iter().filter(|stat| stat.is_ok()).count()
    };
    let (read_there, unread_there) = (there(read).await, there(unread).await);
    println!("{read_there} of 100 that were read are there, {unread_there} of 600 that were not");
    assert_eq!(read_there, 100);
    assert!(unread_there < 600, "nothing was evicted");
    let status = pool.cluster.leader_status(WITHIN).await.unwrap();
    assert_space_adds_up(&status);
    assert_eq!(used_and_capacity(&status).1, before.1);
}

/// The file of this name in the snapshot directory that begins so.
fn find(below: &Path, snapshot: &str, file: &str) -> PathBuf {
    let mut open = vec![below.to_owned()];
    while let Some(directory) = open.pop() {
        for entry in std::fs::read_dir(&directory).unwrap() {
            let path = entry.unwrap().path();
            let parent = directory.file_name().unwrap().to_string_lossy().into_owned();
            if path.is_dir() {
                open.push(path);
            } else if parent.starts_with(snapshot) && path.file_name().unwrap().to_string_lossy().starts_with(file) {
                return path;
            }
        }
    }
    panic!("no {file} of {snapshot} below {}", below.display());
}
