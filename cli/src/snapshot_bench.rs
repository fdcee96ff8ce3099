//! `tidepool bench snapshot`: what an image costs who serves. In this process, on the directory alone: one thread applies at full
//! speed, against every shard, while an image is written to a real file and synced, as a master does it.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{BufReader, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use tidepool_chaos_tests::bench::figure::{Figure, Printer};
use tidepool_master::directory::{
    DataType, Directory, Entry, FEATURE_LEVEL, FrozenDirectory, Op, Outcome, PutEnd, PutStart, ReplicaEnd, ReplicaMode,
    ReplicaStatus, SessionId, SoftPinAction, TenantId,
};
use tidepool_proto::{History, LogTime, ObjectId};
use tidepool_raft::background;

use crate::exit::Failed;

/// Puts of one entry: what a busy leader batches.
const PUTS_PER_ENTRY: u64 = 256;
const OBJECT_BYTES: u64 = 64 << 10;
const SEGMENTS: u8 = 8;
const BUFFER_BYTES: usize = 1 << 20;
/// How often the memory of the undo lists is looked at.
const WATCH_INTERVAL: Duration = Duration::from_millis(20);

/// Options of `tidepool bench snapshot`.
#[derive(clap::Args, Clone, Debug)]
pub struct SnapshotBenchOptions {
    /// Objects in the directory; count on 300 bytes of memory each, twice while it is restored
    #[arg(long, value_name = "N", default_value_t = 1_000_000, value_parser = clap::value_parser!(u64).range(1_000..=100_000_000))]
    pub objects: u64,
    /// Snapshots taken, one after the other
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=100))]
    pub runs: u32,
    /// Directory of the file
    #[arg(long, value_name = "PATH", default_value = ".")]
    pub dir: PathBuf,
}

/// One snapshot under load.
struct Run {
    build: Duration,
    bytes: u64,
    worst: Duration,
    /// Beside a thread that spins instead.
    worst_without: Duration,
    /// The same of entries during which the kernel did not give the processor to another thread.
    undisturbed: Duration,
    undisturbed_without: Duration,
    entries: u64,
    undo_bytes: u64,
    peak_bytes: u64,
    restore: Duration,
}

/// Measures.
pub async fn run(options: &SnapshotBenchOptions, printer: &mut Printer) -> anyhow::Result<()> {
    let dir = tempfile::tempdir_in(&options.dir)
        .map_err(|error| Failed::usage(format!("--dir {}: {error}", options.dir.display())))?;
    let mut load = Load::fill(options.objects)?;
    let resident = memory("VmRSS:")?;
    let mut runs = Vec::new();
    for _ in 0..options.runs {
        runs.push(once(&mut load, &dir.path().join("image")).await?);
    }
    let figure = |case: &str, unit: &'static str, of: &dyn Fn(&Run) -> f64, ceiling: Vec<f64>| Figure {
        suite: "snapshot",
        case: format!("{case}/{}", options.objects),
        runs: runs.iter().map(of).collect(),
        unit,
        ceiling,
        extra: Vec::new(),
    };
    let most = |of: fn(&Run) -> u64| runs.iter().map(of).max().unwrap_or(0);
    printer.print(&Figure {
        extra: vec![
            ("resident_bytes", resident.into()),
            ("peak_bytes", most(|run| run.peak_bytes).into()),
            ("undo_bytes", most(|run| run.undo_bytes).into()),
        ],
        ..figure("build_s", "s", &|run| run.build.as_secs_f64(), Vec::new())
    });
    printer.print(&figure("bytes", "bytes", &|run| run.bytes as f64, Vec::new()));
    let without = runs.iter().map(|run| run.worst_without.as_secs_f64() * 1e3).collect();
    printer.print(&Figure {
        extra: vec![("entries", most(|run| run.entries).into()), ("puts_per_entry", PUTS_PER_ENTRY.into())],
        ..figure("worst_apply_stall_ms", "ms", &|run| run.worst.as_secs_f64() * 1e3, without)
    });
    let without = runs.iter().map(|run| run.undisturbed_without.as_secs_f64() * 1e3).collect();
    printer.print(&figure(
        "worst_apply_stall_undisturbed_ms",
        "ms",
        &|run| run.undisturbed.as_secs_f64() * 1e3,
        without,
    ));
    printer.print(&figure("restore_s", "s", &|run| run.restore.as_secs_f64(), Vec::new()));
    Ok(())
}

async fn once(load: &mut Load, path: &Path) -> anyhow::Result<Run> {
    forget_peak_memory()?;
    let began = Instant::now();
    let frozen = load.directory.freeze();
    let held = began.elapsed();
    let (is_done, undo_bytes) = (AtomicBool::new(false), AtomicU64::new(0));
    let owned = path.to_owned();
    let mut writing = std::pin::pin!(async {
        let written = background("image", move || write(frozen, &owned)).await;
        is_done.store(true, Ordering::Release);
        anyhow::Ok(written??)
    });
    let directory = load.directory.clone();
    let (bytes, worst, undisturbed, entries) = std::thread::scope(|scope| {
        scope.spawn(|| {
            while !is_done.load(Ordering::Acquire) {
                undo_bytes.fetch_max(directory.freeze_bytes(), Ordering::Relaxed);
                std::thread::sleep(WATCH_INTERVAL);
            }
        });
        let applying = scope.spawn(|| {
            let (mut worst, mut undisturbed, mut entries) = (held, held, 0);
            while !is_done.load(Ordering::Acquire) {
                let took = load.entries();
                worst = worst.max(took.longest);
                undisturbed = undisturbed.max(took.undisturbed);
                entries += 2;
            }
            (worst, undisturbed, entries)
        });
        let bytes = tokio::task::block_in_place(|| tokio::runtime::Handle::current().block_on(&mut writing));
        is_done.store(true, Ordering::Release);
        let (worst, undisturbed, entries) = applying.join().expect("applying ends");
        bytes.map(|bytes| (bytes, worst, undisturbed, entries))
    })?;
    let build = began.elapsed();
    let peak_bytes = memory("VmHWM:")?;
    // Beside a thread that only spins: what this machine costs whoever shares it.
    let (mut worst_without, mut undisturbed_without) = (Duration::ZERO, Duration::ZERO);
    let stop = std::sync::Arc::new(AtomicBool::new(false));
    let seen = stop.clone();
    let spinning = background("spin", move || {
        while !seen.load(Ordering::Relaxed) {
            std::hint::spin_loop();
        }
    });
    let spinning = tokio::spawn(spinning);
    for _ in 0..entries / 2 {
        let took = load.entries();
        worst_without = worst_without.max(took.longest);
        undisturbed_without = undisturbed_without.max(took.undisturbed);
    }
    stop.store(true, Ordering::Relaxed);
    spinning.await.context("the thread that spins")??;
    let began = Instant::now();
    let restored = Directory::new(History(0));
    restored.restore(&mut BufReader::with_capacity(BUFFER_BYTES, File::open(path)?))?;
    let restore = began.elapsed();
    let undo_bytes = undo_bytes.into_inner();
    Ok(Run {
        build,
        bytes,
        worst,
        worst_without,
        undisturbed,
        undisturbed_without,
        entries,
        undo_bytes,
        peak_bytes,
        restore,
    })
}

fn write(frozen: FrozenDirectory, path: &Path) -> std::io::Result<u64> {
    let file = File::create(path)?;
    let mut out = BufWriter::with_capacity(BUFFER_BYTES, &file);
    frozen.write_to(&mut out)?;
    out.flush()?;
    drop(out);
    file.sync_all()?;
    Ok(file.metadata()?.len())
}

/// A full pool and who overwrites it.
struct Load {
    directory: std::sync::Arc<Directory>,
    session: SessionId,
    index: u64,
    next_key: u64,
    /// The oldest first.
    objects: VecDeque<ObjectId>,
}

impl Load {
    fn fill(objects: u64) -> anyhow::Result<Load> {
        let directory = std::sync::Arc::new(Directory::new(History(0)));
        let extent = tidepool_proto::object::extent_bytes(OBJECT_BYTES);
        let bytes = (objects + PUTS_PER_ENTRY).div_ceil(SEGMENTS.into()) * extent;
        let mut load = Load { directory, session: SessionId(0), index: 0, next_key: 0, objects: VecDeque::new() };
        for number in 0..SEGMENTS {
            let host_id = format!("host-{number}");
            let (node_uuid, process_uuid) = ([number; 16], [number; 16]);
            let register = Op::RegisterNode { node_uuid, process_uuid, address: "10.0.0.1:9", host_id: &host_id };
            let Some(Outcome::Registered { node, incarnation }) = load.apply(vec![register]).pop() else {
                anyhow::bail!("a node was not registered");
            };
            load.apply(vec![Op::MountSegment { node, incarnation, name: "dram", bytes }]);
        }
        let open = Op::OpenSession { client_uuid: [1; 16], host_id: "" };
        let Some(Outcome::Opened { session, .. }) = load.apply(vec![open]).pop() else {
            anyhow::bail!("no session was opened");
        };
        load.session = session;
        while (load.objects.len() as u64) < objects {
            let _ = load.put(false);
        }
        Ok(load)
    }

    fn apply(&mut self, ops: Vec<Op<'_>>) -> Vec<Outcome> {
        self.index += 1;
        let entry = Entry { feature_level: FEATURE_LEVEL, log_time: LogTime(self.index), ops };
        self.directory.apply_entry(self.index, 1, &entry)
    }

    /// Two entries: puts in the place of the oldest objects, and their ends.
    fn entries(&mut self) -> Took {
        self.put(true)
    }

    fn put(&mut self, evicts: bool) -> Took {
        let first = self.next_key;
        self.next_key += PUTS_PER_ENTRY;
        let keys: Vec<String> = (first..self.next_key).map(|number| format!("{number:064x}")).collect();
        let victims: Vec<ObjectId> = match evicts {
            true => self.objects.drain(..PUTS_PER_ENTRY as usize).collect(),
            false => Vec::new(),
        };
        let session = self.session;
        let starts = keys.iter().enumerate().map(|(at, key)| {
            let victim = victims.get(at).copied();
            Op::PutStart(put_start(session, key, first + at as u64, victim))
        });
        let starts = starts.collect();
        let (outcomes, start) = timed(|| self.apply(starts));
        let mut ends = Vec::with_capacity(outcomes.len());
        for outcome in outcomes {
            let Outcome::Granted(grant) = outcome else { continue };
            self.objects.push_back(grant.object);
            let stored = |replica: &tidepool_master::directory::GrantedReplica| ReplicaStatus {
                replica: replica.replica,
                end: ReplicaEnd::Stored,
            };
            let replicas = grant.replicas.iter().map(stored).collect();
            ends.push(Op::PutEnd(PutEnd { session, object: grant.object, replicas }));
        }
        let (_, end) = timed(|| self.apply(ends));
        Took { longest: start.longest.max(end.longest), undisturbed: start.undisturbed.max(end.undisturbed) }
    }
}

/// What the longer of two entries took.
#[derive(Clone, Copy)]
struct Took {
    longest: Duration,
    /// Zero where the kernel gave the processor to another thread meanwhile.
    undisturbed: Duration,
}

fn timed<T>(work: impl FnOnce() -> T) -> (T, Took) {
    let before = preemptions();
    let began = Instant::now();
    let done = work();
    let longest = began.elapsed();
    let undisturbed = if preemptions() == before { longest } else { Duration::ZERO };
    (done, Took { longest, undisturbed })
}

/// How often the kernel took the processor from this thread.
fn preemptions() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/thread-self/status").ok()?;
    status.lines().find_map(|line| line.strip_prefix("nonvoluntary_ctxt_switches:"))?.trim().parse().ok()
}

fn put_start(session: SessionId, key: &str, number: u64, victim: Option<ObjectId>) -> PutStart<'_> {
    let mut token = [0; 16];
    token[..8].copy_from_slice(&number.to_le_bytes());
    PutStart {
        tenant: TenantId::DEFAULT,
        session,
        key: key.as_bytes(),
        length: OBJECT_BYTES,
        token,
        replica_num: 1,
        mode: ReplicaMode::BestEffort,
        excluded: Default::default(),
        victims: victim.into_iter().collect(),
        data_type: DataType::default(),
        hard_pin: false,
        soft_pin: SoftPinAction::Preserve,
        group: b"",
        preferred: Default::default(),
        upsert: None,
    }
}

/// A line of `/proc/self/status`, in bytes.
fn memory(name: &str) -> anyhow::Result<u64> {
    let status = std::fs::read_to_string("/proc/self/status").context("/proc/self/status")?;
    let line = status.lines().find(|line| line.starts_with(name)).context("no such line in /proc/self/status")?;
    let kilobytes: u64 = line.split_whitespace().nth(1).context("it has no figure")?.parse()?;
    Ok(kilobytes << 10)
}

/// The peak begins anew.
fn forget_peak_memory() -> anyhow::Result<()> {
    std::fs::write("/proc/self/clear_refs", "5").context("/proc/self/clear_refs")
}
