//! Placement: which segments a put's replicas go to. A function of the space and the log position alone (M4).
//!
//! For each replica two segments are drawn and the one with more free space (by ratio) wins; when the draws do not
//! fit, the segments are walked from the largest free extent down, which ends after the segments of the hosts already
//! used. Replicas go to distinct hosts if possible, else distinct nodes, else distinct segments; never two in one.

use super::objects::SegmentSlot;
use super::space::Space;
use smallvec::SmallVec;
use std::cmp::Ordering;
use tidepool_proto::{NodeId, OpId};

/// Segments chosen for a put, one a replica.
pub(super) type Plan = SmallVec<[SegmentSlot; 2]>;

/// Pairs drawn before the walk.
const DRAWS: usize = 2;

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

/// Chooses segments for up to `copies` extents of `bytes`; fewer when no more fit.
pub(super) fn place(space: &Space, at: OpId, bytes: u64, copies: usize, excluded: &[NodeId]) -> Plan {
    let mut draw = Draw::of(at);
    let mut plan = Plan::new();
    while plan.len() < copies {
        let Some(slot) =
            drawn(space, &mut draw, bytes, &plan, excluded).or_else(|| walked(space, bytes, &plan, excluded))
        else {
            break;
        };
        plan.push(slot);
    }
    plan
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

/// The better of a pair of draws, if one fits on an unused host.
fn drawn(space: &Space, draw: &mut Draw, bytes: u64, plan: &Plan, excluded: &[NodeId]) -> Option<SegmentSlot> {
    let eligible = space.eligible();
    if eligible.is_empty() {
        return None;
    }
    for _ in 0..DRAWS {
        let pair = [draw.below(eligible.len()), draw.below(eligible.len())].map(|i| eligible[i]);
        let fits = |&slot: &SegmentSlot| {
            let segment = space.segment(slot);
            segment.free.largest() >= bytes
                && !excluded.contains(&segment.node)
                && distance(space, slot, plan) == Some(Distance::OtherHost)
        };
        if let Some(best) = pair.into_iter().filter(fits).max_by(|&a, &b| by_free_ratio(space, a, b)) {
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
fn walked(space: &Space, bytes: u64, plan: &Plan, excluded: &[NodeId]) -> Option<SegmentSlot> {
    let mut best: Option<(Distance, SegmentSlot)> = None;
    for (_, slot) in space.by_largest().take_while(|&(largest, _)| largest >= bytes) {
        if excluded.contains(&space.segment(slot).node) {
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
