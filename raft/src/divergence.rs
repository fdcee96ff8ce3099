//! A member whose state is not the majority's (M3): bad memory or a bug. It hands over what it leads, notes that it has to
//! start over, and stops; the next start drops every snapshot that no majority vouched for and applies the log anew, from the
//! last one that is left. The log itself is checksummed, entry by entry.
//!
//! `DIVERGED` in the data directory has one line for each time: `pending|done SECONDS INDEX WHY`.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use openraft::async_runtime::{AsyncRuntime, Instant};
use tidepool_proto::{Error, ErrorCode};

use crate::failure::FatalError;
use crate::host::Host;
use crate::leadership::Role;
use crate::machine::StateMachine;
use crate::network::Network;
use crate::node::RaftNode;
use crate::open::OpenError;
use crate::snapshot::SnapshotStore;
use crate::transfer::TransferError;
use crate::types::LogId;

/// A member that starts over more often than this...
pub const DIVERGENCES_MAX: usize = 3;
/// ...within this time stays down: its machine is broken.
pub const DIVERGENCES_WITHIN: Duration = Duration::from_secs(600);
/// How long one that leads tries to hand over before it stops all the same.
const HAND_OVER_WITHIN: Duration = Duration::from_secs(3);
/// Pause between tries.
const HAND_OVER_AGAIN: Duration = Duration::from_millis(50);

const FILE: &str = "DIVERGED";
/// What is read of the file.
const FILE_BYTES_MAX: u64 = 1 << 20;
const PENDING: &str = "pending ";
const DONE: &str = "done ";

impl<C: Host<Outcome = M::Outcome>, M: StateMachine, N: Network> RaftNode<C, M, N> {
    /// This member's state is not what it should be at `index`: from here on it accepts and answers nothing, hands over if it
    /// leads (M7), and stops with [`FatalError::Diverged`]. The next start begins anew.
    pub async fn start_over(&self, index: u64, why: String) {
        if !self.doubt(&why) {
            return;
        }
        tracing::error!(index, why, "the state of this member is not the majority's; it starts over");
        let (dir, now, line) = (self.data_dir().to_owned(), C::wall_clock(), why.clone());
        let noted = C::blocking(move || note(&dir, now, index, &line)).await.and_then(|noted| noted);
        self.raft().runtime_config().elect(false);
        self.hand_over_in_doubt().await;
        self.failure().report(match noted {
            Ok(()) => FatalError::Diverged(format!("at index {index}: {why}")),
            Err(error) => FatalError::Storage(format!("it diverged, and that could not be noted: {error}")),
        });
    }

    async fn hand_over_in_doubt(&self) {
        let now = || <C::AsyncRuntime as AsyncRuntime>::Instant::now();
        let deadline = now() + HAND_OVER_WITHIN;
        while self.watch_leadership().borrow().role == Role::Leader && now() < deadline {
            match self.transfer_leader(None).await {
                Ok(successor) => tracing::info!(successor = successor.0, "handed over"),
                Err(TransferError::NotLeader | TransferError::Fatal(_)) => return,
                Err(error) => tracing::warn!(%error, "not handed over yet"),
            }
            C::AsyncRuntime::sleep(HAND_OVER_AGAIN).await;
        }
    }

    /// A majority of the voters has the digest that this member had at `index` (M3): its snapshots up to there are good.
    pub async fn vouch(&self, index: u64) -> Result<(), OpenError> {
        if self.is_doubted() {
            return Ok(());
        }
        let snapshots = self.applied().snapshots.clone();
        C::blocking(move || snapshots.vouch(index)).await.map_err(OpenError::storage)?.map_err(OpenError::storage)
    }
}

fn note(dir: &Path, now: Duration, index: u64, why: &str) -> io::Result<()> {
    let mut file = OpenOptions::new().create(true).append(true).open(dir.join(FILE))?;
    let why = why.replace(['\n', '\r'], " ");
    file.write_all(format!("{PENDING}{} {index} {why}\n", now.as_secs()).as_bytes())?;
    file.sync_all()?;
    File::open(dir)?.sync_all()
}

/// Whether the log reaches back to a snapshot that a majority vouched for, or to its beginning.
pub(crate) fn suffices(snapshots: &SnapshotStore, purged: Option<LogId>) -> bool {
    purged <= snapshots.agreed().and_then(|file| file.meta().last_log_id)
}

/// Has the next start begin anew because an operator wants it, however often that is.
pub(crate) fn note_wanted(dir: &Path) -> io::Result<()> {
    note(dir, Duration::ZERO, 0, "an operator asked for it")
}

/// A start that drops what no majority vouched for.
pub(crate) struct Anew {
    path: PathBuf,
    text: String,
}

/// Drops the doubtful snapshots if the last life ended in doubt. Refused when that happens too often.
/// Where the log does not reach back to an agreed snapshot, the doubtful ones are kept aside: they may be all there is.
pub(crate) fn begin_anew(
    dir: &Path,
    snapshots: &SnapshotStore,
    purged: Option<LogId>,
    now: Duration,
) -> Result<Option<Anew>, OpenError> {
    let path = dir.join(FILE);
    let mut text = String::new();
    match File::open(&path) {
        Ok(file) => {
            file.take(FILE_BYTES_MAX).read_to_string(&mut text).map_err(OpenError::storage)?;
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(OpenError::storage(error)),
    }
    if !text.lines().any(|line| line.starts_with(PENDING)) {
        return Ok(None);
    }
    // A clock that was wrong once must not keep it down: what is to come does not count.
    let recent = |line: &&str| {
        let seconds = line.split(' ').nth(1).and_then(|seconds| seconds.parse().ok());
        seconds.and_then(|at| now.checked_sub(Duration::from_secs(at))).is_some_and(|ago| ago < DIVERGENCES_WITHIN)
    };
    let times = text.lines().filter(recent).count();
    if times > DIVERGENCES_MAX {
        return Err(OpenError(Error::new(
            ErrorCode::StateDiverged,
            format!(
                "the state of {} was not the majority's {times} times within {DIVERGENCES_WITHIN:?}, see {}: look at this host's memory and \
                 disk; it starts again once that time is over, or replace it with `tidepool member replace`; the last time: {}",
                dir.display(),
                path.display(),
                text.lines().next_back().unwrap_or_default()
            ),
        )));
    }
    snapshots.drop_doubtful(!suffices(snapshots, purged)).map_err(OpenError::storage)?;
    Ok(Some(Anew { path, text }))
}

impl Anew {
    /// The start can go on: the next one begins with what it finds.
    pub(crate) fn done(self) -> io::Result<()> {
        let lines = self.text.lines().map(|line| match line.strip_prefix(PENDING) {
            Some(rest) => format!("{DONE}{rest}\n"),
            None => format!("{line}\n"),
        });
        let new = self.path.with_extension("tmp");
        let mut file = File::create(&new)?;
        file.write_all(lines.collect::<String>().as_bytes())?;
        file.sync_all()?;
        fs::rename(new, &self.path)?;
        tracing::warn!("this member starts over from the last agreed snapshot and its log");
        self.path.parent().map_or(Ok(()), |dir| File::open(dir)?.sync_all())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::options::Agreement;

    #[test]
    fn a_note_holds_for_one_start_and_too_many_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let snapshots = SnapshotStore::open(&dir.path().join("s"), Agreement::Majority).unwrap();
        let at = Duration::from_secs;
        let anew = |now| begin_anew(dir.path(), &snapshots, None, at(now));
        assert!(anew(1_000).unwrap().is_none());
        for time in 0..DIVERGENCES_MAX as u64 {
            note(dir.path(), at(1_000 + time), 7, "a digest\nthat differs").unwrap();
            assert!(anew(1_100).unwrap().is_some(), "until it is done");
            anew(1_100).unwrap().unwrap().done().unwrap();
            assert!(anew(1_100).unwrap().is_none());
        }
        note(dir.path(), at(1_200), 7, "again").unwrap();
        let refused = anew(1_201).err().unwrap();
        assert_eq!(refused.0.code(), ErrorCode::StateDiverged);
        assert!(refused.0.message().contains("4 times"), "{refused}");
        assert!(anew(1_200 + DIVERGENCES_WITHIN.as_secs()).unwrap().is_some());
        assert!(anew(900).unwrap().is_some(), "lines from the future do not count");
        for _ in 0..2 * DIVERGENCES_MAX {
            anew(2_000).unwrap().unwrap().done().unwrap();
            note_wanted(dir.path()).unwrap();
        }
        assert!(anew(2_000).unwrap().is_some(), "as often as an operator wants");
    }

    struct Nothing;
    impl crate::machine::Frozen for Nothing {
        fn write_to(self: Box<Self>, _out: &mut dyn Write) -> io::Result<()> {
            Ok(())
        }
    }

    /// Tried with doubtful snapshots left where they are: fails.
    #[test]
    fn what_is_doubtful_is_kept_aside_where_it_is_all_there_is() {
        let dir = tempfile::tempdir().unwrap();
        let snapshots = SnapshotStore::open(&dir.path().join("s"), Agreement::Majority).unwrap();
        let write = |index| {
            let id = crate::types::log_id(1, index);
            let meta = crate::types::SnapshotMeta { last_log_id: Some(id), ..Default::default() };
            snapshots.write(&meta, Box::new(Nothing)).unwrap()
        };
        write(5);
        snapshots.vouch(6).unwrap();
        let now = Duration::from_secs(1_000);
        for (index, purged, is_kept) in [(9, 5, false), (12, 6, true)] {
            let doubtful = write(index);
            note(dir.path(), now, index, "it differs").unwrap();
            let purged = Some(crate::types::log_id(1, purged));
            begin_anew(dir.path(), &snapshots, purged, now).unwrap().unwrap().done().unwrap();
            assert!(!doubtful.path().exists());
            assert_eq!(doubtful.path().with_extension("doubtful").exists(), is_kept);
        }
    }
}
