//! The log store as openraft sees it.

use std::fmt::Debug;
use std::io;
use std::ops::{Bound, RangeBounds};
use std::path::Path;
use std::sync::Arc;
use std::thread::JoinHandle;

use futures::{Stream, stream};
use openraft::storage::{IOFlushed, LogState, RaftLogStorage};
use openraft::type_config::TypeConfigExt;
use openraft::{OptionalSend, RaftLogReader};
use parking_lot::{Condvar, Mutex};
use prometheus::Registry;
use tokio::sync::Notify;

use super::disk::{Disk, StoreId};
use super::error::{LogFailure, OpenLogError};
use super::flusher::{Flusher, Shared};
use super::hanging;
use super::latency::AppendLatency;
use super::metrics::LogMetrics;
use super::recovery::{OpenReport, recover};
use super::state::{Done, State};
use crate::host::Host;
use crate::machine::AdmitPayload;
use crate::types::{Config, Entry, LogId, Vote};

/// Bytes that one limited read returns, about: what one append request to a follower carries.
pub const READ_BYTES_MAX: usize = 4 << 20;
/// Entries that one step of a stream reads at most.
const STREAM_ENTRIES_MAX: u64 = 4096;

/// What runs the flusher.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flushing {
    /// One OS thread, so that a sync never holds up the runtime. Production.
    Thread,
    /// One task on `C::AsyncRuntime`. The deterministic simulation, which has no threads.
    Task,
}

/// How a log store runs.
pub struct LogOptions {
    /// What runs the flusher.
    pub flushing: Flushing,
    /// Bytes of durable entries kept in memory, the newest ones; older ones are read from disk.
    pub cache_bytes: usize,
    /// Whether this binary can apply a payload (M6): asked of every entry found on disk.
    pub admits: Box<AdmitPayload>,
    /// Told once of the failure that ended the store. The process must exit.
    pub fatal: Box<dyn Fn(LogFailure) + Send + Sync>,
}

/// The replicated log and the vote of one member. Clones are handles to the same store; it closes, after writing
/// what was queued, when the last one is dropped.
pub struct LogStore<C: Config> {
    pub(super) shared: Arc<Shared<C>>,
    life: Arc<Life<C>>,
}

impl<C: Config> Clone for LogStore<C> {
    fn clone(&self) -> Self {
        LogStore { shared: self.shared.clone(), life: self.life.clone() }
    }
}

impl<C: Config> Debug for LogStore<C> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "LogStore({})", self.shared.disk.store_id())
    }
}

/// Ends the flusher with the last handle.
struct Life<C: Config> {
    shared: Arc<Shared<C>>,
    /// Gone with the store, for who watches it without keeping it open.
    _open: Arc<()>,
    thread: Option<JoinHandle<()>>,
}

impl<C: Config> Drop for Life<C> {
    fn drop(&mut self) {
        self.shared.state.lock().closing = true;
        self.shared.wake();
        if let Some(thread) = self.thread.take()
            && thread.thread().id() != std::thread::current().id()
            && thread.join().is_err()
        {
            tracing::error!("the raft log's flusher had panicked");
        }
    }
}

impl<C: Config> LogStore<C> {
    /// Verifies everything on `disk` and starts the flusher, within a runtime. `path` is for messages only.
    pub fn open(
        disk: Arc<dyn Disk>,
        path: &Path,
        options: LogOptions,
        registry: &Registry,
    ) -> Result<(LogStore<C>, OpenReport), OpenLogError> {
        let report = recover(disk.as_ref(), path, &options.admits)?;
        if let Some(torn) = &report.torn_tail {
            tracing::warn!(from = torn.from, entries = torn.entries, detail = %torn.detail,
                "cut off a torn tail of the raft log; it was never acknowledged");
        }
        let state: State<C> = State::new(&report, options.cache_bytes);
        let next = state.tail.next();
        let (latency, open) = (AppendLatency::new(), Arc::new(()));
        hanging::register(registry, latency.clone())?;
        let shared = Arc::new(Shared {
            state: Mutex::new(state),
            disk,
            metrics: LogMetrics::register(registry)?,
            latency: latency.clone(),
            work: Condvar::new(),
            work_async: Notify::new(),
            room: Notify::new(),
            fatal: options.fatal,
        });
        let flusher = Flusher::new(shared.clone(), next);
        let thread = match options.flushing {
            Flushing::Thread => {
                hanging::watch(latency, path, Arc::downgrade(&open));
                let builder = std::thread::Builder::new().name("raft-log".to_owned());
                Some(builder.spawn(move || flusher.run_thread()).map_err(OpenLogError::Thread)?)
            }
            Flushing::Task => {
                // Detached: it ends when the store closes.
                drop(C::spawn(flusher.run_task()));
                None
            }
        };
        let life = Arc::new(Life { shared: shared.clone(), _open: open, thread });
        Ok((LogStore { shared, life }, report))
    }

    /// Opens the RocksDB store at `path`, creating it if there is none.
    #[cfg(feature = "rocksdb")]
    pub fn open_rocks(
        path: &Path,
        options: LogOptions,
        registry: &Registry,
    ) -> Result<(LogStore<C>, OpenReport), OpenLogError> {
        Self::open(Arc::new(super::rocks::RocksDisk::open(path)?), path, options, registry)
    }

    /// Identity of the store, drawn when it was created.
    pub fn store_id(&self) -> StoreId {
        self.shared.disk.store_id()
    }

    /// How long its appends take.
    pub(crate) fn append_latency(&self) -> AppendLatency<C> {
        self.shared.latency.clone()
    }

    /// The failure that ended the store, if one did.
    pub fn failure(&self) -> Option<LogFailure> {
        self.shared.state.lock().failure.clone()
    }
}

impl<C: Host> LogStore<C> {
    /// Entries of `[start, end)` that the log holds, the first ones up to about `bytes_max`. What is in memory is
    /// answered at once; the disk is read away from the async threads.
    async fn read(&self, start: u64, end: u64, bytes_max: usize) -> io::Result<Vec<Entry>> {
        if let Some(entries) = self.shared.read_memory(start, end, bytes_max)? {
            return Ok(entries);
        }
        let shared = self.shared.clone();
        C::blocking(move || shared.read(start, end, bytes_max)).await?
    }
}

/// `[start, end)` of any range.
fn bounds(range: &impl RangeBounds<u64>) -> (u64, u64) {
    let start = match range.start_bound() {
        Bound::Included(start) => *start,
        Bound::Excluded(start) => start.saturating_add(1),
        Bound::Unbounded => 0,
    };
    let end = match range.end_bound() {
        Bound::Included(end) => end.saturating_add(1),
        Bound::Excluded(end) => *end,
        Bound::Unbounded => u64::MAX,
    };
    (start, end)
}

impl<C: Host> RaftLogReader<C> for LogStore<C> {
    async fn try_get_log_entries<RB: RangeBounds<u64> + Clone + Debug + OptionalSend>(
        &mut self,
        range: RB,
    ) -> Result<Vec<Entry>, io::Error> {
        let (start, end) = bounds(&range);
        self.read(start, end, usize::MAX).await
    }

    async fn read_vote(&mut self) -> Result<Option<Vote>, io::Error> {
        let state = self.shared.state.lock();
        state.usable()?;
        Ok(state.vote)
    }

    async fn limited_get_log_entries(&mut self, start: u64, end: u64) -> Result<Vec<Entry>, io::Error> {
        self.read(start, end, READ_BYTES_MAX).await
    }

    /// Reads in steps: applying a long log after a restart must not load all of it at once.
    async fn entries_stream<RB>(&mut self, range: RB) -> impl Stream<Item = Result<Entry, io::Error>> + OptionalSend
    where
        RB: RangeBounds<u64> + Clone + Debug + OptionalSend,
    {
        let (start, end) = bounds(&range);
        let read = (self.clone(), start, Vec::new().into_iter(), false);
        stream::unfold(read, move |(store, mut next, mut ready, failed)| async move {
            loop {
                if let Some(entry) = ready.next() {
                    return Some((Ok(entry), (store, next, ready, failed)));
                }
                if failed || next >= end {
                    return None;
                }
                match store.read(next, end.min(next.saturating_add(STREAM_ENTRIES_MAX)), READ_BYTES_MAX).await {
                    Ok(entries) => {
                        let last: &Entry = entries.last()?;
                        next = last.log_id.index + 1;
                        ready = entries.into_iter();
                    }
                    Err(error) => return Some((Err(error), (store, next, ready, true))),
                }
            }
        })
    }
}

impl<C: Host> RaftLogStorage<C> for LogStore<C> {
    type LogReader = Self;

    async fn get_log_state(&mut self) -> Result<LogState<C>, io::Error> {
        let state = self.shared.state.lock();
        state.usable()?;
        Ok(LogState { last_purged_log_id: state.purged, last_log_id: state.last })
    }

    async fn get_log_reader(&mut self) -> Self {
        self.clone()
    }

    async fn save_vote(&mut self, vote: &Vote) -> Result<(), io::Error> {
        let (sender, receiver) = C::oneshot();
        {
            let mut state = self.shared.state.lock();
            state.usable()?;
            state.save_vote(*vote, Done::Call(sender));
        }
        self.shared.wake();
        match receiver.await {
            Ok(result) => result,
            Err(_) => Err(io::Error::other("the raft log's flusher is gone")),
        }
    }

    /// Travels with what is written next; durable with the next sync. Nobody waits for it, so it wakes nobody: on an idle log the
    /// flusher comes for it. `None` has nothing to save: commitment never goes back.
    async fn save_committed(&mut self, committed: Option<LogId>) -> Result<(), io::Error> {
        let Some(committed) = committed else { return Ok(()) };
        let mut state = self.shared.state.lock();
        state.usable()?;
        state.save_committed(committed);
        // A flusher task; a flusher thread looks by itself.
        self.shared.work_async.notify_one();
        Ok(())
    }

    async fn read_committed(&mut self) -> Result<Option<LogId>, io::Error> {
        let state = self.shared.state.lock();
        state.usable()?;
        Ok(state.committed)
    }

    async fn append<I>(&mut self, entries: I, callback: IOFlushed<C>) -> Result<(), io::Error>
    where
        I: IntoIterator<Item = Entry> + OptionalSend,
        I::IntoIter: OptionalSend,
    {
        let entries: Vec<Entry> = entries.into_iter().collect();
        loop {
            // Registered before the look, so that room made in between is not missed.
            let mut room = std::pin::pin!(self.shared.room.notified());
            room.as_mut().enable();
            {
                let mut state = self.shared.state.lock();
                state.usable()?;
                if state.has_room() {
                    state.append(entries, Done::Append(callback))?;
                    break;
                }
            }
            room.await;
        }
        self.shared.wake();
        Ok(())
    }

    async fn truncate_after(&mut self, last_log_id: Option<LogId>) -> Result<(), io::Error> {
        {
            let mut state = self.shared.state.lock();
            state.usable()?;
            let from = last_log_id.map_or(state.first, |id| id.index + 1);
            state.truncate(from, last_log_id)?;
        }
        self.shared.wake();
        Ok(())
    }

    async fn purge(&mut self, log_id: LogId) -> Result<(), io::Error> {
        {
            let mut state = self.shared.state.lock();
            state.usable()?;
            state.purge(log_id);
        }
        self.shared.wake();
        Ok(())
    }
}
