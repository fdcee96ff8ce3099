//! `tidepool drill kill-leader --spawn`: kills the leader again and again under load and reports what clients felt.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Result, bail};
use serde_json::json;
use tidepool_client::{Client, PutOptions};

use crate::audit::{self, Audit, Expected};
use crate::clock::load1;
use crate::cluster::{Cluster, ClusterOptions};
use crate::content::{content_hash, value_of};
use crate::failover::{self, Judged, Round, kill_leader_round};
use crate::fleet::FleetOptions;
use crate::outage::Spread;
use crate::output::{Format, Verdict, WorkDir};

/// Size of the objects that fill the pool before the first round.
const FILL_OBJECT_BYTES: u64 = 1 << 20;
/// How many of them one put call carries.
const FILL_BATCH: usize = 16;
/// Deadline of one such call.
const FILL_WITHIN: Duration = Duration::from_secs(20);

/// How full the pool is when the leader dies.
#[derive(Clone, Copy, PartialEq, Eq, Debug, clap::ValueEnum)]
pub enum Fill {
    /// Half full: nothing has to be evicted, every acknowledged object must be there.
    Half,
    /// 95 % full and steadily overwritten: eviction works all the time.
    #[value(name = "95")]
    Overflow,
}

/// Options of `tidepool drill kill-leader`.
#[derive(Clone, Debug, clap::Args)]
pub struct KillLeaderOptions {
    /// Start a pool of separate processes on this host for the drill
    #[arg(long)]
    pub spawn: bool,
    /// How often the leader is killed
    #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..))]
    pub rounds: u32,
    /// How full the pool is
    #[arg(long, value_enum, default_value_t = Fill::Half)]
    pub fill: Fill,
    /// Election profile of the masters
    #[arg(long, default_value = "lan")]
    pub election: String,
    /// Writer processes
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..))]
    pub writers: u32,
    /// Reader processes
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..))]
    pub readers: u32,
    /// Calls a second of each process, on a fixed schedule
    #[arg(long, default_value_t = 100.0)]
    pub rate: f64,
    /// Middle value size in bytes; a quarter and four times that are as frequent
    #[arg(long)]
    pub value_bytes: Option<u64>,
    /// DRAM of each of the two datanodes, in bytes
    #[arg(long, default_value_t = 256 << 20)]
    pub segment_bytes: u64,
    /// Data directories, logs and call logs go here and stay; without it a temporary directory is used
    #[arg(long)]
    pub work_dir: Option<PathBuf>,
}

/// Runs the drill. One line a round, then the summary.
pub async fn kill_leader(options: &KillLeaderOptions, binary: &Path, format: Format) -> Result<Verdict> {
    if !options.spawn {
        bail!("a drill on a pool that serves others is not in this version; add --spawn to drill a pool of its own");
    }
    let work_dir = WorkDir::open(options.work_dir.as_deref(), "drill")?;
    let mut cluster_options = ClusterOptions::new(binary, &work_dir.path().join("pool"));
    cluster_options.segment_bytes = options.segment_bytes;
    cluster_options.election.clone_from(&options.election);
    let mut cluster = Cluster::start(cluster_options).await?;
    let client = failover::connect(&cluster).await?;

    let share = match options.fill {
        Fill::Half => 0.5,
        Fill::Overflow => 0.97,
    };
    let filler = fill(&client, (cluster.capacity_bytes() as f64 * share) as u64).await?;
    let judged = match options.fill {
        Fill::Half => Judged::All,
        Fill::Overflow => Judged::LastBytes(cluster.capacity_bytes() / 4),
    };
    let middle = options.value_bytes.unwrap_or(match options.fill {
        Fill::Half => 4 << 10,
        Fill::Overflow => 16 << 10,
    });

    let mut rounds = Vec::new();
    let mut filler_lost = 0;
    for number in 1..=options.rounds {
        let load = FleetOptions {
            binary: binary.to_owned(),
            directory: work_dir.path().join(format!("round-{number}")),
            masters: cluster.masters_text(),
            writers: options.writers,
            readers: options.readers,
            rate_per_s: options.rate,
            value_bytes: vec![middle / 4, middle, middle * 4],
            prefix: format!("drill/{number}"),
            seed: u64::from(number),
            deadline: Duration::from_secs(5),
            replica_num: 1,
            recent_bytes: cluster.capacity_bytes() / 8,
        };
        let round = kill_leader_round(&mut cluster, &client, &load, judged).await?;
        if options.fill == Fill::Half {
            let audit = audit::read_back(&client, &filler).await?;
            report_losses("objects that filled the pool", &audit);
            filler_lost += audit.lost();
            let keys: Vec<&str> = round.keys.iter().map(String::as_str).collect();
            audit::remove_all(&client, &keys).await?;
        }
        report_losses("acknowledged puts of this round", &round.audit);
        print_round(number, &round, format);
        rounds.push(round);
        if options.work_dir.is_none() {
            std::fs::remove_dir_all(&load.directory)?;
        }
    }
    Ok(summarise(options, &rounds, filler_lost, format))
}

/// Puts objects of 1 MiB until `bytes` are stored.
async fn fill(client: &Client, bytes: u64) -> Result<Vec<Expected>> {
    let mut stored = Vec::new();
    let count = (bytes / FILL_OBJECT_BYTES) as usize;
    for from in (0..count).step_by(FILL_BATCH) {
        let keys: Vec<String> = (from..count.min(from + FILL_BATCH)).map(|at| format!("fill/{at}")).collect();
        let mut items = Vec::new();
        for key in &keys {
            let value = value_of(key, 0, FILL_OBJECT_BYTES as usize);
            stored.push(Expected { key: key.clone(), hash: content_hash(&value), bytes: FILL_OBJECT_BYTES });
            items.push(tidepool_client::PutItem::new(key.clone(), value));
        }
        let put = PutOptions { deadline: Some(FILL_WITHIN), ..PutOptions::default() };
        for result in client.put_many(items, put).await {
            result?;
        }
    }
    Ok(stored)
}

fn report_losses(what: &str, audit: &Audit) {
    for (how, keys) in [("absent", &audit.absent), ("with other bytes", &audit.wrong)] {
        if !keys.is_empty() {
            eprintln!("LOST: {} {what} are {how}: {:?}", keys.len(), &keys[..keys.len().min(5)]);
        }
    }
}

fn print_round(number: u32, round: &Round, format: Format) {
    let outage = &round.outage;
    let shown = |ms: Option<f64>| ms.map_or("never".to_owned(), |ms| format!("{ms:.1}"));
    match format {
        Format::Json => println!(
            "{}",
            json!({
                "round": number, "killed": round.killed, "successor": round.successor,
                "fill_percent": (round.fill_percent * 10.0).round() / 10.0,
                "rto_write_ms": outage.rto_write_ms, "rto_read_ms": outage.rto_read_ms,
                "worst_client_gap_ms": outage.worst_client_gap_ms, "longest_call_ms": outage.longest_call_ms,
                "calls": outage.calls, "puts_ok": outage.puts_ok, "gets_ok": outage.gets_ok, "failed": outage.failed,
                "missed": outage.missed, "corrupt": outage.corrupt,
                "acknowledged": round.acknowledged, "audited": round.audit.checked, "rpo_lost": round.rpo_lost(),
                "evicted": round.evicted, "state_hash_equal": round.state_hash_equal,
                "applied_index": round.applied_index, "load1": load1(),
            })
        ),
        Format::Table => {
            if number == 1 {
                println!(
                    "round  killed    fill %  rto write ms  rto read ms  worst gap ms  longest call ms  acked  lost  hashes"
                );
            }
            println!(
                "{number:>5}  {:<8}  {:>6.1}  {:>12}  {:>11}  {:>12.1}  {:>15.1}  {:>5}  {:>4}  {}",
                round.killed,
                round.fill_percent,
                shown(outage.rto_write_ms),
                shown(outage.rto_read_ms),
                outage.worst_client_gap_ms,
                outage.longest_call_ms,
                round.acknowledged,
                round.rpo_lost(),
                if round.state_hash_equal { "equal" } else { "DIFFER" },
            );
        }
    }
}

fn summarise(options: &KillLeaderOptions, rounds: &[Round], filler_lost: u64, format: Format) -> Verdict {
    let spread = |pick: fn(&Round) -> Option<f64>| Spread::of(&rounds.iter().filter_map(pick).collect::<Vec<f64>>());
    let most = |pick: fn(&Round) -> f64| rounds.iter().map(pick).fold(0.0, f64::max);
    let write = spread(|r| r.outage.rto_write_ms);
    let read = spread(|r| r.outage.rto_read_ms);
    let lost = rounds.iter().map(Round::rpo_lost).sum::<u64>() + filler_lost;
    let gap = most(|r| r.outage.worst_client_gap_ms);
    let longest = most(|r| r.outage.longest_call_ms);
    let equal = rounds.iter().all(|r| r.state_hash_equal);
    let held = lost == 0 && rounds.iter().all(Round::held);
    match format {
        Format::Json => println!(
            "{}",
            json!({
                "rounds": rounds.len(), "rpo_lost": lost, "rto_write_ms": write, "rto_read_ms": read,
                "worst_client_gap_ms": gap, "longest_call_ms": longest, "state_hash_equal": equal,
                "fill": if options.fill == Fill::Half { "half" } else { "95" }, "election": options.election,
                "acknowledged": rounds.iter().map(|r| r.acknowledged).sum::<u64>(),
                "missed": rounds.iter().map(|r| r.outage.missed).sum::<u64>(),
                "corrupt": rounds.iter().map(|r| r.outage.corrupt).sum::<u64>(),
                "failed_calls": rounds.iter().map(|r| r.outage.failed).sum::<u64>(),
                "held": held, "load1": load1(),
            })
        ),
        Format::Table => {
            let row = |name: &str, s: Spread| {
                println!("{name:<14} min {:.1}  p50 {:.1}  p99 {:.1}  max {:.1} ms", s.min, s.p50, s.p99, s.max);
            };
            println!();
            row("rto write", write);
            row("rto read", read);
            println!("worst gap of one client {gap:.1} ms, longest call {longest:.1} ms");
            println!(
                "{lost} acknowledged puts lost, states {}, everything held: {}",
                if equal { "equal" } else { "DIFFER" },
                if held { "yes" } else { "NO" }
            );
        }
    }
    Verdict::of(held)
}
