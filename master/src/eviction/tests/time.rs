//! How time passes for `Adaptive`.

use tidepool_proto::ObjectId;

use super::super::{Inserted, Policy};
use super::Adaptive;

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
/// Tried with ticks of a 128th of what is resident, however little that is: 128 a block, and 5.4 a block of a batch.
#[test]
fn while_little_is_there_time_does_not_run_away_from_it() {
    assert!(ticks_of(1_000, 1) <= 1_000, "{} ticks for 1 000 blocks alone", ticks_of(1_000, 1));
    assert!(ticks_of(10, 128) <= 640, "{} ticks for 1 280 blocks in batches", ticks_of(10, 128));
}
