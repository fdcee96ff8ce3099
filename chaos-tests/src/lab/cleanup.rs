//! What laboratories leave behind when their process is killed, and its removal.
//!
//! Namespaces, interfaces, mounts and loop devices go with the last process that is in them. Directories and control groups
//! carry the process id of their owner and when it started: they are removed once that process is gone.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use super::cpu::{CPU_GROUPS, MEMORY_GROUPS};

/// Everything that a laboratory puts where others see it begins with it.
const PREFIX: &str = "tidepool-lab-";

/// Beginning of the names of what this process owns.
pub(super) fn owned_prefix() -> String {
    let pid = std::process::id();
    format!("{PREFIX}{pid}-{}-", started(pid).unwrap_or(0))
}

/// When a process started, in ticks since boot; none if there is none.
fn started(pid: u32) -> Option<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // Field 22 of proc(5), counted from the state, which is the third.
    stat.rsplit_once(')')?.1.split_whitespace().nth(19)?.parse().ok()
}

/// Whether the owner that a name tells is gone. Names that tell none are nobody's business here.
fn is_orphan(name: &str) -> bool {
    let Some(rest) = name.strip_prefix(PREFIX) else { return false };
    let mut parts = rest.split('-');
    let (Some(pid), Some(start)) = (parts.next(), parts.next()) else { return false };
    match (pid.parse::<u32>(), start.parse::<u64>()) {
        (Ok(pid), Ok(start)) => started(pid) != Some(start),
        _ => false,
    }
}

/// Removes what laboratories of processes that are gone left; answers what. Laboratories that are in use are left alone.
pub fn run() -> Result<Vec<PathBuf>> {
    let mut removed = Vec::new();
    for path in orphans(&std::env::temp_dir()) {
        std::fs::remove_dir_all(&path).with_context(|| format!("removing {}", path.display()))?;
        removed.push(path);
    }
    for path in [CPU_GROUPS, MEMORY_GROUPS].iter().flat_map(|at| orphans(Path::new(at))) {
        remove_group(&path);
        removed.push(path);
    }
    Ok(removed)
}

/// What laboratories whose process is gone have left.
pub fn left_over() -> Vec<PathBuf> {
    [std::env::temp_dir(), CPU_GROUPS.into(), MEMORY_GROUPS.into()].iter().flat_map(|at| orphans(at)).collect()
}

fn orphans(at: &Path) -> Vec<PathBuf> {
    let Ok(entries) = std::fs::read_dir(at) else { return Vec::new() };
    entries
        .flatten()
        .filter(|entry| is_orphan(&entry.file_name().to_string_lossy()))
        .map(|entry| entry.path())
        .collect()
}

/// Moves whoever is in the group to the one above, and removes it.
pub(super) fn remove_group(group: &Path) {
    let members = std::fs::read_to_string(group.join("cgroup.procs")).unwrap_or_default();
    if let Some(parent) = group.parent() {
        for pid in members.lines() {
            // It may be gone by now.
            let _ = std::fs::write(parent.join("cgroup.procs"), pid);
        }
    }
    if let Err(error) = std::fs::remove_dir(group) {
        tracing::warn!("the control group {} was not removed: {error}", group.display());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_belongs_to_a_process_that_is_gone_is_an_orphan() {
        assert!(!is_orphan(&format!("{}x", owned_prefix())), "this process lives");
        let pid = std::process::id();
        assert!(is_orphan(&format!("{PREFIX}{pid}-1-x")), "an earlier process of the same id");
        assert!(is_orphan(&format!("{PREFIX}4194304-1-x")), "no process has such an id");
        for other in ["tidepool-lab-", "tidepool-lab-x-1", "tidepool-1-1", "else"] {
            assert!(!is_orphan(other), "{other}");
        }
    }
}
