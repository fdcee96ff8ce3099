//! What holds on every seed. A failure names its seed and the command that runs it again.

mod bootstrap;
mod catch_up;
mod divergence;
mod faults;
mod fence;
mod laggards;
mod ledger;
mod levels;
mod membership;
mod own_disk;
mod swarm;

use std::future::Future;
use std::ops::Range;
use std::path::PathBuf;
use std::time::Duration;

use ledger::Ledger;
use openraft::async_runtime::{AsyncRuntime, Instant};
use openraft_rt_sim::{SimInstant, SimRuntime};
use tempfile::TempDir;

use crate::leadership::Role;
use crate::options::Options;
use crate::sim::{SimCluster, SimNode};

type Cluster = SimCluster<Ledger>;
type Member = SimNode<Ledger>;

/// Chooses one seed to run again.
const SEED: &str = "TIDEPOOL_SIM_SEED";
/// Chooses how many seeds to run.
const SEEDS: &str = "TIDEPOOL_SIM_SEEDS";

fn number(variable: &str) -> Option<u64> {
    std::env::var(variable).ok().and_then(|text| text.parse().ok())
}

fn seeds(count: u64) -> Range<u64> {
    match number(SEED) {
        Some(seed) => seed..seed + 1,
        None => 0..number(SEEDS).unwrap_or(count),
    }
}

/// Runs one scenario on one seed.
fn run<T, F: Future<Output = Result<T, String>>>(test: &str, seed: u64, scenario: impl FnOnce(PathBuf) -> F) -> T {
    let dir = scratch();
    let result = SimRuntime::with_seed(seed).block_on(scenario(dir.path().to_owned()));
    match result {
        Ok(value) => value,
        Err(why) => panic!(
            "seed {seed}: {why}\nreplay: {SEED}={seed} cargo nextest run --release -p tidepool-raft --features sim {test}"
        ),
    }
}

/// Files in memory where the system has such a place: a simulated second is cheap, a real sync is not.
fn scratch() -> TempDir {
    tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).expect("a temporary directory")
}

fn text(error: impl std::fmt::Display) -> String {
    error.to_string()
}

async fn pause(ms: u64) {
    SimRuntime::sleep(Duration::from_millis(ms)).await;
}

/// Waits for a condition on virtual time.
async fn until<T>(what: &str, limit_ms: u64, mut check: impl FnMut() -> Option<T>) -> Result<T, String> {
    let deadline = SimInstant::now() + Duration::from_millis(limit_ms);
    loop {
        if let Some(value) = check() {
            return Ok(value);
        }
        if SimInstant::now() > deadline {
            return Err(format!("waited {limit_ms} ms in vain until {what}"));
        }
        pause(1).await;
    }
}

fn cluster(seed: u64, dir: &std::path::Path, adjust: impl Fn(&mut Options) + Send + Sync + 'static) -> Cluster {
    Cluster::new(seed, 3, dir, Ledger::default, adjust)
}

/// Opens a member and lets it take part in the background.
async fn start(cluster: &Cluster, id: u64) -> Result<Member, String> {
    let node = cluster.start(id).await.map_err(text)?;
    let running = node.clone();
    drop(SimRuntime::spawn(async move { running.run().await }));
    Ok(node)
}

async fn start_all(cluster: &Cluster) -> Result<(), String> {
    for id in cluster.ids() {
        start(cluster, id).await?;
    }
    leader(cluster).await.map(drop)
}

fn leads(node: &Member) -> Option<u64> {
    let leadership = node.watch_leadership().borrow().clone();
    (leadership.role == Role::Leader).then_some(leadership.term)
}

fn current_leader(cluster: &Cluster) -> Option<(Member, u64)> {
    let leaders = cluster.nodes().into_iter().filter_map(|node| leads(&node).map(|term| (node, term)));
    leaders.max_by_key(|(_, term)| *term)
}

async fn leader(cluster: &Cluster) -> Result<(Member, u64), String> {
    until("somebody leads", 30_000, || current_leader(cluster)).await
}

/// Proposes until somebody takes it.
async fn put(cluster: &Cluster, id: u64) -> Result<u64, String> {
    for _ in 0..1000 {
        let (node, term) = leader(cluster).await?;
        let proposal = node.propose(Ledger::payload(id), term);
        if let Ok(Ok(applied)) = SimRuntime::timeout(Duration::from_secs(1), proposal).await {
            return Ok(applied.at.index);
        }
        pause(5).await;
    }
    Err(format!("nobody took proposal {id}"))
}

/// All that runs writes two snapshots and drops the log behind the older one.
async fn purge(cluster: &Cluster) -> Result<(), String> {
    let mut covered = Vec::new();
    for node in cluster.nodes() {
        covered.push((node.clone(), node.compact().await.map_err(text)?));
    }
    let last = put(cluster, u64::MAX - 2).await?;
    converge(cluster, last).await?;
    for (node, covered) in covered {
        node.compact().await.map_err(text)?;
        until("the log is purged", 5_000, || (node.status().purged_index == covered).then_some(())).await?;
    }
    Ok(())
}

/// Waits until every member applied `index`.
async fn converge(cluster: &Cluster, index: u64) -> Result<(), String> {
    let behind = || cluster.nodes().iter().all(|node| node.status().applied_index >= index).then_some(());
    until("all applied the last proposal", 60_000, behind).await.map_err(|why| {
        let stand: Vec<String> = cluster.nodes().iter().map(|node| format!("{:?}", node.status())).collect();
        format!("{why}: {}", stand.join("\n"))
    })
}
