//! The transport benchmark: each engine beside a raw-socket program of the same shape, in the same run.
//!
//! The server is a second process: [`run`] starts the running executable again with its own arguments and a mark in
//! the environment, so whoever calls [`run`] must call it again in that process (it then serves and never returns).
//! Samples of ceiling and engine alternate, so that a noisy machine is as noisy for both.
#![allow(unsafe_code)]

mod child;
mod raw;

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::json;
use tidepool_proto::{Address, ClusterId, History};

use crate::access::{ReadAccess, WriteAccess};
use crate::conformance::TestMemory;
use crate::engine::{Engine, ReadItem, WriteItem};
use crate::local::{LocalMut, LocalRef, Owner};
use crate::tcp::{DataIdentity, TcpEngine, TcpOptions};

/// What to measure.
#[derive(Clone, Debug)]
pub struct Options {
    /// Samples a case.
    pub runs: usize,
    /// Least time of one sample.
    pub sample: Duration,
    /// Connections of both programs.
    pub stripes: usize,
    /// Only cases whose name contains this.
    pub filter: String,
}

impl Default for Options {
    fn default() -> Options {
        Options {
            runs: 11,
            sample: Duration::from_millis(200),
            stripes: TcpOptions::new(identity()).stripes,
            filter: String::new(),
        }
    }
}

/// Batches: bytes an item, items.
const SHAPES: [(&str, usize, usize); 4] =
    [("4KiBx128", 4 << 10, 128), ("64KiBx128", 64 << 10, 128), ("1MiBx64", 1 << 20, 64), ("16MiBx8", 16 << 20, 8)];
/// Largest batch.
const REGION_BYTES: usize = 128 << 20;

/// Direction of a case.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Direction {
    Read,
    Write,
}

fn identity() -> DataIdentity {
    DataIdentity { cluster: ClusterId([7; 16]), history: History(7), ..DataIdentity::default() }
}

/// Measures, handing each result line to `emit` as it is ready.
pub fn run(options: &Options, mut emit: impl FnMut(serde_json::Value)) -> io::Result<()> {
    child::serve_if_child()?;
    let server = child::start()?;
    let region = Region::new();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    let settings = TcpOptions { stripes: options.stripes, ..TcpOptions::new(identity()) };
    let stripe_bytes_min = settings.stripe_bytes_min;
    let engine = TcpEngine::new(settings);
    for (shape, bytes, items) in SHAPES {
        for direction in [Direction::Read, Direction::Write] {
            let verb = if direction == Direction::Read { "read" } else { "write" };
            let case = format!("tcp/{shape}/{verb}");
            if !case.contains(&options.filter) {
                continue;
            }
            let connections = if (bytes * items) as u64 >= stripe_bytes_min { options.stripes } else { 1 };
            let mut ceiling = raw::Client::start(server.raw, direction, bytes, items, connections)?;
            let mut engine_batch = || {
                let work = batch(&engine, &server.engine, &region, direction, bytes, items);
                runtime.block_on(work)
            };
            let (mut ours, mut raws) = (Vec::new(), Vec::new());
            engine_batch()?;
            ceiling.batch()?;
            for _ in 0..options.runs {
                raws.push(sample(options.sample, || ceiling.batch())?);
                ours.push(sample(options.sample, &mut engine_batch)?);
            }
            ceiling.stop();
            emit(line(&case, "GB/s", options.runs, &ours, &raws, |s| (bytes * items) as f64 / s / 1e9));
            if bytes <= 4 << 10 {
                emit(line(&format!("{case}/key"), "us", options.runs, &ours, &raws, |s| s * 1e6 / items as f64));
            }
        }
    }
    Ok(())
}

/// Mean seconds of a batch, over as many as fill the sample.
fn sample(least: Duration, mut batch: impl FnMut() -> io::Result<()>) -> io::Result<f64> {
    let start = Instant::now();
    let mut batches = 0;
    while start.elapsed() < least {
        batch()?;
        batches += 1;
    }
    Ok(start.elapsed().as_secs_f64() / batches as f64)
}

fn line(
    case: &str,
    unit: &str,
    runs: usize,
    ours: &[f64],
    raws: &[f64],
    value: impl Fn(f64) -> f64,
) -> serde_json::Value {
    let sorted = |seconds: &[f64]| {
        let mut values: Vec<f64> = seconds.iter().map(|&s| value(s)).collect();
        values.sort_by(f64::total_cmp);
        values
    };
    let (ours, raws) = (sorted(ours), sorted(raws));
    let (median, ceiling) = (ours[ours.len() / 2], raws[raws.len() / 2]);
    let round = |x: f64| (x * 1000.0).round() / 1000.0;
    // A rate is compared upwards, a time downwards: 1 is always "as good as the ceiling".
    let ratio = if unit == "us" { ceiling / median } else { median / ceiling };
    json!({
        "suite": "transport", "case": case, "runs": runs, "median": round(median), "min": round(ours[0]),
        "max": round(ours[ours.len() - 1]), "unit": unit, "ceiling": round(ceiling), "ratio_to_ceiling": round(ratio),
        "load1": load1(),
    })
}

fn load1() -> f64 {
    let text = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    text.split(' ').next().and_then(|first| first.parse().ok()).unwrap_or(f64::NAN)
}

/// Local memory of the client, touched once, so that no sample pays for page faults.
struct Region(Arc<TestRegion>);

struct TestRegion(std::cell::UnsafeCell<Vec<u8>>);
// SAFETY: parts are lent to one batch at a time, disjointly.
unsafe impl Sync for TestRegion {}

impl Region {
    fn new() -> Region {
        Region(Arc::new(TestRegion(std::cell::UnsafeCell::new(vec![1; REGION_BYTES]))))
    }
    fn at(&self, offset: usize) -> *mut u8 {
        // SAFETY: only the address is taken; offsets are below REGION_BYTES.
        unsafe { (*self.0.0.get()).as_mut_ptr().add(offset) }
    }
}

async fn batch(
    engine: &TcpEngine,
    peer: &Address,
    region: &Region,
    direction: Direction,
    bytes: usize,
    items: usize,
) -> io::Result<()> {
    let deadline = Instant::now() + Duration::from_secs(60);
    let replica = |i: usize| TestMemory::replica_of(i as u64 + 1, (i * bytes) as u64, bytes as u64);
    let (object_id, length) = (1, bytes as u64);
    let failed = |error: String| io::Error::other(format!("a benchmark item failed: {error}"));
    match direction {
        Direction::Read => {
            let read = |i: usize| {
                let owner = Owner::shared(region.0.clone());
                // SAFETY: the parts of a batch are disjoint, and the batch ends before the next begins.
                let into = unsafe { LocalMut::from_raw(region.at(i * bytes), bytes, owner) };
                ReadItem { access: ReadAccess { object_id, replica: replica(i), offset: 0, length }, into: vec![into] }
            };
            for result in engine.read(peer, (0..items).map(read).collect(), deadline).await {
                result.map_err(|error| failed(error.to_string()))?;
            }
        }
        Direction::Write => {
            let write = |i: usize| {
                let owner = Owner::shared(region.0.clone());
                // SAFETY: nothing writes to the region during a write batch.
                let from = unsafe { LocalRef::from_raw(region.at(i * bytes), bytes, owner) };
                WriteItem { access: WriteAccess { object_id, replica: replica(i), length }, from: vec![from] }
            };
            for result in engine.write(peer, (0..items).map(write).collect(), deadline).await {
                result.map_err(|error| failed(error.to_string()))?;
            }
        }
    }
    Ok(())
}
