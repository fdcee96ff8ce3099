//! The one writer: takes what has queued up, writes it as one batch, syncs once, answers all of it in order.

use std::sync::Arc;
use std::time::Duration;

use openraft::alias::InstantOf;
use openraft::async_runtime::Instant;
use openraft::type_config::TypeConfigExt;
use parking_lot::{Condvar, Mutex};
use tokio::sync::Notify;

use super::disk::{Disk, Write};
use super::error::LogFailure;
use super::latency::AppendLatency;
use super::metrics::LogMetrics;
use super::state::{Batch, State};
use crate::types::Config;

/// How long a committed marker waits for something to be written with. It is asked for after each commit, when the next proposal
/// and the answers to this one want the processor; a member that dies before it is written learns it again from the next leader.
const MARKER_WAIT: Duration = Duration::from_millis(50);

/// What the store's handles and its flusher share.
pub(crate) struct Shared<C: Config> {
    pub(crate) state: Mutex<State<C>>,
    pub(crate) disk: Arc<dyn Disk>,
    pub(crate) metrics: LogMetrics,
    pub(crate) latency: AppendLatency<C>,
    /// Wakes a flusher thread.
    pub(crate) work: Condvar,
    /// Wakes a flusher task.
    pub(crate) work_async: Notify,
    /// Wakes an append that waits for room in the queue.
    pub(crate) room: Notify,
    /// Told of the first failure, once.
    pub(crate) fatal: Box<dyn Fn(LogFailure) + Send + Sync>,
}

impl<C: Config> Shared<C> {
    /// Tells the flusher that there is work.
    pub(crate) fn wake(&self) {
        self.work.notify_one();
        self.work_async.notify_one();
    }

    /// Ends the store after a disk failure: nothing is acknowledged any more.
    pub(crate) fn fail(&self, operation: &'static str, cause: &std::io::Error) -> LogFailure {
        let failure = LogFailure { operation, cause: cause.to_string() };
        let (first, pending) = {
            let mut state = self.state.lock();
            let first = state.failure.is_none();
            (first, state.fail(failure.clone()))
        };
        if first {
            self.metrics.failed.set(1);
            tracing::error!(operation, %cause, "raft log failed; this process must restart");
            (self.fatal)(failure.clone());
        }
        for done in pending {
            done.complete(Err(&failure));
        }
        self.room.notify_waiters();
        failure
    }
}

/// How far the disk has come.
pub(crate) struct Flusher<C: Config> {
    shared: Arc<Shared<C>>,
    /// Index after the last entry written.
    written: u64,
    /// Index after the last entry synced.
    synced: u64,
}

impl<C: Config> Flusher<C> {
    /// `next` is where the log on disk ends.
    pub(crate) fn new(shared: Arc<Shared<C>>, next: u64) -> Flusher<C> {
        Flusher { shared, written: next, synced: next }
    }

    /// Body of the production thread: runs until the store closes or fails.
    pub(crate) fn run_thread(mut self) {
        let _guard = PanicGuard(self.shared.clone());
        loop {
            let batch = {
                let mut state = self.shared.state.lock();
                while state.is_idle() && !state.closing && state.failure.is_none() {
                    // Nobody wakes it for a marker: it looks for one.
                    let waited = self.shared.work.wait_for(&mut state, MARKER_WAIT);
                    if waited.timed_out() && state.only_marker_waits() {
                        break;
                    }
                }
                if state.failure.is_some() || (state.closing && state.is_idle() && !state.only_marker_waits()) {
                    return;
                }
                state.take_batch()
            };
            let sync = batch.needs_sync();
            if sync {
                self.shared.latency.begun();
            }
            let written = self.write(&batch).and_then(|writes| if sync { self.sync(&writes) } else { Ok(()) });
            match written {
                Ok(()) => self.complete(batch),
                Err(failure) => return abandon(batch, &failure),
            }
        }
    }

    /// Body of the simulation's task: the same steps, with the disk's virtual delay before the sync.
    pub(crate) async fn run_task(mut self) {
        loop {
            let mut overdue = false;
            let batch = loop {
                let marker = {
                    let mut state = self.shared.state.lock();
                    let marker = state.only_marker_waits();
                    if state.failure.is_some() || (state.closing && state.is_idle() && !marker) {
                        return;
                    }
                    if !state.is_idle() || (marker && (overdue || state.closing)) {
                        break state.take_batch();
                    }
                    marker
                };
                let work = self.shared.work_async.notified();
                match marker {
                    true => overdue = C::timeout(MARKER_WAIT, work).await.is_err(),
                    false => work.await,
                }
            };
            let sync = batch.needs_sync();
            if sync {
                self.shared.latency.begun();
            }
            let writes = match self.write(&batch) {
                Ok(writes) => writes,
                Err(failure) => return abandon(batch, &failure),
            };
            if sync {
                let delay = self.shared.disk.sync_delay();
                if delay > Duration::ZERO {
                    C::sleep(delay).await;
                }
                if let Err(failure) = self.sync(&writes) {
                    return abandon(batch, &failure);
                }
            }
            self.complete(batch);
        }
    }

    fn write(&mut self, batch: &Batch<C>) -> Result<Vec<Write>, LogFailure> {
        let (writes, next) = batch.encode(self.written, self.synced);
        let started = C::now();
        self.shared.disk.write(&writes).map_err(|error| self.shared.fail("write", &error))?;
        self.written = next;
        self.shared.metrics.append_seconds.observe(seconds_since::<C>(started));
        Ok(writes)
    }

    fn sync(&mut self, writes: &[Write]) -> Result<(), LogFailure> {
        let started = C::now();
        self.shared.disk.sync().map_err(|error| self.shared.fail("sync", &error))?;
        self.synced = self.written;
        let metrics = &self.shared.metrics;
        metrics.sync_seconds.observe(seconds_since::<C>(started));
        let (mut entries, mut bytes) = (0u64, 0u64);
        for write in writes {
            match write {
                Write::Append { frame, .. } => {
                    entries += 1;
                    bytes += frame.len() as u64;
                }
                Write::Purge { delete, .. } if !delete.is_empty() => {
                    self.shared.disk.reclaim(delete.end).map_err(|error| self.shared.fail("purge", &error))?;
                }
                _ => {}
            }
        }
        if entries > 0 {
            metrics.entries_per_sync.observe(entries as f64);
            metrics.appended_entries.inc_by(entries);
            metrics.appended_bytes.inc_by(bytes);
        }
        Ok(())
    }

    /// Acknowledges a batch: only here, and only after its sync.
    fn complete(&self, batch: Batch<C>) {
        {
            let mut state = self.shared.state.lock();
            state.flushed(batch.bytes, self.synced);
            self.shared.metrics.queued_bytes.set(state.queued_bytes() as i64);
            self.shared.metrics.cached_bytes.set(state.tail.bytes() as i64);
        }
        if batch.needs_sync() {
            self.shared.latency.ended();
        }
        self.shared.room.notify_waiters();
        for done in batch.done {
            done.complete(Ok(()));
        }
    }
}

/// Fails the calls of a batch that a failure caught; those behind it were failed by [`Shared::fail`].
fn abandon<C: Config>(batch: Batch<C>, failure: &LogFailure) {
    for done in batch.done {
        done.complete(Err(failure));
    }
}

/// A flusher that dies leaves callers waiting for ever: its death fails the store.
struct PanicGuard<C: Config>(Arc<Shared<C>>);

impl<C: Config> Drop for PanicGuard<C> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.fail("write", &std::io::Error::other("the flusher panicked"));
        }
    }
}

fn seconds_since<C: Config>(started: InstantOf<C>) -> f64 {
    started.elapsed().as_secs_f64()
}
