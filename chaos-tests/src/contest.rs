//! A contest: several processes that put, replace, get, look for and remove the same few keys, and the judgement of what they saw.
//!
//! The load ([`crate::load`]) writes every key once, so it shows what is lost and what is wrong, and not whether answers fit together: a read
//! of a value that was replaced before it began, or a removal that happens twice. Here every key is written by all, and the judge of the
//! simulation (`tidepool-checker`) looks for an order of the calls in which each answer is right.
//!
//! [`client`] is one of the processes, [`record`] what it logs, [`verdict`] the judgement. Keys change with time ([`ROUND_TICKS`]), so that the
//! history of one stays short enough to be judged.

mod client;
mod record;
mod verdict;

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use tidepool_client::Client;

use crate::clock::monotonic_ns;
use crate::cluster::POLL_EVERY;
use crate::logged::{Logged, STOP_WITHIN};
use crate::record::read_all;
use crate::worker::WorkerSpec;
use client::look_again;
pub use client::{ContestSpec, run_client};
pub use record::{Asked, ContestRecord, Ended};
pub use verdict::{Terms, Verdict, judge};

/// Keys that are contended for at a time.
const KEYS: u64 = 6;
/// Calls that a process would make on schedule before all go on to other keys.
const ROUND_TICKS: u64 = 200;
/// Calls a second of each process, on a schedule of its own.
const RATE_PER_S: f64 = 25.0;
/// Deadline of one call. One that nobody answers may take effect for ever: few of them make the judgement long.
const CALL_WITHIN: Duration = Duration::from_secs(5);
/// Time from starting the processes to the first scheduled call.
const START_AFTER: Duration = Duration::from_millis(200);

/// Who contends, and where.
#[derive(Clone, Debug)]
pub struct ContestOptions {
    /// The tidepool binary.
    pub binary: PathBuf,
    /// Logs go here.
    pub directory: PathBuf,
    /// Masters, comma-separated.
    pub masters: String,
    /// Tenant whose keys it uses; "" is the default one.
    pub tenant: String,
    /// Keys start with this, and nobody else's do.
    pub prefix: String,
    /// Processes.
    pub processes: u32,
    /// Copies of each object.
    pub replica_num: u32,
    /// Whether objects are pinned for good, so that nothing but a removal ends them.
    pub pinned: bool,
    /// Seed of choices.
    pub seed: u64,
}

/// A contest that goes on. Dropping it kills its processes.
pub struct Contest {
    clients: Vec<Logged>,
}

impl Contest {
    /// Starts every process on one schedule.
    pub fn start(options: &ContestOptions) -> Result<Contest> {
        std::fs::create_dir_all(&options.directory)
            .with_context(|| format!("log directory {}", options.directory.display()))?;
        let start_ns = monotonic_ns() + START_AFTER.as_nanos() as u64;
        let clients = (0..options.processes).map(|number| {
            let name = format!("contender-{number}");
            let log = options.directory.join(format!("{name}.calls"));
            let spec = ContestSpec {
                masters: options.masters.clone(),
                tenant: options.tenant.clone(),
                number,
                rate_per_s: RATE_PER_S,
                prefix: options.prefix.clone(),
                keys: KEYS,
                round_ticks: ROUND_TICKS,
                seed: options.seed,
                deadline_ms: CALL_WITHIN.as_millis() as u64,
                replica_num: options.replica_num,
                pinned: options.pinned,
                log: log.clone(),
                start_ns,
            };
            Logged::start(&options.binary, &name, log, &WorkerSpec::Contest(spec))
        });
        Ok(Contest { clients: clients.collect::<Result<_>>()? })
    }

    /// Fails when a process has ended by itself.
    pub fn expect_running(&mut self) -> Result<()> {
        self.clients.iter_mut().try_for_each(|client| client.process.expect_running())
    }

    /// Waits until so many calls that were sent from now on have ended.
    pub async fn wait_for(&self, calls: usize, within: Duration) -> Result<()> {
        let (since_ns, give_up) = (monotonic_ns(), Instant::now() + within);
        loop {
            let mut ended = 0;
            for client in self.clients.iter().filter(|client| client.log.exists()) {
                let records: Vec<ContestRecord> = read_all(&client.log)?;
                ended += records.iter().filter(|record| record.sent_ns >= since_ns).count();
            }
            if ended >= calls {
                return Ok(());
            }
            ensure!(Instant::now() < give_up, "{ended} calls of the contest ended within {within:?}, not {calls}");
            tokio::time::sleep(POLL_EVERY * 10).await;
        }
    }

    /// Stops every process, and answers what they logged. A process that was killed may have begun a call that no log knows: nobody does.
    pub async fn stop(mut self) -> Result<Vec<ContestRecord>> {
        self.clients.iter_mut().for_each(Logged::tell_to_stop);
        let mut records = Vec::new();
        for client in &mut self.clients {
            records.extend(client.ended::<ContestRecord>(CALL_WITHIN + STOP_WITHIN).await?);
        }
        Ok(records)
    }

    /// Stops, and looks once more at every key.
    pub async fn end(self, client: &Client) -> Result<Vec<ContestRecord>> {
        let mut records = self.stop().await?;
        records.extend(look_again(client, &records).await?);
        Ok(records)
    }
}

/// Every key that these calls were about, once.
pub fn keys_of(records: &[ContestRecord]) -> Vec<String> {
    let mut keys: Vec<String> = records.iter().map(|record| record.key.clone()).collect();
    keys.sort_unstable();
    keys.dedup();
    keys
}

/// The logs that a contest left in a directory, as its processes wrote them.
pub fn logs_in(directory: &Path) -> Result<Vec<PathBuf>> {
    let mut logs = Vec::new();
    for entry in std::fs::read_dir(directory).with_context(|| format!("log directory {}", directory.display()))? {
        let path = entry?.path();
        if path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("contender-"))
            && path.extension().is_some_and(|end| end == "calls")
        {
            logs.push(path);
        }
    }
    logs.sort();
    Ok(logs)
}
