//! When a master publishes: a function of what it knows, nothing else.
//!
//! Log time is cut into turns of an interval each, and a turn into as many slots as the quorum has voters; a voter's slot is
//! the one of its rank among them. In its slot a master publishes when it has applied something since it last did.
//!
//! - A standby that lags does not.
//! - The leader leaves it to the standbys while one of them is caught up and some master published within two intervals.
//! - An image that is newer than what it published, made because the log had grown so far, is published outside of the slot,
//!   by a standby or a leader without one.
//! - A master that is behind with applying waits, but not longer than half an interval.

use std::time::Duration;

/// Intervals after which the leader publishes although standbys exist.
const INTERVALS_WITHOUT_STANDBYS: u32 = 2;
/// Entries committed and not applied above which a master has something better to do.
const BACKLOG_MAX: u64 = 1_000;

/// What a master is, as far as publishing goes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Position {
    /// It leads.
    Leader {
        /// Whether a standby holds what this one does.
        standby_caught_up: bool,
        /// Time since another master published; none when that was never, or it does not say.
        others_published: Option<Duration>,
    },
    /// It follows.
    Standby {
        /// Whether it holds what the leader does.
        caught_up: bool,
    },
    /// Neither: it publishes nothing by itself.
    Other,
}

/// What is decided by.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Facts {
    /// See there.
    pub position: Position,
    /// This master's place among the voters, from 0.
    pub rank: usize,
    /// Voters.
    pub voters: usize,
    /// Log time of the state.
    pub log_time: Duration,
    /// Last log index applied.
    pub applied_index: u64,
    /// Entries committed and not applied.
    pub backlog: u64,
    /// Last log index that this master published, in this life or before.
    pub published_index: Option<u64>,
    /// Log time at which it did; zero before.
    pub published_at: Duration,
    /// Last log index that the newest image on local disk covers.
    pub image_index: Option<u64>,
    /// For how long a publication has been due and put off.
    pub put_off: Duration,
}

/// The settings.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Policy {
    /// Time between two publications of one master; zero: only what the log's growth makes, and on demand.
    pub interval: Duration,
}

/// What to do.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Decision {
    /// Nothing is due.
    Wait,
    /// One is due, and put off because the master is busy.
    PutOff,
    /// Publish the image that is there.
    PublishImage,
    /// Make an image, and publish it.
    Publish,
}

impl Policy {
    /// What to do now.
    pub fn decide(&self, facts: &Facts) -> Decision {
        let has_news = facts.published_index.is_none_or(|index| index < facts.applied_index);
        if !has_news || facts.applied_index == 0 || !self.is_its_task(facts) {
            return Decision::Wait;
        }
        let has_image = facts.image_index > facts.published_index;
        let is_its_turn = self.is_its_turn(facts);
        if !has_image && !is_its_turn {
            return Decision::Wait;
        }
        let patience = if self.interval.is_zero() { Duration::from_secs(60) } else { self.interval / 2 };
        if facts.backlog > BACKLOG_MAX && facts.put_off < patience {
            return Decision::PutOff;
        }
        if is_its_turn { Decision::Publish } else { Decision::PublishImage }
    }

    fn is_its_task(&self, facts: &Facts) -> bool {
        match facts.position {
            Position::Other => false,
            Position::Standby { caught_up } => caught_up,
            Position::Leader { standby_caught_up: false, .. } => true,
            Position::Leader { others_published, .. } => {
                !self.interval.is_zero()
                    && others_published.is_none_or(|ago| ago > self.interval * INTERVALS_WITHOUT_STANDBYS)
                    && facts.log_time.saturating_sub(facts.published_at) > self.interval * INTERVALS_WITHOUT_STANDBYS
            }
        }
    }

    /// Whether the slot of this master has begun in the present turn, and it has not published since.
    fn is_its_turn(&self, facts: &Facts) -> bool {
        let interval = self.interval.as_millis();
        if interval == 0 || facts.voters == 0 {
            return false;
        }
        let offset = interval * facts.rank as u128 / facts.voters as u128;
        let turn = |time: Duration| (time.as_millis() + interval - offset) / interval;
        facts.published_index.is_none() || turn(facts.log_time) > turn(facts.published_at)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const POLICY: Policy = Policy { interval: Duration::from_secs(600) };

    fn standby() -> Facts {
        Facts {
            position: Position::Standby { caught_up: true },
            rank: 1,
            voters: 3,
            log_time: Duration::from_secs(10_000),
            applied_index: 50,
            backlog: 0,
            published_index: Some(40),
            published_at: Duration::from_secs(9_900),
            image_index: Some(40),
            put_off: Duration::ZERO,
        }
    }

    fn leader(standby_caught_up: bool, others_published: Option<u64>) -> Facts {
        let others_published = others_published.map(Duration::from_secs);
        Facts { position: Position::Leader { standby_caught_up, others_published }, ..standby() }
    }

    #[test]
    fn nothing_new_is_not_published_again() {
        let due = Facts { published_index: None, ..standby() };
        assert_eq!(POLICY.decide(&due), Decision::Publish);
        assert_eq!(POLICY.decide(&Facts { applied_index: 0, ..due }), Decision::Wait);
        let same = Facts { published_index: Some(50), log_time: Duration::from_secs(99_999), ..due };
        assert_eq!(POLICY.decide(&same), Decision::Wait);
    }

    /// Over a long time each of three standbys publishes once an interval, and no two of them near each other.
    #[test]
    fn voters_take_turns() {
        let mut published: Vec<(u64, usize)> = Vec::new();
        let mut last = [(None, Duration::ZERO); 3];
        for second in 0..6_000 {
            let log_time = Duration::from_secs(second);
            for (rank, last) in last.iter_mut().enumerate() {
                let facts = Facts {
                    rank,
                    log_time,
                    applied_index: second + 1,
                    published_index: last.0,
                    published_at: last.1,
                    ..standby()
                };
                if POLICY.decide(&facts) == Decision::Publish {
                    *last = (Some(second + 1), log_time);
                    published.push((second, rank));
                }
            }
        }
        let later: Vec<_> = published.into_iter().filter(|(second, _)| *second > 0).collect();
        assert!((27..=30).contains(&later.len()), "{later:?}");
        assert!(later.windows(2).all(|pair| pair[1].0 - pair[0].0 >= 190), "{later:?}");
    }

    #[test]
    fn an_image_that_the_logs_growth_made_is_published_before_its_turn() {
        assert_eq!(POLICY.decide(&standby()), Decision::Wait);
        let image_index = Some(45);
        assert_eq!(POLICY.decide(&Facts { image_index, ..standby() }), Decision::PublishImage);
        assert_eq!(POLICY.decide(&Facts { image_index, ..leader(true, Some(1)) }), Decision::Wait);
        assert_eq!(POLICY.decide(&Facts { image_index, ..leader(false, None) }), Decision::PublishImage);
        let never = Policy { interval: Duration::ZERO };
        assert_eq!(never.decide(&Facts { image_index, ..standby() }), Decision::PublishImage);
        assert_eq!(never.decide(&Facts { log_time: Duration::from_secs(99_999), ..standby() }), Decision::Wait);
    }

    /// Tried with a leader that always publishes: fails.
    #[test]
    fn the_leader_leaves_it_to_standbys_that_do_it() {
        let late = Duration::from_secs(20_000);
        assert_eq!(POLICY.decide(&Facts { log_time: late, ..leader(true, Some(1_100)) }), Decision::Wait);
        assert_eq!(POLICY.decide(&Facts { log_time: late, ..leader(true, Some(1_300)) }), Decision::Publish);
        assert_eq!(POLICY.decide(&Facts { log_time: late, ..leader(true, None) }), Decision::Publish);
        assert_eq!(POLICY.decide(&Facts { log_time: late, ..leader(false, Some(1)) }), Decision::Publish);
        // Just in office: standbys get their time.
        let soon = Facts { published_index: None, published_at: Duration::from_secs(9_900), ..leader(true, None) };
        assert_eq!(POLICY.decide(&soon), Decision::Wait);
        let lags = Facts { position: Position::Standby { caught_up: false }, published_index: None, ..standby() };
        assert_eq!(POLICY.decide(&lags), Decision::Wait);
        assert_eq!(POLICY.decide(&Facts { position: Position::Other, ..lags }), Decision::Wait);
    }

    #[test]
    fn a_busy_master_puts_it_off_but_not_for_ever() {
        let busy = Facts { published_index: None, backlog: 1_001, ..standby() };
        assert_eq!(POLICY.decide(&busy), Decision::PutOff);
        assert_eq!(POLICY.decide(&Facts { put_off: Duration::from_secs(300), ..busy }), Decision::Publish);
        assert_eq!(POLICY.decide(&Facts { backlog: 1_000, ..busy }), Decision::Publish);
    }
}
