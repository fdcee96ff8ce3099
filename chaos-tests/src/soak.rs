//! Everything mixed, for as long as one likes: faults drawn from a seed strike a pool under load, each is mended, and at the end the
//! masters have one state, nothing acknowledged is lost and what the processes use has not grown.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use serde::Serialize;

use crate::admin;
use crate::failover::Judged;
use crate::lab::{Direction, Lab};
use crate::nemesis::disk::{Full, PowerCut, ReadOnly, SlowSync, SyncError, TornWrite};
use crate::nemesis::host::{Starve, WallClockJump};
use crate::nemesis::network::{LinkDown, Loss, Partition, Throttle};
use crate::nemesis::process::{Flap, Kill, Pause};
use crate::nemesis::{Nemesis, Who};
use crate::process::process_usage;
use crate::trial::{Findings, Trial, WITHIN};

/// The disk of each master: what its log and snapshots may take.
const DISK_BYTES: u64 = 512 << 20;
/// Copies of every object: datanodes die too.
const COPIES: u32 = 2;
/// Fewest faults of a soak, however short.
const ROUNDS_MIN: u32 = 3;
/// How often what ended is started before a fault counts as not survived.
const RESTARTS_MAX: u32 = 3;
/// How long a fault stays.
const FAULT_FOR: std::ops::Range<u64> = 300..2_500;
/// Growth of a process's memory, beside a tenth, that is no leak.
const MEMORY_SLACK_BYTES: u64 = 96 << 20;
/// Growth of what a master keeps on disk that is no leak: two snapshots and the log between them.
const DISK_SLACK_BYTES: u64 = 64 << 20;
/// Growth of a process's descriptors that is no leak: connections come and go.
const DESCRIPTORS_SLACK: u64 = 40;

/// How long, and which faults in which order.
#[derive(Clone, Copy, Debug, clap::Args)]
pub struct SoakOptions {
    /// How long faults are made, in seconds
    #[arg(long, default_value_t = 60)]
    pub seconds: u64,
    /// Draws the faults; printed, so that a run can be had again
    #[arg(long)]
    pub seed: Option<u64>,
}

/// What one process uses.
#[derive(Clone, Debug, Serialize)]
struct Sample {
    role: String,
    resident_bytes: u64,
    descriptors: u64,
    disk_bytes: u64,
}

/// Runs it; fails when something did not hold.
pub fn run(options: SoakOptions, binary: &Path) -> Result<Result<Findings>, crate::lab::Refused> {
    let binary = binary.to_owned();
    Lab::run(async move |lab| soak(options, &binary, lab).await)
}

async fn soak(options: SoakOptions, binary: &Path, lab: Lab) -> Result<Findings> {
    let seed = options.seed.unwrap_or_else(|| rand::rng().random());
    eprintln!("soak: {} s, --seed {seed}", options.seconds);
    let mut random = StdRng::seed_from_u64(seed);
    // Snapshots are small and frequent, so that what they leave is seen.
    let mut trial = Trial::with_copies(binary, Some(lab), COPIES, |pool| {
        pool.disk_bytes = Some(DISK_BYTES);
        pool.built_in_faults = true;
        pool.datanodes = 3;
        let flags = [("--snapshot-log-bytes", "4MiB"), ("--checkpoint-interval", "500ms")];
        pool.master_arguments = flags.iter().flat_map(|(flag, value)| [flag.to_string(), value.to_string()]).collect();
    })
    .await?;
    // A long soak fills the pool: then older objects are evicted by right. Misses: several nodes are struck in a row.
    trial.judge_only(Judged::LastBytes(trial.cluster.capacity_bytes() / 8 / u64::from(COPIES)));
    trial.allow_misses();
    let began = Instant::now();
    let until = Instant::now() + Duration::from_secs(options.seconds);
    let mut rounds = 0u32;
    let mut before: Option<Vec<Sample>> = None;
    while Instant::now() < until || rounds < ROUNDS_MIN {
        something_of_its_own(&mut trial, &mut random).await?;
        let mut nemesis = draw(&mut trial, &mut random).await?;
        trial.inject(nemesis.as_mut())?;
        // The time that a fault lasts is part of what is drawn.
        tokio::time::sleep(Duration::from_millis(random.random_range(FAULT_FOR))).await;
        // Not every fault meets something in so short a time; that is for the tests of each.
        if let Ok(shown) = nemesis.evidence(&mut trial.cluster) {
            eprintln!("soak: round {rounds}: {}: {shown}", nemesis.describe());
        }
        trial.mend(nemesis.as_mut())?;
        whole(&mut trial).await?;
        trial.copies_are_back(COPIES).await?;
        trial.goes_on().await?;
        rounds += 1;
        // What is allocated once is allocated by then.
        if rounds >= ROUNDS_MIN && before.is_none() && began.elapsed().as_secs() >= options.seconds / 2 {
            before = Some(samples(&mut trial)?);
        }
    }
    let leader = trial.cluster.leader(WITHIN).await?;
    admin::compact(trial.cluster.masters[leader].rpc).await?;
    let after = samples(&mut trial)?;
    let (faults, segment_bytes) = (rounds, trial.cluster.options().segment_bytes);
    eprintln!("soak: {faults} faults; {}", serde_json::to_string(&after)?);
    // Taken in the last round at the latest: there is something to compare with.
    let before = before.context("the soak ended before it had anything to compare with")?;
    for (before, after) in before.iter().zip(&after) {
        // A datanode's memory is taken as it is used first.
        let lent = if before.role.starts_with("datanode") { segment_bytes } else { 0 };
        let memory_max = before.resident_bytes + before.resident_bytes / 10 + MEMORY_SLACK_BYTES + lent;
        ensure!(
            after.resident_bytes <= memory_max
                && after.descriptors <= before.descriptors + DESCRIPTORS_SLACK
                && after.disk_bytes <= before.disk_bytes + DISK_SLACK_BYTES,
            "{} grew: {before:?}, then {after:?}",
            before.role
        );
    }
    trial.judge().await
}

async fn draw(trial: &mut Trial, random: &mut StdRng) -> Result<Box<dyn Nemesis>> {
    let (leader, standby) = trial.leader_and_standby().await?;
    let master = if random.random_bool(0.5) { leader } else { standby };
    let datanode = Who::Datanode(random.random_range(0..trial.cluster.datanodes.len()));
    let others = trial.others(master);
    Ok(match random.random_range(0..18) {
        0 => Box::new(Kill(vec![master])),
        1 => Box::new(Kill(vec![datanode])),
        2 => Box::new(Pause(master)),
        3 => Box::new(LinkDown(master)),
        4 => Box::new(Partition::of_one(master, &others)),
        5 => Box::new(Loss { who: master, of_thousand: random.random_range(10..150) }),
        6 => Box::new(SlowSync { who: master, by: Duration::from_millis(random.random_range(5..100)) }),
        7 => Box::new(TornWrite(master)),
        8 => Box::new(PowerCut((0..3).map(Who::Master).collect())),
        9 => Box::new(Starve::to(master, random.random_range(3..20))),
        10 => Box::new(WallClockJump { who: master, by_ms: random.random_range(-3_600_000..3_600_000) }),
        11 => Box::new(Full::of(master)),
        12 => Box::new(ReadOnly(master)),
        13 => Box::new(SyncError(master)),
        14 => {
            let other = others[random.random_range(0..others.len())];
            let way = if random.random_bool(0.5) { (master, other) } else { (other, master) };
            Box::new(Partition::between("one way", vec![(way.0, way.1, Direction::OneWay)]))
        }
        // The third hears both.
        15 => Box::new(Partition::between("bridge", vec![(leader, standby, Direction::Both)])),
        16 => Box::new(Throttle { who: master, kbit_per_s: random.random_range(2_000..20_000) }),
        _ => Box::new(Flap { who: datanode, deaths: 0 }),
    })
}

/// What operators do meanwhile: leadership is handed over, or a snapshot is being written when the fault strikes.
async fn something_of_its_own(trial: &mut Trial, random: &mut StdRng) -> Result<()> {
    let (leader, standby) = trial.leader_and_standby().await?;
    let (leads, stands_by) = (leader.of(&mut trial.cluster)?.rpc, standby.of(&mut trial.cluster)?.rpc);
    // Either may be refused, or cut short by the fault: that is part of it.
    match random.random_range(0..4) {
        0 => drop(admin::transfer_leader(leads, 0).await),
        1 => drop(tokio::spawn(async move { drop(admin::compact(stands_by).await) })),
        _ => {}
    }
    Ok(())
}

/// Starts what has ended and waits until all is well. What met a fault may end a moment after it was mended.
async fn whole(trial: &mut Trial) -> Result<()> {
    for _ in 0..RESTARTS_MAX {
        restart_the_dead(trial)?;
        if trial.whole().await.is_ok() {
            return Ok(());
        }
    }
    trial.whole().await
}

/// Some faults end a process sooner or later by themselves; a supervisor would start it.
fn restart_the_dead(trial: &mut Trial) -> Result<()> {
    for role in trial.cluster.masters.iter_mut().chain(&mut trial.cluster.datanodes) {
        if !role.is_running()? {
            role.start()?;
        }
    }
    Ok(())
}

fn samples(trial: &mut Trial) -> Result<Vec<Sample>> {
    let mut all = Vec::new();
    for role in trial.cluster.masters.iter_mut().chain(&mut trial.cluster.datanodes) {
        let id = role.id().unwrap_or_default();
        let descriptors = std::fs::read_dir(format!("/proc/{id}/fd")).map_or(0, |entries| entries.count() as u64);
        let resident_bytes = process_usage(id)?.resident_bytes;
        let disk_bytes = size_of_tree(&role.data_dir);
        all.push(Sample { role: role.name().to_owned(), resident_bytes, descriptors, disk_bytes });
    }
    Ok(all)
}

/// Bytes that the files below a directory take. Files come and go meanwhile.
fn size_of_tree(directory: &Path) -> u64 {
    let mut bytes = 0;
    let mut open = vec![directory.to_owned()];
    while let Some(at) = open.pop() {
        for entry in std::fs::read_dir(&at).into_iter().flatten().flatten() {
            match entry.metadata() {
                Ok(meta) if meta.is_dir() => open.push(entry.path()),
                Ok(meta) => bytes += std::os::unix::fs::MetadataExt::blocks(&meta) * 512,
                Err(_) => {}
            }
        }
    }
    bytes
}
