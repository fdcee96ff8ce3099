//! Log time as this datanode knows it: a lower bound of the leader's, so that nothing valid is refused early (T1, T2).
//!
//! Every heartbeat answer carries a log time that lies [`EXTRAPOLATION_MAX`] behind the newest entry which the leader applied. Between
//! answers the estimate advances by this host's CLOCK_BOOTTIME less 5 %, but no further than that past the last answer. So it is
//! behind a committed entry, and a lower bound also of the log time of any leader that came since. A leader of an earlier release
//! tells its own log time, which may lie ahead of what its successor begins with: a higher term may set the clock back. So while no
//! leader is followed the estimate decides nothing: [`LogClock::now`] is None.

use std::time::Duration;

use parking_lot::Mutex;
use tidepool_proto::LogTime;
use tidepool_proto::capability::LOG_TIME_TOLD_BEHIND_MS;
use tidepool_proto::clock::{BootInstant, holder_share};

/// How far the estimate runs ahead of the last answer at most.
pub(crate) const EXTRAPOLATION_MAX: Duration = Duration::from_millis(LOG_TIME_TOLD_BEHIND_MS);

/// What an observation did to the estimate.
#[derive(PartialEq, Eq, Debug)]
pub(crate) enum Observed {
    /// It advanced, or stood.
    Advanced,
    /// A new leader's log time lies before it; the estimate went back.
    SetBack,
    /// From an older term than one already heard: ignored.
    StaleTerm,
}

struct Reading {
    term: u64,
    log_time_ms: u64,
    at: BootInstant,
    /// What the estimate never passes: the highest that was told in this term, and as far as it may run ahead of that.
    limit_ms: u64,
    followed: bool,
}

/// How far an answer lets the estimate go.
fn limit_ms(told: LogTime) -> u64 {
    told.0.saturating_add(holder_share(EXTRAPOLATION_MAX).as_millis() as u64)
}

/// The estimate.
pub(crate) struct LogClock {
    reading: Mutex<Reading>,
}

impl LogClock {
    /// Starts from the registration's log time, of which the term is not known.
    pub(crate) fn new(log_time: LogTime, at: BootInstant) -> LogClock {
        let reading = Reading { term: 0, log_time_ms: log_time.0, at, limit_ms: limit_ms(log_time), followed: true };
        LogClock { reading: Mutex::new(reading) }
    }

    /// Takes in an answer that arrived at `at` on this host's clock.
    pub(crate) fn observe(&self, term: u64, log_time: LogTime, at: BootInstant) -> Observed {
        let mut reading = self.reading.lock();
        if term < reading.term {
            return Observed::StaleTerm;
        }
        let estimate = reading.estimate(at);
        let new_leader = term > reading.term;
        let log_time_ms = if new_leader { log_time.0 } else { log_time.0.max(estimate) };
        // The log may stand still while answers go on: they do not carry the estimate past what was told.
        let limit_ms = if new_leader { limit_ms(log_time) } else { limit_ms(log_time).max(reading.limit_ms) };
        *reading = Reading { term, log_time_ms, at, limit_ms, followed: true };
        if log_time_ms < estimate { Observed::SetBack } else { Observed::Advanced }
    }

    /// The leader is lost: until the next answer nobody can say what log time is.
    pub(crate) fn lost(&self) {
        self.reading.lock().followed = false;
    }

    /// The lower bound now; None while no leader is followed.
    pub(crate) fn now(&self) -> Option<LogTime> {
        let reading = self.reading.lock();
        reading.followed.then(|| LogTime(reading.estimate(BootInstant::now())))
    }

    /// The estimate at a moment of this host's clock, for people and for margins.
    pub(crate) fn at(&self, at: BootInstant) -> LogTime {
        LogTime(self.reading.lock().estimate(at))
    }

    /// Highest term heard.
    pub(crate) fn term(&self) -> u64 {
        self.reading.lock().term
    }
}

impl Reading {
    fn estimate(&self, at: BootInstant) -> u64 {
        let elapsed = (at - self.at).min(EXTRAPOLATION_MAX);
        self.log_time_ms.saturating_add(holder_share(elapsed).as_millis() as u64).min(self.limit_ms)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn after(start: BootInstant, ms: u64) -> BootInstant {
        start.after(Duration::from_millis(ms))
    }

    #[test]
    fn advances_five_percent_slower_and_stops_without_a_leader() {
        let start = BootInstant::now();
        let clock = LogClock::new(LogTime(1_000), start);
        assert_eq!(clock.at(after(start, 1_000)), LogTime(1_950));
        assert_eq!(clock.at(after(start, 60_000)), LogTime(1_000 + 1_900), "time without a leader does not count");
    }

    /// W2 across leaders: whoever is told no more than the newest entry's log time less the margin never passes that entry, however
    /// often it is told so while the log stands still. (Tried with a margin that each answer grants anew: simulation, seed 64.)
    #[test]
    fn what_was_told_behind_an_entry_never_passes_it() {
        let start = BootInstant::now();
        let entry = 100_000;
        let clock = LogClock::new(LogTime(entry - LOG_TIME_TOLD_BEHIND_MS), start);
        clock.observe(3, LogTime(entry - LOG_TIME_TOLD_BEHIND_MS), after(start, 40));
        for ms in (80..60_000).step_by(80) {
            assert!(clock.at(after(start, ms)) <= LogTime(entry), "{ms} ms later");
            clock.observe(3, LogTime(entry - LOG_TIME_TOLD_BEHIND_MS), after(start, ms));
        }
        assert!(clock.at(after(start, 3_600_000)) <= LogTime(entry));
        clock.observe(3, LogTime(entry), after(start, 60_000));
        assert_eq!(clock.at(after(start, 60_000)), LogTime(entry), "it goes on when the log does");
    }

    #[test]
    fn never_runs_backwards_within_a_term() {
        let start = BootInstant::now();
        let clock = LogClock::new(LogTime(1_000), start);
        assert_eq!(clock.observe(3, LogTime(2_000), after(start, 100)), Observed::Advanced);
        assert_eq!(clock.observe(3, LogTime(1_500), after(start, 200)), Observed::Advanced);
        assert_eq!(clock.at(after(start, 200)), LogTime(2_095));
    }

    #[test]
    fn a_new_leader_may_set_it_back_and_an_old_one_is_ignored() {
        let start = BootInstant::now();
        let (clock, later) = (LogClock::new(LogTime(1_000), start), after(start, 100));
        clock.observe(3, LogTime(5_000), later);
        assert_eq!(clock.observe(4, LogTime(4_000), later), Observed::SetBack);
        assert_eq!(clock.at(later), LogTime(4_000));
        assert_eq!(clock.observe(3, LogTime(9_000), later), Observed::StaleTerm);
        assert_eq!((clock.at(later), clock.term()), (LogTime(4_000), 4));
    }

    #[test]
    fn without_a_leader_it_decides_nothing() {
        let start = BootInstant::now();
        let clock = LogClock::new(LogTime(1_000), start);
        assert!(clock.now() >= Some(LogTime(1_000)));
        clock.lost();
        assert_eq!(clock.now(), None);
        clock.observe(1, LogTime(500), start);
        assert!(clock.now().is_some_and(|now| now >= LogTime(500)));
    }
}
