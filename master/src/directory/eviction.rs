//! Victims for the leader: read-only, never a walk over all objects. Which objects go first is the eviction policy's.

use super::Directory;
use super::core::Core;
use super::objects::{Location, Record, SegmentSlot};
use super::view::Victim;
use std::ops::Range;
use tidepool_proto::{ObjectId, SegmentId, planted};

/// Seeds around which `neighbour_victims` looks.
const NEIGHBOURHOODS: usize = 64;
/// Extents that all of them together may have before no more are looked at.
const PIECES_MAX: usize = 16_384;
/// Seeds that it looks up to find so many in the segments that are asked for.
const SEEDS_LOOKED_UP: usize = 1_024;

/// Victims of one segment that lie side by side.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Neighbourhood {
    /// Where an extent comes free when they go.
    pub segment: SegmentId,
    /// In address order.
    pub victims: Vec<Victim>,
}

/// A stretch of a segment, in address order.
#[derive(Clone, Debug)]
enum Piece {
    Free(u64),
    Victim(u64, Victim),
    /// Being put, retired, or pinned for good.
    Blocked,
}

/// What a piece spans, and what it costs to have it free; None: it cannot be had.
#[derive(Clone, Copy, Debug)]
struct Stretch {
    bytes: u64,
    price: Option<u64>,
}

impl Piece {
    fn victim(&self) -> Option<&Victim> {
        match self {
            Piece::Victim(_, victim) => Some(victim),
            Piece::Free(_) | Piece::Blocked => None,
        }
    }

    /// With the next of the victims' prices, if it is one.
    fn priced(&self, prices: &mut impl Iterator<Item = Option<u64>>) -> Stretch {
        match self {
            Piece::Free(bytes) => Stretch { bytes: *bytes, price: Some(0) },
            Piece::Victim(bytes, _) => Stretch { bytes: *bytes, price: prices.next().flatten() },
            Piece::Blocked => Stretch { bytes: 0, price: None },
        }
    }
}

impl Directory {
    /// An object as a victim, if it is COMPLETE and not pinned for good.
    pub fn as_victim(&self, object: ObjectId) -> Option<Victim> {
        let core = self.core.read();
        let &at = core.index.get(&object)?;
        self.victim(&core, at)
    }

    /// The other members of an object's group, which go with it.
    pub fn companions(&self, object: ObjectId) -> Vec<ObjectId> {
        let core = self.core.read();
        let name = core.index.get(&object).and_then(|&at| self.shards.with(at, Record::group_name)).flatten();
        let group = name.and_then(|name| core.groups.get(&name));
        group.into_iter().flat_map(|group| &group.members).copied().filter(|&id| id != object).collect()
    }

    /// Objects with a replica in a segment, by address from a cursor on, as victims; and where to go on, unless the end
    /// was reached.
    pub fn victims_in(&self, segment: SegmentId, from: u64, limit: usize) -> (Vec<Victim>, Option<u64>) {
        let core = self.core.read();
        let Some(&slot) = core.space.by_id.get(&segment) else { return (Vec::new(), None) };
        let mut extents = core.space.segment(slot).used.range(from..);
        let mut found = Vec::new();
        for (_, &at) in extents.by_ref().take(limit) {
            found.extend(self.victim(&core, at));
        }
        let next = extents.next().map(|(&offset, _)| offset);
        (found, next)
    }

    /// Victims that lie side by side in a segment that `may_use` allows, so that an extent of `extent_bytes` comes free
    /// at the lowest price; None when no such neighbourhood was found around `seeds`, looking at `pieces_max` extents to
    /// each side of one. `prices` says of each victim what its going costs, or that it may not go; it runs under no lock.
    /// `may_use` must not call the directory.
    pub fn neighbour_victims(
        &self,
        seeds: &[ObjectId],
        extent_bytes: u64,
        pieces_max: usize,
        may_use: impl Fn(SegmentId) -> bool,
        prices: impl FnOnce(&[&Victim]) -> Vec<Option<u64>>,
    ) -> Option<Neighbourhood> {
        let (mut around, mut seen, mut pieces) = (Vec::new(), 0, 0);
        for &object in seeds.iter().take(SEEDS_LOOKED_UP) {
            let found = self.neighbourhoods(object, extent_bytes, pieces_max, &may_use);
            seen += usize::from(!found.is_empty());
            pieces += found.iter().map(|(_, pieces)| pieces.len()).sum::<usize>();
            around.extend(found);
            if seen == NEIGHBOURHOODS || pieces >= PIECES_MAX {
                break;
            }
        }
        let victims: Vec<&Victim> =
            around.iter().flat_map(|(_, pieces)| pieces).filter_map(|piece| piece.victim()).collect();
        let mut prices = prices(&victims).into_iter();
        let mut best: Option<(u64, Neighbourhood)> = None;
        for (segment, pieces) in &around {
            let stretches: Vec<Stretch> = pieces.iter().map(|piece| piece.priced(&mut prices)).collect();
            let Some((cost, range)) = cheapest_run(&stretches, extent_bytes) else { continue };
            if best.as_ref().is_none_or(|(so_far, _)| cost < *so_far) {
                let victims = pieces[range].iter().filter_map(|piece| piece.victim().cloned()).collect();
                best = Some((cost, Neighbourhood { segment: *segment, victims }));
            }
        }
        best.map(|(_, found)| found)
    }

    fn victim(&self, core: &Core, at: Location) -> Option<Victim> {
        let seen = |record: &Record| victim_of(core, record, self.shards.hash(record.tenant, &record.key));
        self.shards.with(at, seen).flatten()
    }

    /// The stretches around each replica of an object that lies where a put may go.
    fn neighbourhoods(
        &self,
        object: ObjectId,
        extent_bytes: u64,
        pieces_max: usize,
        may_use: impl Fn(SegmentId) -> bool,
    ) -> Vec<(SegmentId, Vec<Piece>)> {
        let core = self.core.read();
        let Some(&at) = core.index.get(&object) else { return Vec::new() };
        let places = self.shards.with(at, |r| {
            let replicas = r.replicas.iter().map(|replica| (replica.segment, replica.offset));
            replicas.collect::<Vec<_>>()
        });
        let may_be_chosen = |slot: SegmentSlot| {
            let segment = core.space.segment(slot);
            segment.may_be_chosen() && may_use(segment.id)
        };
        let around = |(slot, offset)| {
            (core.space.segment(slot).id, self.stretch(&core, (slot, offset), extent_bytes, pieces_max))
        };
        places.unwrap_or_default().into_iter().filter(|&(slot, _)| may_be_chosen(slot)).map(around).collect()
    }

    /// Pieces around an extent, as far to each side as a request of `extent_bytes` could reach.
    fn stretch(
        &self,
        core: &Core,
        (slot, offset): (SegmentSlot, u64),
        extent_bytes: u64,
        pieces_max: usize,
    ) -> Vec<Piece> {
        let segment = core.space.segment(slot);
        let length = |at: Location| self.shards.with(at, Record::extent_bytes).unwrap_or(0);
        // What is being copied is no replica of its object yet.
        let is_replica = |at: Location, offset: u64| {
            let there = |r: &Record| r.replicas.iter().any(|r| r.segment == slot && r.offset == offset);
            self.shards.with(at, there) == Some(true)
        };
        let piece = |at: Location, offset: u64| match self.victim(core, at).filter(|_| is_replica(at, offset)) {
            Some(victim) => Piece::Victim(length(at), victim),
            None => Piece::Blocked,
        };
        let mut left = Vec::new();
        let (mut at, mut reached) = (offset, 0);
        while reached < extent_bytes && left.len() < pieces_max {
            if let Some((start, bytes)) = segment.free.ending_at(at) {
                left.push(Piece::Free(bytes));
                (at, reached) = (start, reached + bytes);
            } else if let Some((&start, &found)) = segment.used.range(..at).next_back()
                && start + length(found) == at
            {
                left.push(piece(found, start));
                (at, reached) = (start, reached + length(found));
            } else {
                break;
            }
        }
        left.reverse();
        let mut pieces = left;
        let end = pieces.len() + pieces_max;
        let (mut at, mut reached) = (offset, 0);
        while reached < extent_bytes.saturating_mul(2) && pieces.len() < end {
            let bytes = if let Some(bytes) = segment.free.at(at) {
                pieces.push(Piece::Free(bytes));
                bytes
            } else if let Some(&found) = segment.used.get(&at) {
                pieces.push(piece(found, at));
                length(found)
            } else {
                break;
            };
            at += bytes;
            reached += bytes;
        }
        pieces
    }
}

/// A record as a victim, if it is COMPLETE and not pinned for good.
fn victim_of(core: &Core, record: &Record, key: u64) -> Option<Victim> {
    if !record.is_complete() || (record.hard_pinned && !planted!(EvictPinned)) {
        return None;
    }
    let bytes = record.extent_bytes();
    let replicas = record.replicas.iter().map(|r| (r.id, core.space.segment(r.segment).id, bytes));
    Some(Victim {
        object: record.object,
        tenant: record.tenant,
        key,
        soft_pinned_until: record.soft_pinned_until(),
        replicas: replicas.collect(),
    })
}

/// The run that can be had and spans enough at the lowest price.
fn cheapest_run(stretches: &[Stretch], extent_bytes: u64) -> Option<(u64, Range<usize>)> {
    let mut best: Option<(u64, Range<usize>)> = None;
    let (mut from, mut span, mut cost) = (0, 0u64, 0u64);
    for (i, stretch) in stretches.iter().enumerate() {
        let Some(price) = stretch.price else {
            (from, span, cost) = (i + 1, 0, 0);
            continue;
        };
        (span, cost) = (span + stretch.bytes, cost.saturating_add(price));
        while span - stretches[from].bytes >= extent_bytes {
            span -= stretches[from].bytes;
            cost = cost.saturating_sub(stretches[from].price.unwrap_or(0));
            from += 1;
        }
        if span >= extent_bytes && best.as_ref().is_none_or(|(so_far, _)| cost < *so_far) {
            best = Some((cost, from..i + 1));
        }
    }
    best
}
