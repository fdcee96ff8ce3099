//! One term in office: everything the leader knows that is not replicated. It is made when this master has applied its
//! own first entry of the term and dropped when it no longer leads, so nothing of it can leak into another term.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use tidepool_proto::clock::{BootInstant, grantor_share};
use tidepool_proto::{LogTime, ObjectId, ReplicaId, SegmentId, planted};
use tidepool_raft::rt;
use tidepool_raft::rt::watch;
use tokio::sync::Notify;

use super::heat::Heat;
use super::leases::LeaseTable;
use super::liveness::NodeTable;
use super::options::LEASED_PERCENT_MAX;
use super::presence::PresenceTable;
use super::proposer::Proposer;
use super::tasks::Attempts;
use crate::directory::{Directory, SegmentView};

/// Retired replicas remembered because their objects are leased.
const RETIRED_SEEN_MAX: usize = 1 << 16;

/// The leader's own state of one term.
pub struct Tenure {
    /// The Raft term.
    pub term: u64,
    /// Read leases.
    pub leases: Arc<LeaseTable>,
    /// When each datanode was heard, and what it has to be told.
    pub nodes: NodeTable,
    /// The way into the log.
    pub proposer: Proposer,
    /// Parts of tasks that failed.
    pub attempts: Attempts,
    /// How often objects are read.
    pub heat: Heat,
    /// What datanodes still hold of histories before.
    pub presence: PresenceTable,
    /// The segments that were mounted when it was looked last, and since when.
    mounted: Mutex<(Vec<SegmentId>, BootInstant)>,
    heal_cursor: Mutex<Option<ObjectId>>,
    copy_ended: Notify,
    reclaim_cursor: Mutex<Option<ReplicaId>>,
    /// When leased retired replicas were first seen.
    retired_since_ms: Mutex<HashMap<ReplicaId, u64>>,
    heal_pause: AtomicUsize,
    first_index: u64,
    since: BootInstant,
    clock: LogClock,
    lease_ttl_max: Duration,
    waiting_puts: AtomicUsize,
    put_bytes: AtomicU64,
    capacity_bytes: AtomicU64,
    over: watch::Sender<bool>,
}

/// Log time of a term: what the log had reached when the leader took office, advanced by its CLOCK_BOOTTIME only (T1).
#[derive(Clone, Copy, Debug)]
pub struct LogClock {
    base: LogTime,
    since: BootInstant,
}

impl LogClock {
    /// Starts from the log time of the last applied entry.
    pub fn starting_at(base: LogTime) -> LogClock {
        LogClock { base, since: BootInstant::now() }
    }
    /// Now.
    pub fn now(&self) -> LogTime {
        if planted!(WallClock) {
            let today = rt::wall_clock().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
            return LogTime(today.as_millis() as u64);
        }
        LogTime(self.base.0 + self.since.elapsed().as_millis() as u64)
    }
}

impl Tenure {
    /// Takes office. `first_index` is an index at or after the term's first entry; everything applied by then is old.
    pub fn new(
        term: u64,
        first_index: u64,
        clock: LogClock,
        proposer: Proposer,
        nodes: NodeTable,
        heat: Heat,
        lease_ttl_max: Duration,
    ) -> Arc<Tenure> {
        Arc::new(Tenure {
            term,
            leases: LeaseTable::new(),
            nodes,
            proposer,
            attempts: Attempts::default(),
            heat,
            presence: PresenceTable::default(),
            mounted: Mutex::new((Vec::new(), BootInstant::now())),
            heal_cursor: Mutex::new(None),
            copy_ended: Notify::new(),
            reclaim_cursor: Mutex::new(None),
            retired_since_ms: Mutex::new(HashMap::new()),
            heal_pause: AtomicUsize::new(0),
            first_index,
            since: BootInstant::now(),
            clock,
            lease_ttl_max,
            waiting_puts: AtomicUsize::new(0),
            put_bytes: AtomicU64::new(0),
            capacity_bytes: AtomicU64::new(0),
            over: watch::Sender::new(false),
        })
    }

    /// Log time now.
    pub fn log_time(&self) -> LogTime {
        self.clock.now()
    }

    /// Leader's CLOCK_BOOTTIME in milliseconds, the clock of its lease table.
    pub fn now_ms(&self) -> u64 {
        BootInstant::now().as_millis()
    }

    /// How long these segments have been all that is mounted, as far as was asked in this term.
    pub fn mounted_for(&self, segments: &[SegmentView]) -> Duration {
        let now: Vec<SegmentId> = segments.iter().map(|segment| segment.segment).collect();
        let mut mounted = self.mounted.lock();
        if mounted.0 != now {
            *mounted = (now, BootInstant::now());
        }
        mounted.1.elapsed()
    }

    /// How long this master has been in office.
    pub fn age(&self) -> Duration {
        self.since.elapsed()
    }

    /// Whether the predecessor may have leased this object and the lease may still run (L4).
    pub fn may_be_leased_by_predecessor(&self, object: ObjectId) -> bool {
        object.op().log_index() <= self.first_index && self.age() < grantor_share(self.lease_ttl_max)
    }

    /// Whether the first lease window is still open.
    pub fn in_first_window(&self) -> bool {
        self.first_index > 0 && self.age() < grantor_share(self.lease_ttl_max)
    }

    /// A put waits for room, for as long as what is returned lives: the reserve is gone (L4).
    pub fn wait_for_room(self: &Arc<Tenure>) -> WaitingPut {
        self.waiting_puts.fetch_add(1, Ordering::Relaxed);
        WaitingPut(self.clone())
    }

    /// Puts that found no room and wait for some.
    pub fn waiting_puts(&self) -> usize {
        self.waiting_puts.load(Ordering::Relaxed)
    }

    /// Counts bytes asked for by puts, for the size of the reserve.
    pub fn count_put_bytes(&self, bytes: u64) {
        self.put_bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Bytes asked for by puts since the last call.
    pub fn take_put_bytes(&self) -> u64 {
        self.put_bytes.swap(0, Ordering::Relaxed)
    }

    /// Bytes of all segments, as upkeep last saw it.
    pub fn capacity_bytes(&self) -> u64 {
        self.capacity_bytes.load(Ordering::Relaxed)
    }

    /// Looks at the segments that are mounted: their bytes, and how many of them may be leased (L5).
    pub fn note_segments(&self, directory: &Directory) {
        let segments = directory.segments();
        self.capacity_bytes.store(segments.iter().map(|s| s.capacity).sum(), Ordering::Relaxed);
        self.leases.limit_segments(segments.iter().map(|s| (s.segment, s.capacity / 100 * LEASED_PERCENT_MAX)));
    }

    /// Where the search for reclaimable space goes on.
    pub fn reclaim_cursor(&self) -> Option<ReplicaId> {
        *self.reclaim_cursor.lock()
    }

    /// Notes where it goes on; none: from the start.
    pub fn set_reclaim_cursor(&self, cursor: Option<ReplicaId>) {
        *self.reclaim_cursor.lock() = cursor;
    }

    /// Whether every lease that was granted before this replica was retired has run out: it was seen retired longer ago
    /// than the longest lease.
    pub fn outwaited(&self, replica: ReplicaId, now_ms: u64) -> bool {
        let longest_ms = grantor_share(self.lease_ttl_max).as_millis() as u64;
        let mut seen = self.retired_since_ms.lock();
        if seen.len() >= RETIRED_SEEN_MAX {
            seen.retain(|_, since| now_ms.saturating_sub(*since) <= 2 * longest_ms);
        }
        now_ms.saturating_sub(*seen.entry(replica).or_insert(now_ms)) > longest_ms
    }

    /// Rounds for which healing rests.
    pub fn rest_healing(&self, rounds: usize) {
        self.heal_pause.store(rounds, Ordering::Relaxed);
    }

    /// Whether healing rests in this round.
    pub fn healing_rests(&self) -> bool {
        self.heal_pause.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1)).is_ok()
    }

    /// A copy has ended, or a task began: tasks may go on.
    pub fn note_copy_ended(&self) {
        self.copy_ended.notify_one();
    }

    /// Resolves when a copy has ended.
    pub async fn copy_ended(self: Arc<Tenure>) {
        self.copy_ended.notified().await;
    }

    /// Where healing goes on.
    pub fn heal_cursor(&self) -> Option<ObjectId> {
        *self.heal_cursor.lock()
    }

    /// Notes where healing goes on; none: from the start.
    pub fn set_heal_cursor(&self, cursor: Option<ObjectId>) {
        *self.heal_cursor.lock() = cursor;
    }

    /// Ends the term here: background work stops, waiting calls answer NOT_LEADER.
    pub fn end(&self) {
        self.over.send_replace(true);
    }

    /// Follows whether it has ended.
    pub fn watch_end(&self) -> watch::Receiver<bool> {
        self.over.subscribe()
    }

    /// Resolves when it ends.
    pub async fn ended(&self) {
        let mut over = self.over.subscribe();
        // The sender lives in self, so the wait can end only with the value.
        let _ended = over.wait_for(|over| *over).await;
    }
}

/// See [`Tenure::wait_for_room`].
pub struct WaitingPut(Arc<Tenure>);

impl Drop for WaitingPut {
    fn drop(&mut self) {
        self.0.waiting_puts.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn log_time_starts_where_the_log_stood_and_never_reads_the_wall_clock() {
        let clock = LogClock::starting_at(LogTime(1_000));
        let now = clock.now().0;
        assert!((1_000..1_000 + 60_000).contains(&now), "log time {now} is not the base plus elapsed boot time");
    }
}
