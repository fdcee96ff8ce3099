//! Open-loop load: each client is a process that sends on a fixed schedule whether or not earlier calls were answered,
//! counts latency from the scheduled instant, and logs every call before it forgets it.

use std::collections::VecDeque;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use anyhow::{Context, Result};
use parking_lot::Mutex;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use serde::{Deserialize, Serialize};
use tidepool_client::{Client, ClientOptions, Error, ErrorCode, PutOptions};
use tokio::sync::Semaphore;

use crate::clock::monotonic_ns;
use crate::content::{content_hash, value_of};
use crate::record::{Call, CallOutcome, CallRecord, RecordFollower, RecordWriter};
use crate::worker::{self, input_has_ended};

/// Calls one client may have open; the schedule records what it could not send beyond that as failed.
const OPEN_CALLS_MAX: usize = 1024;
/// Keys asked by one exist.
const EXIST_KEYS: usize = 32;
/// One read call in this many is an exist.
const EXIST_EVERY: u64 = 4;
/// How long a client looks for a leader at its start.
pub(crate) const CONNECT_WITHIN: Duration = Duration::from_secs(30);

/// What one client does.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum LoadRole {
    /// Puts fresh keys.
    Writer,
    /// Gets keys that writers were acknowledged, and checks the bytes.
    Reader,
}

/// One client.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct LoadSpec {
    /// Masters, comma-separated.
    pub masters: String,
    /// Tenant whose keys it uses; "" is the default one.
    pub tenant: String,
    /// Role.
    pub role: LoadRole,
    /// Number among its kind.
    pub number: u32,
    /// Calls a second.
    pub rate_per_s: f64,
    /// Keys start with this.
    pub prefix: String,
    /// Value sizes, drawn evenly.
    pub value_bytes: Vec<u64>,
    /// Seed of values and choices.
    pub seed: u64,
    /// Deadline of one call.
    pub deadline_ms: u64,
    /// Copies of each object.
    pub replica_num: u32,
    /// Its log.
    pub log: PathBuf,
    /// Writers' logs that a reader takes its keys from.
    pub follow: Vec<PathBuf>,
    /// A reader reads only keys within this many last acknowledged bytes.
    pub recent_bytes: u64,
    /// Where the first scheduled instant lies (CLOCK_MONOTONIC).
    pub start_ns: u64,
}

/// An acknowledged object.
#[derive(Clone, Debug)]
struct Acknowledged {
    key: String,
    hash: String,
    bytes: u64,
}

/// The last acknowledged objects of some writers.
struct Recent {
    followers: Vec<RecordFollower>,
    objects: VecDeque<Acknowledged>,
    bytes: u64,
    bytes_max: u64,
}

impl Recent {
    fn poll(&mut self) -> Result<()> {
        let Recent { followers, objects, bytes, bytes_max } = self;
        for follower in followers.iter_mut() {
            follower.poll(|record| {
                if record.call == Call::Put && record.outcome == CallOutcome::Ok {
                    *bytes += record.bytes;
                    objects.push_back(Acknowledged { key: record.key, hash: record.hash, bytes: record.bytes });
                }
            })?;
        }
        while *bytes > *bytes_max {
            let Some(oldest) = objects.pop_front() else { break };
            *bytes -= oldest.bytes;
        }
        Ok(())
    }
}

struct Shared {
    client: Client,
    log: Mutex<RecordWriter>,
    open: Arc<Semaphore>,
    broken: Mutex<Option<anyhow::Error>>,
    spec: LoadSpec,
}

impl Shared {
    fn append(&self, record: &CallRecord) {
        // A log that cannot be written makes every figure worthless: remember, and end with it.
        if let Err(error) = self.log.lock().append(record) {
            self.broken.lock().get_or_insert(error);
        }
    }
    fn deadline(&self) -> Option<Duration> {
        Some(Duration::from_millis(self.spec.deadline_ms))
    }
}

/// Is one client until standard input closes.
pub fn run_client(spec: LoadSpec) -> Result<()> {
    worker::block_on(drive(spec))
}

async fn drive(spec: LoadSpec) -> Result<()> {
    let stop = input_has_ended();
    let mut options = ClientOptions::new(ClientOptions::parse_masters(&spec.masters)?);
    options.tenant.clone_from(&spec.tenant);
    options.connect_deadline = CONNECT_WITHIN;
    options.deadline = Duration::from_millis(spec.deadline_ms);
    let client = Client::connect(options).await.context("load client")?;
    let shared = Arc::new(Shared {
        client,
        log: Mutex::new(RecordWriter::create(&spec.log)?),
        open: Arc::new(Semaphore::new(OPEN_CALLS_MAX)),
        broken: Mutex::new(None),
        spec: spec.clone(),
    });
    let mut recent = Recent {
        followers: spec.follow.iter().map(|path| RecordFollower::new(path)).collect(),
        objects: VecDeque::new(),
        bytes: 0,
        bytes_max: spec.recent_bytes,
    };
    let mut random = StdRng::seed_from_u64(spec.seed ^ u64::from(spec.number) << 32 ^ spec.role as u64);
    let interval_ns = 1e9 / spec.rate_per_s;
    let start_ns = spec.start_ns.max(monotonic_ns());
    for tick in 0u64.. {
        let intended_ns = start_ns + (tick as f64 * interval_ns) as u64;
        let now = monotonic_ns();
        if intended_ns > now {
            tokio::time::sleep(Duration::from_nanos(intended_ns - now)).await;
        }
        if stop.load(Ordering::Relaxed) || shared.broken.lock().is_some() {
            break;
        }
        let Ok(permit) = shared.open.clone().try_acquire_owned() else {
            shared.append(&CallRecord {
                call: if spec.role == LoadRole::Writer { Call::Put } else { Call::Get },
                key: String::new(),
                hash: String::new(),
                bytes: 0,
                intended_ns,
                sent_ns: intended_ns,
                done_ns: monotonic_ns(),
                outcome: CallOutcome::Fail,
                copies: 0,
                error: format!("not sent: {OPEN_CALLS_MAX} calls of this client are open"),
            });
            continue;
        };
        let shared = shared.clone();
        match spec.role {
            LoadRole::Writer => {
                let bytes = spec.value_bytes[random.random_range(0..spec.value_bytes.len())];
                let key = format!("{}/w{}/{tick}", spec.prefix, spec.number);
                tokio::spawn(async move {
                    put(&shared, key, bytes, intended_ns).await;
                    drop(permit);
                });
            }
            LoadRole::Reader => {
                recent.poll()?;
                if recent.objects.is_empty() {
                    continue;
                }
                let count = if tick % EXIST_EVERY == EXIST_EVERY - 1 { EXIST_KEYS } else { 1 };
                let chosen: Vec<Acknowledged> =
                    (0..count).map(|_| recent.objects[random.random_range(0..recent.objects.len())].clone()).collect();
                tokio::spawn(async move {
                    if chosen.len() == 1 {
                        get(&shared, &chosen[0], intended_ns).await;
                    } else {
                        exist(&shared, &chosen, intended_ns).await;
                    }
                    drop(permit);
                });
            }
        }
    }
    // Every open call ends by its deadline; its record belongs to the log.
    let _all = shared.open.acquire_many(OPEN_CALLS_MAX as u32).await?;
    match shared.broken.lock().take() {
        Some(error) => Err(error),
        None => Ok(()),
    }
}

async fn put(shared: &Shared, key: String, bytes: u64, intended_ns: u64) {
    let value = value_of(&key, shared.spec.seed, bytes as usize);
    let hash = content_hash(&value);
    let options =
        PutOptions { replica_num: shared.spec.replica_num, deadline: shared.deadline(), ..PutOptions::default() };
    let sent_ns = monotonic_ns();
    let result = shared.client.put(key.clone(), value, options).await;
    let done_ns = monotonic_ns();
    let (outcome, copies, error) = match result {
        Ok(put) => (CallOutcome::Ok, put.copies, String::new()),
        Err(error) => (outcome_of(&error), 0, error.to_string()),
    };
    shared.append(&CallRecord {
        call: Call::Put,
        key,
        hash,
        bytes,
        intended_ns,
        sent_ns,
        done_ns,
        outcome,
        copies,
        error,
    });
}

async fn get(shared: &Shared, object: &Acknowledged, intended_ns: u64) {
    let sent_ns = monotonic_ns();
    let result = shared.client.get(&object.key, shared.deadline()).await;
    let done_ns = monotonic_ns();
    let (outcome, error) = match result {
        Ok(value) if content_hash(&value) == object.hash => (CallOutcome::Ok, String::new()),
        Ok(value) => (CallOutcome::Corrupt, format!("{} bytes hash to {}", value.len(), content_hash(&value))),
        Err(error) if error.code() == ErrorCode::ObjectNotFound => (CallOutcome::Miss, error.to_string()),
        Err(error) => (outcome_of(&error), error.to_string()),
    };
    shared.append(&CallRecord {
        call: Call::Get,
        key: object.key.clone(),
        hash: object.hash.clone(),
        bytes: object.bytes,
        intended_ns,
        sent_ns,
        done_ns,
        outcome,
        copies: 0,
        error,
    });
}

async fn exist(shared: &Shared, objects: &[Acknowledged], intended_ns: u64) {
    let keys: Vec<&str> = objects.iter().map(|o| o.key.as_str()).collect();
    let sent_ns = monotonic_ns();
    let results = shared.client.exist_many(&keys, shared.deadline()).await;
    let done_ns = monotonic_ns();
    let mut outcome = CallOutcome::Ok;
    let mut key = keys[0].to_owned();
    let mut error = String::new();
    for (asked, result) in keys.iter().zip(results) {
        let (this, text) = match result {
            Ok(true) => continue,
            Ok(false) => (CallOutcome::Miss, "reported absent".to_owned()),
            Err(error) => (outcome_of(&error), error.to_string()),
        };
        if outcome == CallOutcome::Ok {
            (outcome, key, error) = (this, (*asked).to_owned(), text);
        }
    }
    shared.append(&CallRecord {
        call: Call::Exist,
        key,
        hash: String::new(),
        bytes: 0,
        intended_ns,
        sent_ns,
        done_ns,
        outcome,
        copies: 0,
        error,
    });
}

/// Whether a failed call certainly had no effect. Only refusals that name a state say so; silence does not.
pub(crate) fn outcome_of(error: &Error) -> CallOutcome {
    match error.code() {
        ErrorCode::InvalidParams
        | ErrorCode::InvalidKey
        | ErrorCode::NoSpace
        | ErrorCode::NotEnoughReplicas
        | ErrorCode::FitsNowhere
        | ErrorCode::GrantLost
        | ErrorCode::ObjectNotFound => CallOutcome::Fail,
        _ => CallOutcome::Unknown,
    }
}
