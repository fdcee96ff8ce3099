//! Followers that are fed a snapshot: cut short and gone on, under load, and with ops left out.

use super::*;
use crate::election::ElectionProfile;
use crate::failure::FatalError;
use crate::options::Agreement;
use crate::sim::SplitMix;
use crate::skips::{OpPlace, PayloadHash, Skips, StoppedAt};
use crate::snapshot::SnapshotStore;
use crate::types::{log_id, term_of};

/// Chunks that a padded snapshot takes, about.
const CHUNKS: u64 = 40;
const CHUNK_BYTES: usize = 64 << 10;

fn padded(seed: u64, dir: &std::path::Path, adjust: impl Fn(&mut Options) + Send + Sync + 'static) -> Cluster {
    Cluster::new(seed, 3, dir, || Ledger::padded(CHUNKS as usize * CHUNK_BYTES), adjust)
}

fn follower(cluster: &Cluster, leader: &Member) -> Result<u64, String> {
    cluster.ids().into_iter().find(|id| *id != leader.node_id().0).ok_or_else(|| "no follower".to_owned())
}

/// Dies at random moments while a snapshot arrives: what was written down is not sent again, and what is installed is whole.
async fn cut_short(seed: u64, dir: PathBuf) -> Result<u64, String> {
    let mut random = SplitMix::new(seed);
    let cluster = padded(seed, &dir, |options| options.keep_log_entries = 0);
    start_all(&cluster).await?;
    let (leader, _) = leader(&cluster).await?;
    let lags = follower(&cluster, &leader)?;
    cluster.kill(lags, 0, false).await;
    for id in 1..30 {
        put(&cluster, id).await?;
    }
    purge(&cluster).await?;
    let (from, kills) = (leader.node_id().0, 5);
    let arrived = || cluster.world().chunks(from, lags);
    let mut back = start(&cluster, lags).await?;
    for _ in 0..kills {
        let more = arrived() + random.range(3, 6);
        until("some of it arrives", 20_000, || (arrived() >= more).then_some(())).await?;
        // Not the end of it: this test is about the middle.
        cluster.kill(lags, random.below(3) as usize, false).await;
        back = start(&cluster, lags).await?;
    }
    let last = put(&cluster, 50).await?;
    converge(&cluster, last).await?;
    if back.status().snapshot_index == 0 {
        return Err("it came back without a snapshot".to_owned());
    }
    let sent = arrived();
    // A sixteenth of the snapshot may arrive between two syncs.
    let most = CHUNKS + 2 + kills * (CHUNKS / 16 + 3);
    if sent > most {
        return Err(format!("{sent} chunks were sent for a snapshot of {CHUNKS}, {most} at most were expected"));
    }
    let books: Vec<_> = cluster.nodes().iter().map(|node| node.machine().book()).collect();
    if books.windows(2).all(|pair| pair[0] == pair[1]) { Ok(sent) } else { Err("states differ".to_owned()) }
}

#[test]
fn a_snapshot_that_is_cut_short_goes_on() {
    let sent: Vec<u64> =
        seeds(12).map(|seed| run("a_snapshot_that_is_cut_short_goes_on", seed, |dir| cut_short(seed, dir))).collect();
    println!("chunks sent for a snapshot of {CHUNKS}, cut short five times: {sent:?}");
}

/// Snapshots are taken faster than one is sent, and nothing is kept behind them: the log that follows the one being sent stays
/// all the same, and one is enough.
async fn slow_feed(seed: u64, dir: PathBuf) -> Result<(), String> {
    let cluster = padded(seed, &dir, |options| {
        options.election = ElectionProfile::Wan;
        (options.keep_log_entries, options.snapshot_log_entries) = (0, 20);
    });
    start_all(&cluster).await?;
    let (leader, term) = leader(&cluster).await?;
    let lags = follower(&cluster, &leader)?;
    cluster.kill(lags, 0, false).await;
    for id in 1..30 {
        put(&cluster, id).await?;
    }
    purge(&cluster).await?;
    cluster.world().set_delay_us(40_000, 60_000);
    let from = leader.node_id().0;
    let back = start(&cluster, lags).await?;
    let began = leader.status().snapshot_index;
    let mut id = 100;
    // Load until it has caught up.
    let deadline = SimInstant::now() + Duration::from_secs(60);
    loop {
        id += 1;
        let proposal = leader.propose(Ledger::payload(id), term);
        SimRuntime::timeout(Duration::from_secs(5), proposal).await.map_err(text)?.map_err(text)?;
        let lacks = leader.status().last_log_index.saturating_sub(back.status().applied_index);
        let newer = leader.status().snapshot_index > began + 60;
        if newer && lacks < 20 {
            break;
        }
        if SimInstant::now() > deadline {
            return Err(format!(
                "under load it never caught up; it lacks {lacks}, {} chunks were sent",
                cluster.world().chunks(from, lags)
            ));
        }
    }
    let sent = cluster.world().chunks(from, lags);
    cluster.world().set_delay_us(100, 500);
    let last = put(&cluster, 99_999).await?;
    converge(&cluster, last).await?;
    if sent > CHUNKS + 2 { Err(format!("{sent} chunks were sent: more than one snapshot")) } else { Ok(()) }
}

#[test]
fn the_log_after_a_snapshot_under_way_stays() {
    for seed in seeds(5) {
        run("the_log_after_a_snapshot_under_way_stays", seed, |dir| slow_feed(seed, dir));
    }
}

/// Writes nothing: its snapshot is whole, and no state.
struct NoState;

impl crate::machine::Frozen for NoState {
    fn write_to(self: Box<Self>, _out: &mut dyn std::io::Write) -> std::io::Result<()> {
        Ok(())
    }
}

/// The newest snapshot is intact on disk and does not load: the one before it and the log are as good.
async fn does_not_load(seed: u64, dir: PathBuf) -> Result<(), String> {
    let cluster = cluster(seed, &dir, |_| {});
    start_all(&cluster).await?;
    for id in 1..30 {
        put(&cluster, id).await?;
    }
    let member = cluster.node(2).ok_or("no node 2")?;
    member.compact().await.map_err(text)?;
    put(&cluster, 40).await?;
    let covers = member.status().snapshot_index;
    cluster.kill(2, usize::MAX, false).await;
    let home = dir.join("2").join("snapshots");
    let store = SnapshotStore::open(&home, Agreement::OwnWord).map_err(text)?;
    let mut meta = store.current().ok_or("no snapshot")?.meta().clone();
    meta.last_log_id = meta.last_log_id.map(|id| log_id(term_of(&id), id.index + 1));
    let bad = store.write(&meta, Box::new(NoState)).map_err(text)?;
    let back = start(&cluster, 2).await?;
    if back.status().snapshot_index != covers || !bad.path().with_extension("damaged").exists() {
        return Err(format!("it begins with a snapshot up to {}", back.status().snapshot_index));
    }
    let last = put(&cluster, 50).await?;
    converge(&cluster, last).await?;
    let books: Vec<_> = cluster.nodes().iter().map(|node| node.machine().book()).collect();
    if books.windows(2).all(|pair| pair[0] == pair[1]) { Ok(()) } else { Err("states differ".to_owned()) }
}

#[test]
fn a_snapshot_that_does_not_load_is_as_good_as_damaged() {
    for seed in seeds(5) {
        run("a_snapshot_that_does_not_load_is_as_good_as_damaged", seed, |dir| does_not_load(seed, dir));
    }
}

/// M1: what stops every member is left out by a majority of them, by the place and hash that they wrote down; they go on, and
/// the one that does not know it stops again until it does.
async fn left_out(seed: u64, dir: PathBuf) -> Result<(), String> {
    let cluster = cluster(seed, &dir, |_| {});
    start_all(&cluster).await?;
    put(&cluster, 1).await?;
    let (leader, term) = leader(&cluster).await?;
    drop(SimRuntime::timeout(Duration::from_secs(2), leader.propose(Ledger::poison(), term)).await);
    let stopped = |id: u64| cluster.node(id).and_then(|node| node.status().fatal);
    until("a majority stopped", 10_000, || {
        (cluster.ids().iter().filter(|id| stopped(**id).is_some()).count() >= 2).then_some(())
    })
    .await?;
    let home = |id: u64| dir.join(id.to_string());
    let places: Vec<StoppedAt> =
        cluster.ids().iter().filter_map(|id| StoppedAt::read(&home(*id)).ok().flatten()).collect();
    let place = places.first().ok_or("nobody wrote down where it stopped")?;
    if places.iter().any(|other| other != place) || place.hash != PayloadHash::of(&Ledger::poison()) {
        return Err(format!("they stopped at {places:?}"));
    }
    let said = stopped(leader.node_id().0).unwrap_or_default();
    if !said.contains(&format!("--skip {} --hash {}", place.place, place.hash)) {
        return Err(format!("it does not say how to go on: {said}"));
    }
    for id in cluster.ids() {
        cluster.kill(id, usize::MAX, false).await;
    }
    for id in [1, 2] {
        Skips::add(&home(id), place.place, place.hash).map_err(text)?;
        start(&cluster, id).await?;
    }
    stops(&cluster, 3, &format!("position {}@", place.place.index)).await?;
    put(&cluster, 5).await?;
    cluster.kill(3, usize::MAX, false).await;
    Skips::add(&home(3), place.place, place.hash).map_err(text)?;
    start(&cluster, 3).await?;
    let last = put(&cluster, 6).await?;
    converge(&cluster, last).await?;
    // Another payload under that place is not left out, but refused.
    let wrong = OpPlace { index: last, ordinal: 0 };
    cluster.kill(3, usize::MAX, false).await;
    Skips::add(&home(3), wrong, PayloadHash::of(b"another")).map_err(text)?;
    stops(&cluster, 3, "another log").await
}

/// Starts a member that cannot go on: it stops as it opens, or soon after.
async fn stops(cluster: &Cluster, id: u64, why: &str) -> Result<(), String> {
    let said = match start(cluster, id).await {
        Err(error) => error,
        Ok(node) => match SimRuntime::timeout(Duration::from_secs(10), node.fatal()).await {
            Ok(fatal @ FatalError::Machine { .. }) => fatal.to_string(),
            other => return Err(format!("node {id} came to {other:?}")),
        },
    };
    if said.contains(why) { Ok(()) } else { Err(format!("node {id} says '{said}', not '{why}'")) }
}

/// Tried without comparing the hash of what is left out: fails.
#[test]
fn an_op_that_stops_everybody_is_left_out_by_a_majority() {
    for seed in seeds(10) {
        run("an_op_that_stops_everybody_is_left_out_by_a_majority", seed, |dir| left_out(seed, dir));
    }
}
