//! Hosts whose wall clock jumps, whose processor is taken away or whose memory ends.

use anyhow::{Result, anyhow, ensure};

use super::{Nemesis, Who, stamped};
use crate::cluster::Cluster;
use crate::lab::{CpuQuota, Knob, MemoryLimit};
use crate::process::Fault;

/// The wall clock of a master jumps. Needs built-in faults.
pub struct WallClockJump {
    /// Whose.
    pub who: Who,
    /// How far.
    pub by_ms: i64,
}

impl Nemesis for WallClockJump {
    fn describe(&self) -> String {
        format!("wall clock of {} jumps by {} s", self.who.name(), self.by_ms / 1000)
    }

    fn inject(&mut self, cluster: &mut Cluster) -> Result<Fault> {
        let role = self.who.of(cluster)?;
        stamped(|| role.preload()?.set(Knob::WallOffsetMs, self.by_ms))
    }

    fn heal(&mut self, cluster: &mut Cluster) -> Result<()> {
        self.who.of(cluster)?.preload()?.set(Knob::WallOffsetMs, 0)
    }

    fn evidence(&mut self, cluster: &mut Cluster) -> Result<String> {
        let read = self.who.of(cluster)?.preload()?.get(Knob::ClockHits)?;
        ensure!(read > 0, "{} never looked at its wall clock", self.who.name());
        Ok(format!("{} read the wrong clock {read} times", self.who.name()))
    }
}

/// A role gets a small share of one processor.
pub struct Starve {
    /// Who.
    pub who: Who,
    /// Per cent of one processor.
    pub percent: u64,
    quota: Option<CpuQuota>,
}

impl Starve {
    /// Leaves this role so many per cent of one processor.
    pub fn to(who: Who, percent: u64) -> Starve {
        Starve { who, percent, quota: None }
    }
}

impl Nemesis for Starve {
    fn describe(&self) -> String {
        format!("{} gets {} % of a processor", self.who.name(), self.percent)
    }

    fn inject(&mut self, cluster: &mut Cluster) -> Result<Fault> {
        let id = self.who.of(cluster)?.id().ok_or_else(|| anyhow!("{} was never started", self.who.name()))?;
        stamped(|| {
            self.quota = Some(CpuQuota::limit(id, self.percent)?);
            Ok(())
        })
    }

    fn heal(&mut self, _: &mut Cluster) -> Result<()> {
        self.quota = None;
        Ok(())
    }

    fn evidence(&mut self, _: &mut Cluster) -> Result<String> {
        let quota = self.quota.as_ref().ok_or_else(|| anyhow!("{} is not starved", self.who.name()))?;
        let throttled = quota.throttled()?;
        ensure!(throttled > 0, "{} was never held back", self.who.name());
        Ok(format!("{} was held back {throttled} times", self.who.name()))
    }
}

/// A role may take hardly any more memory, and is killed by the kernel when it does.
pub struct OutOfMemory {
    /// Who.
    pub who: Who,
    /// How much more it may take.
    pub more_bytes: u64,
    limit: Option<MemoryLimit>,
}

impl OutOfMemory {
    /// For this role.
    pub fn of(who: Who, more_bytes: u64) -> OutOfMemory {
        OutOfMemory { who, more_bytes, limit: None }
    }
}

impl Nemesis for OutOfMemory {
    fn describe(&self) -> String {
        format!("{} may take {} bytes of memory more", self.who.name(), self.more_bytes)
    }

    fn inject(&mut self, cluster: &mut Cluster) -> Result<Fault> {
        let id = self.who.of(cluster)?.id().ok_or_else(|| anyhow!("{} was never started", self.who.name()))?;
        stamped(|| {
            self.limit = Some(MemoryLimit::limit(id, self.more_bytes)?);
            Ok(())
        })
    }

    fn heal(&mut self, cluster: &mut Cluster) -> Result<()> {
        self.limit = None;
        let role = self.who.of(cluster)?;
        if role.is_running()? { Ok(()) } else { role.start() }
    }

    fn evidence(&mut self, cluster: &mut Cluster) -> Result<String> {
        let limit = self.limit.as_ref().ok_or_else(|| anyhow!("{} is not limited", self.who.name()))?;
        let met = limit.met()?;
        ensure!(met > 0, "{} never met its limit", self.who.name());
        let end = self.who.of(cluster)?.process()?.exited()?;
        Ok(format!("{} met its limit {met} times and ended: {end:?}", self.who.name()))
    }
}
