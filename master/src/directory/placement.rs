//! Placement: which segments a put's replicas go to. A function of the space and the log position alone (M4).
//!
//! For each replica the preferred segments come first. Then segments are drawn, by the strategy one, a pair or a handful,
//! and the one with the most free space (by ratio) wins, so that a newcomer is filled gradually; when the draws do not fit, the segments are walked from the largest free extent down, which ends after the segments of the hosts already
//! used. Replicas go to distinct hosts if possible, else distinct nodes, else distinct segments; never two in one.

use super::limits::Strategy;
use super::objects::SegmentSlot;
use super::space::Space;
use smallvec::SmallVec;
use std::cmp::Ordering;
use tidepool_proto::{NodeId, OpId, SegmentId};

/// Segments chosen for a put, one a replica.
pub(super) type Plan = SmallVec<[SegmentSlot; 2]>;

/// Times segments are drawn before the walk.
const DRAWS: usize = 2;

/// What is asked for.
#[derive(Clone, Copy)]
pub(super) struct Request<'a> {
    /// Bytes of each extent.
    pub(super) bytes: u64,
    /// Extents, each in another segment.
    pub(super) copies: usize,
    /// Nodes not to choose.
    pub(super) excluded: &'a [NodeId],
    /// Segments to choose first, in this order.
    pub(super) preferred: &'a [SegmentId],
    /// Segments from which a replica goes: not to choose, and no host that is used.
    pub(super) leaving: &'a [SegmentSlot],
    /// How the others are drawn.
    pub(super) strategy: Strategy,
}

/// Random numbers that depend on the log position alone (splitmix64).
#[derive(Debug)]
pub(super) struct Draw(u64);

impl Draw {
    /// The numbers of one op.
    pub(super) fn of(at: OpId) -> Draw {
        Draw(at.0)
    }

    /// The next one, below `n`.
    fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^= z >> 31;
        ((u128::from(z) * n as u128) >> 64) as usize
    }
}

/// Chooses segments for the extents; fewer when no more fit.
pub(super) fn place(space: &Space, at: OpId, request: &Request<'_>) -> Plan {
    let mut draw = Draw::of(at);
    let mut plan = Plan::new();
    while plan.len() < request.copies {
        let Some(slot) = preferred(space, request, &plan)
            .or_else(|| drawn(space, &mut draw, request, &plan))
            .or_else(|| walked(space, request, &plan))
        else {
            break;
        };
        plan.push(slot);
    }
    plan
}

/// Chooses one more segment beside those `taken`.
pub(super) fn place_beside(
    space: &Space,
    at: OpId,
    request: &Request<'_>,
    taken: &Plan,
    only_preferred: bool,
) -> Option<SegmentSlot> {
    if only_preferred {
        let slots = request.preferred.iter().filter_map(|id| space.by_id.get(id).copied());
        let mut fitting = slots.filter(|&slot| fits(space, slot, request));
        return fitting.find(|&slot| distance(space, slot, taken).is_some());
    }
    let mut draw = Draw::of(at);
    let excluded: SmallVec<[NodeId; 4]> = request.leaving.iter().map(|&slot| space.segment(slot).node).collect();
    let away = Request { excluded: &excluded, ..*request };
    let places = [&away, request]
        .map(|request| drawn(space, &mut draw, request, taken).or_else(|| walked(space, request, taken)));
    // As far from the others as can be; if there is a choice, off the node that loses a replica: it may go as a whole.
    let [off, any] = places.map(|place| place.map(|slot| (distance(space, slot, taken), slot)));
    let stays = any.is_some_and(|(distance, _)| off.is_none_or(|(off, _)| distance > off));
    if stays { any } else { off }.map(|(_, slot)| slot)
}

/// Whether an extent of the request may lie in a segment.
fn fits(space: &Space, slot: SegmentSlot, request: &Request<'_>) -> bool {
    let segment = space.segment(slot);
    segment.may_be_chosen() && segment.free.largest() >= request.bytes && !is_refused(space, slot, request)
}

/// Whether the request does not want a segment.
fn is_refused(space: &Space, slot: SegmentSlot, request: &Request<'_>) -> bool {
    request.leaving.contains(&slot) || request.excluded.contains(&space.segment(slot).node)
}

/// The first preferred segment that fits, if it is on an unused host.
fn preferred(space: &Space, request: &Request<'_>, plan: &Plan) -> Option<SegmentSlot> {
    let slots = request.preferred.iter().filter_map(|id| space.by_id.get(id).copied());
    let mut usable = slots.filter(|&slot| fits(space, slot, request));
    usable.find(|&slot| distance(space, slot, plan) == Some(Distance::OtherHost))
}

/// How far a segment is from the nearest one already chosen.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Distance {
    SameNode,
    SameHost,
    OtherHost,
}

fn distance(space: &Space, slot: SegmentSlot, plan: &Plan) -> Option<Distance> {
    let candidate = space.segment(slot);
    let mut nearest = Distance::OtherHost;
    for &used in plan {
        let chosen = space.segment(used);
        let this = match () {
            () if used == slot => return None,
            () if chosen.node == candidate.node => Distance::SameNode,
            () if chosen.host_id == candidate.host_id => Distance::SameHost,
            () => Distance::OtherHost,
        };
        nearest = nearest.min(this);
    }
    Some(nearest)
}

/// The best of what is drawn, if one fits on an unused host.
fn drawn(space: &Space, draw: &mut Draw, request: &Request<'_>, plan: &Plan) -> Option<SegmentSlot> {
    let eligible = space.eligible();
    if eligible.is_empty() {
        return None;
    }
    for _ in 0..DRAWS {
        let candidates = (0..request.strategy.candidates()).map(|_| eligible[draw.below(eligible.len())]);
        let candidates: SmallVec<[SegmentSlot; 8]> = candidates.collect();
        let usable = |&slot: &SegmentSlot| {
            fits(space, slot, request) && distance(space, slot, plan) == Some(Distance::OtherHost)
        };
        if let Some(best) = candidates.into_iter().filter(usable).max_by(|&a, &b| by_free_ratio(space, a, b)) {
            return Some(best);
        }
    }
    None
}

/// Compares free / capacity as integer cross products; the older segment wins a tie.
fn by_free_ratio(space: &Space, a: SegmentSlot, b: SegmentSlot) -> Ordering {
    let (a, b) = (space.segment(a), space.segment(b));
    let left = u128::from(a.free.free()) * u128::from(b.capacity);
    let right = u128::from(b.free.free()) * u128::from(a.capacity);
    left.cmp(&right).then(b.id.cmp(&a.id))
}

/// The farthest segment that fits, the largest free extent first.
fn walked(space: &Space, request: &Request<'_>, plan: &Plan) -> Option<SegmentSlot> {
    let mut best: Option<(Distance, SegmentSlot)> = None;
    for (_, slot) in space.by_largest().take_while(|&(largest, _)| largest >= request.bytes) {
        if is_refused(space, slot, request) {
            continue;
        }
        let Some(distance) = distance(space, slot, plan) else { continue };
        if best.is_none_or(|(so_far, _)| distance > so_far) {
            best = Some((distance, slot));
        }
        if distance == Distance::OtherHost {
            break;
        }
    }
    best.map(|(_, slot)| slot)
}
