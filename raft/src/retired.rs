//! Ids of members that left the quorum (I4). An id is never used again, so every membership carries those of all that
//! ever left: in the log, in snapshots, and on whoever leads next.

use std::collections::BTreeSet;

/// Ids named one by one; the lowest beyond this many count as used with everything below them.
pub const RETIRED_IDS_MAX: usize = 1024;

/// Ids that left for good. A set that only grows.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Retired {
    /// Every id up to and including this one counts as used, members excepted.
    upto: u64,
    ids: BTreeSet<u64>,
}

impl Retired {
    /// From its parts, as they were encoded.
    pub fn from_parts(upto: u64, ids: BTreeSet<u64>) -> Retired {
        let mut retired = Retired { upto, ids: BTreeSet::new() };
        ids.into_iter().for_each(|id| retired.insert(id));
        retired
    }

    /// What [`Retired::from_parts`] takes.
    pub fn parts(&self) -> (u64, &BTreeSet<u64>) {
        (self.upto, &self.ids)
    }

    /// Whether the id left, as far as is still known one by one.
    pub fn contains(&self, id: u64) -> bool {
        id <= self.upto || self.ids.contains(&id)
    }

    /// Whether nobody ever left.
    pub fn is_empty(&self) -> bool {
        self.upto == 0 && self.ids.is_empty()
    }

    /// An id left.
    pub fn insert(&mut self, id: u64) {
        if id <= self.upto {
            return;
        }
        self.ids.insert(id);
        while self.ids.len() > RETIRED_IDS_MAX {
            self.upto = self.ids.pop_first().unwrap_or(self.upto);
        }
    }

    /// All that left by either account.
    pub fn join(&mut self, other: &Retired) {
        self.upto = self.upto.max(other.upto);
        let upto = self.upto;
        self.ids.retain(|id| *id > upto);
        other.ids.iter().for_each(|id| self.insert(*id));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_that_left_never_counts_as_fresh_again_however_many_follow() {
        let mut retired = Retired::default();
        assert!(retired.is_empty() && !retired.contains(1));
        for id in 1..=5000u64 {
            retired.insert(id * 2);
            assert!((1..=id).all(|earlier| retired.contains(earlier * 2)), "after {id}");
        }
        assert!(retired.ids.len() <= RETIRED_IDS_MAX);
        assert!(!retired.contains(9999), "an id between those that are known one by one is fresh");
        let (upto, ids) = retired.parts();
        assert_eq!(Retired::from_parts(upto, ids.clone()), retired);
    }

    #[test]
    fn two_accounts_together_hold_what_either_holds() {
        let mut one = Retired::from_parts(0, [1, 7].into());
        one.join(&Retired::from_parts(3, [9].into()));
        assert!([1, 2, 3, 7, 9].iter().all(|id| one.contains(*id)));
        assert!([4, 8, 10].iter().all(|id| !one.contains(*id)));
    }
}
