//! Bits that flip on a master's disk, in its log and in its image, while it is down and while it runs: what is wrong is named, nothing of
//! it is served, sent or published, and the state is that of the others in the end.

mod rig;

use std::fs;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use rig::saved::{saved_pool, snapshots};
use rig::{WITHIN, expect_all, keys, pool, put_all, wait_for};
use tidepool_chaos_tests::admin;

const OBJECT_BYTES: usize = 100;
/// Places in the log that are tried.
const PLACES: u64 = 8;
/// Exit code of damaged local storage.
const CORRUPT: i32 = 7;

/// A number that differs from round to round, and is the same in every run.
fn drawn(round: u64, below: u64) -> u64 {
    (round.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 33) % below
}

fn flip(path: &Path, at: u64) {
    let mut bytes = fs::read(path).unwrap();
    bytes[at as usize] ^= 0x10;
    fs::write(path, bytes).unwrap();
}

/// The same of a file that another process has open and may be appending to.
fn flip_in_place(path: &Path, at: u64) {
    let file = fs::File::options().read(true).write(true).open(path).unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, at).unwrap();
    file.write_all_at(&[byte[0] ^ 0x10], at).unwrap();
}

fn files(directory: &Path) -> Vec<PathBuf> {
    let mut files: Vec<PathBuf> = fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.retain(|path| path.is_file());
    files.sort();
    files
}

/// Bytes of the log: those of its write-ahead files and of what was written out.
fn log_files(data_dir: &Path) -> Vec<PathBuf> {
    let is_log = |path: &PathBuf| path.extension().is_some_and(|e| e == "log" || e == "sst" || e == "blob");
    files(&data_dir.join("log").join("db"))
        .into_iter()
        .filter(is_log)
        .filter(|path| fs::metadata(path).unwrap().len() > 0)
        .collect()
}

/// One bit of a stopped standby's log, at one place after the other: it says that its log is damaged and ends, or the place held nothing that
/// counts and it comes back with the others' state.
#[tokio::test(flavor = "multi_thread")]
async fn a_flip_in_the_log_of_a_stopped_standby_is_named_or_harmless() {
    let mut pool = pool(|_| {}).await;
    let all = keys("all", 1_500);
    put_all(&pool.client, &all, OBJECT_BYTES, 1).await;
    let standby = (pool.cluster.leader(WITHIN).await.unwrap() + 1) % 3;
    pool.cluster.wait_caught_up(standby, WITHIN).await.unwrap();
    let mut named = 0;
    for round in 0..PLACES {
        let master = &mut pool.cluster.masters[standby];
        master.kill().unwrap();
        let logs = log_files(&master.data_dir);
        let path = &logs[round as usize % logs.len()];
        let whole = fs::read(path).unwrap();
        flip(path, drawn(round, whole.len() as u64));
        master.start().unwrap();
        let rpc = master.rpc;
        wait_for("its end, or its return", async || {
            let ended = !pool.cluster.masters[standby].is_running().unwrap();
            let follows = async || admin::status(rpc).await.is_ok_and(|status| status.role == "standby");
            (ended || follows().await).then_some(())
        })
        .await;
        let master = &mut pool.cluster.masters[standby];
        if master.is_running().unwrap() {
            pool.cluster.wait_caught_up(standby, WITHIN).await.unwrap();
            assert!(pool.cluster.compare_digests(WITHIN).await.unwrap().is_equal());
            continue;
        }
        let code = master.process().unwrap().wait(WITHIN).await.unwrap().code();
        let tail = master.process().unwrap().log_tail();
        assert!(code == Some(CORRUPT) && tail.contains("STORAGE_CORRUPT"), "{code:?}: {tail}");
        named += 1;
        // It never took part: what it had is as it was.
        fs::write(path, whole).unwrap();
        master.start().unwrap();
        pool.cluster.wait_caught_up(standby, WITHIN).await.unwrap();
    }
    println!("{named} of {PLACES} flips were named");
    assert!(named > 0, "no flip met what counts");
    assert!(pool.cluster.compare_digests(WITHIN).await.unwrap().is_equal());
    expect_all(&pool.client, &all, OBJECT_BYTES).await;
}

/// Bits flip in the log on a standby's disk while it runs, is written to and publishes: it goes on with what it has in memory, and what it
/// publishes is right. When it starts the next time it says that its log is damaged, and takes no part.
#[tokio::test(flavor = "multi_thread")]
async fn flips_in_the_log_of_a_running_standby_reach_nobody() {
    let mut pool = saved_pool(|options| {
        let own = ["--checkpoint-interval", "200ms", "--snapshot-log-bytes", "1GiB"];
        options.master_arguments.extend(own.iter().map(|word| word.to_string()));
    })
    .await;
    let place = snapshots(pool.cluster.work_dir());
    let mut all = keys("all", 500);
    put_all(&pool.client, &all, OBJECT_BYTES, 1).await;
    let standby = (pool.cluster.leader(WITHIN).await.unwrap() + 1) % 3;
    let (rpc, data_dir) = (pool.cluster.masters[standby].rpc, pool.cluster.masters[standby].data_dir.clone());
    for round in 0..PLACES {
        pool.cluster.wait_caught_up(standby, WITHIN).await.unwrap();
        let written_ahead = |path: &PathBuf| path.extension().is_some_and(|e| e == "log");
        let path = log_files(&data_dir).into_iter().rfind(written_ahead).expect("a write-ahead log");
        flip_in_place(&path, drawn(round, fs::metadata(&path).unwrap().len()));
        let more = keys(&format!("more-{round}"), 50);
        put_all(&pool.client, &more, OBJECT_BYTES, 1).await;
        all.extend(more);
        wait_for("a snapshot", async || admin::take_snapshot(rpc).await.ok()).await;
    }
    pool.cluster.wait_caught_up(standby, WITHIN).await.unwrap();
    assert!(pool.cluster.compare_digests(WITHIN).await.unwrap().is_equal());
    let verified = verify(&place).await;
    assert!(verified.status.success(), "{verified:?}");

    let master = &mut pool.cluster.masters[standby];
    master.kill().unwrap();
    master.start().unwrap();
    let code = master.process().unwrap().wait(WITHIN).await.unwrap().code();
    let tail = master.process().unwrap().log_tail();
    assert!(code == Some(CORRUPT) && tail.contains("STORAGE_CORRUPT"), "{code:?}: {tail}");
    expect_all(&pool.client, &all, OBJECT_BYTES).await;
}

async fn verify(place: &Path) -> std::process::Output {
    let mut command = tokio::process::Command::new(rig::binary());
    command.args(["snapshot", "verify", "--from", &format!("file://{}", place.display())]).kill_on_drop(true);
    command.output().await.unwrap()
}

/// A bit of the image flips between the moment when it was checked and the one when it is sent, by a master that publishes slowly: nothing is
/// published, and the next one is right.
#[tokio::test(flavor = "multi_thread")]
async fn an_image_that_decays_on_disk_while_it_is_published_is_not() {
    let mut pool = saved_pool(|options| {
        (options.masters, options.datanodes) = (1, 1);
        let own = ["--snapshot-bytes-per-s", "1KiB", "--snapshot-log-bytes", "1GiB"];
        options.master_arguments.extend(own.iter().map(|word| word.to_string()));
    })
    .await;
    let all = keys("all", 200);
    put_all(&pool.client, &all, OBJECT_BYTES, 1).await;
    let (rpc, data_dir) = (pool.cluster.masters[0].rpc, pool.cluster.masters[0].data_dir.clone());
    let place = snapshots(pool.cluster.work_dir());
    let taking = tokio::spawn(async move { admin::take_snapshot(rpc).await });
    wait_for("the first part to be written", async || {
        let mut open = vec![place.clone()];
        while let Some(directory) = open.pop() {
            for entry in fs::read_dir(&directory).ok()?.filter_map(Result::ok) {
                match entry.path() {
                    path if path.is_dir() => open.push(path),
                    path if path.ends_with("segments") => return Some(()),
                    _ => {}
                }
            }
        }
        None
    })
    .await;
    let image =
        files(&data_dir.join("snapshots")).into_iter().rfind(|path| path.extension().is_some_and(|e| e == "snap"));
    let image = image.expect("an image");
    let bytes = fs::read(&image).unwrap();
    // In what is sent next, most of it.
    flip(&image, bytes.len() as u64 / 2);
    let error = taking.await.unwrap().expect_err("it is damaged");
    println!("{error:#}");
    assert!(format!("{error:#}").contains("when it was checked"), "{error:#}");
    put_all(&pool.client, &keys("more", 10), OBJECT_BYTES, 1).await;
    wait_for("a snapshot that is right", async || admin::take_snapshot(rpc).await.ok()).await;
    let verified = verify(&place).await;
    assert!(verified.status.success(), "{verified:?}");
    // The damaged one is passed over at the next start too.
    pool.cluster.masters[0].kill().unwrap();
    pool.cluster.masters[0].start().unwrap();
    pool.cluster.wait_serving(WITHIN).await.unwrap();
    assert_eq!(pool.cluster.leader_status(WITHIN).await.unwrap().objects, 210);
}
