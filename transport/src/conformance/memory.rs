//! Registered memory for tests and benchmarks: one segment, extents anywhere in it, switches to make it misbehave.
#![allow(unsafe_code)]

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use bytes::Bytes;
use hashbrown::HashMap;
use parking_lot::{Condvar, Mutex};
use tidepool_proto::{Error, ErrorCode, v1};

use crate::access::{ReadAccess, WriteAccess};
use crate::local::Owner;
use crate::memory::{Memory, RawSlice, ReadGuard, WriteOutcome, WriteReply, WriteTicket};

/// The only MAC this memory takes.
pub const MAC: [u8; 16] = *b"conformance-mac!";
/// The only incarnation it takes.
pub const INCARNATION: u64 = 7;
/// The proof it signs under what it stored.
pub const STORED: [u8; 16] = *b"stored-by-test!!";
/// The proof it signs under what it aborted.
pub const ABORTED: [u8; 16] = *b"aborted-by-test!";

/// One segment.
pub struct TestMemory {
    shared: Arc<Shared>,
}

struct Shared {
    segment: Segment,
    rules: Mutex<Rules>,
    moved: Condvar,
    finished: AtomicU64,
    aborted: AtomicU64,
    open: AtomicU64,
}

#[derive(Default)]
struct Rules {
    /// Replica id -> fenced once so many bytes have arrived.
    fence_at: HashMap<u64, u64>,
    /// Calls block while this is set.
    stuck: bool,
    /// Calls that are blocked.
    waiting: usize,
}

struct Segment {
    base: *mut u8,
    layout: Layout,
}

// SAFETY: the bytes are reached only through raw pointers, as registered memory is; tests keep writers apart.
unsafe impl Send for Segment {}
// SAFETY: as above.
unsafe impl Sync for Segment {}

impl Drop for Segment {
    fn drop(&mut self) {
        // SAFETY: allocated in `TestMemory::new` with this layout; guards and tickets hold the Arc around it.
        unsafe { dealloc(self.base, self.layout) }
    }
}

impl TestMemory {
    /// A zeroed segment.
    pub fn new(bytes: usize) -> Arc<TestMemory> {
        let layout = Layout::from_size_align(bytes.max(1), 4096).expect("a segment's size");
        // SAFETY: the layout has a size.
        let base = unsafe { alloc_zeroed(layout) };
        assert!(!base.is_null(), "no memory for a segment of {bytes} bytes");
        let shared = Shared {
            segment: Segment { base, layout },
            rules: Mutex::default(),
            moved: Condvar::new(),
            finished: AtomicU64::new(0),
            aborted: AtomicU64::new(0),
            open: AtomicU64::new(0),
        };
        Arc::new(TestMemory { shared: Arc::new(shared) })
    }

    /// A genuine replica of this memory. `id` names it to the switches below.
    pub fn replica(&self, id: u64, offset: u64, length: u64) -> v1::Replica {
        TestMemory::replica_of(id, offset, length)
    }

    /// A genuine replica of any such memory.
    pub fn replica_of(id: u64, offset: u64, length: u64) -> v1::Replica {
        v1::Replica {
            replica_id: id,
            segment_id: 1,
            incarnation: INCARNATION,
            node_id: 1,
            offset,
            length,
            kind: v1::ReplicaKind::Memory as i32,
            expires_log_time_ms: 1,
            mac: Bytes::from_static(&MAC),
        }
    }

    /// Fences a replica once `bytes` of it have arrived.
    pub fn fence_at(&self, id: u64, bytes: u64) {
        self.shared.rules.lock().fence_at.insert(id, bytes);
    }

    /// Makes every call block until it is called again with false, as in a stopped process.
    pub fn set_stuck(&self, stuck: bool) {
        self.shared.rules.lock().stuck = stuck;
        self.shared.moved.notify_all();
    }

    /// Calls that are blocked now.
    pub fn waiting(&self) -> usize {
        self.shared.rules.lock().waiting
    }

    /// Tickets that ended, tickets that ended without storing, tickets that are open.
    pub fn tickets(&self) -> (u64, u64, u64) {
        let load = |counter: &AtomicU64| counter.load(Ordering::SeqCst);
        (load(&self.shared.finished), load(&self.shared.aborted), load(&self.shared.open))
    }

    /// Copies bytes in, beside any engine.
    pub fn fill(&self, offset: u64, bytes: &[u8]) {
        self.shared.check(offset, bytes.len() as u64).expect("within the segment");
        // SAFETY: within the segment; tests fill only what no transfer touches.
        unsafe { self.shared.segment.base.add(offset as usize).copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) }
    }

    /// Copies bytes out, beside any engine.
    pub fn copy(&self, offset: u64, length: u64) -> Vec<u8> {
        self.shared.check(offset, length).expect("within the segment");
        let mut out = vec![0; length as usize];
        // SAFETY: within the segment; tests look only at what no transfer touches.
        unsafe { out.as_mut_ptr().copy_from_nonoverlapping(self.shared.segment.base.add(offset as usize), out.len()) }
        out
    }
}

impl Shared {
    fn check(&self, offset: u64, length: u64) -> Result<(), Error> {
        match offset.checked_add(length) {
            Some(end) if end <= self.segment.layout.size() as u64 => Ok(()),
            _ => Err(Error::new(ErrorCode::OutOfBounds, format!("{length} bytes at {offset} leave the segment"))),
        }
    }

    fn authorise(&self, replica: &v1::Replica) -> Result<(), Error> {
        let mut rules = self.rules.lock();
        rules.waiting += 1;
        while rules.stuck {
            self.moved.wait(&mut rules);
        }
        rules.waiting -= 1;
        drop(rules);
        if replica.mac[..] != MAC {
            return Err(Error::new(ErrorCode::CapabilityRefused, "the MAC is forged"));
        }
        if replica.incarnation != INCARNATION {
            return Err(Error::new(ErrorCode::Fenced, format!("incarnation {} is over", replica.incarnation)));
        }
        self.check(replica.offset, replica.length)
    }
}

impl Memory for TestMemory {
    fn read(&self, request: &ReadAccess) -> Result<ReadGuard, Error> {
        self.shared.authorise(&request.replica)?;
        if request.offset.checked_add(request.length).is_none_or(|end| end > request.replica.length) {
            return Err(Error::new(ErrorCode::OutOfBounds, "the range leaves the extent"));
        }
        let at = (request.replica.offset + request.offset) as usize;
        // SAFETY: within the segment, which the owner keeps.
        unsafe {
            let first = self.shared.segment.base.add(at);
            Ok(ReadGuard::new(first, request.length as usize, Owner::shared(self.shared.clone())))
        }
    }

    fn begin_write(&self, request: &WriteAccess) -> Result<Box<dyn WriteTicket>, Error> {
        self.shared.authorise(&request.replica)?;
        if request.length != request.replica.length {
            return Err(Error::new(ErrorCode::OutOfBounds, "the put is not as long as its extent"));
        }
        self.shared.open.fetch_add(1, Ordering::SeqCst);
        Ok(Box::new(TestTicket {
            shared: self.shared.clone(),
            id: request.replica.replica_id,
            offset: request.replica.offset,
            length: request.length,
            received: 0,
            entered: false,
        }))
    }
}

struct TestTicket {
    shared: Arc<Shared>,
    id: u64,
    offset: u64,
    length: u64,
    received: u64,
    entered: bool,
}

impl TestTicket {
    fn fenced(&self) -> bool {
        self.shared.rules.lock().fence_at.get(&self.id).is_some_and(|&at| self.received >= at)
    }
}

impl WriteTicket for TestTicket {
    fn enter(&mut self) -> Result<RawSlice, Error> {
        assert!(!self.entered, "entered twice");
        if self.fenced() {
            return Err(Error::new(ErrorCode::Fenced, format!("replica {} was fenced", self.id)));
        }
        self.entered = true;
        // SAFETY: within the segment (checked in `begin_write`), which the ticket holds.
        unsafe {
            let first = self.shared.segment.base.add(self.offset as usize);
            Ok(RawSlice::new(first, self.length as usize))
        }
    }

    fn leave(&mut self, received: u64) {
        assert!(self.entered, "left without entering");
        let chunk = received - self.received;
        assert!(chunk <= 256 << 10, "a chunk of {chunk} bytes between two looks at the fence");
        (self.entered, self.received) = (false, received);
    }

    fn finish(self: Box<Self>, received: bool) -> WriteReply {
        assert!(!self.entered, "finished while entered");
        assert!(!received || self.received == self.length, "{} of {} bytes arrived", self.received, self.length);
        self.shared.open.fetch_sub(1, Ordering::SeqCst);
        self.shared.finished.fetch_add(1, Ordering::SeqCst);
        if received && !self.fenced() {
            return WriteReply { outcome: WriteOutcome::Stored, error: None, proof: STORED };
        }
        self.shared.aborted.fetch_add(1, Ordering::SeqCst);
        let error = self.fenced().then(|| Error::new(ErrorCode::Fenced, format!("replica {} was fenced", self.id)));
        WriteReply { outcome: WriteOutcome::Aborted, error, proof: ABORTED }
    }
}
