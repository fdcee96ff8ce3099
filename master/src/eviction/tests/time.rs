//! How time passes for `Adaptive`.

use tidepool_proto::ObjectId;

use super::super::{Inserted, Policy};
use super::{Adaptive, CLASS};

/// Puts blocks of one size and removes them; gives how many ticks that took.
fn ticks_of(batches: u64, blocks: u64) -> u32 {
    let mut policy = Adaptive::new();
    let began = policy.tick;
    for batch in 0..batches {
        let keys = batch * blocks + 1..=(batch + 1) * blocks;
        for key in keys.clone() {
            policy.inserted(Inserted { key, object: ObjectId(key), bytes: 4096, group: None });
        }
        keys.for_each(|key| policy.removed(key, ObjectId(key)));
    }
    policy.tick - began
}

/// Every sixteenth tick all that was learned is ranked anew, which takes longer than a put.
#[test]
fn while_little_is_there_time_does_not_run_away_from_it() {
    assert!(ticks_of(1_000, 1) <= 1_000, "{} ticks for 1 000 blocks alone", ticks_of(1_000, 1));
    assert!(ticks_of(10, 128) <= 640, "{} ticks for 1 280 blocks in batches", ticks_of(10, 128));
}

/// What a leader hears, and what a standby does: puts as they are applied, requests up to `LATE` puts later. Some blocks are asked for
/// again.
fn leader_and_standby() -> (Adaptive, Adaptive) {
    const BLOCKS: u64 = 6_000;
    const FIT: u64 = 2_000;
    const LATE: usize = 40;
    let (mut leader, mut standby) = (Adaptive::new(), Adaptive::new());
    let mut hints: Vec<u64> = Vec::new();
    for key in 1..=BLOCKS {
        let object = Inserted { key, object: ObjectId(key), bytes: 4096, group: None };
        let again = (key % 10 == 0 && key > 500).then(|| key - 400);
        for asked in again.into_iter().chain([key]) {
            leader.requested(&[asked]);
            hints.push(asked);
        }
        leader.inserted(object);
        standby.inserted(object);
        if hints.len() >= LATE {
            hints.drain(..).for_each(|asked| standby.requested(&[asked]));
        }
        if key > FIT {
            leader.removed(key - FIT, ObjectId(key - FIT));
            standby.removed(key - FIT, ObjectId(key - FIT));
        }
    }
    hints.drain(..).for_each(|asked| standby.requested(&[asked]));
    (leader, standby)
}

/// A standby that took a put's own request for one use more would rank everything that it knows above what it is given as a leader, and
/// evict the newest first. Tried without blocks that await their request: all 2 000 are of another class.
#[test]
fn a_standby_that_hears_of_requests_late_ranks_as_the_leader() {
    let (leader, standby) = leader_and_standby();
    leader.check();
    standby.check();
    let class = |policy: &Adaptive, key| policy.residents.find(key).map(|slot| policy.residents.at(slot).tag & CLASS);
    let differ = (1..=6_000).filter(|&key| class(&leader, key) != class(&standby, key)).count();
    assert!(differ <= 20, "{differ} of {} blocks are of another class", leader.len());
}
