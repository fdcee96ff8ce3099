//! Many load clients together: started as processes, watched through their logs, stopped by closing their input.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use crate::bulk::{Bulk, BulkSpec};
use crate::clock::monotonic_ns;
use crate::cluster::POLL_EVERY;
use crate::load::{LoadRole, LoadSpec};
use crate::logged::{Logged, STOP_WITHIN};
use crate::record::{Call, CallOutcome, CallRecord, RecordFollower};
use crate::worker::WorkerSpec;

/// Time from starting the processes to the first scheduled call.
const START_AFTER: Duration = Duration::from_millis(200);

/// A whole load.
#[derive(Clone, Debug)]
pub struct FleetOptions {
    /// The tidepool binary.
    pub binary: PathBuf,
    /// Logs go here.
    pub directory: PathBuf,
    /// Masters, comma-separated.
    pub masters: String,
    /// Tenant whose keys it uses; "" is the default one.
    pub tenant: String,
    /// Writer processes.
    pub writers: u32,
    /// Reader processes.
    pub readers: u32,
    /// Calls a second of each.
    pub rate_per_s: f64,
    /// Value sizes.
    pub value_bytes: Vec<u64>,
    /// Keys start with this.
    pub prefix: String,
    /// Seed of values and choices.
    pub seed: u64,
    /// Deadline of one call.
    pub deadline: Duration,
    /// Copies of each object.
    pub replica_num: u32,
    /// Readers read only keys within this many last acknowledged bytes of all writers.
    pub recent_bytes: u64,
    /// One more process, which puts batches of large values; none: it is not there.
    pub bulk: Option<Bulk>,
}

struct LoadClient {
    logged: Logged,
    /// None: the bulk writer.
    role: Option<LoadRole>,
}

/// Running load clients.
pub struct Fleet {
    clients: Vec<LoadClient>,
    stop_within: Duration,
}

impl Fleet {
    /// Starts every client on one schedule.
    pub fn start(options: &FleetOptions) -> Result<Fleet> {
        std::fs::create_dir_all(&options.directory)
            .with_context(|| format!("log directory {}", options.directory.display()))?;
        let start_ns = monotonic_ns() + START_AFTER.as_nanos() as u64;
        let log_of = |name: &str| options.directory.join(format!("{name}.calls"));
        let writer_logs: Vec<PathBuf> = (0..options.writers).map(|n| log_of(&format!("writer-{n}"))).collect();
        let interval_ns = 1e9 / options.rate_per_s;
        let mut clients = Vec::new();
        let roles = [(LoadRole::Writer, options.writers, "writer"), (LoadRole::Reader, options.readers, "reader")];
        for (role, count, kind) in roles {
            for number in 0..count {
                let name = format!("{kind}-{number}");
                let log = log_of(&name);
                let spec = LoadSpec {
                    masters: options.masters.clone(),
                    tenant: options.tenant.clone(),
                    role,
                    number,
                    rate_per_s: options.rate_per_s,
                    prefix: options.prefix.clone(),
                    value_bytes: options.value_bytes.clone(),
                    seed: options.seed,
                    deadline_ms: options.deadline.as_millis() as u64,
                    replica_num: options.replica_num,
                    log: log.clone(),
                    follow: if role == LoadRole::Reader { writer_logs.clone() } else { Vec::new() },
                    recent_bytes: options.recent_bytes,
                    // Clients take turns within the interval, so that together they probe finely.
                    start_ns: start_ns + (interval_ns * f64::from(number) / f64::from(count)) as u64,
                };
                let logged = Logged::start(&options.binary, &name, log, &WorkerSpec::Load(spec))?;
                clients.push(LoadClient { logged, role: Some(role) });
            }
        }
        if let Some(bulk) = options.bulk {
            let log = log_of("bulk");
            let spec = BulkSpec {
                masters: options.masters.clone(),
                tenant: options.tenant.clone(),
                prefix: format!("{}/bulk", options.prefix),
                seed: options.seed,
                deadline_ms: options.deadline.as_millis() as u64,
                replica_num: options.replica_num,
                log: log.clone(),
                start_ns,
                bulk,
            };
            let logged = Logged::start(&options.binary, "bulk", log, &WorkerSpec::Bulk(spec))?;
            clients.push(LoadClient { logged, role: None });
        }
        Ok(Fleet { clients, stop_within: options.deadline + STOP_WITHIN })
    }

    /// Counts successes of calls sent at `since_ns` or later.
    pub fn progress(&self, since_ns: u64) -> Progress {
        Progress {
            followers: self.clients.iter().map(|client| RecordFollower::new(&client.logged.log)).collect(),
            puts_ok: 0,
            gets_ok: 0,
            since_ns,
        }
    }

    /// Fails when a client has ended by itself.
    pub fn expect_running(&mut self) -> Result<()> {
        self.clients.iter_mut().try_for_each(|client| client.logged.process.expect_running())
    }

    /// Kills one writer without warning.
    pub fn kill_writer(&mut self, number: usize) -> Result<()> {
        let writer = self.clients.iter_mut().filter(|c| c.role == Some(LoadRole::Writer)).nth(number);
        writer.with_context(|| format!("there is no writer {number}"))?.logged.process.kill().map(|_| ())
    }

    /// Stops every client, waits for their open calls, and returns their logs, one list a client.
    pub async fn stop(mut self) -> Result<Vec<Vec<CallRecord>>> {
        self.clients.iter_mut().for_each(|client| client.logged.tell_to_stop());
        let mut logs = Vec::new();
        for client in &mut self.clients {
            logs.push(client.logged.ended(self.stop_within).await?);
        }
        Ok(logs)
    }
}

/// Acknowledged puts of some logs, in the order of their acknowledgement.
pub fn acknowledged_puts(logs: &[Vec<CallRecord>]) -> Vec<&CallRecord> {
    let mut puts: Vec<&CallRecord> =
        logs.iter().flatten().filter(|r| r.call.is_put() && r.outcome == CallOutcome::Ok).collect();
    puts.sort_by_key(|record| record.done_ns);
    puts
}

/// Counts acknowledged calls of a running load, to wait for instead of sleeping.
pub struct Progress {
    followers: Vec<RecordFollower>,
    puts_ok: u64,
    gets_ok: u64,
    since_ns: u64,
}

impl Progress {
    /// Successful puts and gets so far.
    pub fn poll(&mut self) -> Result<(u64, u64)> {
        let Progress { followers, puts_ok, gets_ok, since_ns } = self;
        for follower in followers.iter_mut() {
            follower.poll(|record| {
                if record.outcome == CallOutcome::Ok && record.sent_ns >= *since_ns {
                    match record.call {
                        Call::Put => *puts_ok += 1,
                        Call::Get => *gets_ok += 1,
                        Call::Bulk | Call::Exist => {}
                    }
                }
            })?;
        }
        Ok((self.puts_ok, self.gets_ok))
    }

    /// Waits for so many successful puts and gets.
    pub async fn wait_for(&mut self, puts: u64, gets: u64, within: Duration) -> Result<()> {
        let give_up = Instant::now() + within;
        loop {
            let (seen_puts, seen_gets) = self.poll()?;
            if seen_puts >= puts && seen_gets >= gets {
                return Ok(());
            }
            if Instant::now() > give_up {
                bail!(
                    "the load saw {seen_puts} puts and {seen_gets} gets succeed within {within:?}, not {puts} and {gets}"
                );
            }
            tokio::time::sleep(POLL_EVERY).await;
        }
    }
}
