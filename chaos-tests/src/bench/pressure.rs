//! Suite `pressure`: puts into a full pool. How many succeed, and the slowest of a hundred: bursts into a small segment,
//! mixed sizes at four times the capacity, with half of the pool under lease, and right after a failover. Also what the
//! steady overflow costs and how evenly it fills the segments: see `overflow`.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use bytes::Bytes;
use serde_json::json;
use tidepool_client::{Client, PutItem, PutOptions};
use tidepool_proto::object::extent_bytes;
use tokio::task::JoinSet;

use super::figure::{Figure, Printer};
use super::{BenchOptions, overflow, scrape};
use crate::cluster::{Cluster, ClusterOptions};
use crate::failover;

const SUITE: &str = "pressure";
/// Deadline of one put.
const PUT_WITHIN: Duration = Duration::from_secs(10);
const LEADER_WITHIN: Duration = Duration::from_secs(20);
/// Sizes of the mixed cases: each task goes round them, so that every run puts the same bytes.
const MIXED_BYTES: [usize; 8] = [4 << 10, 16 << 20, 64 << 10, 1 << 20, 256 << 10, 4 << 20, 16 << 10, 2 << 20];
/// Tasks that put mixed sizes.
const WRITERS: usize = 8;
/// How many times the pool's capacity they put.
const OVERLOAD: u64 = 4;
/// Readers of the leased case; each may lease a quarter of the pool.
const READERS: usize = 2;
/// How often readers renew.
const RENEW: Duration = Duration::from_secs(4);

/// What came of puts.
#[derive(Default)]
struct Outcome {
    tried: usize,
    failed: usize,
    millis: Vec<f64>,
    /// Bytes of the extents of what was stored.
    allocated: u64,
    evicted: u64,
    fill: f64,
}

impl Outcome {
    fn add(&mut self, other: Outcome) {
        self.tried += other.tried;
        self.failed += other.failed;
        self.allocated += other.allocated;
        self.millis.extend(other.millis);
    }

    fn p99(&mut self) -> f64 {
        percentile_99(&mut self.millis)
    }
}

/// What one of a hundred is above.
pub fn percentile_99(figures: &mut [f64]) -> f64 {
    figures.sort_by(f64::total_cmp);
    let last = figures.len().saturating_sub(1);
    figures.get((figures.len() * 99 / 100).min(last)).copied().unwrap_or(0.0)
}

/// Runs the suite: every case in every run has a pool of its own.
pub async fn run(options: &BenchOptions, binary: &Path, work_dir: &Path, printer: &mut Printer) -> Result<()> {
    for case in ["burst/200x1MiB", "burst/32x40x200KB", "mixed", "mixed/half-leased", "mixed/after-failover"] {
        if !case.contains(&options.case) {
            continue;
        }
        let (mut ratios, mut slowest, mut fills, mut evicted, mut tried) =
            (Vec::new(), Vec::new(), Vec::new(), Vec::new(), 0);
        for run in 0..options.runs {
            let work_dir = work_dir.join(format!("{}-{run}", case.replace('/', "-")));
            let mut outcome = one(case, binary, &work_dir).await.with_context(|| format!("case {case}"))?;
            ratios.push((outcome.tried - outcome.failed) as f64 / outcome.tried as f64);
            slowest.push(outcome.p99());
            fills.push(outcome.fill);
            evicted.push(outcome.evicted as f64 / outcome.allocated.max(1) as f64);
            tried = outcome.tried;
        }
        let figure = |name: &str, runs: Vec<f64>, unit| Figure {
            suite: SUITE,
            case: format!("{name}/{case}"),
            runs,
            unit,
            ceiling: Vec::new(),
            extra: vec![("puts", json!(tried))],
        };
        printer.print(&figure("put_success_ratio", ratios, "ratio"));
        printer.print(&figure("put_p99_ms", slowest, "ms"));
        printer.print(&figure("fill_after", fills, "ratio"));
        printer.print(&figure("evicted_bytes_per_allocated", evicted, "ratio"));
    }
    overflow::run(options, binary, work_dir, printer).await
}

async fn one(case: &str, binary: &Path, work_dir: &Path) -> Result<Outcome> {
    let mut options = ClusterOptions::new(binary, work_dir);
    let is_burst = case.starts_with("burst");
    (options.datanodes, options.segment_bytes) = if is_burst { (1, 64 << 20) } else { (2, 128 << 20) };
    let mut cluster = Cluster::start(options).await?;
    let client = failover::connect(&cluster.masters_text(), "").await?;
    let mut before = scrape::evicted_bytes(&mut cluster).await?;
    let mut outcome = match case {
        "burst/200x1MiB" => puts(&client, "burst", 1, 200, &[1 << 20]).await?,
        "burst/32x40x200KB" => puts(&client, "burst", 32, 40, &[200_000]).await?,
        _ => {
            let capacity = cluster.capacity_bytes();
            // Full before it begins.
            let full = rounds(capacity, 1);
            puts(&client, "old", WRITERS, full, &MIXED_BYTES).await?;
            let mut readers = JoinSet::new();
            match case {
                "mixed/half-leased" => start_readers(&cluster, &client, capacity, &mut readers).await?,
                "mixed/after-failover" => {
                    let leader = cluster.leader(LEADER_WITHIN).await?;
                    cluster.masters[leader].kill()?;
                }
                _ => {}
            }
            before = scrape::evicted_bytes(&mut cluster).await?;
            puts(&client, "new", WRITERS, rounds(capacity, OVERLOAD), &MIXED_BYTES).await?
        }
    };
    let status = cluster.leader_status(LEADER_WITHIN).await?;
    let (complete, capacity) =
        status.segments.iter().fold((0, 0), |(used, all), s| (used + s.complete_bytes, all + s.capacity_bytes));
    outcome.fill = complete as f64 / capacity.max(1) as f64;
    outcome.evicted = scrape::evicted_bytes(&mut cluster).await?.saturating_sub(before);
    Ok(outcome)
}

/// Puts that each of the writers makes for so many times the capacity.
fn rounds(capacity: u64, times: u64) -> usize {
    let round: usize = MIXED_BYTES.iter().sum();
    (capacity * times / (WRITERS * round) as u64 + 1) as usize * MIXED_BYTES.len()
}

/// Tasks that put values one after the other.
async fn puts(client: &Client, kind: &str, tasks: usize, each: usize, sizes: &[usize]) -> Result<Outcome> {
    let largest = sizes.iter().copied().max().unwrap_or(1);
    let payload = Bytes::from((0..largest).map(|i| i as u8).collect::<Vec<u8>>());
    let sizes: Arc<[usize]> = sizes.into();
    let mut writers = JoinSet::new();
    for task in 0..tasks {
        let (client, payload, sizes, kind) = (client.clone(), payload.clone(), sizes.clone(), kind.to_owned());
        writers.spawn(async move {
            let mut outcome = Outcome::default();
            for number in 0..each {
                let bytes = sizes[(task + number) % sizes.len()];
                let value = payload.slice(..bytes);
                let item = PutItem::new(format!("{kind}/{task}/{number}"), value);
                let options = PutOptions { deadline: Some(PUT_WITHIN), ..PutOptions::default() };
                let began = Instant::now();
                let result = client.put_many(vec![item], options).await.remove(0);
                outcome.millis.push(began.elapsed().as_secs_f64() * 1e3);
                outcome.tried += 1;
                match result {
                    Ok(put) => outcome.allocated += extent_bytes(bytes as u64) * put.copies as u64,
                    Err(error) => {
                        tracing::debug!(%error, "a put failed");
                        outcome.failed += 1;
                    }
                }
            }
            outcome
        });
    }
    let mut all = Outcome::default();
    while let Some(outcome) = writers.join_next().await {
        all.add(outcome?);
    }
    Ok(all)
}

/// Clients that keep leases on about half of what is there.
async fn start_readers(cluster: &Cluster, client: &Client, capacity: u64, readers: &mut JoinSet<()>) -> Result<()> {
    let mut shares: Vec<(u64, Vec<Bytes>)> = vec![(0, Vec::new()); READERS];
    let mut after = Bytes::new();
    loop {
        let page = client.list(b"old/", 1_000, &after, Some(PUT_WITHIN)).await?;
        for object in page.objects {
            if let Some(share) = shares.iter_mut().find(|(bytes, _)| bytes + object.length < capacity / 4) {
                share.0 += object.length;
                share.1.push(object.key);
            }
        }
        if !page.more {
            break;
        }
        after = page.next;
    }
    for (_, keys) in shares {
        let reader = failover::connect(&cluster.masters_text(), "").await?;
        reader.exist_many(&keys, Some(PUT_WITHIN)).await;
        readers.spawn(async move {
            loop {
                tokio::time::sleep(RENEW).await;
                reader.exist_many(&keys, Some(PUT_WITHIN)).await;
            }
        });
    }
    Ok(())
}
