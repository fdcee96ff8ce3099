//! One term in office: everything the leader knows that is not replicated. It is made when this master has applied its
//! own first entry of the term and dropped when it no longer leads, so nothing of it can leak into another term.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use tidepool_proto::clock::{BootInstant, grantor_share};
use tidepool_proto::{LogTime, ObjectId};
use tokio::sync::watch;

use super::leases::LeaseTable;
use super::liveness::NodeTable;
use super::proposer::Proposer;

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
    first_index: u64,
    since: BootInstant,
    clock: LogClock,
    lease_ttl_max: Duration,
    reserve_gone: AtomicBool,
    put_bytes: AtomicU64,
    capacity_bytes: AtomicU64,
    victim_cursor: Mutex<Option<ObjectId>>,
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
        lease_ttl_max: Duration,
    ) -> Arc<Tenure> {
        Arc::new(Tenure {
            term,
            leases: LeaseTable::new(),
            nodes,
            proposer,
            first_index,
            since: BootInstant::now(),
            clock,
            lease_ttl_max,
            reserve_gone: AtomicBool::new(false),
            put_bytes: AtomicU64::new(0),
            capacity_bytes: AtomicU64::new(0),
            victim_cursor: Mutex::new(None),
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

    /// Notes that an allocation failed although only unprotected space was tried.
    pub fn set_reserve_gone(&self, gone: bool) {
        self.reserve_gone.store(gone, Ordering::Relaxed);
    }

    /// Whether the reserve was used up (L4).
    pub fn reserve_gone(&self) -> bool {
        self.reserve_gone.load(Ordering::Relaxed)
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

    /// Notes the bytes of all segments.
    pub fn set_capacity_bytes(&self, bytes: u64) {
        self.capacity_bytes.store(bytes, Ordering::Relaxed);
    }

    /// Where the next search for victims resumes.
    pub fn victim_cursor(&self) -> Option<ObjectId> {
        *self.victim_cursor.lock()
    }

    /// Notes where a search for victims ended; none starts again from the oldest object.
    pub fn set_victim_cursor(&self, cursor: Option<ObjectId>) {
        *self.victim_cursor.lock() = cursor;
    }

    /// Ends the term here: background work stops, waiting calls answer NOT_LEADER.
    pub fn end(&self) {
        self.over.send_replace(true);
    }

    /// Resolves when it ends.
    pub async fn ended(&self) {
        let mut over = self.over.subscribe();
        // The sender lives in self, so the wait can end only with the value.
        let _ended = over.wait_for(|over| *over).await;
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
