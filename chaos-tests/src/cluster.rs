//! A whole pool as separate processes on loopback: masters and datanodes with real data directories and log files,
//! started, broken, restarted and cleaned up from one place.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use tidepool_proto::v1::StatusResponse;

mod place;
mod role;

use crate::admin;
use crate::digests::{self, DigestComparison};
use crate::process::Lifetime;
pub use place::Ground;
use place::{Place, places};
pub use role::Role;

/// How long a pool may take to boot on a slow, shared machine.
const BOOT_WITHIN: Duration = Duration::from_secs(60);
/// Pause between two looks at a condition.
pub const POLL_EVERY: Duration = Duration::from_millis(10);
/// Tries to find ports that are still free when the processes bind them.
const BOOT_TRIES: usize = 3;

/// What to start.
#[derive(Clone, Debug)]
pub struct ClusterOptions {
    /// The tidepool binary.
    pub binary: PathBuf,
    /// Data directories and logs go here.
    pub work_dir: PathBuf,
    /// Number of masters.
    pub masters: usize,
    /// Number of datanodes.
    pub datanodes: usize,
    /// DRAM each datanode lends.
    pub segment_bytes: u64,
    /// Election profile: `lan`, `default`, `wan`.
    pub election: String,
    /// What becomes of the processes when the harness ends.
    pub lifetime: Lifetime,
    /// Extra arguments of every master.
    pub master_arguments: Vec<String>,
    /// Extra arguments of every datanode.
    pub datanode_arguments: Vec<String>,
    /// What it stands on.
    pub ground: Ground,
    /// In a laboratory: every master has a file system of so many bytes for itself.
    pub disk_bytes: Option<u64>,
    /// Whether masters are started with faults that can be switched on (`Role::preload`).
    pub built_in_faults: bool,
}

impl ClusterOptions {
    /// Three masters and two datanodes of 256 MiB under `work_dir`.
    pub fn new(binary: &Path, work_dir: &Path) -> ClusterOptions {
        ClusterOptions {
            binary: binary.to_owned(),
            work_dir: work_dir.to_owned(),
            masters: 3,
            datanodes: 2,
            segment_bytes: 256 << 20,
            election: "lan".into(),
            lifetime: Lifetime::WithOwner,
            master_arguments: Vec::new(),
            datanode_arguments: Vec::new(),
            ground: Ground::default(),
            disk_bytes: None,
            built_in_faults: false,
        }
    }
}

/// The processes of one pool. Dropping it kills them.
pub struct Cluster {
    options: ClusterOptions,
    /// Masters; master `i` has node id `i + 1`.
    pub masters: Vec<Role>,
    /// Datanodes.
    pub datanodes: Vec<Role>,
}

impl Cluster {
    /// Starts everything and waits until the pool can serve.
    pub async fn start(options: ClusterOptions) -> Result<Cluster> {
        std::fs::create_dir_all(&options.work_dir)
            .with_context(|| format!("work directory {}", options.work_dir.display()))?;
        for attempt in 1.. {
            let mut cluster = Cluster::describe(options.clone())?;
            let outcome = cluster.boot().await;
            match outcome {
                Ok(()) => return Ok(cluster),
                Err(error) if attempt < BOOT_TRIES && cluster.lost_a_port() => {
                    tracing::warn!("ports were taken between reserving and binding, trying others: {error:#}");
                    drop(cluster);
                    std::fs::remove_dir_all(&options.work_dir)?;
                    std::fs::create_dir_all(&options.work_dir)?;
                }
                Err(error) => return Err(error),
            }
        }
        unreachable!("the loop returns")
    }

    /// Lays out roles, addresses and directories without starting anything.
    pub fn describe(options: ClusterOptions) -> Result<Cluster> {
        std::fs::create_dir_all(&options.work_dir)
            .with_context(|| format!("work directory {}", options.work_dir.display()))?;
        let names = |kind: &str, count: usize| (1..=count).map(|n| format!("{kind}-{n}")).collect::<Vec<_>>();
        let names = [names("master", options.masters), names("datanode", options.datanodes)].concat();
        let mut master_places = places(&options, &names)?;
        let datanode_places = master_places.split_off(options.masters);
        let members: Vec<String> =
            master_places.iter().enumerate().map(|(i, place)| format!("{}={}", i + 1, place.rpc)).collect();
        let members = members.join(",");
        let masters: Vec<Role> = master_places
            .into_iter()
            .enumerate()
            .map(|(i, place)| {
                let id = (i + 1).to_string();
                let own = ["master", "--node-id", &id, "--members", &members, "--election", &options.election];
                Role::describe(&options, format!("master-{id}"), place, &own, &options.master_arguments)
            })
            .collect();
        let mut cluster = Cluster { masters, datanodes: Vec::new(), options };
        for place in datanode_places {
            cluster.describe_datanode(place);
        }
        Ok(cluster)
    }

    fn place_of(&self, name: &str) -> Result<Place> {
        let mut found = places(&self.options, &[name.to_owned()])?;
        found.pop().with_context(|| format!("no place for {name}"))
    }

    fn describe_datanode(&mut self, place: Place) {
        let number = self.datanodes.len() + 1;
        let segment = self.options.segment_bytes.to_string();
        let host = format!("host-{number}");
        let masters = self.masters_text();
        let own = ["datanode", "--masters", &masters, "--dram", &segment, "--host-id", &host];
        let options = &self.options;
        let role = Role::describe(options, format!("datanode-{number}"), place, &own, &options.datanode_arguments);
        self.datanodes.push(role);
    }

    /// Starts one more datanode and returns its index; `wait_serving` waits for it too.
    pub fn add_datanode(&mut self) -> Result<usize> {
        let place = self.place_of(&format!("datanode-{}", self.datanodes.len() + 1))?;
        self.describe_datanode(place);
        let at = self.datanodes.len() - 1;
        self.datanodes[at].start()?;
        Ok(at)
    }

    /// The same, with DRAM of its own size.
    pub fn add_datanode_of(&mut self, segment_bytes: u64) -> Result<usize> {
        let usual = std::mem::replace(&mut self.options.segment_bytes, segment_bytes);
        let added = self.add_datanode();
        self.options.segment_bytes = usual;
        added
    }

    /// Starts one more master, which waits to be taken in by `tidepool member add`, and returns its index. Its data directory
    /// is empty; its node id is the index plus one.
    pub fn add_master(&mut self) -> Result<usize> {
        let id = (self.masters.len() + 1).to_string();
        let place = self.place_of(&format!("master-{id}"))?;
        let own = ["master", "--node-id", &id, "--join", "--election", &self.options.election];
        let role = Role::describe(&self.options, format!("master-{id}"), place, &own, &self.options.master_arguments);
        self.masters.push(role);
        let at = self.masters.len() - 1;
        self.masters[at].start()?;
        Ok(at)
    }

    async fn boot(&mut self) -> Result<()> {
        for role in self.masters.iter_mut().chain(self.datanodes.iter_mut()) {
            role.start()?;
        }
        self.wait_serving(BOOT_WITHIN).await
    }

    fn lost_a_port(&mut self) -> bool {
        self.masters
            .iter_mut()
            .chain(self.datanodes.iter_mut())
            .any(|role| role.process().is_ok_and(|p| p.log_tail().to_lowercase().contains("in use")))
    }

    /// Where the data directories and logs are.
    pub fn work_dir(&self) -> &Path {
        &self.options.work_dir
    }
    /// The options it was started with.
    pub fn options(&self) -> &ClusterOptions {
        &self.options
    }
    /// All masters' RPC addresses, comma-separated, as `--masters` takes them.
    pub fn masters_text(&self) -> String {
        join(&self.masters.iter().map(|m| m.rpc).collect::<Vec<_>>())
    }
    /// DRAM of the whole pool.
    pub fn capacity_bytes(&self) -> u64 {
        self.options.segment_bytes * self.options.datanodes as u64
    }

    /// Waits until a leader serves, every running master follows it, and every running datanode is listed with its segment.
    pub async fn wait_serving(&mut self, within: Duration) -> Result<()> {
        let give_up = Instant::now() + within;
        loop {
            let missing = match self.what_is_missing().await {
                Ok(None) => return Ok(()),
                Ok(Some(missing)) => missing,
                Err(error) => return Err(error),
            };
            if Instant::now() > give_up {
                bail!("the pool does not serve after {within:?}: {missing}");
            }
            tokio::time::sleep(POLL_EVERY).await;
        }
    }

    async fn what_is_missing(&mut self) -> Result<Option<String>> {
        let mut datanodes_running = 0;
        for datanode in &mut self.datanodes {
            if datanode.is_running()? {
                datanodes_running += 1;
            } else {
                datanode.process()?.expect_running().ok();
            }
        }
        let mut leader = None;
        for master in &mut self.masters {
            if !master.is_running()? {
                continue;
            }
            match admin::status(master.rpc).await {
                Ok(status) if status.role == "leader" => leader = Some(status),
                Ok(status) if status.role == "standby" && status.leader.is_some() => {}
                Ok(status) => return Ok(Some(format!("{} is {}", master.name(), status.role))),
                Err(error) => {
                    master.process()?.expect_running()?;
                    return Ok(Some(format!("{}: {error:#}", master.name())));
                }
            }
        }
        let Some(leader) = leader else { return Ok(Some("no leader".into())) };
        let listed = leader.nodes.iter().filter(|node| !node.suspect).count();
        let segments = leader.segments.iter().filter(|segment| segment.state == "MOUNTED").count();
        if listed < datanodes_running || segments < datanodes_running {
            for datanode in &mut self.datanodes {
                datanode.process()?.expect_running()?;
            }
            return Ok(Some(format!(
                "{listed} datanodes listed and {segments} segments mounted of {datanodes_running}"
            )));
        }
        Ok(None)
    }

    /// Index of the master that leads now and that a majority follows.
    pub async fn leader(&mut self, within: Duration) -> Result<usize> {
        let give_up = Instant::now() + within;
        loop {
            let mut best: Option<(u64, usize)> = None;
            for (at, master) in self.masters.iter_mut().enumerate() {
                if master.is_running()?
                    && let Ok(status) = admin::status(master.rpc).await
                    && status.role == "leader"
                {
                    best = best.max(Some((status.term, at)));
                }
            }
            if let Some((_, at)) = best {
                return Ok(at);
            }
            if Instant::now() > give_up {
                bail!("no master leads after {within:?}");
            }
            tokio::time::sleep(POLL_EVERY).await;
        }
    }

    /// The leader's view of the pool.
    pub async fn leader_status(&mut self, within: Duration) -> Result<StatusResponse> {
        let give_up = Instant::now() + within;
        loop {
            let at = self.leader(within).await?;
            match admin::status(self.masters[at].rpc).await {
                Ok(status) if status.role == "leader" => return Ok(status),
                _ if Instant::now() > give_up => bail!("no stable leader within {within:?}"),
                _ => {}
            }
        }
    }

    /// Waits until master `at` has applied everything that was committed when it was asked.
    pub async fn wait_caught_up(&mut self, at: usize, within: Duration) -> Result<()> {
        let give_up = Instant::now() + within;
        let goal = self.leader_status(within).await?.committed_index;
        loop {
            self.masters[at].process()?.expect_running()?;
            let seen = match admin::status(self.masters[at].rpc).await {
                Ok(status) if status.applied_index >= goal && matches!(&*status.role, "leader" | "standby") => {
                    return Ok(());
                }
                Ok(status) => format!("is {} and has applied {} of {goal}", status.role, status.applied_index),
                Err(error) => format!("{error:#}"),
            };
            if Instant::now() > give_up {
                bail!("{} did not catch up within {within:?}: {seen}", self.masters[at].name());
            }
            tokio::time::sleep(POLL_EVERY).await;
        }
    }

    /// Digests of all masters at one applied index.
    pub async fn compare_digests(&mut self, within: Duration) -> Result<DigestComparison> {
        let masters: Vec<SocketAddr> = self.masters.iter().map(|m| m.rpc).collect();
        digests::compare(&masters, within).await
    }

    /// Leaves the processes running after this value is gone.
    pub fn detach(&mut self) {
        for role in self.masters.iter_mut().chain(self.datanodes.iter_mut()) {
            role.detach();
        }
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        // Datanodes first: they have nothing to hand over, and masters would log their loss.
        self.datanodes.clear();
        self.masters.clear();
    }
}

fn join(addresses: &[SocketAddr]) -> String {
    addresses.iter().map(|a| a.to_string()).collect::<Vec<_>>().join(",")
}
