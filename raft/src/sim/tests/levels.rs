//! A member whose binary does not know what the log holds (M6): it acknowledges none of it, and does not start over it.

use std::sync::Arc;
use std::sync::atomic::{AtomicU16, Ordering};

use tidepool_proto::{ErrorCode, NodeId};

use super::*;
use crate::failure::FatalError;
use crate::membership::{MemberChange, MembershipError};
use crate::options::Member as Named;

/// Three members, of which the third runs the older binary, and the level of whoever starts next.
async fn mixed(seed: u64, dir: &std::path::Path) -> Result<(Cluster, Arc<AtomicU16>), String> {
    let starts_with = Arc::new(AtomicU16::new(2));
    let level = starts_with.clone();
    let machine = move || Ledger::of_level(level.load(Ordering::Relaxed));
    // So that a snapshot stands for what it covers, and not the log as well.
    let cluster = Cluster::new(seed, 3, dir, machine, |options| options.keep_log_entries = 0);
    for id in [1, 2] {
        start(&cluster, id).await?;
    }
    starts_with.store(1, Ordering::Relaxed);
    start(&cluster, 3).await?;
    let (node, _) = leader(&cluster).await?;
    if node.node_id().0 == 3 {
        node.transfer_leader(None).await.map_err(text)?;
    }
    until("a newer one leads", 30_000, || current_leader(&cluster).filter(|(node, _)| node.node_id().0 != 3)).await?;
    Ok((cluster, starts_with))
}

/// Proposes what only newer binaries know, to a leader that has one.
async fn put_newer(cluster: &Cluster, id: u64) -> Result<u64, String> {
    for _ in 0..1000 {
        let (node, term) = leader(cluster).await?;
        let proposal = node.propose(Ledger::second_level(id), term);
        if let Ok(Ok(applied)) = SimRuntime::timeout(Duration::from_secs(1), proposal).await {
            return Ok(applied.at.index);
        }
        pause(5).await;
    }
    Err(format!("nobody took proposal {id}"))
}

async fn ends_unacknowledged(old: &Member, index: u64) -> Result<(), String> {
    match SimRuntime::timeout(Duration::from_secs(30), old.fatal()).await {
        Ok(FatalError::FeatureLevel(why)) if why.contains("level 2 is above 1") => {}
        Ok(other) => return Err(format!("another end: {other}")),
        Err(_) => return Err("the older member lives on".to_owned()),
    }
    let last = old.status().last_log_index;
    if last < index { Ok(()) } else { Err(format!("it holds entry {last}, and cannot apply {index}")) }
}

async fn older_members_stop(seed: u64, dir: PathBuf) -> Result<(), String> {
    let (cluster, starts_with) = mixed(seed, &dir).await?;
    let levels = leader(&cluster).await?.0.member_levels().await;
    let mut levels: Vec<(NodeId, Option<u16>)> =
        levels.into_iter().map(|(member, level)| (member.node_id, level)).collect();
    levels.sort_unstable();
    if levels != [(NodeId(1), Some(2)), (NodeId(2), Some(2)), (NodeId(3), Some(1))] {
        return Err(format!("announced: {levels:?}"));
    }
    let common = put(&cluster, 1).await?;
    converge(&cluster, common).await?;
    let old = cluster.node(3).ok_or("no third member")?;
    let newer = put_newer(&cluster, 2).await?;
    ends_unacknowledged(&old, newer).await?;
    put(&cluster, 3).await?;

    // Its own log is one that it knows: it starts, and meets the entry again.
    cluster.kill(3, usize::MAX, false).await;
    let again = start(&cluster, 3).await?;
    ends_unacknowledged(&again, newer).await?;
    cluster.kill(3, usize::MAX, false).await;

    // With the newer binary it goes on where it was, and then cannot go back.
    starts_with.store(2, Ordering::Relaxed);
    start(&cluster, 3).await?;
    let last = put(&cluster, 4).await?;
    converge(&cluster, last).await?;
    for compacted in [false, true] {
        if compacted {
            purge(&cluster).await?;
        }
        cluster.kill(3, usize::MAX, false).await;
        starts_with.store(1, Ordering::Relaxed);
        match cluster.start(3).await {
            Ok(_) => return Err(format!("it started over what it cannot apply; compacted: {compacted}")),
            Err(error) if error.0.code() == ErrorCode::FeatureLevel => {}
            Err(error) => return Err(format!("refused for another reason: {error}")),
        }
        starts_with.store(2, Ordering::Relaxed);
        start(&cluster, 3).await?;
        let last = put(&cluster, 5 + u64::from(compacted)).await?;
        converge(&cluster, last).await?;
    }
    Ok(())
}

/// What a leader sends, the log at the start, and the snapshot at the start are each looked at.
/// Tried without looking at the log at the start, without looking at what is appended, and without looking at the snapshot at the
/// start: fails each time.
#[test]
fn a_member_takes_in_nothing_that_its_binary_cannot_apply() {
    for seed in seeds(10) {
        run("a_member_takes_in_nothing_that_its_binary_cannot_apply", seed, |dir| older_members_stop(seed, dir));
    }
}

/// What it lacks is in a snapshot only: it does not take that in either, and starts again as it was.
async fn older_members_take_no_snapshot(seed: u64, dir: PathBuf) -> Result<(), String> {
    let (cluster, starts_with) = mixed(seed, &dir).await?;
    let common = put(&cluster, 1).await?;
    converge(&cluster, common).await?;
    cluster.kill(3, usize::MAX, false).await;
    let newer = put_newer(&cluster, 2).await?;
    purge(&cluster).await?;
    for _ in 0..2 {
        let old = start(&cluster, 3).await?;
        ends_unacknowledged(&old, newer).await?;
        cluster.kill(3, usize::MAX, false).await;
    }
    starts_with.store(2, Ordering::Relaxed);
    start(&cluster, 3).await?;
    let last = put(&cluster, 3).await?;
    converge(&cluster, last).await
}

/// Fails without a look at what arrived (tried).
#[test]
fn a_member_takes_in_no_snapshot_that_its_binary_cannot_apply() {
    for seed in seeds(10) {
        run("a_member_takes_in_no_snapshot_that_its_binary_cannot_apply", seed, |dir| {
            older_members_take_no_snapshot(seed, dir)
        });
    }
}

/// The leader asks a new member what it knows before it lets it in: it could never follow.
async fn older_newcomers_stay_out(seed: u64, dir: PathBuf) -> Result<(), String> {
    let starts_with = Arc::new(AtomicU16::new(2));
    let level = starts_with.clone();
    let machine = move || Ledger::of_level(level.load(Ordering::Relaxed));
    let cluster = Cluster::new(seed, 4, &dir, machine, |options| {
        options.join = options.node_id.0 > 3;
        options.members.truncate(if options.join { 0 } else { 3 });
    });
    for id in 1..=3 {
        start(&cluster, id).await?;
    }
    starts_with.store(1, Ordering::Relaxed);
    start(&cluster, 4).await?;
    put_newer(&cluster, 1).await?;
    let address = "127.0.0.1:10004".parse().map_err(text)?;
    let add = MemberChange { add: Some(Named { node_id: NodeId(4), address }), remove: None };
    for newer in [false, true] {
        if newer {
            cluster.kill(4, usize::MAX, false).await;
            starts_with.store(2, Ordering::Relaxed);
            start(&cluster, 4).await?;
        }
        let (node, _) = leader(&cluster).await?;
        let report = node.change_members(add.clone(), Duration::from_secs(30)).await;
        match (report.result, newer) {
            (Err(MembershipError::FeatureLevel(why)), false) if why.contains("level 1") => {
                if node.watch_members().borrow().len() != 3 {
                    return Err("it was made a member all the same".to_owned());
                }
            }
            (Ok(()), true) => {}
            (other, _) => return Err(format!("newer: {newer}, but {other:?}")),
        }
    }
    let last = put_newer(&cluster, 2).await?;
    converge(&cluster, last).await
}

/// Tried without asking for the newcomer's level: fails.
#[test]
fn a_newcomer_with_an_older_binary_is_not_taken_in() {
    for seed in seeds(5) {
        run("a_newcomer_with_an_older_binary_is_not_taken_in", seed, |dir| older_newcomers_stay_out(seed, dir));
    }
}
