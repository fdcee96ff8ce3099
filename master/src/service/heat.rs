//! How often objects are read, about: two rows of counters that decay, and the objects that were seen to be hot. Counted
//! where replica lists are handed out, outside the log; a new leader starts with none.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU32, Ordering};

use parking_lot::Mutex;
use tidepool_proto::ObjectId;

/// Counters of a row: one object shares its counter with another now and then, rarely in both rows.
const ROW: usize = 1 << 14;
/// One read.
const READ: u32 = 16;
/// Steps of decay in a window: each takes one in so many.
pub const STEPS_PER_WINDOW: u32 = 8;
/// Objects remembered as hot.
const HOT_MAX: usize = 1_024;

/// See the module.
pub struct Heat {
    /// Empty: nothing is counted.
    cells: Box<[AtomicU32]>,
    threshold: u32,
    hot: Mutex<BTreeSet<ObjectId>>,
}

impl Heat {
    /// Counts nothing.
    pub fn off() -> Heat {
        Heat { cells: Box::default(), threshold: u32::MAX, hot: Mutex::default() }
    }

    /// An object is hot with so many reads within a window.
    pub fn of(reads: u32) -> Heat {
        let cells = (0..2 * ROW).map(|_| AtomicU32::new(0)).collect();
        Heat { cells, threshold: reads.max(1).saturating_mul(READ), hot: Mutex::default() }
    }

    fn places(object: ObjectId) -> [usize; 2] {
        let spread = object.0.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        [(spread >> 50) as usize, ROW + (spread >> 20) as usize % ROW]
    }

    /// Counts a read.
    pub fn note(&self, object: ObjectId) {
        if self.cells.is_empty() {
            return;
        }
        let counted = Heat::places(object).map(|at| self.cells[at].fetch_add(READ, Ordering::Relaxed));
        let before = counted[0].min(counted[1]);
        // The lock is taken as an object becomes hot, and now and then while it is.
        let crosses = before < self.threshold && before.saturating_add(READ) >= self.threshold;
        if crosses || before >= self.threshold && (before / READ).is_multiple_of(64) {
            let mut hot = self.hot.lock();
            if hot.len() < HOT_MAX {
                hot.insert(object);
            }
        }
    }

    fn count(&self, object: ObjectId) -> u32 {
        let [a, b] = Heat::places(object);
        match self.cells.is_empty() {
            true => 0,
            false => self.cells[a].load(Ordering::Relaxed).min(self.cells[b].load(Ordering::Relaxed)),
        }
    }

    /// Reads within the window, about.
    pub fn reads(&self, object: ObjectId) -> u64 {
        u64::from(self.count(object) / READ)
    }

    /// Whether it is read so seldom that an extra replica is of no use: less than half of what makes it hot.
    pub fn is_cold(&self, object: ObjectId) -> bool {
        self.count(object) < self.threshold / 2
    }

    /// One step of decay.
    pub fn decay(&self) {
        for cell in &self.cells {
            let count = cell.load(Ordering::Relaxed);
            if count > 0 {
                cell.fetch_sub(count.div_ceil(STEPS_PER_WINDOW), Ordering::Relaxed);
            }
        }
        self.hot.lock().retain(|object| !self.is_cold(*object));
    }

    /// Objects that are hot, the hottest first.
    pub fn hottest(&self) -> Vec<ObjectId> {
        let hot = self.hot.lock().clone();
        let mut hot: Vec<(u32, ObjectId)> = hot.into_iter().map(|object| (self.count(object), object)).collect();
        hot.retain(|(count, _)| *count >= self.threshold);
        hot.sort_unstable_by_key(|&(count, object)| (std::cmp::Reverse(count), object));
        hot.into_iter().map(|(_, object)| object).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOT: ObjectId = ObjectId(77 << 14);

    /// Reads at a rate, over a few windows.
    fn read(heat: &Heat, object: ObjectId, reads_per_window: u32) {
        for _ in 0..8 * STEPS_PER_WINDOW {
            (0..reads_per_window / STEPS_PER_WINDOW).for_each(|_| heat.note(object));
            heat.decay();
        }
    }

    #[test]
    fn what_is_read_often_is_hot_until_it_is_not() {
        let heat = Heat::of(40);
        read(&heat, HOT, 64);
        assert_eq!(heat.hottest(), [HOT]);
        assert!((48..=64).contains(&heat.reads(HOT)), "{} reads a window", heat.reads(HOT));
        read(&heat, HOT, 32);
        assert!(heat.hottest().is_empty() && !heat.is_cold(HOT), "between hot and cold nothing changes");
        read(&heat, HOT, 8);
        assert!(heat.is_cold(HOT));
        read(&heat, HOT, 0);
        assert_eq!(heat.reads(HOT), 0);
    }

    #[test]
    fn many_objects_read_seldom_are_not_hot() {
        let heat = Heat::of(40);
        for round in 0..4 {
            (0..4_096).for_each(|i| heat.note(ObjectId((1 + i) << 14)));
            heat.decay();
            assert!(heat.hottest().is_empty(), "round {round}");
        }
    }

    #[test]
    fn off_counts_nothing() {
        let heat = Heat::off();
        (0..1_000).for_each(|_| heat.note(HOT));
        heat.decay();
        assert!(heat.hottest().is_empty() && heat.is_cold(HOT));
    }

    #[test]
    fn what_is_remembered_is_bounded() {
        let heat = Heat::of(1);
        (0..8 * HOT_MAX as u64).for_each(|i| heat.note(ObjectId((1 + i) << 14)));
        assert_eq!(heat.hottest().len(), HOT_MAX);
    }
}
