//! Members on simulated machines: started, killed with their unsynced writes, started again.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

#[cfg(feature = "rocksdb")]
use bytes::Bytes;
use parking_lot::Mutex;
use prometheus::Registry;
use tidepool_proto::{Address, NodeId};

use super::host::seed_host;
use super::network::{SimNetwork, World};
use crate::failure::Failure;
use crate::host::Host;
#[cfg(feature = "rocksdb")]
use crate::identity::ClusterIdentity;
use crate::log::{Flushing, LogOptions, LogStore, SimulatedDisk, StoreId};
use crate::machine::StateMachine;
use crate::node::RaftNode;
use crate::open::{OpenError, OpenLog, admits, open, reporter};
use crate::options::{Member, Options};
#[cfg(feature = "rocksdb")]
use crate::recover::LastOne;
use crate::types::SimConfig;

/// A simulated member.
pub type SimNode<M> = RaftNode<SimConfig<<M as StateMachine>::Outcome>, M, SimNetwork<M>>;

/// What a machine held on its disks, away from it.
pub struct Data {
    disk: SimulatedDisk,
    dir: PathBuf,
}

/// Entries cached by a simulated log: little, so that reads from the disk happen.
const CACHE_BYTES: usize = 4 << 10;

/// A cluster of simulated machines. Cheap to clone.
pub struct SimCluster<M: StateMachine> {
    shared: Arc<Shared<M>>,
}

impl<M: StateMachine> Clone for SimCluster<M> {
    fn clone(&self) -> Self {
        SimCluster { shared: self.shared.clone() }
    }
}

struct Shared<M: StateMachine> {
    world: World<M>,
    root: PathBuf,
    members: Vec<Member>,
    machine: Box<dyn Fn() -> M + Send + Sync>,
    adjust: Box<dyn Fn(&mut Options) + Send + Sync>,
    disks: Mutex<BTreeMap<u64, SimulatedDisk>>,
    nodes: Mutex<BTreeMap<u64, SimNode<M>>>,
}

impl<M: StateMachine> SimCluster<M> {
    /// `size` members, none started. Identity and snapshots lie below `root`; `adjust` changes settings.
    pub fn new(
        seed: u64,
        size: u64,
        root: &Path,
        machine: impl Fn() -> M + Send + Sync + 'static,
        adjust: impl Fn(&mut Options) + Send + Sync + 'static,
    ) -> SimCluster<M> {
        seed_host(seed);
        let members = (1..=size).filter_map(|id| Some(Member { node_id: NodeId(id), address: address(id)? })).collect();
        let disks = (1..=size).map(|id| (id, SimulatedDisk::new(StoreId(u128::from(seed) << 64 | u128::from(id)))));
        let shared = Shared {
            world: World::new(seed),
            root: root.to_owned(),
            members,
            machine: Box::new(machine),
            adjust: Box::new(adjust),
            disks: Mutex::new(disks.collect()),
            nodes: Mutex::default(),
        };
        SimCluster { shared: Arc::new(shared) }
    }

    /// The wires.
    pub fn world(&self) -> &World<M> {
        &self.shared.world
    }

    /// Ids of all members, started or not.
    pub fn ids(&self) -> Vec<u64> {
        self.shared.members.iter().map(|m| m.node_id.0).collect()
    }

    /// A running member.
    pub fn node(&self, id: u64) -> Option<SimNode<M>> {
        self.shared.nodes.lock().get(&id).cloned()
    }

    /// All running members.
    pub fn nodes(&self) -> Vec<SimNode<M>> {
        self.shared.nodes.lock().values().cloned().collect()
    }

    /// A member's disk.
    pub fn disk(&self, id: u64) -> Option<SimulatedDisk> {
        self.shared.disks.lock().get(&id).cloned()
    }

    /// Opens a member and lets it be reached; [`RaftNode::run`] is the caller's.
    pub async fn start(&self, id: u64) -> Result<SimNode<M>, OpenError> {
        let shared = &self.shared;
        let missing = || OpenError::corrupt(format!("there is no machine {id}"));
        let own = shared.members.iter().find(|m| m.node_id.0 == id).ok_or_else(missing)?;
        let disk = self.disk(id).ok_or_else(missing)?;
        let dir = shared.root.join(id.to_string());
        std::fs::create_dir_all(&dir).map_err(OpenError::storage)?;
        let mut options = Options::new(own.node_id, dir.clone(), own.address.clone(), shared.members.clone());
        (shared.adjust)(&mut options);
        let options = options.checked()?;
        let (failure, registry) = (Arc::new(Failure::new()), Registry::new());
        let (fatal, closed) = reporter(&failure);
        let machine = Arc::new((shared.machine)());
        let admits = admits(&machine);
        let log_options = LogOptions { flushing: Flushing::Task, cache_bytes: CACHE_BYTES, admits, fatal };
        let (store, report) = LogStore::open(Arc::new(disk), &dir, log_options, &registry)?;
        let log = OpenLog { store, report, failure, registry, closed };
        let world = shared.world.clone();
        let node = open(options, machine, log, |identity| SimNetwork::new(id, identity, world)).await?;
        shared.world.listen(id, own.address.to_string(), node.inbound());
        shared.nodes.lock().insert(id, node.clone());
        Ok(node)
    }

    /// Power cut: of what was not synced the first `kept` writes survive, and with `torn` half of the next.
    pub async fn kill(&self, id: u64, kept: usize, torn: bool) {
        let node = self.shared.nodes.lock().remove(&id);
        self.shared.world.hang_up(id);
        let rebooted = self.disk(id).map(|disk| disk.crash(kept, torn));
        if let Some(disk) = rebooted {
            self.shared.disks.lock().insert(id, disk);
        }
        if let Some(node) = node {
            node.shutdown().await;
        }
    }

    /// Power cut, as [`SimCluster::kill`], of a machine whose tasks end by themselves: nothing is waited for.
    pub fn cut_power(&self, id: u64, kept: usize, torn: bool) {
        drop(self.shared.nodes.lock().remove(&id));
        self.shared.world.hang_up(id);
        if let Some(disk) = self.disk(id) {
            let rebooted = disk.crash(kept, torn);
            self.shared.disks.lock().insert(id, rebooted);
        }
    }

    /// Stops a member and gives its machine other data, or none; answers what it held.
    pub async fn exchange(&self, id: u64, data: Option<Data>) -> std::io::Result<Data> {
        self.kill(id, usize::MAX, false).await;
        let own = self.shared.root.join(id.to_string());
        let number = SimConfig::<M::Outcome>::random();
        let aside = self.shared.root.join(format!("{id}-{number:032x}"));
        std::fs::rename(&own, &aside)?;
        let disk = match data {
            Some(data) => {
                std::fs::rename(&data.dir, &own)?;
                data.disk
            }
            None => SimulatedDisk::new(StoreId(number)),
        };
        let held = self.shared.disks.lock().insert(id, disk);
        let held = held.ok_or_else(|| std::io::Error::other(format!("there is no machine {id}")))?;
        Ok(Data { disk: held, dir: aside })
    }

    /// Takes a member's data away: an empty machine under the same id.
    pub async fn wipe(&self, id: u64) -> std::io::Result<()> {
        self.kill(id, 0, false).await;
        let fresh = SimulatedDisk::new(StoreId(u128::from(id) << 96 | 0xf5e5));
        self.shared.disks.lock().insert(id, fresh);
        std::fs::remove_dir_all(self.shared.root.join(id.to_string()))
    }
}

#[cfg(feature = "rocksdb")]
impl<M: StateMachine> SimCluster<M> {
    /// Gives an empty machine under this id the data of a saved state, as a restore does (I1). Its member must not run.
    pub fn restore(&self, id: u64, restored: crate::restore::Restored) -> Result<ClusterIdentity, OpenError> {
        self.clear(id)?;
        let disk = self.disk(id).ok_or_else(|| OpenError::corrupt(format!("there is no machine {id}")))?;
        let cluster = crate::restore::fresh_identity(SimConfig::<M::Outcome>::random);
        restored.make_on(&self.shared.root.join(id.to_string()), disk, cluster)?;
        Ok(cluster)
    }

    /// What a stopped member holds, for whoever would have it go on alone.
    pub fn last_one(&self, id: u64) -> Result<LastOne<SimulatedDisk>, OpenError> {
        let disk = self.disk(id).ok_or_else(|| OpenError::corrupt(format!("there is no machine {id}")))?;
        LastOne::open_on(&self.shared.root.join(id.to_string()), disk)
    }

    /// Has a stopped member go on alone (I1), as `tidepool member recover` does.
    pub fn go_on_alone(&self, last: LastOne<SimulatedDisk>, payload: Bytes) -> Result<ClusterIdentity, OpenError> {
        last.go_on_as(crate::restore::fresh_identity(SimConfig::<M::Outcome>::random), payload)
    }

    /// Takes away what a machine holds, whose member does not run.
    pub fn clear(&self, id: u64) -> Result<(), OpenError> {
        let own = self.shared.root.join(id.to_string());
        match std::fs::remove_dir_all(own) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(OpenError::storage(error)),
            _ => {}
        }
        let fresh = SimulatedDisk::new(StoreId(SimConfig::<M::Outcome>::random()));
        self.shared.disks.lock().insert(id, fresh);
        Ok(())
    }
}

fn address(id: u64) -> Option<Address> {
    Address::new("127.0.0.1", u16::try_from(10_000 + id).ok()?).ok()
}
