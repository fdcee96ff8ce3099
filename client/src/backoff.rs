//! Pauses between repeats: growing, capped, with jitter, and never less than the peer advised.

use std::time::Duration;

use rand::Rng;

const FIRST_MS: u64 = 2;
const LAST_MS: u64 = 50;
/// Advice beyond this is not believed.
const ADVICE_MAX_MS: u64 = 1000;

/// The next pause of one call.
#[derive(Debug)]
pub(crate) struct Backoff {
    next_ms: u64,
}

impl Backoff {
    pub(crate) fn new() -> Backoff {
        Backoff { next_ms: FIRST_MS }
    }

    /// The pause before the next repeat, given the peer's advice (0: none).
    pub(crate) fn next(&mut self, advice_ms: u32) -> Duration {
        let pause = self.next_ms.max(u64::from(advice_ms).min(ADVICE_MAX_MS));
        self.next_ms = (self.next_ms * 2).min(LAST_MS);
        let jitter_us = rand::rng().random_range(0..=pause * 250);
        Duration::from_millis(pause) + Duration::from_micros(jitter_us)
    }
}

/// First pause of a search for the leader.
const SEARCH_FIRST: Duration = Duration::from_millis(15);
/// Pauses of that length before they grow: an election and the new leader's first entry take 60 to 270 ms, and
/// whoever looks in must not have slowed down by then.
const SEARCH_QUICK_TRIES: u32 = 24;
/// Longest pause: what a cluster that stays away is asked by each of its clients.
const SEARCH_MAX: Duration = Duration::from_millis(250);

/// Pauses of one member's search while nobody is known to lead.
#[derive(Debug, Default)]
pub(crate) struct Search {
    tries: u32,
}

impl Search {
    /// The next pause.
    pub(crate) fn next(&mut self) -> Duration {
        let growth = 1.5f64.powi(self.tries.saturating_sub(SEARCH_QUICK_TRIES).min(20) as i32);
        self.tries = self.tries.saturating_add(1);
        // A quarter more or less, so that clients that lost one leader do not ask in step.
        SEARCH_FIRST.mul_f64(growth).min(SEARCH_MAX).mul_f64(rand::rng().random_range(0.75..1.25))
    }

    /// There is news: from the beginning.
    pub(crate) fn reset(&mut self) {
        self.tries = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_search_is_quick_for_an_election_and_slow_for_an_outage() {
        let mut search = Search::default();
        let quick: Duration = (0..SEARCH_QUICK_TRIES).map(|_| search.next()).sum();
        assert!(quick >= Duration::from_millis(270), "{quick:?}");
        let later: Vec<Duration> = (0..20).map(|_| search.next()).collect();
        assert!(later.iter().all(|&pause| pause <= SEARCH_MAX.mul_f64(1.25)), "{later:?}");
        assert!(later[10..].iter().all(|&pause| pause >= SEARCH_MAX.mul_f64(0.75)), "{later:?}");
        search.reset();
        assert!(search.next() < 2 * SEARCH_FIRST);
    }
}
