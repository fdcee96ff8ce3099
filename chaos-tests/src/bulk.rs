//! The bulk writer: one process that puts batches of large values beside a load, as whoever moves caches of whole prompts does. It logs
//! each value as a put of its own.

use std::path::PathBuf;
use std::sync::atomic::Ordering;
use std::time::Duration;

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};
use tidepool_client::{Client, ClientOptions, PutItem, PutOptions};

use crate::clock::monotonic_ns;
use crate::content::{content_hash, value_of};
use crate::load::{CONNECT_WITHIN, outcome_of};
use crate::record::{Call, CallOutcome, CallRecord, RecordWriter};
use crate::worker::{self, input_has_ended};

/// Size of its values.
const VALUE_BYTES: u64 = 1 << 20;
/// How many of them one call puts.
const BATCH_VALUES: u64 = 4;

/// How much it writes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Bulk {
    /// On a schedule of whole batches. One that is late is sent at once, and the schedule does not wait for it.
    pub bytes_per_s: u64,
    /// It stops when it has put so many: what the pool has room for.
    pub bytes_max: u64,
}

/// The process.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct BulkSpec {
    /// Masters, comma-separated.
    pub masters: String,
    /// Tenant whose keys it uses; "" is the default one.
    pub tenant: String,
    /// Keys start with this.
    pub prefix: String,
    /// Seed of values.
    pub seed: u64,
    /// Deadline of one call.
    pub deadline_ms: u64,
    /// Copies of each object.
    pub replica_num: u32,
    /// Its log.
    pub log: PathBuf,
    /// Where the first scheduled instant lies (CLOCK_MONOTONIC).
    pub start_ns: u64,
    /// How much.
    pub bulk: Bulk,
}

/// Is the bulk writer until standard input closes.
pub fn run_client(spec: BulkSpec) -> Result<()> {
    worker::block_on(drive(spec))
}

async fn drive(spec: BulkSpec) -> Result<()> {
    let stop = input_has_ended();
    let mut options = ClientOptions::new(ClientOptions::parse_masters(&spec.masters)?);
    options.tenant.clone_from(&spec.tenant);
    options.connect_deadline = CONNECT_WITHIN;
    let client = Client::connect(options).await.context("bulk writer")?;
    let mut log = RecordWriter::create(&spec.log)?;
    let batch_bytes = BATCH_VALUES * VALUE_BYTES;
    let interval_ns = 1e9 * batch_bytes as f64 / spec.bulk.bytes_per_s.max(1) as f64;
    let start_ns = spec.start_ns.max(monotonic_ns());
    let batches = spec.bulk.bytes_max / batch_bytes;
    for batch in 0.. {
        let intended_ns = start_ns + (batch as f64 * interval_ns) as u64;
        // Looked at often while it waits: a slow schedule ends as soon as it is told to.
        while !stop.load(Ordering::Relaxed) && (batch >= batches || monotonic_ns() < intended_ns) {
            let left = Duration::from_nanos(intended_ns.saturating_sub(monotonic_ns()));
            tokio::time::sleep(left.clamp(Duration::from_millis(1), Duration::from_millis(20))).await;
        }
        if stop.load(Ordering::Relaxed) {
            break;
        }
        for record in put(&client, &spec, batch, intended_ns).await {
            log.append(&record)?;
        }
    }
    Ok(())
}

/// Puts one batch; what became of each of its values.
async fn put(client: &Client, spec: &BulkSpec, batch: u64, intended_ns: u64) -> Vec<CallRecord> {
    let keys = (0..BATCH_VALUES).map(|at| format!("{}/{batch}/{at}", spec.prefix));
    let (mut items, mut records) = (Vec::new(), Vec::new());
    for key in keys {
        let value = value_of(&key, spec.seed, VALUE_BYTES as usize);
        records.push(CallRecord {
            call: Call::Bulk,
            key: key.clone(),
            hash: content_hash(&value),
            bytes: VALUE_BYTES,
            intended_ns,
            sent_ns: 0,
            done_ns: 0,
            outcome: CallOutcome::Ok,
            copies: 0,
            error: String::new(),
        });
        items.push(PutItem::new(key, value));
    }
    let deadline = Some(Duration::from_millis(spec.deadline_ms));
    let options = PutOptions { replica_num: spec.replica_num, deadline, ..PutOptions::default() };
    let sent_ns = monotonic_ns();
    let results = client.put_many(items, options).await;
    let done_ns = monotonic_ns();
    for (record, result) in records.iter_mut().zip(results) {
        (record.sent_ns, record.done_ns) = (sent_ns, done_ns);
        match result {
            Ok(put) => record.copies = put.copies,
            Err(error) => (record.outcome, record.error) = (outcome_of(&error), error.to_string()),
        }
    }
    records
}
