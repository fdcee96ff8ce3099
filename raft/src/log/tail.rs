//! The end of the log in memory: what is not durable yet, and as much before it as the byte limit allows.

use std::collections::VecDeque;

use crate::codec::entry_size;
use crate::types::Entry;

/// Bookkeeping an entry costs beside its bytes.
const ENTRY_OVERHEAD_BYTES: usize = size_of::<Entry>();

/// A contiguous run of entries that ends at the log's end.
pub(crate) struct Tail {
    entries: VecDeque<Entry>,
    /// Index of the front entry; of the next one to come when empty.
    first: u64,
    bytes: usize,
    bytes_max: usize,
}

impl Tail {
    pub(crate) fn new(next: u64, bytes_max: usize) -> Tail {
        Tail { entries: VecDeque::new(), first: next, bytes: 0, bytes_max }
    }

    /// Lowest index held; everything from here to the log's end is in memory.
    pub(crate) fn first(&self) -> u64 {
        self.first
    }

    /// Index after the last entry.
    pub(crate) fn next(&self) -> u64 {
        self.first + self.entries.len() as u64
    }

    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Lets an empty tail continue at `next`.
    pub(crate) fn restart(&mut self, next: u64) {
        assert!(self.entries.is_empty(), "only an empty tail may move");
        self.first = next;
    }

    /// Appends the next entry. The store has checked that it follows.
    pub(crate) fn push(&mut self, entry: Entry) {
        assert_eq!(entry.log_id.index, self.next(), "the tail is contiguous");
        self.bytes += cost(&entry);
        self.entries.push_back(entry);
    }

    /// Removes `from` and everything after.
    pub(crate) fn truncate(&mut self, from: u64) {
        while self.next() > from {
            match self.entries.pop_back() {
                Some(entry) => self.bytes -= cost(&entry),
                None => {
                    self.first = from;
                    return;
                }
            }
        }
    }

    /// Forgets everything below `below`; the log then ends at `below` at least.
    pub(crate) fn purge(&mut self, below: u64) {
        while self.first < below {
            match self.entries.pop_front() {
                Some(entry) => {
                    self.bytes -= cost(&entry);
                    self.first += 1;
                }
                None => self.first = below,
            }
        }
    }

    /// Drops the oldest entries above the byte limit, of those below `durable`: these the disk can give back.
    pub(crate) fn evict(&mut self, durable: u64) {
        while self.bytes > self.bytes_max && self.first < durable {
            let Some(entry) = self.entries.pop_front() else { return };
            self.bytes -= cost(&entry);
            self.first += 1;
        }
    }

    /// The entry at `index`, if it is here.
    pub(crate) fn get(&self, index: u64) -> Option<&Entry> {
        self.entries.get(usize::try_from(index.checked_sub(self.first)?).ok()?)
    }
}

fn cost(entry: &Entry) -> usize {
    entry_size(entry) + ENTRY_OVERHEAD_BYTES
}
