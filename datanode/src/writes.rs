//! Who writes where: open writes, grants that were used up, and fences (ONE-WRITER, W5).
//!
//! A grant fills its extent once. What keeps a replayed or late one from overwriting what came after it:
//! - a replica id that ended (stored or aborted) is remembered until its grant has expired in log time;
//! - a fenced id is refused until every grant that was open when the fence was sent has expired;
//! - when either memory is full the oldest ids make way and [`Inner::floor`] rises over them. Ids are monotonic, so everything at or
//!   below the floor is refused: a slow put fails and is retried, nothing is overwritten;
//! - when a new leader sets log time back, ids forgotten as expired could seem valid again: the floor rises over them too, and while
//!   no leader is followed it stands there.
//!
//! Lock order: `inner`, then the log clock. Neither is held while bytes move.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use parking_lot::Mutex;
use tidepool_proto::capability::{Capability, GRANT_LIFETIME_MAX_MS, LOG_TIME_TOLD_BEHIND_MS};
use tidepool_proto::clock::BootInstant;
use tidepool_proto::{LogTime, ReplicaId, SegmentId, planted};
use tokio::sync::Notify;

use crate::log_clock::{LogClock, Observed};

/// Named limits of the table.
#[derive(Clone, Copy, Debug)]
pub(crate) struct WriteLimits {
    /// Writes open at once.
    pub(crate) open_max: usize,
    /// Ended replica ids remembered.
    pub(crate) ended_max: usize,
    /// Fenced replica ids remembered.
    pub(crate) fenced_max: usize,
    /// Fence acknowledgements that wait for a beat; the leader repeats fences, so what is over the limit is not lost.
    pub(crate) acknowledgements_max: usize,
}

impl Default for WriteLimits {
    fn default() -> Self {
        WriteLimits { open_max: 16_384, ended_max: 1 << 20, fenced_max: 1 << 20, acknowledgements_max: 1 << 16 }
    }
}

/// How a replica's one write ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum End {
    /// Verified, kept.
    Stored,
    /// Nothing more will be written.
    Aborted,
}

/// Why a write was not opened.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum NotOpened {
    /// The grant has expired in log time.
    Expired,
    /// The grant was used already; it ended like this.
    Ended(End),
    /// The replica was fenced.
    Fenced,
    /// At or below the floor: too old to be told from a replay.
    TooOld,
    /// Another connection is writing this replica.
    Busy,
    /// A write to an overlapping range is open: ONE-WRITER would break.
    Overlaps(ReplicaId),
    /// The range is being verified for the leader.
    UnderVerification,
    /// [`WriteLimits::open_max`].
    TooMany,
    /// The life that this table is of has ended: [`WriteTable::abort_all`].
    Over,
}

/// A range of a segment held against every other writer. Only this module makes one.
#[derive(PartialEq, Eq, Debug)]
pub(crate) struct Claim {
    segment: SegmentId,
    offset: u64,
    length: u64,
}

impl Claim {
    pub(crate) fn offset(&self) -> u64 {
        self.offset
    }
    pub(crate) fn length(&self) -> u64 {
        self.length
    }
}

const ENTERED: u8 = 1;
const FENCED: u8 = 2;

/// One open write. Its memory may be touched only between `enter` and `leave`.
#[derive(Debug)]
pub(crate) struct OpenWrite {
    replica: ReplicaId,
    claim: Claim,
    expires: LogTime,
    state: AtomicU8,
}

impl OpenWrite {
    /// Claims the extent for one step, unless fenced.
    pub(crate) fn enter(&self) -> bool {
        self.state.compare_exchange(0, ENTERED, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }
    /// The extent; to be looked at only while entered.
    pub(crate) fn claim(&self) -> &Claim {
        &self.claim
    }
    fn fence(&self) -> u8 {
        self.state.fetch_or(FENCED, Ordering::AcqRel)
    }
}

#[derive(Debug)]
enum Holder {
    Writer(ReplicaId),
    Verification,
}

#[derive(Default)]
struct Inner {
    open: HashMap<ReplicaId, Arc<OpenWrite>>,
    /// Claimed ranges: (segment, offset) to (end, holder). They never overlap.
    claims: BTreeMap<(SegmentId, u64), (u64, Holder)>,
    ended: BTreeMap<ReplicaId, (End, LogTime)>,
    /// Fenced ids, with the log time after which no grant of theirs can be valid.
    fenced: BTreeMap<ReplicaId, LogTime>,
    floor: ReplicaId,
    /// Highest id forgotten because it had expired.
    forgotten: ReplicaId,
    /// Acknowledgements to send, with the beat that carried each last.
    acknowledgements: BTreeMap<ReplicaId, Option<u64>>,
    /// Set for good by [`WriteTable::abort_all`]: no range is claimed any more.
    is_over: bool,
}

/// Figures for metrics.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub(crate) struct WriteFigures {
    pub(crate) open: usize,
    pub(crate) ended: usize,
    pub(crate) fenced: usize,
    pub(crate) unacknowledged: usize,
}

/// The table of one incarnation.
pub(crate) struct WriteTable {
    limits: WriteLimits,
    clock: LogClock,
    inner: Mutex<Inner>,
    acknowledgement_ready: Notify,
    claim_ended: Notify,
}

impl WriteTable {
    pub(crate) fn new(limits: WriteLimits, clock: LogClock) -> WriteTable {
        WriteTable {
            limits,
            clock,
            inner: Mutex::default(),
            acknowledgement_ready: Notify::new(),
            claim_ended: Notify::new(),
        }
    }

    /// Log time as known here.
    pub(crate) fn clock(&self) -> &LogClock {
        &self.clock
    }

    /// Takes in the log time of a heartbeat answer. False: the answer comes from a leader of the past.
    pub(crate) fn observe(&self, term: u64, log_time: LogTime, at: BootInstant) -> bool {
        let mut inner = self.inner.lock();
        match self.clock.observe(term, log_time, at) {
            Observed::Advanced => true,
            Observed::SetBack => {
                inner.floor = inner.floor.max(inner.forgotten);
                true
            }
            Observed::StaleTerm => false,
        }
    }

    /// Opens the one write of a granted replica. The capability's MAC and bounds were checked before.
    pub(crate) fn begin(&self, grant: &Capability) -> Result<Arc<OpenWrite>, NotOpened> {
        let mut inner = self.inner.lock();
        // Under the lock: whoever forgets ids as expired judges by the same clock.
        match self.clock.now() {
            Some(now) if grant.expires < now => return Err(NotOpened::Expired),
            Some(now) => inner.forget_expired(now),
            None if grant.replica <= inner.forgotten => return Err(NotOpened::TooOld),
            None => {}
        }
        inner.check_unused(grant.replica)?;
        if inner.open.len() >= self.limits.open_max {
            return Err(NotOpened::TooMany);
        }
        let claim = Claim { segment: grant.segment, offset: grant.offset, length: grant.length };
        inner.claim(&claim, Holder::Writer(grant.replica))?;
        let open =
            Arc::new(OpenWrite { replica: grant.replica, claim, expires: grant.expires, state: AtomicU8::new(0) });
        inner.open.insert(grant.replica, open.clone());
        Ok(open)
    }

    /// Ends a step begun by `enter`. False: a fence arrived meanwhile, the write is over.
    pub(crate) fn leave(&self, write: &OpenWrite) -> bool {
        let before = write.state.fetch_and(!ENTERED, Ordering::AcqRel);
        assert!(before & ENTERED != 0, "left without entering: replica {}", write.replica);
        if before & FENCED != 0 {
            self.end_fenced(&mut self.inner.lock(), write);
            return false;
        }
        true
    }

    /// Ends the write, inside a step when `verified` says that all bytes are in place and right. Answers how it ended: a fence that
    /// came first makes it aborted.
    pub(crate) fn finish(&self, write: &OpenWrite, verified: End) -> End {
        let mut inner = self.inner.lock();
        let before = write.state.swap(FENCED, Ordering::AcqRel);
        if before & FENCED != 0 {
            if before & ENTERED != 0 {
                self.end_fenced(&mut inner, write);
            }
            return End::Aborted;
        }
        inner.close(write, verified, &self.limits);
        self.claim_ended.notify_waiters();
        verified
    }

    /// Ends every open write, when its life is over: those that are inside a step end with it. From then on no range is claimed, so
    /// that a table which became quiet stays quiet.
    pub(crate) fn abort_all(&self) {
        let mut inner = self.inner.lock();
        inner.is_over = true;
        let open: Vec<Arc<OpenWrite>> = inner.open.values().cloned().collect();
        for write in open {
            if write.fence() & ENTERED == 0 {
                inner.close(&write, End::Aborted, &self.limits);
            }
        }
        self.claim_ended.notify_waiters();
    }

    /// Whether no range is written or looked at.
    pub(crate) fn is_quiet(&self) -> bool {
        let inner = self.inner.lock();
        inner.open.is_empty() && inner.claims.is_empty()
    }

    /// Resolves when no range is written or looked at; a step takes one memory copy, never a wait for the network.
    pub(crate) async fn quiet(&self) {
        loop {
            let ended = self.claim_ended.notified();
            tokio::pin!(ended);
            ended.as_mut().enable();
            if self.is_quiet() {
                return;
            }
            ended.await;
        }
    }

    fn end_fenced(&self, inner: &mut Inner, write: &OpenWrite) {
        inner.close(write, End::Aborted, &self.limits);
        inner.acknowledge(write.replica, &self.limits);
        self.acknowledgement_ready.notify_one();
        self.claim_ended.notify_waiters();
    }

    /// Fences replicas on the leader's word, sent at `log_time`: no write to them begins or continues. Each is acknowledged once no
    /// step of a write to it is in progress. An id fenced before is acknowledged again, with the next regular beat: the leader repeats
    /// itself until the acknowledgement is committed.
    pub(crate) fn fence(&self, replicas: &[ReplicaId], log_time: LogTime) {
        if replicas.is_empty() {
            return;
        }
        let mut inner = self.inner.lock();
        let now = self.clock.at(BootInstant::now());
        // What was told lies behind what the leader went by when it gave the grant.
        let known = log_time.0.max(now.0).saturating_add(LOG_TIME_TOLD_BEHIND_MS);
        let until = LogTime(known.saturating_add(GRANT_LIFETIME_MAX_MS));
        let mut news = false;
        for &replica in replicas {
            news |= inner.fenced.insert(replica, until).is_none();
            let entered = match inner.open.get(&replica).cloned() {
                Some(_) if planted!(FenceWithoutAbort) => false,
                Some(write) if write.fence() & ENTERED != 0 => true,
                Some(write) => {
                    inner.close(&write, End::Aborted, &self.limits);
                    false
                }
                None => false,
            };
            if !entered {
                inner.acknowledge(replica, &self.limits);
            }
        }
        while inner.fenced.len() > self.limits.fenced_max {
            let (oldest, _) = inner.fenced.pop_first().expect("not empty");
            inner.floor = inner.floor.max(oldest);
        }
        if news {
            self.acknowledgement_ready.notify_one();
        }
    }

    /// Resolves when there is something new to acknowledge.
    pub(crate) async fn acknowledgement_ready(&self) {
        self.acknowledgement_ready.notified().await;
    }

    /// Acknowledgements for beat `sequence` that no earlier beat of this stream carried.
    pub(crate) fn take_acknowledgements(&self, sequence: u64, max: usize) -> Vec<u64> {
        let mut inner = self.inner.lock();
        let unsent = inner.acknowledgements.iter_mut().filter(|(_, sent)| sent.is_none()).take(max);
        unsent
            .map(|(replica, sent)| {
                *sent = Some(sequence);
                replica.0
            })
            .collect()
    }

    /// The leader answered beat `sequence`: what that and earlier beats carried has arrived.
    pub(crate) fn acknowledgements_arrived(&self, sequence: u64) {
        let mut inner = self.inner.lock();
        if !inner.acknowledgements.is_empty() {
            inner.acknowledgements.retain(|_, sent| sent.is_none_or(|sent| sent > sequence));
        }
    }

    /// The stream broke: whatever has no answer is sent again.
    pub(crate) fn acknowledgements_lost(&self) {
        self.inner.lock().acknowledgements.values_mut().for_each(|sent| *sent = None);
        self.acknowledgement_ready.notify_one();
    }

    /// Claims a range against writers while it is verified for the leader.
    pub(crate) fn hold_for_verification(
        self: &Arc<Self>,
        segment: SegmentId,
        offset: u64,
        length: u64,
    ) -> Result<VerificationHold, NotOpened> {
        let claim = Claim { segment, offset, length };
        self.inner.lock().claim(&claim, Holder::Verification)?;
        Ok(VerificationHold { table: self.clone(), claim })
    }

    pub(crate) fn figures(&self) -> WriteFigures {
        let inner = self.inner.lock();
        WriteFigures {
            open: inner.open.len(),
            ended: inner.ended.len(),
            fenced: inner.fenced.len(),
            unacknowledged: inner.acknowledgements.len(),
        }
    }
}

impl Inner {
    fn check_unused(&self, replica: ReplicaId) -> Result<(), NotOpened> {
        if self.open.contains_key(&replica) {
            return Err(NotOpened::Busy);
        }
        if let Some(&(end, _)) = self.ended.get(&replica) {
            return Err(NotOpened::Ended(end));
        }
        if self.fenced.contains_key(&replica) {
            return Err(NotOpened::Fenced);
        }
        if replica <= self.floor { Err(NotOpened::TooOld) } else { Ok(()) }
    }

    fn claim(&mut self, claim: &Claim, holder: Holder) -> Result<(), NotOpened> {
        if self.is_over {
            return Err(NotOpened::Over);
        }
        let end = claim.offset.saturating_add(claim.length);
        // Claims do not overlap each other, so the last one that starts before our end is the only candidate.
        let range = (claim.segment, 0)..(claim.segment, end);
        if let Some((_, (other_end, other))) = self.claims.range(range).next_back()
            && *other_end > claim.offset
        {
            return Err(match other {
                Holder::Writer(replica) => NotOpened::Overlaps(*replica),
                Holder::Verification => NotOpened::UnderVerification,
            });
        }
        self.claims.insert((claim.segment, claim.offset), (end, holder));
        Ok(())
    }

    fn close(&mut self, write: &OpenWrite, end: End, limits: &WriteLimits) {
        if self.open.remove(&write.replica).is_none() {
            return;
        }
        self.claims.remove(&(write.claim.segment, write.claim.offset));
        self.ended.insert(write.replica, (end, write.expires));
        while self.ended.len() > limits.ended_max {
            let (oldest, _) = self.ended.pop_first().expect("not empty");
            self.floor = self.floor.max(oldest);
        }
    }

    fn acknowledge(&mut self, replica: ReplicaId, limits: &WriteLimits) {
        if self.acknowledgements.len() < limits.acknowledgements_max {
            self.acknowledgements.insert(replica, None);
        }
    }

    /// Drops ended and fenced ids whose grants have expired, oldest first. Amortised: a few a call.
    fn forget_expired(&mut self, now: LogTime) {
        const FORGET_MAX: usize = 8;
        for _ in 0..FORGET_MAX {
            match self.ended.first_key_value() {
                Some((&replica, &(_, expires))) if expires < now => {
                    self.ended.pop_first();
                    self.forgotten = self.forgotten.max(replica);
                }
                _ => break,
            }
        }
        for _ in 0..FORGET_MAX {
            match self.fenced.first_key_value() {
                Some((&replica, &until)) if until < now => {
                    self.fenced.pop_first();
                    self.forgotten = self.forgotten.max(replica);
                }
                _ => break,
            }
        }
    }
}

/// A range kept from writers until dropped.
pub(crate) struct VerificationHold {
    table: Arc<WriteTable>,
    claim: Claim,
}

impl VerificationHold {
    pub(crate) fn claim(&self) -> &Claim {
        &self.claim
    }
}

impl Drop for VerificationHold {
    fn drop(&mut self) {
        self.table.inner.lock().claims.remove(&(self.claim.segment, self.claim.offset));
        self.table.claim_ended.notify_waiters();
    }
}

#[cfg(test)]
#[path = "writes_tests.rs"]
mod tests;
