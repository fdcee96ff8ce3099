//! A pool under load that a test breaks and judges: the load runs from beginning to end, every fault proves that it happened, and
//! at the end every acknowledged put is read back, the answers of those who contended for a few keys fit together (linearizability), all
//! masters have one state and all space adds up.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use tempfile::TempDir;
use tidepool_client::{Client, PutItem, PutOptions};
use tidepool_proto::v1::StatusResponse;

use crate::audit::{self, Expected};
use crate::clock::monotonic_ns;
use crate::cluster::{Cluster, ClusterOptions, Ground, POLL_EVERY};
use crate::content::value_of;
use crate::contest::{self, Contest, ContestOptions, Terms};
use crate::failover::{self, Judged, RECOVER_WITHIN};
pub use crate::findings::Findings;
use crate::fleet::{Fleet, FleetOptions, acknowledged_puts};
use crate::lab::Lab;
use crate::matrix::never;
use crate::nemesis::{Nemesis, Who};
use crate::outage;
use crate::process::Fault;

/// Longest wait for anything on a slow, shared machine.
pub const WITHIN: Duration = Duration::from_secs(60);
/// Calls that must succeed for the load to count as going on.
const GOES_ON_CALLS: u64 = 10;
/// Deadline of a call of the load: longer than any outage that is to be survived.
const CALL_WITHIN: Duration = Duration::from_secs(10);
/// Processes that contend for a few keys.
const CONTENDERS: u32 = 3;
/// Calls on contended keys that must end after everything was mended.
const CONTESTED_AFTER: usize = 40;
/// How long a client may take to find a datanode again after it is back; its probes are two seconds apart at most.
const FOUND_AGAIN_WITHIN: Duration = Duration::from_secs(5);

/// The pool of a trial whose load has ended.
pub struct Ended {
    _cluster: Cluster,
    _directory: TempDir,
}

/// No call takes longer than its deadline: so many times that, counted from when the schedule wanted it sent, is the host's doing.
const DEADLINES_MAX: u32 = 2;

/// A pool under load.
pub struct Trial {
    /// The pool.
    pub cluster: Cluster,
    /// A client of it.
    pub client: Client,
    fleet: Fleet,
    contest: Contest,
    /// Since when a datanode is struck, and until when clients may not have found it again.
    hidden: Vec<(u64, u64)>,
    is_hiding: bool,
    faults: Vec<Fault>,
    evidence: Vec<String>,
    directory: TempDir,
    copies: u32,
    judged: Judged,
    may_miss: bool,
}

impl Trial {
    /// A pool of 3 masters and 2 datanodes, changed as the test needs it, under 2 writers and 2 readers.
    pub async fn start(binary: &Path, lab: Option<Lab>, change: impl FnOnce(&mut ClusterOptions)) -> Result<Trial> {
        Trial::with_copies(binary, lab, 1, change).await
    }

    /// The same, every object having so many copies.
    pub async fn with_copies(
        binary: &Path,
        lab: Option<Lab>,
        replica_num: u32,
        change: impl FnOnce(&mut ClusterOptions),
    ) -> Result<Trial> {
        let directory = tempfile::tempdir().context("temporary directory")?;
        let mut options = ClusterOptions::new(binary, &directory.path().join("pool"));
        options.ground = lab.map_or(Ground::Loopback, Ground::Lab);
        change(&mut options);
        let cluster = Cluster::start(options).await?;
        let client = failover::connect(&cluster.masters_text(), "").await?;
        let fleet = Fleet::start(&FleetOptions {
            binary: binary.to_owned(),
            directory: directory.path().join("load"),
            masters: cluster.masters_text(),
            tenant: String::new(),
            writers: 2,
            readers: 2,
            rate_per_s: 50.0,
            value_bytes: vec![1_000, 20_000],
            prefix: "load".into(),
            seed: 11,
            deadline: CALL_WITHIN,
            replica_num,
            recent_bytes: 8 << 20,
            bulk: None,
        })?;
        let contest = Contest::start(&ContestOptions {
            binary: binary.to_owned(),
            directory: directory.path().join("contest"),
            masters: cluster.masters_text(),
            tenant: String::new(),
            prefix: "contest".into(),
            processes: CONTENDERS,
            replica_num,
            pinned: true,
            seed: 11,
        })?;
        let trial = Trial {
            cluster,
            client,
            fleet,
            contest,
            hidden: Vec::new(),
            is_hiding: false,
            faults: Vec::new(),
            evidence: Vec::new(),
            directory,
            copies: replica_num,
            judged: Judged::All,
            may_miss: false,
        };
        trial.goes_on().await?;
        Ok(trial)
    }

    /// Where its files are.
    pub fn directory(&self) -> PathBuf {
        self.directory.path().to_owned()
    }

    /// Which acknowledged puts must be there in the end, if not all.
    pub fn judge_only(&mut self, judged: Judged) {
        self.judged = judged;
    }

    /// A reader may be told of a key that it is not there while it can be had from nobody: both nodes that have it were struck
    /// so shortly after each other that a client suspects both.
    pub fn allow_misses(&mut self) {
        self.may_miss = true;
    }

    /// Waits until every object has so many copies: the next fault may take a datanode.
    pub async fn copies_are_back(&self, copies: u32) -> Result<()> {
        let give_up = Instant::now() + WITHIN;
        loop {
            let mut short = 0;
            let mut after = bytes::Bytes::new();
            loop {
                let page = self.client.list(b"", 1000, &after, Some(WITHIN)).await?;
                short += page.objects.iter().filter(|object| object.replicas < copies).count();
                if !page.more {
                    break;
                }
                after = page.next;
            }
            if short == 0 {
                return Ok(());
            }
            ensure!(Instant::now() < give_up, "{short} objects have less than {copies} copies after {WITHIN:?}");
            tokio::time::sleep(POLL_EVERY * 10).await;
        }
    }

    /// The leader, and another master.
    pub async fn leader_and_standby(&mut self) -> Result<(Who, Who)> {
        let leader = self.cluster.leader(WITHIN).await?;
        let standby = (leader + 1) % self.cluster.masters.len();
        Ok((Who::Master(leader), Who::Master(standby)))
    }

    /// The masters that are not this one.
    pub fn others(&self, one: Who) -> Vec<Who> {
        (0..self.cluster.masters.len()).map(Who::Master).filter(|&who| who != one).collect()
    }

    /// Breaks something.
    pub fn inject(&mut self, nemesis: &mut dyn Nemesis) -> Result<Fault> {
        let fault = nemesis.inject(&mut self.cluster).with_context(|| nemesis.describe())?;
        println!("{}", nemesis.describe());
        self.faults.push(fault);
        if nemesis.strikes_a_datanode() {
            self.hidden.push((fault.at_ns, u64::MAX));
            self.is_hiding = true;
        }
        Ok(fault)
    }

    /// Has it proved that it happened, and mends it.
    pub fn heal(&mut self, nemesis: &mut dyn Nemesis) -> Result<()> {
        let shown = nemesis.evidence(&mut self.cluster).with_context(|| format!("{}: no proof", nemesis.describe()))?;
        println!("  proof: {shown}");
        self.evidence.push(shown);
        self.mend(nemesis)
    }

    /// Mends it, whether it met anything or not.
    pub fn mend(&mut self, nemesis: &mut dyn Nemesis) -> Result<()> {
        self.is_hiding &= !nemesis.strikes_a_datanode();
        nemesis.heal(&mut self.cluster).with_context(|| format!("mending: {}", nemesis.describe()))
    }

    /// Waits for calls of the load that were sent from now on.
    pub async fn goes_on(&self) -> Result<()> {
        self.fleet.progress(monotonic_ns()).wait_for(GOES_ON_CALLS, GOES_ON_CALLS, WITHIN).await
    }

    /// The load goes on for so long, without a pause longer than what `goes_on` allows.
    pub async fn goes_on_for(&self, time: Duration) -> Result<()> {
        let until = Instant::now() + time;
        while Instant::now() < until {
            self.goes_on().await?;
        }
        Ok(())
    }

    /// The leader's view.
    pub async fn status(&mut self) -> Result<StatusResponse> {
        self.cluster.leader_status(WITHIN).await
    }

    /// Waits for a leader that is not this one.
    pub async fn another_leads(&mut self, than: Who) -> Result<Who> {
        let give_up = Instant::now() + WITHIN;
        loop {
            let now = Who::Master(self.cluster.leader(WITHIN).await?);
            if now != than {
                return Ok(now);
            }
            ensure!(Instant::now() < give_up, "{} still leads", than.name());
            tokio::time::sleep(POLL_EVERY).await;
        }
    }

    /// Waits until a role has ended by itself; answers the end of its log.
    pub async fn ends_by_itself(&mut self, who: Who) -> Result<String> {
        let process = who.of(&mut self.cluster)?.process()?;
        let status = process.wait(WITHIN).await?;
        ensure!(!status.success(), "{} ended as if all were well", who.name());
        Ok(process.log_tail())
    }

    /// Puts some keys with the trial's own client; every one must be acknowledged.
    pub async fn put_all(&self, keys: &[String], bytes: usize) -> Result<()> {
        for batch in keys.chunks(64) {
            let items = batch.iter().map(|key| PutItem::new(key.clone(), value_of(key, 0, bytes))).collect();
            let put = PutOptions { deadline: Some(WITHIN), ..PutOptions::default() };
            for (key, result) in batch.iter().zip(self.client.put_many(items, put).await) {
                result.with_context(|| format!("put of {key}"))?;
            }
        }
        Ok(())
    }

    /// Waits until every master has applied everything and every datanode serves.
    pub async fn whole(&mut self) -> Result<()> {
        self.cluster.wait_serving(WITHIN).await?;
        for at in 0..self.cluster.masters.len() {
            self.cluster.wait_caught_up(at, WITHIN).await?;
        }
        if !self.is_hiding {
            let found_again_ns = monotonic_ns() + FOUND_AGAIN_WITHIN.as_nanos() as u64;
            self.hidden.iter_mut().for_each(|(_, until)| *until = found_again_ns.min(*until));
        }
        Ok(())
    }

    /// Ends the load and judges: nothing acknowledged is lost, no reader saw other bytes or missed an acknowledged key, the answers to
    /// those who contend for keys fit together, all masters have one state, all space adds up.
    pub async fn judge(self) -> Result<Findings> {
        Ok(self.judge_and_keep().await?.0)
    }

    /// The same; the pool lives on as long as what is answered.
    pub async fn judge_and_keep(mut self) -> Result<(Findings, Ended)> {
        self.goes_on().await.context("the load does not go on after everything was mended")?;
        self.fleet.expect_running()?;
        self.contest.expect_running()?;
        self.whole().await?;
        self.contest.wait_for(CONTESTED_AFTER, WITHIN).await?;
        let logs = self.fleet.stop().await?;
        let records = self.contest.end(&self.client).await?;
        let last = self.faults.last().copied().unwrap_or(Fault { at_ns: 0, certain_ns: 0 });
        let mut outage = outage::measure(&logs, last);
        if self.faults.is_empty() {
            (outage.rto_write_ms, outage.rto_read_ms) = (None, None);
        }
        let digests = self.cluster.compare_digests(WITHIN).await?;
        if !digests.is_equal() {
            return Err(never(format!("the masters' states differ: {digests:?}")));
        }
        for segment in self.cluster.leader_status(WITHIN).await?.segments {
            let sum = segment.free_bytes + segment.processing_bytes + segment.complete_bytes + segment.retired_bytes;
            ensure!(sum == segment.capacity_bytes, "segment {} does not add up: {segment:?}", segment.name);
        }
        let mut puts = acknowledged_puts(&logs);
        // Where a datanode may die, a put that was acknowledged with fewer copies than it asked for goes with the one that has it.
        puts.retain(|put| self.copies == 1 || put.copies >= self.copies);
        let recent = match self.judged {
            Judged::All => &puts[..],
            Judged::LastBytes(bytes) => audit::split_recent(&puts, bytes).1,
        };
        let expected: Vec<Expected> = recent.iter().map(|put| Expected::from(*put)).collect();
        let audit = audit::read_back(&self.client, &expected).await?;
        // What is contended for is pinned, so that nothing goes without a call even where older objects are evicted.
        let terms = Terms { evicts: false, copies: self.copies, hidden: self.hidden };
        let contest = contest::judge(&records, &terms);
        let first = self.faults.first().copied().unwrap_or(last);
        let findings = Findings {
            acknowledged: puts.len() as u64,
            lost: audit.lost(),
            contested: contest.definite,
            p99_before_ms: outage::p99_ms(&logs, 0, first.at_ns),
            p99_after_ms: outage::p99_ms(&logs, first.certain_ns, u64::MAX),
            outage,
            evidence: self.evidence,
        };
        let outage = &findings.outage;
        println!(
            "{} puts acknowledged, {} lost; {} calls on {} contended keys; writes back after {:?} ms, reads {:?} ms; worst gap {} ms, \
             longest call {} ms, p99 {:?} and since the fault {:?} ms, {} failed",
            findings.acknowledged,
            findings.lost,
            contest.definite,
            contest.keys,
            outage.rto_write_ms,
            outage.rto_read_ms,
            outage.worst_client_gap_ms,
            outage.longest_call_ms,
            findings.p99_before_ms,
            findings.p99_after_ms,
            outage.failed
        );
        if findings.lost > 0 {
            return Err(never(format!("acknowledged puts are lost: {:?} {:?}", audit.absent, audit.wrong)));
        }
        if !contest.violation.is_empty() {
            return Err(never(format!("not linearizable: {}", contest.violation)));
        }
        contest.expect_decided()?;
        let missed = if self.may_miss { 0 } else { outage.missed };
        if outage.corrupt > 0 || missed > 0 {
            return Err(never(format!("{} corrupt, {} missed", outage.corrupt, outage.missed)));
        }
        let longest = CALL_WITHIN * DEADLINES_MAX;
        ensure!(
            outage.longest_call_ms <= longest.as_secs_f64() * 1e3,
            "a call took {} ms, its deadline is {CALL_WITHIN:?}",
            outage.longest_call_ms
        );
        if !self.faults.is_empty() {
            findings.expect_back_within(RECOVER_WITHIN)?;
        }
        Ok((findings, Ended { _cluster: self.cluster, _directory: self.directory }))
    }
}
