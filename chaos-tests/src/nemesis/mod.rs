//! Faults, each a thing that can be done to a pool and undone: to a process ([`process`]), its links ([`network`]), its disk
//! ([`disk`]) or its clock and processor ([`host`]).
//!
//! A fault that was ordered is not yet a fault that happened: [`Nemesis::evidence`] fails unless it did. Tests ask for it
//! before they believe that nothing went wrong.

pub mod disk;
pub mod host;
pub mod network;
pub mod process;

use anyhow::{Result, anyhow};

use crate::clock::monotonic_ns;
use crate::cluster::{Cluster, Ground, Role};
use crate::lab::Lab;
use crate::process::Fault;

/// Something that breaks a part of a pool, and mends it again.
pub trait Nemesis: Send {
    /// What it does, to whom.
    fn describe(&self) -> String;
    /// Does it; answers when.
    fn inject(&mut self, cluster: &mut Cluster) -> Result<Fault>;
    /// Undoes it, and starts what it ended. Returns when that is ordered, not when the pool is whole.
    fn heal(&mut self, cluster: &mut Cluster) -> Result<()>;
    /// What shows that it really happened. Asked between `inject` and `heal`.
    fn evidence(&mut self, cluster: &mut Cluster) -> Result<String>;
    /// Whether a datanode is away or slow by it, so that what is there may be missed meanwhile.
    fn strikes_a_datanode(&self) -> bool {
        false
    }
}

/// A role of a pool.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Who {
    /// The master at this place.
    Master(usize),
    /// The datanode at this place.
    Datanode(usize),
}

impl Who {
    /// The role.
    pub fn of(self, cluster: &mut Cluster) -> Result<&mut Role> {
        let (found, kind, at) = match self {
            Who::Master(at) => (cluster.masters.get_mut(at), "master", at),
            Who::Datanode(at) => (cluster.datanodes.get_mut(at), "datanode", at),
        };
        found.ok_or_else(|| anyhow!("the pool has no {kind} at place {at}"))
    }

    /// Whether it is a datanode.
    pub fn is_datanode(self) -> bool {
        matches!(self, Who::Datanode(_))
    }

    /// Its name.
    pub fn name(self) -> String {
        match self {
            Who::Master(at) => format!("master-{}", at + 1),
            Who::Datanode(at) => format!("datanode-{}", at + 1),
        }
    }
}

/// The laboratory that a pool stands in.
pub fn lab_of(cluster: &Cluster) -> Result<&Lab> {
    match &cluster.options().ground {
        Ground::Lab(lab) => Ok(lab),
        Ground::Loopback => Err(anyhow!("this fault needs a laboratory: links and disks of the roles' own")),
    }
}

/// Does something, and stamps it right before and right after.
fn stamped(act: impl FnOnce() -> Result<()>) -> Result<Fault> {
    let at_ns = monotonic_ns();
    act()?;
    Ok(Fault { at_ns, certain_ns: monotonic_ns() })
}
