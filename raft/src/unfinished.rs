//! A mark in a data directory that is being made over, by a restore or a forced recovery. It is durable before the first change
//! and goes after the last one: a directory that bears it was cut short, does not start, and says which command completes it.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use tidepool_proto::{ClusterId, Error, ErrorCode, History};

use crate::identity::ClusterIdentity;

/// File in the data directory.
const FILE: &str = "unfinished";

/// What was under way.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Unfinished {
    /// A restore: nothing in the directory counts.
    Restore,
    /// A forced recovery of a member of this cluster.
    Recovery(ClusterIdentity),
}

fn file(dir: &Path) -> PathBuf {
    dir.join(FILE)
}

impl Unfinished {
    /// What is under way in this directory.
    pub(crate) fn read(dir: &Path) -> io::Result<Option<Unfinished>> {
        let text = match fs::read_to_string(file(dir)) {
            Ok(text) => text,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(error),
        };
        let words: Vec<&str> = text.split_whitespace().collect();
        let found = match words[..] {
            ["restore"] => Some(Unfinished::Restore),
            ["recovery", cluster, history] => parse(cluster, history).map(Unfinished::Recovery),
            _ => None,
        };
        let damaged = || io::Error::new(io::ErrorKind::InvalidData, format!("{} is damaged", file(dir).display()));
        found.map(Some).ok_or_else(damaged)
    }

    /// Marks the directory, durably.
    pub(crate) fn begin(self, dir: &Path) -> io::Result<()> {
        let text = match self {
            Unfinished::Restore => "restore\n".to_owned(),
            Unfinished::Recovery(before) => format!("recovery {} {:016x}\n", before.cluster, before.history.0),
        };
        let temporary = dir.join(format!("{FILE}.tmp"));
        fs::write(&temporary, text)?;
        File::open(&temporary)?.sync_all()?;
        fs::rename(&temporary, file(dir))?;
        sync_directory(dir)
    }

    /// Takes the mark away, durably. What was made is synced before.
    pub(crate) fn end(dir: &Path) -> io::Result<()> {
        sync_directory(dir)?;
        match fs::remove_file(file(dir)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        sync_directory(dir)
    }

    /// Refuses to start from a directory that was cut short.
    pub(crate) fn refuse(dir: &Path) -> Result<(), Error> {
        let failed = |error: io::Error| Error::new(ErrorCode::StorageFailed, error.to_string());
        let (what, command) = match Unfinished::read(dir).map_err(failed)? {
            None => return Ok(()),
            Some(Unfinished::Restore) => ("a restore", "start again with --restore-from, or empty the directory"),
            Some(Unfinished::Recovery(_)) => {
                ("a recovery", "run `tidepool member recover --from-this-node --accept-data-loss` again")
            }
        };
        let what = format!("{what} into {} was cut short; {command}", dir.display());
        Err(Error::new(ErrorCode::InvalidParams, what))
    }
}

pub(crate) fn sync_directory(dir: &Path) -> io::Result<()> {
    File::open(dir)?.sync_all()
}

fn parse(cluster: &str, history: &str) -> Option<ClusterIdentity> {
    let digits: String = cluster.chars().filter(|&c| c != '-').collect();
    let cluster = (digits.len() == 32).then(|| u128::from_str_radix(&digits, 16).ok()).flatten()?;
    let history = u64::from_str_radix(history, 16).ok()?;
    Some(ClusterIdentity { cluster: ClusterId(cluster.to_be_bytes()), history: History(history) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mark_says_what_was_under_way() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(Unfinished::read(dir.path()).unwrap(), None);
        Unfinished::refuse(dir.path()).unwrap();
        let before = ClusterIdentity { cluster: ClusterId([0xab; 16]), history: History(77) };
        for mark in [Unfinished::Restore, Unfinished::Recovery(before)] {
            mark.begin(dir.path()).unwrap();
            assert_eq!(Unfinished::read(dir.path()).unwrap(), Some(mark));
            assert!(Unfinished::refuse(dir.path()).unwrap_err().message().contains("cut short"));
            Unfinished::end(dir.path()).unwrap();
            assert_eq!(Unfinished::read(dir.path()).unwrap(), None);
        }
        fs::write(file(dir.path()), "recovery x").unwrap();
        assert!(Unfinished::read(dir.path()).is_err());
    }
}
