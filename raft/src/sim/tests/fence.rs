//! The start-up fence (R2): without it a follower that restarts faster than the lease lets a new leader in while the
//! old one still answers reads.

use openraft_rt_sim::SimRuntime;

use super::*;
use crate::fence::FencePolicy;

/// Whether a write was acknowledged by a new leader, and whether the old one then still answered a read.
#[derive(Clone, Copy, PartialEq)]
enum Outcome {
    NoNewLeader,
    OldLeaderKnew,
    StaleRead,
}

async fn deposed_leader_reads(seed: u64, dir: PathBuf, policy: FencePolicy) -> Result<Outcome, String> {
    let cluster = cluster(seed, &dir, move |options| options.fence = policy);
    start_all(&cluster).await?;
    put(&cluster, 1).await?;
    pause(500).await;
    let (old, _) = leader(&cluster).await?;
    let others: Vec<u64> = cluster.ids().into_iter().filter(|id| *id != old.node_id().0).collect();
    let [restarts, campaigns] = others[..] else { return Err("three members".to_owned()) };

    // One follower loses the leader and asks for votes; the other refuses, it hears the leader.
    cluster.world().part(old.node_id().0, campaigns);
    pause(1200 + seed % 100).await;
    if leads(&old).is_none() {
        return Ok(Outcome::NoNewLeader);
    }
    // Now the leader is alone, and the follower that heard it last restarts at once.
    cluster.world().part(old.node_id().0, restarts);
    cluster.kill(restarts, usize::MAX, false).await;
    pause(5).await;
    start(&cluster, restarts).await?;

    for _ in 0..2000 {
        for id in [restarts, campaigns] {
            let Some(node) = cluster.node(id) else { continue };
            let Some(term) = leads(&node) else { continue };
            let proposal =
                SimRuntime::timeout(Duration::from_millis(500), node.propose(Ledger::payload(2), term)).await;
            if matches!(proposal, Ok(Ok(_))) {
                let stale = old.linearize().await.is_ok() && !old.machine().contains(2);
                return Ok(if stale { Outcome::StaleRead } else { Outcome::OldLeaderKnew });
            }
        }
        pause(1).await;
    }
    Ok(Outcome::NoNewLeader)
}

fn count(policy: FencePolicy, test: &str) -> (usize, usize) {
    let outcomes: Vec<Outcome> =
        seeds(120).map(|seed| run(test, seed, |dir| deposed_leader_reads(seed, dir, policy))).collect();
    let elected = outcomes.iter().filter(|o| **o != Outcome::NoNewLeader).count();
    (elected, outcomes.iter().filter(|o| **o == Outcome::StaleRead).count())
}

#[test]
fn a_deposed_leader_never_answers_a_stale_read() {
    let (elected, stale) = count(FencePolicy::Keep, "a_deposed_leader_never_answers_a_stale_read");
    println!("fence kept: {elected} new leaders, {stale} stale reads");
    assert_eq!(stale, 0);
    assert!(number(SEED).is_some() || elected >= 100, "only {elected} runs reached the question");
}

/// The guard bites: the same runs without the fence do show stale reads.
#[test]
fn without_the_fence_stale_reads_appear() {
    if number(SEED).is_some() {
        return;
    }
    let (elected, stale) = count(FencePolicy::Skip, "without_the_fence_stale_reads_appear");
    println!("fence skipped: {elected} new leaders, {stale} stale reads");
    assert!(stale > 0, "{elected} new leaders and no stale read: the fence's test tests nothing");
}
