//! How fast the leader's clock goes, by this host's: leases and grants assume that any two hosts differ by less than 5 % (T2).
//!
//! Nothing is decided by it. What keeps bytes right whatever the clocks do is that a lease or grant is refused here once log time
//! says that it is over, however much of it its holder believes to be left, and that readers verify what they read. A host beyond
//! the limit has its reads refused, so its operator must be told why.

use std::time::Duration;

use tidepool_proto::LogTime;
use tidepool_proto::clock::BootInstant;

/// How much clocks may differ.
pub(crate) const RATE_TOLERANCE: f64 = 0.05;
/// Time over which the rate is taken: what is told is late by a heartbeat, which is a small part of it.
const WINDOW: Duration = Duration::from_secs(60);
/// Answers further apart than this say too little of when the log time that they carry was new.
const GAP_MAX: Duration = Duration::from_millis(500);

/// What was heard within a term, without a gap.
#[derive(Default)]
pub(crate) struct ClockRate {
    /// The first change of log time of this window.
    anchor: Option<(LogTime, BootInstant)>,
    newest: Option<(u64, LogTime, BootInstant)>,
}

impl ClockRate {
    /// Takes in what an answer told; answers the leader's rate when a window is full.
    pub(crate) fn heard(&mut self, term: u64, told: LogTime, at: BootInstant) -> Option<f64> {
        let (last_term, last_told, last_at) = self.newest.replace((term, told, at))?;
        if term != last_term || at - last_at > GAP_MAX {
            self.anchor = None;
            return None;
        }
        // Log time stands between two entries: only when it changes is it known to be new.
        if told <= last_told {
            return None;
        }
        let (from_told, from_at) = *self.anchor.get_or_insert((told, at));
        let window = at - from_at;
        if window < WINDOW {
            return None;
        }
        self.anchor = Some((told, at));
        Some((told.0 - from_told.0) as f64 / window.as_millis() as f64)
    }
}

/// Whether two hosts of this rate cannot share leases.
pub(crate) fn is_off(rate: f64) -> bool {
    (rate - 1.0).abs() > RATE_TOLERANCE
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What is found of a leader of this rate whose log time changes every 700 ms, heard every 100 ms.
    fn rates(rate: f64, seconds: u64, mut skip: impl FnMut(u64) -> bool, term: impl Fn(u64) -> u64) -> Vec<f64> {
        let (start, mut clock) = (BootInstant::now(), ClockRate::default());
        let beats = (0..seconds * 10).filter(|beat| !skip(*beat));
        let heard = beats.filter_map(|beat| {
            let own_ms = beat * 100;
            let leaders_ms = (own_ms as f64 * rate) as u64;
            clock.heard(term(beat), LogTime(leaders_ms / 700 * 700), start.after(Duration::from_millis(own_ms)))
        });
        heard.collect()
    }

    #[test]
    fn five_percent_is_told_from_less() {
        for (rate, off) in [(1.0, false), (1.03, false), (0.97, false), (1.08, true), (0.92, true), (2.0, true)] {
            let found = rates(rate, 200, |_| false, |_| 1);
            assert_eq!(found.len(), 3, "{rate}: {found:?}");
            assert!(
                found.iter().all(|found| (found - rate).abs() < 0.01 && is_off(*found) == off),
                "{rate}: {found:?}"
            );
        }
    }

    /// A new leader's clock is another one, and what was not heard for a while may have been new long before.
    #[test]
    fn neither_a_new_leader_nor_a_silence_says_anything_of_the_rate() {
        assert!(rates(1.2, 200, |_| false, |beat| beat / 500).is_empty());
        assert!(rates(1.2, 200, |beat| beat % 500 < 10, |_| 1).is_empty());
    }
}
