//! What LRU would hold at the same capacity: known exactly, to the tick, from when keys were last used.

use super::model::RING;

/// The LRU that might have been.
pub(super) struct Shadow {
    bytes: Vec<u64>,
    count: Vec<u32>,
    /// Uses before this tick are forgotten by LRU.
    oldest: u32,
    held: u64,
}

impl Shadow {
    pub(super) fn new() -> Shadow {
        Shadow { bytes: vec![0; RING as usize], count: vec![0; RING as usize], oldest: 0, held: 0 }
    }

    pub(super) fn holds(&self, tick: u32) -> bool {
        tick >= self.oldest
    }

    pub(super) fn enter(&mut self, tick: u32, bytes: u64) {
        if tick >= self.oldest {
            self.bytes[(tick % RING) as usize] += bytes;
            self.count[(tick % RING) as usize] += 1;
            self.held += bytes;
        }
    }

    /// A key of unknown size leaves a tick.
    pub(super) fn leave(&mut self, tick: u32) {
        if tick >= self.oldest {
            let at = (tick % RING) as usize;
            if self.count[at] > 0 {
                let bytes = self.bytes[at] / u64::from(self.count[at]);
                self.bytes[at] -= bytes;
                self.held -= bytes;
                self.count[at] -= 1;
            }
        }
    }

    /// A tick begins: what does not fit the capacity, or is too old to be told apart, goes.
    pub(super) fn tick(&mut self, now: u32, capacity: Option<u64>) {
        while self.oldest + RING <= now || (capacity.is_some_and(|fits| self.held > fits) && self.oldest < now) {
            self.drop_oldest();
        }
    }

    pub(super) fn memory_bytes(&self) -> usize {
        (self.bytes.len() + self.count.len()) * size_of::<u64>()
    }

    fn drop_oldest(&mut self) {
        let at = (self.oldest % RING) as usize;
        self.held -= std::mem::take(&mut self.bytes[at]);
        self.count[at] = 0;
        self.oldest += 1;
    }
}
