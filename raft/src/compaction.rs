//! Log compaction, driven by us: openraft neither snapshots nor purges by itself here (a purge of its own can
//! overtake entries that are still being applied). One step is: snapshot, wait until it is durable, purge the log
//! up to what the snapshot's predecessor covers and the followers that are being fed leave room for. Only snapshots that a majority
//! vouched for count (M3).

use std::collections::VecDeque;
use std::sync::atomic::Ordering;
use std::time::Duration;

use openraft::Raft;
use openraft::async_runtime::watch::WatchReceiver;
use openraft::async_runtime::{AsyncRuntime, Select2};
use openraft::metrics::WaitError;

use crate::apply::{Adapter, Applied};
use crate::host::Host;
use crate::machine::StateMachine;
use crate::options::Options;
use crate::status::member_statuses;

/// How often the size of the log is looked at.
const CHECK_INTERVAL: Duration = Duration::from_millis(500);
/// How long a snapshot is waited for before it is asked for again. openraft takes no second request while it builds
/// one, and the one it builds may have been asked for earlier, by a caller that is gone, and cover less.
const ASK_AGAIN_AFTER: Duration = Duration::from_secs(1);

/// Pause after a state turned out unsound: the next checkpoint judges this member meanwhile.
const UNSOUND_PAUSE: Duration = Duration::from_secs(10);

/// A member that was not heard for so long is not fed any more: the log does not wait for the dead.
const FED_HEARD_WITHIN: Duration = Duration::from_secs(10);
/// A member that lacks fewer entries than this follows the log like the others.
const CAUGHT_UP_ENTRIES: u64 = 1_024;

/// A snapshot that no majority vouches for is replaced all the same when the log is so many times longer than it should be.
const OVERDUE_TIMES: u64 = 4;

/// So many times the log that makes a snapshot due is kept for a member that is fed.
const FEED_LOG_TIMES: u64 = 8;
/// Places in the log whose distance in bytes is remembered, and how far apart they are.
const MILESTONES_MAX: usize = 4_096;
const MILESTONE_BYTES: u64 = 4 << 20;

/// How many bytes of payload were applied up to which index: since the start, or since a snapshot was taken in.
#[derive(Default)]
pub(crate) struct Milestones {
    bytes: u64,
    passed: VecDeque<(u64, u64)>,
}

impl Milestones {
    /// The entry at `index` was applied.
    pub(crate) fn add(&mut self, index: u64, bytes: u64) {
        if self.passed.back().is_none_or(|(_, at)| self.bytes - at >= MILESTONE_BYTES) {
            if self.passed.len() == MILESTONES_MAX {
                self.passed.pop_front();
            }
            self.passed.push_back((index, self.bytes));
        }
        self.bytes += bytes;
    }

    /// Bytes after `index`, as far as they are known: never more than there are, and less by no more than a milestone's.
    fn bytes_after(&self, index: u64) -> u64 {
        let next = self.passed.partition_point(|(passed, _)| *passed <= index);
        self.passed.get(next).map_or(0, |(_, at)| self.bytes - at)
    }
}

/// Why the log was not compacted.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum CompactError {
    /// Nothing was applied yet.
    #[error("nothing was applied yet; there is nothing to snapshot")]
    Empty,
    /// The state is not what its digest was kept of: no snapshot of it was kept.
    #[error("no snapshot was written: {0}; the next checkpoint judges this member")]
    Unsound(String),
    /// The node stopped for good.
    #[error("the node stopped: {0}")]
    Fatal(String),
}

/// Compacts one member's log.
pub(crate) struct Compactor<C: Host<Outcome = M::Outcome>, M: StateMachine> {
    raft: Raft<C, Adapter<C, M>>,
    applied: std::sync::Arc<Applied<M>>,
    keep_log_entries: u64,
    feed_log_entries_max: u64,
    feed_log_bytes_max: u64,
    /// Payload bytes and entries since the last snapshot after which another is due.
    due_after: (u64, u64),
    one_at_a_time: tokio::sync::Mutex<()>,
}

impl<C: Host<Outcome = M::Outcome>, M: StateMachine> Compactor<C, M> {
    pub(crate) fn new(raft: Raft<C, Adapter<C, M>>, applied: std::sync::Arc<Applied<M>>, options: &Options) -> Self {
        let one_at_a_time = tokio::sync::Mutex::new(());
        let Options { keep_log_entries, feed_log_entries_max, snapshot_log_bytes, snapshot_log_entries, .. } = *options;
        let known = MILESTONES_MAX as u64 * MILESTONE_BYTES / 2;
        let feed_log_bytes_max = snapshot_log_bytes.saturating_mul(FEED_LOG_TIMES).min(known);
        let due_after = (snapshot_log_bytes, snapshot_log_entries);
        Compactor {
            raft,
            applied,
            keep_log_entries,
            feed_log_entries_max,
            feed_log_bytes_max,
            due_after,
            one_at_a_time,
        }
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
        self.purge().await.map_err(|e| fatal(&e))?;
        self.covered().ok_or(CompactError::Empty)
    }

    /// Drops what nobody needs any more: nothing, as long as there is one agreed snapshot only. Its file may turn out damaged, and
    /// the log before it would be all that is left.
    async fn purge(&self) -> Result<(), openraft::errors::Fatal<C>> {
        let snapshots = &self.applied.snapshots;
        let agreed = snapshots.agreed().and_then(|file| file.meta().last_log_id);
        let (Some(agreed), Some(fallback)) = (agreed, snapshots.fallback()) else { return Ok(()) };
        let fed = self.needed_by_the_fed();
        let purged = self.raft.metrics().borrow_watched().purged.map(|id| id.index);
        match purge_upto(agreed.index, self.keep_log_entries, fallback.index, fed) {
            Some(upto) if Some(upto) > purged => {
                // Before: what does not reach so far is sent to nobody from here on.
                self.applied.purged.fetch_max(upto, Ordering::Relaxed);
                self.raft.trigger().purge_log(upto).await
            }
            _ => Ok(()),
        }
    }

    /// Last index that every member which is fed a snapshot, or catches up after one, has or will have with it. A member that
    /// is silent is not waited for, nor one that would keep more than so many entries.
    fn needed_by_the_fed(&self) -> Option<u64> {
        let metrics = self.raft.metrics().borrow_watched().clone();
        let purged = metrics.purged.map_or(0, |id| id.index);
        let last = metrics.last_log_index.unwrap_or(0);
        let members = member_statuses(&metrics);
        let mut needed = None::<u64>;
        for (target, covers) in self.applied.snapshots.held() {
            let member = members.iter().find(|m| m.member.node_id.0 == target);
            // One that was never heard has answered the offer at least, a moment ago.
            let heard = member.is_some_and(|m| m.last_heard.is_none_or(|ago| ago < FED_HEARD_WITHIN));
            let matched = member.and_then(|m| m.matched_index).unwrap_or(0);
            let holds = covers.max(matched);
            let lacks = last.saturating_sub(holds);
            let caught_up = matched >= covers && lacks < CAUGHT_UP_ENTRIES;
            let bytes = self.applied.milestones.lock().bytes_after(holds);
            let too_slow = lacks > self.feed_log_entries_max || bytes > self.feed_log_bytes_max;
            if too_slow {
                let (entries_max, bytes_max) = (self.feed_log_entries_max, self.feed_log_bytes_max);
                tracing::warn!(
                    target,
                    lacks,
                    bytes,
                    entries_max,
                    bytes_max,
                    "a member is fed too slowly; it will start over"
                );
            }
            // What it would go on with is gone: it needs another snapshot.
            let in_vain = holds < purged;
            if !metrics.state.is_leader() || !heard || too_slow || caught_up || in_vain {
                self.applied.snapshots.release(target);
                continue;
            }
            needed = Some(needed.map_or(holds, |least| least.min(holds)));
        }
        needed
    }

    /// Has a snapshot written that covers `index`, which was applied.
    async fn snapshot(&self, index: u64) -> Result<(), CompactError> {
        let fatal = |e: &dyn std::fmt::Display| CompactError::Fatal(e.to_string());
        let mut unsound = self.applied.unsound.subscribe();
        loop {
            // openraft snapshots at what it has applied by then: at or after `index`.
            self.raft.trigger().snapshot().await.map_err(|e| fatal(&e))?;
            let wait = self.raft.wait(Some(ASK_AGAIN_AFTER));
            let done = wait.metrics(
                |m| m.running_state.is_err() || m.snapshot.as_ref().is_some_and(|id| id.index >= index),
                "snapshot written",
            );
            let failed = async { unsound.changed().await.ok().and_then(|()| unsound.borrow().clone()) };
            match C::AsyncRuntime::select2(done, failed).await {
                Select2::First(Ok(metrics)) => return metrics.running_state.map_err(|e| fatal(&e)),
                Select2::First(Err(WaitError::Timeout(..))) | Select2::Second(None) => {}
                Select2::First(Err(error)) => return Err(fatal(&error)),
                Select2::Second(Some(why)) => return Err(CompactError::Unsound(why)),
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
            if let Err(error) = self.purge().await {
                tracing::warn!(%error, "log not purged");
                return;
            }
            // One that waits to be vouched for would be replaced before it is: nothing would ever be purged.
            let waits = self.applied.snapshots.current().is_some_and(|file| !file.is_agreed());
            let overdue = self.applied.bytes_since_snapshot.load(Ordering::Relaxed) / OVERDUE_TIMES >= self.due_after.0;
            if !self.is_due(1) || (waits && !overdue) {
                continue;
            }
            match self.compact().await {
                Ok(index) => tracing::info!(index, "log compacted"),
                // The next look finds it due again, unless the node is over.
                Err(CompactError::Empty) => {}
                // Said where it was found out.
                Err(CompactError::Unsound(_)) => C::AsyncRuntime::sleep(UNSOUND_PAUSE).await,
                Err(error @ CompactError::Fatal(_)) => {
                    tracing::warn!(%error, "log not compacted");
                    return;
                }
            }
        }
    }
}

/// Last index that may go: `keep` entries stay behind the agreed snapshot, all that its predecessor does not cover, and all
/// that members lack which are being fed.
fn purge_upto(covered: u64, keep: u64, fallback: u64, fed: Option<u64>) -> Option<u64> {
    let upto = covered.checked_sub(keep)?.min(fallback);
    Some(fed.map_or(upto, |needed| needed.min(upto)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bytes_after_an_index_are_known_to_a_milestone() {
        let mut milestones = Milestones::default();
        for index in 1..=100_000u64 {
            milestones.add(index, 1 << 12);
        }
        for (index, bytes) in [(0, 100_000 << 12), (50_000, 50_000 << 12), (99_999, 1 << 12), (100_000, 0)] {
            let known = milestones.bytes_after(index);
            assert!(known <= bytes && bytes - known <= MILESTONE_BYTES, "{known} of {bytes} after {index}");
        }
        assert!(milestones.passed.len() <= MILESTONES_MAX);
        milestones.add(100_001, u64::from(u32::MAX) << 8);
        (0..2 * MILESTONES_MAX as u64).for_each(|more| milestones.add(200_000 + more, MILESTONE_BYTES));
        assert_eq!(milestones.passed.len(), MILESTONES_MAX);
    }

    #[test]
    fn the_log_behind_the_older_snapshot_and_the_kept_entries_stays() {
        assert_eq!(purge_upto(100, 30, 80, None), Some(70));
        assert_eq!(purge_upto(100, 30, 50, Some(60)), Some(50));
        assert_eq!(purge_upto(100, 30, 80, Some(20)), Some(20));
        assert_eq!(purge_upto(100, 101, 50, None), None);
    }
}
