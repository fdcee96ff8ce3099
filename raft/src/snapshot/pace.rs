//! How fast snapshots leave a member: one budget for all that it feeds, so that catching up costs the others a known part of
//! the link.

use std::time::Duration;

use parking_lot::Mutex;

/// Bytes a second, shared by all transfers of a member.
#[derive(Debug)]
pub struct Pace {
    bytes_per_second: u64,
    /// When the bytes sent so far are paid for, from the clock that `reserve` is given.
    paid: Mutex<Duration>,
}

impl Pace {
    /// So many bytes a second; 0: as fast as it goes.
    pub fn new(bytes_per_second: u64) -> Pace {
        Pace { bytes_per_second, paid: Mutex::default() }
    }

    /// Asks for `bytes` at `now`, a time on any one monotonic clock: how long to wait before they are sent.
    pub fn reserve(&self, now: Duration, bytes: usize) -> Duration {
        if self.bytes_per_second == 0 {
            return Duration::ZERO;
        }
        let mut paid = self.paid.lock();
        // Time in which nothing was sent is not saved up.
        let starts = (*paid).max(now);
        let costs = (bytes as u128 * 1_000_000_000) / u128::from(self.bytes_per_second);
        *paid = starts + Duration::from_nanos(u64::try_from(costs).unwrap_or(u64::MAX));
        starts - now
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_transfers_share_the_budget_and_pauses_are_not_saved_up() {
        let (pace, at) = (Pace::new(1_000), Duration::from_secs);
        assert_eq!(pace.reserve(at(5), 500), Duration::ZERO);
        assert_eq!(pace.reserve(at(5), 1_000), Duration::from_millis(500), "of another transfer");
        assert_eq!(pace.reserve(at(6), 1), Duration::from_millis(500));
        assert_eq!(pace.reserve(at(100), 10_000), Duration::ZERO);
        assert_eq!(pace.reserve(at(100), 1), Duration::from_secs(10));
        assert_eq!(Pace::new(0).reserve(at(0), usize::MAX), Duration::ZERO);
    }
}
