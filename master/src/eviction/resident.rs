//! Resident objects: a slab in chunks, found by key, linked into lists by 32-bit slots.

use super::{Answer, Candidate, Inserted, REFUSALS_MAX, SKIPS_MAX, spread};
use hashbrown::{HashMap, HashTable};
use smallvec::SmallVec;
use std::collections::BTreeSet;
use tidepool_proto::ObjectId;

/// No slot.
pub(super) const NONE: u32 = u32::MAX;
/// Entries per chunk: the slab grows by this much and never moves.
const CHUNK: usize = 4096;
/// What `bytes` holds for a size that it cannot; the size is then in `large`.
const LARGE: u32 = u32::MAX;

/// One resident object: 40 bytes. What is public is the policy's own.
#[derive(Clone, Copy, Debug)]
pub(super) struct Entry {
    pub key: u64,
    pub object: ObjectId,
    bytes: u32,
    prev: u32,
    next: u32,
    /// The block before it in its chain; `NONE` if that is not known.
    pub parent: u32,
    /// When it was last used.
    pub tick: u32,
    /// Its place in its chain: always more than its parent's.
    pub depth: u16,
    /// Blocks whose parent it is.
    pub children: u8,
    /// What kind of block it is.
    pub tag: u8,
}

/// A list of entries, from the head, which goes last, to the tail, which goes first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct List {
    pub head: u32,
    pub tail: u32,
}

impl Default for List {
    fn default() -> List {
        List::EMPTY
    }
}

impl List {
    pub(super) const EMPTY: List = List { head: NONE, tail: NONE };

    pub(super) fn is_empty(self) -> bool {
        self.tail == NONE
    }
}

/// All resident objects.
#[derive(Default)]
pub(super) struct Residents {
    chunks: Vec<Box<[Entry]>>,
    /// Entries used so far; the free ones among them hang from `free` by `next`.
    used: u32,
    free: List,
    index: HashTable<u32>,
    /// Sizes of 4 GiB and more.
    large: HashMap<u32, u64>,
    group_of: HashMap<u32, u64>,
    groups: BTreeSet<(u64, u32)>,
    bytes: u64,
}

impl Residents {
    pub(super) fn len(&self) -> usize {
        self.index.len()
    }

    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    pub(super) fn memory_bytes(&self) -> usize {
        self.chunks.len() * CHUNK * size_of::<Entry>()
            + self.index.allocation_size()
            + self.large.allocation_size()
            + self.group_of.allocation_size()
            + self.groups.len() * size_of::<(u64, u32)>() * 2
    }

    pub(super) fn at(&self, slot: u32) -> &Entry {
        &self.chunks[slot as usize / CHUNK][slot as usize % CHUNK]
    }

    pub(super) fn at_mut(&mut self, slot: u32) -> &mut Entry {
        &mut self.chunks[slot as usize / CHUNK][slot as usize % CHUNK]
    }

    pub(super) fn find(&self, key: u64) -> Option<u32> {
        self.index.find(spread(key), |&slot| self.at(slot).key == key).copied()
    }

    /// All slots, hollow ones aside.
    #[cfg(test)]
    pub(super) fn slots(&self) -> Vec<u32> {
        self.index.iter().copied().collect()
    }

    /// The entries of a list, from the head; panics if its links do not agree.
    #[cfg(test)]
    pub(super) fn listed(&self, list: List) -> Vec<u32> {
        let (mut slots, mut prev, mut slot) = (Vec::new(), NONE, list.head);
        while slot != NONE {
            assert_eq!(self.at(slot).prev, prev, "links agree");
            slots.push(slot);
            (prev, slot) = (slot, self.at(slot).next);
        }
        assert_eq!(list.tail, prev, "the tail is last");
        slots
    }

    pub(super) fn size(&self, slot: u32) -> u64 {
        match self.at(slot).bytes {
            LARGE => self.large[&slot],
            bytes => u64::from(bytes),
        }
    }

    pub(super) fn candidate(&self, slot: u32) -> Candidate {
        let entry = self.at(slot);
        let group = if self.group_of.is_empty() { None } else { self.group_of.get(&slot).copied() };
        Candidate { key: entry.key, object: entry.object, bytes: self.size(slot), group }
    }

    /// Slots of a group's resident members.
    pub(super) fn members(&self, group: u64) -> impl Iterator<Item = u32> {
        self.groups.range((group, 0)..=(group, NONE)).map(|&(_, slot)| slot)
    }

    /// The next of its list towards the tail.
    pub(super) fn after(&self, slot: u32) -> u32 {
        self.at(slot).next
    }

    /// Notes when an entry took its place, for policies that know neither ticks nor parents.
    pub(super) fn set_turn(&mut self, slot: u32, turn: u64) {
        let entry = self.at_mut(slot);
        (entry.tick, entry.parent) = (turn as u32, (turn >> 32) as u32);
    }

    /// When it took its place.
    pub(super) fn turn(&self, slot: u32) -> u64 {
        let entry = self.at(slot);
        u64::from(entry.parent) << 32 | u64::from(entry.tick)
    }

    fn vacancy(&mut self) -> u32 {
        let slot = self.free.head;
        if slot == NONE {
            self.used += 1;
            return self.used - 1;
        }
        self.free.head = self.at(slot).next;
        slot
    }

    /// Adds an object whose key is not resident; it is in no list yet.
    pub(super) fn insert(&mut self, object: Inserted) -> u32 {
        let slot = self.vacancy();
        assert!(slot != NONE, "more objects than slots");
        let short = u32::try_from(object.bytes).ok().filter(|&bytes| bytes != LARGE);
        let entry = Entry {
            key: object.key,
            object: object.object,
            bytes: short.unwrap_or(LARGE),
            prev: NONE,
            next: NONE,
            parent: NONE,
            tick: 0,
            depth: 0,
            children: 0,
            tag: 0,
        };
        if slot as usize / CHUNK == self.chunks.len() {
            self.chunks.push(vec![entry; CHUNK].into_boxed_slice());
        }
        *self.at_mut(slot) = entry;
        if short.is_none() {
            self.large.insert(slot, object.bytes);
        }
        if let Some(group) = object.group {
            self.group_of.insert(slot, group);
            self.groups.insert((group, slot));
        }
        self.bytes += object.bytes;
        let chunks = &self.chunks;
        let hash = |&slot: &u32| spread(chunks[slot as usize / CHUNK][slot as usize % CHUNK].key);
        self.index.insert_unique(spread(object.key), slot, hash);
        slot
    }

    /// Forgets an object but keeps its slot; it must be in no list. `free` follows, at once or when nothing names it.
    pub(super) fn forget(&mut self, slot: u32) {
        self.bytes -= self.size(slot);
        let key = self.at(slot).key;
        if let Ok(found) = self.index.find_entry(spread(key), |&other| other == slot) {
            found.remove();
        }
        if self.at(slot).bytes == LARGE {
            self.large.remove(&slot);
            self.at_mut(slot).bytes = 0;
        }
        if !self.group_of.is_empty()
            && let Some(group) = self.group_of.remove(&slot)
        {
            self.groups.remove(&(group, slot));
        }
    }

    pub(super) fn free(&mut self, slot: u32) {
        self.at_mut(slot).next = self.free.head;
        self.free.head = slot;
    }

    pub(super) fn push_head(&mut self, list: &mut List, slot: u32) {
        let next = std::mem::replace(&mut list.head, slot);
        let entry = self.at_mut(slot);
        (entry.prev, entry.next) = (NONE, next);
        match next {
            NONE => list.tail = slot,
            next => self.at_mut(next).prev = slot,
        }
    }

    pub(super) fn push_tail(&mut self, list: &mut List, slot: u32) {
        let prev = std::mem::replace(&mut list.tail, slot);
        let entry = self.at_mut(slot);
        (entry.prev, entry.next) = (prev, NONE);
        match prev {
            NONE => list.head = slot,
            prev => self.at_mut(prev).next = slot,
        }
    }

    pub(super) fn unlink(&mut self, list: &mut List, slot: u32) {
        let Entry { prev, next, .. } = *self.at(slot);
        match prev {
            NONE => list.head = next,
            prev => self.at_mut(prev).next = next,
        }
        match next {
            NONE => list.tail = prev,
            next => self.at_mut(next).prev = prev,
        }
    }

    /// Puts an entry where its turn says, which is near the tail: what stands there took its place earlier.
    pub(super) fn put_by_turn(&mut self, list: &mut List, slot: u32) {
        let turn = self.turn(slot);
        let (mut prev, mut next) = (list.tail, NONE);
        while prev != NONE && self.turn(prev) < turn {
            (prev, next) = (self.at(prev).prev, prev);
        }
        let entry = self.at_mut(slot);
        (entry.prev, entry.next) = (prev, next);
        match prev {
            NONE => list.head = slot,
            prev => self.at_mut(prev).next = slot,
        }
        match next {
            NONE => list.tail = slot,
            next => self.at_mut(next).prev = slot,
        }
    }

    /// Appends a list at the tail of another: its entries go before the other's.
    pub(super) fn append(&mut self, list: &mut List, older: List) {
        if list.is_empty() {
            *list = older;
        } else if !older.is_empty() {
            self.at_mut(list.tail).next = older.head;
            self.at_mut(older.head).prev = list.tail;
            list.tail = older.tail;
        }
    }
}

/// What `victims` has chosen so far.
pub(super) struct Choice<'a> {
    pub chosen: Vec<Candidate>,
    /// Slots passed over, the first to go first.
    pub passed: Vec<u32>,
    passed_groups: BTreeSet<u64>,
    bytes: u64,
    wanted: u64,
    limit: usize,
    refusals_left: usize,
    accept: &'a mut dyn FnMut(&Candidate) -> Answer,
}

impl<'a> Choice<'a> {
    pub(super) fn new(wanted: u64, limit: usize, accept: &'a mut dyn FnMut(&Candidate) -> Answer) -> Choice<'a> {
        let (chosen, passed, passed_groups) = (Vec::new(), Vec::new(), BTreeSet::new());
        Choice { chosen, passed, passed_groups, bytes: 0, wanted, limit, refusals_left: REFUSALS_MAX, accept }
    }

    pub(super) fn is_done(&self) -> bool {
        self.bytes >= self.wanted
            || self.chosen.len() >= self.limit
            || self.refusals_left == 0
            || self.passed.len() >= SKIPS_MAX
    }

    /// Chooses a candidate and its group, refuses both, or passes over it. Its slots are to be put off if they were chosen
    /// or refused, and to be taken out of the order for the rest of the call if not, so that nothing is looked at twice.
    pub(super) fn offer(&mut self, residents: &Residents, slot: u32) -> Offer {
        let candidate = residents.candidate(slot);
        let mut slots: SmallVec<[u32; 1]> = SmallVec::from_buf([slot]);
        if let Some(group) = candidate.group {
            if self.passed_groups.contains(&group) {
                self.passed.push(slot);
                return Offer { slots, answer: Answer::Skip };
            }
            slots.extend(residents.members(group).filter(|&member| member != slot));
        }
        let before = self.chosen.len();
        for &member in &slots {
            let candidate = residents.candidate(member);
            let answer = (self.accept)(&candidate);
            if answer == Answer::Take {
                self.chosen.push(candidate);
                continue;
            }
            self.chosen.truncate(before);
            if answer == Answer::Refuse {
                self.refusals_left -= 1;
                return Offer { slots, answer };
            }
            self.passed.push(slot);
            self.passed_groups.extend(candidate.group);
            return Offer { slots: SmallVec::from_buf([slot]), answer };
        }
        self.bytes += self.chosen[before..].iter().map(|candidate| candidate.bytes).sum::<u64>();
        Offer { slots, answer: Answer::Take }
    }
}

/// What became of a candidate and its group.
pub(super) struct Offer {
    pub slots: SmallVec<[u32; 1]>,
    pub answer: Answer,
}
