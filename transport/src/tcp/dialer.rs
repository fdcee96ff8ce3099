//! When a peer may be dialled: exponential backoff with jitter, and a bound on dials a minute (user report 86).

use std::collections::VecDeque;
use std::time::Duration;

use parking_lot::Mutex;
use tidepool_proto::{Error, ErrorCode};
use tokio::time::Instant;

use super::connection::Ended;

/// Dials a minute to a peer without a live connection.
pub const DIALS_PER_MINUTE_MAX: usize = 10;
/// A connection that lived this long and was answered ends a row of failures.
const STABLE_AFTER: Duration = Duration::from_secs(10);
const MINUTE: Duration = Duration::from_secs(60);

/// One peer's dialling state.
#[derive(Default)]
pub(super) struct Dialer {
    state: Mutex<State>,
}

/// Dials of a minute that follow the backoff alone; the rest are spread, so that a peer that returns after a longer
/// outage is found soon and not only when the minute is over.
const HURRIED_DIALS_MAX: usize = 8;
/// Pause between the others.
const SPREAD: Duration = Duration::from_secs(18);

#[derive(Default)]
struct State {
    failures: u32,
    not_before: Option<Instant>,
    last_error: Option<Error>,
    recent: VecDeque<Instant>,
}

/// Pauses between dials.
#[derive(Clone, Copy)]
pub(super) struct Backoff {
    /// First pause.
    pub(super) min: Duration,
    /// Longest pause.
    pub(super) max: Duration,
}

impl Dialer {
    /// Asks to dial now; counts the dial. The error repeats why the last dial failed and says how long to wait.
    pub(super) fn admit(&self, now: Instant) -> Result<(), Error> {
        let mut state = self.state.lock();
        while state.recent.front().is_some_and(|&at| now.saturating_duration_since(at) >= MINUTE) {
            state.recent.pop_front();
        }
        let full = state.recent.len() >= DIALS_PER_MINUTE_MAX;
        let window_ends = state.recent.front().filter(|_| full).map(|&at| at + MINUTE);
        let hurried = state.recent.len() >= HURRIED_DIALS_MAX;
        let spread = state.recent.back().filter(|_| hurried).map(|&at| at + SPREAD);
        let not_before = state.not_before.max(window_ends).max(spread).filter(|&at| at > now);
        let Some(not_before) = not_before else {
            state.recent.push_back(now);
            return Ok(());
        };
        let wait_ms = not_before.saturating_duration_since(now).as_millis() as u32 + 1;
        let (code, why) = match &state.last_error {
            Some(error) => (error.code(), error.message()),
            None => (ErrorCode::TransferFailed, "its connections did not last"),
        };
        let message = format!("not dialled again for {wait_ms} ms after {} failures: {why}", state.failures);
        Err(Error::new(code, message).retry_after(wait_ms))
    }

    /// A dial failed.
    pub(super) fn failed(&self, now: Instant, backoff: Backoff, error: &Error) {
        let mut state = self.state.lock();
        state.last_error = Some(error.clone());
        if state.not_before.is_some_and(|at| at > now) {
            // Stripes of one peer that fail together are one failure.
            return;
        }
        let doubled = backoff.min.saturating_mul(1 << state.failures.min(16)).min(backoff.max);
        state.failures += 1;
        state.not_before = Some(now + doubled.mul_f64(rand::random_range(0.75..1.25)));
    }

    /// A connection ended. Only one that was of use for a while, or that this side left, wipes the slate: a peer that
    /// accepts and resets is as dead as one that refuses.
    pub(super) fn ended(&self, now: Instant, backoff: Backoff, ended: &Ended<'_>) {
        let stable = now.saturating_duration_since(ended.opened) >= STABLE_AFTER;
        if ended.answered && (stable || ended.left) {
            let mut state = self.state.lock();
            (state.failures, state.not_before) = (0, None);
            state.recent.clear();
        } else {
            self.failed(now, backoff, ended.error);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BACKOFF: Backoff = Backoff { min: Duration::from_millis(500), max: Duration::from_secs(30) };

    fn dials_in(seconds: u64, answered: bool) -> Vec<u64> {
        let (dialer, start) = (Dialer::default(), Instant::now());
        let error = Error::new(ErrorCode::TransferFailed, "connection refused");
        let mut dials = Vec::new();
        for ms in 0..seconds * 1000 {
            let now = start + Duration::from_millis(ms);
            if dialer.admit(now).is_ok() {
                dials.push(ms);
                dialer.ended(now, BACKOFF, &Ended { error: &error, opened: now, answered, left: false });
            }
        }
        dials
    }

    /// User report 86. Without the doubling this sees 120 dials a minute; without the window a backoff of 1 ms would.
    #[test]
    fn case_086_a_dead_peer_is_dialled_at_most_ten_times_a_minute() {
        for answered in [false, true] {
            let dials = dials_in(180, answered);
            assert!(dials.len() >= 4, "{dials:?}");
            for (i, &first) in dials.iter().enumerate() {
                let within = dials[i..].iter().take_while(|&&at| at < first + 60_000).count();
                assert!(within <= DIALS_PER_MINUTE_MAX, "{within} dials within a minute: {dials:?}");
            }
        }
    }

    #[test]
    fn failures_together_count_once_and_a_good_connection_wipes_the_slate() {
        let (dialer, now) = (Dialer::default(), Instant::now());
        let error = Error::new(ErrorCode::WrongCluster, "another cluster");
        dialer.admit(now).unwrap();
        dialer.failed(now, BACKOFF, &error);
        dialer.failed(now, BACKOFF, &error);
        assert_eq!(dialer.state.lock().failures, 1);
        let refused = dialer.admit(now).unwrap_err();
        assert_eq!(refused.code(), ErrorCode::WrongCluster);
        assert!(refused.message().contains("another cluster") && refused.retry_after_ms() > 0);
        let ended = Ended { error: &error, opened: now + Duration::from_secs(5), answered: true, left: false };
        dialer.ended(now + Duration::from_secs(20), BACKOFF, &ended);
        dialer.admit(now + Duration::from_secs(20)).unwrap();
    }

    #[test]
    fn a_connection_that_this_side_left_counts_for_nothing_if_the_peer_ever_answered() {
        let (dialer, now) = (Dialer::default(), Instant::now());
        let error = Error::new(ErrorCode::ResourceExhausted, "a put was given up");
        let ended = |answered| Ended { error: &error, opened: now, answered, left: true };
        for _ in 0..2 * DIALS_PER_MINUTE_MAX {
            dialer.admit(now).unwrap();
            dialer.ended(now, BACKOFF, &ended(true));
        }
        dialer.admit(now).unwrap();
        dialer.ended(now, BACKOFF, &ended(false));
        dialer.admit(now).unwrap_err();
    }
}
