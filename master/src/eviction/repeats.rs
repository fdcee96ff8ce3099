//! Requests that were worked off in this tick: looking, reading and writing name the same keys one after the other, and
//! again tells nothing.

use super::spread;

/// Requests remembered.
const REQUESTS: usize = 256;

#[derive(Clone, Copy, PartialEq, Eq)]
struct Seen {
    first: u64,
    last: u64,
    keys: u32,
    tick: u32,
}

/// The latest requests by their ends and number of keys.
pub(super) struct Repeats {
    seen: Vec<Seen>,
}

impl Repeats {
    pub(super) fn new() -> Repeats {
        Repeats { seen: vec![Seen { first: 0, last: 0, keys: 0, tick: 0 }; REQUESTS] }
    }

    pub(super) fn memory_bytes(&self) -> usize {
        REQUESTS * size_of::<Seen>()
    }

    /// Whether this request was seen in this tick; if not it is now.
    pub(super) fn is_repeat(&mut self, keys: &[u64], tick: u32) -> bool {
        let (Some(&first), Some(&last)) = (keys.first(), keys.last()) else { return true };
        let seen = Seen { first, last, keys: keys.len() as u32, tick };
        let place = &mut self.seen[spread(last) as usize % REQUESTS];
        std::mem::replace(place, seen) == seen
    }
}
