//! Room for puts (W9, L4): which objects go when space is short. The reserve kept ahead of need is in `reserve`, room for
//! puts larger than any free extent in `neighbourhood`.
//!
//! The eviction policies say in which order; here is decided whether an object may go now: nobody leases it, it is not
//! pinned, and in the first lease window of a term the predecessor cannot have leased it either, unless a put would fail
//! otherwise and the setting allows it (L4). Each victim is marked before it is proposed, so no lease can appear between
//! the look and the entry (L1). Soft-pinned objects go when nothing else is left.
//!
//! Where several tenants share the pool, the one that holds the most of its share gives up first.

use std::collections::BTreeMap;
use std::sync::Arc;

use smallvec::SmallVec;
use tidepool_proto::{Error, ObjectId, SegmentId};

use super::core::Service;
use super::evictor::{Evictor, Ranked};
use super::leases::{Marked, Marks};
use super::options::FailoverReclaim;
use super::tenure::Tenure;
use super::walk;
use crate::directory::{Op, Outcome, RetireMode, TenantId, Victim};
use crate::eviction::Answer;

/// Victims that one search for the ops of a batch may take.
pub const VICTIMS_MAX: usize = 4_096;
/// Soft-pinned objects that one search passes over; more are put off, so that the next search gets past them.
const PINNED_SKIPS_MAX: usize = 1_024;

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
    /// Only objects with a replica there, and how many bytes each of these segments needs at most.
    pub segments: Option<&'a BTreeMap<SegmentId, u64>>,
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

/// What the policies were asked for. When it is dropped, because what was proposed was judged or nothing was, what of it is
/// still there takes its place in the order again: a refused put says nothing about the victims that it named.
pub struct Chosen {
    evictor: Arc<Evictor>,
    objects: Vec<Ranked>,
}

impl Drop for Chosen {
    fn drop(&mut self) {
        if !self.objects.is_empty() {
            self.evictor.spared(&self.objects);
        }
    }
}

/// Victims found, marked for as long as `marks` lives.
pub struct Victims {
    /// First to go first.
    pub found: Vec<Found>,
    /// Those of them that the policies chose.
    pub chosen: Chosen,
    /// Their marks.
    pub marks: Marks,
    /// Where their bytes come free, if segments were asked for.
    pub by_segment: BTreeMap<SegmentId, u64>,
}

impl Victims {
    /// Nothing.
    pub fn none(service: &Service, tenure: &Tenure) -> Victims {
        Victims {
            found: Vec::new(),
            chosen: Chosen { evictor: service.evictor().clone(), objects: Vec::new() },
            marks: Marks::new(tenure.leases.clone()),
            by_segment: BTreeMap::new(),
        }
    }

    /// Bytes that come free.
    pub fn bytes(&self) -> u64 {
        self.found.iter().map(|victim| victim.bytes).sum()
    }

    /// Adds another search's victims.
    pub fn absorb(&mut self, mut other: Victims) {
        self.found.append(&mut other.found);
        self.chosen.objects.append(&mut other.chosen.objects);
        self.marks.absorb(other.marks);
        for (segment, bytes) in other.by_segment {
            *self.by_segment.entry(segment).or_default() += bytes;
        }
    }
}

/// Finds and marks victims.
pub fn find(service: &Service, tenure: &Tenure, wanted: &Wanted<'_>) -> Victims {
    let mut victims = Victims::none(service, tenure);
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
            let Victims { found, chosen, marks, by_segment } = &mut victims;
            let mut pinned = 0;
            let accepted = service.evictor().victims(tenant, bytes, limit, &mut |candidate| {
                // What is gone, or pinned for good, is not asked about again soon.
                let Some(victim) = service.directory().as_victim(candidate.object) else { return Answer::Refuse };
                if !soft_pinned && victim.soft_pinned_until > tenure.log_time() {
                    pinned += 1;
                    return if pinned > PINNED_SKIPS_MAX { Answer::Refuse } else { Answer::Skip };
                }
                admit(service, tenure, wanted, &victim, marks, by_segment)
            });
            chosen.objects.extend(accepted.iter().map(|c| (tenant, c.key, c.object)));
            found.extend(accepted.iter().map(|c| Found { object: c.object, bytes: c.bytes, group: c.group }));
        }
        if victims.bytes() < wanted.bytes {
            walk::find(service, tenure, wanted, &mut victims);
        }
    }
    victims
}

/// Moves found victims over to those of one put, until their bytes reach `need`, a group never split: what an op cannot name whole goes to `large`.
pub fn take(
    spare: &mut std::iter::Peekable<std::vec::IntoIter<Found>>,
    need: u64,
    at_least: usize,
    victims: &mut Vec<ObjectId>,
    large: &mut Vec<SmallVec<[ObjectId; 1]>>,
) {
    let (mut bytes, mut taken) = (0, 0);
    while victims.len() < VICTIMS_MAX && (bytes < need || taken < at_least) {
        let Some(first) = spare.next() else { return };
        let mut unit: SmallVec<[ObjectId; 1]> = SmallVec::from_buf([first.object]);
        bytes += first.bytes;
        while let Some(member) = spare.next_if(|next| next.group.is_some() && next.group == first.group) {
            unit.push(member.object);
            bytes += member.bytes;
        }
        taken += unit.len();
        if victims.len() + unit.len() <= VICTIMS_MAX {
            victims.extend(unit);
        } else {
            large.push(unit);
        }
    }
}

/// Tenants in the order in which they give up: the one that holds the most of its share first.
pub fn tenants_by_share(service: &Service) -> Vec<TenantId> {
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
    marks: &mut Marks,
    by_segment: &mut BTreeMap<SegmentId, u64>,
) -> Answer {
    let Some(segments) = wanted.segments else { return mark(service, tenure, victim.object, wanted.urgent, marks) };
    let still_needs = |segment| {
        let need = segments.get(segment).copied().unwrap_or(0);
        by_segment.get(segment).copied().unwrap_or(0) < need
    };
    if !victim.replicas.iter().any(|(_, segment, _)| still_needs(segment)) {
        return Answer::Skip;
    }
    let answer = mark(service, tenure, victim.object, wanted.urgent, marks);
    if answer == Answer::Take {
        for &(_, segment, bytes) in &victim.replicas {
            *by_segment.entry(segment).or_default() += bytes;
        }
    }
    answer
}

/// Whether an object may go now as far as leases of the term before are concerned (L4).
fn outlived_predecessor(service: &Service, tenure: &Tenure, object: ObjectId, urgent: bool) -> bool {
    let may_break = urgent && service.options().failover_reclaim == FailoverReclaim::Allow;
    may_break || !tenure.may_be_leased_by_predecessor(object)
}

/// Whether [`mark`] would mark it. Nothing is marked: readers of it, and other puts, are not held up.
pub fn could_mark(service: &Service, tenure: &Tenure, object: ObjectId, urgent: bool, marks: &Marks) -> bool {
    outlived_predecessor(service, tenure, object, urgent)
        && (marks.holds(object) || tenure.leases.could_be_marked(object, tenure.now_ms()))
}

/// Marks an object, unless it may not go now. A lease says that it is in use; that the predecessor may have leased it
/// (L4), or that another proposal names it, says nothing.
pub fn mark(service: &Service, tenure: &Tenure, object: ObjectId, urgent: bool, marks: &mut Marks) -> Answer {
    if !outlived_predecessor(service, tenure, object, urgent) {
        return Answer::Skip;
    }
    if marks.holds(object) {
        return Answer::Take;
    }
    match marks.mark(object, tenure.now_ms()) {
        Marked::Yes => {
            if tenure.may_be_leased_by_predecessor(object) {
                service.metrics().leases_broken.inc();
            }
            Answer::Take
        }
        Marked::Leased { .. } => Answer::Refuse,
        Marked::Already => Answer::Skip,
    }
}

/// Evicts by an op of its own. Returns the bytes that came free.
pub async fn evict(service: &Service, tenure: &Tenure, wanted: &Wanted<'_>, reason: &str) -> Result<u64, Error> {
    evict_found(service, tenure, find(service, tenure, wanted), reason).await
}

/// Evicts what was found by an op of its own. Returns the bytes that came free.
pub async fn evict_found(service: &Service, tenure: &Tenure, victims: Victims, reason: &str) -> Result<u64, Error> {
    if victims.found.is_empty() {
        return Ok(0);
    }
    let bytes: BTreeMap<ObjectId, u64> = victims.found.iter().map(|victim| (victim.object, victim.bytes)).collect();
    let objects: Vec<ObjectId> = victims.found.iter().map(|v| v.object).collect();
    let retire = Op::Retire { objects, mode: RetireMode::RetireAndReclaim };
    let Victims { chosen, marks, .. } = victims;
    let outcome = tenure.proposer.propose_one(retire, Some(marks)).await;
    drop(chosen);
    match outcome? {
        Outcome::Retired { objects } => Ok(count_evicted(service, reason, &objects, &bytes)),
        Outcome::Refused(error) => Err(error),
        other => Err(super::core::unexpected("retire", &other)),
    }
}

/// Counts what apply evicted, of victims whose bytes are known. Returns their bytes.
pub fn count_evicted(service: &Service, reason: &str, evicted: &[ObjectId], bytes_of: &BTreeMap<ObjectId, u64>) -> u64 {
    let bytes = evicted.iter().filter_map(|object| bytes_of.get(object)).sum();
    service.metrics().evicted_objects.with_label_values(&[reason]).inc_by(evicted.len() as u64);
    service.metrics().evicted_bytes.with_label_values(&[reason]).inc_by(bytes);
    bytes
}
