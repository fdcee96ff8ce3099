//! The state machine of these tests: a list of what was proposed, in order.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use bytes::Bytes;
use parking_lot::{Condvar, Mutex};
use tidepool_raft::{Frozen, LogPosition, MachineError, StateMachine};

#[derive(Clone, Default, Debug, PartialEq)]
pub struct Book {
    pub applied: Option<LogPosition>,
    pub entries: Vec<u64>,
}

#[derive(Default)]
pub struct Ledger {
    book: Mutex<Book>,
    gate: Arc<Gate>,
}

/// Holds up the writing of snapshots while it is closed.
#[derive(Default)]
pub struct Gate {
    closed: Mutex<bool>,
    opened: Condvar,
    /// Snapshots whose writing began.
    pub begun: AtomicU64,
}

impl Gate {
    pub fn close(&self) {
        *self.closed.lock() = true;
    }
    pub fn open(&self) {
        *self.closed.lock() = false;
        self.opened.notify_all();
    }
    fn pass(&self) {
        self.begun.fetch_add(1, Ordering::AcqRel);
        let mut closed = self.closed.lock();
        while *closed {
            self.opened.wait(&mut closed);
        }
    }
}

/// A book on its way into a snapshot.
struct Copy(Book, Arc<Gate>);

impl Ledger {
    pub fn payload(id: u64) -> Bytes {
        Bytes::copy_from_slice(&id.to_le_bytes())
    }
    pub fn gate(&self) -> Arc<Gate> {
        self.gate.clone()
    }
    pub fn entries(&self) -> Vec<u64> {
        self.book.lock().entries.clone()
    }
}

impl StateMachine for Ledger {
    type Outcome = usize;

    fn apply(&self, at: LogPosition, payload: &[u8]) -> Result<usize, MachineError> {
        let id = payload
            .first_chunk()
            .map(|bytes| u64::from_le_bytes(*bytes))
            .ok_or_else(|| MachineError::new("too short"))?;
        let mut book = self.book.lock();
        book.entries.push(id);
        book.applied = Some(at);
        Ok(book.entries.len())
    }
    fn skip(&self, at: LogPosition) {
        self.book.lock().applied = Some(at);
    }
    fn applied(&self) -> Option<LogPosition> {
        self.book.lock().applied
    }
    fn freeze(&self) -> Box<dyn Frozen> {
        Box::new(Copy(self.book.lock().clone(), self.gate.clone()))
    }
    fn install(&self, at: LogPosition, input: &mut dyn io::Read) -> Result<(), MachineError> {
        let mut bytes = Vec::new();
        input.read_to_end(&mut bytes).map_err(|e| MachineError::new(e.to_string()))?;
        let entries = bytes.chunks_exact(8).filter_map(|c| c.first_chunk().map(|b| u64::from_le_bytes(*b))).collect();
        *self.book.lock() = Book { applied: Some(at), entries };
        Ok(())
    }
}

impl Frozen for Copy {
    fn write_to(self: Box<Self>, out: &mut dyn io::Write) -> io::Result<()> {
        self.1.pass();
        self.0.entries.iter().try_for_each(|id| out.write_all(&id.to_le_bytes()))
    }
}
