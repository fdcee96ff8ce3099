//! Processes that die, hang or flap.

use std::os::unix::process::ExitStatusExt;

use anyhow::{Result, ensure};

use super::{Nemesis, Who, stamped};
use crate::cluster::Cluster;
use crate::process::Fault;

/// SIGKILL to some roles at once; healed by starting them again.
pub struct Kill(pub Vec<Who>);

impl Nemesis for Kill {
    fn describe(&self) -> String {
        format!("SIGKILL to {}", names(&self.0))
    }

    fn inject(&mut self, cluster: &mut Cluster) -> Result<Fault> {
        let mut faults = Vec::new();
        for who in &self.0 {
            faults.push(who.of(cluster)?.kill()?);
        }
        Ok(Fault {
            at_ns: faults.iter().map(|fault| fault.at_ns).min().unwrap_or_default(),
            certain_ns: faults.iter().map(|fault| fault.certain_ns).max().unwrap_or_default(),
        })
    }

    fn heal(&mut self, cluster: &mut Cluster) -> Result<()> {
        self.0.iter().try_for_each(|who| who.of(cluster)?.start())
    }

    fn evidence(&mut self, cluster: &mut Cluster) -> Result<String> {
        for who in &self.0 {
            let status = who.of(cluster)?.process()?.exited()?;
            ensure!(status.and_then(|status| status.signal()) == Some(9), "{} was not killed: {status:?}", who.name());
        }
        Ok(format!("{} gone by signal 9", names(&self.0)))
    }

    fn strikes_a_datanode(&self) -> bool {
        self.0.iter().any(|who| who.is_datanode())
    }
}

/// SIGSTOP: connections stay, nothing answers. Healed by SIGCONT.
pub struct Pause(pub Who);

impl Nemesis for Pause {
    fn describe(&self) -> String {
        format!("SIGSTOP to {}", self.0.name())
    }

    fn inject(&mut self, cluster: &mut Cluster) -> Result<Fault> {
        self.0.of(cluster)?.process()?.pause()
    }

    fn heal(&mut self, cluster: &mut Cluster) -> Result<()> {
        self.0.of(cluster)?.process()?.resume().map(|_| ())
    }

    fn evidence(&mut self, cluster: &mut Cluster) -> Result<String> {
        let process = self.0.of(cluster)?.process()?;
        ensure!(process.is_stopped()?, "{} is not stopped", self.0.name());
        Ok(format!("{} in state T", self.0.name()))
    }

    fn strikes_a_datanode(&self) -> bool {
        self.0.is_datanode()
    }
}

/// The data directory of a role that is down is emptied; it is started as if nothing had happened.
pub struct Wipe(pub Who);

impl Nemesis for Wipe {
    fn describe(&self) -> String {
        format!("{} killed, its disk wiped", self.0.name())
    }

    fn inject(&mut self, cluster: &mut Cluster) -> Result<Fault> {
        let role = self.0.of(cluster)?;
        let fault = role.kill()?;
        std::fs::remove_dir_all(&role.data_dir)?;
        Ok(fault)
    }

    fn heal(&mut self, cluster: &mut Cluster) -> Result<()> {
        self.0.of(cluster)?.start()
    }

    fn evidence(&mut self, cluster: &mut Cluster) -> Result<String> {
        let role = self.0.of(cluster)?;
        ensure!(!role.data_dir.exists(), "{} still exists", role.data_dir.display());
        Ok("its data directory is gone".into())
    }

    fn strikes_a_datanode(&self) -> bool {
        self.0.is_datanode()
    }
}

/// A role that dies and returns again and again; one `inject` is one death and return.
pub struct Flap {
    /// Who.
    pub who: Who,
    /// Deaths so far.
    pub deaths: u32,
}

impl Nemesis for Flap {
    fn describe(&self) -> String {
        format!("{} dies and returns", self.who.name())
    }

    fn inject(&mut self, cluster: &mut Cluster) -> Result<Fault> {
        let role = self.who.of(cluster)?;
        let fault = role.kill()?;
        self.deaths += 1;
        stamped(|| role.start())?;
        Ok(fault)
    }

    fn heal(&mut self, cluster: &mut Cluster) -> Result<()> {
        let role = self.who.of(cluster)?;
        if !role.is_running()? {
            role.start()?;
        }
        Ok(())
    }

    fn evidence(&mut self, _: &mut Cluster) -> Result<String> {
        ensure!(self.deaths > 0, "{} never died", self.who.name());
        Ok(format!("{} died {} times", self.who.name(), self.deaths))
    }

    fn strikes_a_datanode(&self) -> bool {
        self.who.is_datanode()
    }
}

fn names(all: &[Who]) -> String {
    all.iter().map(|who| who.name()).collect::<Vec<_>>().join(", ")
}
