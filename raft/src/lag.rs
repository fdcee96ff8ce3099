//! How far a follower is behind its leader, by what it heard of it since it started. All times are this member's own
//! monotonic clock: an entry's age counts from the moment this member first heard that it is committed, so what it has not
//! heard of yet (one way on the wire, and a heartbeat's interval while the leader is idle) is not in it.

use std::collections::VecDeque;
use std::time::Duration;

use openraft::async_runtime::{AsyncRuntime, Instant};
use parking_lot::Mutex;

use crate::types::{Config, LogId, Vote, term_of};

/// A follower that was level stays so until it is this far behind; then it must be level again.
pub const LAG_MAX: Duration = Duration::from_secs(1);
/// Commits remembered that are not applied yet; of more, the newest are taken together.
const WAITING_MAX: usize = 1024;

type InstantOf<C> = <<C as openraft::RaftTypeConfig>::AsyncRuntime as AsyncRuntime>::Instant;

/// See the module.
pub(crate) struct Lag<C: Config> {
    /// After a longer silence it is not known what was committed meanwhile: this member must be level again.
    silence_max: Duration,
    heard: Mutex<Heard<InstantOf<C>>>,
}

struct Heard<I> {
    /// When a leader was last heard.
    at: Option<I>,
    /// The highest index that it said is committed, once it had committed an entry of its own term: only then that covers all
    /// that any leader before it acknowledged.
    committed: Option<u64>,
    /// Of those not applied yet: an index, and when it was first heard of. The oldest first.
    waiting: VecDeque<(u64, I)>,
    /// Whether all that was heard of was applied at some moment, and the lag was never too long since.
    level: bool,
}

/// A look at it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct LagView {
    /// Time since a leader was heard; none: never since the start.
    pub(crate) heard_ago: Option<Duration>,
    /// Last entry that it said is committed.
    pub(crate) committed: Option<u64>,
    /// Age of the oldest entry known to be committed and not applied here; none: nothing is known yet.
    pub(crate) lag: Option<Duration>,
    /// Whether this member was level with the leader and is not far behind since.
    pub(crate) level: bool,
}

fn since<I: Instant>(now: I, then: I) -> Duration {
    if now > then { now - then } else { Duration::ZERO }
}

impl<C: Config> Lag<C> {
    pub(crate) fn new(silence_max: Duration) -> Lag<C> {
        let heard = Heard { at: None, committed: None, waiting: VecDeque::new(), level: false };
        Lag { silence_max, heard: Mutex::new(heard) }
    }

    /// A leader, which holds `vote`, says that a quorum has everything up to `committed`.
    pub(crate) fn note(&self, vote: &Vote, committed: Option<&LogId>, applied: u64) {
        let now = InstantOf::<C>::now();
        let mut heard = self.heard.lock();
        if heard.at.is_some_and(|at| since(now, at) > self.silence_max) {
            (heard.level, heard.committed) = (false, None);
        }
        heard.at = Some(now);
        let own = committed.filter(|id| term_of(id) == vote.leader_id.term).map(|id| id.index);
        let Some(index) = own.filter(|index| Some(*index) > heard.committed) else { return };
        heard.committed = Some(index);
        if index > applied {
            if heard.waiting.len() == WAITING_MAX {
                // Told too old rather than too young.
                let last = heard.waiting.back_mut().expect("it is full");
                last.0 = index;
            } else {
                heard.waiting.push_back((index, now));
            }
        }
        heard.settle(now, applied);
    }

    pub(crate) fn view(&self, applied: u64) -> LagView {
        let now = InstantOf::<C>::now();
        let mut heard = self.heard.lock();
        let lag = heard.settle(now, applied);
        LagView {
            heard_ago: heard.at.map(|at| since(now, at)),
            committed: heard.committed,
            lag: heard.committed.map(|_| lag),
            level: heard.level,
        }
    }
}

impl<I: Instant> Heard<I> {
    /// Forgets what is applied, and answers the age of the oldest that is not.
    fn settle(&mut self, now: I, applied: u64) -> Duration {
        while self.waiting.front().is_some_and(|(index, _)| *index <= applied) {
            self.waiting.pop_front();
        }
        let lag = self.waiting.front().map_or(Duration::ZERO, |(_, at)| since(now, *at));
        if self.committed.is_some_and(|index| index <= applied) {
            self.level = true;
        } else if lag > LAG_MAX {
            self.level = false;
        }
        lag
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::{SimConfig, log_id};
    use openraft_rt_sim::SimRuntime;

    type C = SimConfig<()>;

    fn vote(term: u64) -> Vote {
        Vote::new_committed(term, 1)
    }

    /// Longer than any pause of a test that is not about it.
    const SILENCE: Duration = Duration::from_secs(60);

    async fn pause(ms: u64) {
        SimRuntime::sleep(Duration::from_millis(ms)).await;
    }

    /// A commit of an earlier term does not count: a leader that was just elected does not know yet what its predecessor
    /// acknowledged last.
    /// Tried with commits of any term: fails.
    #[test]
    fn level_is_who_applied_what_the_leader_committed_in_its_own_term() {
        SimRuntime::with_seed(1).block_on(async {
            let lag = Lag::<C>::new(SILENCE);
            assert_eq!(lag.view(90), LagView::default());
            lag.note(&vote(5), Some(&log_id(4, 90)), 90);
            let view = lag.view(90);
            assert!(!view.level && view.lag.is_none() && view.heard_ago.is_some(), "{view:?}");
            lag.note(&vote(5), Some(&log_id(5, 100)), 90);
            pause(30).await;
            let view = lag.view(95);
            assert!(!view.level && view.committed == Some(100), "{view:?}");
            assert_eq!(view.lag, Some(Duration::from_millis(30)));
            let view = lag.view(100);
            assert!(view.level && view.lag == Some(Duration::ZERO), "{view:?}");
        });
    }

    #[test]
    fn a_short_lag_is_borne_and_a_long_one_must_be_made_good_wholly() {
        SimRuntime::with_seed(1).block_on(async {
            let lag = Lag::<C>::new(SILENCE);
            lag.note(&vote(5), Some(&log_id(5, 10)), 10);
            assert!(lag.view(10).level);
            lag.note(&vote(5), Some(&log_id(5, 20)), 10);
            pause(600).await;
            lag.note(&vote(5), Some(&log_id(5, 30)), 10);
            pause(300).await;
            let view = lag.view(10);
            assert!(view.level && view.lag == Some(Duration::from_millis(900)), "{view:?}");
            assert_eq!(lag.view(20).lag, Some(Duration::from_millis(300)), "the oldest that is not applied");
            pause(800).await;
            assert!(!lag.view(25).level);
            lag.note(&vote(5), Some(&log_id(5, 40)), 29);
            assert!(!lag.view(39).level, "nearly is not level");
            assert!(lag.view(40).level);
        });
    }

    /// Cut off, or leading itself: what it was level with is long past.
    /// Tried without the silence: fails.
    #[test]
    fn after_a_silence_it_must_be_level_again() {
        SimRuntime::with_seed(1).block_on(async {
            let lag = Lag::<C>::new(Duration::from_millis(200));
            lag.note(&vote(5), Some(&log_id(5, 10)), 10);
            pause(150).await;
            lag.note(&vote(5), Some(&log_id(5, 10)), 10);
            assert!(lag.view(10).level);
            pause(250).await;
            lag.note(&vote(6), Some(&log_id(5, 10)), 10);
            assert!(!lag.view(10).level, "of the new leader nothing is known yet");
            lag.note(&vote(6), Some(&log_id(6, 500)), 10);
            assert!(!lag.view(10).level);
            assert!(lag.view(500).level);
        });
    }

    #[test]
    fn what_is_remembered_is_bounded() {
        SimRuntime::with_seed(1).block_on(async {
            let lag = Lag::<C>::new(SILENCE);
            for index in 1..=3 * WAITING_MAX as u64 {
                lag.note(&vote(1), Some(&log_id(1, index)), 0);
            }
            assert_eq!(lag.heard.lock().waiting.len(), WAITING_MAX);
            assert!(!lag.view(3 * WAITING_MAX as u64 - 1).level);
            assert!(lag.view(3 * WAITING_MAX as u64).level);
        });
    }
}
