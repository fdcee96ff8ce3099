//! `FreeSpace`: the free extents of one segment. Best fit by (length, address), neighbours merged: what is free
//! depends only on what is used, never on the order in which it became so (M4).

use super::audit::Part;
use std::collections::{BTreeMap, BTreeSet};
use tidepool_proto::{SegmentId, planted};

/// Free extents by address and by (length, address), with their digest.
#[derive(Debug)]
pub(super) struct FreeSpace {
    segment: SegmentId,
    by_address: BTreeMap<u64, u64>,
    by_length: BTreeSet<(u64, u64)>,
    free: u64,
    digest: Part<u64>,
    /// Free bytes that the auditor has passed.
    walked_bytes: u64,
}

impl FreeSpace {
    /// All of a segment.
    pub(super) fn new(segment: SegmentId, capacity: u64) -> FreeSpace {
        let mut space = FreeSpace {
            segment,
            by_address: BTreeMap::new(),
            by_length: BTreeSet::new(),
            free: 0,
            digest: Part::default(),
            walked_bytes: 0,
        };
        if capacity > 0 {
            space.insert(0, capacity);
        }
        space
    }

    /// What lies between these used extents, which are in the order of their addresses. The error names one that overlaps
    /// the one before it or lies outside.
    pub(super) fn between(
        segment: SegmentId,
        capacity: u64,
        used: impl Iterator<Item = (u64, u64)>,
    ) -> Result<FreeSpace, (u64, u64)> {
        let mut space = FreeSpace::new(segment, 0);
        let mut gaps = Vec::new();
        let mut end = 0;
        for (offset, length) in used {
            let next = offset.checked_add(length).filter(|&next| next <= capacity && length > 0 && offset >= end);
            let next = next.ok_or((offset, length))?;
            if offset > end {
                gaps.push((end, offset - end));
            }
            end = next;
        }
        if capacity > end {
            gaps.push((end, capacity - end));
        }
        space.free = gaps.iter().map(|&(_, length)| length).sum();
        gaps.iter().for_each(|&(offset, length)| space.digest.add(&offset, |c| c.free_extent(segment, offset, length)));
        space.by_length = gaps.iter().map(|&(offset, length)| (length, offset)).collect();
        space.by_address = gaps.into_iter().collect();
        Ok(space)
    }

    /// Free bytes.
    pub(super) fn free(&self) -> u64 {
        self.free
    }

    /// Longest free extent.
    pub(super) fn largest(&self) -> u64 {
        self.by_length.last().map_or(0, |&(length, _)| length)
    }

    /// Number of free extents.
    pub(super) fn extents(&self) -> usize {
        self.by_address.len()
    }

    /// Free extents by address.
    pub(super) fn iter(&self) -> impl Iterator<Item = (u64, u64)> {
        self.by_address.iter().map(|(&offset, &length)| (offset, length))
    }

    /// Length of the free extent that starts at `offset`.
    pub(super) fn at(&self, offset: u64) -> Option<u64> {
        self.by_address.get(&offset).copied()
    }

    /// The free extent that ends at `offset`, as (start, length).
    pub(super) fn ending_at(&self, offset: u64) -> Option<(u64, u64)> {
        let (&start, &length) = self.by_address.range(..offset).next_back()?;
        (start + length == offset).then_some((start, length))
    }

    /// Sum over the free extents' records.
    pub(super) fn digest(&self) -> u128 {
        self.digest.sum()
    }

    /// Whether a part of an extent is free.
    pub(super) fn overlaps(&self, offset: u64, length: u64) -> bool {
        let before = self.by_address.range(..offset.saturating_add(length)).next_back();
        before.is_some_and(|(&start, &free)| start.saturating_add(free) > offset)
    }

    /// The auditor walks free extents from an address on, at most so many: how many there were, and where it goes on.
    pub(super) fn audit(&mut self, from: u64, limit: usize) -> (usize, Option<u64>) {
        if from == 0 {
            self.digest.restart();
            self.walked_bytes = 0;
        }
        let (mut looked_at, mut next) = (0, None);
        for (&offset, &length) in self.by_address.range(from..) {
            if looked_at == limit {
                next = Some(offset);
                break;
            }
            looked_at += 1;
            self.digest.walk(|c| c.free_extent(self.segment, offset, length));
            self.walked_bytes = self.walked_bytes.wrapping_add(length);
        }
        self.digest.go_on_at(next);
        (looked_at, next)
    }

    /// Whether what was walked is what is kept up.
    pub(super) fn audited(&self) -> Result<(), String> {
        if let Some((kept, found)) = self.digest.difference() {
            return Err(format!("the free extents' running sum is {kept:032x}, theirs is {found:032x}"));
        }
        if self.walked_bytes != self.free {
            return Err(format!("{} bytes are counted free, the free extents have {}", self.free, self.walked_bytes));
        }
        if self.by_length.len() != self.by_address.len() {
            let (by_length, by_address) = (self.by_length.len(), self.by_address.len());
            return Err(format!("{by_length} free extents by length, {by_address} by address"));
        }
        Ok(())
    }

    /// Makes the count of free bytes wrong.
    #[cfg(test)]
    pub(super) fn spoil(&mut self) {
        self.free += 64;
    }

    /// The two indexes and the sum of lengths agree.
    pub(super) fn is_consistent(&self) -> bool {
        self.by_address.len() == self.by_length.len()
            && self.by_address.iter().all(|(&offset, &length)| self.by_length.contains(&(length, offset)))
            && self.by_address.values().sum::<u64>() == self.free
    }

    /// Takes the shortest extent that fits, the lowest address among equals; its front is used.
    pub(super) fn allocate(&mut self, length: u64) -> Option<u64> {
        let &(found, offset) = self.by_length.range((length, 0)..).next()?;
        if planted!(DoubleGrant) && (length / 64).is_multiple_of(5) {
            return Some(offset);
        }
        self.remove(offset, found);
        if found > length {
            self.insert(offset + length, found - length);
        }
        Some(offset)
    }

    /// Takes exactly this extent. False: it is not wholly free, and nothing changed.
    pub(super) fn take(&mut self, offset: u64, length: u64) -> bool {
        let Some((&start, &found)) = self.by_address.range(..=offset).next_back() else { return false };
        let Some(end) = offset.checked_add(length).filter(|&end| end <= start + found) else { return false };
        self.remove(start, found);
        if offset > start {
            self.insert(start, offset - start);
        }
        if end < start + found {
            self.insert(end, start + found - end);
        }
        true
    }

    /// Gives an extent back and merges it with its neighbours. Giving back what is free is a bug (asserted).
    pub(super) fn give(&mut self, mut offset: u64, mut length: u64) {
        let before = self.by_address.range(..=offset).next_back().map(|(&o, &l)| (o, l));
        let after = self.by_address.range(offset..).next().map(|(&o, &l)| (o, l));
        assert!(before.is_none_or(|(o, l)| o + l <= offset), "segment {}: {offset}+{length} is free", self.segment);
        assert!(after.is_none_or(|(o, _)| offset + length <= o), "segment {}: {offset}+{length} is free", self.segment);
        if let Some((o, l)) = before.filter(|&(o, l)| o + l == offset) {
            self.remove(o, l);
            (offset, length) = (o, l + length);
        }
        if let Some((o, l)) = after.filter(|&(o, _)| offset + length == o) {
            self.remove(o, l);
            length += l;
        }
        self.insert(offset, length);
    }

    fn insert(&mut self, offset: u64, length: u64) {
        self.by_address.insert(offset, length);
        self.by_length.insert((length, offset));
        self.free += length;
        self.digest.add(&offset, |c| c.free_extent(self.segment, offset, length));
        if self.digest.has_walked(&offset) {
            self.walked_bytes = self.walked_bytes.wrapping_add(length);
        }
    }

    fn remove(&mut self, offset: u64, length: u64) {
        self.by_address.remove(&offset);
        self.by_length.remove(&(length, offset));
        self.free -= length;
        self.digest.sub(&offset, |c| c.free_extent(self.segment, offset, length));
        if self.digest.has_walked(&offset) {
            self.walked_bytes = self.walked_bytes.wrapping_sub(length);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn extents(space: &FreeSpace) -> Vec<(u64, u64)> {
        space.iter().collect()
    }

    #[test]
    fn best_fit_takes_the_shortest_then_the_lowest() {
        let mut space = FreeSpace::new(SegmentId(1), 10 * 64);
        for offset in [1, 4, 7] {
            assert!(space.take(offset * 64, 64));
        }
        // Free now: [0,1) [2,4) [5,7) [8,10).
        assert_eq!(space.allocate(128), Some(2 * 64));
        assert_eq!(space.allocate(64), Some(0));
        assert_eq!(space.allocate(64), Some(5 * 64));
        assert_eq!(extents(&space), [(6 * 64, 64), (8 * 64, 128)]);
        assert_eq!(space.allocate(192), None);
    }

    /// Fails when `give` does not merge with the extent before, or the one after (tried both).
    #[test]
    fn given_extents_merge_whatever_their_order() {
        let orders = [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]];
        for order in orders {
            let mut space = FreeSpace::new(SegmentId(1), 3 * 64);
            let whole = space.digest();
            for _ in 0..3 {
                space.allocate(64).unwrap();
            }
            for part in order {
                space.give(part * 64, 64);
            }
            assert_eq!(extents(&space), [(0, 192)]);
            assert_eq!(space.digest(), whole);
            assert!(space.is_consistent());
        }
    }

    #[test]
    fn take_refuses_what_is_not_wholly_free() {
        let mut space = FreeSpace::new(SegmentId(1), 256);
        assert!(space.take(64, 64));
        for (offset, length) in [(64, 64), (0, 128), (128, 192), (u64::MAX - 64, 128), (256, 64)] {
            assert!(!space.take(offset, length), "{offset}+{length}");
        }
        assert_eq!(extents(&space), [(0, 64), (128, 128)]);
    }

    #[test]
    fn what_lies_between_is_what_taking_leaves() {
        for used in [vec![], vec![(0, 64)], vec![(64, 64), (128, 64)], vec![(0, 128), (192, 64)], vec![(0, 256)]] {
            let mut taken = FreeSpace::new(SegmentId(1), 256);
            used.iter().for_each(|&(offset, length)| assert!(taken.take(offset, length)));
            let between = FreeSpace::between(SegmentId(1), 256, used.iter().copied()).unwrap();
            assert_eq!((extents(&between), between.free()), (extents(&taken), taken.free()));
            assert_eq!(between.digest(), taken.digest());
            assert!(between.is_consistent());
        }
        for bad in [[(0, 64), (0, 64)], [(0, 128), (64, 64)], [(64, 64), (0, 64)], [(0, 64), (192, 128)], [(0, 0); 2]] {
            FreeSpace::between(SegmentId(1), 256, bad.into_iter()).unwrap_err();
        }
        FreeSpace::between(SegmentId(1), 256, [(64, u64::MAX)].into_iter()).unwrap_err();
    }

    #[test]
    #[should_panic(expected = "is free")]
    fn giving_twice_is_caught() {
        let mut space = FreeSpace::new(SegmentId(1), 256);
        space.allocate(64).unwrap();
        space.give(0, 64);
        space.give(0, 64);
    }
}
