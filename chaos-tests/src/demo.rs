//! `tidepool demo`: a whole pool on this machine takes real files, loses its leader under load, and gives every byte back.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use bytes::Bytes;
use futures::StreamExt;
use serde_json::json;
use tidepool_client::{Client, PutItem, PutOptions};

use crate::byte_size::ByteSize;
use crate::clock::load1;
use crate::cluster::{Cluster, ClusterOptions};
use crate::content::content_hash;
use crate::drill::{DrillFault, Spawned};
use crate::failover::{self, Judged, Round, fault_round};
use crate::files::{self, SourceFile};
use crate::fleet::FleetOptions;
use crate::output::{Verdict, WorkDir};
use crate::process::Lifetime;

/// File contents held in memory at a time.
const CHUNK_BYTES: u64 = 256 << 20;
/// Bytes and keys of one put or get call.
const BATCH_BYTES: u64 = 16 << 20;
const BATCH_KEYS: usize = 64;
/// Deadline of one such call.
const CALL_WITHIN: Duration = Duration::from_secs(30);
/// Room in the pool beyond the files: the load's objects, and the reserve that eviction keeps.
const ROOM_BYTES: u64 = 256 << 20;

/// Options of `tidepool demo`.
#[derive(Clone, Debug, clap::Args)]
pub struct DemoOptions {
    /// Least number of files to store
    #[arg(long, default_value_t = 500)]
    pub objects: u64,
    /// Least bytes to store
    #[arg(long, default_value = "1GiB")]
    pub bytes: ByteSize,
    /// Directories to take files from, instead of the source tree, the build and the system's libraries
    #[arg(long, value_delimiter = ',')]
    pub files: Vec<PathBuf>,
    /// Put and get calls in flight
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=64))]
    pub threads: u32,
    /// Election profile of the masters
    #[arg(long, default_value = "lan")]
    pub election: String,
    /// Print one JSON object as the last line
    #[arg(long)]
    pub json: bool,
    /// Leave the pool running at the end
    #[arg(long)]
    pub keep: bool,
    /// Data directories and logs go here; without it a temporary directory is used and removed
    #[arg(long)]
    pub work_dir: Option<PathBuf>,
}

/// A file in the pool.
#[derive(Clone, Debug)]
struct Stored {
    key: String,
    hash: String,
    bytes: u64,
}

/// Runs the demo.
pub async fn run(options: &DemoOptions, binary: &Path) -> Result<Verdict> {
    let roots = if options.files.is_empty() { default_roots(binary) } else { options.files.clone() };
    let found = files::collect(&roots, options.objects, options.bytes.0)?;
    let found_bytes: u64 = found.iter().map(|file| file.bytes).sum();
    say(&format!("{} files with {:.2} GB found", found.len(), found_bytes as f64 / 1e9));

    let work_dir = WorkDir::open(options.work_dir.as_deref(), "demo")?;
    let mut cluster_options = ClusterOptions::new(binary, &work_dir.path().join("pool"));
    cluster_options.election.clone_from(&options.election);
    cluster_options.segment_bytes = ((found_bytes + found_bytes / 10 + ROOM_BYTES) / 2).next_multiple_of(2 << 20);
    if options.keep {
        cluster_options.lifetime = Lifetime::MayOutlive;
    }
    let booted = Instant::now();
    let mut cluster = Cluster::start(cluster_options).await?;
    say(&format!(
        "3 masters and 2 datanodes serve {} of DRAM after {:.1} s",
        ByteSize(cluster.capacity_bytes()),
        booted.elapsed().as_secs_f64()
    ));
    let client = failover::connect(&cluster.masters_text(), "").await?;

    let before = cluster.leader_status(CALL_WITHIN).await?;
    let (stored, put_time) = store(&client, &found, options.threads).await?;
    let bytes: u64 = stored.iter().map(|object| object.bytes).sum();
    let after = cluster.leader_status(CALL_WITHIN).await?;
    let ops = after.ops_applied.saturating_sub(before.ops_applied);
    let entries = after.entries_applied.saturating_sub(before.entries_applied);
    let put_gb_s = gigabytes_a_second(bytes, put_time);
    say(&format!("stored {} objects at {put_gb_s:.2} GB/s", stored.len()));

    let (first_bad, get_time) = read_and_compare(&client, &stored, options.threads).await?;
    let get_gb_s = gigabytes_a_second(bytes, get_time);
    say(&format!("read them back at {get_gb_s:.2} GB/s, {first_bad} differ or are missing"));

    say("killing the leader under load ...");
    let load = FleetOptions {
        binary: binary.to_owned(),
        directory: work_dir.path().join("load"),
        masters: cluster.masters_text(),
        tenant: String::new(),
        writers: 4,
        readers: 4,
        rate_per_s: 100.0,
        value_bytes: vec![1 << 10, 4 << 10, 16 << 10],
        prefix: "demo-load".into(),
        seed: 1,
        deadline: Duration::from_secs(5),
        replica_num: 1,
        recent_bytes: u64::MAX,
        bulk: None,
    };
    let mut leader = Spawned::new(&mut cluster, DrillFault::KillLeader);
    let round = fault_round(&mut leader, &client, &load, 0, Judged::All).await?;
    let (second_bad, _) = read_and_compare(&client, &stored, options.threads).await?;
    let rpo_lost = round.rpo_lost() + second_bad;
    let held = round.held() && first_bad == 0 && second_bad == 0;

    let figures = Figures {
        objects: stored.len() as u64,
        bytes,
        put_gb_s,
        get_gb_s,
        rpo_lost,
        first_bad,
        second_bad,
        ops_per_entry: if entries == 0 { 0.0 } else { ops as f64 / entries as f64 },
    };
    print_report(&figures, &round, held);
    if options.keep {
        print_how_to_reach(&mut cluster);
        cluster.detach();
        work_dir.keep();
    }
    if options.json {
        println!("{}", figures.to_json(&round));
    }
    Ok(Verdict::of(held))
}

struct Figures {
    objects: u64,
    bytes: u64,
    put_gb_s: f64,
    get_gb_s: f64,
    rpo_lost: u64,
    first_bad: u64,
    second_bad: u64,
    ops_per_entry: f64,
}

impl Figures {
    fn to_json(&self, round: &Round) -> serde_json::Value {
        let hundredth = |x: f64| (x * 100.0).round() / 100.0;
        json!({
            "objects": self.objects,
            "bytes": self.bytes,
            "rpo_lost": self.rpo_lost,
            "rto_write_max_ms": round.outage.rto_write_ms,
            "rto_read_max_ms": round.outage.rto_read_ms,
            "longest_call_ms": round.outage.longest_call_ms,
            "put_gb_s": hundredth(self.put_gb_s),
            "get_gb_s": hundredth(self.get_gb_s),
            "ops_per_entry": hundredth(self.ops_per_entry),
            "state_hash_equal": round.state_hash_equal,
        })
    }
}

/// The source tree when there is one, the build beside the binary, then what every machine has.
fn default_roots(binary: &Path) -> Vec<PathBuf> {
    let mut roots = Vec::new();
    if let Ok(here) = std::env::current_dir()
        && here.join("Cargo.toml").exists()
    {
        roots.push(here);
    }
    roots.extend(binary.parent().map(Path::to_owned));
    roots.extend(["/usr/lib", "/usr/bin", "/usr/share"].map(PathBuf::from));
    roots
}

/// Puts every file. Reading the files is not timed; putting them is, from the first byte to the last acknowledgement.
async fn store(client: &Client, found: &[SourceFile], threads: u32) -> Result<(Vec<Stored>, Duration)> {
    let mut stored = Vec::with_capacity(found.len());
    let mut spent = Duration::ZERO;
    let mut from = 0;
    while from < found.len() {
        let mut chunk = Vec::new();
        let mut chunk_bytes = 0;
        while from < found.len() && (chunk.is_empty() || chunk_bytes + found[from].bytes <= CHUNK_BYTES) {
            let path = &found[from].path;
            let content = tokio::fs::read(path).await.with_context(|| format!("reading {}", path.display()))?;
            from += 1;
            if content.is_empty() {
                continue; // emptied since it was found
            }
            let key = path.display().to_string();
            chunk_bytes += content.len() as u64;
            stored.push(Stored { key: key.clone(), hash: content_hash(&content), bytes: content.len() as u64 });
            chunk.push(PutItem::new(key, Bytes::from(content)));
        }
        let mut calls: Vec<Vec<PutItem>> = Vec::new();
        let mut call_bytes = 0;
        for item in chunk {
            let bytes = item.value.iter().map(|part| part.len() as u64).sum::<u64>();
            match calls.last_mut() {
                Some(call) if call.len() < BATCH_KEYS && call_bytes + bytes <= BATCH_BYTES => {
                    call.push(item);
                    call_bytes += bytes;
                }
                _ => {
                    calls.push(vec![item]);
                    call_bytes = bytes;
                }
            }
        }
        let began = Instant::now();
        let options = PutOptions { deadline: Some(CALL_WITHIN), ..PutOptions::default() };
        let mut running = futures::stream::iter(calls)
            .map(|call| {
                let (client, options) = (client.clone(), options.clone());
                let keys: Vec<Bytes> = call.iter().map(|item| item.key.clone()).collect();
                tokio::spawn(async move { (keys, client.put_many(call, options).await) })
            })
            .buffer_unordered(threads as usize);
        while let Some(done) = running.next().await {
            let (keys, results) = done?;
            for (key, result) in keys.iter().zip(results) {
                if let Err(error) = result {
                    bail!("putting {}: {error}", String::from_utf8_lossy(key));
                }
            }
        }
        spent += began.elapsed();
    }
    Ok((stored, spent))
}

/// Gets every object; comparing hashes is not timed. Returns how many are missing or differ.
async fn read_and_compare(client: &Client, stored: &[Stored], threads: u32) -> Result<(u64, Duration)> {
    let mut calls: Vec<Vec<Stored>> = Vec::new();
    let mut call_bytes = 0;
    for object in stored {
        match calls.last_mut() {
            Some(call) if call.len() < BATCH_KEYS && call_bytes + object.bytes <= BATCH_BYTES => {
                call.push(object.clone());
                call_bytes += object.bytes;
            }
            _ => {
                calls.push(vec![object.clone()]);
                call_bytes = object.bytes;
            }
        }
    }
    let mut bad = 0;
    let mut spent = Duration::ZERO;
    let calls: Vec<Arc<Vec<Stored>>> = calls.into_iter().map(Arc::new).collect();
    for wave in calls.chunks(threads as usize) {
        let began = Instant::now();
        let running: Vec<_> = wave
            .iter()
            .map(|call| {
                let (client, call) = (client.clone(), call.clone());
                tokio::spawn(async move {
                    let keys: Vec<&str> = call.iter().map(|object| object.key.as_str()).collect();
                    client.get_many(&keys, Some(CALL_WITHIN)).await
                })
            })
            .collect();
        let results = futures::future::join_all(running).await;
        spent += began.elapsed();
        for (call, results) in wave.iter().zip(results) {
            for (object, result) in call.iter().zip(results?) {
                match result {
                    Ok(value) if value.len() as u64 == object.bytes && content_hash(&value) == object.hash => {}
                    Ok(value) => {
                        bad += 1;
                        eprintln!("WRONG BYTES: {}: {} of {} bytes, other hash", object.key, value.len(), object.bytes);
                    }
                    Err(error) => {
                        bad += 1;
                        eprintln!("LOST: {}: {error}", object.key);
                    }
                }
            }
        }
    }
    Ok((bad, spent))
}

fn gigabytes_a_second(bytes: u64, time: Duration) -> f64 {
    if time.is_zero() { 0.0 } else { bytes as f64 / 1e9 / time.as_secs_f64() }
}

fn say(text: &str) {
    eprintln!("demo: {text}");
}

fn print_report(figures: &Figures, round: &Round, held: bool) {
    let outage = &round.outage;
    let shown = |ms: Option<f64>| ms.map_or("never recovered".to_owned(), |ms| format!("{ms:.0} ms"));
    println!("Tidepool demo: 3 masters, 2 datanodes, load1 {:.1}", load1());
    println!(
        "  stored        {} files, {:.2} GB, at {:.2} GB/s",
        figures.objects,
        figures.bytes as f64 / 1e9,
        figures.put_gb_s
    );
    println!("  read back     at {:.2} GB/s, {} missing or different", figures.get_gb_s, figures.first_bad);
    println!("  oplog         {:.1} ops an entry while storing", figures.ops_per_entry);
    println!("  killed        {} (SIGKILL, leader, under load); {} took over", round.struck, round.successor);
    println!("  writes back   after {}", shown(outage.rto_write_ms));
    println!("  reads back    after {}", shown(outage.rto_read_ms));
    println!("  worst gap     {:.0} ms without a success for one client", outage.worst_client_gap_ms);
    println!("  longest call  {:.0} ms", outage.longest_call_ms);
    println!(
        "  load          {} puts acknowledged, {} gets verified, {} calls failed, {} stale, {} corrupt",
        round.acknowledged, outage.gets_ok, outage.failed, outage.missed, outage.corrupt
    );
    println!("  lost          {} acknowledged objects", figures.rpo_lost);
    println!("  read again    {} missing or different after the failover", figures.second_bad);
    println!(
        "  state hashes  {} on all masters at index {}",
        if round.state_hash_equal { "equal" } else { "DIFFERENT" },
        round.applied_index
    );
    println!("  {}", if held { "everything held" } else { "NOT EVERYTHING HELD" });
}

fn print_how_to_reach(cluster: &mut Cluster) {
    println!("The pool stays up. Reach it with:");
    println!("  tidepool --masters {} status", cluster.masters_text());
    for role in cluster.masters.iter().chain(&cluster.datanodes) {
        println!(
            "  http://{}/  {} (process {}), log {}",
            role.http,
            role.name(),
            role.id().unwrap_or(0),
            role.log().display()
        );
    }
    let ids: Vec<String> =
        cluster.datanodes.iter().chain(&cluster.masters).filter_map(|r| r.id()).map(|id| id.to_string()).collect();
    println!("  end it: kill {}; rm -r {}", ids.join(" "), cluster.work_dir().display());
}
