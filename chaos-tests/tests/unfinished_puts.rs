//! Puts that nobody finishes: writers that die between PutStart and PutEnd, and targets that die under a put.

mod rig;

use std::time::Duration;

use rig::{WITHIN, assert_space_adds_up, expect_all, free_bytes, keys, pool, put_all, wait_for};
use tidepool_chaos_tests::audit::remove_all;
use tidepool_chaos_tests::content::value_of;
use tidepool_chaos_tests::fleet::{Fleet, FleetOptions};
use tidepool_chaos_tests::rogue::RogueClient;
use tidepool_client::{ErrorCode, PutOptions};

const OBJECT_BYTES: usize = 64 << 10;

/// Waits until nothing is processing or retired, with every byte accounted for, and returns the free bytes.
async fn settled_free_bytes(pool: &mut rig::Pool, wanted: Option<u64>) -> u64 {
    wait_for("unfinished and retired space to come back", async || {
        let status = pool.cluster.leader_status(WITHIN).await.ok()?;
        assert_space_adds_up(&status);
        let free = free_bytes(&status);
        let busy = status.segments.iter().any(|s| s.processing_bytes + s.retired_bytes > 0);
        (!busy && wanted.is_none_or(|wanted| wanted == free)).then_some(free)
    })
    .await
}

/// User reports 38 and 40: a writer that died between start and end left keys unreadable, unremovable, unwritable and
/// their space leaked. 100 grants of writers that are gone, and five writers killed under load, with a failover while
/// the grants are open: the space comes back and the keys can be written. Fails when unfinished puts are not discarded.
#[tokio::test(flavor = "multi_thread")]
async fn case_038_unfinished_puts_of_dead_writers_give_everything_back() {
    let mut pool = pool(|options| {
        options.master_arguments = ["--put-start-discard-timeout", "2s"].map(String::from).to_vec();
    })
    .await;
    let baseline = settled_free_bytes(&mut pool, None).await;

    let leader = pool.cluster.leader(WITHIN).await.unwrap();
    let abandoned = keys("case-038", 100);
    for ten in abandoned.chunks(10) {
        let mut writer = RogueClient::open(pool.cluster.masters[leader].rpc).await.unwrap();
        let asked: Vec<&[u8]> = ten.iter().map(|key| key.as_bytes()).collect();
        for grant in writer.put_start(&asked, OBJECT_BYTES as u64, 1).await.unwrap() {
            assert_eq!(grant.error, None);
        }
        // Gone, connection and all.
        drop(writer);
    }
    let mut killed = Vec::new();
    for round in 0..5 {
        let mut fleet = Fleet::start(&FleetOptions {
            binary: rig::binary(),
            directory: pool.directory.path().join(format!("writer-{round}")),
            masters: pool.cluster.masters_text(),
            tenant: String::new(),
            writers: 1,
            readers: 0,
            rate_per_s: 500.0,
            value_bytes: vec![OBJECT_BYTES as u64],
            prefix: format!("killed/{round}"),
            seed: 1,
            deadline: Duration::from_secs(5),
            replica_num: 1,
            recent_bytes: 0,
            bulk: None,
        })
        .unwrap();
        fleet.progress(0).wait_for(20, 0, WITHIN).await.unwrap();
        fleet.kill_writer(0).unwrap();
        killed.push(fleet.stop().await.unwrap());
    }
    pool.cluster.masters[leader].kill().unwrap();

    // What was acknowledged to a writer before its death stays.
    let acknowledged: Vec<String> = killed
        .iter()
        .flat_map(|logs| tidepool_chaos_tests::fleet::acknowledged_puts(logs))
        .map(|record| record.key.clone())
        .collect();
    assert!(acknowledged.len() >= 100);
    for key in &acknowledged {
        let value = pool.client.get(key, Some(WITHIN)).await.unwrap_or_else(|error| panic!("{key}: {error}"));
        assert!(value == value_of(key, 1, OBJECT_BYTES), "{key} came back with other bytes");
    }
    // Puts that completed but whose acknowledgement died with the writer are listed: they are objects as any other.
    let mut listed: Vec<String> = Vec::new();
    loop {
        let after = listed.last().cloned().unwrap_or_default();
        let page = pool.client.list(b"killed/", 0, after.as_bytes(), Some(WITHIN)).await.unwrap();
        listed.extend(page.objects.iter().map(|object| String::from_utf8_lossy(&object.key).into_owned()));
        if !page.more {
            break;
        }
    }
    remove_all(&pool.client, &listed.iter().map(String::as_str).collect::<Vec<_>>()).await.unwrap();
    settled_free_bytes(&mut pool, Some(baseline)).await;
    put_all(&pool.client, &abandoned, OBJECT_BYTES, 1).await;
    expect_all(&pool.client, &abandoned, OBJECT_BYTES).await;
}

/// User report 48: one of two targets dies under a put. Each put ends with one or two copies, or fails; what was
/// acknowledged with two copies is readable; nothing else than the bytes that were put is ever read; nothing leaks.
/// (That spare nodes bring objects back to two copies is the work of the issue on tasks.)
#[tokio::test(flavor = "multi_thread")]
async fn case_048_one_of_two_targets_dies_under_the_puts() {
    let mut pool = pool(|options| {
        options.master_arguments = ["--put-start-discard-timeout", "2s"].map(String::from).to_vec();
    })
    .await;
    let baseline = settled_free_bytes(&mut pool, None).await;
    const ROUNDS: usize = 5;
    const PUTS: usize = 24;
    const BYTES: usize = 2 << 20;
    let mut degraded = 0;
    for round in 0..ROUNDS {
        let puts: Vec<_> = keys(&format!("case-048/{round}"), PUTS)
            .into_iter()
            .map(|key| {
                let client = pool.client.clone();
                tokio::spawn(async move {
                    let value = value_of(&key, 0, BYTES);
                    let options = PutOptions { replica_num: 2, deadline: Some(WITHIN), ..PutOptions::default() };
                    let result = client.put(key.clone(), value, options).await;
                    (key, result)
                })
            })
            .collect();
        let victim = round % 2;
        // Killed while the first puts arrive: as soon as the directory knows one of them.
        wait_for("the puts to begin", async || {
            let status = pool.cluster.leader_status(WITHIN).await.ok()?;
            (free_bytes(&status) < baseline).then_some(())
        })
        .await;
        pool.cluster.datanodes[victim].kill().unwrap();
        let mut two_copies = Vec::new();
        let mut one_copy = Vec::new();
        for put in puts {
            match put.await.unwrap() {
                (key, Ok(outcome)) if outcome.copies == 2 => two_copies.push(key),
                (key, Ok(outcome)) => {
                    assert_eq!(outcome.copies, 1, "{key}");
                    one_copy.push(key);
                }
                (_, Err(error)) => assert!(error.code().is_retryable(), "{error}"),
            }
        }
        degraded += one_copy.len();
        expect_all(&pool.client, &two_copies, BYTES).await;
        for key in &one_copy {
            match pool.client.get(key, Some(WITHIN)).await {
                Ok(value) => assert!(value == value_of(key, 0, BYTES), "{key} came back with other bytes"),
                // Its one copy went with the victim.
                Err(error) => {
                    assert!(
                        matches!(error.code(), ErrorCode::ObjectNotFound | ErrorCode::ReplicaUnavailable),
                        "{error}"
                    );
                }
            }
        }
        pool.cluster.datanodes[victim].start().unwrap();
        pool.cluster.wait_serving(WITHIN).await.unwrap();
        let all: Vec<&str> = two_copies.iter().chain(&one_copy).map(String::as_str).collect();
        remove_all(&pool.client, &all).await.unwrap();
        settled_free_bytes(&mut pool, Some(baseline)).await;
    }
    println!("{degraded} of {} puts ended with one copy", ROUNDS * PUTS);
}
