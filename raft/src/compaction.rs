//! Log compaction, driven by us: openraft neither snapshots nor purges by itself here (a purge of its own can
//! overtake entries that are still being applied). One step is: snapshot, wait until it is durable, purge the log
//! up to what both the snapshot's predecessor and the followers that lag leave room for.

use std::sync::atomic::Ordering;
use std::time::Duration;

use openraft::Raft;
use openraft::async_runtime::AsyncRuntime;
use openraft::metrics::WaitError;

use crate::apply::{Adapter, Applied};
use crate::host::Host;
use crate::machine::StateMachine;
use crate::options::Options;

/// How often the size of the log is looked at.
const CHECK_INTERVAL: Duration = Duration::from_millis(500);
/// How long a snapshot is waited for before it is asked for again. openraft takes no second request while it builds
/// one, and the one it builds may have been asked for earlier, by a caller that is gone, and cover less.
const ASK_AGAIN_AFTER: Duration = Duration::from_secs(1);

/// Why the log was not compacted.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum CompactError {
    /// Nothing was applied yet.
    #[error("nothing was applied yet; there is nothing to snapshot")]
    Empty,
    /// The node stopped for good.
    #[error("the node stopped: {0}")]
    Fatal(String),
}

/// Compacts one member's log.
pub(crate) struct Compactor<C: Host<Outcome = M::Outcome>, M: StateMachine> {
    raft: Raft<C, Adapter<C, M>>,
    applied: std::sync::Arc<Applied<M>>,
    keep_log_entries: u64,
    /// Payload bytes and entries since the last snapshot after which another is due.
    due_after: (u64, u64),
    one_at_a_time: tokio::sync::Mutex<()>,
}

impl<C: Host<Outcome = M::Outcome>, M: StateMachine> Compactor<C, M> {
    pub(crate) fn new(raft: Raft<C, Adapter<C, M>>, applied: std::sync::Arc<Applied<M>>, options: &Options) -> Self {
        let one_at_a_time = tokio::sync::Mutex::new(());
        let due_after = (options.snapshot_log_bytes, options.snapshot_log_entries);
        Compactor { raft, applied, keep_log_entries: options.keep_log_entries, due_after, one_at_a_time }
    }

    /// Snapshots the applied state and purges the log behind it. Returns the index that the snapshot covers.
    pub(crate) async fn compact(&self) -> Result<u64, CompactError> {
        let fatal = |e: &dyn std::fmt::Display| CompactError::Fatal(e.to_string());
        let _turn = self.one_at_a_time.lock().await;
        let Some(at) = self.applied.machine.applied() else {
            return Err(CompactError::Empty);
        };
        if self.covered() < Some(at.index) {
            self.snapshot(at.index).await?;
        }
        let covered = self.covered().ok_or(CompactError::Empty)?;
        if let Some(upto) =
            purge_upto(covered, self.keep_log_entries, self.applied.snapshots.fallback().map(|id| id.index))
        {
            self.raft.trigger().purge_log(upto).await.map_err(|e| fatal(&e))?;
        }
        Ok(covered)
    }

    /// Has a snapshot written that covers `index`, which was applied.
    async fn snapshot(&self, index: u64) -> Result<(), CompactError> {
        let fatal = |e: &dyn std::fmt::Display| CompactError::Fatal(e.to_string());
        loop {
            // openraft snapshots at what it has applied by then: at or after `index`.
            self.raft.trigger().snapshot().await.map_err(|e| fatal(&e))?;
            let wait = self.raft.wait(Some(ASK_AGAIN_AFTER));
            let done = wait.metrics(
                |m| m.running_state.is_err() || m.snapshot.as_ref().is_some_and(|id| id.index >= index),
                "snapshot written",
            );
            match done.await {
                Ok(metrics) => return metrics.running_state.map_err(|e| fatal(&e)),
                Err(WaitError::Timeout(..)) => {}
                Err(error) => return Err(fatal(&error)),
            }
        }
    }

    /// Whether so much was applied since the last snapshot: the whole of what makes one due, or a part of it.
    fn is_due(&self, part: u64) -> bool {
        let (bytes, entries) = self.due_after;
        self.applied.bytes_since_snapshot.load(Ordering::Relaxed) >= (bytes / part).max(1)
            || self.applied.entries_since_snapshot.load(Ordering::Relaxed) >= (entries / part).max(1)
    }

    /// Compacts before a stop, if half of what makes a snapshot due was applied: the next start would replay it.
    pub(crate) async fn compact_before_stop(&self) -> Result<Option<u64>, CompactError> {
        if self.is_due(2) { self.compact().await.map(Some) } else { Ok(None) }
    }

    fn covered(&self) -> Option<u64> {
        self.applied.snapshots.current().and_then(|file| file.meta().last_log_id.map(|id| id.index))
    }

    /// Compacts whenever enough was applied, for ever.
    pub(crate) async fn run(&self) {
        loop {
            C::AsyncRuntime::sleep(CHECK_INTERVAL).await;
            if !self.is_due(1) {
                continue;
            }
            match self.compact().await {
                Ok(index) => tracing::info!(index, "log compacted"),
                // The next look finds it due again, unless the node is over.
                Err(CompactError::Empty) => {}
                Err(error @ CompactError::Fatal(_)) => {
                    tracing::warn!(%error, "log not compacted");
                    return;
                }
            }
        }
    }
}

/// Last index that may go: `keep` entries stay behind the snapshot, and all that its predecessor does not cover.
fn purge_upto(covered: u64, keep: u64, fallback: Option<u64>) -> Option<u64> {
    let upto = covered.checked_sub(keep)?;
    Some(fallback.map_or(upto, |older| upto.min(older)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_log_behind_the_older_snapshot_and_the_kept_entries_stays() {
        assert_eq!(purge_upto(100, 30, None), Some(70));
        assert_eq!(purge_upto(100, 30, Some(80)), Some(70));
        assert_eq!(purge_upto(100, 30, Some(50)), Some(50));
        assert_eq!(purge_upto(100, 101, Some(50)), None);
    }
}
