//! Snapshots in an object store, in real processes: what was published there is restored, and a store that is down, or takes requests
//! and never answers, costs no call and holds up no stop for long.

mod rig;

use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use rig::s3::{S3Server, binary_that_trusts, binary_with_credentials, url};
use rig::saved::{OBJECT_BYTES, expect_all, expect_misses, lose_masters, save};
use rig::{Pool, WITHIN, assert_space_adds_up, goes_on, keys, load, not_one_failed, pool, put_all, wait_for};
use tidepool_chaos_tests::content::value_of;
use tidepool_chaos_tests::{admin, ports};

/// Bytes of noise in a long key; a key shows them as digits.
const KEY_NOISE: usize = 450;

/// A pool that publishes to this place.
async fn publishing_pool(place: &str, more: &[&str]) -> Pool {
    pool(|options| {
        let directory = options.work_dir.parent().expect("below the test's directory");
        options.binary = binary_with_credentials(directory);
        // So that on a busy machine nobody but the test changes who leads.
        options.election = "wan".to_owned();
        let own = ["--snapshot-url", place, "--snapshot-interval", "0", "--checkpoint-interval", "200ms"];
        options.master_arguments = own.iter().chain(more).map(|word| word.to_string()).collect();
    })
    .await
}

/// One master, which publishes to this server when it is told to, and one datanode.
async fn single_pool(server: &S3Server, binary: impl FnOnce(&Path) -> PathBuf) -> Pool {
    pool(|options| {
        options.binary = binary(options.work_dir.parent().expect("below the test's directory"));
        (options.masters, options.datanodes) = (1, 1);
        let own = ["--snapshot-url", &server.url(), "--snapshot-interval", "0", "--snapshot-on-shutdown=false"];
        options.master_arguments = own.iter().map(|word| word.to_string()).collect();
    })
    .await
}

#[tokio::test(flavor = "multi_thread")]
async fn what_was_published_to_an_s3_server_is_restored_from_it() {
    let directory = tempfile::tempdir().unwrap();
    let Some(server) = S3Server::start(directory.path()).await else { return };
    let mut pool = publishing_pool(&server.url(), &["--snapshot-on-shutdown=false"]).await;
    let (mut saved, lost) = (keys("saved", 60), keys("lost", 20));
    put_all(&pool.client, &saved, OBJECT_BYTES, 1).await;
    save(&mut pool.cluster).await;
    put_all(&pool.client, &lost, OBJECT_BYTES, 1).await;
    for round in 0..2 {
        lose_masters(&mut pool.cluster);
        for master in &mut pool.cluster.masters {
            master.set_argument("--restore-from", &server.url());
            master.start().unwrap();
        }
        pool.cluster.wait_serving(WITHIN).await.unwrap();
        expect_all(&pool.client, &saved, OBJECT_BYTES).await;
        expect_misses(&pool.client, &lost).await;
        assert_space_adds_up(&pool.cluster.leader_status(WITHIN).await.unwrap());
        let more = keys(&format!("round-{round}"), 20);
        put_all(&pool.client, &more, OBJECT_BYTES, 1).await;
        saved.extend(more);
        save(&mut pool.cluster).await;
    }
    // It goes away: that is said, and nothing else happens.
    drop(server);
    let leader = pool.cluster.leader(WITHIN).await.unwrap();
    let refused = admin::take_snapshot(pool.cluster.masters[leader].rpc).await.expect_err("nobody is there");
    println!("{refused:#}");
    expect_all(&pool.client, &saved, OBJECT_BYTES).await;
}

/// A snapshot that is sent in several pieces of 8 MiB: it is published, whole to whoever reads it through, and restored.
#[tokio::test(flavor = "multi_thread")]
async fn a_snapshot_of_several_pieces_goes_to_an_s3_server_and_comes_back() {
    let directory = tempfile::tempdir().unwrap();
    let Some(server) = S3Server::start(directory.path()).await else { return };
    let mut pool = single_pool(&server, binary_with_credentials).await;
    // Long keys that nothing compresses.
    let long = |name: String| {
        let noise: String = value_of(&name, 0, KEY_NOISE).iter().map(|byte| format!("{byte:02x}")).collect();
        format!("{name}/{noise}")
    };
    let objects: Vec<String> = keys("piece", 40_000).into_iter().map(long).collect();
    put_all(&pool.client, &objects, 16, 1).await;
    save(&mut pool.cluster).await;
    let status = admin::status(pool.cluster.masters[0].rpc).await.unwrap();
    let published = status.snapshot.unwrap().bytes;
    println!("{published} bytes were published");
    assert!(published > 16 << 20, "{published} bytes are no three pieces");
    lose_masters(&mut pool.cluster);
    pool.cluster.masters[0].set_argument("--restore-from", &server.url());
    pool.cluster.masters[0].start().unwrap();
    pool.cluster.wait_serving(WITHIN).await.unwrap();
    assert_eq!(pool.cluster.leader_status(WITHIN).await.unwrap().objects, objects.len() as u64);
    let some: Vec<String> = objects.iter().step_by(2_000).cloned().collect();
    expect_all(&pool.client, &some, 16).await;
}

/// A restore from a store that is not there, or does not answer, makes nothing and says so; with the store it is done.
#[tokio::test(flavor = "multi_thread")]
async fn a_restore_waits_for_no_store_that_is_down() {
    let directory = tempfile::tempdir().unwrap();
    let Some(server) = S3Server::start(directory.path()).await else { return };
    let mut pool = publishing_pool(&server.url(), &["--snapshot-on-shutdown=false"]).await;
    let saved = keys("saved", 20);
    put_all(&pool.client, &saved, OBJECT_BYTES, 1).await;
    save(&mut pool.cluster).await;
    lose_masters(&mut pool.cluster);
    let down = SocketAddr::from(([127, 0, 0, 1], ports::reserve(1).unwrap()[0]));
    let first = &mut pool.cluster.masters[0];
    first.set_argument("--restore-from", &url(down));
    first.start().unwrap();
    let ended = first.process().unwrap().wait(WITHIN).await.unwrap();
    let log = std::fs::read_to_string(first.log()).unwrap();
    assert!(!ended.success() && log.contains("s3://bucket/deep/er"), "{ended}: {log}");
    assert!(!first.data_dir.join("identity").exists(), "a cluster was made");
    for master in &mut pool.cluster.masters {
        master.set_argument("--restore-from", &server.url());
        master.start().unwrap();
    }
    pool.cluster.wait_serving(WITHIN).await.unwrap();
    expect_all(&pool.client, &saved, OBJECT_BYTES).await;
}

/// A master that lost its data and would publish to a store that takes requests and never answers: whether there is something to restore
/// cannot be known, so it begins no empty cluster, says what to do, and ends soon; told to, it begins, whatever the store does.
/// Tried without the limit of the check: fails.
#[tokio::test(flavor = "multi_thread")]
async fn an_empty_master_waits_for_no_store_that_hangs_and_begins_nothing_beside_it() {
    let directory = tempfile::tempdir().unwrap();
    let Some(server) = S3Server::start(directory.path()).await else { return };
    let mut pool = single_pool(&server, binary_with_credentials).await;
    put_all(&pool.client, &keys("saved", 10), OBJECT_BYTES, 1).await;
    lose_masters(&mut pool.cluster);
    server.hang();
    let master = &mut pool.cluster.masters[0];
    master.start().unwrap();
    let ended = master.process().unwrap().wait(WITHIN).await.unwrap();
    let log = std::fs::read_to_string(master.log()).unwrap();
    assert!(
        !ended.success() && log.contains("s3://bucket/deep/er") && log.contains("--accept-data-loss"),
        "{ended}: {log}"
    );
    assert!(!master.data_dir.join("identity").exists(), "a cluster was made");
    master.add_arguments(&["--accept-data-loss"]);
    master.start().unwrap();
    let rpc = master.rpc;
    wait_for("an empty cluster", async || admin::status(rpc).await.ok().filter(|status| status.role == "leader")).await;
}

/// TLS to the store: a certificate that nobody vouches for is refused by name; trusted, it is published and restored.
#[tokio::test(flavor = "multi_thread")]
async fn a_store_is_spoken_to_over_tls_and_its_certificate_is_checked() {
    let directory = tempfile::tempdir().unwrap();
    let Some(server) = S3Server::start_tls(directory.path()).await else { return };
    let certificate = server.certificate.clone().expect("it speaks TLS");
    let mut pool = single_pool(&server, |directory| binary_that_trusts(directory, &certificate)).await;
    let saved = keys("saved", 20);
    put_all(&pool.client, &saved, OBJECT_BYTES, 1).await;
    save(&mut pool.cluster).await;
    lose_masters(&mut pool.cluster);
    let trusting = pool.cluster.options().binary.clone();
    let master = &mut pool.cluster.masters[0];
    master.set_argument("--restore-from", &server.url());
    master.set_binary(&binary_with_credentials(directory.path()));
    master.start().unwrap();
    let ended = master.process().unwrap().wait(WITHIN * 2).await.unwrap();
    let log = std::fs::read_to_string(master.log()).unwrap();
    assert!(!ended.success() && log.to_lowercase().contains("certificate"), "{ended}: {log}");
    master.set_binary(&trusting);
    master.start().unwrap();
    pool.cluster.wait_serving(WITHIN).await.unwrap();
    expect_all(&pool.client, &saved, OBJECT_BYTES).await;
}

/// The leader is told to stop while the place of its snapshots is down, or hangs: it hands over first, ends by itself and well, and
/// clients notice nothing.
#[tokio::test(flavor = "multi_thread")]
async fn a_leader_stops_in_order_while_its_object_store_hangs_or_is_down() {
    let directory = tempfile::tempdir().unwrap();
    for hangs in [true, false] {
        let Some(server) = S3Server::start(directory.path()).await else { return };
        let mut pool = publishing_pool(&server.url(), &[]).await;
        let all = keys("all", 50);
        put_all(&pool.client, &all, OBJECT_BYTES, 1).await;
        let fleet = load(&pool, 50.0);
        goes_on(&fleet).await;
        let leader = pool.cluster.leader(WITHIN).await.unwrap();
        match hangs {
            true => server.hang(),
            false => drop(server),
        }
        pool.cluster.masters[leader].stop(WITHIN).await.unwrap();
        let log = std::fs::read_to_string(pool.cluster.masters[leader].log()).unwrap();
        assert!(log.contains("handed leadership over") && log.contains("not published"), "{log}");
        goes_on(&fleet).await;
        pool.cluster.masters[leader].start().unwrap();
        pool.cluster.wait_caught_up(leader, WITHIN).await.unwrap();
        wait_for("another leader", async || pool.cluster.leader(WITHIN).await.ok().filter(|&at| at != leader)).await;
        not_one_failed(fleet, 50).await;
        expect_all(&pool.client, &all, OBJECT_BYTES).await;
        assert!(pool.cluster.compare_digests(WITHIN).await.unwrap().is_equal());
    }
}
