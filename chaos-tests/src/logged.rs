//! A process that logs its calls: started as a worker, told to stop by the end of its input, its log read when it has ended.

use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::ChildStdin;
use std::time::Duration;

use anyhow::{Result, bail};
use serde::de::DeserializeOwned;

use crate::process::{Input, Launch, Lifetime, Process};
use crate::record::read_all;
use crate::worker::WorkerSpec;

/// How long such a process may take to end after being told to, beyond the deadline of its calls.
pub(crate) const STOP_WITHIN: Duration = Duration::from_secs(20);

/// A running worker and where it logs.
pub(crate) struct Logged {
    pub(crate) process: Process,
    input: Option<ChildStdin>,
    pub(crate) log: PathBuf,
}

impl Logged {
    /// Starts the binary as this worker; its output goes beside its log of calls.
    pub(crate) fn start(binary: &Path, name: &str, log: PathBuf, spec: &WorkerSpec) -> Result<Logged> {
        let launch = Launch {
            name: name.to_owned(),
            binary: binary.to_owned(),
            arguments: vec!["load-worker".into(), serde_json::to_string(spec)?],
            environment: Vec::new(),
            namespace: None,
            log: log.with_extension("log"),
        };
        let mut process = Process::spawn(&launch, Lifetime::WithOwner, Input::Pipe)?;
        let input = process.take_input();
        Ok(Logged { process, input, log })
    }

    /// Tells it to stop.
    pub(crate) fn tell_to_stop(&mut self) {
        self.input.take();
    }

    /// Waits until it has ended; answers what it logged. One that was killed has logged what it could.
    pub(crate) async fn ended<T: DeserializeOwned>(&mut self, within: Duration) -> Result<Vec<T>> {
        let status = self.process.wait(within).await?;
        if !status.success() && status.signal() != Some(9) {
            bail!("{} failed ({status}); its log ends:\n{}", self.process.name(), self.process.log_tail());
        }
        if self.log.exists() { read_all(&self.log) } else { Ok(Vec::new()) }
    }
}
