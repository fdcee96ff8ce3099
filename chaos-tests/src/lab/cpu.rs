//! A share of the processor, or so much memory, for one process, by control groups of its own.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use super::{Refused, cleanup};

/// Where control groups of the processor are mounted.
pub(super) const CPU_GROUPS: &str = "/sys/fs/cgroup/cpu";
/// Where those of memory are.
pub(super) const MEMORY_GROUPS: &str = "/sys/fs/cgroup/memory";
/// Time over which the share counts.
const PERIOD_US: u64 = 100_000;

/// Refused where this user may have none.
fn create(group: &Path) -> Result<()> {
    std::fs::create_dir(group).map_err(|error| match error.kind() {
        ErrorKind::PermissionDenied | ErrorKind::NotFound | ErrorKind::ReadOnlyFilesystem => {
            Refused(format!("control group {}: {error}", group.display())).into()
        }
        _ => anyhow::Error::new(error).context(format!("control group {}", group.display())),
    })
}

/// A process that gets no more than a share of one processor. Dropped: it may run as it likes again.
#[derive(Debug)]
pub struct CpuQuota {
    group: PathBuf,
}

impl CpuQuota {
    /// Limits a process to so many per cent of one processor.
    pub fn limit(pid: u32, percent: u64) -> Result<CpuQuota> {
        let group = PathBuf::from(CPU_GROUPS).join(format!("{}{pid}", cleanup::owned_prefix()));
        create(&group)?;
        let quota = CpuQuota { group };
        let write = |file: &str, value: u64| {
            let path = quota.group.join(file);
            std::fs::write(&path, value.to_string()).with_context(|| format!("{}", path.display()))
        };
        write("cpu.cfs_period_us", PERIOD_US)?;
        write("cpu.cfs_quota_us", PERIOD_US * percent / 100)?;
        write("cgroup.procs", u64::from(pid))?;
        Ok(quota)
    }

    /// How often the kernel held it back.
    pub fn throttled(&self) -> Result<u64> {
        let text = std::fs::read_to_string(self.group.join("cpu.stat"))?;
        let line = text.lines().find_map(|line| line.strip_prefix("nr_throttled "));
        Ok(line.and_then(|number| number.parse().ok()).unwrap_or(0))
    }
}

impl Drop for CpuQuota {
    fn drop(&mut self) {
        cleanup::remove_group(&self.group);
    }
}

/// A process that may take so much more memory than it has, and is killed by the kernel when it wants more.
#[derive(Debug)]
pub struct MemoryLimit {
    group: PathBuf,
}

impl MemoryLimit {
    /// Limits what a process takes from now on.
    pub fn limit(pid: u32, more_bytes: u64) -> Result<MemoryLimit> {
        let group = PathBuf::from(MEMORY_GROUPS).join(format!("{}{pid}", cleanup::owned_prefix()));
        create(&group)?;
        let limit = MemoryLimit { group };
        for (file, value) in [("memory.limit_in_bytes", more_bytes), ("cgroup.procs", u64::from(pid))] {
            let path = limit.group.join(file);
            std::fs::write(&path, value.to_string()).with_context(|| format!("{}", path.display()))?;
        }
        Ok(limit)
    }

    /// How often the limit was met.
    pub fn met(&self) -> Result<u64> {
        let text = std::fs::read_to_string(self.group.join("memory.failcnt"))?;
        Ok(text.trim().parse()?)
    }
}

impl Drop for MemoryLimit {
    fn drop(&mut self) {
        cleanup::remove_group(&self.group);
    }
}
