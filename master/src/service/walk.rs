//! Victims in one segment, by a walk through its extents.
//!
//! Where many segments share the order of eviction, most of what the policies would give up first lies elsewhere. Of some
//! objects that lie side by side in the segment those go that the policy would give up first, and the next walk goes on
//! behind them.

use std::collections::BTreeMap;

use tidepool_proto::SegmentId;

use super::core::Service;
use super::room::{Found, Victims, Wanted, mark, tenants_by_share};
use super::tenure::Tenure;
use crate::directory::{TenantId, Victim};
use crate::eviction::Answer;

/// Objects that lie side by side and are compared with one another.
const STRETCH_OBJECTS: usize = 256;
/// The share of them that may go.
const STRETCH_SHARE: usize = 4;
/// Stretches looked at in one search, all segments together.
const STRETCHES_MAX: usize = 16;

/// Adds what the segments that are asked for still need.
pub fn find(service: &Service, tenure: &Tenure, wanted: &Wanted<'_>, victims: &mut Victims) {
    let Some(segments) = wanted.segments else { return };
    let mut search = Search {
        service,
        tenure,
        wanted,
        share: tenants_by_share(service).into_iter().zip(0..).collect(),
        stretches: STRETCHES_MAX,
    };
    for (&segment, &need) in segments {
        let found = victims.by_segment.get(&segment).copied().unwrap_or(0);
        let missing = wanted.bytes.saturating_sub(victims.bytes()).min(need.saturating_sub(found));
        search.segment(segment, missing, victims);
    }
}

struct Search<'a> {
    service: &'a Service,
    tenure: &'a Tenure,
    wanted: &'a Wanted<'a>,
    /// Tenants' places in the order in which they give up.
    share: BTreeMap<TenantId, usize>,
    stretches: usize,
}

impl Search<'_> {
    /// Walks through a segment from where the last walk ended, once round at most.
    fn segment(&mut self, segment: SegmentId, bytes: u64, victims: &mut Victims) {
        let (directory, evictor) = (self.service.directory(), self.service.evictor());
        let began = evictor.cursor(segment);
        let (mut cursor, mut freed, mut is_round) = (began, 0, false);
        while freed < bytes && self.stretches > 0 && !(is_round && cursor >= began) {
            self.stretches -= 1;
            let (stretch, next) = directory.victims_in(segment, cursor, STRETCH_OBJECTS);
            is_round |= next.is_none();
            cursor = next.unwrap_or(0);
            for victim in self.first_to_go(stretch) {
                if freed < bytes {
                    freed += self.take(segment, &victim, victims);
                }
            }
        }
        evictor.set_cursor(segment, cursor);
    }

    /// The share of a stretch that the policies would give up first, in their order.
    fn first_to_go(&self, stretch: Vec<Victim>) -> Vec<Victim> {
        let of_tenant = |victim: &Victim| self.wanted.tenant.is_none_or(|tenant| tenant == victim.tenant);
        let stretch: Vec<Victim> = stretch.into_iter().filter(of_tenant).collect();
        let asked = stretch.iter().map(|victim| (victim.tenant, victim.key, victim.object));
        let ranks = self.service.evictor().ranks(asked);
        let mut in_order: Vec<_> = stretch
            .into_iter()
            .zip(ranks)
            .filter_map(|(victim, rank)| Some((self.share.get(&victim.tenant).copied(), rank?, victim)))
            .collect();
        in_order.sort_by_key(|(share, rank, victim)| (*share, *rank, victim.object));
        let most = in_order.len().div_ceil(STRETCH_SHARE);
        in_order.into_iter().take(most).map(|(_, _, victim)| victim).collect()
    }

    /// Takes a victim with its group, if all of it may go. Returns the bytes that come free in the segment.
    fn take(&self, segment: SegmentId, victim: &Victim, victims: &mut Victims) -> u64 {
        let (directory, log_time) = (self.service.directory(), self.tenure.log_time());
        if victim.soft_pinned_until > log_time || victims.marks.holds(victim.object) {
            return 0;
        }
        let companions = directory.companions(victim.object);
        if victims.found.len() + companions.len() >= self.wanted.limit {
            return 0;
        }
        let (mut found, mut freed) = (Vec::with_capacity(1 + companions.len()), 0);
        for object in std::iter::once(victim.object).chain(companions) {
            let Some(member) = directory.as_victim(object).filter(|m| m.soft_pinned_until <= log_time) else {
                return 0;
            };
            if mark(self.service, self.tenure, object, self.wanted.urgent, &mut victims.marks) != Answer::Take {
                return 0;
            }
            let there = member.replicas.iter().filter(|(_, lies_in, _)| *lies_in == segment);
            freed += there.map(|(_, _, bytes)| bytes).sum::<u64>();
            found.push(Found { object, bytes: member.bytes(), group: Some(victim.object.0) });
        }
        victims.found.append(&mut found);
        freed
    }
}
