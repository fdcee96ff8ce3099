//! What is learned: how likely a block of some kind and age is asked for again, and what it is worth to keep it.

use super::class::{CLASSES, UNREACHABLE};

/// Ticks that are told apart; older ones count as the oldest of them.
pub(super) const RING: u32 = 2048;
/// Kinds of ages: four to an octave.
pub(super) const AGES: usize = 40;
/// Ticks between two updates.
pub(super) const UPDATE_TICKS: u32 = 16;
/// What an update leaves of what was learned before.
const KEPT: f32 = 0.98;
/// Sampled blocks that a cache is taken to hold at least.
const ROOM_MIN: u64 = 8;
/// How much of what all kinds of blocks did counts for each kind, as a share of a cache that is watched for one update.
const PRIOR_SHARE: f32 = 0.05;

/// The kind of an age, in ticks.
pub(super) fn age_kind(age: u32) -> usize {
    if age < 4 {
        return age as usize;
    }
    let age = age.min(RING - 1);
    let octave = age.ilog2();
    (4 + (octave - 2) * 4 + ((age >> (octave - 2)) & 3)) as usize
}

/// First age of a kind; the one after the last kind gives the ring's length.
pub(super) fn first_age(kind: usize) -> u32 {
    let kind = kind as u32;
    if kind < 4 { kind } else { (4 + (kind & 3)) << ((kind - 4) >> 2) }
}

/// Hits and time at risk by kind of block and of age.
pub(super) struct Model {
    /// Sampled keys whose last use was in a tick, by class and tick modulo the ring.
    mass: Vec<u32>,
    hits: Vec<f32>,
    risk: Vec<f32>,
    /// Worth of a block, per tick that it is kept.
    worth: Vec<f32>,
    order: Vec<(u8, u8)>,
    place: Vec<u16>,
    kept: Vec<bool>,
}

impl Model {
    pub(super) fn new() -> Model {
        let n = CLASSES * AGES;
        let mut model = Model {
            mass: vec![0; CLASSES * RING as usize],
            hits: vec![0.0; n],
            risk: vec![0.0; n],
            worth: vec![0.0; n],
            order: (0..CLASSES).flat_map(|c| (0..AGES).map(move |a| (c as u8, a as u8))).collect(),
            place: vec![0; n],
            kept: vec![false; n],
        };
        model.rank();
        model
    }

    pub(super) fn memory_bytes(&self) -> usize {
        self.mass.len() * size_of::<u32>() + self.hits.len() * 17
    }

    fn mass_at(class: u8, tick: u32) -> usize {
        usize::from(class) * RING as usize + (tick % RING) as usize
    }

    pub(super) fn enter(&mut self, class: u8, tick: u32) {
        self.mass[Self::mass_at(class, tick)] += 1;
    }

    pub(super) fn leave(&mut self, class: u8, tick: u32) {
        let mass = &mut self.mass[Self::mass_at(class, tick)];
        *mass = mass.saturating_sub(1);
    }

    pub(super) fn hit(&mut self, class: u8, age: u32) {
        self.hits[usize::from(class) * AGES + age_kind(age)] += 1.0;
    }

    /// A tick begins: the oldest tick's mass joins the next.
    pub(super) fn tick(&mut self, now: u32) {
        for class in 0..CLASSES as u8 {
            let gone = std::mem::take(&mut self.mass[Self::mass_at(class, now)]);
            self.mass[Self::mass_at(class, now + 1)] += gone;
        }
    }

    /// Every `UPDATE_TICKS`: learns from the time since, and ranks anew. `room` is how many sampled blocks fit the cache.
    pub(super) fn update(&mut self, now: u32, room: u64) {
        let present = self.gather(now);
        let (mut hits_all, mut risk_all) = ([0.0f32; AGES], [0.0f32; AGES]);
        for at in 0..CLASSES * AGES {
            hits_all[at % AGES] += self.hits[at];
            risk_all[at % AGES] += self.risk[at];
        }
        let prior = room.max(ROOM_MIN) as f32 * UPDATE_TICKS as f32 * PRIOR_SHARE;
        // Of classes that nothing was seen of the worth is the same: of all classes, few are in use.
        let mut unseen: Option<[f32; AGES]> = None;
        for class in 0..CLASSES {
            let (hits, risk) = (&self.hits[class * AGES..][..AGES], &self.risk[class * AGES..][..AGES]);
            // Chance of a hit per tick at each age, drawn towards that of all classes where little was seen.
            let rate = |kind: usize| {
                let all = hits_all[kind] / (risk_all[kind] + 1.0);
                (hits[kind] + prior * all) / (risk[kind] + prior)
            };
            let of_rate = || worth(&std::array::from_fn(rate));
            let worth = if class == usize::from(UNREACHABLE) {
                [-1.0; AGES]
            } else if hits.iter().chain(risk).all(|&seen| seen == 0.0) {
                *unseen.get_or_insert_with(of_rate)
            } else {
                of_rate()
            };
            self.worth[class * AGES..][..AGES].copy_from_slice(&worth);
        }
        self.rank();
        self.fill(&present, room);
    }

    /// Counts the time at risk; gives how many sampled blocks there are by class and age.
    fn gather(&mut self, now: u32) -> [u32; CLASSES * AGES] {
        let mut present = [0; CLASSES * AGES];
        for class in 0..CLASSES {
            let mass = &self.mass[class * RING as usize..][..RING as usize];
            for kind in 0..AGES {
                let (from, to) = (first_age(kind), first_age(kind + 1));
                let (low, high) = (((now + 1 - to) % RING) as usize, ((now - from) % RING) as usize);
                let sum = if low <= high { sum(&mass[low..=high]) } else { sum(&mass[low..]) + sum(&mass[..=high]) };
                let at = class * AGES + kind;
                present[at] = sum;
                self.risk[at] = self.risk[at] * KEPT + (sum * UPDATE_TICKS) as f32;
                self.hits[at] *= KEPT;
            }
        }
        present
    }

    /// (class, kind of age) in the order of eviction: worth least first, of equal worth the older.
    pub(super) fn order(&self) -> &[(u8, u8)] {
        &self.order
    }

    /// The place of a class and age in that order.
    pub(super) fn place(&self, class: u8, age: u32) -> usize {
        usize::from(self.place[usize::from(class) * AGES + age_kind(age)])
    }

    /// Whether a cache that went by worth would still hold a block of this class at this age.
    pub(super) fn keeps(&self, class: u8, age: u32) -> bool {
        self.kept[usize::from(class) * AGES + age_kind(age)]
    }

    /// Which blocks a cache of `room` sampled blocks would hold.
    fn fill(&mut self, present: &[u32], room: u64) {
        // A block lives to an age if it was worth enough at all ages before.
        let mut lives: Vec<(f32, u16)> = Vec::with_capacity(present.len());
        for class in 0..CLASSES {
            let mut worth = f32::MAX;
            for kind in 0..AGES {
                let at = class * AGES + kind;
                worth = worth.min(self.worth[at]);
                lives.push((worth, at as u16));
            }
        }
        lives.sort_by(|x, y| y.0.total_cmp(&x.0).then(x.1.cmp(&y.1)));
        let mut taken = 0u64;
        for (_, at) in lives {
            taken += u64::from(present[at as usize]);
            self.kept[at as usize] = taken <= room;
        }
    }

    fn rank(&mut self) {
        let worth = &self.worth;
        let value = |&(c, a): &(u8, u8)| worth[c as usize * AGES + a as usize];
        self.order.sort_by(|x, y| value(x).total_cmp(&value(y)).then(y.1.cmp(&x.1)).then(x.0.cmp(&y.0)));
        for (rank, &(class, age)) in self.order.iter().enumerate() {
            self.place[class as usize * AGES + age as usize] = rank as u16;
        }
    }
}

/// A sum of counts of keys in memory, far from overflowing; without a check at each step it is done many at a time.
fn sum(counts: &[u32]) -> u32 {
    counts.iter().fold(0, |sum, &count| sum.wrapping_add(count))
}

/// Worth of a block at each kind of age, from its chance of a hit per tick at each: the best ratio of hits to time held
/// over all times to give up. Source: Gittins, "Bandit processes and dynamic allocation indices", JRSS B 1979.
fn worth(rate: &[f32; AGES]) -> [f32; AGES] {
    let ticks: [f32; AGES] = std::array::from_fn(|kind| (first_age(kind + 1) - first_age(kind)) as f32);
    let ends: [f32; AGES] = std::array::from_fn(|kind| 1.0 - (-rate[kind] * ticks[kind]).exp());
    std::array::from_fn(|from| {
        let (mut alive, mut hits, mut time, mut best) = (1.0f32, 0.0f32, 0.0f32, 0.0f32);
        for kind in from..AGES {
            let hit = alive * ends[kind];
            hits += hit;
            time += ticks[kind] * (alive - hit * 0.5);
            alive -= hit;
            best = best.max(hits / time);
        }
        best
    })
}
