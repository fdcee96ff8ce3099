//! Pauses between repeats: doubling, capped, with jitter, and never less than the peer advised.

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
