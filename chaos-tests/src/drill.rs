//! `tidepool drill`: breaks something under load, again and again, and reports what clients felt, on a pool of its own
//! (`--spawn`) or on a quorum that serves others.

mod html;
mod live;
mod options;
mod report;
mod scene;
mod spawned;
mod strike;

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use tidepool_proto::Address;

use crate::cluster::{Cluster, ClusterOptions, Ground};
use crate::failover::{self, Judged, Quorum as _, fill_percent};
use crate::lab::Lab;
use crate::output::{Format, Verdict, WorkDir};
use live::LiveQuorum;
pub use options::{DrillFault, DrillOptions, Fill, Killer, LiveOptions};
use scene::Scene;
pub use spawned::Spawned;

/// The disk of each master where masters have their own.
const DISK_BYTES: u64 = 512 << 20;

/// The pool that a drill without `--spawn` works on.
#[derive(Clone, Debug)]
pub struct Target {
    /// Masters; one reachable member is enough.
    pub masters: Vec<Address>,
    /// Tenant whose keys the drill uses.
    pub tenant: String,
}

/// Runs the drill. One line a round, then the summary.
pub async fn run(
    fault: DrillFault,
    options: &DrillOptions,
    target: &Target,
    binary: &Path,
    format: Format,
) -> Result<Verdict> {
    let work_dir = WorkDir::open(options.work_dir.as_deref(), "drill")?;
    let directory = work_dir.path().to_owned();
    if !options.spawn {
        return drill_live(fault, options, target, binary, directory, format).await;
    }
    if !fault.needs_lab() {
        return drill_spawned(fault, options, binary, directory, Ground::Loopback, format).await;
    }
    let (options, binary) = (options.clone(), binary.to_owned());
    let inside = move || {
        Lab::run(async move |lab| drill_spawned(fault, &options, &binary, directory, Ground::Lab(lab), format).await)
    };
    let outcome = tokio::task::spawn_blocking(inside).await.context("the laboratory's thread")?;
    outcome.with_context(|| format!("drill {} needs links and disks of its own", fault.name()))?
}

async fn drill_spawned(
    fault: DrillFault,
    options: &DrillOptions,
    binary: &Path,
    directory: PathBuf,
    ground: Ground,
    format: Format,
) -> Result<Verdict> {
    let mut cluster_options = ClusterOptions::new(binary, &directory.join("pool"));
    cluster_options.segment_bytes = options.segment_bytes;
    cluster_options.election.clone_from(&options.election);
    cluster_options.ground = ground;
    if fault == DrillFault::PowerCut {
        cluster_options.disk_bytes = Some(DISK_BYTES);
    }
    if fault == DrillFault::Restore {
        let url = format!("file://{}", directory.join("snapshots").display());
        let own = ["--snapshot-url", &url, "--snapshot-interval", "0", "--snapshot-on-shutdown=false"];
        cluster_options.master_arguments = own.iter().map(|word| word.to_string()).collect();
    }
    let mut cluster = Cluster::start(cluster_options).await?;
    let masters = cluster.masters_text();
    let capacity_bytes = cluster.capacity_bytes();
    let copies = u64::from(fault.replica_num());
    let scene = Scene {
        fault,
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
            Fill::Overflow => Judged::LastBytes(capacity_bytes / 4 / copies),
        },
        format,
    };
    let filler_bytes = match options.fill() {
        Fill::None => 0,
        Fill::Half => capacity_bytes / 2 / copies,
        Fill::Overflow => capacity_bytes / 100 * 97 / copies,
    };
    if copies > 1 && options.fill() == Fill::Overflow {
        bail!(
            "--fill 95 leaves no room for the copies that a dead datanode takes along; drill {} with none or half",
            fault.name()
        );
    }
    scene.run(&mut Spawned::new(&mut cluster, fault), filler_bytes).await
}

/// What a drill on a live quorum would do, in words. Asks the quorum, changes nothing.
pub async fn plan(fault: DrillFault, options: &DrillOptions, target: &Target) -> Result<String> {
    refuse_live(fault)?;
    let quorum = LiveQuorum::find(&target.masters, fault, &options.live).await?;
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
        (load * mean_bytes as f64 + options.bulk_bytes_per_s as f64) / 1e6,
        live::PREFIX,
        quorum.describe_leader().await?,
        quorum.strike.describe(),
        quorum.strike.describe_return(),
    ))
}

/// A drill takes nothing from a quorum that serves others but one leader for a while.
fn refuse_live(fault: DrillFault) -> Result<()> {
    if !fault.may_be_live() {
        bail!(
            "drill {} is for a pool of its own: add --spawn; on a quorum that serves others there are kill-leader, pause-leader and \
             transfer",
            fault.name()
        );
    }
    Ok(())
}

async fn drill_live(
    fault: DrillFault,
    options: &DrillOptions,
    target: &Target,
    binary: &Path,
    directory: PathBuf,
    format: Format,
) -> Result<Verdict> {
    refuse_live(fault)?;
    if options.fill() == Fill::Overflow {
        bail!("--fill 95 evicts what others stored; on a quorum that serves others only none and half are drilled");
    }
    let mut quorum = LiveQuorum::find(&target.masters, fault, &options.live).await?;
    let status = quorum.leader_status().await?;
    let capacity_bytes: u64 = status.segments.iter().map(|s| s.capacity_bytes).sum();
    let used = (capacity_bytes as f64 * fill_percent(&status) / 100.0) as u64;
    let filler_bytes = if options.fill() == Fill::Half { (capacity_bytes / 2).saturating_sub(used) } else { 0 };
    let masters = quorum.addresses().join(",");
    let scene = Scene {
        fault,
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
