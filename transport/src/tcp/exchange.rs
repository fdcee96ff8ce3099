//! One frame's worth of items between a caller and a connection: lent memory, progress and outcome under one lock.
//!
//! Whoever waits for the outcome settles the exchange: at the answer, at the deadline, or when its future is dropped.
//! Settling takes the loans back. The connection's tasks touch lent memory only inside one non-blocking system call
//! made under the lock, and only while the exchange is unsettled; afterwards what arrives is thrown away and what is
//! still owed to the peer is padding. Loans are dropped by the caller, never by the I/O tasks.
#![allow(unsafe_code)]

use std::io;
use std::sync::atomic::AtomicU64;

use parking_lot::Mutex;
use tidepool_proto::{Error, ErrorCode};
use tokio::net::TcpStream;
use tokio::sync::oneshot;
use tokio::time::Instant;

use super::options::CALL_BYTES_MAX;
use super::socket::{Ranges, Window, receive, send};
use super::wire::{self, Kind};
use crate::engine::{ReadItem, WriteError, WriteItem};
use crate::local::{LocalMut, LocalRef};
use crate::memory::WriteReply;

/// Results of a read frame, an item each.
pub(super) type ReadResults = Vec<Result<(), Error>>;
/// Results of a write frame, an item each.
pub(super) type WriteResults = Vec<Result<WriteReply, WriteError>>;

/// What a connection carries.
pub(super) enum Exchange {
    /// A read frame.
    Read(ReadExchange),
    /// A write frame.
    Write(WriteExchange),
}

/// Fixed facts of an exchange.
pub(super) struct Facts {
    /// Encoded accesses.
    pub(super) records: Vec<u8>,
    /// Items.
    pub(super) items: usize,
    /// Payload bytes, if every item succeeds.
    pub(super) payload_bytes: u64,
    /// When the caller stops waiting.
    pub(super) deadline: Instant,
}

/// A read frame.
pub(super) struct ReadExchange {
    facts: Facts,
    /// Where each item's payload ends if all succeed.
    lengths: Vec<u64>,
    state: Mutex<ReadState>,
}

struct ReadState {
    loans: Vec<Vec<LocalMut>>,
    /// What of the loans is still to be filled, once the answer's statuses are known.
    ranges: Ranges,
    received: u64,
    statuses: Option<ReadResults>,
    outcome: Option<ReadResults>,
    settled: bool,
    done: Option<oneshot::Sender<()>>,
}

/// A write frame.
pub(super) struct WriteExchange {
    facts: Facts,
    state: Mutex<WriteState>,
}

struct WriteState {
    loans: Vec<Vec<LocalRef>>,
    /// What of the loans is still to be sent.
    ranges: Ranges,
    outcome: Option<WriteResults>,
    settled: bool,
    done: Option<oneshot::Sender<()>>,
}

/// What became of one attempt to send.
pub(super) enum Sent {
    /// So many bytes.
    Bytes(usize),
    /// The caller took the memory back.
    Settled,
}

impl ReadExchange {
    /// Takes the items; the receiver resolves when there is an outcome.
    pub(super) fn new(items: Vec<ReadItem>, deadline: Instant) -> (ReadExchange, oneshot::Receiver<()>) {
        let mut records = Vec::with_capacity(items.len() * wire::RECORD_BYTES);
        items.iter().for_each(|item| wire::put_read(&mut records, &item.access));
        let lengths: Vec<u64> = items.iter().map(|item| item.access.length).collect();
        let facts = Facts { records, items: items.len(), payload_bytes: lengths.iter().sum(), deadline };
        let (done, outcome) = oneshot::channel();
        let state = ReadState {
            loans: items.into_iter().map(|item| item.into).collect(),
            ranges: Ranges::default(),
            received: 0,
            statuses: None,
            outcome: None,
            settled: false,
            done: Some(done),
        };
        (ReadExchange { facts, lengths, state: Mutex::new(state) }, outcome)
    }

    /// The answer's statuses are known: prepares the ranges of the items whose payload follows, and returns how many
    /// bytes must follow.
    pub(super) fn begin(&self, statuses: ReadResults) -> u64 {
        let mut state = self.state.lock();
        let state = &mut *state;
        debug_assert_eq!(statuses.len(), self.lengths.len());
        let ok = |i: &usize| statuses[*i].is_ok();
        let expected = (0..self.lengths.len()).filter(ok).map(|i| self.lengths[i]).sum();
        // Once settled there are no loans, and `receive` throws the payload away.
        for i in (0..state.loans.len()).filter(ok) {
            state.loans[i].iter().for_each(|part| state.ranges.push(part.as_ptr(), part.len()));
        }
        state.statuses = Some(statuses);
        expected
    }

    /// Receives what is there, into the loans or, once they were taken back, into `scratch`.
    pub(super) fn receive(
        &self,
        stream: &TcpStream,
        limit: u64,
        window: &mut Window,
        scratch: &mut [u8],
        discarded: &AtomicU64,
    ) -> io::Result<usize> {
        let mut state = self.state.lock();
        if state.settled {
            drop(state);
            let limit = limit.min(scratch.len() as u64) as usize;
            let n = stream.try_read(&mut scratch[..limit])?;
            crate::stats::Stats::add(discarded, n as u64);
            return Ok(n);
        }
        let limit = limit.min(CALL_BYTES_MAX as u64) as usize;
        // SAFETY: the ranges are parts of `loans`, which are held and exclusive while the lock is (`settle` takes
        // both away together).
        let n = unsafe { receive(stream, &mut state.ranges, limit, window)? };
        state.received += n as u64;
        Ok(n)
    }

    /// All payload is in.
    pub(super) fn finish(&self) {
        self.end(&Error::new(ErrorCode::Internal, "the answer ended without its payload"));
    }

    /// The connection ended: items not complete by now fail with `error`.
    pub(super) fn end(&self, error: &Error) {
        let mut state = self.state.lock();
        if state.outcome.is_none() && !state.settled {
            state.outcome = Some(self.results(&mut state, error));
        }
        state.done.take().map(|done| done.send(()));
    }

    /// Takes the loans back and returns what became of each item; those without an answer get `error`.
    pub(super) fn settle(&self, error: &Error) -> ReadResults {
        let mut state = self.state.lock();
        let results = match state.outcome.take() {
            Some(outcome) => outcome,
            None => self.results(&mut state, error),
        };
        state.settled = true;
        state.ranges.clear();
        let loans = std::mem::take(&mut state.loans);
        drop(state);
        drop(loans);
        results
    }

    fn results(&self, state: &mut ReadState, error: &Error) -> ReadResults {
        let Some(statuses) = state.statuses.take() else {
            return vec![Err(error.clone()); self.lengths.len()];
        };
        let mut end = 0;
        let complete = |(status, length): (Result<(), Error>, &u64)| {
            status.and_then(|()| {
                end += length;
                if end <= state.received { Ok(()) } else { Err(error.clone()) }
            })
        };
        statuses.into_iter().zip(&self.lengths).map(complete).collect()
    }
}

impl WriteExchange {
    /// Takes the items; the receiver resolves when there is an outcome.
    pub(super) fn new(items: Vec<WriteItem>, deadline: Instant) -> (WriteExchange, oneshot::Receiver<()>) {
        let mut records = Vec::with_capacity(items.len() * wire::RECORD_BYTES);
        items.iter().for_each(|item| wire::put_write(&mut records, &item.access));
        let mut ranges = Ranges::default();
        items.iter().flat_map(|item| &item.from).for_each(|part| ranges.push(part.as_ptr(), part.len()));
        let facts = Facts { records, items: items.len(), payload_bytes: ranges.bytes(), deadline };
        let (done, outcome) = oneshot::channel();
        let loans = items.into_iter().map(|item| item.from).collect();
        let state = WriteState { loans, ranges, outcome: None, settled: false, done: Some(done) };
        (WriteExchange { facts, state: Mutex::new(state) }, outcome)
    }

    /// Sends the front of `head`, then of the payload, and advances both.
    pub(super) fn send(&self, stream: &TcpStream, head: &mut Ranges, window: &mut Window) -> io::Result<Sent> {
        let mut state = self.state.lock();
        if state.settled {
            return Ok(Sent::Settled);
        }
        // SAFETY: `head` is the writer task's own memory; the payload ranges are parts of `loans`, which are held
        // while the lock is (`settle` takes both away together).
        let n = unsafe { send(stream, head, &state.ranges, CALL_BYTES_MAX, window)? };
        let of_head = (n as u64).min(head.bytes()) as usize;
        head.advance(of_head);
        state.ranges.advance(n - of_head);
        Ok(Sent::Bytes(n - of_head))
    }

    /// The answer is in.
    pub(super) fn finish(&self, results: WriteResults) {
        let mut state = self.state.lock();
        if !state.settled {
            state.outcome = Some(results);
        }
        state.done.take().map(|done| done.send(()));
    }

    /// The connection ended without an answer.
    pub(super) fn end(&self, error: &Error) {
        let mut state = self.state.lock();
        if state.outcome.is_none() && !state.settled {
            state.outcome = Some(self.unclean(error));
        }
        state.done.take().map(|done| done.send(()));
    }

    /// Takes the loans back and returns what became of each item; those without an answer end unclean with `error`.
    pub(super) fn settle(&self, error: &Error) -> WriteResults {
        let mut state = self.state.lock();
        let results = state.outcome.take().unwrap_or_else(|| self.unclean(error));
        state.settled = true;
        state.ranges.clear();
        let loans = std::mem::take(&mut state.loans);
        drop(state);
        drop(loans);
        results
    }

    fn unclean(&self, error: &Error) -> WriteResults {
        vec![Err(WriteError::unclean(error.clone())); self.facts.items]
    }
}

impl Exchange {
    /// Read or write.
    pub(super) fn kind(&self) -> Kind {
        match self {
            Exchange::Read(_) => Kind::Read,
            Exchange::Write(_) => Kind::Write,
        }
    }
    /// What does not change.
    pub(super) fn facts(&self) -> &Facts {
        match self {
            Exchange::Read(exchange) => &exchange.facts,
            Exchange::Write(exchange) => &exchange.facts,
        }
    }
    /// Whether the caller is gone.
    pub(super) fn is_settled(&self) -> bool {
        match self {
            Exchange::Read(exchange) => exchange.state.lock().settled,
            Exchange::Write(exchange) => exchange.state.lock().settled,
        }
    }
    /// The connection ended.
    pub(super) fn end(&self, error: &Error) {
        match self {
            Exchange::Read(exchange) => exchange.end(error),
            Exchange::Write(exchange) => exchange.end(error),
        }
    }
}
