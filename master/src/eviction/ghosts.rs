//! Keys that are not resident but were not long ago, or were asked for: 6 bytes each.

use super::spread;

/// Ways of a set.
const WAYS: usize = 8;
/// Sets at least: small caches learn from a longer past.
const SETS_MIN: usize = 8192;
/// Ghosts per 16 resident objects.
const GHOSTS_PER_16: usize = 10;
/// Age in ticks from which a ghost is swept away, before its 16-bit tick comes round again.
const AGE_MAX: u16 = 1 << 15;
/// The `tag` of a way that holds nothing.
const VACANT: u8 = u8::MAX;

/// What is remembered of a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Ghost {
    /// When it was last used, modulo 2^16.
    pub tick: u16,
    /// What kind of block it was.
    pub tag: u8,
    /// Whether its key is one of the sample.
    pub is_sampled: bool,
}

#[derive(Clone, Copy)]
struct Way {
    low: u16,
    tick: u16,
    high: u8,
    tag: u8,
}

const NOTHING: Way = Way { low: 0, tick: 0, high: 0, tag: VACANT };

/// A set-associative table: of a full set the longest unused is forgotten. It tells keys apart by their set and 24 bits,
/// so that one key in some millions is taken for another.
pub(super) struct Ghosts {
    ways: Vec<Way>,
    sets: usize,
    /// One key in this many is remembered for as many times longer.
    sample: u64,
    swept: usize,
}

/// Where a ghost is, until the table next changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Place(usize);

impl Ghosts {
    pub(super) fn new(sample: u64) -> Ghosts {
        Ghosts { ways: vec![NOTHING; SETS_MIN * WAYS], sets: SETS_MIN, sample, swept: 0 }
    }

    pub(super) fn memory_bytes(&self) -> usize {
        self.ways.capacity() * size_of::<Way>()
    }

    pub(super) fn is_sampled(&self, key: u64) -> bool {
        spread(key).is_multiple_of(self.sample)
    }

    fn first_way(&self, hash: u64) -> usize {
        (((hash >> 32) * self.sets as u64) >> 32) as usize * WAYS
    }

    fn ghost(&self, way: &Way) -> Ghost {
        Ghost { tick: way.tick, tag: way.tag, is_sampled: u64::from(way.low).is_multiple_of(self.sample) }
    }

    pub(super) fn find(&self, key: u64) -> Option<Place> {
        let hash = spread(key);
        let (low, high) = (hash as u16, (hash >> 16) as u8);
        let first = self.first_way(hash);
        let is_it = |way: &Way| way.tag != VACANT && way.low == low && way.high == high;
        self.ways[first..first + WAYS].iter().position(is_it).map(|way| Place(first + way))
    }

    pub(super) fn get(&self, Place(at): Place) -> Ghost {
        self.ghost(&self.ways[at])
    }

    pub(super) fn set(&mut self, Place(at): Place, tick: u16, tag: u8) {
        (self.ways[at].tick, self.ways[at].tag) = (tick, tag);
    }

    pub(super) fn remove(&mut self, Place(at): Place) {
        self.ways[at] = NOTHING;
    }

    /// Remembers a key that is not in the table as used now or at `tick`; gives what had to be forgotten for it.
    pub(super) fn insert(&mut self, key: u64, tick: u16, tag: u8, now: u16) -> Option<Ghost> {
        let hash = spread(key);
        let first = self.first_way(hash);
        let stale = |way: &Way| match way.tag {
            VACANT => u64::MAX,
            _ => {
                let age = u64::from(now.wrapping_sub(way.tick));
                if self.ghost(way).is_sampled { age } else { age * self.sample }
            }
        };
        let at = (first..first + WAYS).max_by_key(|&at| stale(&self.ways[at])).unwrap_or(first);
        let old = std::mem::replace(&mut self.ways[at], Way { low: hash as u16, high: (hash >> 16) as u8, tick, tag });
        (old.tag != VACANT).then(|| self.ghost(&old))
    }

    /// Once per tick: makes room in proportion to the resident objects, at the price of all ghosts, and sweeps a part of
    /// the table for those that are too old. What was forgotten goes to `forget`.
    pub(super) fn tick(&mut self, now: u16, residents: usize, mut forget: impl FnMut(Ghost)) {
        let wanted = residents * GHOSTS_PER_16 / 16 / WAYS;
        if wanted > self.sets + self.sets / 8 {
            for way in self.ways.iter().filter(|way| way.tag != VACANT) {
                forget(self.ghost(way));
            }
            self.ways = Vec::new();
            self.ways = vec![NOTHING; wanted * WAYS];
            (self.sets, self.swept) = (wanted, 0);
        }
        for _ in 0..self.sets * WAYS / usize::from(AGE_MAX / 2) + 1 {
            let old = self.ways[self.swept];
            if old.tag != VACANT && now.wrapping_sub(old.tick) >= AGE_MAX {
                self.ways[self.swept] = NOTHING;
                forget(self.ghost(&old));
            }
            self.swept = (self.swept + 1) % self.ways.len();
        }
    }
}
