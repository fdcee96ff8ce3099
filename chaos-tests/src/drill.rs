//! `tidepool drill kill-leader`: ends the leader's reign again and again under load and reports what clients felt, on a
//! pool of its own (`--spawn`) or on a quorum that serves others.

mod live;
mod options;
mod report;
mod strike;

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use tidepool_client::{Client, PutOptions};
use tidepool_proto::Address;

use crate::audit::{self, Expected};
use crate::cluster::{Cluster, ClusterOptions};
use crate::content::{content_hash, value_of};
use crate::failover::{self, Judged, Quorum, fill_percent, kill_leader_round};
use crate::fleet::FleetOptions;
use crate::output::{Format, Verdict, WorkDir};
use live::LiveQuorum;
pub use options::{FaultKind, Fill, KillLeaderOptions, Killer, LiveOptions};
use report::{print_round, report_losses, summarise};

/// Size of the objects that fill the pool before the first round.
const FILL_OBJECT_BYTES: u64 = 1 << 20;
/// How many of them one put call carries.
const FILL_BATCH: usize = 16;
/// Deadline of one such call.
const FILL_WITHIN: Duration = Duration::from_secs(20);
/// Deadline of one page of a listing.
const LIST_WITHIN: Duration = Duration::from_secs(20);
/// Keys of one page.
const LIST_KEYS: u32 = 1000;
/// Passes over the drill's own keys until none is left.
const REMOVE_PASSES: usize = 20;

/// The pool that a drill without `--spawn` works on.
#[derive(Clone, Debug)]
pub struct Target {
    /// Masters; one reachable member is enough.
    pub masters: Vec<Address>,
    /// Tenant whose keys the drill uses.
    pub tenant: String,
}

/// What the rounds of one drill share.
struct Scene<'a> {
    options: &'a KillLeaderOptions,
    binary: &'a Path,
    directory: PathBuf,
    client: Client,
    masters: String,
    tenant: String,
    /// Every key of the drill starts with it.
    prefix: String,
    capacity_bytes: u64,
    judged: Judged,
    format: Format,
}

/// Runs the drill. One line a round, then the summary.
pub async fn kill_leader(
    options: &KillLeaderOptions,
    target: &Target,
    binary: &Path,
    format: Format,
) -> Result<Verdict> {
    let work_dir = WorkDir::open(options.work_dir.as_deref(), "drill")?;
    let directory = work_dir.path().to_owned();
    if !options.spawn {
        return drill_live(options, target, binary, directory, format).await;
    }
    let mut cluster_options = ClusterOptions::new(binary, &directory.join("pool"));
    cluster_options.segment_bytes = options.segment_bytes;
    cluster_options.election.clone_from(&options.election);
    let mut cluster = Cluster::start(cluster_options).await?;
    let masters = cluster.masters_text();
    let capacity_bytes = cluster.capacity_bytes();
    let scene = Scene {
        options,
        binary,
        directory,
        client: failover::connect(&masters, "").await?,
        masters,
        tenant: String::new(),
        prefix: "drill".to_owned(),
        capacity_bytes,
        judged: match options.fill() {
            Fill::None | Fill::Half => Judged::All,
            Fill::Overflow => Judged::LastBytes(capacity_bytes / 4),
        },
        format,
    };
    let filler_bytes = match options.fill() {
        Fill::None => 0,
        Fill::Half => capacity_bytes / 2,
        Fill::Overflow => capacity_bytes / 100 * 97,
    };
    scene.run(&mut cluster, filler_bytes).await
}

/// What a drill on a live quorum would do, in words. Asks the quorum, changes nothing.
pub async fn plan(options: &KillLeaderOptions, target: &Target) -> Result<String> {
    let quorum = LiveQuorum::find(&target.masters, &options.live).await?;
    let load = f64::from(options.writers) * options.rate;
    let mean_bytes = options.value_bytes().iter().sum::<u64>() / 3;
    Ok(format!(
        "this drill would, {} times:\n\
         - run {} writers and {} readers, {} calls a second each ({:.1} MB/s written), under keys that start with '{}';\n\
           a full pool evicts its oldest objects for them, as for any writer\n\
         - end the reign of the leader, now {}: {}\n\
         - {}\n\
         and then remove every key under its own prefix. Clients of the pool wait meanwhile as they would for a real failover.\n\
         Nothing was done; add --yes to do it",
        options.rounds,
        options.writers,
        options.readers,
        options.rate,
        load * mean_bytes as f64 / 1e6,
        live::PREFIX,
        quorum.describe_leader().await?,
        quorum.strike.describe(),
        quorum.strike.describe_return(),
    ))
}

async fn drill_live(
    options: &KillLeaderOptions,
    target: &Target,
    binary: &Path,
    directory: PathBuf,
    format: Format,
) -> Result<Verdict> {
    if options.fill() == Fill::Overflow {
        bail!("--fill 95 evicts what others stored; on a quorum that serves others only none and half are drilled");
    }
    let mut quorum = LiveQuorum::find(&target.masters, &options.live).await?;
    let status = quorum.leader_status().await?;
    let capacity_bytes: u64 = status.segments.iter().map(|s| s.capacity_bytes).sum();
    let used = (capacity_bytes as f64 * fill_percent(&status) / 100.0) as u64;
    let filler_bytes = if options.fill() == Fill::Half { (capacity_bytes / 2).saturating_sub(used) } else { 0 };
    let masters = quorum.addresses().join(",");
    let scene = Scene {
        options,
        binary,
        directory,
        client: failover::connect(&masters, &target.tenant).await?,
        masters,
        tenant: target.tenant.clone(),
        prefix: format!("{}{:08x}", live::PREFIX, rand::random::<u32>()),
        capacity_bytes,
        // In a pool that evicts already, others' puts take the drill's older objects by right.
        judged: match fill_percent(&status) <= 50.0 {
            true => Judged::All,
            false => Judged::LastBytes(capacity_bytes / 4),
        },
        format,
    };
    eprintln!("drilling the pool at {}, keys under '{}/'", scene.masters, scene.prefix);
    let outcome = tokio::select! {
        outcome = scene.run(&mut quorum, filler_bytes) => outcome,
        signal = tokio::signal::ctrl_c() => {
            signal.context("waiting for Ctrl-C")?;
            Err(anyhow::anyhow!("interrupted; a killed master stays down until it is started again"))
        }
    };
    match scene.remove_own_keys().await {
        Ok(removed) => eprintln!("removed {removed} objects under '{}/'", scene.prefix),
        Err(error) => {
            let left = error.context(format!("objects under '{}/' are left in the pool", scene.prefix));
            return match outcome {
                Ok(_) => Err(left),
                Err(first) => Err(first.context(format!("{left:#}"))),
            };
        }
    }
    outcome
}

impl Scene<'_> {
    async fn run(&self, quorum: &mut impl Quorum, filler_bytes: u64) -> Result<Verdict> {
        let filler = self.fill(filler_bytes).await?;
        let overflows = self.options.fill() == Fill::Overflow;
        let mut rounds = Vec::new();
        let mut filler_lost = 0;
        for number in 1..=self.options.rounds {
            let load = self.load(number);
            let round = kill_leader_round(quorum, &self.client, &load, self.judged).await?;
            if !overflows {
                let audit = audit::read_back(&self.client, &filler).await?;
                report_losses("objects that filled the pool", &audit);
                filler_lost += audit.lost();
                let keys: Vec<&str> = round.keys.iter().map(String::as_str).collect();
                audit::remove_all(&self.client, &keys).await?;
            }
            report_losses("acknowledged puts of this round", &round.audit);
            print_round(number, &round, self.format);
            rounds.push(round);
            if self.options.work_dir.is_none() {
                std::fs::remove_dir_all(&load.directory)?;
            }
        }
        Ok(summarise(self.options, &rounds, filler_lost, self.format))
    }

    fn load(&self, number: u32) -> FleetOptions {
        FleetOptions {
            binary: self.binary.to_owned(),
            directory: self.directory.join(format!("round-{number}")),
            masters: self.masters.clone(),
            tenant: self.tenant.clone(),
            writers: self.options.writers,
            readers: self.options.readers,
            rate_per_s: self.options.rate,
            value_bytes: self.options.value_bytes(),
            prefix: format!("{}/{number}", self.prefix),
            seed: u64::from(number),
            deadline: Duration::from_secs(5),
            replica_num: 1,
            recent_bytes: self.capacity_bytes / 8,
        }
    }

    /// Puts objects of 1 MiB until `bytes` are stored.
    async fn fill(&self, bytes: u64) -> Result<Vec<Expected>> {
        let mut stored = Vec::new();
        let count = (bytes / FILL_OBJECT_BYTES) as usize;
        for from in (0..count).step_by(FILL_BATCH) {
            let keys = (from..count.min(from + FILL_BATCH)).map(|at| format!("{}/fill/{at}", self.prefix));
            let mut items = Vec::new();
            for key in keys {
                let value = value_of(&key, 0, FILL_OBJECT_BYTES as usize);
                items.push(tidepool_client::PutItem::new(key.clone(), value.clone()));
                stored.push(Expected { key, hash: content_hash(&value), bytes: FILL_OBJECT_BYTES });
            }
            let put = PutOptions { deadline: Some(FILL_WITHIN), ..PutOptions::default() };
            for result in self.client.put_many(items, put).await {
                result?;
            }
        }
        Ok(stored)
    }

    /// Removes whatever is listed under the drill's prefix, until nothing is; answers how many objects went.
    async fn remove_own_keys(&self) -> Result<u64> {
        let prefix = format!("{}/", self.prefix);
        let mut removed = 0;
        for _ in 0..REMOVE_PASSES {
            let mut found = 0;
            let mut after = bytes::Bytes::new();
            loop {
                let page = self.client.list(prefix.as_bytes(), LIST_KEYS, &after, Some(LIST_WITHIN)).await?;
                let keys: Vec<&[u8]> = page.objects.iter().map(|object| &object.key[..]).collect();
                anyhow::ensure!(
                    keys.iter().all(|key| key.starts_with(prefix.as_bytes())),
                    "the listing under '{prefix}' names keys of others"
                );
                audit::remove_all(&self.client, &keys).await?;
                found += keys.len() as u64;
                if !page.more {
                    break;
                }
                after = page.next;
            }
            removed += found;
            if found == 0 {
                return Ok(removed);
            }
        }
        bail!("keys under '{prefix}' keep appearing");
    }
}
