//! Room for puts (W9, L4): which objects go when space is short, and the reserve kept ahead of need.
//!
//! Victims are the oldest COMPLETE objects that nobody leases; each is marked before it is proposed, so no lease can
//! appear between the look and the entry (L1). In the first lease window of a term the predecessor's leases are
//! unknown: the reserve is lived on and not refilled, and objects from before the term are taken only when it is gone,
//! and only if the setting allows it (L4). They then go oldest first like any others: taking this term's objects before
//! them would throw away everything just written, which is what the cache is needed for after a failover.

use std::sync::Arc;

use tidepool_proto::object::extent_bytes;
use tidepool_proto::{Error, ObjectId};

use super::core::Service;
use super::leases::{Marked, Marks};
use super::options::{FailoverReclaim, RESERVE_PERCENT_MAX};
use super::tenure::Tenure;
use crate::directory::{Op, Outcome, RetireMode, Victim};

/// Pages of the directory looked through for one batch of victims.
const PAGES_MAX: usize = 8;
/// Victims one search may take.
const VICTIMS_MAX: usize = 4_096;
/// Bytes evicted by one round of background eviction.
const ROUND_BYTES_MAX: u64 = 256 << 20;

/// Victims found, marked for as long as `marks` lives.
pub struct Victims {
    /// Oldest first.
    pub found: Vec<Victim>,
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
        self.found.iter().map(Victim::bytes).sum()
    }
}

/// Whether this object may be evicted now, and whether that may break a predecessor's lease.
fn admit(service: &Service, tenure: &Tenure, object: ObjectId, marks: &mut Marks, now_ms: u64) -> bool {
    if tenure.may_be_leased_by_predecessor(object) {
        let allowed = service.options().failover_reclaim == FailoverReclaim::Allow;
        if !allowed || !tenure.reserve_gone() {
            return false;
        }
        if marks.mark(object, now_ms) == Marked::Yes {
            service.metrics().leases_broken.inc();
            return true;
        }
        return false;
    }
    marks.mark(object, now_ms) == Marked::Yes
}

/// Finds and marks the oldest objects whose bytes reach `bytes`.
pub fn oldest(service: &Service, tenure: &Tenure, bytes: u64) -> Victims {
    let mut victims = Victims::none(tenure);
    let now_ms = tenure.now_ms();
    let mut cursor = tenure.victim_cursor();
    let mut collected = 0;
    for _ in 0..PAGES_MAX {
        let limit = VICTIMS_MAX.saturating_sub(victims.found.len());
        if collected >= bytes || limit == 0 {
            break;
        }
        let page = service.directory().oldest_victims(cursor, bytes - collected, limit, |victim| {
            admit(service, tenure, victim.object, &mut victims.marks, now_ms)
        });
        collected += page.bytes;
        victims.found.extend(page.victims);
        cursor = page.next;
        if cursor.is_none() {
            break;
        }
    }
    tenure.set_victim_cursor(cursor);
    victims
}

/// Finds and marks objects that lie side by side, for a request larger than any free extent.
pub fn neighbours(service: &Service, tenure: &Tenure, payload_bytes: u64) -> Victims {
    let mut victims = Victims::none(tenure);
    let now_ms = tenure.now_ms();
    let found = service.directory().neighbour_victims(extent_bytes(payload_bytes), |victim| {
        let object = victim.object;
        victims.marks.objects().contains(&object) || admit(service, tenure, object, &mut victims.marks, now_ms)
    });
    victims.found = found.unwrap_or_default();
    victims
}

/// Bytes to keep free: what puts need during one longest lease, at most 5 % of the pool (L4).
pub fn reserve_bytes(capacity: u64, put_bytes_per_second: u64, lease_ttl_max_ms: u64) -> u64 {
    let needed = put_bytes_per_second.saturating_mul(lease_ttl_max_ms) / 1_000;
    needed.min(capacity / 100 * RESERVE_PERCENT_MAX)
}

/// One round of background eviction. Returns the bytes evicted.
pub async fn refill_reserve(service: &Arc<Service>, tenure: &Tenure, put_bytes_per_second: u64) -> Result<u64, Error> {
    let counts = service.directory().counts();
    let lease_ttl_max_ms = service.lease_ttl_max().as_millis() as u64;
    let reserve = reserve_bytes(counts.capacity_bytes, put_bytes_per_second, lease_ttl_max_ms);
    if tenure.in_first_window() {
        return Ok(0);
    }
    tenure.set_reserve_gone(false);
    let short = reserve.saturating_sub(counts.free_bytes).min(ROUND_BYTES_MAX);
    if short == 0 {
        return Ok(0);
    }
    let victims = oldest(service, tenure, short);
    if victims.found.is_empty() {
        return Ok(0);
    }
    let bytes = victims.bytes();
    let objects: Vec<ObjectId> = victims.found.iter().map(|v| v.object).collect();
    let retire = Op::Retire { objects, mode: RetireMode::RetireAndReclaim };
    match tenure.proposer.propose_one(retire, Some(victims.marks)).await? {
        Outcome::Retired { objects } => {
            count_evicted(service, "reserve", objects.len() as u64, bytes);
            Ok(bytes)
        }
        Outcome::Refused(error) => Err(error),
        other => Err(super::core::unexpected("retire", &other)),
    }
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
