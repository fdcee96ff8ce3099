//! Least recently used: the yardstick that `adaptive` must never fall behind.

use super::resident::{Choice, List, NONE, Offer, Residents};
use super::{Answer, Candidate, Inserted, Policy};
use tidepool_proto::ObjectId;

/// Tag of what is in `chosen`.
const CHOSEN: u8 = 1;

/// Evicts what was used longest ago. The keys of one request count as used from the last to the first, so that of one
/// prompt the end goes before the beginning.
#[derive(Default)]
pub struct Lru {
    residents: Residents,
    list: List,
    /// What was chosen and did not go yet.
    chosen: List,
    uses: u64,
}

impl Lru {
    /// Nothing resident.
    pub fn new() -> Lru {
        Lru::default()
    }

    /// Makes it the last to go.
    fn push(&mut self, slot: u32) {
        self.uses += 1;
        self.residents.set_turn(slot, self.uses);
        self.residents.push_head(&mut self.list, slot);
    }

    fn unlink(&mut self, slot: u32) {
        let is_chosen = std::mem::take(&mut self.residents.at_mut(slot).tag) == CHOSEN;
        self.residents.unlink(if is_chosen { &mut self.chosen } else { &mut self.list }, slot);
    }

    fn choose(&mut self, slot: u32) {
        self.unlink(slot);
        self.residents.at_mut(slot).tag = CHOSEN;
        self.residents.push_head(&mut self.chosen, slot);
    }

    /// Puts what was chosen back to where it was.
    fn put_back(&mut self, slot: u32) {
        self.unlink(slot);
        self.residents.put_by_turn(&mut self.list, slot);
    }
}

impl Policy for Lru {
    fn inserted(&mut self, object: Inserted) {
        if let Some(old) = self.residents.find(object.key) {
            let object = self.residents.at(old).object;
            self.removed(self.residents.at(old).key, object);
        }
        let slot = self.residents.insert(object);
        self.push(slot);
    }

    fn requested(&mut self, keys: &[u64]) {
        for &key in keys.iter().rev() {
            if let Some(slot) = self.residents.find(key) {
                self.unlink(slot);
                self.push(slot);
            }
        }
    }

    fn removed(&mut self, key: u64, object: ObjectId) {
        if let Some(slot) = self.residents.find(key).filter(|&slot| self.residents.at(slot).object == object) {
            self.unlink(slot);
            self.residents.forget(slot);
            self.residents.free(slot);
        }
    }

    fn victims(&mut self, bytes: u64, limit: usize, accept: &mut dyn FnMut(&Candidate) -> Answer) -> Vec<Candidate> {
        let mut choice = Choice::new(bytes, limit, accept);
        let mut left = self.residents.len();
        while !choice.is_done() && left > 0 {
            if self.list.is_empty() {
                if self.chosen.is_empty() || !choice.chosen.is_empty() {
                    break;
                }
                while self.chosen.tail != NONE {
                    self.put_back(self.chosen.tail);
                }
            }
            let Offer { slots, answer } = choice.offer(&self.residents, self.list.tail);
            for slot in slots {
                if answer == Answer::Take {
                    self.choose(slot);
                } else {
                    self.unlink(slot);
                }
                if answer == Answer::Refuse {
                    self.push(slot);
                }
                left = left.saturating_sub(1);
            }
        }
        for &slot in choice.passed.iter().rev() {
            self.residents.push_tail(&mut self.list, slot);
        }
        choice.chosen
    }

    fn spared(&mut self, key: u64, object: ObjectId) {
        let is_chosen = |slot: &u32| {
            let entry = self.residents.at(*slot);
            entry.object == object && entry.tag == CHOSEN
        };
        if let Some(slot) = self.residents.find(key).filter(is_chosen) {
            self.put_back(slot);
        }
    }

    fn rank(&self, key: u64, object: ObjectId) -> Option<u64> {
        let slot = self.residents.find(key).filter(|&slot| self.residents.at(slot).object == object)?;
        Some(self.residents.turn(slot))
    }

    fn len(&self) -> usize {
        self.residents.len()
    }

    fn bytes(&self) -> u64 {
        self.residents.bytes()
    }

    fn memory_bytes(&self) -> usize {
        size_of::<Lru>() + self.residents.memory_bytes()
    }
}
