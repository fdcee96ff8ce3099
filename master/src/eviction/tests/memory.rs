//! Memory: counted by size of the tables, and held against what their growth may cost.

use super::super::{NAMES, by_name};
use super::traces::Draw;
use super::{Cache, block};

/// Bytes per resident object, everything included.
const BUDGET: f64 = 56.0;

#[test]
fn a_million_objects_fit_the_budget_with_ghosts_of_evicted_ones() {
    for name in NAMES {
        let mut policy = by_name(name).expect("named");
        let mut cache = Cache::new(&mut *policy, 1_000_000, 1000);
        let mut draw = Draw(1);
        for _ in 0..24_000 {
            let prompt = draw.next() >> 8;
            let keys: Vec<u64> = (0..50).map(|depth| prompt << 6 | depth).collect();
            cache.serve(&keys, 64);
        }
        let bytes = policy.memory_bytes() as f64 / policy.len() as f64;
        assert!((1_000_000 - policy.len()) < 2000, "{name}: {}", policy.len());
        assert!(bytes <= BUDGET, "{name}: {bytes:.1} bytes per object");
    }
}

#[test]
fn slots_are_used_again() {
    for name in NAMES {
        let mut policy = by_name(name).expect("named");
        for round in 0..50 {
            for key in 0..3000 {
                policy.inserted(block(key, round * 3000 + key + 1));
            }
        }
        let before = policy.memory_bytes();
        for round in 50..100 {
            for key in 0..3000 {
                policy.requested(&[key, key + 1]);
                policy.inserted(block(key, round * 3000 + key + 1));
            }
        }
        // A parent that was replaced keeps its slot until its child is replaced too.
        assert!(policy.memory_bytes() <= 2 * before, "{name}: {before} bytes, then {}", policy.memory_bytes());
    }
}
