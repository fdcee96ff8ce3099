//! One role process of a pool: how and where it is started, and the running child if there is one.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Result, anyhow, bail};

use super::ClusterOptions;
use super::place::Place;
use crate::lab::{Disk, Preload, ROLE};
use crate::process::{Fault, Input, Launch, Lifetime, Process, Signal, Usage};

/// One role process: how it is started, and the running child if there is one.
pub struct Role {
    launch: Launch,
    lifetime: Lifetime,
    process: Option<Process>,
    /// RPC (and data) address.
    pub rpc: SocketAddr,
    /// HTTP address.
    pub http: SocketAddr,
    /// Data directory.
    pub data_dir: PathBuf,
    disk: Option<Arc<Disk>>,
    preload: Option<Arc<Preload>>,
}

impl Role {
    pub(super) fn describe(
        options: &ClusterOptions,
        name: String,
        place: Place,
        own: &[&str],
        extra: &[String],
    ) -> Role {
        let mut arguments: Vec<String> = own.iter().map(|word| word.to_string()).collect();
        for (flag, value) in [
            ("--listen", place.listen.to_string()),
            ("--http-port", place.http.port().to_string()),
            ("--data-dir", place.data_dir.display().to_string()),
        ] {
            arguments.extend([flag.to_owned(), value]);
        }
        if place.rpc != place.listen {
            arguments.extend(["--advertise".to_owned(), place.rpc.to_string()]);
        }
        arguments.extend(extra.iter().cloned());
        let log = options.work_dir.join(format!("{name}.log"));
        let mut environment = place.preload.as_ref().map(|preload| preload.environment.clone()).unwrap_or_default();
        environment.push((ROLE.to_owned(), name.clone()));
        let Place { listen: _, rpc, http, namespace, data_dir, disk, preload } = place;
        let launch = Launch { name, binary: options.binary.clone(), arguments, environment, namespace, log };
        Role { launch, lifetime: options.lifetime, process: None, rpc, http, data_dir, disk, preload }
    }

    /// Starts it, at the same addresses and over the same data directory as before.
    pub fn start(&mut self) -> Result<()> {
        if let Some(process) = self.process.as_mut()
            && process.exited()?.is_none()
        {
            bail!("{} runs already", self.launch.name);
        }
        self.process = Some(Process::spawn(&self.launch, self.lifetime, Input::Null)?);
        Ok(())
    }

    /// From the next start on it has these arguments too.
    pub fn add_arguments(&mut self, arguments: &[&str]) {
        self.launch.arguments.extend(arguments.iter().map(|word| word.to_string()));
    }

    /// The binary of the next start: an upgrade, or the way back.
    pub fn set_binary(&mut self, binary: &Path) {
        self.launch.binary = binary.to_owned();
    }

    /// SIGTERM, and the end that the role chooses; answers when the signal was sent.
    pub async fn stop(&mut self, within: Duration) -> Result<u64> {
        let process = self.process()?;
        let at_ns = process.signal(Signal::TERM)?;
        let status = process.wait(within).await?;
        if !status.success() {
            bail!("{} ended badly ({status}); its log ends:\n{}", self.launch.name, self.log_tail());
        }
        Ok(at_ns)
    }

    fn log_tail(&self) -> String {
        crate::process::log_tail(&self.launch.log)
    }

    /// The same, instead of what an argument of this name was before.
    pub fn set_argument(&mut self, name: &str, value: &str) {
        let arguments = &mut self.launch.arguments;
        if let Some(at) = arguments.iter().position(|word| word == name) {
            arguments.drain(at..arguments.len().min(at + 2));
        }
        self.add_arguments(&[name, value]);
    }

    /// The child, running or ended.
    pub fn process(&mut self) -> Result<&mut Process> {
        self.process.as_mut().ok_or_else(|| anyhow!("{} was never started", self.launch.name))
    }

    /// SIGKILL.
    pub fn kill(&mut self) -> Result<Fault> {
        self.process()?.kill()
    }

    /// CPU and memory.
    pub fn usage(&mut self) -> Result<Usage> {
        self.process()?.usage()
    }

    /// The file system that is this role's alone, where it has one.
    pub fn disk(&self) -> Result<&Disk> {
        self.disk.as_deref().ok_or_else(|| anyhow!("{} has no disk of its own", self.launch.name))
    }

    /// The faults that were built into this role, where they were.
    pub fn preload(&self) -> Result<&Preload> {
        self.preload.as_deref().ok_or_else(|| anyhow!("{} was started without built-in faults", self.launch.name))
    }

    /// Lets the child live on after this value is gone.
    pub(super) fn detach(&mut self) {
        if let Some(process) = self.process.as_mut() {
            process.detach();
        }
    }

    /// Name in messages.
    pub fn name(&self) -> &str {
        &self.launch.name
    }
    /// Process id of the last start.
    pub fn id(&self) -> Option<u32> {
        self.process.as_ref().map(Process::id)
    }
    /// Its log file.
    pub fn log(&self) -> &Path {
        &self.launch.log
    }
    /// Whether it was started and has not ended.
    pub fn is_running(&mut self) -> Result<bool> {
        match self.process.as_mut() {
            Some(process) => Ok(process.exited()?.is_none()),
            None => Ok(false),
        }
    }
}
