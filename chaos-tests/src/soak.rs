//! Everything mixed, for as long as one likes: faults drawn from a seed strike a pool under load, each is mended, and at the end the
//! masters have one state, nothing acknowledged is lost and what the processes use has not grown.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use serde::Serialize;

use crate::admin;
use crate::lab::Lab;
use crate::nemesis::disk::{PowerCut, SlowSync, TornWrite};
use crate::nemesis::host::{Starve, WallClockJump};
use crate::nemesis::network::{LinkDown, Loss, Partition};
use crate::nemesis::process::{Flap, Kill, Pause};
use crate::nemesis::{Nemesis, Who};
use crate::process::process_usage;
use crate::trial::{Findings, Trial, WITHIN};

/// The disk of each master: what its log and snapshots may take.
const DISK_BYTES: u64 = 512 << 20;
/// How long a fault stays.
const FAULT_FOR: std::ops::Range<u64> = 300..2_500;
/// Growth of a process's memory, beside a tenth, that is no leak.
const MEMORY_SLACK_BYTES: u64 = 96 << 20;
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
    // Two copies of every object: datanodes die too. Snapshots are small and frequent, so that what they leave is seen.
    let mut trial = Trial::with_copies(binary, Some(lab), 2, |pool| {
        pool.disk_bytes = Some(DISK_BYTES);
        pool.built_in_faults = true;
        pool.datanodes = 3;
        let flags = [("--snapshot-log-bytes", "4MiB"), ("--checkpoint-interval", "500ms")];
        pool.master_arguments = flags.iter().flat_map(|(flag, value)| [flag.to_string(), value.to_string()]).collect();
    })
    .await?;
    let until = Instant::now() + Duration::from_secs(options.seconds);
    let mut rounds = 0u32;
    let mut before: Option<Vec<Sample>> = None;
    while Instant::now() < until || rounds < 3 {
        let mut nemesis = draw(&mut trial, &mut random).await?;
        trial.inject(nemesis.as_mut())?;
        // The time that a fault lasts is part of what is drawn.
        tokio::time::sleep(Duration::from_millis(random.random_range(FAULT_FOR))).await;
        // Not every fault meets something in so short a time; that is for the tests of each.
        if let Ok(shown) = nemesis.evidence(&mut trial.cluster) {
            eprintln!("soak: round {rounds}: {}: {shown}", nemesis.describe());
        }
        nemesis.heal(&mut trial.cluster)?;
        restart_the_dead(&mut trial)?;
        trial.whole().await?;
        copies_are_back(&mut trial).await?;
        trial.goes_on().await?;
        rounds += 1;
        // What is allocated once is allocated by then.
        if rounds == 3 {
            before = Some(samples(&mut trial)?);
        }
    }
    let leader = trial.cluster.leader(WITHIN).await?;
    admin::compact(trial.cluster.masters[leader].rpc).await?;
    let after = samples(&mut trial)?;
    let faults = rounds;
    eprintln!("soak: {faults} faults; {}", serde_json::to_string(&after)?);
    for (before, after) in before.unwrap_or_default().iter().zip(&after) {
        let memory_max = before.resident_bytes + before.resident_bytes / 10 + MEMORY_SLACK_BYTES;
        ensure!(
            after.resident_bytes <= memory_max && after.descriptors <= before.descriptors + DESCRIPTORS_SLACK,
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
    Ok(match random.random_range(0..12) {
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
        _ => Box::new(Flap { who: datanode, deaths: 0 }),
    })
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

/// Waits until nothing is being copied: the next fault may take a datanode.
async fn copies_are_back(trial: &mut Trial) -> Result<()> {
    let give_up = Instant::now() + WITHIN;
    let mut last = (0, 0);
    let mut same = 0;
    // Copies are ordered in rounds; three looks without a change are taken as the end.
    while same < 3 {
        let status = trial.status().await?;
        let stored: u64 = status.segments.iter().map(|segment| segment.complete_bytes).sum();
        let even = stored / status.object_bytes.max(1);
        same = if even >= 2 || (stored, status.object_bytes) == last { same + 1 } else { 0 };
        last = (stored, status.object_bytes);
        ensure!(Instant::now() < give_up, "copies are not made again: {stored} bytes of {}", status.object_bytes);
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    Ok(())
}

fn samples(trial: &mut Trial) -> Result<Vec<Sample>> {
    let mut all = Vec::new();
    for role in trial.cluster.masters.iter_mut().chain(&mut trial.cluster.datanodes) {
        let id = role.id().unwrap_or_default();
        let descriptors = std::fs::read_dir(format!("/proc/{id}/fd")).map_or(0, |entries| entries.count() as u64);
        let resident_bytes = process_usage(id)?.resident_bytes;
        all.push(Sample { role: role.name().to_owned(), resident_bytes, descriptors });
    }
    Ok(all)
}
