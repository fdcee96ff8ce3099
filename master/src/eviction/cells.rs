//! The blocks that may go, in a list per class and tick of last use, and the way through them in either order.

use super::class::CLASSES;
use super::judge::Order;
use super::model::{Model, RING, first_age};
use super::resident::{List, NONE, Residents};

const WORDS: usize = RING as usize / 64;

/// Lists of blocks; within one, what came last goes first.
pub(super) struct Cells {
    lists: Vec<List>,
    /// Which lists of a class are not empty.
    occupied: Vec<[u64; WORDS]>,
    /// No occupied cell is at an earlier place of the learned order.
    place: usize,
    /// No occupied cell is of an earlier tick.
    oldest: u32,
}

fn at(class: u8, tick: u32) -> usize {
    usize::from(class) * RING as usize + (tick % RING) as usize
}

impl Cells {
    pub(super) fn new() -> Cells {
        Cells {
            lists: vec![List::EMPTY; CLASSES * RING as usize],
            occupied: vec![[0; WORDS]; CLASSES],
            place: 0,
            oldest: 0,
        }
    }

    pub(super) fn memory_bytes(&self) -> usize {
        self.lists.len() * size_of::<List>() + self.occupied.len() * WORDS * 8
    }

    /// All lists, each with its class and whether it is marked as occupied.
    #[cfg(test)]
    pub(super) fn all(&self) -> impl Iterator<Item = (u8, List, bool)> {
        self.lists.iter().enumerate().map(|(i, &list)| {
            let (class, bit) = (i / RING as usize, i % RING as usize);
            (class as u8, list, self.occupied[class][bit / 64] >> (bit % 64) & 1 == 1)
        })
    }

    /// Notes whether a cell is empty.
    fn mark(&mut self, class: u8, tick: u32) {
        let bit = (tick % RING) as usize;
        let word = &mut self.occupied[usize::from(class)][bit / 64];
        if self.lists[at(class, tick)].is_empty() {
            *word &= !(1 << (bit % 64));
        } else {
            *word |= 1 << (bit % 64);
        }
    }

    pub(super) fn push(&mut self, residents: &mut Residents, slot: u32, class: u8, tick: u32, place: usize) {
        residents.push_tail(&mut self.lists[at(class, tick)], slot);
        self.mark(class, tick);
        self.place = self.place.min(place);
        self.oldest = self.oldest.min(tick);
    }

    pub(super) fn unlink(&mut self, residents: &mut Residents, slot: u32, class: u8, tick: u32) {
        residents.unlink(&mut self.lists[at(class, tick)], slot);
        self.mark(class, tick);
    }

    /// A tick begins: the oldest cells join the next oldest, and ages have changed.
    pub(super) fn tick(&mut self, residents: &mut Residents, now: u32) {
        for class in 0..CLASSES as u8 {
            let older = std::mem::take(&mut self.lists[at(class, now)]);
            if !older.is_empty() {
                residents.append(&mut self.lists[at(class, now + 1)], older);
                self.mark(class, now);
                self.mark(class, now + 1);
            }
        }
        self.place = 0;
    }

    /// Starts the way anew: the order has changed.
    pub(super) fn restart(&mut self) {
        (self.place, self.oldest) = (0, 0);
    }

    /// The block to go next.
    pub(super) fn next(&mut self, order: Order, model: &Model, now: u32) -> Option<u32> {
        match order {
            Order::Learned => self.next_learned(model, now),
            Order::Lru => self.next_oldest(now),
        }
    }

    fn next_oldest(&mut self, now: u32) -> Option<u32> {
        self.oldest = self.oldest.max(now + 1 - RING);
        while self.oldest <= now {
            let tails = (0..CLASSES as u8).map(|class| self.lists[at(class, self.oldest)].tail);
            if let Some(slot) = tails.into_iter().find(|&slot| slot != NONE) {
                return Some(slot);
            }
            self.oldest += 1;
        }
        None
    }

    fn next_learned(&mut self, model: &Model, now: u32) -> Option<u32> {
        while let Some(&(class, kind)) = model.order().get(self.place) {
            let (newest, oldest) = (first_age(usize::from(kind)), first_age(usize::from(kind) + 1) - 1);
            if let Some(tick) = self.first_occupied(class, now - oldest, now - newest) {
                return Some(self.lists[at(class, tick)].tail);
            }
            self.place += 1;
        }
        None
    }

    /// The first tick of a range whose cell is not empty.
    fn first_occupied(&self, class: u8, from: u32, to: u32) -> Option<u32> {
        let mut tick = from;
        while tick <= to {
            let bit = tick % RING;
            let word = self.occupied[usize::from(class)][bit as usize / 64] >> (bit % 64);
            if word != 0 {
                tick += word.trailing_zeros();
                return (tick <= to).then_some(tick);
            }
            tick += 64 - bit % 64;
        }
        None
    }
}
