//! A ceiling for every policy: the cache that knows the future and evicts what is next used farthest away.
//!
//! Source: Belady, "A study of replacement algorithms for a virtual-storage computer", IBM Systems Journal 1966. For usable
//! prefixes it is not proved to be the best, so that a ratio to it slightly above 1 is possible.

use std::collections::{BTreeSet, HashMap};

use super::reader::Trace;
use super::replay::Tally;

/// No later request uses it.
const NEVER: usize = usize::MAX;

/// A cached block: the greatest goes first, farthest next use, then deepest in its request.
type Place = (usize, usize, u64);

/// What it would have had at this capacity, in blocks. Blocks that are never used again are not kept.
pub fn farthest_next_use(trace: &Trace, capacity: u64) -> Tally {
    let mut later: HashMap<u64, Vec<usize>> = HashMap::new();
    for (i, blocks) in trace.requests.iter().enumerate().rev() {
        for &key in blocks {
            later.entry(key).or_default().push(i);
        }
    }
    let mut order: BTreeSet<Place> = BTreeSet::new();
    let mut places: HashMap<u64, Place> = HashMap::new();
    let mut tally = Tally::default();
    for (i, blocks) in trace.requests.iter().enumerate() {
        tally.add(&blocks.iter().map(|key| places.contains_key(key)).collect::<Vec<_>>());
        for (depth, &key) in blocks.iter().enumerate() {
            if let Some(place) = places.remove(&key) {
                order.remove(&place);
            }
            let uses = later.entry(key).or_default();
            while uses.last().is_some_and(|&at| at <= i) {
                uses.pop();
            }
            let place = (uses.last().copied().unwrap_or(NEVER), depth, key);
            if place.0 == NEVER {
                continue;
            }
            order.insert(place);
            places.insert(key, place);
            if order.len() as u64 > capacity
                && let Some((_, _, gone)) = order.pop_last()
            {
                places.remove(&gone);
            }
        }
    }
    tally
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keeps_what_is_used_soonest() {
        let trace = Trace { requests: vec![vec![1], vec![2], vec![3], vec![1], vec![2], vec![3]] };
        assert_eq!(farthest_next_use(&trace, 1).hits, 1);
        assert_eq!(farthest_next_use(&trace, 2).hits, 2);
        assert_eq!(farthest_next_use(&trace, 3).hits, 3);
    }

    #[test]
    fn is_no_lower_than_any_policy() {
        use super::super::replay::{PolicyCache, replay};
        use tidepool_master::eviction::{NAMES, by_name};
        let requests = (0..400u64).map(|i| (0..5).map(|d| (i * i % 37) * 10 + d).collect()).collect();
        let trace = Trace { requests };
        for capacity in [5, 20, 60] {
            let ceiling = farthest_next_use(&trace, capacity).usable;
            for name in NAMES {
                let mut cache = PolicyCache::new(by_name(name).expect("a policy"), capacity);
                assert!(replay(&trace, &mut cache).usable <= ceiling, "{name} at {capacity}");
            }
        }
    }
}
