//! Finding victims for the leader: read-only, from cursors, never a walk over all objects.

use super::Directory;
use super::core::Core;
use super::limits::VICTIM_SCAN_MAX;
use super::objects::{Location, Record, SegmentSlot};
use super::op::Contact;
use super::view::{Victim, VictimPage};
use std::ops::Range;
use tidepool_proto::ObjectId;

/// Oldest objects around which `neighbour_victims` looks.
const NEIGHBOURHOODS: usize = 16;
/// Extents looked at on each side of one of them.
const NEIGHBOURS_MAX: usize = 1024;

/// A stretch of a segment, in address order.
#[derive(Clone, Debug)]
enum Piece {
    Free(u64),
    Victim(u64, Victim),
    /// Being put, retired, or refused by the filter.
    Blocked,
}

impl Directory {
    /// Oldest COMPLETE objects until their bytes reach `bytes` or their number `limit`, from a cursor. Looks at no more
    /// than `VICTIM_SCAN_MAX` objects. `accept` runs under no lock.
    pub fn oldest_victims(
        &self,
        after: Option<ObjectId>,
        bytes: u64,
        limit: usize,
        mut accept: impl FnMut(&Victim) -> bool,
    ) -> VictimPage {
        const STEP: usize = 256;
        let mut page = VictimPage { next: after, ..VictimPage::default() };
        let mut looked = 0;
        while page.bytes < bytes && page.victims.len() < limit && looked < VICTIM_SCAN_MAX {
            let step = self.objects_after(page.next, STEP);
            let is_end = step.len() < STEP;
            looked += step.len();
            for (object, victim) in step {
                page.next = Some(object);
                let Some(victim) = victim.filter(|v| accept(v)) else { continue };
                page.bytes += victim.bytes();
                page.victims.push(victim);
                if page.bytes >= bytes || page.victims.len() == limit {
                    return page;
                }
            }
            if is_end {
                page.next = None;
                break;
            }
        }
        page
    }

    /// Victims that lie side by side, in address order, so that an extent of `extent_bytes` comes free for few evicted
    /// bytes; None when no such neighbourhood was found around the oldest objects. `accept` runs under no lock.
    pub fn neighbour_victims(&self, extent_bytes: u64, mut accept: impl FnMut(&Victim) -> bool) -> Option<Vec<Victim>> {
        let oldest = self.oldest_victims(None, u64::MAX, NEIGHBOURHOODS, &mut accept).victims;
        let mut best: Option<(u64, Vec<Victim>)> = None;
        for object in oldest.iter().map(|v| v.object) {
            for mut pieces in self.neighbourhoods(object, extent_bytes) {
                for piece in &mut pieces {
                    if matches!(piece, Piece::Victim(_, v) if !accept(v)) {
                        *piece = Piece::Blocked;
                    }
                }
                let Some((cost, range)) = cheapest_run(&pieces, extent_bytes) else { continue };
                if best.as_ref().is_none_or(|(so_far, _)| cost < *so_far) {
                    let victims = pieces[range].iter().filter_map(|piece| match piece {
                        Piece::Victim(_, victim) => Some(victim.clone()),
                        _ => None,
                    });
                    best = Some((cost, victims.collect()));
                }
            }
        }
        best.map(|(_, victims)| victims)
    }

    /// The next objects by age, each as a victim if it is COMPLETE.
    fn objects_after(&self, after: Option<ObjectId>, limit: usize) -> Vec<(ObjectId, Option<Victim>)> {
        let core = self.core.read();
        let from = after.map_or(ObjectId(0), |id| ObjectId(id.0.saturating_add(1)));
        core.index.range(from..).take(limit).map(|(&object, &at)| (object, self.victim(&core, at))).collect()
    }

    fn victim(&self, core: &Core, at: Location) -> Option<Victim> {
        self.shards.with(at, |record| victim_of(core, record)).flatten()
    }

    /// The stretches around each replica of an object that may be chosen for puts.
    fn neighbourhoods(&self, object: ObjectId, extent_bytes: u64) -> Vec<Vec<Piece>> {
        let core = self.core.read();
        let Some(&at) = core.index.get(&object) else { return Vec::new() };
        let places = self.shards.with(at, |r| {
            let replicas = r.replicas.iter().map(|replica| (replica.segment, replica.offset));
            replicas.collect::<Vec<_>>()
        });
        let heard = |slot: SegmentSlot| core.space.segment(slot).contact == Contact::Heard;
        let around = |(slot, offset)| self.stretch(&core, slot, offset, extent_bytes);
        places.unwrap_or_default().into_iter().filter(|&(slot, _)| heard(slot)).map(around).collect()
    }

    /// Pieces around an extent, as far to each side as a request of `extent_bytes` could reach.
    fn stretch(&self, core: &Core, slot: SegmentSlot, offset: u64, extent_bytes: u64) -> Vec<Piece> {
        let segment = core.space.segment(slot);
        let length = |at: Location| self.shards.with(at, Record::extent_bytes).unwrap_or(0);
        let piece = |at: Location| match self.victim(core, at) {
            Some(victim) => Piece::Victim(length(at), victim),
            None => Piece::Blocked,
        };
        let mut left = Vec::new();
        let (mut at, mut reached) = (offset, 0);
        while reached < extent_bytes && left.len() < NEIGHBOURS_MAX {
            if let Some((start, bytes)) = segment.free.ending_at(at) {
                left.push(Piece::Free(bytes));
                (at, reached) = (start, reached + bytes);
            } else if let Some((&start, &found)) = segment.used.range(..at).next_back()
                && start + length(found) == at
            {
                left.push(piece(found));
                (at, reached) = (start, reached + length(found));
            } else {
                break;
            }
        }
        left.reverse();
        let mut pieces = left;
        let end = pieces.len() + NEIGHBOURS_MAX;
        let (mut at, mut reached) = (offset, 0);
        while reached < extent_bytes.saturating_mul(2) && pieces.len() < end {
            let bytes = if let Some(bytes) = segment.free.at(at) {
                pieces.push(Piece::Free(bytes));
                bytes
            } else if let Some(&found) = segment.used.get(&at) {
                pieces.push(piece(found));
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

/// A COMPLETE record as a victim.
fn victim_of(core: &Core, record: &Record) -> Option<Victim> {
    let bytes = record.extent_bytes();
    let replicas = record.replicas.iter().map(|r| (r.id, core.space.segment(r.segment).id, bytes));
    record.is_complete().then(|| Victim { object: record.object, replicas: replicas.collect() })
}

/// The run of pieces without a blocked one that spans enough for the fewest evicted bytes.
fn cheapest_run(pieces: &[Piece], extent_bytes: u64) -> Option<(u64, Range<usize>)> {
    let mut best: Option<(u64, Range<usize>)> = None;
    let (mut from, mut span, mut cost) = (0, 0u64, 0u64);
    let weigh = |piece: &Piece| match piece {
        Piece::Free(bytes) => (*bytes, 0),
        Piece::Victim(bytes, victim) => (*bytes, victim.bytes()),
        Piece::Blocked => (0, 0),
    };
    for (i, piece) in pieces.iter().enumerate() {
        if matches!(piece, Piece::Blocked) {
            (from, span, cost) = (i + 1, 0, 0);
            continue;
        }
        let (bytes, price) = weigh(piece);
        (span, cost) = (span + bytes, cost + price);
        while span - weigh(&pieces[from]).0 >= extent_bytes {
            let (bytes, price) = weigh(&pieces[from]);
            (from, span, cost) = (from + 1, span - bytes, cost - price);
        }
        if span >= extent_bytes && best.as_ref().is_none_or(|(so_far, _)| cost < *so_far) {
            best = Some((cost, from..i + 1));
        }
    }
    best
}
