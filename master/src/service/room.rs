//! Room for puts (W9, L4): which objects go when space is short, and the reserve kept ahead of need.
//!
//! The eviction policies say in which order; here is decided whether an object may go now: nobody leases it, it is not
//! pinned, and in the first lease window of a term the predecessor cannot have leased it either, unless a put would fail
//! otherwise and the setting allows it (L4). Each victim is marked before it is proposed, so no lease can appear between
//! the look and the entry (L1). Soft-pinned objects go when nothing else is left.
//!
//! Where several tenants share the pool, the one that holds the most of its share gives up first.

use std::collections::BTreeSet;
use std::sync::Arc;

use tidepool_proto::object::extent_bytes;
use tidepool_proto::{Error, ObjectId, SegmentId};

use super::core::Service;
use super::leases::{Marked, Marks};
use super::options::{FailoverReclaim, RESERVE_PERCENT_MAX};
use super::tenure::Tenure;
use crate::directory::limits::IDS_PER_OP_MAX;
use crate::directory::{Contact, Op, Outcome, RetireMode, TenantId, Victim};

/// Victims that one search for the ops of a batch may take.
pub const VICTIMS_MAX: usize = 4_096;
/// Victims that one round of background eviction, or one eviction for a very large put, may take.
const ROUND_OBJECTS_MAX: usize = 16_384;
/// Bytes evicted by one round of background eviction.
const ROUND_BYTES_MAX: u64 = 256 << 20;
/// Objects around which neighbourhoods are looked for.
const SEEDS: usize = 16;
/// Extents looked at on each side of one of them.
const NEIGHBOURS_MAX: usize = 1_024;
/// The same for a put that needs the space of more objects than its op may name: few places, looked at widely.
const WIDE_SEEDS: usize = 2;
const WIDE_NEIGHBOURS_MAX: usize = 32_768;

/// What is looked for.
#[derive(Clone, Copy, Default)]
pub struct Wanted<'a> {
    /// Bytes to come free.
    pub bytes: u64,
    /// Objects to go, whatever their size.
    pub objects: u64,
    /// Victims at most.
    pub limit: usize,
    /// Only this tenant's.
    pub tenant: Option<TenantId>,
    /// Only objects with a replica there.
    pub segments: Option<&'a BTreeSet<SegmentId>>,
    /// A put has failed without: also what a predecessor may have leased (L4).
    pub urgent: bool,
}

/// A victim that was found.
#[derive(Clone, Copy, Debug)]
pub struct Found {
    /// Object.
    pub object: ObjectId,
    /// Bytes that come free.
    pub bytes: u64,
    /// Its group; members come one after the other and go together.
    pub group: Option<u64>,
}

/// Victims found, marked for as long as `marks` lives.
pub struct Victims {
    /// First to go first.
    pub found: Vec<Found>,
    /// Their marks.
    pub marks: Marks,
}

impl Victims {
    /// Nothing.
    pub fn none(tenure: &Tenure) -> Victims {
        Victims { found: Vec::new(), marks: Marks::new(tenure.leases.clone()) }
    }

    /// Bytes that come free.
    pub fn bytes(&self) -> u64 {
        self.found.iter().map(|victim| victim.bytes).sum()
    }

    /// Adds another search's victims.
    pub fn absorb(&mut self, other: Victims) {
        self.found.extend(other.found);
        self.marks.absorb(other.marks);
    }
}

/// Finds and marks victims.
pub fn find(service: &Service, tenure: &Tenure, wanted: &Wanted<'_>) -> Victims {
    let mut victims = Victims::none(tenure);
    let tenants = match wanted.tenant {
        Some(tenant) => vec![tenant],
        None => tenants_by_share(service),
    };
    let soft_pins_too: &[bool] = if service.options().evict_soft_pinned { &[false, true] } else { &[false] };
    for &soft_pinned in soft_pins_too {
        for &tenant in &tenants {
            let bytes = wanted.bytes.saturating_sub(victims.bytes());
            let objects = (wanted.objects as usize).saturating_sub(victims.found.len());
            let limit = wanted.limit.saturating_sub(victims.found.len());
            if bytes == 0 && objects == 0 || limit == 0 {
                return victims;
            }
            let (bytes, limit) = if bytes == 0 { (u64::MAX, objects.min(limit)) } else { (bytes, limit) };
            let Victims { found, marks } = &mut victims;
            let accepted = service.evictor().victims(tenant, bytes, limit, &mut |candidate| {
                let victim = service.directory().as_victim(candidate.object);
                victim.is_some_and(|victim| admit(service, tenure, wanted, &victim, soft_pinned, marks))
            });
            found.extend(accepted.iter().map(|c| Found { object: c.object, bytes: c.bytes, group: c.group }));
        }
    }
    victims
}

/// Tenants in the order in which they give up: the one that holds the most of its share first.
fn tenants_by_share(service: &Service) -> Vec<TenantId> {
    let mut tenants = service.directory().tenants();
    if tenants.len() > 1 {
        let capacity = service.directory().counts().capacity_bytes.max(1);
        let share =
            |bytes: u64, quota: u64| (u128::from(bytes) << 32) / u128::from(if quota == 0 { capacity } else { quota });
        tenants.sort_by_key(|tenant| std::cmp::Reverse(share(tenant.bytes, tenant.quota.bytes)));
    }
    tenants.into_iter().map(|tenant| tenant.tenant).collect()
}

/// Whether this object may be evicted now; if so it is marked.
fn admit(
    service: &Service,
    tenure: &Tenure,
    wanted: &Wanted<'_>,
    victim: &Victim,
    soft_pinned: bool,
    marks: &mut Marks,
) -> bool {
    let elsewhere = |segments: &BTreeSet<SegmentId>| !victim.replicas.iter().any(|r| segments.contains(&r.1));
    if wanted.segments.is_some_and(elsewhere) || !soft_pinned && victim.soft_pinned_until > tenure.log_time() {
        return false;
    }
    mark(service, tenure, victim.object, wanted.urgent, marks)
}

fn mark(service: &Service, tenure: &Tenure, object: ObjectId, urgent: bool, marks: &mut Marks) -> bool {
    let protected = tenure.may_be_leased_by_predecessor(object);
    if protected && !(urgent && service.options().failover_reclaim == FailoverReclaim::Allow) {
        return false;
    }
    if marks.holds(object) {
        return true;
    }
    let marked = marks.mark(object, tenure.now_ms()) == Marked::Yes;
    if marked && protected {
        service.metrics().leases_broken.inc();
    }
    marked
}

/// Finds and marks objects that lie side by side, for a request larger than any free extent.
pub fn neighbours(service: &Service, tenure: &Tenure, payload_bytes: u64, seeds: &[ObjectId]) -> Victims {
    let seeds = if seeds.is_empty() { &oldest(service) } else { seeds };
    around(service, tenure, payload_bytes, seeds, NEIGHBOURS_MAX)
}

fn around(service: &Service, tenure: &Tenure, payload_bytes: u64, seeds: &[ObjectId], pieces_max: usize) -> Victims {
    let mut victims = Victims::none(tenure);
    let found = service.directory().neighbour_victims(seeds, extent_bytes(payload_bytes), pieces_max, |victim| {
        // A group goes as a whole; soft pins have nothing left to wait for.
        let companions = service.directory().companions(victim.object);
        let group = std::iter::once(victim.object).chain(companions.iter().copied());
        companions.len() < VICTIMS_MAX
            && group.clone().all(|object| mark(service, tenure, object, true, &mut victims.marks))
    });
    let mut named = BTreeSet::new();
    for victim in found.unwrap_or_default() {
        let bytes = victim.bytes();
        for object in std::iter::once(victim.object).chain(service.directory().companions(victim.object)) {
            if named.insert(object) && named.len() <= IDS_PER_OP_MAX {
                victims.found.push(Found {
                    object,
                    bytes: if object == victim.object { bytes } else { 0 },
                    group: None,
                });
            }
        }
    }
    victims
}

/// What the policies would give up first, as places to look around.
fn oldest(service: &Service) -> Vec<ObjectId> {
    let mut seeds = Vec::new();
    for tenant in tenants_by_share(service) {
        let accept = &mut |_: &crate::eviction::Candidate| true;
        seeds.extend(service.evictor().victims(tenant, u64::MAX, SEEDS, accept).iter().map(|c| c.object));
    }
    seeds
}

/// Evicts by an op of its own. Returns the bytes that came free.
pub async fn evict(service: &Service, tenure: &Tenure, wanted: &Wanted<'_>, reason: &str) -> Result<u64, Error> {
    evict_found(service, tenure, find(service, tenure, wanted), reason).await
}

/// Evicts a neighbourhood by an op of its own, for a put that needs the space of more objects than its op may name.
pub async fn evict_neighbourhood(service: &Service, tenure: &Tenure, payload_bytes: u64) -> Result<u64, Error> {
    let mut seeds = oldest(service);
    seeds.truncate(WIDE_SEEDS);
    let victims = around(service, tenure, payload_bytes, &seeds, WIDE_NEIGHBOURS_MAX);
    evict_found(service, tenure, victims, "put").await
}

async fn evict_found(service: &Service, tenure: &Tenure, victims: Victims, reason: &str) -> Result<u64, Error> {
    if victims.found.is_empty() {
        return Ok(0);
    }
    let bytes = victims.bytes();
    let objects: Vec<ObjectId> = victims.found.iter().map(|v| v.object).collect();
    let retire = Op::Retire { objects, mode: RetireMode::RetireAndReclaim };
    match tenure.proposer.propose_one(retire, Some(victims.marks)).await? {
        Outcome::Retired { objects } => {
            count_evicted(service, reason, objects.len() as u64, bytes);
            Ok(bytes)
        }
        Outcome::Refused(error) => Err(error),
        other => Err(super::core::unexpected("retire", &other)),
    }
}

/// Bytes to keep free: what puts need during one longest lease, at most 5 % of the pool (L4).
pub fn reserve_bytes(capacity: u64, put_bytes_per_second: u64, lease_ttl_max_ms: u64) -> u64 {
    let needed = put_bytes_per_second.saturating_mul(lease_ttl_max_ms) / 1_000;
    needed.min(capacity / 100 * RESERVE_PERCENT_MAX)
}

/// One round of background eviction: every segment keeps its part of the reserve free. Returns the bytes evicted.
pub async fn refill_reserve(service: &Arc<Service>, tenure: &Tenure, put_bytes_per_second: u64) -> Result<u64, Error> {
    if tenure.in_first_window() {
        return Ok(0);
    }
    let segments = service.directory().segments();
    let capacity: u64 = segments.iter().map(|s| s.capacity).sum();
    let lease_ttl_max_ms = service.lease_ttl_max().as_millis() as u64;
    let reserve = reserve_bytes(capacity, put_bytes_per_second, lease_ttl_max_ms);
    let (mut short, mut bytes) = (BTreeSet::new(), 0);
    for segment in segments.iter().filter(|s| s.contact == Contact::Heard) {
        let part = (u128::from(reserve) * u128::from(segment.capacity) / u128::from(capacity.max(1))) as u64;
        // What is retired comes free by itself, when its leases end.
        let missing = part.saturating_sub(segment.free + segment.retired);
        if missing > 0 {
            short.insert(segment.segment);
            bytes += missing;
        }
    }
    if short.is_empty() {
        return Ok(0);
    }
    if super::hot::give_way(service, tenure, &short).await? {
        return Ok(0);
    }
    let segments = (short.len() < segments.len()).then_some(&short);
    let wanted = Wanted { bytes: bytes.min(ROUND_BYTES_MAX), limit: ROUND_OBJECTS_MAX, segments, ..Wanted::default() };
    evict(service, tenure, &wanted, "reserve").await
}

/// Counts evicted objects.
pub fn count_evicted(service: &Service, reason: &str, objects: u64, bytes: u64) {
    service.metrics().evicted_objects.with_label_values(&[reason]).inc_by(objects);
    service.metrics().evicted_bytes.with_label_values(&[reason]).inc_by(bytes);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_reserve_follows_the_put_rate_up_to_five_percent() {
        assert_eq!(reserve_bytes(1_000_000, 0, 10_000), 0);
        assert_eq!(reserve_bytes(1_000_000, 1_000, 10_000), 10_000);
        assert_eq!(reserve_bytes(1_000_000, 1_000_000, 10_000), 50_000);
        assert_eq!(reserve_bytes(u64::MAX, u64::MAX, u64::MAX), u64::MAX / 1_000);
    }
}
