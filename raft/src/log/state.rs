//! The log as its callers see it: markers, the tail in memory, and the queue of what is not on disk yet.

use std::collections::VecDeque;
use std::io;
use std::ops::Range;

use openraft::async_runtime::OneshotSender;
use openraft::storage::IOFlushed;

use super::disk::Write;
use super::error::LogFailure;
use super::recovery::OpenReport;
use super::tail::Tail;
use crate::codec::{self, ENTRY_BYTES_MAX, entry_size};
use crate::types::{Config, Entry, LogId, Vote};

/// Purged entries leave the disk at least this many at a time: every removal is a range tombstone.
pub(crate) const PURGE_STEP: u64 = 1024;
/// One batch, about: bounds how long the first call of it waits and what the encoding takes.
pub(crate) const BATCH_BYTES_MAX: usize = 8 << 20;
/// Calls of one batch at most.
pub(crate) const BATCH_CALLS_MAX: usize = 4096;
/// Bytes accepted and not yet on disk; appends wait above it.
pub(crate) const QUEUE_BYTES_MAX: usize = 64 << 20;

/// Answers one call once its batch is durable, or failed.
pub(crate) enum Done<C: Config> {
    Nobody,
    Append(IOFlushed<C>),
    Call(openraft::alias::OneshotSenderOf<C, io::Result<()>>),
}

impl<C: Config> Done<C> {
    pub(crate) fn complete(self, result: Result<(), &LogFailure>) {
        let result = result.map_err(|failure| io::Error::from(failure.clone()));
        match self {
            Done::Nobody => {}
            Done::Append(flushed) => flushed.io_completed(result),
            Done::Call(sender) => {
                // The caller may have been cancelled; the write stands all the same.
                let _ = sender.send(result);
            }
        }
    }
}

/// One queued step.
pub(crate) enum Step {
    Append(Vec<Entry>),
    Truncate(Range<u64>),
    Vote(Vote),
    Committed(LogId),
    Purge { upto: LogId, delete: Range<u64> },
}

impl Step {
    /// Whether somebody waits for, or relies on, this step being on disk for good.
    fn needs_sync(&self) -> bool {
        match self {
            Step::Append(_) | Step::Vote(_) | Step::Truncate(_) => true,
            // Files may be dropped only once the marker that allows it cannot be lost.
            Step::Purge { delete, .. } => !delete.is_empty(),
            Step::Committed(_) => false,
        }
    }

    fn bytes(&self) -> usize {
        match self {
            Step::Append(entries) => entries.iter().map(entry_size).sum(),
            _ => 64,
        }
    }
}

/// What the flusher takes at once.
pub(crate) struct Batch<C: Config> {
    pub(crate) steps: Vec<Step>,
    pub(crate) done: Vec<Done<C>>,
    pub(crate) bytes: usize,
}

impl<C: Config> Batch<C> {
    pub(crate) fn needs_sync(&self) -> bool {
        self.steps.iter().any(Step::needs_sync)
    }

    /// The steps as the disk takes them, `Synced` first, and where they leave the end of the log.
    /// `written` is where they left it before, `synced` how much of that was durable.
    pub(crate) fn encode(&self, written: u64, synced: u64) -> (Vec<Write>, u64) {
        let truncated = |step: &Step| if let Step::Truncate(range) = step { Some(range.start) } else { None };
        let lowest = self.steps.iter().filter_map(truncated).fold(synced, u64::min);
        let mut next = written;
        let mut writes = vec![Write::Synced(lowest)];
        for step in &self.steps {
            match step {
                Step::Append(entries) => {
                    for entry in entries {
                        writes.push(Write::Append { index: entry.log_id.index, frame: codec::encode(entry) });
                        next = entry.log_id.index + 1;
                    }
                }
                Step::Truncate(range) => {
                    writes.push(Write::Truncate(range.clone()));
                    next = next.min(range.start);
                }
                Step::Vote(vote) => writes.push(Write::Vote(codec::encode(vote))),
                Step::Committed(id) => writes.push(Write::Committed(codec::encode(id))),
                Step::Purge { upto, delete } => {
                    writes.push(Write::Purge { purged: codec::encode(upto), delete: delete.clone() });
                    next = next.max(upto.index + 1);
                }
            }
        }
        (writes, next)
    }
}

/// Everything behind the store's one lock.
pub(crate) struct State<C: Config> {
    pub(crate) vote: Option<Vote>,
    pub(crate) committed: Option<LogId>,
    pub(crate) purged: Option<LogId>,
    pub(crate) last: Option<LogId>,
    /// Lowest index an entry has or will have.
    pub(crate) first: u64,
    pub(crate) tail: Tail,
    /// Grows when entries a reader may be fetching change or go: truncation and purge.
    pub(crate) generation: u64,
    pub(crate) failure: Option<LogFailure>,
    pub(crate) closing: bool,
    /// The committed marker moved, and is written with the next batch that takes all there is.
    marker_waits: bool,
    queue: VecDeque<(Step, Done<C>, usize)>,
    queued_bytes: usize,
    deleted: u64,
}

impl<C: Config> State<C> {
    pub(crate) fn new(report: &OpenReport, cache_bytes: usize) -> State<C> {
        let next = report.last.map_or(report.first, |id| id.index + 1);
        State {
            vote: report.vote,
            committed: report.committed,
            purged: report.purged,
            last: report.last,
            first: report.first,
            tail: Tail::new(next, cache_bytes),
            generation: 0,
            failure: None,
            closing: false,
            marker_waits: false,
            queue: VecDeque::new(),
            queued_bytes: 0,
            deleted: report.deleted,
        }
    }

    /// Refuses every call after a failure.
    pub(crate) fn usable(&self) -> io::Result<()> {
        match &self.failure {
            Some(failure) => Err(failure.clone().into()),
            None => Ok(()),
        }
    }

    pub(crate) fn queued_bytes(&self) -> usize {
        self.queued_bytes
    }

    pub(crate) fn has_room(&self) -> bool {
        self.queued_bytes < QUEUE_BYTES_MAX
    }

    /// Whether nothing is queued that somebody waits for.
    pub(crate) fn is_idle(&self) -> bool {
        self.queue.is_empty()
    }

    /// Whether only the committed marker waits to be written.
    pub(crate) fn only_marker_waits(&self) -> bool {
        self.marker_waits && self.queue.is_empty()
    }

    fn enqueue(&mut self, step: Step, done: Done<C>) {
        let bytes = step.bytes();
        self.queued_bytes += bytes;
        self.queue.push_back((step, done, bytes));
    }

    /// Puts entries at the log's end, in memory and in the queue. They must follow without a hole.
    pub(crate) fn append(&mut self, entries: Vec<Entry>, done: Done<C>) -> io::Result<()> {
        if let Some(front) = entries.first() {
            // A log that never held anything takes its first entry at any index.
            if self.last.is_none() && self.tail.next() == self.first {
                self.first = front.log_id.index;
                self.tail.restart(front.log_id.index);
            }
            for (next, entry) in (self.tail.next()..).zip(&entries) {
                if entry.log_id.index != next {
                    return Err(invalid(format!("append at index {} where {next} is next", entry.log_id.index)));
                }
                // What could be written and not read again would end this member for good.
                if entry_size(entry) > ENTRY_BYTES_MAX {
                    let (bytes, index) = (entry_size(entry), entry.log_id.index);
                    return Err(invalid(format!("entry {index} has {bytes} bytes, the limit is {ENTRY_BYTES_MAX}")));
                }
            }
            self.last = entries.last().map(|entry| entry.log_id);
            for entry in &entries {
                self.tail.push(entry.clone());
            }
        }
        self.enqueue(Step::Append(entries), done);
        Ok(())
    }

    /// Removes everything after `last`. `last_kept` is the log id of that entry.
    pub(crate) fn truncate(&mut self, from: u64, last_kept: Option<LogId>) -> io::Result<()> {
        if from < self.first {
            return Err(invalid(format!("truncation from index {from}, below {} where the log begins", self.first)));
        }
        let until = self.tail.next();
        if from >= until {
            return Ok(());
        }
        self.tail.truncate(from);
        self.last = if from == self.first { self.purged } else { last_kept };
        self.generation += 1;
        self.enqueue(Step::Truncate(from..until), Done::Nobody);
        Ok(())
    }

    pub(crate) fn save_vote(&mut self, vote: Vote, done: Done<C>) {
        self.vote = Some(vote);
        self.enqueue(Step::Vote(vote), done);
    }

    /// The marker may be written later than it came, and never before what it covers: it travels with the next batch.
    pub(crate) fn save_committed(&mut self, committed: LogId) {
        self.committed = Some(committed);
        self.marker_waits = true;
    }

    /// Forgets everything up to `upto`; leaves the disk in steps of [`PURGE_STEP`].
    pub(crate) fn purge(&mut self, upto: LogId) {
        let below = upto.index + 1;
        if below <= self.first && self.purged.is_some() {
            return;
        }
        self.purged = Some(upto);
        self.first = below;
        self.tail.purge(below);
        if self.last.is_none_or(|last| last.index < below) {
            self.last = Some(upto);
        }
        self.generation += 1;
        // A jump over the log's end (an installed snapshot) removes what is left of the old log at once.
        let jump = self.tail.next() == below;
        let delete = if jump || below - self.deleted >= PURGE_STEP { self.deleted..below } else { 0..0 };
        if !delete.is_empty() {
            self.deleted = below;
        }
        self.enqueue(Step::Purge { upto, delete }, Done::Nobody);
    }

    /// Takes the next batch, in order.
    pub(crate) fn take_batch(&mut self) -> Batch<C> {
        let mut batch = Batch { steps: Vec::new(), done: Vec::new(), bytes: 0 };
        while batch.steps.len() < BATCH_CALLS_MAX && batch.bytes < BATCH_BYTES_MAX {
            let Some((step, done, bytes)) = self.queue.pop_front() else { break };
            batch.steps.push(step);
            batch.done.push(done);
            batch.bytes += bytes;
        }
        if self.only_marker_waits()
            && let Some(committed) = self.committed
        {
            self.marker_waits = false;
            batch.steps.push(Step::Committed(committed));
        }
        batch
    }

    /// A batch is durable and the disk now ends before `next`: its memory may go.
    pub(crate) fn flushed(&mut self, batch_bytes: usize, next: u64) {
        self.queued_bytes -= batch_bytes;
        // What is still queued may overwrite what was flushed: memory from there on is the only true copy.
        let touched = self.queue.iter().filter_map(|(step, ..)| match step {
            Step::Append(entries) => entries.first().map(|entry| entry.log_id.index),
            Step::Truncate(range) => Some(range.start),
            _ => None,
        });
        self.tail.evict(touched.fold(next, u64::min));
    }

    /// Ends the store: answers for everything queued are returned, to be failed outside the lock.
    pub(crate) fn fail(&mut self, failure: LogFailure) -> Vec<Done<C>> {
        self.failure.get_or_insert(failure);
        // The batch that is being written still counts: it may come to its end all the same.
        let queued_bytes = &mut self.queued_bytes;
        let dropped = self.queue.drain(..).map(|(_, done, bytes)| {
            *queued_bytes -= bytes;
            done
        });
        dropped.collect()
    }
}

fn invalid(detail: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, format!("raft log: {detail}"))
}
