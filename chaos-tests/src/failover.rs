//! One fault under load, from warm-up to verdict: the round that the demo does once and drills do many times.

use std::time::Duration;

use anyhow::{Context, Result};
use rand::Rng;
use tidepool_client::{Client, ClientOptions};
use tidepool_proto::v1::StatusResponse;

use crate::audit::{self, Audit, Expected};
use crate::contest::{self, Contest, ContestOptions, Terms, keys_of};
use crate::digests::DigestComparison;
use crate::fleet::{Fleet, FleetOptions, acknowledged_puts};
use crate::outage::{self, Outage};
use crate::plot::{self, Point};
use crate::process::Fault;
use crate::record::{CallOutcome, CallRecord};
use crate::timeline::{Breakdown, Watch};

/// How long a load may take to run smoothly before the fault.
const WARM_WITHIN: Duration = Duration::from_secs(60);
/// How long clients may be without service after the fault before the round counts as not recovered.
pub(crate) const RECOVER_WITHIN: Duration = Duration::from_secs(30);
/// How long a restarted master may take to hold everything again.
pub(crate) const CATCH_UP_WITHIN: Duration = Duration::from_secs(60);
/// How long masters may take to stand at one index once the load is gone.
pub(crate) const DIGEST_WITHIN: Duration = Duration::from_secs(30);
/// The fault falls at a random instant within this, so that it meets every phase of heartbeats and batches.
const FAULT_PHASE: Duration = Duration::from_millis(200);

/// Which acknowledged objects must be readable at the end of a round.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Judged {
    /// Every one: the pool has room for all.
    All,
    /// Those within this many last acknowledged bytes: the pool overflows, eviction takes older ones by right.
    LastBytes(u64),
}

/// What one round did and found.
#[derive(Clone, Debug)]
pub struct Round {
    /// As the clients felt it.
    pub outage: Outage,
    /// Name of what was struck.
    pub struck: String,
    /// Name of the leader afterwards.
    pub successor: String,
    /// What the outage consisted of.
    pub breakdown: Breakdown,
    /// Calls around the fault, for a plot.
    pub points: Vec<Point>,
    /// Acknowledged puts that nothing had saved when everything was lost: gone by right.
    pub unsaved: u64,
    /// Acknowledged puts with fewer copies than they asked for, where each was to have several: not judged.
    pub thin: u64,
    /// Whether keys could go by right, so that a reader may have missed one.
    pub may_miss: bool,
    /// Share of the pool in use right before the fault, in per cent.
    pub fill_percent: f64,
    /// Acknowledged puts of the round.
    pub acknowledged: u64,
    /// Acknowledged puts that must be readable, read back.
    pub audit: Audit,
    /// Acknowledged puts gone by right (evicted while the pool overflowed).
    pub evicted: u64,
    /// Older objects that came back with other bytes.
    pub wrong_old: u64,
    /// What the calls of those who contended for a few keys came to; none where nobody did.
    pub contest: Option<contest::Verdict>,
    /// Masters had one digest at one applied index.
    pub state_hash_equal: bool,
    /// That index.
    pub applied_index: u64,
    /// Keys this round may have written.
    pub keys: Vec<String>,
}

impl Round {
    /// Acknowledged puts lost.
    pub fn rpo_lost(&self) -> u64 {
        self.audit.lost() + self.wrong_old
    }

    /// Whether everything held: nothing lost, no wrong or stale answer on the way, answers that fit together, service back, states equal.
    pub fn held(&self) -> bool {
        self.rpo_lost() == 0
            && self.outage.corrupt == 0
            && (self.outage.missed == 0 || self.may_miss)
            && self.outage.rto_write_ms.is_some()
            && self.outage.rto_read_ms.is_some()
            && self.state_hash_equal
            && self.contest.as_ref().is_none_or(contest::Verdict::is_linearizable)
    }
}

/// Share of the pool's memory that is in use, in per cent.
pub fn fill_percent(status: &StatusResponse) -> f64 {
    let capacity: u64 = status.segments.iter().map(|s| s.capacity_bytes).sum();
    let free: u64 = status.segments.iter().map(|s| s.free_bytes).sum();
    if capacity == 0 { 0.0 } else { (capacity - free) as f64 * 100.0 / capacity as f64 }
}

/// A client of a running pool; masters comma-separated.
pub async fn connect(masters: &str, tenant: &str) -> Result<Client> {
    let mut options = ClientOptions::new(ClientOptions::parse_masters(masters)?);
    tenant.clone_into(&mut options.tenant);
    options.connect_deadline = Duration::from_secs(20);
    options.deadline = Duration::from_secs(20);
    Client::connect(options).await.context("connecting to the pool")
}

/// What was struck, and when.
#[derive(Clone, Debug)]
pub struct Struck {
    /// Its place among the masters, if it is one of them.
    pub at: Option<usize>,
    /// Its name.
    pub name: String,
    /// When.
    pub fault: Fault,
    /// Everything was lost but what had been acknowledged until then (CLOCK_MONOTONIC).
    pub saved_until_ns: Option<u64>,
}

/// What a round strikes: a pool of processes of its own, or a quorum that serves others.
pub trait Quorum {
    /// Addresses of its masters, in their order.
    fn masters(&self) -> Vec<String>;
    /// The leader's view of the pool.
    fn leader_status(&mut self) -> impl Future<Output = Result<StatusResponse>>;
    /// Strikes after `phase`, and returns once it is certain that it hit.
    fn strike(&mut self, phase: Duration) -> impl Future<Output = Result<Struck>>;
    /// Name of whoever leads, once somebody does.
    fn leader_name(&mut self) -> impl Future<Output = Result<String>>;
    /// Mends what was struck, and returns once it holds everything.
    fn bring_back(&mut self, struck: &Struck) -> impl Future<Output = Result<()>>;
    /// Returns once every master and datanode serves.
    fn settle(&mut self) -> impl Future<Output = Result<()>>;
    /// The masters' digests at one index.
    fn compare_digests(&mut self) -> impl Future<Output = Result<DigestComparison>>;
}

/// Those who contend for a few keys, beside this load.
fn beside(load: &FleetOptions, processes: u32) -> ContestOptions {
    ContestOptions {
        binary: load.binary.clone(),
        directory: load.directory.clone(),
        masters: load.masters.clone(),
        tenant: load.tenant.clone(),
        prefix: format!("{}/contest", load.prefix),
        processes,
        replica_num: load.replica_num,
        pinned: false,
        seed: load.seed,
    }
}

/// Strikes under load, waits for recovery, has what was struck back under load, waits until it has caught up, stops the load
/// and judges.
pub async fn fault_round(
    quorum: &mut impl Quorum,
    client: &Client,
    load: &FleetOptions,
    contenders: u32,
    judged: Judged,
) -> Result<Round> {
    let mut fleet = Fleet::start(load)?;
    let mut contest = match contenders {
        0 => None,
        processes => Some(Contest::start(&beside(load, processes))?),
    };
    let a_while = |clients: u32, share: f64| (f64::from(clients) * load.rate_per_s * share).ceil() as u64;
    // An eighth of the readers' calls are exists or find no key yet; a third of a second of gets is warm.
    let warm = fleet.progress(0).wait_for(a_while(load.writers, 0.8), a_while(load.readers, 0.3), WARM_WITHIN).await;
    if let Err(error) = warm {
        fleet.expect_running()?;
        return Err(error.context("the load did not get going"));
    }

    let status = quorum.leader_status().await?;
    let phase = rand::rng().random_range(Duration::ZERO..FAULT_PHASE);
    let watch = Watch::start(quorum.masters());
    let struck = quorum.strike(phase).await?;

    let mut after = fleet.progress(struck.fault.certain_ns);
    let recovered = after.wait_for(a_while(load.writers, 0.5), a_while(load.readers, 0.3), RECOVER_WITHIN).await;
    if let Err(error) = recovered {
        // Not recovered is a result: it is judged below, from the logs.
        tracing::error!("after {} was struck: {error:#}", struck.name);
    }
    let sightings = watch.end().await;
    let successor = quorum.leader_name().await?;
    quorum.bring_back(&struck).await?;
    let rejoined_ns = crate::clock::monotonic_ns();
    fleet
        .progress(rejoined_ns)
        .wait_for(a_while(load.writers, 0.2), a_while(load.readers, 0.1), RECOVER_WITHIN)
        .await?;
    fleet.expect_running()?;
    contest.as_mut().map_or(Ok(()), Contest::expect_running)?;
    let logs = fleet.stop().await?;
    let contested = match contest {
        Some(contest) => contest.end(client).await?,
        None => Vec::new(),
    };

    let outage = outage::measure(&logs, struck.fault);
    quorum.settle().await?;
    let digests = quorum.compare_digests().await?;

    let mut puts = acknowledged_puts(&logs);
    let all = puts.len() as u64;
    // Where a datanode dies, a put that was acknowledged with fewer copies than it asked for goes with the one that has it.
    puts.retain(|put| load.replica_num == 1 || put.copies >= load.replica_num);
    let whole = puts.len() as u64;
    if let Some(until_ns) = struck.saved_until_ns {
        puts.retain(|put| put.done_ns <= until_ns);
    }
    let (old, recent) = match judged {
        Judged::All => puts.split_at(0),
        Judged::LastBytes(bytes) => audit::split_recent(&puts, bytes),
    };
    let expected = |part: &[&CallRecord]| part.iter().map(|r| Expected::from(*r)).collect::<Vec<_>>();
    let audit = audit::read_back(client, &expected(recent)).await?;
    let old = audit::read_back(client, &expected(old)).await?;
    let written = logs.iter().flatten().filter(|r| r.call.is_put() && r.outcome != CallOutcome::Fail);
    let mut keys: Vec<String> = written.map(|r| r.key.clone()).collect();
    keys.extend(keys_of(&contested));
    // Where a datanode dies, what is there may be missed until it is known.
    let hidden = if load.replica_num > 1 { vec![(struck.fault.at_ns, u64::MAX)] } else { Vec::new() };
    let terms = Terms { evicts: judged != Judged::All, copies: load.replica_num, hidden };
    Ok(Round {
        breakdown: Breakdown::of(&sightings, struck.fault, struck.at, outage.written_ns, outage.all_back_ns),
        points: plot::points(&logs, struck.fault),
        struck: struck.name,
        successor,
        fill_percent: fill_percent(&status),
        acknowledged: all,
        unsaved: whole - puts.len() as u64,
        thin: all - whole,
        may_miss: struck.saved_until_ns.is_some(),
        evicted: old.absent.len() as u64,
        wrong_old: old.wrong.len() as u64,
        audit,
        contest: (contenders > 0).then(|| contest::judge(&contested, &terms)),
        state_hash_equal: digests.is_equal(),
        applied_index: digests.applied_index,
        keys,
        outage,
    })
}
