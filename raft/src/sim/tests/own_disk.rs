//! A leader whose own disk is slow hands over, and only to one whose disk is faster (F14).

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use openraft_rt_sim::SimRuntime;

use super::*;
use crate::own_disk::{HAND_OVER_EVERY, SLOW_FOR};

/// Slower than a fit disk by far.
const SLOW: Duration = Duration::from_millis(250);

fn slow_down(cluster: &Cluster, id: u64, by: Duration) -> Result<(), String> {
    cluster.disk(id).ok_or("no such machine")?.set_sync_delay(by);
    Ok(())
}

/// Proposes one after the other until it is told to stop; answers what was acknowledged.
fn load(cluster: &Cluster, stop: &Arc<AtomicBool>) -> tokio::sync::oneshot::Receiver<Vec<u64>> {
    let (cluster, stop) = (cluster.clone(), stop.clone());
    let (done, acknowledged) = tokio::sync::oneshot::channel();
    drop(SimRuntime::spawn(async move {
        let mut held = Vec::new();
        for id in 0.. {
            if stop.load(Ordering::Acquire) {
                break;
            }
            if put(&cluster, id).await.is_ok() {
                held.push(id);
            }
            pause(20).await;
        }
        // The scenario may have failed.
        let _gone = done.send(held);
    }));
    acknowledged
}

async fn a_slow_leader(seed: u64, dir: PathBuf) -> Result<(), String> {
    let cluster = cluster(seed, &dir, |_| {});
    start_all(&cluster).await?;
    let stop = Arc::new(AtomicBool::new(false));
    let acknowledged = load(&cluster, &stop);
    let (slow, _) = leader(&cluster).await?;
    let slow = slow.node_id().0;
    slow_down(&cluster, slow, SLOW)?;
    let elsewhere = || current_leader(&cluster).filter(|(node, _)| node.node_id().0 != slow);
    let began = SimInstant::now();
    let (next, term) = until("another leads", 20_000, elsewhere).await?;
    if SimInstant::now() - began < SLOW_FOR {
        return Err(format!("handed over after {:?}", SimInstant::now() - began));
    }
    // It stays where it went, although there are others; and nothing of what was acknowledged is lost.
    pause(20_000).await;
    match current_leader(&cluster) {
        Some((node, now)) if node.node_id() == next.node_id() && now == term => {}
        other => return Err(format!("leadership went on: {:?}", other.map(|(node, term)| (node.node_id(), term)))),
    }
    stop.store(true, Ordering::Release);
    let held = acknowledged.await.map_err(text)?;
    let last = put(&cluster, u64::MAX - 3).await?;
    converge(&cluster, last).await?;
    for node in cluster.nodes() {
        if let Some(lost) = held.iter().find(|id| !node.machine().contains(**id)) {
            return Err(format!("node {} lacks {lost}, which was acknowledged", node.node_id()));
        }
    }
    Ok(())
}

#[test]
fn a_leader_whose_disk_is_slow_hands_over_and_loses_nothing() {
    for seed in seeds(10) {
        run("a_leader_whose_disk_is_slow_hands_over_and_loses_nothing", seed, |dir| a_slow_leader(seed, dir));
    }
}

/// All disks are slow: nobody is better off. Then the others' are fast, but one is cut off: without the leader there is no majority.
async fn nobody_faster(seed: u64, dir: PathBuf) -> Result<(), String> {
    let cluster = cluster(seed, &dir, |_| {});
    start_all(&cluster).await?;
    let stop = Arc::new(AtomicBool::new(false));
    let acknowledged = load(&cluster, &stop);
    let (slow, term) = leader(&cluster).await?;
    let slow = slow.node_id().0;
    let stays = |what: &str| match current_leader(&cluster) {
        Some((node, now)) if node.node_id().0 == slow && now == term => Ok(()),
        _ => Err(format!("leadership went elsewhere while {what}")),
    };
    for id in cluster.ids() {
        slow_down(&cluster, id, SLOW)?;
    }
    pause(15_000).await;
    stays("all disks were slow")?;
    let others: Vec<u64> = cluster.ids().into_iter().filter(|id| *id != slow).collect();
    cluster.world().part(others[0], slow);
    cluster.world().part(others[0], others[1]);
    slow_down(&cluster, others[1], Duration::ZERO)?;
    pause(15_000).await;
    stays("the quorum needed the slow disk")?;
    stop.store(true, Ordering::Release);
    acknowledged.await.map(drop).map_err(text)
}

#[test]
fn a_slow_leader_stays_where_nobody_is_faster_or_the_quorum_needs_it() {
    for seed in seeds(10) {
        run("a_slow_leader_stays_where_nobody_is_faster_or_the_quorum_needs_it", seed, |dir| nobody_faster(seed, dir));
    }
}

/// The slow disk goes where leadership goes: it is handed on by each leader once, and not again within the minute.
async fn a_disk_that_follows(seed: u64, dir: PathBuf) -> Result<(), String> {
    let cluster = cluster(seed, &dir, |_| {});
    start_all(&cluster).await?;
    let stop = Arc::new(AtomicBool::new(false));
    let acknowledged = load(&cluster, &stop);
    let (mut terms, began) = (std::collections::BTreeSet::new(), SimInstant::now());
    while SimInstant::now() - began < HAND_OVER_EVERY {
        if let Some((node, term)) = current_leader(&cluster) {
            terms.insert(term);
            for id in cluster.ids() {
                slow_down(&cluster, id, if id == node.node_id().0 { SLOW } else { Duration::ZERO })?;
            }
        }
        pause(50).await;
    }
    stop.store(true, Ordering::Release);
    acknowledged.await.map(drop).map_err(text)?;
    // Three members, each once.
    if terms.len() < 2 || terms.len() > 4 {
        return Err(format!("{} leaders in a minute", terms.len()));
    }
    Ok(())
}

#[test]
fn a_slow_leader_hands_over_once_a_minute_at_most() {
    for seed in seeds(5) {
        run("a_slow_leader_hands_over_once_a_minute_at_most", seed, |dir| a_disk_that_follows(seed, dir));
    }
}
