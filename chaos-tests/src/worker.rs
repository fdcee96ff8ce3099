//! What a child process does: the hidden `tidepool load-worker SPEC` command.
//!
//! The binary re-executes itself for everything that has to be a process of its own: roles that must die with the
//! harness, load clients whose logs must survive their victims, and the far end of the raw-socket ceiling.

use std::io::Read;
use std::os::fd::AsFd;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context, Result, bail};
use rustix::process::{Signal, getppid, set_parent_process_death_signal};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use serde::{Deserialize, Serialize};

use crate::bench::raw_socket::{self, RawServerSpec};
use crate::bulk::{self, BulkSpec};
use crate::contest::{self, ContestSpec};
use crate::lab::RelaySpec;
use crate::load::{self, LoadSpec};

/// Arguments of `tidepool load-worker`.
#[derive(Clone, Debug, clap::Args)]
pub struct WorkerArgs {
    /// What to do, as JSON
    pub spec: String,
}

/// What to do.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum WorkerSpec {
    /// Become another program that dies with its parent.
    Exec(ExecSpec),
    /// Be one client under load.
    Load(LoadSpec),
    /// Be the bulk writer beside a load.
    Bulk(BulkSpec),
    /// Be one of those who contend for a few keys.
    Contest(ContestSpec),
    /// Be the far end of the raw-socket ceiling.
    RawServer(RawServerSpec),
    /// Pass on connections, late or slowly.
    Relay(RelaySpec),
}

/// A program that dies with its parent.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ExecSpec {
    /// Who must be alive.
    pub parent: u32,
    /// Program.
    pub program: PathBuf,
    /// Its arguments.
    pub arguments: Vec<String>,
    /// Network namespace it is to be in.
    #[serde(default)]
    pub namespace: Option<PathBuf>,
}

/// Runs the command. Call it before any runtime or thread exists.
pub fn run(args: &WorkerArgs) -> Result<()> {
    let spec: WorkerSpec = serde_json::from_str(&args.spec).context("load-worker: the specification is not valid")?;
    match spec {
        WorkerSpec::Exec(spec) => become_program(&spec),
        WorkerSpec::Load(spec) => load::run_client(spec),
        WorkerSpec::Bulk(spec) => bulk::run_client(spec),
        WorkerSpec::Contest(spec) => contest::run_client(spec),
        WorkerSpec::RawServer(spec) => raw_socket::serve(&spec),
        WorkerSpec::Relay(spec) => crate::lab::serve_relay(&spec),
    }
}

/// Does the work of one client process, on one thread beside this one.
pub(crate) fn block_on(work: impl Future<Output = Result<()>>) -> Result<()> {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
    runtime.block_on(work)
}

/// Becomes true when standard input ends: the owner let go.
pub(crate) fn input_has_ended() -> Arc<AtomicBool> {
    let ended = Arc::new(AtomicBool::new(false));
    let noticing = ended.clone();
    std::thread::spawn(move || {
        // At end of file or error alike.
        let mut sink = Vec::new();
        std::io::stdin().read_to_end(&mut sink).ok();
        noticing.store(true, Ordering::Relaxed);
    });
    ended
}

fn become_program(spec: &ExecSpec) -> Result<()> {
    set_parent_process_death_signal(Some(Signal::KILL)).context("asking to be killed with the parent")?;
    // The parent may have died before the request above.
    if getppid().map(|pid| pid.as_raw_nonzero().get() as u32) != Some(spec.parent) {
        bail!("the parent {} is gone", spec.parent);
    }
    if let Some(path) = &spec.namespace {
        let file = std::fs::File::open(path).with_context(|| format!("network namespace {}", path.display()))?;
        move_into_link_name_space(file.as_fd(), Some(LinkNameSpaceType::Network))
            .with_context(|| format!("entering the network namespace {}", path.display()))?;
    }
    // Survives execve(2); cleared only by set-user-id programs.
    let error = Command::new(&spec.program).args(&spec.arguments).exec();
    Err(error).with_context(|| format!("executing {}", spec.program.display()))
}
