//! Tests of the policies, all of them by the trait.

mod memory;
mod never_below_lru;
mod order;
mod random;
mod sequences;
mod traces;

use super::{Answer, Candidate, Inserted, Policy};
use hashbrown::HashMap;
use tidepool_proto::ObjectId;

/// An ungrouped object of one byte.
fn block(key: u64, object: u64) -> Inserted {
    Inserted { key, object: ObjectId(object), bytes: 1, group: None }
}

/// Takes a candidate or refuses it.
fn take_if(is_taken: bool) -> Answer {
    if is_taken { Answer::Take } else { Answer::Refuse }
}

/// A cache of blocks of one byte around a policy.
struct Cache<'a> {
    policy: &'a mut dyn Policy,
    capacity: usize,
    /// How many blocks go at once.
    step: usize,
    resident: HashMap<u64, ObjectId>,
    inserted: u64,
    blocks: u64,
    usable: u64,
}

impl<'a> Cache<'a> {
    fn new(policy: &'a mut dyn Policy, capacity: usize, step: usize) -> Cache<'a> {
        Cache { policy, capacity, step, resident: HashMap::new(), inserted: 0, blocks: 0, usable: 0 }
    }

    fn evict(&mut self) {
        let victims = self.policy.victims(self.step as u64, self.step, &mut |_| Answer::Take);
        assert!(!victims.is_empty(), "a full cache has a victim");
        for victim in victims {
            assert_eq!(self.resident.remove(&victim.key), Some(victim.object), "a victim is resident");
            self.policy.removed(victim.key, victim.object);
        }
    }

    /// Serves a request that arrives in pieces of at most `piece` keys.
    fn serve(&mut self, keys: &[u64], piece: usize) {
        self.blocks += keys.len() as u64;
        self.usable += keys.iter().take_while(|key| self.resident.contains_key(*key)).count() as u64;
        for keys in keys.chunks(piece) {
            self.policy.requested(keys);
        }
        for &key in keys {
            if !self.resident.contains_key(&key) {
                if self.resident.len() >= self.capacity {
                    self.evict();
                }
                self.inserted += 1;
                self.resident.insert(key, ObjectId(self.inserted));
                self.policy.inserted(block(key, self.inserted));
            }
        }
    }

    fn usable_hit_ratio(&self) -> f64 {
        self.usable as f64 / self.blocks as f64
    }
}

/// Keys of the next `number` victims, which are not removed.
fn next_victims(policy: &mut dyn Policy, number: usize) -> Vec<u64> {
    policy.victims(u64::MAX, number, &mut |_| Answer::Take).iter().map(|victim: &Candidate| victim.key).collect()
}
