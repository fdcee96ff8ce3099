//! A laboratory on one host: every role in a network namespace with an address of its own, every master's disk a small
//! file system, and links, disks, clocks and processors that can be broken from here.
//!
//! All of it hangs on namespaces that only this process and its children are in ([`isolation`]): when the last of them is
//! gone, whatever way, the kernel takes interfaces, mounts and loop devices with it. What it does not take (directories and
//! control groups) carries the owner's process id, so that [`cleanup`] knows whose it was.

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
pub use network::{Direction, Host, Network};
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

impl Lab {
    /// Runs `scenario` in a laboratory of its own, on a thread of its own: everything that it starts is inside.
    /// `Err(Refused)` where this user may not make one; then nothing was done.
    pub fn run<T, F>(scenario: impl FnOnce(Lab) -> F + Send + 'static) -> Result<Result<T>, Refused>
    where
        T: Send + 'static,
        F: Future<Output = Result<T>>,
    {
        isolation::check()?;
        let inside = move || -> Result<Result<T>, Refused> {
            isolation::enter()?;
            Ok((|| {
                let lab = Lab::open()?;
                let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
                let outcome = runtime.block_on(scenario(lab.clone()));
                // Whatever the scenario spawned has let go of its processes when the runtime is gone.
                drop(runtime);
                lab.close();
                outcome
            })())
        };
        match std::thread::spawn(inside).join() {
            Ok(outcome) => outcome,
            Err(panic) => std::panic::resume_unwind(panic),
        }
    }

    fn open() -> Result<Lab> {
        let directory = tempfile::Builder::new().prefix(&cleanup::owned_prefix()).tempdir();
        let directory = directory.context("directory of the laboratory")?;
        let network = Network::open()?;
        Ok(Lab { shared: Arc::new(Shared { directory, network, disks: Mutex::default() }) })
    }

    /// Where its files are; removed with it.
    pub fn directory(&self) -> &Path {
        self.shared.directory.path()
    }

    /// Its links.
    pub fn network(&self) -> &Network {
        &self.shared.network
    }

    /// A file system of its own for the role `name`, mounted.
    pub fn add_disk(&self, name: &str, bytes: u64) -> Result<Arc<Disk>> {
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
