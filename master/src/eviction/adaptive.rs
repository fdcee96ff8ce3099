//! The default policy: learns which blocks come back, and when, and never leaves a block without the one before it.
//!
//! *Chains.* The order of keys in requests gives each block a parent. A block with a resident child is no candidate, so
//! what survives is reachable as prefixes, and of a chain the deep end goes first. A parent that is taken away by force
//! leaves a hollow slot until its children are gone.
//!
//! *Time* is counted in ticks: as many bytes are used in `TICKS_PER_CAPACITY` of them as fit the cache.
//!
//! *Classes.* A block is of a class by how often it was used and how often its chain was (`class_used`); the last block
//! of a prompt that is seen for the first time is of one of its own, because it is seldom full and then never comes back.
//!
//! *Worth* of a class and age is learned in `model`, from a sample of keys, resident and `ghosts`. *LRU* is the order
//! unless going by worth is seen to be better: `shadow` knows what LRU would hold, `judge` compares.

use super::cells::Cells;
use super::class::{CLASS, STEPS, UNREACHABLE, class_used, turn_of};
use super::ghosts::{Ghost, Ghosts};
use super::judge::{Fronts, Judge, Order};
use super::model::{Model, RING, UPDATE_TICKS};
use super::parents::Parents;
use super::repeats::Repeats;
use super::resident::{Choice, Entry, List, NONE, Offer, Residents};
use super::shadow::Shadow;
use super::{Answer, Candidate, Inserted, Policy, REFUSALS_MAX};
use hashbrown::HashMap;
use tidepool_proto::ObjectId;

#[cfg(test)]
#[path = "tests/links.rs"]
mod links;
#[cfg(test)]
#[path = "tests/time.rs"]
mod time;

/// Ticks in which as many bytes are used as fit the cache.
const TICKS_PER_CAPACITY: u64 = 128;
/// Blocks of middling size that a tick takes at least while space was never needed: as long as little is there, what fits is not
/// known, and ages that pass with every block would cost more than the puts.
const BLOCKS_PER_TICK_MIN: u64 = 4;
/// One key in this many is learned from.
const SAMPLE: u64 = 8;
/// Blocks put off that come back per tick.
const READMITTED_PER_TICK: usize = 256;

/// In a resident's tag: chosen or refused lately, in the list of those put off.
const ASIDE: u8 = 0x20;
/// In a resident's tag: nobody was heard asking for it before it came. A standby hears of requests late (M8), of a put's too.
const EXPECTED: u8 = 0x40;
/// For so many ticks after it came, the first request for such a block counts as the one that it came with.
const EXPECTED_TICKS: u32 = 8;
/// In a ghost's tag: asked for, but LRU would not hold it.
const PROBE: u8 = 0x20;
/// Tag of a slot whose object is gone but which still has children.
const HOLLOW: u8 = u8::MAX;
/// A block whose parent is known and gone.
struct Orphan;

/// What is known of a key.
#[derive(Clone, Copy, Debug)]
enum Known {
    Resident {
        slot: u32,
        class: u8,
        tick: u32,
    },
    /// Resident, and what is heard now is most likely the request that it came with.
    Awaited {
        slot: u32,
    },
    Ghost {
        class: u8,
        tick: u32,
        probe: u8,
    },
    Nothing,
}

impl Known {
    fn class_and_tick(self) -> Option<(u8, u32)> {
        match self {
            Known::Resident { class, tick, .. } | Known::Ghost { class, tick, .. } => Some((class, tick)),
            Known::Awaited { .. } | Known::Nothing => None,
        }
    }
}

/// The default policy; see the module.
pub struct Adaptive {
    residents: Residents,
    cells: Cells,
    aside: List,
    /// Parents of what was chosen and did not go yet, by key.
    parent_of_chosen: HashMap<ObjectId, u64>,
    ghosts: Ghosts,
    model: Model,
    shadow: Shadow,
    judge: Judge,
    parents: Parents,
    repeats: Repeats,
    tick: u32,
    used_in_tick: u64,
    /// Bytes resident when space was last needed.
    capacity: Option<u64>,
    /// Room for one request's keys.
    known: Vec<Known>,
}

impl Default for Adaptive {
    fn default() -> Adaptive {
        Adaptive::new()
    }
}

impl Adaptive {
    /// Nothing resident, nothing learned.
    pub fn new() -> Adaptive {
        Adaptive {
            residents: Residents::default(),
            cells: Cells::new(),
            aside: List::EMPTY,
            parent_of_chosen: HashMap::new(),
            ghosts: Ghosts::new(SAMPLE),
            model: Model::new(),
            shadow: Shadow::new(),
            judge: Judge::new(),
            parents: Parents::new(),
            repeats: Repeats::new(),
            // So that no age reaches back before the first tick.
            tick: RING,
            used_in_tick: 0,
            capacity: None,
            known: Vec::new(),
        }
    }

    /// The tick, or the oldest that is told apart.
    fn clamp(&self, tick: u32) -> u32 {
        tick.max(self.tick + 1 - RING)
    }

    /// A ghost's tick in full.
    fn full_tick(&self, tick: u16) -> u32 {
        self.clamp(self.tick.saturating_sub(u32::from((self.tick as u16).wrapping_sub(tick))))
    }

    /// Time passes by bytes used.
    fn used(&mut self, bytes: u64) {
        self.used_in_tick = self.used_in_tick.saturating_add(bytes);
        let (capacity, ticks) = match self.capacity {
            Some(capacity) => (capacity, TICKS_PER_CAPACITY),
            None => {
                let ticks = self.residents.len() as u64 / BLOCKS_PER_TICK_MIN;
                (self.residents.bytes(), ticks.clamp(1, TICKS_PER_CAPACITY))
            }
        };
        let tick_bytes = (capacity / ticks).max(1);
        for _ in 0..TICKS_PER_CAPACITY {
            if self.used_in_tick < tick_bytes {
                return;
            }
            self.used_in_tick -= tick_bytes;
            self.next_tick();
        }
        self.used_in_tick = 0;
    }

    fn next_tick(&mut self) {
        self.tick += 1;
        let now = self.tick;
        self.cells.tick(&mut self.residents, now);
        self.model.tick(now);
        self.shadow.tick(now, self.capacity);
        let mut forgotten = Vec::new();
        self.ghosts.tick(now as u16, self.residents.len(), |ghost| forgotten.push(ghost));
        for ghost in forgotten {
            self.forgotten(ghost);
        }
        if now.is_multiple_of(UPDATE_TICKS) {
            self.model.update(now, self.residents.len() as u64 / SAMPLE);
            self.judge.update();
            self.cells.restart();
        }
        self.readmit(READMITTED_PER_TICK, NONE);
    }

    /// A ghost is no longer tracked.
    fn forgotten(&mut self, ghost: Ghost) {
        let tick = self.full_tick(ghost.tick);
        if ghost.is_sampled {
            self.model.leave(ghost.tag & CLASS, tick);
        }
        if ghost.tag & PROBE == 0 {
            self.shadow.leave(tick);
        }
    }

    fn remember(&mut self, key: u64, tick: u32, tag: u8) {
        if let Some(ghost) = self.ghosts.insert(key, tick as u16, tag, self.tick as u16) {
            self.forgotten(ghost);
        }
    }

    fn look(&self, key: u64) -> Known {
        if let Some(slot) = self.residents.find(key) {
            let entry = self.residents.at(slot);
            let (class, tick) = (entry.tag & CLASS, self.clamp(entry.tick));
            if entry.tag & EXPECTED != 0 && self.tick - tick <= EXPECTED_TICKS {
                return Known::Awaited { slot };
            }
            return Known::Resident { slot, class, tick };
        }
        let Some(place) = self.ghosts.find(key) else { return Known::Nothing };
        let ghost = self.ghosts.get(place);
        Known::Ghost { class: ghost.tag & CLASS, tick: self.full_tick(ghost.tick), probe: ghost.tag & PROBE }
    }

    /// Puts a block without children where it may be found as a victim.
    fn list(&mut self, slot: u32) {
        let entry = self.residents.at(slot);
        let (class, tick) = (entry.tag & CLASS, self.clamp(entry.tick));
        let place = self.model.place(class, self.tick - tick);
        self.cells.push(&mut self.residents, slot, class, tick, place);
    }

    /// Takes a block out of its list, if it is in one.
    fn unlist(&mut self, slot: u32) {
        let entry = self.residents.at(slot);
        if entry.tag & ASIDE != 0 {
            self.residents.at_mut(slot).tag &= !ASIDE;
            self.residents.unlink(&mut self.aside, slot);
        } else if entry.children == 0 {
            let (class, tick) = (entry.tag & CLASS, self.clamp(entry.tick));
            self.cells.unlink(&mut self.residents, slot, class, tick);
        }
    }

    fn put_off(&mut self, slot: u32) {
        self.unlist(slot);
        self.residents.at_mut(slot).tag |= ASIDE;
        self.residents.push_head(&mut self.aside, slot);
    }

    /// Lets blocks that were put off be looked at again, the longest first, up to one of them.
    fn readmit(&mut self, number: usize, last: u32) {
        for _ in 0..number {
            let slot = self.aside.tail;
            if slot == NONE {
                return;
            }
            self.residents.unlink(&mut self.aside, slot);
            self.residents.at_mut(slot).tag &= !ASIDE;
            if self.residents.at(slot).children == 0 {
                self.list(slot);
            }
            if slot == last {
                return;
            }
        }
    }

    /// The block to go next.
    fn next(&mut self) -> Option<u32> {
        self.cells.next(self.judge.order(), &self.model, self.tick)
    }

    /// Makes a block the child of another, unless that could close a circle.
    fn adopt(&mut self, parent: u32, child: u32) {
        let (above, below) = (*self.residents.at(parent), *self.residents.at(child));
        let is_deeper = below.depth > above.depth || (below.children == 0 && above.depth < u16::MAX);
        if below.parent == parent || parent == child || above.children == u8::MAX || !is_deeper {
            return;
        }
        self.residents.at_mut(child).depth = below.depth.max(above.depth.saturating_add(1));
        if above.children == 0 && above.tag & ASIDE == 0 {
            self.unlist(parent);
        }
        self.residents.at_mut(parent).children += 1;
        self.leave_parent(child);
        self.residents.at_mut(child).parent = parent;
    }

    /// A block has no parent any more; what had no other child may go, and a hollow slot is free.
    fn leave_parent(&mut self, child: u32) {
        let mut parent = std::mem::replace(&mut self.residents.at_mut(child).parent, NONE);
        while parent != NONE {
            let entry = self.residents.at_mut(parent);
            entry.children -= 1;
            let entry = *entry;
            if entry.children > 0 {
                return;
            }
            if entry.tag != HOLLOW {
                if entry.tag & ASIDE == 0 {
                    self.list(parent);
                }
                return;
            }
            self.residents.free(parent);
            parent = entry.parent;
        }
    }

    /// Chosen: its parent may be next.
    fn choose(&mut self, slot: u32) {
        self.put_off(slot);
        let Entry { object, parent, .. } = *self.residents.at(slot);
        if parent != NONE {
            self.parent_of_chosen.insert(object, self.residents.at(parent).key);
            self.leave_parent(slot);
        }
    }

    fn take_out(&mut self, slot: u32) {
        self.parent_of_chosen.remove(&self.residents.at(slot).object);
        self.unlist(slot);
        self.residents.forget(slot);
        if self.residents.at(slot).children > 0 {
            self.residents.at_mut(slot).tag = HOLLOW;
        } else {
            self.leave_parent(slot);
            self.residents.free(slot);
        }
    }

    /// A key was used again: what its class and age were is learned from.
    fn learn(&mut self, key: u64, class: u8, tick: u32) {
        if self.ghosts.is_sampled(key) {
            self.model.hit(class, self.tick - tick);
            self.model.leave(class, tick);
        }
    }

    fn enter_model(&mut self, key: u64, class: u8) {
        if self.ghosts.is_sampled(key) {
            self.model.enter(class, self.tick);
        }
    }

    /// Looks up a request's keys; gives which turn of its chain it is, and how far each cache could have served it.
    fn survey(&self, keys: &[u64], known: &mut Vec<Known>) -> (u8, Fronts) {
        let mut turn = 0;
        let mut fronts = Fronts::default();
        let (mut actual, mut lru, mut guess, mut guess_lru) = (true, true, true, true);
        for (i, &key) in keys.iter().enumerate() {
            let found = self.look(key);
            known.push(found);
            // The first block of long prompts says nothing: all may share it.
            if let Some((class, tick)) = found.class_and_tick()
                && (i > 0 || keys.len() == 1)
            {
                let is_again = u8::from(tick != self.tick);
                turn = (turn_of(class) + is_again).min(STEPS - 1);
            }
            actual &= matches!(found, Known::Resident { .. });
            let in_lru = match found {
                Known::Resident { tick, .. } | Known::Ghost { tick, probe: 0, .. } => self.shadow.holds(tick),
                Known::Ghost { .. } | Known::Awaited { .. } | Known::Nothing => false,
            };
            lru &= in_lru;
            fronts.actual += u32::from(actual);
            fronts.lru += u32::from(lru);
            if self.ghosts.is_sampled(key) {
                guess &= found.class_and_tick().is_some_and(|(class, tick)| self.model.keeps(class, self.tick - tick));
                guess_lru &= in_lru;
                fronts.guess += u32::from(guess);
                fronts.guess_lru += u32::from(guess_lru);
            }
        }
        (turn, fronts)
    }

    /// A request used a resident block; gives the bytes that this counts as.
    fn use_resident(&mut self, slot: u32, turn: u8, is_last: bool) -> u64 {
        let entry = *self.residents.at(slot);
        let (class, tick) = (entry.tag & CLASS, self.clamp(entry.tick));
        // Looking, reading and writing for one request are one use.
        if tick == self.tick {
            return 0;
        }
        self.unlist(slot);
        self.learn(entry.key, class, tick);
        let class = class_used(Some(class), turn, is_last);
        let bytes = self.residents.size(slot);
        self.shadow.leave(tick);
        self.shadow.enter(self.tick, bytes);
        let now = self.tick;
        let entry = self.residents.at_mut(slot);
        (entry.tag, entry.tick) = (class, now);
        if entry.children == 0 {
            self.list(slot);
        }
        self.enter_model(self.residents.at(slot).key, class);
        bytes
    }

    /// The request that a resident block came with is heard only now: the block is of the class that it would have been of.
    fn hear_late(&mut self, slot: u32, turn: u8, is_last: bool) {
        let entry = *self.residents.at(slot);
        let (before, tick) = (entry.tag & CLASS, self.clamp(entry.tick));
        let class = match self.parent_of(entry.key) {
            Ok(_) => class_used(None, turn, is_last),
            Err(Orphan) => UNREACHABLE,
        };
        self.unlist(slot);
        self.residents.at_mut(slot).tag = class;
        if entry.children == 0 {
            self.list(slot);
        }
        if self.ghosts.is_sampled(entry.key) {
            self.model.leave(before, tick);
            self.model.enter(class, tick);
        }
    }

    /// A request asked for a key that is not resident.
    fn use_absent(&mut self, key: u64, turn: u8, is_last: bool) {
        match self.look(key) {
            Known::Ghost { tick, .. } if tick == self.tick => {}
            Known::Ghost { class, tick, probe } => {
                self.learn(key, class, tick);
                let class = class_used(Some(class), turn, is_last);
                let in_lru = probe == 0 && self.shadow.holds(tick);
                if probe == 0 {
                    self.shadow.leave(tick);
                }
                if in_lru {
                    let mean = self.residents.bytes() / (self.residents.len() as u64).max(1);
                    self.shadow.enter(self.tick, mean);
                }
                if let Some(place) = self.ghosts.find(key) {
                    let tag = if in_lru { class } else { class | PROBE };
                    self.ghosts.set(place, self.tick as u16, tag);
                }
                self.enter_model(key, class);
            }
            Known::Nothing | Known::Awaited { .. } | Known::Resident { .. } => {
                let class = class_used(None, turn, is_last);
                self.remember(key, self.tick, class | PROBE);
                self.enter_model(key, class);
            }
        }
    }

    /// Ends what is tracked of a key that is about to be inserted; gives the class it starts with.
    fn arriving(&mut self, key: u64) -> u8 {
        match self.look(key) {
            Known::Resident { slot, .. } | Known::Awaited { slot } => {
                let entry = self.residents.at(slot);
                let (class, tick) = (entry.tag & CLASS, self.clamp(entry.tick));
                if self.ghosts.is_sampled(key) {
                    self.model.leave(class, tick);
                }
                self.shadow.leave(tick);
                self.take_out(slot);
                class
            }
            Known::Ghost { class, tick, probe } => {
                if probe == 0 {
                    self.shadow.leave(tick);
                }
                if let Some(place) = self.ghosts.find(key) {
                    self.ghosts.remove(place);
                }
                // Usually a request asked for it just now, and that was counted.
                if tick + 1 < self.tick {
                    self.learn(key, class, tick);
                    return class_used(Some(class), turn_of(class), false);
                }
                if self.ghosts.is_sampled(key) {
                    self.model.leave(class, tick);
                }
                class
            }
            Known::Nothing => class_used(None, 0, false),
        }
    }

    /// The slot of the block before this one: `NONE` if no such key is known.
    fn parent_of(&self, key: u64) -> Result<u32, Orphan> {
        self.parents.of(key).map_or(Ok(NONE), |parent| self.residents.find(parent).ok_or(Orphan))
    }
}

impl Policy for Adaptive {
    fn inserted(&mut self, object: Inserted) {
        let expected = match self.look(object.key) {
            Known::Nothing | Known::Awaited { .. } => EXPECTED,
            Known::Resident { .. } | Known::Ghost { .. } => 0,
        };
        let mut class = self.arriving(object.key);
        let parent = self.parent_of(object.key);
        if parent.is_err() {
            class = UNREACHABLE;
        }
        let slot = self.residents.insert(object);
        let now = self.tick;
        let entry = self.residents.at_mut(slot);
        (entry.tag, entry.tick) = (class | expected, now);
        self.list(slot);
        self.enter_model(object.key, class);
        self.shadow.enter(now, object.bytes);
        if let Ok(parent) = parent
            && parent != NONE
        {
            self.adopt(parent, slot);
        }
        self.used(object.bytes);
    }

    fn requested(&mut self, keys: &[u64]) {
        if self.repeats.is_repeat(keys, self.tick) {
            return;
        }
        let mut known = std::mem::take(&mut self.known);
        known.clear();
        let (turn, fronts) = self.survey(keys, &mut known);
        self.judge.request(fronts);
        let (mut bytes, mut before) = (0, NONE);
        for (i, (&key, found)) in keys.iter().zip(&known).enumerate() {
            let is_last = i > 0 && i + 1 == keys.len();
            let slot = match found {
                &Known::Resident { slot, .. } => {
                    bytes += self.use_resident(slot, turn, is_last);
                    slot
                }
                &Known::Awaited { slot } => {
                    if i > 0 {
                        self.parents.note(key, keys[i - 1]);
                    }
                    self.hear_late(slot, turn, is_last);
                    slot
                }
                Known::Ghost { .. } | Known::Nothing => {
                    self.use_absent(key, turn, is_last);
                    if i > 0 {
                        self.parents.note(key, keys[i - 1]);
                    }
                    NONE
                }
            };
            if slot != NONE && before != NONE {
                self.adopt(before, slot);
            }
            before = slot;
        }
        self.known = known;
        self.used(bytes);
    }

    fn removed(&mut self, key: u64, object: ObjectId) {
        if let Some(slot) = self.residents.find(key).filter(|&slot| self.residents.at(slot).object == object) {
            let entry = self.residents.at(slot);
            let (class, tick) = (entry.tag & CLASS, self.clamp(entry.tick));
            self.take_out(slot);
            let probe = if self.shadow.holds(tick) { 0 } else { PROBE };
            self.remember(key, tick, class | probe);
        }
    }

    fn victims(&mut self, bytes: u64, limit: usize, accept: &mut dyn FnMut(&Candidate) -> Answer) -> Vec<Candidate> {
        let resident = self.residents.bytes();
        // It may be called several times in a row, each time with less resident.
        self.capacity =
            Some(self.capacity.map_or(resident, |now| resident.max(now - now.saturating_sub(resident) / 16)));
        let mut choice = Choice::new(bytes, limit, accept);
        // What was put off before this call comes back when there is nothing else.
        let mut put_off = self.aside.head;
        while !choice.is_done() {
            let Some(slot) = self.next() else {
                if put_off == NONE || !choice.chosen.is_empty() {
                    break;
                }
                self.readmit(REFUSALS_MAX, put_off);
                put_off = NONE;
                continue;
            };
            let Offer { slots, answer } = choice.offer(&self.residents, slot);
            for slot in slots {
                if slot == put_off {
                    put_off = self.residents.after(slot);
                }
                match answer {
                    Answer::Skip => self.unlist(slot),
                    Answer::Refuse => self.put_off(slot),
                    Answer::Take => self.choose(slot),
                }
            }
        }
        for &slot in choice.passed.iter().rev() {
            self.list(slot);
        }
        choice.chosen
    }

    fn spared(&mut self, key: u64, object: ObjectId) {
        let Some(slot) = self.residents.find(key).filter(|&slot| self.residents.at(slot).object == object) else {
            return;
        };
        if self.residents.at(slot).tag & ASIDE != 0 {
            self.unlist(slot);
            if self.residents.at(slot).children == 0 {
                self.list(slot);
            }
        }
        let parent = self.parent_of_chosen.remove(&object).and_then(|parent| self.residents.find(parent));
        if let Some(parent) = parent.filter(|_| self.residents.at(slot).parent == NONE) {
            self.adopt(parent, slot);
        }
    }

    fn rank(&self, key: u64, object: ObjectId) -> Option<u64> {
        let slot = self.residents.find(key).filter(|&slot| self.residents.at(slot).object == object)?;
        let entry = self.residents.at(slot);
        if entry.children > 0 {
            return None;
        }
        let (class, tick) = (entry.tag & CLASS, self.clamp(entry.tick));
        let place = match self.judge.order() {
            Order::Learned => self.model.place(class, self.tick - tick) as u64,
            Order::Lru => 0,
        };
        Some(place << 32 | u64::from(tick))
    }

    fn len(&self) -> usize {
        self.residents.len()
    }

    fn bytes(&self) -> u64 {
        self.residents.bytes()
    }

    fn memory_bytes(&self) -> usize {
        size_of::<Adaptive>()
            + self.residents.memory_bytes()
            + self.ghosts.memory_bytes()
            + self.cells.memory_bytes()
            + self.model.memory_bytes()
            + self.shadow.memory_bytes()
            + self.parents.memory_bytes()
            + self.repeats.memory_bytes()
            + self.parent_of_chosen.allocation_size()
    }
}
