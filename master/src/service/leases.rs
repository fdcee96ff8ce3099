//! The leader's read leases (L1-L4): which objects' bytes a reader may still be fetching.
//!
//! Leases are keyed by object id, which covers every replica of the object: a reader is handed all of them. They live
//! outside the directory and outside the log; a new leader starts with none and protects its predecessor's by the
//! first-window rule (L4, `room.rs`).
//!
//! Lock order: a directory shard's read lock, then an entry here. Granting under the shard lock and marking under the
//! entry lock close the race of L1: either the mark sees the lease, or the reader sees the mark and waits for the entry.

use std::collections::{BTreeMap, BTreeSet};
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use dashmap::DashMap;
use dashmap::mapref::entry::Entry;
use parking_lot::RwLock;
use smallvec::SmallVec;
use tidepool_proto::{ObjectId, SegmentId};
use tokio::sync::Notify;

/// Object ids are well spread by one multiplication; SipHash would cost more than the table.
#[derive(Default)]
pub struct IdHasher(u64);

impl Hasher for IdHasher {
    fn finish(&self) -> u64 {
        self.0
    }
    fn write(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.write_u64(self.0 ^ u64::from(byte));
        }
    }
    fn write_u64(&mut self, id: u64) {
        let product = id.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        self.0 = product ^ product >> 32;
    }
}

struct Lease {
    until_ms: u64,
    /// Of all places.
    bytes: u64,
    /// On whose account the bytes are: the client that asked first.
    client: u64,
    count: u32,
    marked: bool,
    /// On which segments' accounts they are, and how many on each.
    segments: SmallVec<[Arc<SegmentLeases>; 1]>,
    part: u64,
}

impl Lease {
    /// Of nobody, on nothing.
    fn none() -> Lease {
        Lease { until_ms: 0, bytes: 0, client: 0, count: 0, marked: false, segments: SmallVec::new(), part: 0 }
    }
}

/// Bytes under lease in one segment, and how many may be (L5).
#[derive(Default)]
pub struct SegmentLeases {
    leased: AtomicU64,
    max: AtomicU64,
}

/// The segments that have a limit. One that was just mounted is added by the next sweep.
pub type LeasesBySegment = Arc<BTreeMap<SegmentId, Arc<SegmentLeases>>>;

/// What came of asking for a lease.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Granted {
    /// Protected for the time asked.
    Lease,
    /// The leased-bytes limit is reached: read without protection, verified (R1).
    Unprotected,
    /// A proposal to reclaim it is under way: wait for `unmarked` and look again.
    Marked,
}

/// What came of asking to reclaim an object's space in one entry.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Marked {
    /// No lease is live and none will be granted until the mark is dropped.
    Yes,
    /// A lease is live for this long.
    Leased {
        /// Milliseconds left.
        remaining_ms: u64,
    },
    /// Another proposal marked it.
    Already,
}

/// Under which terms leases are granted (L3, L5): what one request's grants share.
#[derive(Clone)]
pub struct LeaseTerms {
    /// The table's clock.
    pub now_ms: u64,
    /// How long.
    pub ttl_ms: u64,
    /// Bytes under lease at most, of all clients.
    pub bytes_max: u64,
    /// Bytes under lease at most, of this client.
    pub client_bytes_max: u64,
    /// Who asks.
    pub client: u64,
    /// Its bytes under lease.
    pub client_bytes: Arc<AtomicU64>,
    /// What the segments may have under lease.
    pub segments: LeasesBySegment,
}

/// Locks of the table: so many that a sweep over a million leases holds each for well below a millisecond.
const LOCKS: usize = 1024;

/// All leases of one term.
pub struct LeaseTable {
    leases: DashMap<u64, Lease, BuildHasherDefault<IdHasher>>,
    leased_bytes: AtomicU64,
    by_client: DashMap<u64, Arc<AtomicU64>, BuildHasherDefault<IdHasher>>,
    by_segment: RwLock<LeasesBySegment>,
    unmarked: Notify,
}

impl LeaseTable {
    /// An empty table.
    pub fn new() -> Arc<LeaseTable> {
        Arc::new(LeaseTable {
            leases: DashMap::with_hasher_and_shard_amount(BuildHasherDefault::default(), LOCKS),
            leased_bytes: AtomicU64::new(0),
            by_client: DashMap::with_hasher_and_shard_amount(BuildHasherDefault::default(), LOCKS),
            by_segment: RwLock::default(),
            unmarked: Notify::new(),
        })
    }

    /// Grants or extends a lease on bytes that are on no segment's account.
    pub fn grant(&self, object: ObjectId, bytes: u64, terms: &LeaseTerms) -> Granted {
        self.grant_in(object, bytes, std::iter::empty(), terms)
    }

    /// Grants or extends a lease on bytes that lie in equal parts in these segments. Call it under the directory's shard
    /// lock, having seen the object listed.
    pub fn grant_in(
        &self,
        object: ObjectId,
        bytes: u64,
        segments: impl ExactSizeIterator<Item = SegmentId>,
        terms: &LeaseTerms,
    ) -> Granted {
        let now_ms = terms.now_ms;
        let until_ms = now_ms.saturating_add(terms.ttl_ms);
        let entry = match self.leases.entry(object.0) {
            Entry::Occupied(mut entry) => {
                let lease = entry.get_mut();
                if lease.marked {
                    return Granted::Marked;
                }
                if lease.until_ms > now_ms || lease.until_ms == 0 {
                    lease.until_ms = lease.until_ms.max(until_ms);
                    lease.count = lease.count.saturating_add(1);
                    return Granted::Lease;
                }
                // It ran out and was not swept yet: the next one is a new lease, on its own client's account.
                let spent = std::mem::replace(lease, Lease::none());
                self.forget(spent);
                Entry::Occupied(entry)
            }
            vacant => vacant,
        };
        let above = |held: &AtomicU64, max: u64, more: u64| held.load(Ordering::Relaxed).saturating_add(more) > max;
        let part = bytes / segments.len().max(1) as u64;
        let segments: SmallVec<[Arc<SegmentLeases>; 1]> =
            segments.filter_map(|segment| terms.segments.get(&segment).cloned()).collect();
        let crowded = |s: &Arc<SegmentLeases>| above(&s.leased, s.max.load(Ordering::Relaxed), part);
        if above(&self.leased_bytes, terms.bytes_max, bytes)
            || above(&terms.client_bytes, terms.client_bytes_max, bytes)
            || segments.iter().any(crowded)
        {
            if let Entry::Occupied(entry) = entry {
                entry.remove();
            }
            return Granted::Unprotected;
        }
        self.leased_bytes.fetch_add(bytes, Ordering::Relaxed);
        terms.client_bytes.fetch_add(bytes, Ordering::Relaxed);
        for segment in &segments {
            segment.leased.fetch_add(part, Ordering::Relaxed);
        }
        let lease = Lease { until_ms, bytes, part, client: terms.client, count: 1, marked: false, segments };
        match entry {
            Entry::Occupied(mut entry) => *entry.get_mut() = lease,
            Entry::Vacant(entry) => drop(entry.insert(lease)),
        }
        Granted::Lease
    }

    /// The segments' accounts, as one request uses them.
    pub fn segments(&self) -> LeasesBySegment {
        self.by_segment.read().clone()
    }

    /// Sets how many bytes of each segment may be under lease. What is leased stays so.
    pub fn limit_segments(&self, limits: impl Iterator<Item = (SegmentId, u64)>) {
        let mut by_segment = self.by_segment.write();
        // An account that is in use stays, so that a list which is a moment old does not lose it.
        let in_use = |(_, account): &(&SegmentId, &Arc<SegmentLeases>)| account.leased.load(Ordering::Relaxed) > 0;
        let mut after: BTreeMap<_, _> =
            by_segment.iter().filter(in_use).map(|(&id, account)| (id, account.clone())).collect();
        for (id, max) in limits {
            let account = by_segment.get(&id).cloned().unwrap_or_default();
            account.max.store(max, Ordering::Relaxed);
            after.insert(id, account);
        }
        *by_segment = Arc::new(after);
    }

    /// Bytes of a segment under lease.
    #[cfg(test)]
    pub fn segment_bytes(&self, segment: SegmentId) -> u64 {
        self.segments().get(&segment).map_or(0, |account| account.leased.load(Ordering::Relaxed))
    }

    /// Bytes that a client has under lease.
    pub fn client_bytes(&self, client: u64) -> Arc<AtomicU64> {
        match self.by_client.get(&client) {
            Some(bytes) => bytes.clone(),
            None => self.by_client.entry(client).or_default().clone(),
        }
    }

    /// Gives one lease back; the last one frees the object at once (L3).
    pub fn release(&self, object: ObjectId) {
        if let Entry::Occupied(mut entry) = self.leases.entry(object.0) {
            let lease = entry.get_mut();
            lease.count = lease.count.saturating_sub(1);
            if lease.count == 0 {
                lease.until_ms = 0;
                if !lease.marked {
                    self.forget(entry.remove());
                }
            }
        }
    }

    /// Live leases of an object and milliseconds left, if any.
    pub fn live(&self, object: ObjectId, now_ms: u64) -> Option<(u32, u64)> {
        self.leases.get(&object.0).filter(|l| l.until_ms > now_ms).map(|l| (l.count, l.until_ms - now_ms))
    }

    /// Whether an object could be marked now. A mark alone decides (L1): this is for those who compare many and take few.
    pub fn could_be_marked(&self, object: ObjectId, now_ms: u64) -> bool {
        self.leases.get(&object.0).is_none_or(|lease| !lease.marked && lease.until_ms <= now_ms)
    }

    /// Number of entries, expired ones included until the next sweep.
    pub fn len(&self) -> usize {
        self.leases.len()
    }

    /// Bytes under lease.
    pub fn leased_bytes(&self) -> u64 {
        self.leased_bytes.load(Ordering::Relaxed)
    }

    /// Drops what has expired, and the accounts that nobody uses.
    pub fn sweep(&self, now_ms: u64) {
        self.by_client.retain(|_, bytes| bytes.load(Ordering::Relaxed) > 0 || Arc::strong_count(bytes) > 1);
        self.leases.retain(|_, lease| {
            let keep = lease.marked || lease.until_ms > now_ms;
            if !keep {
                self.forget(std::mem::replace(lease, Lease::none()));
            }
            keep
        });
    }

    /// Waits until some mark is dropped. Create the future before looking at the lease that is marked.
    pub fn unmarked(&self) -> tokio::sync::futures::Notified<'_> {
        self.unmarked.notified()
    }

    fn forget(&self, lease: Lease) {
        if lease.bytes > 0 {
            self.leased_bytes.fetch_sub(lease.bytes, Ordering::Relaxed);
            self.client_bytes(lease.client).fetch_sub(lease.bytes, Ordering::Relaxed);
            for segment in &lease.segments {
                segment.leased.fetch_sub(lease.part, Ordering::Relaxed);
            }
        }
    }

    fn set_mark(&self, object: ObjectId, now_ms: u64) -> Marked {
        match self.leases.entry(object.0) {
            Entry::Occupied(mut entry) => {
                let lease = entry.get_mut();
                if lease.marked {
                    return Marked::Already;
                }
                if lease.until_ms > now_ms {
                    return Marked::Leased { remaining_ms: lease.until_ms - now_ms };
                }
                lease.marked = true;
                Marked::Yes
            }
            Entry::Vacant(entry) => {
                entry.insert(Lease { marked: true, ..Lease::none() });
                Marked::Yes
            }
        }
    }

    fn clear_mark(&self, object: ObjectId) {
        if let Some((_, removed)) = self.leases.remove(&object.0) {
            self.forget(removed);
        }
    }
}

/// No-lease marks held by one proposal. They must live until the fate of its entry is known here: dropping them
/// earlier would let a lease be granted on space that the entry reclaims. [plant: look before mark]
pub struct Marks {
    table: Arc<LeaseTable>,
    objects: BTreeSet<ObjectId>,
    kept: AtomicBool,
}

impl Marks {
    /// No marks yet.
    pub fn new(table: Arc<LeaseTable>) -> Marks {
        Marks { table, objects: BTreeSet::new(), kept: AtomicBool::new(false) }
    }

    /// Marks one more object, unless it is leased or marked.
    pub fn mark(&mut self, object: ObjectId, now_ms: u64) -> Marked {
        let marked = self.table.set_mark(object, now_ms);
        if marked == Marked::Yes {
            self.objects.insert(object);
        }
        marked
    }

    /// Whether this set marked the object.
    pub fn holds(&self, object: ObjectId) -> bool {
        self.objects.contains(&object)
    }

    /// Whether nothing is marked by this set.
    pub fn is_empty(&self) -> bool {
        self.objects.is_empty()
    }

    /// Keeps the marks for the rest of the term: the fate of the entry is unknown, so it may yet reclaim the space.
    pub fn keep(&self) {
        self.kept.store(true, Ordering::Relaxed);
    }

    /// Takes over another set's marks.
    pub fn absorb(&mut self, mut other: Marks) {
        self.objects.append(&mut other.objects);
    }
}

impl Drop for Marks {
    fn drop(&mut self) {
        if *self.kept.get_mut() {
            return;
        }
        for &object in &self.objects {
            self.table.clear_mark(object);
        }
        if !self.objects.is_empty() {
            self.table.unmarked.notify_waiters();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn terms(table: &LeaseTable, now_ms: u64, ttl_ms: u64, bytes_max: u64) -> LeaseTerms {
        let client_bytes = table.client_bytes(1);
        let segments = table.segments();
        LeaseTerms { now_ms, ttl_ms, bytes_max, client_bytes_max: u64::MAX, client: 1, client_bytes, segments }
    }

    fn grant(table: &LeaseTable, object: ObjectId, bytes: u64, now_ms: u64) -> Granted {
        table.grant(object, bytes, &terms(table, now_ms, 100, u64::MAX))
    }

    #[test]
    fn leases_are_counted_and_one_release_leaves_one() {
        let table = LeaseTable::new();
        let object = ObjectId(16);
        assert_eq!(grant(&table, object, 10, 0), Granted::Lease);
        assert_eq!(grant(&table, object, 10, 50), Granted::Lease);
        table.release(object);
        assert_eq!(table.live(object, 60), Some((1, 90)));
        table.release(object);
        assert_eq!(table.live(object, 60), None);
        assert_eq!(table.leased_bytes(), 0);
    }

    #[test]
    fn a_leased_object_is_not_marked_until_the_lease_ends() {
        let table = LeaseTable::new();
        let object = ObjectId(16);
        grant(&table, object, 10, 0);
        let mut marks = Marks::new(table.clone());
        assert_eq!(marks.mark(object, 99), Marked::Leased { remaining_ms: 1 });
        assert_eq!(marks.mark(object, 100), Marked::Yes);
        assert_eq!(Marks::new(table.clone()).mark(object, 100), Marked::Already);
        assert_eq!(grant(&table, object, 10, 101), Granted::Marked, "no lease while marked");
        drop(marks);
        assert_eq!(grant(&table, object, 10, 102), Granted::Lease);
        assert_eq!(table.leased_bytes(), 10);
    }

    #[test]
    fn expired_leases_are_swept_and_marks_stay() {
        let table = LeaseTable::new();
        grant(&table, ObjectId(16), 10, 0);
        table.grant(ObjectId(32), 10, &terms(&table, 0, 200, u64::MAX));
        let mut marks = Marks::new(table.clone());
        marks.mark(ObjectId(48), 0);
        table.sweep(150);
        assert_eq!((table.len(), table.leased_bytes()), (2, 10));
    }

    #[test]
    fn above_the_limit_reads_are_unprotected() {
        let table = LeaseTable::new();
        assert_eq!(table.grant(ObjectId(16), 60, &terms(&table, 0, 100, 100)), Granted::Lease);
        assert_eq!(table.grant(ObjectId(32), 60, &terms(&table, 0, 100, 100)), Granted::Unprotected);
        assert_eq!(
            table.grant(ObjectId(16), 60, &terms(&table, 0, 100, 100)),
            Granted::Lease,
            "an extension costs nothing"
        );
    }

    /// L5: one client that looks at everything cannot freeze the pool for the others.
    #[test]
    fn a_client_above_its_share_is_not_protected_and_others_are() {
        let table = LeaseTable::new();
        let of = |client| LeaseTerms {
            client,
            client_bytes: table.client_bytes(client),
            client_bytes_max: 100,
            ..terms(&table, 0, 100, u64::MAX)
        };
        assert_eq!(table.grant(ObjectId(16), 60, &of(1)), Granted::Lease);
        assert_eq!(table.grant(ObjectId(32), 60, &of(1)), Granted::Unprotected);
        assert_eq!(table.grant(ObjectId(32), 60, &of(2)), Granted::Lease);
        table.sweep(100);
        assert_eq!(table.grant(ObjectId(48), 60, &of(1)), Granted::Lease, "what expired is off the account");
    }

    /// L5: half of a segment may be leased, whatever is free elsewhere. Fails when the segments' accounts are not looked at
    /// (tried), or not given back.
    #[test]
    fn a_segment_above_its_share_is_not_protected_and_others_are() {
        let table = LeaseTable::new();
        let (small, large) = (SegmentId(1), SegmentId(2));
        table.limit_segments([(small, 100), (large, 1_000)].into_iter());
        let grant = |object, bytes, segments: &[SegmentId], now_ms| {
            table.grant_in(ObjectId(object), bytes, segments.iter().copied(), &terms(&table, now_ms, 100, u64::MAX))
        };
        assert_eq!(grant(16, 60, &[small], 0), Granted::Lease);
        assert_eq!(grant(32, 60, &[small], 0), Granted::Unprotected);
        assert_eq!(grant(32, 60, &[large], 0), Granted::Lease);
        assert_eq!(grant(48, 160, &[large, small], 0), Granted::Unprotected, "a copy in each: one is above");
        assert_eq!(grant(48, 80, &[large, small], 0), Granted::Lease);
        assert_eq!((table.segment_bytes(small), table.segment_bytes(large)), (100, 100));
        assert_eq!(grant(16, 60, &[small], 50), Granted::Lease, "an extension costs nothing");
        table.release(ObjectId(48));
        assert_eq!((table.segment_bytes(small), table.segment_bytes(large)), (60, 60));
        // Limits set anew keep the accounts; what ran out is off them, swept or asked for again.
        table.limit_segments([(small, 120), (large, 1_000), (SegmentId(3), 1)].into_iter());
        assert_eq!(grant(64, 60, &[small], 100), Granted::Lease);
        assert_eq!(grant(32, 60, &[large], 100), Granted::Lease);
        assert_eq!((table.segment_bytes(small), table.segment_bytes(large)), (120, 60));
        table.sweep(300);
        assert_eq!((table.segment_bytes(small), table.segment_bytes(large), table.leased_bytes()), (0, 0, 0));
    }

    #[test]
    fn marks_of_an_entry_with_unknown_fate_stay_for_the_term() {
        let table = LeaseTable::new();
        let mut marks = Marks::new(table.clone());
        marks.mark(ObjectId(16), 0);
        marks.keep();
        drop(marks);
        assert_eq!(grant(&table, ObjectId(16), 1, 1), Granted::Marked);
    }

    #[tokio::test]
    async fn a_waiting_reader_wakes_when_the_mark_goes() {
        let table = LeaseTable::new();
        let mut marks = Marks::new(table.clone());
        marks.mark(ObjectId(16), 0);
        let waiting = table.unmarked();
        assert_eq!(grant(&table, ObjectId(16), 1, 0), Granted::Marked);
        drop(marks);
        waiting.await;
        assert_eq!(grant(&table, ObjectId(16), 1, 0), Granted::Lease);
    }
}
