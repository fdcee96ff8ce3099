//! Object records and the shards that hold them: a slab of records and a table of slots by key.

use super::groups::GroupName;
use super::limits::{OBJECTS_PER_SHARD_MAX, SHARD_BITS, SHARDS};
use super::op::{DataType, TenantId};
use hashbrown::HashTable;
use parking_lot::{RwLock, RwLockReadGuard, RwLockWriteGuard};
use smallvec::SmallVec;
use std::collections::{BTreeMap, btree_map};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use tidepool_proto::ids::REPLICAS_PER_OBJECT_MAX;
use tidepool_proto::{LogTime, ObjectId, ReplicaId};
use xxhash_rust::xxh3::xxh3_64_with_seed;

/// Slot of a segment in `Space`: a private number of this process, never part of the state.
pub(super) type SegmentSlot = u32;

/// One replica: 24 bytes. Its extent's length follows from the object's.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Replica {
    pub(super) id: ReplicaId,
    pub(super) offset: u64,
    pub(super) segment: SegmentSlot,
}

/// One object: 88 bytes and its key.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Record {
    pub(super) key: Box<[u8]>,
    pub(super) object: ObjectId,
    pub(super) length: u64,
    pub(super) started: LogTime,
    /// Granted and not dropped since; never empty, never two in one segment.
    pub(super) replicas: SmallVec<[Replica; 1]>,
    /// What only some objects have.
    pub(super) extras: Option<Box<Extras>>,
    pub(super) tenant: TenantId,
    /// Slots of the replicas that PutEnd said were stored: what a second end must agree with.
    pub(super) stored_slots: u16,
    /// Replicas asked for and granted.
    pub(super) asked: Asked,
    /// Copies that PutEnd answered; 0 while it is being put.
    pub(super) copies: u8,
    pub(super) data_type: DataType,
    /// Never evicted.
    pub(super) hard_pinned: bool,
}

/// Replicas that an object should have, and those that its grant had: each at most 15, both in one byte.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Asked(u8);

impl Asked {
    /// Both numbers; None if one does not fit.
    pub(super) fn of(wanted: u8, granted: u8) -> Option<Asked> {
        (wanted.max(granted) as usize <= REPLICAS_PER_OBJECT_MAX).then_some(Asked(wanted << 4 | granted))
    }
    /// Replicas that the object should have: what the put asked for, and what tasks added since.
    pub(super) fn wanted(self) -> u8 {
        self.0 >> 4
    }
    /// Replicas that the grant had.
    pub(super) fn granted(self) -> u8 {
        self.0 & 15
    }
    /// The same grant with at least so many wanted.
    pub(super) fn at_least(self, wanted: usize) -> Asked {
        let wanted = wanted.min(REPLICAS_PER_OBJECT_MAX) as u8;
        Asked(self.wanted().max(wanted) << 4 | self.granted())
    }
    /// The same grant with one less wanted, but at least one.
    pub(super) fn one_less(self) -> Asked {
        Asked(self.wanted().saturating_sub(1).max(1) << 4 | self.granted())
    }
}

/// What only some objects have.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub(super) struct Extras {
    /// Name of its group, shared by all members.
    pub(super) group: Option<Arc<[u8]>>,
    /// Log time until which it is soft-pinned; 0: it is not.
    pub(super) soft_pinned_until: LogTime,
}

impl Record {
    /// Ended; otherwise it is being put.
    pub(super) fn is_complete(&self) -> bool {
        self.copies > 0
    }
    /// Name of its group, if it has one.
    pub(super) fn group(&self) -> Option<&Arc<[u8]>> {
        self.extras.as_ref()?.group.as_ref()
    }
    /// The same with its tenant.
    pub(super) fn group_name(&self) -> Option<GroupName> {
        self.group().map(|name| (self.tenant, name.clone()))
    }
    /// Log time until which it is soft-pinned; 0: it is not.
    pub(super) fn soft_pinned_until(&self) -> LogTime {
        self.extras.as_ref().map_or(LogTime(0), |extras| extras.soft_pinned_until)
    }
    /// Sets until when it is soft-pinned; 0: not.
    pub(super) fn soft_pin(&mut self, until: LogTime) {
        if until.0 != 0 || self.extras.is_some() {
            self.extras.get_or_insert_default().soft_pinned_until = until;
        }
    }
    /// Bytes of all replicas' extents.
    pub(super) fn all_bytes(&self) -> u64 {
        self.extent_bytes() * self.replicas.len() as u64
    }
    /// The same of what is pinned for good; else 0.
    pub(super) fn hard_pinned_bytes(&self) -> u64 {
        if self.hard_pinned { self.all_bytes() } else { 0 }
    }
    /// COMPLETE, with fewer replicas than are wanted.
    pub(super) fn is_degraded(&self) -> bool {
        self.is_complete() && self.replicas.len() < usize::from(self.asked.wanted())
    }
    /// COMPLETE, with more replicas than are wanted.
    pub(super) fn has_extra(&self) -> bool {
        self.is_complete() && self.replicas.len() > usize::from(self.asked.wanted())
    }
    /// Bytes of each replica's extent.
    pub(super) fn extent_bytes(&self) -> u64 {
        tidepool_proto::object::extent_bytes(self.length)
    }
}

/// Where a record lies: shard and slot in 32 bits.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Location(u32);

impl Location {
    pub(super) fn new(shard: usize, slot: u32) -> Location {
        assert!(shard < SHARDS && (slot as usize) < OBJECTS_PER_SHARD_MAX);
        Location((shard as u32) << (32 - SHARD_BITS) | slot)
    }
    pub(super) fn shard(self) -> usize {
        (self.0 >> (32 - SHARD_BITS)) as usize
    }
    pub(super) fn slot(self) -> u32 {
        self.0 & (OBJECTS_PER_SHARD_MAX as u32 - 1)
    }
}

/// Records allocate in chunks, so that a slab never doubles.
const CHUNK: usize = 32;
/// Memory of one entry of an undo list, beside the key: a tree's nodes are two thirds full.
const UNDO_ENTRY_BYTES: u64 = (size_of::<(u32, Option<Record>)>() * 3 / 2) as u64;
type Chunk = Box<[Option<Record>; CHUNK]>;

/// One shard of the key space.
#[derive(Debug, Default)]
pub(super) struct Shard {
    table: HashTable<u32>,
    chunks: Vec<Chunk>,
    vacant: Vec<u32>,
    len: usize,
    /// While a freeze is written: the slots changed since, as they were (None: vacant).
    undo: Option<BTreeMap<u32, Option<Record>>>,
    /// Memory of what was noted there, about.
    undo_bytes: u64,
}

impl Shard {
    /// The slot of a key.
    pub(super) fn find(&self, hash: u64, tenant: TenantId, key: &[u8]) -> Option<u32> {
        self.table.find(hash, |&slot| self.record(slot).is_some_and(|r| r.tenant == tenant && *r.key == *key)).copied()
    }

    /// The record in a slot.
    pub(super) fn record(&self, slot: u32) -> Option<&Record> {
        self.chunks.get(slot as usize / CHUNK)?[slot as usize % CHUNK].as_ref()
    }

    /// The record in a slot, to change anything but its key.
    pub(super) fn record_mut(&mut self, slot: u32) -> Option<&mut Record> {
        self.note(slot);
        self.chunks.get_mut(slot as usize / CHUNK)?[slot as usize % CHUNK].as_mut()
    }

    /// Keeps a slot's content for a freeze that is being written, before it changes.
    fn note(&mut self, slot: u32) {
        let Some(undo) = &mut self.undo else { return };
        let place = self.chunks.get(slot as usize / CHUNK).map(|chunk| &chunk[slot as usize % CHUNK]);
        if let btree_map::Entry::Vacant(entry) = undo.entry(slot) {
            let noted = entry.insert(place.and_then(Option::clone));
            self.undo_bytes += UNDO_ENTRY_BYTES + noted.as_ref().map_or(0, |record| record.key.len() as u64);
        }
    }

    /// The records in these slots as they were at the freeze.
    pub(super) fn frozen_records(&self, slots: Range<u32>) -> impl Iterator<Item = &Record> {
        let undo = self.undo.as_ref();
        slots.filter_map(move |slot| match undo.and_then(|undo| undo.get(&slot)) {
            Some(noted) => noted.as_ref(),
            None => self.record(slot),
        })
    }

    /// All records with their slots, in no meaningful order.
    pub(super) fn records_by_slot(&self) -> impl Iterator<Item = (u32, &Record)> {
        (0..self.slots() as u32).filter_map(|slot| Some((slot, self.record(slot)?)))
    }

    /// All records, in no meaningful order.
    pub(super) fn records(&self) -> impl Iterator<Item = &Record> {
        self.chunks.iter().flat_map(|chunk| chunk.iter().flatten())
    }

    /// Slots, vacant ones included.
    pub(super) fn slots(&self) -> usize {
        self.chunks.len() * CHUNK
    }

    /// Records held.
    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// Whether no slot is left.
    pub(super) fn is_full(&self) -> bool {
        self.len >= OBJECTS_PER_SHARD_MAX
    }

    /// Puts a record into a slot, under no key yet.
    fn insert(&mut self, record: Record) -> u32 {
        let slot = match self.vacant.pop() {
            Some(slot) => slot,
            None => {
                let first = (self.chunks.len() * CHUNK) as u32;
                self.chunks.push(Box::new([const { None }; CHUNK]));
                self.vacant.extend((first + 1..first + CHUNK as u32).rev());
                first
            }
        };
        self.note(slot);
        let place = &mut self.chunks[slot as usize / CHUNK][slot as usize % CHUNK];
        assert!(place.is_none(), "slot {slot} is taken");
        *place = Some(record);
        self.len += 1;
        slot
    }

    /// Puts a record into a slot, under its key or under none, of a shard that is not yet one of `Shards`.
    pub(super) fn place(&mut self, number: usize, hash: u64, record: Record, attach: bool) -> Location {
        let slot = self.insert(record);
        if attach {
            self.attach(hash, slot);
        }
        Location::new(number, slot)
    }

    /// Puts the record in a slot under its key, which no other has.
    fn attach(&mut self, hash: u64, slot: u32) {
        let chunks = &self.chunks;
        self.table.insert_unique(hash, slot, |&slot| {
            let record = chunks[slot as usize / CHUNK][slot as usize % CHUNK].as_ref();
            let record = record.expect("every slot in the table has a record");
            key_hash(record.tenant, &record.key)
        });
    }

    fn remove(&mut self, hash: u64, slot: u32) -> Option<Record> {
        self.note(slot);
        let record = self.chunks.get_mut(slot as usize / CHUNK)?[slot as usize % CHUNK].take()?;
        if let Ok(entry) = self.table.find_entry(hash, |&s| s == slot) {
            entry.remove();
        }
        self.vacant.push(slot);
        self.len -= 1;
        Some(record)
    }
}

/// Hash of a key: picks the shard and the bucket. The same in every process, because images are written by shards.
pub(super) fn key_hash(tenant: TenantId, key: &[u8]) -> u64 {
    xxh3_64_with_seed(key, u64::from(tenant.0).wrapping_mul(0x9e37_79b9_7f4a_7c15))
}

/// All shards. Lock order: core, topology, then one shard at a time.
#[derive(Debug)]
pub(super) struct Shards {
    shards: Box<[RwLock<Shard>]>,
    is_frozen: AtomicBool,
    epoch: AtomicU64,
}

impl Shards {
    pub(super) fn new() -> Shards {
        let shards = (0..SHARDS).map(|_| RwLock::new(Shard::default())).collect();
        Shards { shards, is_frozen: AtomicBool::new(false), epoch: AtomicU64::new(0) }
    }

    /// Hash of a key.
    pub(super) fn hash(&self, tenant: TenantId, key: &[u8]) -> u64 {
        key_hash(tenant, key)
    }

    /// Shard of a hash: bits that the table uses neither for buckets nor for tags.
    pub(super) fn shard_of(hash: u64) -> usize {
        (hash >> 32) as usize & (SHARDS - 1)
    }

    pub(super) fn read(&self, shard: usize) -> RwLockReadGuard<'_, Shard> {
        self.shards[shard].read()
    }

    pub(super) fn write(&self, shard: usize) -> RwLockWriteGuard<'_, Shard> {
        self.shards[shard].write()
    }

    /// Where a key's record lies.
    pub(super) fn locate(&self, hash: u64, tenant: TenantId, key: &[u8]) -> Option<Location> {
        let shard = Shards::shard_of(hash);
        self.read(shard).find(hash, tenant, key).map(|slot| Location::new(shard, slot))
    }

    /// Whether a key's shard has a slot left.
    pub(super) fn has_room(&self, hash: u64) -> bool {
        !self.read(Shards::shard_of(hash)).is_full()
    }

    /// Adds a record whose key is not there; `hash` is its key's.
    pub(super) fn insert(&self, hash: u64, record: Record) -> Location {
        let number = Shards::shard_of(hash);
        let mut shard = self.write(number);
        let slot = shard.insert(record);
        shard.attach(hash, slot);
        Location::new(number, slot)
    }

    /// Adds a record that is not found under its key, which another has: an upsert's new value.
    pub(super) fn insert_detached(&self, hash: u64, record: Record) -> Location {
        let number = Shards::shard_of(hash);
        let slot = self.write(number).insert(record);
        Location::new(number, slot)
    }

    /// Puts a detached record under its key, which no other has any more.
    pub(super) fn attach(&self, at: Location) {
        let mut shard = self.write(at.shard());
        let hash = shard.record(at.slot()).map(|r| self.hash(r.tenant, &r.key)).expect("the caller found it");
        shard.attach(hash, at.slot());
    }

    /// Puts a detached record under its key in the place of the one that has it, in one step: whoever looks finds the one or the other.
    pub(super) fn switch(&self, from: Location, to: Location) {
        assert_eq!(from.shard(), to.shard(), "two records of one key lie in its shard");
        let mut shard = self.write(to.shard());
        let hash = shard.record(to.slot()).map(|r| self.hash(r.tenant, &r.key)).expect("the caller found it");
        let mut place = shard.table.find_entry(hash, |&slot| slot == from.slot()).expect("a key has its record");
        *place.get_mut() = to.slot();
    }

    /// Takes a record out.
    pub(super) fn remove(&self, at: Location) -> Option<Record> {
        let mut shard = self.write(at.shard());
        let hash = shard.record(at.slot()).map(|r| self.hash(r.tenant, &r.key))?;
        shard.remove(hash, at.slot())
    }

    /// Runs `f` on a record under its shard's read lock.
    pub(super) fn with<R>(&self, at: Location, f: impl FnOnce(&Record) -> R) -> Option<R> {
        self.read(at.shard()).record(at.slot()).map(f)
    }

    /// Replaces all content, and gives back what was there: the caller drops it when nobody waits for its locks.
    #[must_use]
    pub(super) fn replace(&self, with: Shards) -> Vec<impl Sized> {
        self.epoch.fetch_add(1, Ordering::SeqCst);
        let pairs = self.shards.iter().zip(with.shards);
        pairs.map(|(shard, new)| std::mem::replace(&mut *shard.write(), new.into_inner())).collect()
    }

    /// Starts undo lists; false when another freeze has them. The caller keeps apply away.
    pub(super) fn freeze(&self) -> bool {
        if self.is_frozen.swap(true, Ordering::SeqCst) {
            return false;
        }
        self.shards.iter().for_each(|shard| shard.write().undo = Some(BTreeMap::new()));
        true
    }

    /// Ends the undo lists.
    pub(super) fn thaw(&self) {
        (0..SHARDS).for_each(|shard| self.forget(shard));
        self.is_frozen.store(false, Ordering::SeqCst);
    }

    /// Ends a shard's undo list: the freeze needs it no more.
    pub(super) fn forget(&self, shard: usize) {
        let mut shard = self.write(shard);
        let undo = shard.undo.take();
        shard.undo_bytes = 0;
        // It may be as long as the shard: freed without the lock.
        drop(shard);
        drop(undo);
    }

    /// Memory that the undo lists take, about: at most one copy of every record.
    pub(super) fn undo_bytes(&self) -> u64 {
        if !self.is_frozen.load(Ordering::SeqCst) {
            return 0;
        }
        self.shards.iter().map(|shard| shard.read().undo_bytes).sum()
    }

    /// Grows when the whole content is replaced.
    pub(super) fn epoch(&self) -> u64 {
        self.epoch.load(Ordering::SeqCst)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_has_the_size_the_memory_budget_counts_on() {
        assert_eq!(size_of::<Replica>(), 24);
        assert_eq!(size_of::<Option<Record>>(), 88);
    }

    #[test]
    fn asked_keeps_two_numbers_in_a_byte() {
        for wanted in 0..=15 {
            for granted in 0..=15 {
                let asked = Asked::of(wanted, granted).unwrap();
                assert_eq!((asked.wanted(), asked.granted()), (wanted, granted));
                let more = asked.at_least(7);
                assert_eq!((more.wanted(), more.granted()), (wanted.max(7), granted));
            }
        }
        assert_eq!(Asked::of(2, 3).unwrap().one_less().one_less(), Asked::of(1, 3).unwrap());
        assert_eq!((Asked::of(16, 1), Asked::of(1, 16)), (None, None));
        assert_eq!(Asked::of(1, 1).unwrap().at_least(99).wanted(), 15);
    }
}
