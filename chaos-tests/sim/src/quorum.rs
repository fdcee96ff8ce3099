//! The masters of a run: real consensus and real services on machines that can be killed, paused and cut off.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use openraft::async_runtime::AsyncRuntime;
use openraft_rt_sim::SimRuntime;
use parking_lot::Mutex;
use tidepool_master::restore::{from_snapshot, go_on};
use tidepool_master::sim::{self, Machine};
use tidepool_master::{Master, MasterOptions};
use tidepool_proto::{Address, NodeId};
use tidepool_raft::sim::surroundings::{On, SimMachine, spawn_on};
use tidepool_raft::sim::{SimCluster, SimNode};
use tidepool_raft::snapshot::SnapshotFile;
use tidepool_raft::{ClusterIdentity, Member, Role};

use crate::net::{Net, Port};
use crate::observe::Observer;
use crate::params::Params;

/// How long a machine takes to start.
const BOOT: Duration = Duration::from_millis(300);

/// Masters of a quorum.
pub const MASTERS: u64 = 3;
/// Machines beyond them, which may take the place of one.
pub const SPARES: u64 = SPARES_TO_REPLACE + SPARES_TO_RECOVER + SPARES_FOR_DAMAGED;
/// Of these, as many are there for standbys that are replaced.
pub const SPARES_TO_REPLACE: u64 = 2;
/// And as many for majorities that are lost.
pub const SPARES_TO_RECOVER: u64 = 4;
/// And as many for masters whose disk is damaged.
pub const SPARES_FOR_DAMAGED: u64 = 2;
/// After which an unfinished put may be preempted.
pub const DISCARD_AFTER: Duration = Duration::from_secs(3);
/// Longest lease.
pub const LEASE_MAX: Duration = Duration::from_millis(1_500);
/// Silence after which a datanode is suspect.
pub const SUSPECT_AFTER: Duration = Duration::from_millis(800);
/// Silence after which its replicas are dropped.
pub const FORGET_AFTER: Duration = Duration::from_secs(20);

/// Where a master listens.
pub fn address(id: u64) -> Address {
    let port = u16::try_from(10_000 + id).unwrap_or(u16::MAX);
    Address::new("127.0.0.1", port).unwrap_or_else(|_| unreachable!("a loopback address is one"))
}

/// How masters are started that are not among the first three.
#[derive(Default)]
pub struct Starts {
    /// These wait to be taken in when they are started with nothing.
    joining: BTreeSet<u64>,
    /// This one went on alone, and is told of nobody else.
    alone: Option<u64>,
}

/// The quorum. Cheap to clone.
#[derive(Clone)]
pub struct Quorum {
    cluster: SimCluster<Machine>,
    net: Net,
    params: Arc<Params>,
    running: Arc<Mutex<BTreeMap<u64, Running>>>,
    /// Being started.
    starting: Arc<Mutex<BTreeSet<u64>>>,
    /// Those that are to run: members, and whoever is being taken in or let go.
    enrolled: Arc<Mutex<BTreeSet<u64>>>,
    starts: Arc<Mutex<Starts>>,
    skew: Arc<BTreeMap<u64, i64>>,
}

/// A saved state of the directory.
#[derive(Clone)]
pub struct Image {
    file: SnapshotFile,
    index: u64,
    of: ClusterIdentity,
}

/// Who is made from an image.
const FIRST: u64 = 1;

/// One running master.
#[derive(Clone)]
pub struct Running {
    /// Its machine.
    pub machine: Arc<SimMachine>,
    /// Consensus.
    pub node: SimNode<Machine>,
    /// The service.
    pub master: Master,
}

fn options(id: u64, params: &Params, dir: &Path) -> MasterOptions {
    let members = (1..=MASTERS).map(|id| Member { node_id: NodeId(id), address: address(id) }).collect();
    let mut options = MasterOptions::new(NodeId(id), dir.to_owned(), address(id), address(id), members);
    options.election = params.election;
    options.lease_ttl_default = LEASE_MAX / 2;
    options.lease_ttl_max = LEASE_MAX;
    options.failover_reclaim = params.reclaim;
    options.put_start_discard_timeout = DISCARD_AFTER;
    options.node_heartbeat_interval = Duration::from_millis(80);
    options.node_suspect_timeout = SUSPECT_AFTER;
    options.node_forget_timeout = FORGET_AFTER;
    options.checkpoint_interval = Duration::from_millis(700);
    options.audit_interval = Duration::from_millis(300);
    options.keep_log_entries = params.keep_entries;
    options
}

impl Quorum {
    /// Three masters, none started.
    pub fn prepare(params: &Params, dir: &Path) -> (SimCluster<Machine>, Arc<Params>, Arc<Mutex<Starts>>) {
        let starts = Starts { joining: (MASTERS + 1..=MASTERS + SPARES).collect(), alone: None };
        let starts = Arc::new(Mutex::new(starts));
        let how = starts.clone();
        let params = Arc::new(params.clone());
        let (for_machine, for_options) = (params.clone(), params.clone());
        let machine = move || {
            let options = options(1, &for_machine, Path::new(""));
            sim::machine(&options).unwrap_or_else(|error| panic!("a machine with default settings: {error}"))
        };
        let adjust = move |raft: &mut tidepool_raft::Options| {
            let wanted = sim::raft_options(&options(raft.node_id.0, &for_options, &raft.data_dir));
            let (own, how) = (raft.node_id, how.lock());
            raft.join = how.joining.contains(&own.0);
            raft.members.truncate(if raft.join { 0 } else { MASTERS as usize });
            raft.members.retain(|member| how.alone != Some(own.0) || member.node_id == own);
            raft.election = wanted.election;
            raft.agreement = wanted.agreement;
            raft.keep_log_entries = for_options.keep_entries;
            raft.snapshot_log_entries = for_options.snapshot_entries;
        };
        (SimCluster::new(params.seed, MASTERS + SPARES, dir, machine, adjust), params, starts)
    }

    /// Over these wires.
    pub fn over(
        (cluster, params, starts): (SimCluster<Machine>, Arc<Params>, Arc<Mutex<Starts>>),
        net: Net,
        skew: BTreeMap<u64, i64>,
    ) -> Quorum {
        for id in 1..=MASTERS + SPARES {
            if let Some(disk) = cluster.disk(id) {
                disk.set_sync_delay(Duration::from_micros(params.sync_us));
            }
        }
        let enrolled = Arc::new(Mutex::new((1..=MASTERS).collect()));
        let (running, starting) = (Arc::default(), Arc::default());
        Quorum { cluster, net, params, running, starting, enrolled, starts, skew: Arc::new(skew) }
    }

    /// All masters are lost with all they hold, and the first one is made from `image`, alone; the others join it later. Answers how
    /// many keys have an object in it.
    pub fn restore(&self, image: &Image, observer: &Observer) -> Result<u64, String> {
        for id in 1..=MASTERS + SPARES {
            self.kill(id, 0, false);
            self.cluster.clear(id).map_err(|error| error.to_string())?;
            if let Some(disk) = self.cluster.disk(id) {
                disk.set_sync_delay(Duration::from_micros(self.params.sync_us));
            }
        }
        self.net.begin_anew();
        let restored = from_snapshot(&image.file, image.of, NodeId(FIRST), address(FIRST));
        let now = self.cluster.restore(FIRST, restored.map_err(|error| error.to_string())?);
        let now = now.map_err(|error| error.to_string())?;
        {
            let mut starts = self.starts.lock();
            starts.alone = None;
            starts.joining.extend((1..=MASTERS).filter(|id| *id != FIRST));
            starts.joining.remove(&FIRST);
        }
        *self.enrolled.lock() = BTreeSet::from([FIRST]);
        Ok(observer.restored(image.index, now.history.0))
    }

    /// Every master loses power, and all but one are lost for good. That one has what it had synced and `kept` of what came after, and
    /// goes on alone with it (I1): whoever is to help it is empty and has another id.
    pub fn go_on_alone(&self, last: u64, kept: usize, observer: &Observer) -> Result<(), String> {
        self.kill(last, kept, false);
        for id in (1..=MASTERS + SPARES).filter(|id| *id != last) {
            self.kill(id, 0, false);
            self.cluster.clear(id).map_err(|error| error.to_string())?;
        }
        self.net.begin_anew();
        let found = self.cluster.last_one(last).map_err(|error| error.to_string())?;
        let committed = found.facts.committed_index;
        let payload = go_on(&found).map_err(|error| error.to_string())?;
        let now = self.cluster.go_on_alone(found, payload).map_err(|error| error.to_string())?;
        self.starts.lock().alone = Some(last);
        *self.enrolled.lock() = BTreeSet::from([last]);
        observer.goes_on_alone(committed, now.history.0);
        Ok(())
    }

    /// The newest image that may be published: of the present history, and agreed on.
    pub fn image(&self) -> Option<Image> {
        let images = self.running().into_iter().filter_map(|running| {
            let file = running.node.agreed_snapshot()?;
            let index = file.position()?.index;
            // What was restored is of the history before.
            let began = running.master.directory().ancestors().iter().last().map_or(0, |ancestor| ancestor.until);
            (index > began).then(|| Image { file, index, of: running.node.identity() })
        });
        images.max_by_key(|image| image.index)
    }

    /// Those that are to run, by id.
    pub fn enrolled(&self) -> Vec<u64> {
        self.enrolled.lock().iter().copied().collect()
    }

    /// Starts an empty machine that waits to be taken in.
    pub async fn enrol(&self, id: u64) -> Result<(), String> {
        self.enrolled.lock().insert(id);
        self.start(id).await
    }

    /// A master that left the quorum, or was never taken in, is switched off for good.
    pub fn dismiss(&self, id: u64) {
        self.enrolled.lock().remove(&id);
        self.kill(id, usize::MAX, false);
    }

    /// Consensus of all.
    pub fn cluster(&self) -> &SimCluster<Machine> {
        &self.cluster
    }

    /// Those that run.
    pub fn running(&self) -> Vec<Running> {
        self.running.lock().values().cloned().collect()
    }

    /// One that runs.
    pub fn get(&self, id: u64) -> Option<Running> {
        self.running.lock().get(&id).cloned()
    }

    /// Whoever leads and is in office.
    pub fn leader(&self) -> Option<Running> {
        let leads = |r: &Running| {
            let leadership = r.node.status().leadership;
            (leadership.role == Role::Leader).then_some(leadership.term)
        };
        self.running().into_iter().filter_map(|r| Some((leads(&r)?, r))).max_by_key(|(term, _)| *term).map(|(_, r)| r)
    }

    /// Starts one.
    pub async fn start(&self, id: u64) -> Result<(), String> {
        // Started twice at once, two members would write one disk.
        if !self.enrolled.lock().contains(&id) || self.get(id).is_some() || !self.starting.lock().insert(id) {
            return Ok(());
        }
        let started = self.boot(id).await;
        self.starting.lock().remove(&id);
        started
    }

    async fn boot(&self, id: u64) -> Result<(), String> {
        // No machine is back in the instant in which it lost power: what was sent to it meanwhile is refused, and its peers notice.
        SimRuntime::sleep(BOOT).await;
        let skew = self.skew.get(&id).copied().unwrap_or(0);
        let machine = SimMachine::new(id, skew, Duration::from_secs(id * 1_000));
        let dir = std::path::PathBuf::new();
        let (cluster, options) = (self.cluster.clone(), options(id, &self.params, &dir));
        let starting = async move {
            let node = cluster.start(id).await.map_err(|error| error.to_string())?;
            let master = sim::start(node.clone(), options).map_err(|error| error.to_string())?;
            Ok::<_, String>((node, master))
        };
        let (node, master) = On::new(machine.clone(), starting).await?;
        self.net.listen(&address(id).to_string(), id, Port::Master(machine.clone(), master.faces()));
        let running = node.clone();
        spawn_on(&machine, async move { drop(running.run().await) });
        self.running.lock().insert(id, Running { machine, node, master });
        Ok(())
    }

    /// Power cut: of what was not synced the first `kept` writes survive, and with `torn` half of the next.
    pub fn kill(&self, id: u64, kept: usize, torn: bool) {
        let Some(running) = self.running.lock().remove(&id) else { return };
        self.net.hang_up(&address(id).to_string());
        self.cluster.cut_power(id, kept, torn);
        running.machine.die();
    }
}
