//! Disks that are full, slow, broken, torn, read-only, corrupted, or without power.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};

use super::{Nemesis, Who, stamped};
use crate::cluster::Cluster;
use crate::lab::Knob;
use crate::process::Fault;

/// Errors of Linux, as the page of built-in faults takes them.
const EIO: i64 = 5;

/// The hosts of some roles lose power at once: what was not durable is gone, and so is the process. Healed by booting.
pub struct PowerCut(pub Vec<Who>);

impl Nemesis for PowerCut {
    fn describe(&self) -> String {
        format!("power cut of {} hosts", self.0.len())
    }

    fn inject(&mut self, cluster: &mut Cluster) -> Result<Fault> {
        let at_ns = crate::clock::monotonic_ns();
        for who in &self.0 {
            who.of(cluster)?.disk()?.cut_power()?;
        }
        let mut certain_ns = at_ns;
        for who in &self.0 {
            let role = who.of(cluster)?;
            // It may have ended by itself: its disk fails.
            if role.is_running()? {
                certain_ns = role.kill().map_or(certain_ns, |fault| fault.certain_ns);
            }
        }
        Ok(Fault { at_ns, certain_ns: certain_ns.max(crate::clock::monotonic_ns()) })
    }

    fn heal(&mut self, cluster: &mut Cluster) -> Result<()> {
        for who in &self.0 {
            let role = who.of(cluster)?;
            role.disk()?.reboot()?;
            role.start()?;
        }
        Ok(())
    }

    fn evidence(&mut self, cluster: &mut Cluster) -> Result<String> {
        for who in &self.0 {
            let path = who.of(cluster)?.disk()?.path().join("written-without-power");
            ensure!(std::fs::write(&path, "x").is_err(), "{} can be written", path.display());
        }
        Ok("the file systems answer nothing but errors".into())
    }
}

/// The disk can only be read.
pub struct ReadOnly(pub Who);

impl Nemesis for ReadOnly {
    fn describe(&self) -> String {
        format!("disk of {} read-only", self.0.name())
    }

    fn inject(&mut self, cluster: &mut Cluster) -> Result<Fault> {
        // The kernel refuses while a file is open for writing: the library answers in its place.
        let role = self.0.of(cluster)?;
        stamped(|| role.preload()?.set(Knob::WriteError, 30))
    }

    fn heal(&mut self, cluster: &mut Cluster) -> Result<()> {
        let role = self.0.of(cluster)?;
        role.preload()?.set(Knob::WriteError, 0)?;
        start_if_down(role)
    }

    fn evidence(&mut self, cluster: &mut Cluster) -> Result<String> {
        hits(self.0, cluster, Knob::WriteHits, "writes refused")
    }
}

/// The disk has no space left. Needs a disk of the role's own.
pub struct Full {
    /// Whose.
    pub who: Who,
    filler: Option<PathBuf>,
}

impl Full {
    /// Of this role.
    pub fn of(who: Who) -> Full {
        Full { who, filler: None }
    }
}

impl Nemesis for Full {
    fn describe(&self) -> String {
        format!("disk of {} full", self.who.name())
    }

    fn inject(&mut self, cluster: &mut Cluster) -> Result<Fault> {
        let disk = self.who.of(cluster)?.disk()?;
        stamped(|| {
            self.filler = Some(disk.fill()?);
            Ok(())
        })
    }

    fn heal(&mut self, cluster: &mut Cluster) -> Result<()> {
        if let Some(filler) = self.filler.take() {
            std::fs::remove_file(&filler).with_context(|| format!("removing {}", filler.display()))?;
        }
        start_if_down(self.who.of(cluster)?)
    }

    fn evidence(&mut self, cluster: &mut Cluster) -> Result<String> {
        let tail = self.who.of(cluster)?.process()?.log_tail();
        ensure!(tail.contains("No space left"), "{} never met the full disk; its log ends:\n{tail}", self.who.name());
        Ok("its log says: No space left on device".into())
    }
}

/// Every fsync takes longer. Needs built-in faults.
pub struct SlowSync {
    /// Whose.
    pub who: Who,
    /// By how much.
    pub by: std::time::Duration,
}

impl Nemesis for SlowSync {
    fn describe(&self) -> String {
        format!("every fsync of {} takes {:?} longer", self.who.name(), self.by)
    }

    fn inject(&mut self, cluster: &mut Cluster) -> Result<Fault> {
        let role = self.who.of(cluster)?;
        stamped(|| role.preload()?.set(Knob::SyncDelayUs, self.by.as_micros() as i64))
    }

    fn heal(&mut self, cluster: &mut Cluster) -> Result<()> {
        self.who.of(cluster)?.preload()?.set(Knob::SyncDelayUs, 0)
    }

    fn evidence(&mut self, cluster: &mut Cluster) -> Result<String> {
        hits(self.who, cluster, Knob::SyncHits, "slow fsyncs")
    }
}

/// Every fsync fails with EIO. Needs built-in faults.
pub struct SyncError(pub Who);

impl Nemesis for SyncError {
    fn describe(&self) -> String {
        format!("every fsync of {} fails", self.0.name())
    }

    fn inject(&mut self, cluster: &mut Cluster) -> Result<Fault> {
        let role = self.0.of(cluster)?;
        stamped(|| role.preload()?.set(Knob::SyncError, EIO))
    }

    fn heal(&mut self, cluster: &mut Cluster) -> Result<()> {
        let role = self.0.of(cluster)?;
        role.preload()?.set(Knob::SyncError, 0)?;
        start_if_down(role)
    }

    fn evidence(&mut self, cluster: &mut Cluster) -> Result<String> {
        hits(self.0, cluster, Knob::SyncHits, "fsyncs failed")
    }
}

/// Half of the next write reaches the disk, then the process is gone. Needs built-in faults.
pub struct TornWrite(pub Who);

impl Nemesis for TornWrite {
    fn describe(&self) -> String {
        format!("{} dies in the middle of a write", self.0.name())
    }

    fn inject(&mut self, cluster: &mut Cluster) -> Result<Fault> {
        let role = self.0.of(cluster)?;
        stamped(|| role.preload()?.set(Knob::TearWrite, 1))
    }

    fn heal(&mut self, cluster: &mut Cluster) -> Result<()> {
        let role = self.0.of(cluster)?;
        role.preload()?.set(Knob::TearWrite, 0)?;
        start_if_down(role)
    }

    fn evidence(&mut self, cluster: &mut Cluster) -> Result<String> {
        hits(self.0, cluster, Knob::WriteHits, "writes torn")
    }
}

/// Flips one byte in the middle of the largest file under `directory` whose name ends with `suffix`, while nobody has it open.
pub fn corrupt_largest(directory: &Path, suffix: &str) -> Result<PathBuf> {
    let mut found: Vec<(u64, PathBuf)> = Vec::new();
    let mut open = vec![directory.to_owned()];
    while let Some(at) = open.pop() {
        for entry in std::fs::read_dir(&at).with_context(|| format!("{}", at.display()))?.flatten() {
            let path = entry.path();
            let meta = entry.metadata()?;
            if meta.is_dir() {
                open.push(path);
            } else if path.to_string_lossy().ends_with(suffix) {
                found.push((meta.len(), path));
            }
        }
    }
    found.sort();
    let (length, path) = found.pop().with_context(|| format!("no *{suffix} under {}", directory.display()))?;
    ensure!(length > 0, "{} is empty", path.display());
    flip(&path, length / 2)?;
    Ok(path)
}

/// Flips the byte at an offset.
pub fn flip(path: &Path, at: u64) -> Result<()> {
    let file = File::options().read(true).write(true).open(path).with_context(|| format!("{}", path.display()))?;
    let mut byte = [0];
    file.read_exact_at(&mut byte, at)?;
    file.write_all_at(&[byte[0] ^ 0xff], at)?;
    file.sync_all().with_context(|| format!("{}", path.display()))
}

fn hits(who: Who, cluster: &mut Cluster, knob: Knob, what: &str) -> Result<String> {
    let count = who.of(cluster)?.preload()?.get(knob)?;
    ensure!(count > 0, "{}: no {what}", who.name());
    Ok(format!("{}: {count} {what}", who.name()))
}

fn start_if_down(role: &mut crate::cluster::Role) -> Result<()> {
    if role.is_running()? { Ok(()) } else { role.start() }
}
