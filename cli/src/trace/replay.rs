//! Drives a cache with a trace and counts what it had.

use std::collections::HashMap;

use tidepool_master::eviction::{Answer, Inserted, Policy};
use tidepool_proto::ObjectId;

use super::reader::Trace;

/// Anything that serves requests: it says which blocks it had, then takes in the ones it had not.
pub trait Cache {
    /// Serves one request: for each of its blocks, in order, whether it was there when the request came.
    fn serve(&mut self, blocks: &[u64]) -> Vec<bool>;
}

/// Blocks asked for and found.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    /// Asked for.
    pub blocks: u64,
    /// Found.
    pub hits: u64,
    /// Found, and so were all before them in the request: only these spare work.
    pub usable: u64,
}

impl Tally {
    /// Counts one request.
    pub fn add(&mut self, was_there: &[bool]) {
        self.blocks += was_there.len() as u64;
        self.hits += was_there.iter().filter(|&&hit| hit).count() as u64;
        self.usable += was_there.iter().take_while(|&&hit| hit).count() as u64;
    }

    /// Usable hits of all blocks.
    pub fn usable_hit_ratio(&self) -> f64 {
        self.usable as f64 / self.blocks.max(1) as f64
    }

    /// Hits of all blocks.
    pub fn block_hit_ratio(&self) -> f64 {
        self.hits as f64 / self.blocks.max(1) as f64
    }
}

/// Serves every request of a trace.
pub fn replay(trace: &Trace, cache: &mut dyn Cache) -> Tally {
    let mut tally = Tally::default();
    for blocks in &trace.requests {
        tally.add(&cache.serve(blocks));
    }
    tally
}

/// A policy alone, without a store: every block counts one.
pub struct PolicyCache {
    policy: Box<dyn Policy>,
    capacity: u64,
    resident: HashMap<u64, ObjectId>,
    inserted: u64,
    evicted: u64,
}

impl PolicyCache {
    /// Empty, for so many blocks.
    pub fn new(policy: Box<dyn Policy>, capacity: u64) -> PolicyCache {
        assert!(capacity > 0, "a cache of nothing");
        PolicyCache { policy, capacity, resident: HashMap::new(), inserted: 0, evicted: 0 }
    }

    /// Blocks that had to go.
    pub fn evicted(&self) -> u64 {
        self.evicted
    }

    fn insert(&mut self, key: u64) {
        while self.resident.len() as u64 >= self.capacity {
            let victims = self.policy.victims(1, 1, &mut |_| Answer::Take);
            assert!(!victims.is_empty(), "a full cache has a victim");
            for victim in victims {
                assert!(self.resident.remove(&victim.key).is_some(), "a victim is resident");
                self.policy.removed(victim.key, victim.object);
                self.evicted += 1;
            }
        }
        self.inserted += 1;
        let object = ObjectId(self.inserted);
        self.resident.insert(key, object);
        self.policy.inserted(Inserted { key, object, bytes: 1, group: None });
    }
}

impl Cache for PolicyCache {
    fn serve(&mut self, blocks: &[u64]) -> Vec<bool> {
        let was_there = blocks.iter().map(|key| self.resident.contains_key(key)).collect();
        self.policy.requested(blocks);
        for &key in blocks {
            if !self.resident.contains_key(&key) {
                self.insert(key);
            }
        }
        was_there
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tidepool_master::eviction::{NAMES, by_name};

    #[test]
    fn only_an_unbroken_prefix_is_usable() {
        let mut tally = Tally::default();
        tally.add(&[true, true, false, true]);
        tally.add(&[false, true]);
        assert_eq!(tally, Tally { blocks: 6, hits: 4, usable: 2 });
    }

    #[test]
    fn a_cache_with_room_for_all_evicts_nothing() {
        let trace = Trace { requests: vec![vec![1, 2, 3], vec![1, 2, 4], vec![1, 2, 3]] };
        for name in NAMES {
            let mut cache = PolicyCache::new(by_name(name).expect("a policy"), 4);
            let tally = replay(&trace, &mut cache);
            assert_eq!((tally, cache.evicted()), (Tally { blocks: 9, hits: 5, usable: 5 }, 0), "{name}");
        }
    }

    #[test]
    fn lru_is_as_computed_by_hand() {
        let trace = Trace { requests: vec![vec![1], vec![2], vec![1], vec![3], vec![2], vec![1]] };
        let mut cache = PolicyCache::new(by_name("lru").expect("a policy"), 2);
        // 1 and 2 go in; 1 hits; 3 takes the place of 2, 2 that of 1, 1 that of 3.
        let tally = replay(&trace, &mut cache);
        assert_eq!((tally.hits, cache.evicted()), (1, 3));
    }
}
