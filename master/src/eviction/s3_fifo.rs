//! S3-FIFO: a small queue on trial, a main queue, and ghosts of what failed the trial.
//!
//! Source: Yang, Zhang, Qiu, Yue, Rashmi, "FIFO queues are all you need for cache eviction", SOSP '23.

use super::ghosts::Ghosts;
use super::resident::{Choice, List, NONE, Offer, Residents};
use super::{Answer, Candidate, Inserted, Policy};
use tidepool_proto::ObjectId;

/// The small queue's share of the bytes is one in this many.
const SMALL_SHARE: u64 = 10;
/// Bits of a tag that count uses, up to 3.
const USES: u8 = 3;
/// Uses on trial that admit to the main queue.
const USES_ADMIT: u8 = 2;
/// In a tag: in the main queue.
const MAIN: u8 = 4;
/// In a tag: chosen, and not gone yet.
const CHOSEN: u8 = 8;
/// Ghosts live for as many evictions as objects are resident: this many ticks.
const GHOST_TICKS: u16 = 64;

/// The policy of the paper. It knows nothing of chains.
pub struct S3Fifo {
    residents: Residents,
    small: List,
    main: List,
    /// What was chosen and did not go yet.
    chosen: List,
    small_bytes: u64,
    ghosts: Ghosts,
    tick: u16,
    ghosts_in_tick: usize,
    pushed: u64,
}

impl Default for S3Fifo {
    fn default() -> S3Fifo {
        S3Fifo::new()
    }
}

impl S3Fifo {
    /// Nothing resident.
    pub fn new() -> S3Fifo {
        S3Fifo {
            residents: Residents::default(),
            small: List::EMPTY,
            main: List::EMPTY,
            chosen: List::EMPTY,
            small_bytes: 0,
            ghosts: Ghosts::new(1),
            tick: 0,
            ghosts_in_tick: 0,
            pushed: 0,
        }
    }

    fn unlink(&mut self, slot: u32) {
        if self.residents.at(slot).tag & CHOSEN != 0 {
            self.residents.at_mut(slot).tag &= !CHOSEN;
            self.residents.unlink(&mut self.chosen, slot);
        } else if self.residents.at(slot).tag & MAIN != 0 {
            self.residents.unlink(&mut self.main, slot);
        } else {
            self.residents.unlink(&mut self.small, slot);
            self.small_bytes -= self.residents.size(slot);
        }
    }

    fn push(&mut self, slot: u32) {
        self.pushed += 1;
        self.residents.set_turn(slot, self.pushed);
        if self.residents.at(slot).tag & MAIN != 0 {
            self.residents.push_head(&mut self.main, slot);
        } else {
            self.residents.push_head(&mut self.small, slot);
            self.small_bytes += self.residents.size(slot);
        }
    }

    fn choose(&mut self, slot: u32) {
        self.unlink(slot);
        self.residents.at_mut(slot).tag |= CHOSEN;
        self.residents.push_head(&mut self.chosen, slot);
    }

    /// Puts what was chosen back to where it was.
    fn spare(&mut self, slot: u32) {
        self.unlink(slot);
        if self.residents.at(slot).tag & MAIN != 0 {
            self.residents.put_by_turn(&mut self.main, slot);
        } else {
            self.residents.put_by_turn(&mut self.small, slot);
            self.small_bytes += self.residents.size(slot);
        }
    }

    /// Takes one out of its queue for the rest of a call; its bytes still count for the queue.
    fn pass(&mut self, slot: u32) {
        let is_main = self.residents.at(slot).tag & MAIN != 0;
        self.residents.unlink(if is_main { &mut self.main } else { &mut self.small }, slot);
    }

    /// Puts it back to where it was.
    fn put_back(&mut self, slot: u32) {
        let is_main = self.residents.at(slot).tag & MAIN != 0;
        self.residents.push_tail(if is_main { &mut self.main } else { &mut self.small }, slot);
    }

    fn remember(&mut self, key: u64) {
        self.ghosts_in_tick += 1;
        if self.ghosts_in_tick > self.residents.len() / usize::from(GHOST_TICKS) {
            self.ghosts_in_tick = 0;
            self.tick = self.tick.wrapping_add(1);
            self.ghosts.tick(self.tick, self.residents.len(), |_| ());
        }
        if self.ghosts.find(key).is_none() {
            self.ghosts.insert(key, self.tick, 0, self.tick);
        }
    }

    /// The next to go by the paper's rules; those that pass a trial on the way are moved. None when nothing is resident.
    fn next(&mut self) -> Option<u32> {
        loop {
            let from_small = self.small_bytes * SMALL_SHARE >= self.residents.bytes() || self.main.is_empty();
            let slot = if from_small && !self.small.is_empty() { self.small.tail } else { self.main.tail };
            if slot == NONE {
                return None;
            }
            let tag = self.residents.at(slot).tag;
            let next = match tag & MAIN {
                0 if tag & USES >= USES_ADMIT => MAIN,
                MAIN if tag & USES > 0 => tag - 1,
                _ => return Some(slot),
            };
            self.unlink(slot);
            self.residents.at_mut(slot).tag = next;
            self.push(slot);
        }
    }
}

impl Policy for S3Fifo {
    fn inserted(&mut self, object: Inserted) {
        if let Some(old) = self.residents.find(object.key) {
            self.unlink(old);
            self.residents.forget(old);
            self.residents.free(old);
        }
        let slot = self.residents.insert(object);
        if let Some(place) = self.ghosts.find(object.key) {
            if self.tick.wrapping_sub(self.ghosts.get(place).tick) <= GHOST_TICKS {
                self.residents.at_mut(slot).tag = MAIN;
            }
            self.ghosts.remove(place);
        }
        self.push(slot);
    }

    fn requested(&mut self, keys: &[u64]) {
        for &key in keys {
            if let Some(slot) = self.residents.find(key) {
                let entry = self.residents.at_mut(slot);
                if entry.tag & USES < USES {
                    entry.tag += 1;
                }
            }
        }
    }

    fn removed(&mut self, key: u64, object: ObjectId) {
        if let Some(slot) = self.residents.find(key).filter(|&slot| self.residents.at(slot).object == object) {
            self.unlink(slot);
            if self.residents.at(slot).tag & MAIN == 0 {
                self.remember(key);
            }
            self.residents.forget(slot);
            self.residents.free(slot);
        }
    }

    fn victims(&mut self, bytes: u64, limit: usize, accept: &mut dyn FnMut(&Candidate) -> Answer) -> Vec<Candidate> {
        let mut choice = Choice::new(bytes, limit, accept);
        let mut put_off = Vec::new();
        while !choice.is_done() {
            let Some(slot) = self.next() else {
                if self.chosen.is_empty() || !choice.chosen.is_empty() || !put_off.is_empty() {
                    break;
                }
                while self.chosen.tail != NONE {
                    self.spare(self.chosen.tail);
                }
                continue;
            };
            let Offer { slots, answer } = choice.offer(&self.residents, slot);
            for slot in slots {
                match answer {
                    Answer::Skip => self.pass(slot),
                    Answer::Take => self.choose(slot),
                    Answer::Refuse => {
                        self.unlink(slot);
                        put_off.push(slot);
                    }
                }
            }
        }
        for slot in put_off {
            self.push(slot);
        }
        for &slot in choice.passed.iter().rev() {
            self.put_back(slot);
        }
        choice.chosen
    }

    fn spared(&mut self, key: u64, object: ObjectId) {
        let is_chosen = |slot: &u32| {
            let entry = self.residents.at(*slot);
            entry.object == object && entry.tag & CHOSEN != 0
        };
        if let Some(slot) = self.residents.find(key).filter(is_chosen) {
            self.spare(slot);
        }
    }

    /// What a queue would keep when its turn came stands behind what it would not.
    fn rank(&self, key: u64, object: ObjectId) -> Option<u64> {
        let slot = self.residents.find(key).filter(|&slot| self.residents.at(slot).object == object)?;
        let tag = self.residents.at(slot).tag;
        let stays = if tag & MAIN == 0 { tag & USES >= USES_ADMIT } else { tag & USES > 0 };
        Some(u64::from(stays) << 63 | u64::from(tag & MAIN != 0) << 62 | self.residents.turn(slot))
    }

    fn len(&self) -> usize {
        self.residents.len()
    }

    fn bytes(&self) -> u64 {
        self.residents.bytes()
    }

    fn memory_bytes(&self) -> usize {
        size_of::<S3Fifo>() + self.residents.memory_bytes() + self.ghosts.memory_bytes()
    }
}
