//! A bit that flips on a master's disk, in its image, while it runs: what is wrong is named, and nothing of it is published.

mod rig;

use std::fs;
use std::path::{Path, PathBuf};

use rig::saved::{saved_pool, snapshots};
use rig::{WITHIN, keys, put_all, wait_for};
use tidepool_chaos_tests::admin;

const OBJECT_BYTES: usize = 100;

fn flip(path: &Path, at: u64) {
    let mut bytes = fs::read(path).unwrap();
    bytes[at as usize] ^= 0x10;
    fs::write(path, bytes).unwrap();
}

fn files(directory: &Path) -> Vec<PathBuf> {
    let mut files: Vec<PathBuf> = fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.retain(|path| path.is_file());
    files.sort();
    files
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
    let verify = async || {
        let mut command = tokio::process::Command::new(rig::binary());
        command.args(["snapshot", "verify", "--from", &format!("file://{}", place.display())]).kill_on_drop(true);
        command.output().await.unwrap()
    };
    put_all(&pool.client, &keys("more", 10), OBJECT_BYTES, 1).await;
    wait_for("a snapshot that is right", async || admin::take_snapshot(rpc).await.ok()).await;
    let verified = verify().await;
    assert!(verified.status.success(), "{verified:?}");
    // The damaged one is passed over at the next start too.
    pool.cluster.masters[0].kill().unwrap();
    pool.cluster.masters[0].start().unwrap();
    pool.cluster.wait_serving(WITHIN).await.unwrap();
    assert_eq!(pool.cluster.leader_status(WITHIN).await.unwrap().objects, 210);
}
