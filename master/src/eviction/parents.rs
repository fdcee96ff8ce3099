//! Which key came before one that was asked for and is not resident: what its place in a chain will be.

use super::spread;

/// Keys remembered.
const PARENTS: usize = 8192;
const WAYS: usize = 8;

/// A set-associative table: of a full set the oldest is forgotten.
pub(super) struct Parents {
    /// (key, its parent's key), the latest of a set first.
    sets: Vec<[(u64, u64); WAYS]>,
}

impl Parents {
    pub(super) fn new() -> Parents {
        Parents { sets: vec![[(0, 0); WAYS]; PARENTS / WAYS] }
    }

    pub(super) fn memory_bytes(&self) -> usize {
        PARENTS * size_of::<(u64, u64)>()
    }

    pub(super) fn note(&mut self, key: u64, parent: u64) {
        let set = &mut self.sets[spread(key) as usize % (PARENTS / WAYS)];
        let at = set.iter().position(|&(other, _)| other == key).unwrap_or(WAYS - 1);
        set[..=at].rotate_right(1);
        set[0] = (key, parent);
    }

    /// The key before this one, if it was noted.
    pub(super) fn of(&self, key: u64) -> Option<u64> {
        let set = &self.sets[spread(key) as usize % (PARENTS / WAYS)];
        set.iter().find(|&&(other, parent)| other == key && parent != key).map(|&(_, parent)| parent)
    }
}
