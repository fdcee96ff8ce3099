//! A laboratory on one host: every role in a network namespace with an address of its own, every master's disk a small
//! file system, and links, disks, clocks and processors that can be broken from here.
//!
//! All of it hangs on namespaces that only this process and its children are in ([`isolation`]): when the last of them is
//! gone, whatever way, the kernel takes interfaces, mounts and loop devices with it. What it does not take (directories and
//! control groups) carries the owner's process id, so that [`cleanup`] knows whose it was.
//!
//! Where this user may have no namespaces, the roles stand on loopback behind proxies ([`network`]): links can be cut, late or
//! narrow there too, and what needs more says so ([`Refused`]).

pub mod cleanup;
mod cpu;
mod disk;
mod isolation;
mod network;
mod preload;
mod relay;
mod tools;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result};
use parking_lot::Mutex;

pub use cpu::{CpuQuota, MemoryLimit};
pub use disk::Disk;
pub use isolation::Refused;
pub use network::{Direction, Host, Network, ROLE};
pub use preload::{Knob, Preload};
pub use relay::{Relay, RelaySettings, RelaySpec, serve as serve_relay};

/// Namespaces, links and disks of one pool. Clones share it.
#[derive(Clone)]
pub struct Lab {
    shared: Arc<Shared>,
}

struct Shared {
    directory: tempfile::TempDir,
    network: Network,
    disks: Mutex<BTreeMap<String, Arc<Disk>>>,
}

impl std::fmt::Debug for Lab {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "lab at {}", self.directory().display())
    }
}

/// Variable that chooses: `proxies`, else namespaces where they may be had.
const CHAOS_LAB: &str = "CHAOS_LAB";

fn on_its_own_thread<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    match std::thread::spawn(work).join() {
        Ok(outcome) => outcome,
        Err(panic) => std::panic::resume_unwind(panic),
    }
}

/// Runs `scenario` with a laboratory that is opened for it, and closed after it.
fn inside<T, F: Future<Output = Result<T>>>(
    network: impl FnOnce() -> Result<Network>,
    scenario: impl FnOnce(Lab) -> F,
) -> Result<T> {
    let lab = Lab::open(network)?;
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    let outcome = runtime.block_on(scenario(lab.clone()));
    // Whatever the scenario spawned has let go of its processes when the runtime is gone.
    drop(runtime);
    lab.close();
    outcome
}

impl Lab {
    /// Runs `scenario` in a laboratory of its own: in namespaces where this user may have them and `CHAOS_LAB` is not `proxies`,
    /// else on loopback behind proxies. `Err(Refused)` where it needs what cannot be had here.
    pub fn run<T, F>(scenario: impl FnOnce(Lab) -> F + Send + 'static) -> Result<Result<T>, Refused>
    where
        T: Send + 'static,
        F: Future<Output = Result<T>>,
    {
        let proxies = std::env::var(CHAOS_LAB).is_ok_and(|kind| kind == "proxies");
        if proxies || isolation::check().is_err() {
            return Lab::behind_proxies(scenario);
        }
        Lab::in_namespaces(scenario)
    }

    /// The same, in namespaces or not at all.
    pub fn in_namespaces<T, F>(scenario: impl FnOnce(Lab) -> F + Send + 'static) -> Result<Result<T>, Refused>
    where
        T: Send + 'static,
        F: Future<Output = Result<T>>,
    {
        isolation::check()?;
        on_its_own_thread(move || {
            isolation::enter()?;
            Ok(inside(Network::namespaces, scenario))
        })
    }

    /// The same, behind proxies.
    pub fn behind_proxies<T, F>(scenario: impl FnOnce(Lab) -> F + Send + 'static) -> Result<Result<T>, Refused>
    where
        T: Send + 'static,
        F: Future<Output = Result<T>>,
    {
        on_its_own_thread(move || match inside(|| Ok(Network::proxies()), scenario) {
            Err(error) => match error.downcast_ref::<Refused>() {
                Some(refused) => Err(refused.clone()),
                None => Ok(Err(error)),
            },
            done => Ok(done),
        })
    }

    fn open(network: impl FnOnce() -> Result<Network>) -> Result<Lab> {
        let directory = tempfile::Builder::new().prefix(&cleanup::owned_prefix()).tempdir();
        let directory = directory.context("directory of the laboratory")?;
        Ok(Lab { shared: Arc::new(Shared { directory, network: network()?, disks: Mutex::default() }) })
    }

    /// Where its files are; removed with it.
    pub fn directory(&self) -> &Path {
        self.shared.directory.path()
    }

    /// Its links.
    pub fn network(&self) -> &Network {
        &self.shared.network
    }

    /// A file system of its own for the role `name`, mounted. Needs namespaces.
    pub fn add_disk(&self, name: &str, bytes: u64) -> Result<Arc<Disk>> {
        if let Network::Proxies(_) = self.network() {
            return Err(isolation::check().err().unwrap_or_else(Refused::by_choice).into());
        }
        let disk = Arc::new(Disk::create(self.directory(), name, bytes)?);
        self.shared.disks.lock().insert(name.to_owned(), disk.clone());
        Ok(disk)
    }

    /// The file system of `name`, if it has one of its own.
    pub fn disk(&self, name: &str) -> Option<Arc<Disk>> {
        self.shared.disks.lock().get(name).cloned()
    }

    fn close(&self) {
        for disk in self.shared.disks.lock().values() {
            disk.detach();
        }
    }
}
