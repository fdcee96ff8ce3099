//! Suite `directory`: what the masters cost. Replicated and fsynced puts a second, CPU of exist in the leader's process,
//! the lone caller's latency, ops an entry, memory per object. Everything runs on this one machine, clients included.

use std::io::Write;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use bytes::Bytes;
use serde_json::json;
use tidepool_client::{Client, PutItem, PutOptions};

use super::BenchOptions;
use super::figure::{Figure, Printer};
use crate::audit::remove_all;
use crate::cluster::Cluster;
use crate::content::value_of;
use crate::failover;
use crate::process::process_usage;

const SUITE: &str = "directory";
const CALL_WITHIN: Duration = Duration::from_secs(20);
/// Calls in flight, as the figures are stated.
const IN_FLIGHT: usize = 16;
/// Keys and value bytes of a put batch, as the figure is stated.
const PUT_KEYS: usize = 128;
const PUT_BYTES: usize = 64;
/// Put calls of one run, all together.
const PUT_CALLS: usize = 800;
/// Keys that exist asks about.
const EXIST_POOL: usize = 20_000;
/// Length of one exist run: CPU time is counted in ticks of 10 ms.
const EXIST_RUN: Duration = Duration::from_secs(2);
const LONE_CALLS: usize = 3_000;
const LEADER_WITHIN: Duration = Duration::from_secs(20);

/// A key of 64 characters.
fn key_of(kind: &str, number: usize) -> String {
    format!("{kind:-<16}/{number:047}")
}

/// Runs the suite.
pub async fn run(options: &BenchOptions, cluster: &mut Cluster, directory: &Path, printer: &mut Printer) -> Result<()> {
    let client = failover::connect(&cluster.masters_text(), "").await?;
    let wanted = |case: &str| case.contains(&options.case);
    if wanted("fdatasync_per_s") {
        fdatasync_rate(options, directory, printer)?;
    }
    // First, in processes that have freed nothing yet: memory that earlier cases gave back would hide the growth.
    if wanted("bytes_per_object") {
        memory_per_object(options, cluster, &client, printer).await?;
    }
    if wanted("put_keys_per_s") || wanted("ops_per_entry") {
        put_rate(options, cluster, &client, printer).await?;
    }
    if wanted("exist") {
        exist_cost(options, cluster, &client, printer).await?;
    }
    Ok(())
}

/// Puts `count` keys of a kind in batches with `IN_FLIGHT` calls open; returns the time it took.
async fn put_keys(client: &Client, kind: &str, count: usize, keys_a_call: usize) -> Result<Duration> {
    let value = Bytes::from(value_of(kind, 0, PUT_BYTES));
    let next = Arc::new(AtomicU64::new(0));
    let began = Instant::now();
    let callers: Vec<_> = (0..IN_FLIGHT)
        .map(|_| {
            let (client, next, value, kind) = (client.clone(), next.clone(), value.clone(), kind.to_owned());
            tokio::spawn(async move {
                loop {
                    let from = next.fetch_add(keys_a_call as u64, Ordering::Relaxed) as usize;
                    if from >= count {
                        return Ok(());
                    }
                    let items = (from..count.min(from + keys_a_call))
                        .map(|number| PutItem::new(key_of(&kind, number), value.clone()))
                        .collect();
                    let options = PutOptions { deadline: Some(CALL_WITHIN), ..PutOptions::default() };
                    for result in client.put_many(items, options).await {
                        result?;
                    }
                }
            })
        })
        .collect();
    for caller in callers {
        let done: Result<(), tidepool_client::Error> = caller.await?;
        done?;
    }
    Ok(began.elapsed())
}

async fn put_rate(options: &BenchOptions, cluster: &mut Cluster, client: &Client, printer: &mut Printer) -> Result<()> {
    let count = PUT_CALLS * PUT_KEYS;
    let (mut rates, mut densities) = (Vec::new(), Vec::new());
    for run in 0..=options.runs {
        let kind = format!("put{run}");
        let before = cluster.leader_status(LEADER_WITHIN).await?;
        let time = put_keys(client, &kind, count, PUT_KEYS).await?;
        let after = cluster.leader_status(LEADER_WITHIN).await?;
        if before.term != after.term {
            bail!("the leader changed during a run; the figures would be of an election");
        }
        if run > 0 {
            rates.push(count as f64 / time.as_secs_f64());
            let entries = after.entries_applied.saturating_sub(before.entries_applied).max(1);
            densities.push(after.ops_applied.saturating_sub(before.ops_applied) as f64 / entries as f64);
        }
        let keys: Vec<String> = (0..count).map(|number| key_of(&kind, number)).collect();
        remove_all(client, &keys.iter().map(String::as_str).collect::<Vec<_>>()).await?;
    }
    let extra = vec![("batch", json!("128x64B")), ("in_flight", json!(IN_FLIGHT)), ("masters", json!(3))];
    for (case, runs, unit) in [("put_keys_per_s", rates, "keys/s"), ("ops_per_entry", densities, "ops")] {
        printer.print(&Figure {
            suite: SUITE,
            case: case.into(),
            runs,
            unit,
            ceiling: Vec::new(),
            extra: extra.clone(),
        });
    }
    Ok(())
}

async fn exist_cost(
    options: &BenchOptions,
    cluster: &mut Cluster,
    client: &Client,
    printer: &mut Printer,
) -> Result<()> {
    put_keys(client, "exist", EXIST_POOL, 512).await?;
    let keys: Arc<Vec<String>> = Arc::new((0..EXIST_POOL).map(|number| key_of("exist", number)).collect());
    let leader = cluster.leader(LEADER_WITHIN).await?;
    let pid = cluster.masters[leader].id().context("the leader has no process id")?;
    for (batch, case) in
        [(1, "exist1_cpu_us_per_call"), (32, "exist32_cpu_us_per_key"), (500, "exist500_cpu_us_per_key")]
    {
        if !case.contains(&options.case) {
            continue;
        }
        let (mut cpu, mut rates) = (Vec::new(), Vec::new());
        for run in 0..=options.runs {
            let before = process_usage(pid)?;
            let began = Instant::now();
            let asked = exist_for(client, &keys, batch, EXIST_RUN).await?;
            let elapsed = began.elapsed();
            let used = process_usage(pid)?.cpu.saturating_sub(before.cpu);
            if run > 0 {
                cpu.push(used.as_secs_f64() * 1e6 / asked as f64);
                rates.push(asked as f64 / elapsed.as_secs_f64());
            }
        }
        let rate = super::figure::median(&rates).round();
        let extra = vec![("in_flight", json!(IN_FLIGHT)), ("keys_per_s", json!(rate)), ("leases", json!(true))];
        printer.print(&Figure { suite: SUITE, case: case.into(), runs: cpu, unit: "us", ceiling: Vec::new(), extra });
    }
    if "exist_lone_p50_us".contains(&options.case) {
        let mut medians = Vec::new();
        for run in 0..=options.runs {
            let mut calls = Vec::with_capacity(LONE_CALLS);
            for at in 0..LONE_CALLS {
                let began = Instant::now();
                let present = client.exist(&keys[at * 7 % keys.len()], Some(CALL_WITHIN)).await?;
                calls.push(began.elapsed().as_secs_f64() * 1e6);
                anyhow::ensure!(present, "a key that was put is reported absent");
            }
            if run > 0 {
                medians.push(super::figure::median(&calls));
            }
        }
        let case = "exist_lone_p50_us".into();
        printer.print(&Figure {
            suite: SUITE,
            case,
            runs: medians,
            unit: "us",
            ceiling: Vec::new(),
            extra: Vec::new(),
        });
    }
    Ok(())
}

/// Asks in batches for `time` with `IN_FLIGHT` calls open; returns the keys asked.
async fn exist_for(client: &Client, keys: &Arc<Vec<String>>, batch: usize, time: Duration) -> Result<u64> {
    let until = Instant::now() + time;
    let callers: Vec<_> = (0..IN_FLIGHT)
        .map(|caller| {
            let (client, keys) = (client.clone(), keys.clone());
            tokio::spawn(async move {
                let mut asked = 0u64;
                let mut at = caller * keys.len() / IN_FLIGHT;
                while Instant::now() < until {
                    if at + batch > keys.len() {
                        at = 0;
                    }
                    for present in client.exist_many(&keys[at..at + batch], Some(CALL_WITHIN)).await {
                        anyhow::ensure!(present?, "a key that was put is reported absent");
                    }
                    asked += batch as u64;
                    at += batch;
                }
                Ok(asked)
            })
        })
        .collect();
    let mut asked = 0;
    for caller in callers {
        asked += caller.await??;
    }
    Ok(asked)
}

/// Growth of the leader's resident memory by so many objects with keys of 64 characters, everything included: indexes,
/// allocator slack, the oplog's buffers.
async fn memory_per_object(
    options: &BenchOptions,
    cluster: &mut Cluster,
    client: &Client,
    printer: &mut Printer,
) -> Result<()> {
    let leader = cluster.leader(LEADER_WITHIN).await?;
    let objects_before = cluster.leader_status(LEADER_WITHIN).await?.objects;
    let mut before = Vec::new();
    for master in &mut cluster.masters {
        before.push(master.usage()?.resident_bytes);
    }
    let time = put_keys(client, "memory", options.objects as usize, 512).await?;
    let status = cluster.leader_status(LEADER_WITHIN).await?;
    let objects = status.objects.saturating_sub(objects_before);
    if objects < options.objects {
        bail!("only {objects} of {} objects are in the directory; give more --segment", options.objects);
    }
    let mut grown = Vec::new();
    for (master, before) in cluster.masters.iter_mut().zip(&before) {
        grown.push(master.usage()?.resident_bytes.saturating_sub(*before) as f64 / objects as f64);
    }
    let extra = vec![
        ("objects", json!(objects)),
        ("key_bytes", json!(64)),
        ("masters_bytes_per_object", json!(grown.iter().map(|g| g.round()).collect::<Vec<_>>())),
        ("put_keys_per_s", json!((objects as f64 / time.as_secs_f64()).round())),
    ];
    let runs = vec![grown[leader]];
    printer.print(&Figure {
        suite: SUITE,
        case: "bytes_per_object".into(),
        runs,
        unit: "bytes",
        ceiling: Vec::new(),
        extra,
    });
    Ok(())
}

/// What the disk under the oplog can do: 4 KiB appended and fdatasynced, one after the other.
fn fdatasync_rate(options: &BenchOptions, directory: &Path, printer: &mut Printer) -> Result<()> {
    const WRITES: u32 = 200;
    let path = directory.join("fdatasync");
    let mut file = std::fs::File::create(&path)?;
    let block = [7u8; 4096];
    let mut runs = Vec::new();
    for run in 0..=options.runs {
        let began = Instant::now();
        for _ in 0..WRITES {
            file.write_all(&block)?;
            file.sync_data()?;
        }
        if run > 0 {
            runs.push(f64::from(WRITES) / began.elapsed().as_secs_f64());
        }
    }
    std::fs::remove_file(&path)?;
    let case = "fdatasync_per_s".into();
    printer.print(&Figure { suite: SUITE, case, runs, unit: "1/s", ceiling: Vec::new(), extra: Vec::new() });
    Ok(())
}
