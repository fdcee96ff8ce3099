//! A cluster that goes on in a new history, restored or recovered, while a client works.
mod support;

use std::time::{Duration, Instant};

use support::engine::Mood;
use support::{FakeCluster, eventually};
use tidepool_client::{Client, PutOptions};

/// How long nobody of the known history has to be silent before another one is followed.
const SILENCE_MIN: Duration = Duration::from_secs(3);

/// Master 0 is gone, and master 1 leads in a new history, in terms that begin anew.
fn restore(cluster: &mut FakeCluster) {
    cluster.masters[0].kill();
    cluster.directory.with(|s| (s.history, s.term, s.leader) = (8, 2, Some(1)));
    cluster.directory.with(|s| s.objects.clear());
}

/// A put whose grant was given, and whose bytes are held up on their way.
async fn held_up(cluster: &FakeCluster, client: &Client) -> tokio::task::JoinHandle<u32> {
    cluster.nodes.mood(1, Mood::Hold);
    let before = cluster.nodes.with(1, |node| node.held);
    let own = client.clone();
    let put = tokio::spawn(async move { own.put("k", "v", PutOptions::default()).await.unwrap().copies });
    eventually("the put is at the datanode", || cluster.nodes.with(1, |node| node.held) > before).await;
    put
}

/// A client follows without a restart, but not before the known masters have been silent for a while: they may be in an election. Fails
/// when no silence is waited for (tried).
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_new_history_is_followed_after_a_while_of_silence() {
    let mut cluster = FakeCluster::start(2, 1);
    cluster.directory.with(|s| s.term = 50);
    let client = cluster.client().await;
    client.put("k", "v", PutOptions::default()).await.unwrap();
    let heard = Instant::now();
    restore(&mut cluster);
    assert!(!client.exist("k", None).await.unwrap());
    let silent = heard.elapsed();
    assert!(silent >= SILENCE_MIN, "followed after {silent:?}");
    client.put("k", "w", PutOptions::default()).await.unwrap();
    assert_eq!(client.get("k", None).await.unwrap(), "w");
}

/// Ids of one history may name somebody else's grant in another: nothing that was granted before is ended there. The put begins again.
/// Fails when the leader's history is not looked at (tried).
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_was_granted_before_is_ended_in_no_other_history() {
    let mut cluster = FakeCluster::start(2, 1);
    let client = cluster.client().await;
    let put = held_up(&cluster, &client).await;
    restore(&mut cluster);
    assert!(!client.exist("k", None).await.unwrap(), "the new history is followed");
    cluster.nodes.mood(1, Mood::Serve);
    assert_eq!(put.await.unwrap(), 1);
    let (ended, present) = cluster.directory.with(|s| {
        let ended: Vec<u64> = s.ends.iter().map(|item| item.object_id).collect();
        (ended, s.objects[&b"k"[..]].id)
    });
    assert_eq!(ended, [present]);
}

/// Nor is it revoked there, when its caller gives up. One thread: what the end of the put starts runs before the next call is answered. Fails
/// when the leader's history is not looked at (tried).
#[tokio::test]
async fn what_was_granted_before_is_revoked_in_no_other_history() {
    let mut cluster = FakeCluster::start(2, 1);
    let client = cluster.client().await;
    let put = held_up(&cluster, &client).await;
    restore(&mut cluster);
    assert!(!client.exist("k", None).await.unwrap(), "the new history is followed");
    put.abort();
    assert!(put.await.unwrap_err().is_cancelled());
    for _ in 0..3 {
        client.exist("k", None).await.unwrap();
    }
    assert_eq!(cluster.directory.with(|s| s.revoked.len()), 0);
    // In the history that gave it, it is.
    let put = held_up(&cluster, &client).await;
    put.abort();
    eventually("the grant is revoked", || cluster.directory.with(|s| s.revoked.len()) == 1).await;
}
