//! The reserve: free space kept ahead of need in every segment (L4).

use std::collections::BTreeMap;
use std::sync::Arc;

use tidepool_proto::Error;

use super::core::Service;
use super::options::RESERVE_PERCENT_MAX;
use super::room::{self, Wanted};
use super::tenure::Tenure;
use crate::directory::Contact;

/// Victims that one round may take.
const ROUND_OBJECTS_MAX: usize = 16_384;
/// Bytes evicted by one round.
const ROUND_BYTES_MAX: u64 = 256 << 20;

/// Bytes to keep free: what puts need during one longest lease, at most 5 % of the pool (L4).
pub fn bytes(capacity: u64, put_bytes_per_second: u64, lease_ttl_max_ms: u64) -> u64 {
    let needed = put_bytes_per_second.saturating_mul(lease_ttl_max_ms) / 1_000;
    needed.min(capacity / 100 * RESERVE_PERCENT_MAX)
}

/// One round: every segment gets its part of the reserve back. Returns the bytes evicted.
pub async fn refill(service: &Arc<Service>, tenure: &Tenure, put_bytes_per_second: u64) -> Result<u64, Error> {
    if tenure.in_first_window() {
        return Ok(0);
    }
    let segments = service.directory().segments();
    let capacity: u64 = segments.iter().map(|s| s.capacity).sum();
    let lease_ttl_max_ms = service.lease_ttl_max().as_millis() as u64;
    let reserve = bytes(capacity, put_bytes_per_second, lease_ttl_max_ms);
    let mut missing = BTreeMap::new();
    for segment in segments.iter().filter(|s| s.contact == Contact::Heard && !s.draining) {
        let part = (u128::from(reserve) * u128::from(segment.capacity) / u128::from(capacity.max(1))) as u64;
        // What is retired comes free by itself, when its leases end.
        let short = part.saturating_sub(segment.free + segment.retired);
        if short > 0 {
            missing.insert(segment.segment, short);
        }
    }
    if missing.is_empty() {
        return Ok(0);
    }
    if super::hot::give_way(service, tenure, &missing.keys().copied().collect()).await? {
        return Ok(0);
    }
    let bytes = missing.values().sum::<u64>().min(ROUND_BYTES_MAX);
    // Each segment gets back what it lacks, so that all are equally full.
    let wanted = Wanted { bytes, limit: ROUND_OBJECTS_MAX, segments: Some(&missing), ..Wanted::default() };
    room::evict(service, tenure, &wanted, "reserve").await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_reserve_follows_the_put_rate_up_to_five_percent() {
        assert_eq!(bytes(1_000_000, 0, 10_000), 0);
        assert_eq!(bytes(1_000_000, 1_000, 10_000), 10_000);
        assert_eq!(bytes(1_000_000, 1_000_000, 10_000), 50_000);
        assert_eq!(bytes(u64::MAX, u64::MAX, u64::MAX), u64::MAX / 1_000);
    }
}
