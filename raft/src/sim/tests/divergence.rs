//! M3: a bit flips in a follower, in the leader, in whoever writes a snapshot. The one that differs starts over by itself, and
//! nothing of what it held is sent, vouched for, or reason to drop log.

use std::collections::BTreeMap;

use super::*;
use crate::compaction::CompactError;
use crate::failure::FatalError;
use crate::machine::StateMachine;
use crate::options::Agreement;
use crate::sim::SplitMix;
use crate::snapshot::SnapshotStore;

/// What the owner of the machines does: compares their hashes at one index, vouches for those that agree with the majority, has
/// the other start over, and starts again what stopped for that.
async fn tend(cluster: &Cluster) -> Result<u64, String> {
    let nodes = cluster.nodes();
    let index = nodes.iter().filter_map(|node| node.machine().applied()).map(|at| at.index).min().unwrap_or(0);
    let hashes: Vec<_> = nodes.iter().filter_map(|node| Some((node.clone(), node.machine().hash_at(index)?))).collect();
    let mut votes = BTreeMap::<u64, usize>::new();
    hashes.iter().for_each(|(_, hash)| *votes.entry(*hash).or_default() += 1);
    if let Some((right, _)) = votes.into_iter().find(|(_, votes)| *votes >= 2) {
        for (node, hash) in hashes {
            let doubt = node.machine().doubt();
            match hash == right {
                true if doubt.is_some() => node.start_over(index, doubt.unwrap_or_default()).await,
                true => node.vouch(index).await.map_err(text)?,
                false => node.start_over(index, format!("hash {hash:x}, the majority has {right:x}")).await,
            }
        }
    }
    let mut restarted = 0;
    for node in nodes {
        let stopped = SimRuntime::timeout(Duration::ZERO, node.fatal()).await;
        if let Ok(FatalError::Diverged(_)) = stopped {
            let id = node.node_id().0;
            cluster.kill(id, usize::MAX, false).await;
            start(cluster, id).await?;
            restarted += 1;
        }
    }
    Ok(restarted)
}

#[derive(Clone, Copy, PartialEq, Debug)]
enum Victim {
    Follower,
    Leader,
}

#[derive(Clone, Copy, PartialEq, Debug)]
enum Flip {
    Hash,
    Record,
    Mistake,
}

async fn planted(seed: u64, dir: PathBuf, victim: Victim, flip: Flip) -> Result<(), String> {
    let mut random = SplitMix::new(seed);
    let cluster = cluster(seed, &dir, |options| {
        options.agreement = Agreement::Majority;
        (options.keep_log_entries, options.snapshot_log_entries) = (0, 25);
    });
    start_all(&cluster).await?;
    let (mut id, mut restarts) = (0, 0);
    let mut work = async |amount: u64| -> Result<u64, String> {
        let mut restarts = 0;
        for _ in 0..amount {
            id += 1;
            put(&cluster, id).await?;
            if id % 5 == 0 {
                restarts += tend(&cluster).await?;
            }
            pause(5).await;
        }
        Ok(restarts)
    };
    restarts += work(random.range(40, 120)).await?;
    if restarts > 0 {
        return Err("somebody started over before anything was planted".to_owned());
    }
    let (leader, term) = leader(&cluster).await?;
    let node = match victim {
        Victim::Leader => leader.clone(),
        Victim::Follower => {
            let others = cluster.nodes().into_iter().filter(|node| node.node_id() != leader.node_id());
            others.last().ok_or("no follower")?
        }
    };
    match flip {
        Flip::Hash => node.machine().flip_hash(),
        Flip::Record => node.machine().flip_record(),
        Flip::Mistake => node.machine().mistake(),
    }
    // A snapshot of the wrong state must lead to nothing; where the writer notices, it is not even kept, and the member goes on
    // until it is judged.
    let written = SimRuntime::timeout(Duration::from_secs(2), node.compact()).await.map_err(text)?;
    let noticed = matches!(written, Err(CompactError::Unsound(_)));
    if noticed == (flip == Flip::Mistake) || node.status().fatal.is_some() {
        return Err(format!("written was {written:?}; it stopped for {:?}", node.status().fatal));
    }
    restarts += work(150).await?;
    let limit = SimInstant::now() + Duration::from_secs(30);
    while restarts == 0 && SimInstant::now() < limit {
        restarts += work(10).await?;
    }
    if restarts != 1 {
        return Err(format!("{restarts} members started over; one should"));
    }
    // Another one comes back by snapshot, from whoever leads now.
    let lags = cluster.ids().into_iter().find(|id| *id != node.node_id().0 && *id != leader.node_id().0).unwrap_or(1);
    cluster.kill(lags, usize::MAX, false).await;
    for _ in 0..60 {
        id += 1;
        put(&cluster, id).await?;
    }
    start(&cluster, lags).await?;
    id += 1;
    let last = put(&cluster, id).await?;
    converge(&cluster, last).await?;
    if victim == Victim::Leader && leads(&leader) == Some(term) {
        return Err("the one that differed leads on".to_owned());
    }
    let books: Vec<_> = cluster.nodes().iter().map(|node| node.machine().book()).collect();
    if !books.windows(2).all(|pair| pair[0] == pair[1]) || books[0].entries.len() != id as usize {
        return Err("states differ, or something is lost".to_owned());
    }
    check_snapshots(&cluster, &dir)
}

/// Every agreed snapshot anywhere is the state of its index.
fn check_snapshots(cluster: &Cluster, dir: &std::path::Path) -> Result<(), String> {
    let right = cluster.nodes().first().map(|node| node.machine().book()).ok_or("nobody is left")?;
    for id in cluster.ids() {
        let store =
            SnapshotStore::open(&dir.join(id.to_string()).join("snapshots"), Agreement::Majority).map_err(text)?;
        let Some(file) = store.agreed() else { continue };
        let Some(at) = file.meta().last_log_id else { continue };
        let ledger = Ledger::default();
        let at = crate::machine::LogPosition { term: crate::types::term_of(&at), index: at.index };
        ledger.install(at, &mut file.reader()).map_err(text)?;
        let held = ledger.book().entries;
        let expected: BTreeMap<u64, u64> =
            right.entries.clone().into_iter().filter(|(_, index)| *index <= at.index).collect();
        if held != expected {
            return Err(format!("the agreed snapshot of node {id} at {at} is not the state there"));
        }
    }
    Ok(())
}

/// Tried with a snapshot of the very index that is vouched for taken as agreed: fails, the mistake was made after that index was
/// looked at and before the snapshot.
/// Tried with doubtful snapshots left where they are: fails.
#[test]
fn a_bit_flip_heals_and_spreads_to_nobody() {
    for victim in [Victim::Follower, Victim::Leader] {
        for flip in [Flip::Hash, Flip::Record, Flip::Mistake] {
            for seed in seeds(6) {
                println!("{victim:?} {flip:?}");
                run("a_bit_flip_heals_and_spreads_to_nobody", seed, |dir| planted(seed, dir, victim, flip));
            }
        }
    }
}

/// Nobody vouches: no snapshot is sent and no log goes, however long it gets.
async fn nobody_vouches(seed: u64, dir: PathBuf) -> Result<(), String> {
    let cluster = cluster(seed, &dir, |options| {
        options.agreement = Agreement::Majority;
        (options.keep_log_entries, options.snapshot_log_entries) = (0, 10);
    });
    start_all(&cluster).await?;
    for id in 1..100 {
        put(&cluster, id).await?;
    }
    for node in cluster.nodes() {
        node.compact().await.map_err(text)?;
    }
    pause(2_000).await;
    for node in cluster.nodes() {
        let status = node.status();
        if status.purged_index > 0 || status.snapshot_index == 0 {
            return Err(format!("node {} purged up to {}", node.node_id(), status.purged_index));
        }
    }
    for id in [100, 200] {
        let last = put(&cluster, id).await?;
        converge(&cluster, last).await?;
        tend(&cluster).await?;
        for more in 1..20 {
            put(&cluster, id + more).await?;
        }
        // Long enough for the next snapshot.
        pause(2_000).await;
    }
    let purged = || cluster.nodes().iter().all(|node| node.status().purged_index > 0).then_some(());
    until("the log goes once the snapshots are agreed", 5_000, purged).await
}

#[test]
fn a_snapshot_that_nobody_vouched_for_allows_nothing() {
    for seed in seeds(10) {
        run("a_snapshot_that_nobody_vouched_for_allows_nothing", seed, |dir| nobody_vouches(seed, dir));
    }
}

/// The agreed snapshots of those that are left are damaged on disk, the log before them is gone, and nobody has vouched for the newer ones
/// yet: a member that lacks all of it waits until somebody does.
async fn doubtful_ones_only(seed: u64, dir: PathBuf) -> Result<(), String> {
    let cluster = cluster(seed, &dir, |options| {
        options.agreement = Agreement::Majority;
        (options.keep_log_entries, options.snapshot_log_entries) = (0, 100_000);
    });
    start_all(&cluster).await?;
    let (leader, _) = leader(&cluster).await?;
    let lags = cluster.ids().into_iter().find(|id| *id != leader.node_id().0).ok_or("no follower")?;
    cluster.kill(lags, 0, false).await;
    for id in 1..40 {
        put(&cluster, id).await?;
    }
    let left: Vec<u64> = cluster.nodes().iter().map(|node| node.node_id().0).collect();
    // Two that a majority vouches for, so that the log goes, and a newer one for which nobody does.
    for id in [40, 41] {
        for node in cluster.nodes() {
            node.compact().await.map_err(text)?;
        }
        let last = put(&cluster, id).await?;
        converge(&cluster, last).await?;
        tend(&cluster).await?;
    }
    for node in cluster.nodes() {
        node.compact().await.map_err(text)?;
        until("the log goes", 5_000, || (node.status().purged_index > 0).then_some(())).await?;
    }
    for &id in &left {
        cluster.kill(id, usize::MAX, false).await;
        let home = dir.join(id.to_string()).join("snapshots");
        for _ in 0..2 {
            let store = SnapshotStore::open(&home, Agreement::Majority).map_err(text)?;
            let agreed = store.agreed().ok_or("no agreed snapshot")?;
            std::fs::remove_file(agreed.path()).map_err(text)?;
        }
    }
    for &id in &left {
        start(&cluster, id).await?;
    }
    put(&cluster, 42).await?;
    let back = start(&cluster, lags).await?;
    pause(10_000).await;
    let sent: u64 = left.iter().map(|&id| cluster.world().chunks(id, lags)).sum();
    if sent > 0 || back.status().snapshot_index > 0 {
        return Err(format!("{sent} chunks were sent of a snapshot that nobody vouched for"));
    }
    let index = put(&cluster, 43).await?;
    for node in left.iter().filter_map(|&id| cluster.node(id)) {
        until("it applied it", 5_000, || (node.status().applied_index >= index).then_some(())).await?;
        node.vouch(index).await.map_err(text)?;
    }
    let last = put(&cluster, 44).await?;
    converge(&cluster, last).await
}

/// Fails without the look at `is_agreed` before it is sent (tried).
#[test]
fn a_snapshot_that_nobody_vouched_for_is_not_sent_where_there_is_no_other() {
    for seed in seeds(6) {
        run("a_snapshot_that_nobody_vouched_for_is_not_sent_where_there_is_no_other", seed, |dir| {
            doubtful_ones_only(seed, dir)
        });
    }
}
