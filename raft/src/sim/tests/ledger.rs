//! The state machine of the simulation: remembers every proposal and where it was applied.

use std::collections::BTreeMap;
use std::io;

use bytes::Bytes;
use parking_lot::Mutex;

use crate::machine::{Frozen, Levels, LogPosition, MachineError, StateMachine, Unsound};

/// A proposal that no machine accepts.
const POISON: u64 = u64::MAX;
/// From here to twice that are proposals of the second feature level.
const SECOND_LEVEL: u64 = 1 << 62;

#[derive(Clone, Default, Debug, PartialEq)]
pub(super) struct Book {
    pub(super) applied: Option<LogPosition>,
    /// Proposal and the index it was applied at.
    pub(super) entries: BTreeMap<u64, u64>,
    pub(super) repeated: u64,
    pub(super) hash: u64,
}

impl Book {
    /// The hash from the entries; of no meaning where proposals were repeated.
    fn recomputed(&self) -> u64 {
        let mut pairs: Vec<(u64, u64)> = self.entries.iter().map(|(id, index)| (*index, *id)).collect();
        pairs.sort_unstable();
        pairs.into_iter().fold(0, |hash, (index, id)| chain(hash, id, index))
    }
}

fn chain(hash: u64, id: u64, index: u64) -> u64 {
    hash.rotate_left(7).wrapping_mul(0x0100_0000_01b3) ^ id ^ index << 32
}

pub(super) struct Ledger {
    book: Mutex<Book>,
    /// The hash at every index that was applied here.
    hashes: Mutex<BTreeMap<u64, u64>>,
    doubt: Mutex<Option<String>>,
    /// Bytes that make snapshots longer than they need be.
    padding: usize,
    /// The highest feature level that it knows.
    binary: u16,
}

impl Default for Ledger {
    fn default() -> Self {
        Ledger::of_level(1)
    }
}

struct Copy(Book, usize);

impl Ledger {
    /// One with long snapshots.
    pub(super) fn padded(padding: usize) -> Ledger {
        Ledger { padding, ..Ledger::default() }
    }

    /// The hash once `index` was applied.
    pub(super) fn hash_at(&self, index: u64) -> Option<u64> {
        self.hashes.lock().get(&index).copied()
    }

    /// What was found wrong with it as it was written.
    pub(super) fn doubt(&self) -> Option<String> {
        self.doubt.lock().clone()
    }

    /// A bit of the kept-up hash flips: as an error in what apply does would show.
    pub(super) fn flip_hash(&self) {
        self.book.lock().hash ^= 1 << 17;
    }

    /// A bit of a record flips in memory, which the kept-up hash does not notice.
    pub(super) fn flip_record(&self) {
        if let Some(index) = self.book.lock().entries.values_mut().next() {
            *index ^= 1 << 40;
        }
    }

    /// Another state that is sound in itself: what a bug in apply leaves, or a bit that flipped while it worked.
    pub(super) fn mistake(&self) {
        let mut book = self.book.lock();
        if let Some((id, index)) = book.entries.pop_first() {
            book.entries.insert(id ^ 1 << 40, index);
            book.hash = book.recomputed();
            // It went wrong while the last entry was applied.
            if let Some(at) = book.applied {
                self.hashes.lock().insert(at.index, book.hash);
            }
        }
    }

    pub(super) fn of_level(binary: u16) -> Ledger {
        Ledger { book: Mutex::default(), hashes: Mutex::default(), doubt: Mutex::default(), padding: 0, binary }
    }

    /// A proposal that only those who know the second level can apply.
    pub(super) fn second_level(id: u64) -> Bytes {
        Ledger::payload(id | SECOND_LEVEL)
    }

    fn knows(&self, id: u64) -> Result<(), MachineError> {
        let needed = if id / SECOND_LEVEL == 1 { 2 } else { 1 };
        if needed <= self.binary {
            return Ok(());
        }
        Err(MachineError::new(format!("level {needed} is above {}", self.binary)))
    }

    pub(super) fn payload(id: u64) -> Bytes {
        // Some are long, so that batches differ.
        let mut bytes = id.to_le_bytes().to_vec();
        bytes.resize(8 + (id % 7) as usize * 100, 7);
        Bytes::from(bytes)
    }

    pub(super) fn poison() -> Bytes {
        Ledger::payload(POISON)
    }

    pub(super) fn book(&self) -> Book {
        self.book.lock().clone()
    }

    pub(super) fn contains(&self, id: u64) -> bool {
        self.book.lock().entries.contains_key(&id)
    }
}

impl StateMachine for Ledger {
    type Outcome = u64;

    fn apply(&self, at: LogPosition, payload: &[u8]) -> Result<u64, MachineError> {
        let mut book = self.book.lock();
        let id = payload
            .first_chunk()
            .map(|bytes| u64::from_le_bytes(*bytes))
            .ok_or_else(|| MachineError::new("too short"))?;
        if id == POISON {
            return Err(MachineError::new("poison").at_op(0));
        }
        if book.applied.is_some_and(|before| at.index != before.index + 1) {
            return Err(MachineError::new(format!("applied {at} after {:?}", book.applied)));
        }
        book.repeated += u64::from(book.entries.insert(id, at.index).is_some());
        book.hash = chain(book.hash, id, at.index);
        book.applied = Some(at);
        self.hashes.lock().insert(at.index, book.hash);
        Ok(book.entries.len() as u64)
    }

    fn apply_skipping(&self, at: LogPosition, _payload: &[u8], skipped: &[u32]) -> Result<u64, MachineError> {
        if skipped != [0] {
            return Err(MachineError::new(format!("{skipped:?} is not the only op")));
        }
        self.skip(at);
        Ok(0)
    }

    fn admits(&self, payload: &[u8]) -> Result<(), MachineError> {
        payload.first_chunk().map_or(Ok(()), |bytes| self.knows(u64::from_le_bytes(*bytes)))
    }

    fn admits_state(&self, input: &mut dyn io::Read) -> Result<(), MachineError> {
        let mut bytes = Vec::new();
        input.read_to_end(&mut bytes).map_err(|e| MachineError::new(e.to_string()))?;
        let words: Vec<u64> = bytes.as_chunks().0.iter().map(|word| u64::from_le_bytes(*word)).collect();
        let [_hash, _repeated, count, pairs @ ..] = &words[..] else { return Ok(()) };
        pairs.as_chunks::<2>().0.iter().take(*count as usize).try_for_each(|[id, _]| self.knows(*id))
    }

    fn levels(&self) -> Levels {
        let newer = self.book.lock().entries.keys().any(|id| id / SECOND_LEVEL == 1);
        Levels { state: if newer { 2 } else { 1 }, binary: self.binary }
    }

    fn skip(&self, at: LogPosition) {
        let mut book = self.book.lock();
        book.applied = Some(at);
        self.hashes.lock().insert(at.index, book.hash);
    }

    fn applied(&self) -> Option<LogPosition> {
        self.book.lock().applied
    }

    fn found_unsound(&self, _index: u64, why: &str) {
        self.doubt.lock().get_or_insert_with(|| why.to_owned());
    }

    fn freeze(&self) -> Box<dyn Frozen> {
        Box::new(Copy(self.book(), self.padding))
    }

    fn install(&self, at: LogPosition, input: &mut dyn io::Read) -> Result<(), MachineError> {
        let mut bytes = Vec::new();
        input.read_to_end(&mut bytes).map_err(|e| MachineError::new(e.to_string()))?;
        let words: Vec<u64> =
            bytes.chunks_exact(8).filter_map(|c| c.first_chunk().map(|b| u64::from_le_bytes(*b))).collect();
        let [hash, repeated, count, pairs @ ..] = &words[..] else {
            return Err(MachineError::new("the snapshot is too short"));
        };
        let entries = pairs.chunks_exact(2).take(*count as usize).map(|pair| (pair[0], pair[1])).collect();
        self.hashes.lock().insert(at.index, *hash);
        *self.book.lock() = Book { applied: Some(at), entries, repeated: *repeated, hash: *hash };
        Ok(())
    }
}

impl Frozen for Copy {
    fn write_to(self: Box<Self>, out: &mut dyn io::Write) -> io::Result<()> {
        let Copy(book, padding) = *self;
        if book.repeated == 0 && book.recomputed() != book.hash {
            return Err(Unsound(format!("the entries hash to {:x}, kept is {:x}", book.recomputed(), book.hash)).into());
        }
        let head = [book.hash, book.repeated, book.entries.len() as u64];
        let words = head.into_iter().chain(book.entries.iter().flat_map(|(id, index)| [*id, *index]));
        words.into_iter().try_for_each(|word| out.write_all(&word.to_le_bytes()))?;
        let filler: Vec<u8> = (0..padding).map(|at| at as u8).collect();
        out.write_all(&filler)
    }
}
