//! Room for puts larger than any free extent (W9): objects that lie side by side, in a segment that the put may use.
//!
//! A copy goes where placement would put it: to a preferred segment, to a host that has no copy yet, to any other. Hosts
//! that have an extent for a copy need no victims.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use tidepool_proto::{Error, NodeId, ObjectId, SegmentId};

use super::core::Service;
use super::leases::Marks;
use super::room::{self, Found, VICTIMS_MAX, Victims, could_mark, mark, tenants_by_share};
use super::tenure::Tenure;
use crate::directory::limits::IDS_PER_OP_MAX;
use crate::directory::{Contact, Neighbourhood, SegmentView, Victim};
use crate::eviction::Answer;

/// Objects around which neighbourhoods are looked for.
const SEEDS: usize = 64;
/// Extents looked at on each side of one of them.
const NEIGHBOURS_MAX: usize = 1_024;
/// The same for a put that needs the space of more objects than its op may name: few places, looked at widely.
const WIDE_SEEDS: usize = 2;
const WIDE_NEIGHBOURS_MAX: usize = 32_768;
/// Runs chosen one after the other because an object of the one before was leased or marked between the look and the mark.
const CHOICES_MAX: usize = 4;
/// The youngest of the objects that are compared costs 2 to so many times its bytes.
const YOUNGEST_PRICE_BITS: usize = 12;

/// What a put needs, and where it may go.
#[derive(Clone, Copy)]
pub struct Places<'a> {
    /// Bytes of each extent.
    pub extent_bytes: u64,
    /// Extents.
    pub copies: usize,
    /// Segments to use first.
    pub preferred: &'a [SegmentId],
    /// Nodes not to use.
    pub excluded: &'a [NodeId],
}

impl Places<'_> {
    /// Segments that may hold a copy.
    pub fn segments(&self, service: &Service) -> Vec<SegmentView> {
        let mut segments = service.directory().segments();
        segments.retain(|s| {
            s.contact == Contact::Heard
                && !s.draining
                && s.capacity >= self.extent_bytes
                && !self.excluded.contains(&s.node)
        });
        segments
    }

    /// The same by id, if others are mounted; each with the bytes that may be needed of it.
    pub fn not_everywhere(&self, service: &Service, bytes: u64) -> Option<BTreeMap<SegmentId, u64>> {
        let usable: BTreeMap<SegmentId, u64> = self.segments(service).iter().map(|s| (s.segment, bytes)).collect();
        let mounted = service.directory().counts().segments;
        Some(usable).filter(|usable| (usable.len() as u64) < mounted)
    }
}

/// How a search is made.
#[derive(Clone, Copy)]
struct Reach {
    seeds: usize,
    pieces: usize,
    /// Members that a group may have.
    group: usize,
}

/// Finds and marks victims for a put's op to name. `marks` are those of the same proposal: what it marked already may go.
pub fn find(service: &Service, tenure: &Tenure, places: &Places<'_>, seeds: &[ObjectId], marks: Marks) -> Victims {
    let reach = Reach { seeds: SEEDS, pieces: NEIGHBOURS_MAX, group: VICTIMS_MAX };
    let victims = Victims { marks, ..Victims::none(service, tenure) };
    search(service, tenure, places, seeds, reach, victims)
}

/// Evicts by an op of its own, for a put that needs the space of more objects than its op may name. Returns the bytes
/// that came free.
pub async fn evict(service: &Service, tenure: &Tenure, places: &Places<'_>) -> Result<u64, Error> {
    let reach = Reach { seeds: WIDE_SEEDS, pieces: WIDE_NEIGHBOURS_MAX, group: IDS_PER_OP_MAX };
    let victims = search(service, tenure, places, &[], reach, Victims::none(service, tenure));
    room::evict_found(service, tenure, victims, "put").await
}

/// A segment with its host.
struct Usable {
    segment: SegmentId,
    host: Arc<str>,
    has_room: bool,
    is_preferred: bool,
}

fn usable(service: &Service, places: &Places<'_>) -> Vec<Usable> {
    let nodes = service.directory().nodes();
    let host = |node| nodes.iter().find(|n| n.node == node).map_or_else(|| Arc::from(""), |n| n.host_id.clone());
    let usable = |s: SegmentView| Usable {
        segment: s.segment,
        host: host(s.node),
        has_room: s.largest_free >= places.extent_bytes,
        is_preferred: places.preferred.contains(&s.segment),
    };
    let mut segments: Vec<Usable> = places.segments(service).into_iter().map(usable).collect();
    segments.sort_by_key(|s| !s.is_preferred);
    segments
}

/// Adds to what is marked for a proposal.
fn search(
    service: &Service,
    tenure: &Tenure,
    places: &Places<'_>,
    seeds: &[ObjectId],
    reach: Reach,
    mut victims: Victims,
) -> Victims {
    let segments = usable(service, places);
    let (mut used, mut hosts) = (BTreeSet::new(), BTreeSet::new());
    for segment in segments.iter().filter(|s| s.has_room) {
        if used.len() < places.copies && hosts.insert(segment.host.clone()) {
            used.insert(segment.segment);
        }
    }
    while used.len() < places.copies {
        let is_new = |s: &&Usable| !used.contains(&s.segment);
        let tiers: [&dyn Fn(&&Usable) -> bool; 3] =
            [&|s| s.is_preferred && !hosts.contains(&s.host), &|s| !hosts.contains(&s.host), &|_| true];
        let found = tiers.into_iter().find_map(|tier| {
            let tier: BTreeSet<SegmentId> = segments.iter().filter(is_new).filter(tier).map(|s| s.segment).collect();
            around(service, tenure, places.extent_bytes, &tier, seeds, reach, &mut victims)
        });
        let Some(segment) = found else { break };
        used.insert(segment);
        hosts.extend(segments.iter().find(|s| s.segment == segment).map(|s| s.host.clone()));
    }
    victims
}

/// Adds the cheapest neighbourhood of some segments. Returns where it lies.
fn around(
    service: &Service,
    tenure: &Tenure,
    extent_bytes: u64,
    segments: &BTreeSet<SegmentId>,
    seeds: &[ObjectId],
    reach: Reach,
    victims: &mut Victims,
) -> Option<SegmentId> {
    if segments.is_empty() {
        return None;
    }
    let directory = service.directory();
    let seeds: Vec<ObjectId> = seeds.iter().copied().chain(oldest(service, segments, reach.seeds)).collect();
    let may_use = |segment| segments.contains(&segment);
    for _ in 0..CHOICES_MAX {
        let prices = |near: &[&Victim]| prices(service, tenure, near, reach.group, &victims.marks);
        let found = directory.neighbour_victims(&seeds, extent_bytes, reach.pieces, may_use, prices);
        let Neighbourhood { segment, victims: run } = found?;
        if take(service, tenure, &run, victims) {
            return Some(segment);
        }
    }
    None
}

/// Adds a run, and what goes with it, to what is marked, up to what an op may name; nothing when some of it cannot be marked any
/// more.
fn take(service: &Service, tenure: &Tenure, run: &[Victim], victims: &mut Victims) -> bool {
    let directory = service.directory();
    let mut marks = Marks::new(tenure.leases.clone());
    let mut named: BTreeSet<ObjectId> = victims.found.iter().map(|victim| victim.object).collect();
    let mut found = Vec::new();
    for victim in run {
        for object in std::iter::once(victim.object).chain(directory.companions(victim.object)) {
            if named.len() == IDS_PER_OP_MAX || !named.insert(object) {
                continue;
            }
            if !victims.marks.holds(object) && mark(service, tenure, object, true, &mut marks) != Answer::Take {
                return false;
            }
            let bytes = directory.as_victim(object).map_or(0, |victim| victim.bytes());
            found.push(Found { object, bytes, group: None });
        }
    }
    victims.marks.absorb(marks);
    victims.found.append(&mut found);
    true
}

/// Says what the going of each of these costs that may go. That is its bytes, and many times as much for what the policies
/// would give up last of them: what is near in space is seldom near in age. None is marked: these are most of the oldest
/// objects, and puts beside this one would be left with the youngest.
fn prices(service: &Service, tenure: &Tenure, near: &[&Victim], group_max: usize, marks: &Marks) -> Vec<Option<u64>> {
    let directory = service.directory();
    let ranks = service.evictor().ranks(near.iter().map(|victim| (victim.tenant, victim.key, victim.object)));
    // What others must go before, or no policy knows, goes last.
    let rank = |i: &usize| (ranks[*i].is_none(), ranks[*i]);
    let mut order: Vec<usize> = (0..near.len()).collect();
    order.sort_by_key(rank);
    // What was found out about a group holds for all its members, which may be thousands of the neighbours.
    let mut known: BTreeMap<ObjectId, bool> = BTreeMap::new();
    let mut may_go = |victim: &Victim| {
        if let Some(&may_go) = known.get(&victim.object) {
            return may_go;
        }
        // A group goes as a whole; soft pins have nothing left to wait for.
        let companions = directory.companions(victim.object);
        let group = std::iter::once(victim.object).chain(companions.iter().copied());
        let may_go = companions.len() < group_max
            && group.clone().all(|object| could_mark(service, tenure, object, true, marks));
        known.extend(group.map(|object| (object, may_go)));
        may_go
    };
    let mut prices = vec![None; near.len()];
    for (place, &i) in order.iter().enumerate() {
        if may_go(near[i]) {
            prices[i] = Some(near[i].bytes() << (place * YOUNGEST_PRICE_BITS / near.len()));
        }
    }
    prices
}

/// What the policies would give up first in some segments, as places to look around; or anything there.
fn oldest(service: &Service, segments: &BTreeSet<SegmentId>, number: usize) -> Vec<ObjectId> {
    let mut seeds = Vec::new();
    for tenant in tenants_by_share(service) {
        // Looked at, not taken: everything keeps its place.
        let look = &mut |candidate: &crate::eviction::Candidate| {
            let victim = (seeds.len() < number).then(|| service.directory().as_victim(candidate.object)).flatten();
            if victim.is_some_and(|v| v.replicas.iter().any(|(_, segment, _)| segments.contains(segment))) {
                seeds.push(candidate.object);
            }
            Answer::Skip
        };
        service.evictor().victims(tenant, u64::MAX, usize::MAX, look);
    }
    for &segment in segments {
        if seeds.len() < number {
            let (objects, _) = service.directory().victims_in(segment, 0, number - seeds.len());
            seeds.extend(objects.iter().map(|victim| victim.object));
        }
    }
    seeds
}
