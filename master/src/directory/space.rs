//! `Space`: the mounted segments, what of each is used for what, and which of them a put may choose.

use super::free_space::FreeSpace;
use super::objects::{Location, SegmentSlot};
use super::op::Contact;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use tidepool_proto::{Error, ErrorCode, Incarnation, NodeId, ObjectId, SegmentId};

/// One mounted segment.
#[derive(Debug)]
pub(super) struct Segment {
    pub(super) id: SegmentId,
    pub(super) node: NodeId,
    pub(super) incarnation: Incarnation,
    pub(super) name: Arc<str>,
    pub(super) host_id: Arc<str>,
    pub(super) contact: Contact,
    /// Replicas are to leave it: it takes no puts.
    pub(super) draining: bool,
    pub(super) capacity: u64,
    pub(super) free: FreeSpace,
    /// Bytes of open grants, readable replicas and retired replicas. With the free bytes: the capacity.
    pub(super) processing: u64,
    pub(super) complete: u64,
    pub(super) retired: u64,
    /// Object of each replica, by offset.
    pub(super) used: BTreeMap<u64, Location>,
}

impl Segment {
    /// Whether a put may choose it.
    pub(super) fn may_be_chosen(&self) -> bool {
        self.contact == Contact::Heard && !self.draining
    }

    /// SPACE-ADDS-UP.
    pub(super) fn adds_up(&self) -> bool {
        self.free.free() + self.processing + self.complete + self.retired == self.capacity
    }
}

/// What a replica's space is used for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Use {
    Processing,
    Complete,
    Retired,
}

impl Segment {
    fn counter(&mut self, used_for: Use) -> &mut u64 {
        match used_for {
            Use::Processing => &mut self.processing,
            Use::Complete => &mut self.complete,
            Use::Retired => &mut self.retired,
        }
    }
}

/// An extent of a segment in an image.
#[derive(Clone, Copy, Debug)]
pub(super) struct Extent {
    pub(super) segment: SegmentSlot,
    pub(super) offset: u64,
    pub(super) bytes: u64,
    pub(super) used_for: Use,
    /// The object of a replica that is not retired.
    pub(super) owner: Option<Location>,
}

/// A replica that left its object while its space stays out of use.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Retired {
    pub(super) object: ObjectId,
    pub(super) segment: SegmentSlot,
    pub(super) offset: u64,
    pub(super) bytes: u64,
    /// Clean space waits for `Reclaim`; unclean space for the node's fence (W5).
    pub(super) clean: bool,
}

/// All segments. A slot is a private number; whatever decides something goes by segment id.
#[derive(Debug, Default)]
pub(super) struct Space {
    slots: Vec<Option<Segment>>,
    vacant: Vec<SegmentSlot>,
    pub(super) by_id: BTreeMap<SegmentId, SegmentSlot>,
    /// Segments that puts may choose, by id: what random choice draws from.
    eligible: Vec<SegmentSlot>,
    /// The same by (largest free extent, id).
    by_largest: BTreeSet<(u64, SegmentId, SegmentSlot)>,
    /// Bytes of all segments.
    capacity: u64,
}

impl Space {
    /// The segment in a slot that a record names. Such a slot is mounted, always.
    pub(super) fn segment(&self, slot: SegmentSlot) -> &Segment {
        self.slots[slot as usize].as_ref().expect("a record names a mounted segment")
    }

    /// The segment in a slot, if there is one.
    pub(super) fn get(&self, slot: SegmentSlot) -> Option<&Segment> {
        self.slots.get(slot as usize)?.as_ref()
    }

    /// A segment's free space, for the auditor to walk.
    pub(super) fn free_mut(&mut self, slot: SegmentSlot) -> Option<&mut FreeSpace> {
        self.slots.get_mut(slot as usize)?.as_mut().map(|segment| &mut segment.free)
    }

    /// Bytes of all segments.
    pub(super) fn capacity(&self) -> u64 {
        self.capacity
    }

    /// Slot of a segment id, or SEGMENT_NOT_FOUND.
    pub(super) fn slot(&self, id: SegmentId) -> Result<SegmentSlot, Error> {
        self.by_id
            .get(&id)
            .copied()
            .ok_or_else(|| Error::new(ErrorCode::SegmentNotFound, format!("segment {id} is not mounted")))
    }

    /// All segments by id.
    pub(super) fn iter(&self) -> impl Iterator<Item = (SegmentSlot, &Segment)> {
        self.by_id.values().map(|&slot| (slot, self.segment(slot)))
    }

    /// Ids by slot; a vacant slot has id 0, which names nothing.
    pub(super) fn ids_by_slot(&self) -> Vec<SegmentId> {
        self.slots.iter().map(|slot| slot.as_ref().map_or(SegmentId(0), |s| s.id)).collect()
    }

    /// Segments that a put may choose, by id.
    pub(super) fn eligible(&self) -> &[SegmentSlot] {
        &self.eligible
    }

    /// Segments that a put may choose, the one with the largest free extent first.
    pub(super) fn by_largest(&self) -> impl Iterator<Item = (u64, SegmentSlot)> {
        self.by_largest.iter().rev().map(|&(largest, _, slot)| (largest, slot))
    }

    /// Largest extent that a put may get.
    pub(super) fn largest_free(&self) -> u64 {
        self.by_largest.last().map_or(0, |&(largest, ..)| largest)
    }

    /// Sum of the free extents' records of all segments.
    pub(super) fn digest(&self) -> u128 {
        self.iter().fold(0, |sum, (_, s)| sum.wrapping_add(s.free.digest()))
    }

    /// Adds a segment, all of it free.
    pub(super) fn mount(&mut self, segment: Segment) -> SegmentSlot {
        let id = segment.id;
        let slot = self.vacant.pop().unwrap_or_else(|| {
            self.slots.push(None);
            (self.slots.len() - 1) as SegmentSlot
        });
        assert!(self.slots[slot as usize].is_none() && self.by_id.insert(id, slot).is_none());
        self.capacity += segment.capacity;
        self.slots[slot as usize] = Some(segment);
        self.choose_eligible();
        slot
    }

    /// Takes a segment out; nothing may lie in it any more.
    pub(super) fn unmount(&mut self, slot: SegmentSlot) -> Segment {
        let segment = self.slots[slot as usize].take().expect("a mounted segment");
        assert!(segment.used.is_empty() && segment.retired == 0, "segment {} is in use", segment.id);
        self.by_id.remove(&segment.id);
        self.capacity -= segment.capacity;
        self.vacant.push(slot);
        self.choose_eligible();
        segment
    }

    /// Sets whether the segments of a node may be chosen.
    pub(super) fn set_contact(&mut self, node: NodeId, contact: Contact) {
        for segment in self.slots.iter_mut().flatten().filter(|s| s.node == node) {
            segment.contact = contact;
        }
        self.choose_eligible();
    }

    /// Sets whether a segment's replicas are to leave it.
    pub(super) fn set_draining(&mut self, slot: SegmentSlot, draining: bool) {
        self.slots[slot as usize].as_mut().expect("a mounted segment").draining = draining;
        self.choose_eligible();
    }

    fn choose_eligible(&mut self) {
        let chosen = |&slot: &SegmentSlot| self.segment(slot).may_be_chosen();
        let eligible: Vec<SegmentSlot> = self.by_id.values().copied().filter(chosen).collect();
        self.by_largest =
            eligible.iter().map(|&slot| (self.segment(slot).free.largest(), self.segment(slot).id, slot)).collect();
        self.eligible = eligible;
    }

    /// Changes a segment's space and keeps `by_largest` up.
    fn change<R>(&mut self, slot: SegmentSlot, f: impl FnOnce(&mut Segment) -> R) -> R {
        let segment = self.slots[slot as usize].as_mut().expect("a record names a mounted segment");
        let before = segment.free.largest();
        let result = f(segment);
        let after = segment.free.largest();
        if before != after && segment.may_be_chosen() {
            let id = segment.id;
            self.by_largest.remove(&(before, id, slot));
            self.by_largest.insert((after, id, slot));
        }
        result
    }

    /// Takes the best fitting extent of a segment; the caller knows that one fits.
    pub(super) fn allocate(&mut self, slot: SegmentSlot, bytes: u64) -> u64 {
        self.change(slot, |s| {
            s.processing += bytes;
            s.free.allocate(bytes).expect("the segment was chosen because an extent fits")
        })
    }

    /// Records whose replica an extent is.
    pub(super) fn note_used(&mut self, slot: SegmentSlot, offset: u64, at: Location) {
        let segment = self.slots[slot as usize].as_mut().expect("a record names a mounted segment");
        assert!(segment.used.insert(offset, at).is_none(), "segment {} offset {offset} is used twice", segment.id);
    }

    /// Moves bytes from one use to another.
    pub(super) fn convert(&mut self, slot: SegmentSlot, offset: u64, bytes: u64, from: Use, to: Use) {
        let segment = self.slots[slot as usize].as_mut().expect("a record names a mounted segment");
        *segment.counter(from) -= bytes;
        *segment.counter(to) += bytes;
        if to == Use::Retired {
            assert!(segment.used.remove(&offset).is_some(), "segment {} offset {offset} is not used", segment.id);
        }
    }

    /// Gives an extent back.
    pub(super) fn give(&mut self, slot: SegmentSlot, offset: u64, bytes: u64, from: Use) {
        self.change(slot, |s| {
            *s.counter(from) -= bytes;
            s.free.give(offset, bytes);
            if from != Use::Retired {
                assert!(s.used.remove(&offset).is_some(), "segment {} offset {offset} is not used", s.id);
            }
        });
    }

    /// Gives an extent back on trial: the counters and owners stay. Undo with `take_back`, or follow with `settle`.
    pub(super) fn give_on_trial(&mut self, slot: SegmentSlot, offset: u64, bytes: u64) {
        self.change(slot, |s| s.free.give(offset, bytes));
    }

    /// Undoes `give_on_trial`.
    pub(super) fn take_back(&mut self, slot: SegmentSlot, offset: u64, bytes: u64) {
        self.change(slot, |s| assert!(s.free.take(offset, bytes), "what was given on trial is free"));
    }

    /// Makes `give_on_trial` final for a replica that was readable.
    pub(super) fn settle(&mut self, slot: SegmentSlot, offset: u64, bytes: u64) {
        let segment = self.slots[slot as usize].as_mut().expect("a record names a mounted segment");
        segment.complete -= bytes;
        assert!(segment.used.remove(&offset).is_some(), "segment {} offset {offset} is not used", segment.id);
    }

    /// Takes all these extents of segments that are wholly free, when an image is read.
    pub(super) fn fill(&mut self, mut extents: Vec<Extent>) -> Result<(), String> {
        extents.sort_unstable_by_key(|extent| (extent.segment, extent.offset));
        for extents in extents.chunk_by(|a, b| a.segment == b.segment) {
            let segment = self.slots[extents[0].segment as usize].as_mut().expect("the slot was looked up");
            let used = extents.iter().map(|extent| (extent.offset, extent.bytes));
            segment.free = FreeSpace::between(segment.id, segment.capacity, used).map_err(|(offset, bytes)| {
                format!("{offset}+{bytes} of segment {} overlaps another extent or lies outside", segment.id)
            })?;
            extents.iter().for_each(|extent| *segment.counter(extent.used_for) += extent.bytes);
            segment.used = extents.iter().filter_map(|extent| Some((extent.offset, extent.owner?))).collect();
        }
        self.choose_eligible();
        Ok(())
    }

    /// Makes the bytes of all segments wrong.
    #[cfg(test)]
    pub(super) fn spoil(&mut self) {
        self.capacity += 1;
    }

    /// The owners of a segment's extents, to make them wrong.
    #[cfg(test)]
    pub(super) fn used_mut(&mut self, slot: SegmentSlot) -> &mut BTreeMap<u64, Location> {
        &mut self.slots[slot as usize].as_mut().expect("a mounted segment").used
    }

    /// What `eligible` and `by_largest` should be, from the segments.
    pub(super) fn indexes_agree(&self) -> bool {
        let mut fresh = BTreeSet::new();
        let mut eligible = Vec::new();
        for (slot, segment) in self.iter().filter(|(_, s)| s.may_be_chosen()) {
            fresh.insert((segment.free.largest(), segment.id, slot));
            eligible.push(slot);
        }
        fresh == self.by_largest && eligible == self.eligible
    }
}
