//! `Part`: one part of the state digest, by keys in an order, so that it can be recomputed a few records at a time while
//! the state goes on changing.

use crate::directory::digest::{Canonical, Sign};

/// How far a pass has come through keys in their order.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub(in crate::directory) enum Walked<K> {
    #[default]
    Nothing,
    /// Every key below this one.
    Below(K),
    All,
}

impl<K: Ord> Walked<K> {
    /// Whether a record with this key was walked.
    pub(in crate::directory) fn has(&self, key: &K) -> bool {
        match self {
            Walked::Nothing => false,
            Walked::Below(next) => key < next,
            Walked::All => true,
        }
    }
}

/// A running sum over records, and the sum over those that the running pass has walked: what changes in a walked record
/// changes both, so that at the end of the pass they are equal, unless a change was not told.
#[derive(Debug)]
pub(in crate::directory) struct Part<K> {
    sum: u128,
    found: u128,
    walked: Walked<K>,
    record: Canonical,
}

impl<K> Default for Part<K> {
    fn default() -> Part<K> {
        Part { sum: 0, found: 0, walked: Walked::Nothing, record: Canonical::default() }
    }
}

impl<K: Ord> Part<K> {
    pub(in crate::directory) fn sum(&self) -> u128 {
        self.sum
    }

    pub(in crate::directory) fn add(&mut self, key: &K, fill: impl FnOnce(&mut Canonical)) {
        self.change(key, Sign::Add, fill);
    }

    pub(in crate::directory) fn sub(&mut self, key: &K, fill: impl FnOnce(&mut Canonical)) {
        self.change(key, Sign::Sub, fill);
    }

    fn change(&mut self, key: &K, sign: Sign, fill: impl FnOnce(&mut Canonical)) {
        let hash = self.record.hash(fill);
        sign.apply(&mut self.sum, hash);
        if self.walked.has(key) {
            sign.apply(&mut self.found, hash);
        }
    }

    /// Whether the running pass has walked a key.
    pub(in crate::directory) fn has_walked(&self, key: &K) -> bool {
        self.walked.has(key)
    }

    /// A pass begins.
    pub(in crate::directory) fn restart(&mut self) {
        (self.found, self.walked) = (0, Walked::Nothing);
    }

    /// Takes a record in that the pass has come to.
    pub(in crate::directory) fn walk(&mut self, fill: impl FnOnce(&mut Canonical)) {
        self.found = self.found.wrapping_add(self.record.hash(fill));
    }

    /// The pass goes on at this key; none: it has walked all.
    pub(in crate::directory) fn go_on_at(&mut self, next: Option<K>) {
        self.walked = next.map_or(Walked::All, Walked::Below);
    }

    /// After a whole pass: the running sum and what was found, if they differ.
    pub(in crate::directory) fn difference(&self) -> Option<(u128, u128)> {
        (self.sum != self.found).then_some((self.sum, self.found))
    }

    /// Makes the running sum wrong.
    #[cfg(test)]
    pub(in crate::directory) fn spoil(&mut self) {
        self.sum = self.sum.wrapping_add(1);
    }
}
