//! Suite `put-get`: batched puts and gets of whole objects over TCP, verification included, against raw sockets. One call
//! at a time, from memory and into memory that is cycled through as the raw sockets cycle through theirs; also with
//! several callers, whose batches share commits and round trips or move bytes while others wait for theirs.

use std::collections::VecDeque;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow};
use bytes::Bytes;
use parking_lot::Mutex;
use serde_json::json;
use tidepool_client::{Buffer, Client, GetInto, PutItem, PutOptions};
use tidepool_proto::object::checksum;

use super::BenchOptions;
use super::figure::{Figure, Printer};
use super::raw_socket::{Checks, MEMORY_BYTES, RawPair};
use crate::audit::remove_all;
use crate::cluster::Cluster;
use crate::content::value_of;
use crate::failover;

const SUITE: &str = "put-get";
/// (value bytes, keys a batch, batches a run and caller, name, callers at once beside one alone)
const SHAPES: [(usize, usize, usize, &str, Option<usize>); 4] = [
    (4 << 10, 128, 64, "4KiBx128", Some(8)),
    (64 << 10, 128, 16, "64KiBx128", Some(2)),
    (1 << 20, 64, 6, "1MiBx64", Some(2)),
    (16 << 20, 8, 3, "16MiBx8", None),
];
const CALL_WITHIN: Duration = Duration::from_secs(30);

fn gigabytes_a_second(bytes: usize, time: Duration) -> f64 {
    bytes as f64 / 1e9 / time.as_secs_f64()
}

/// Runs the suite.
pub async fn run(
    options: &BenchOptions,
    binary: &Path,
    cluster: &mut Cluster,
    directory: &Path,
    printer: &mut Printer,
) -> Result<()> {
    let client = failover::connect(&cluster.masters_text(), "").await?;
    let source = Bytes::from(value_of(SUITE, 0, MEMORY_BYTES));
    let mut raw = RawPair::start(binary, directory)?;
    for (bytes, keys, batches, name, callers) in SHAPES {
        let case = Case { bytes, keys, batches, name, callers: 1 };
        case.run(options, &client, &source, &mut raw, printer).await?;
        if let Some(callers) = callers {
            let case = Case { callers, batches: batches * callers, ..case };
            case.run(options, &client, &source, &mut raw, printer).await?;
        }
    }
    checksum_cost(options, printer);
    Ok(())
}

/// Batches of one shape, put and got by so many callers at once.
#[derive(Clone, Copy)]
struct Case {
    bytes: usize,
    keys: usize,
    /// A run.
    batches: usize,
    name: &'static str,
    callers: usize,
}

impl Case {
    async fn run(
        self,
        options: &BenchOptions,
        client: &Client,
        source: &Bytes,
        raw: &mut RawPair,
        printer: &mut Printer,
    ) -> Result<()> {
        let Case { bytes, keys, batches, name, callers } = self;
        let total = bytes * keys * batches;
        let suffix = if callers > 1 { format!("/inflight{callers}") } else { String::new() };
        let mut puts = Side::new(format!("tcp-remote/{name}/put{suffix}"), options);
        let mut gets = Side::new(format!("tcp-remote/{name}/get{suffix}"), options);
        if !puts.wanted && !gets.wanted {
            return Ok(());
        }
        let into = Arc::new(Landing::new(keys * bytes));
        // Run 0 warms memory and connections and is not counted. Gets read what the last put run stored.
        for run in 0..=options.runs {
            let names: Vec<Vec<String>> = (0..batches)
                .map(|batch| (0..keys).map(|at| format!("bench/{name}{suffix}/{run}/{batch}/{at:08}")).collect())
                .collect();
            let shares = shares(&names, callers);
            let time = at_once(&shares, |share| put_batches(client.clone(), share, source.clone(), bytes)).await?;
            let ceilings = raw_times(|checks| raw.put(keys, bytes, batches, checks))?;
            if run > 0 {
                puts.add(total, time, ceilings);
            }
            if run == options.runs {
                for get_run in 0..=options.runs {
                    let get = |share| get_batches(client.clone(), share, bytes, into.clone());
                    let time = at_once(&shares, get).await?;
                    let ceilings = raw_times(|checks| raw.get(keys, bytes, batches, checks))?;
                    if get_run > 0 {
                        gets.add(total, time, ceilings);
                    }
                }
            }
            let all: Vec<&str> = names.iter().flatten().map(String::as_str).collect();
            remove_all(client, &all).await?;
        }
        for side in [puts, gets] {
            side.print(bytes, printer);
        }
        Ok(())
    }
}

/// The batches of each caller.
fn shares(names: &[Vec<String>], callers: usize) -> Vec<Vec<Vec<String>>> {
    (0..callers).map(|caller| names.iter().skip(caller).step_by(callers).cloned().collect()).collect()
}

/// Runs the callers at once, each a task of its own. A lone caller's time is that inside its calls; that of several is
/// from the first's start to the last's end, what they do between calls included.
async fn at_once<F>(shares: &[Vec<Vec<String>>], one: impl Fn(Vec<Vec<String>>) -> F) -> Result<Duration>
where
    F: Future<Output = Result<Duration>> + Send + 'static,
{
    let began = Instant::now();
    let tasks: Vec<_> = shares.iter().map(|share| tokio::spawn(one(share.clone()))).collect();
    let mut inside = Duration::ZERO;
    for task in tasks {
        inside = task.await??;
    }
    Ok(if shares.len() == 1 { inside } else { began.elapsed() })
}

/// The same shape over raw sockets, without and with checksums.
fn raw_times(mut one: impl FnMut(Checks) -> Result<Duration>) -> Result<[Duration; 2]> {
    Ok([one(Checks::None)?, one(Checks::Blocks)?])
}

struct Side {
    case: String,
    wanted: bool,
    runs: Vec<f64>,
    ceiling: Vec<f64>,
    /// The ceiling with the same checksums.
    checked: Vec<f64>,
}

impl Side {
    fn new(case: String, options: &BenchOptions) -> Side {
        Side { wanted: case.contains(&options.case), case, runs: Vec::new(), ceiling: Vec::new(), checked: Vec::new() }
    }
    fn add(&mut self, total: usize, time: Duration, [ceiling, checked]: [Duration; 2]) {
        self.runs.push(gigabytes_a_second(total, time));
        self.ceiling.push(gigabytes_a_second(total, ceiling));
        self.checked.push(gigabytes_a_second(total, checked));
    }
    fn print(self, bytes: usize, printer: &mut Printer) {
        if !self.wanted {
            return;
        }
        let median = super::figure::median(&self.runs);
        let us_per_key = bytes as f64 / 1e3 / median;
        let checked = super::figure::median(&self.checked);
        let round = |x: f64| json!((x * 1000.0).round() / 1000.0);
        printer.print(&Figure {
            suite: SUITE,
            case: self.case,
            runs: self.runs,
            unit: "GB/s",
            ceiling: self.ceiling,
            extra: vec![
                ("us_per_key", json!((us_per_key * 100.0).round() / 100.0)),
                ("ceiling_with_checksums", round(checked)),
                ("ratio_to_ceiling_with_checksums", round(median / checked)),
            ],
        });
    }
}

async fn put_batches(client: Client, names: Vec<Vec<String>>, source: Bytes, bytes: usize) -> Result<Duration> {
    let mut spent = Duration::ZERO;
    let mut at = 0;
    for keys in &names {
        let items = keys.iter().map(|key| {
            at = if at + bytes > source.len() { 0 } else { at };
            at += bytes;
            PutItem::new(key.clone(), source.slice(at - bytes..at))
        });
        let items = items.collect();
        let options = PutOptions { deadline: Some(CALL_WITHIN), ..PutOptions::default() };
        let began = Instant::now();
        let results = client.put_many(items, options).await;
        spent += began.elapsed();
        for result in results {
            result?;
        }
    }
    Ok(spent)
}

/// Memory that gets land in, batch after batch.
struct Landing {
    batches: Mutex<VecDeque<Vec<u8>>>,
}

impl Landing {
    fn new(batch_bytes: usize) -> Landing {
        // Written once, so that no page is missing later.
        let batches = (0..(MEMORY_BYTES / batch_bytes).max(1)).map(|_| vec![7; batch_bytes]);
        Landing { batches: Mutex::new(batches.collect()) }
    }
}

async fn get_batches(client: Client, names: Vec<Vec<String>>, bytes: usize, into: Arc<Landing>) -> Result<Duration> {
    let mut spent = Duration::ZERO;
    for keys in &names {
        let memory = into.batches.lock().pop_front().context("landing memory was not given back")?;
        let lent = Buffer::lend(memory, &vec![bytes; keys.len()]);
        let (buffer, parts) = lent.map_err(|_| anyhow!("landing memory is too small"))?;
        let items = keys.iter().zip(parts).map(|(key, part)| GetInto { key: key.clone().into(), into: vec![part] });
        let items = items.collect();
        let began = Instant::now();
        let results = client.get_into_many(items, Some(CALL_WITHIN)).await;
        spent += began.elapsed();
        for result in results {
            anyhow::ensure!(result? == bytes as u64, "a get returned another length");
        }
        let memory = buffer.take().map_err(|_| anyhow!("landing memory is still lent after the call"))?;
        into.batches.lock().push_back(memory);
    }
    Ok(spent)
}

/// What verification alone costs: the checksum that every put and every get computes over every block, on one thread.
fn checksum_cost(options: &BenchOptions, printer: &mut Printer) {
    let case = "checksum/64KiB".to_owned();
    if !case.contains(&options.case) {
        return;
    }
    let memory = value_of(&case, 0, 64 << 20);
    let runs = (0..options.runs).map(|_| {
        let began = Instant::now();
        let folded = memory.chunks(64 << 10).fold(0, |sum, block| sum ^ checksum(block));
        std::hint::black_box(folded);
        gigabytes_a_second(memory.len(), began.elapsed())
    });
    let runs = runs.collect();
    printer.print(&Figure { suite: SUITE, case, runs, unit: "GB/s", ceiling: Vec::new(), extra: Vec::new() });
}
