//! Members that lag: two at once, and one that is always late. They are fed what they need once, and the cluster goes on meanwhile.

use super::*;
use crate::election::ElectionProfile;

/// Chunks that a snapshot takes, about.
const CHUNKS: u64 = 40;
const CHUNK_BYTES: usize = 64 << 10;
/// Entries kept for whoever is late: as many as one may lack that counts as caught up.
const KEPT: u64 = 1_024;

fn padded(
    seed: u64,
    size: u64,
    dir: &std::path::Path,
    adjust: impl Fn(&mut Options) + Send + Sync + 'static,
) -> Cluster {
    Cluster::new(seed, size, dir, || Ledger::padded(CHUNKS as usize * CHUNK_BYTES), adjust)
}

fn same_books(cluster: &Cluster) -> Result<(), String> {
    let books: Vec<_> = cluster.nodes().iter().map(|node| node.machine().book()).collect();
    if books.windows(2).all(|pair| pair[0] == pair[1]) { Ok(()) } else { Err("states differ".to_owned()) }
}

/// Two of five come back at once, to a leader that snapshots all the time and keeps no log: each is fed one snapshot and the log after
/// it, under load.
async fn two_at_once(seed: u64, dir: PathBuf) -> Result<(), String> {
    let cluster = padded(seed, 5, &dir, |options| {
        options.election = ElectionProfile::Wan;
        (options.keep_log_entries, options.snapshot_log_entries) = (0, 20);
    });
    start_all(&cluster).await?;
    let (leader, term) = leader(&cluster).await?;
    let from = leader.node_id().0;
    let lag: Vec<u64> = cluster.ids().into_iter().filter(|id| *id != from).take(2).collect();
    for &id in &lag {
        cluster.kill(id, 0, false).await;
    }
    for id in 1..60 {
        put(&cluster, id).await?;
    }
    purge(&cluster).await?;
    cluster.world().set_delay_us(40_000, 60_000);
    let mut back = Vec::new();
    for &id in &lag {
        back.push(start(&cluster, id).await?);
        // The second one comes while the first is being fed.
        let arrived = || (cluster.world().chunks(from, id) > 3).then_some(());
        until("some of it arrives", 20_000, arrived).await?;
    }
    let (began, mut id) = (leader.status().snapshot_index, 1_000);
    let limit = SimInstant::now() + Duration::from_secs(90);
    loop {
        id += 1;
        let proposal = leader.propose(Ledger::payload(id), term);
        SimRuntime::timeout(Duration::from_secs(5), proposal).await.map_err(text)?.map_err(text)?;
        let last = leader.status().last_log_index;
        let level = back.iter().all(|node| last.saturating_sub(node.status().applied_index) < 20);
        if level && leader.status().snapshot_index > began + 60 {
            break;
        }
        if SimInstant::now() > limit {
            return Err(format!(
                "under load they never caught up, at {last}: {:?}",
                back.iter().map(|n| n.status().applied_index).collect::<Vec<_>>()
            ));
        }
    }
    let sent: Vec<u64> = lag.iter().map(|&id| cluster.world().chunks(from, id)).collect();
    cluster.world().set_delay_us(100, 500);
    let last = put(&cluster, 99_999).await?;
    converge(&cluster, last).await?;
    same_books(&cluster)?;
    match sent.iter().all(|&sent| (1..=CHUNKS + 2).contains(&sent)) {
        true => Ok(()),
        false => Err(format!("{sent:?} chunks were sent: more than one snapshot each, or none")),
    }
}

#[test]
fn two_members_that_lag_at_once_are_fed_once_each() {
    for seed in seeds(5) {
        run("two_members_that_lag_at_once_are_fed_once_each", seed, |dir| two_at_once(seed, dir));
    }
}

/// A standby far away, that lags by a few hundred entries whatever it does, under a load that makes snapshots all the time: once it
/// follows the log it is never fed a snapshot again.
async fn always_late(seed: u64, dir: PathBuf) -> Result<(), String> {
    let cluster = padded(seed, 3, &dir, |options| {
        options.election = ElectionProfile::Wan;
        (options.keep_log_entries, options.snapshot_log_entries) = (KEPT, 100);
    });
    start_all(&cluster).await?;
    let (leader, term) = leader(&cluster).await?;
    let from = leader.node_id().0;
    let late = cluster.ids().into_iter().find(|id| *id != from).ok_or("no follower")?;
    cluster.kill(late, 0, false).await;
    let mut id = 0;
    let mut propose = async || {
        id += 1;
        let proposal = leader.propose(Ledger::payload(id), term);
        SimRuntime::timeout(Duration::from_secs(5), proposal).await.map_err(text)?.map_err(text)
    };
    while leader.status().purged_index < 100 {
        propose().await?;
    }
    cluster.world().set_delay_between_us(from, late, (70_000, 100_000));
    let node = start(&cluster, late).await?;
    let lacks = || leader.status().last_log_index.saturating_sub(node.status().applied_index);
    let limit = SimInstant::now() + Duration::from_secs(60);
    while node.status().snapshot_index == 0 || lacks() > KEPT / 2 {
        propose().await?;
        if SimInstant::now() > limit {
            return Err(format!("it lacks {} entries, and never followed", lacks()));
        }
    }
    let (sent, began) = (cluster.world().chunks(from, late), leader.status().snapshot_index);
    let (mut most, mut least) = (0, u64::MAX);
    while leader.status().snapshot_index < began + 3 * KEPT {
        propose().await?;
        (most, least) = (most.max(lacks()), least.min(lacks()));
    }
    let more = cluster.world().chunks(from, late) - sent;
    if more > 0 || least == 0 {
        return Err(format!("it lacked {least} to {most} entries, and {more} more chunks were sent to it"));
    }
    cluster.world().set_delay_between_us(from, late, (100, 500));
    let last = put(&cluster, 99_999_999).await?;
    converge(&cluster, last).await?;
    same_books(&cluster)
}

/// Tried with a purge that does not wait for who is fed: fails, it never follows.
#[test]
fn a_standby_that_is_always_late_is_not_fed_for_ever() {
    for seed in seeds(3) {
        run("a_standby_that_is_always_late_is_not_fed_for_ever", seed, |dir| always_late(seed, dir));
    }
}
