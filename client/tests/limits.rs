//! What one client may have under way, and what it does not try again.
#![allow(missing_docs, clippy::disallowed_methods)]

mod support;

use std::time::Duration;

use futures::future::join_all;
use support::{FakeCluster, eventually};
use tidepool_client::{ErrorCode, PutOptions, RemoveMode};
use tidepool_proto::OUTCOMES_PER_SESSION_MAX;

const BATCH: usize = 64;

/// Masters keep so many outcomes of one client's removes, from the oldest unanswered one on, and refuse what is beyond. The
/// client waits instead, and goes on when the oldest has ended. Tried without the window: fails.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn removes_too_far_from_the_oldest_unanswered_one_wait() {
    let cluster = FakeCluster::start(1, 1);
    let client = cluster.client().await;
    cluster.directory.swallow("remove", 1);
    let oldest = tokio::spawn({
        let client = client.clone();
        let deadline = Some(Duration::from_secs(1));
        async move { client.remove_many(&["oldest"], RemoveMode::Force, deadline).await }
    });
    eventually("the oldest is sent", || cluster.directory.seen("remove") == 1).await;
    let batches: Vec<Vec<String>> = (0..OUTCOMES_PER_SESSION_MAX / BATCH + 8)
        .map(|batch| (0..BATCH).map(|n| format!("{batch}-{n}")).collect())
        .collect();
    let patient = Some(Duration::from_secs(60));
    let results = join_all(batches.iter().map(|keys| client.remove_many(keys, RemoveMode::Force, patient))).await;
    for result in results.into_iter().flatten() {
        assert_eq!(result.unwrap_err().code(), ErrorCode::ObjectNotFound);
    }
    assert_eq!(oldest.await.unwrap()[0].as_ref().unwrap_err().code(), ErrorCode::DeadlineExceeded);
    assert_eq!(cluster.directory.with(|state| state.removals_refused), 0);
}

/// What fits nowhere is asked once. Tried with another try: it does not end.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_put_that_fits_nowhere_is_not_tried_again() {
    let cluster = FakeCluster::start(1, 1);
    let client = cluster.client().await;
    cluster.directory.with(|state| {
        state.nodes.clear();
        state.no_room = ErrorCode::FitsNowhere;
    });
    let options = PutOptions { deadline: Some(Duration::from_secs(600)), ..PutOptions::default() };
    let error = client.put("k", "v", options).await.unwrap_err();
    assert_eq!((error.code(), error.code().mooncake()), (ErrorCode::FitsNowhere, -200));
    assert_eq!(cluster.directory.seen("put_start"), 1);
}

/// A tenant that lets nothing of its own be evicted for a put: only the caller can make room, so it hears of it at once. Where the
/// masters advise to come again the put is repeated. Tried with one more try always: it does not end.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_put_over_a_quota_is_repeated_only_when_the_masters_advise_it() {
    let cluster = FakeCluster::start(1, 1);
    let client = cluster.client().await;
    cluster.directory.with(|state| {
        state.nodes.clear();
        (state.no_room, state.no_room_advice_ms) = (ErrorCode::TenantQuotaExceeded, 0);
    });
    for replace in [false, true] {
        let asked = cluster.directory.seen("put_start");
        let options = PutOptions { deadline: Some(Duration::from_secs(600)), replace, ..PutOptions::default() };
        let error = client.put("k", "v", options).await.unwrap_err();
        assert_eq!((error.code(), error.code().mooncake()), (ErrorCode::TenantQuotaExceeded, -1700));
        assert_eq!(cluster.directory.seen("put_start"), asked + 1);
    }
    cluster.directory.with(|state| state.no_room_advice_ms = 5);
    let asked = cluster.directory.seen("put_start");
    let put = tokio::spawn({
        let client = client.clone();
        let options = PutOptions { deadline: Some(Duration::from_secs(60)), ..PutOptions::default() };
        async move { client.put("k", "v", options).await }
    });
    eventually("it is repeated", || cluster.directory.seen("put_start") >= asked + 3).await;
    cluster.directory.with(|state| state.nodes = cluster.nodes.addresses());
    assert_eq!(put.await.unwrap().unwrap().copies, 1);
}
