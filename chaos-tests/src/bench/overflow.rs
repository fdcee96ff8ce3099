//! Steady overflow, part of the suite `pressure`: how much slower puts of small objects are when each evicts another, and
//! how evenly segments of unequal sizes are filled.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use bytes::Bytes;
use serde_json::json;
use tidepool_client::{Client, PutItem, PutOptions};
use tidepool_proto::object::extent_bytes;
use tidepool_proto::v1::SegmentStatus;
use tokio::task::JoinSet;

use super::BenchOptions;
use super::figure::{Figure, Printer, median};
use super::pressure::percentile_99;
use crate::cluster::{Cluster, ClusterOptions};
use crate::failover;

const SUITE: &str = "pressure";
const SMALL: &str = "overflow/small";
const UNEQUAL: &str = "overflow/unequal-segments";
const PUT_WITHIN: Duration = Duration::from_secs(10);
const LEADER_WITHIN: Duration = Duration::from_secs(20);
/// Payload of a small object, keys of a call, and calls in flight.
const SMALL_BYTES: usize = 64;
const SMALL_KEYS: usize = 32;
const SMALL_CALLERS: usize = 8;
/// Segments of the unequal case.
const SEGMENTS: [u64; 4] = [32 << 20, 64 << 20, 128 << 20, 256 << 20];
/// Sizes of its objects; each task goes round them.
const SIZES: [usize; 4] = [4 << 10, 256 << 10, 16 << 10, 64 << 10];
const WRITERS: usize = 8;
/// How many times the capacity is put, and from when on the pool counts as full.
const OVERLOAD: u64 = 6;
const FULL: u64 = 2;
const SAMPLE_EVERY: Duration = Duration::from_millis(100);

/// Runs both cases.
pub async fn run(options: &BenchOptions, binary: &Path, work_dir: &Path, printer: &mut Printer) -> Result<()> {
    let figure = |case: String, runs: Vec<f64>, unit, extra| Figure {
        suite: SUITE,
        case,
        runs,
        unit,
        ceiling: Vec::new(),
        extra,
    };
    if SMALL.contains(&options.case) {
        let (mut slowest, mut middle) = ([Vec::new(), Vec::new(), Vec::new()], [Vec::new(), Vec::new(), Vec::new()]);
        for run in 0..options.runs {
            let work_dir = work_dir.join(format!("overflow-small-{run}"));
            let [mut room, mut full] = small(binary, &work_dir, options.objects).await.with_context(|| SMALL)?;
            for (figures, [room, full]) in [
                (&mut middle, [median(&room), median(&full)]),
                (&mut slowest, [percentile_99(&mut room), percentile_99(&mut full)]),
            ] {
                figures[0].push(room);
                figures[1].push(full);
                figures[2].push(full / room);
            }
        }
        let extra = vec![("objects", json!(options.objects)), ("keys_a_call", json!(SMALL_KEYS))];
        for (name, figures) in [("put_p50", middle), ("put_p99", slowest)] {
            let [room, full, ratios] = figures;
            printer.print(&figure(format!("{name}_ms/{SMALL}/with-room"), room, "ms", extra.clone()));
            printer.print(&figure(format!("{name}_ms/{SMALL}/full"), full, "ms", extra.clone()));
            printer.print(&figure(format!("{name}_ratio/{SMALL}"), ratios, "ratio", extra.clone()));
        }
    }
    if UNEQUAL.contains(&options.case) {
        let (mut middles, mut worst) = (Vec::new(), Vec::new());
        for run in 0..options.runs {
            let work_dir = work_dir.join(format!("overflow-unequal-{run}"));
            let spreads = unequal(binary, &work_dir).await.with_context(|| UNEQUAL)?;
            middles.push(median(&spreads));
            worst.push(spreads.iter().copied().fold(0.0, f64::max));
        }
        let extra = vec![("segments_mib", json!(SEGMENTS.map(|bytes| bytes >> 20)))];
        printer.print(&figure(format!("utilisation_spread/{UNEQUAL}/median"), middles, "points", extra.clone()));
        printer.print(&figure(format!("utilisation_spread/{UNEQUAL}/worst"), worst, "points", extra));
    }
    Ok(())
}

/// Puts `objects` small objects into a pool that has room for them, and as many again into the full pool. Answers how
/// long the calls of each took, in milliseconds.
async fn small(binary: &Path, work_dir: &Path, objects: u64) -> Result<[Vec<f64>; 2]> {
    let mut options = ClusterOptions::new(binary, work_dir);
    // Room for what is measured, for the reserve, and for what datanodes divide unevenly.
    options.segment_bytes = objects * extent_bytes(SMALL_BYTES as u64) / options.datanodes as u64 * 5 / 4;
    options.election = "default".into();
    let cluster = Cluster::start(options).await?;
    let client = failover::connect(&cluster.masters_text(), "").await?;
    let room = put_small(&client, 0, objects).await?;
    put_small(&client, objects, objects / 2).await?;
    let full = put_small(&client, objects + objects / 2, objects).await?;
    Ok([room, full])
}

/// Puts objects from a number on; answers how long each call took, in milliseconds.
async fn put_small(client: &Client, from: u64, objects: u64) -> Result<Vec<f64>> {
    let next = Arc::new(AtomicU64::new(from));
    let value = Bytes::from_static(&[7; SMALL_BYTES]);
    let mut callers: JoinSet<Result<Vec<f64>>> = JoinSet::new();
    for _ in 0..SMALL_CALLERS {
        let (client, next, value) = (client.clone(), next.clone(), value.clone());
        callers.spawn(async move {
            let mut millis = Vec::new();
            loop {
                let first = next.fetch_add(SMALL_KEYS as u64, Ordering::Relaxed);
                if first >= from + objects {
                    return Ok(millis);
                }
                let items = (first..first + SMALL_KEYS as u64)
                    .map(|number| PutItem::new(format!("small/{number:058}"), value.clone()))
                    .collect();
                let began = Instant::now();
                let options = PutOptions { deadline: Some(PUT_WITHIN), ..PutOptions::default() };
                for result in client.put_many(items, options).await {
                    result?;
                }
                millis.push(began.elapsed().as_secs_f64() * 1e3);
            }
        });
    }
    let mut all = Vec::new();
    while let Some(millis) = callers.join_next().await {
        all.extend(millis??);
    }
    Ok(all)
}

/// Overflows a pool of unequal segments; answers by how many points of their size the fullest and the emptiest differed,
/// again and again.
async fn unequal(binary: &Path, work_dir: &Path) -> Result<Vec<f64>> {
    let mut options = ClusterOptions::new(binary, work_dir);
    options.datanodes = 0;
    let mut cluster = Cluster::start(options).await?;
    for bytes in SEGMENTS {
        cluster.add_datanode_of(bytes)?;
    }
    cluster.wait_serving(LEADER_WITHIN).await?;
    let client = failover::connect(&cluster.masters_text(), "").await?;
    let capacity: u64 = SEGMENTS.iter().sum();
    let stored = Arc::new(AtomicU64::new(0));
    let payload = Bytes::from(vec![7; SIZES.into_iter().max().unwrap_or(1)]);
    let mut writers: JoinSet<Result<()>> = JoinSet::new();
    for task in 0..WRITERS {
        let (client, stored, payload) = (client.clone(), stored.clone(), payload.clone());
        writers.spawn(async move {
            for number in 0.. {
                let bytes = SIZES[(task + number) % SIZES.len()];
                let item = PutItem::new(format!("unequal/{task}/{number}"), payload.slice(..bytes));
                let options = PutOptions { deadline: Some(PUT_WITHIN), ..PutOptions::default() };
                client.put_many(vec![item], options).await.remove(0)?;
                if stored.fetch_add(bytes as u64, Ordering::Relaxed) > OVERLOAD * capacity {
                    break;
                }
            }
            Ok(())
        });
    }
    let mut spreads = Vec::new();
    while stored.load(Ordering::Relaxed) < OVERLOAD * capacity {
        tokio::time::sleep(SAMPLE_EVERY).await;
        let status = cluster.leader_status(LEADER_WITHIN).await?;
        if stored.load(Ordering::Relaxed) > FULL * capacity {
            spreads.push(spread(&status.segments));
        }
        if writers.is_empty() {
            break;
        }
        while let Some(ended) = writers.try_join_next() {
            ended??;
        }
    }
    while let Some(ended) = writers.join_next().await {
        ended??;
    }
    Ok(spreads)
}

/// Points between the fullest and the emptiest segment.
fn spread(segments: &[SegmentStatus]) -> f64 {
    let used = |s: &SegmentStatus| (s.capacity_bytes - s.free_bytes) as f64 / s.capacity_bytes.max(1) as f64 * 100.0;
    let (least, most) =
        segments.iter().map(used).fold((100.0f64, 0.0f64), |(least, most), used| (least.min(used), most.max(used)));
    most - least
}
