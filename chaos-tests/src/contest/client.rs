//! One contender: a process that makes one call at a time, on a fixed schedule. An instant of the schedule that comes while a call is still
//! open is left out: what nobody answers must not pile up, or no judge could find an order of it.

use std::collections::HashMap;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use serde::{Deserialize, Serialize};
use tidepool_client::{Client, ClientOptions, Error, ErrorCode, PutOptions, RemoveMode};

use super::keys_of;
use super::record::{Asked, ContestRecord, Ended};
use crate::clock::monotonic_ns;
use crate::cluster::POLL_EVERY;
use crate::content::value_of;
use crate::record::RecordWriter;
use crate::worker::{self, input_has_ended};

/// How long a client looks for a leader at its start.
const CONNECT_WITHIN: Duration = Duration::from_secs(30);
/// Payload sizes; which one follows from the value.
const VALUE_BYTES: [usize; 3] = [64, 1_500, 20_000];
/// How long a client may call a key absent because it could not read it, and a margin.
const DOUBTS_FOR: Duration = Duration::from_secs(3);
/// Keys that one call of the closing look gets.
const LOOK_KEYS: usize = 64;
/// Deadline of such a call, and how long the look asks again for what was neither found nor missed.
const LOOK_WITHIN: Duration = Duration::from_secs(20);
/// Bits of a value that count the calls of its process.
const COUNT_BITS: u32 = 40;

/// One contender.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ContestSpec {
    /// Masters, comma-separated.
    pub masters: String,
    /// Tenant whose keys it uses; "" is the default one.
    pub tenant: String,
    /// Its number.
    pub number: u32,
    /// Calls a second.
    pub rate_per_s: f64,
    /// Keys start with this.
    pub prefix: String,
    /// Keys at a time.
    pub keys: u64,
    /// Instants of the schedule until all go on to other keys.
    pub round_ticks: u64,
    /// Seed of choices.
    pub seed: u64,
    /// Deadline of one call.
    pub deadline_ms: u64,
    /// Copies of each object.
    pub replica_num: u32,
    /// Whether objects are never evicted.
    pub pinned: bool,
    /// Its log.
    pub log: PathBuf,
    /// Where the first scheduled instant lies (CLOCK_MONOTONIC).
    pub start_ns: u64,
}

/// The bytes of a value: they name it, and prove that they are its.
fn content(value: u64) -> Vec<u8> {
    let mut bytes = value_of("contest", value, VALUE_BYTES[(value % 3) as usize]);
    bytes[..8].copy_from_slice(&value.to_le_bytes());
    bytes
}

/// The value that these bytes are, if they are one.
fn value_in(bytes: &[u8]) -> Option<u64> {
    let value = u64::from_le_bytes(bytes.get(..8)?.try_into().ok()?);
    (content(value) == bytes).then_some(value)
}

/// Is one contender until standard input closes.
pub fn run_client(spec: ContestSpec) -> Result<()> {
    worker::block_on(drive(spec))
}

async fn drive(spec: ContestSpec) -> Result<()> {
    let stop = input_has_ended();
    let mut options = ClientOptions::new(ClientOptions::parse_masters(&spec.masters)?);
    options.tenant.clone_from(&spec.tenant);
    options.connect_deadline = CONNECT_WITHIN;
    let client = Client::connect(options).await.context("contender")?;
    let mut log = RecordWriter::create(&spec.log)?;
    let mut random = StdRng::seed_from_u64(spec.seed ^ u64::from(spec.number) << 32);
    let mut contender = Contender { client, unread: HashMap::new(), spec };
    let (interval_ns, start_ns) = (1e9 / contender.spec.rate_per_s, contender.spec.start_ns);
    let mut tick = 0u64;
    loop {
        // The newest instant that has come, or the next one.
        let passed = monotonic_ns().saturating_sub(start_ns) as f64 / interval_ns;
        tick = tick.max(passed as u64);
        let intended_ns = start_ns + (tick as f64 * interval_ns) as u64;
        let now = monotonic_ns();
        if intended_ns > now {
            tokio::time::sleep(Duration::from_nanos(intended_ns - now)).await;
        }
        if stop.load(std::sync::atomic::Ordering::Relaxed) {
            return Ok(());
        }
        let (round, at) = (tick / contender.spec.round_ticks, random.random_range(0..contender.spec.keys));
        let key = format!("{}/{round}/{at}", contender.spec.prefix);
        tick += 1;
        let value = u64::from(contender.spec.number + 1) << COUNT_BITS | tick;
        log.append(&contender.call(key, value, random.random_range(0..100), intended_ns).await)?;
    }
}

struct Contender {
    client: Client,
    /// Keys that it could not read, and when.
    unread: HashMap<String, Instant>,
    spec: ContestSpec,
}

impl Contender {
    /// One call, which one being drawn of a hundred.
    async fn call(&mut self, key: String, value: u64, drawn: u32, intended_ns: u64) -> ContestRecord {
        self.unread.retain(|_, since| since.elapsed() < DOUBTS_FOR);
        let had_doubts = self.unread.contains_key(&key) || !self.client.suspects().is_empty();
        let deadline = Some(Duration::from_millis(self.spec.deadline_ms));
        let mut record = ContestRecord {
            process: self.spec.number,
            asked: Asked::Get,
            key,
            value: 0,
            copies: 0,
            intended_ns,
            sent_ns: monotonic_ns(),
            done_ns: 0,
            ended: Ended::Ok,
            doubts: false,
            error: String::new(),
        };
        let key = record.key.as_str();
        let error = match drawn {
            0..=44 => {
                let replace = drawn < 18;
                record.asked = if replace { Asked::Replace } else { Asked::Put };
                record.value = value;
                let (replica_num, hard_pin) = (self.spec.replica_num, self.spec.pinned);
                let options = PutOptions { replica_num, hard_pin, deadline, replace, ..PutOptions::default() };
                match self.client.put(key.to_owned(), content(value), options).await {
                    Ok(put) if put.already_existed => record.end(Ended::Present),
                    Ok(put) => {
                        record.copies = put.copies;
                        None
                    }
                    Err(error) => record.fail(put_ended(&error), error),
                }
            }
            45..=69 => match self.client.get(key, deadline).await {
                Ok(bytes) => {
                    let found = value_in(&bytes);
                    record.value = found.unwrap_or(0);
                    found.map_or_else(|| record.end(Ended::Corrupt), |_| None)
                }
                Err(error) if error.code() == ErrorCode::ObjectNotFound => record.end(Ended::Absent),
                Err(error) => record.fail(Ended::Fail, error),
            },
            70..=84 => {
                record.asked = Asked::Exist;
                match self.client.exist(key, deadline).await {
                    Ok(true) => None,
                    Ok(false) => record.end(Ended::Absent),
                    Err(error) => record.fail(Ended::Fail, error),
                }
            }
            _ => {
                record.asked = Asked::Remove;
                // Forced, or refused while a reader has a lease.
                let mode = if drawn < 95 { RemoveMode::Force } else { RemoveMode::RespectLease };
                match self.client.remove(key, mode, deadline).await {
                    Ok(()) => None,
                    Err(error) if error.code() == ErrorCode::ObjectNotFound => record.end(Ended::Absent),
                    Err(error) => record.fail(removal_ended(&error), error),
                }
            }
        };
        record.done_ns = monotonic_ns();
        record.doubts = had_doubts || !self.client.suspects().is_empty();
        if record.asked == Asked::Get && record.ended == Ended::Fail {
            self.unread.insert(record.key.clone(), Instant::now());
        }
        record.error = error.map_or_else(String::new, |error| error.to_string());
        record
    }
}

impl ContestRecord {
    fn end(&mut self, ended: Ended) -> Option<Error> {
        self.ended = ended;
        None
    }

    fn fail(&mut self, ended: Ended, error: Error) -> Option<Error> {
        self.ended = ended;
        Some(error)
    }
}

/// Whether a put that failed certainly has no effect, now or later: only what is said of a grant that was never ended says so.
fn put_ended(error: &Error) -> Ended {
    match error.code() {
        ErrorCode::InvalidParams
        | ErrorCode::InvalidKey
        | ErrorCode::NoSpace
        | ErrorCode::NotEnoughReplicas
        | ErrorCode::PutInProgress
        | ErrorCode::FitsNowhere => Ended::Fail,
        _ => Ended::Unknown,
    }
}

/// The same of a removal. A refusal is remembered under the call's number: no attempt of it removes any more (W8).
fn removal_ended(error: &Error) -> Ended {
    match error.code() {
        ErrorCode::ObjectHasLease | ErrorCode::NotReady => Ended::Fail,
        _ => Ended::Unknown,
    }
}

/// Gets every key once more when all calls are over, so that what the last change left is looked at, of each key.
pub async fn look_again(client: &Client, records: &[ContestRecord]) -> Result<Vec<ContestRecord>> {
    let process = records.iter().map(|record| record.process + 1).max().unwrap_or(0);
    let mut looks = Vec::new();
    let mut left = keys_of(records);
    let give_up = Instant::now() + LOOK_WITHIN;
    loop {
        let mut again = Vec::new();
        for keys in left.chunks(LOOK_KEYS) {
            let sent_ns = monotonic_ns();
            let results = client.get_many(keys, Some(LOOK_WITHIN)).await;
            let done_ns = monotonic_ns();
            for (key, result) in keys.iter().zip(results) {
                let (value, ended, error) = match result {
                    Ok(bytes) => match value_in(&bytes) {
                        Some(value) => (value, Ended::Ok, String::new()),
                        None => (0, Ended::Corrupt, String::new()),
                    },
                    Err(error) if error.code() == ErrorCode::ObjectNotFound => (0, Ended::Absent, String::new()),
                    Err(error) => {
                        again.push(key.clone());
                        (0, Ended::Fail, error.to_string())
                    }
                };
                looks.push(ContestRecord {
                    process,
                    asked: Asked::Get,
                    key: key.clone(),
                    value,
                    copies: 0,
                    intended_ns: sent_ns,
                    sent_ns,
                    done_ns,
                    ended,
                    doubts: false,
                    error,
                });
            }
        }
        if again.is_empty() {
            return Ok(looks);
        }
        left = again;
        ensure!(
            Instant::now() < give_up,
            "{} keys of the contest can neither be read nor are missing, {} for one",
            left.len(),
            left[0]
        );
        tokio::time::sleep(POLL_EVERY).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_name_the_value_that_they_are_and_no_other() {
        for value in [1, 2, 3, 7 << COUNT_BITS | 12] {
            let bytes = content(value);
            assert_eq!(value_in(&bytes), Some(value));
            let mut other = bytes.clone();
            other[40] ^= 1;
            assert_eq!(value_in(&other), None);
            other = bytes.clone();
            other[0] ^= 4;
            assert_eq!(value_in(&other), None);
            assert_eq!(value_in(&bytes[..bytes.len() - 1]), None);
        }
        assert_eq!(value_in(b"short"), None);
    }
}
