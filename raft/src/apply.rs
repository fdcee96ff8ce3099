//! Joins openraft to the state machine: feeds it committed entries in order, freezes it for snapshots, and restores
//! it from them. Answers go out only after the machine applied, and never after it failed.

use std::io;
use std::marker::PhantomData;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use futures::{Stream, StreamExt};
use openraft::OptionalSend;
use openraft::async_runtime::{AsyncRuntime, Instant};
use openraft::storage::{EntryResponder, RaftSnapshotBuilder, RaftStateMachine};
use parking_lot::Mutex;
use prometheus::HistogramVec;
use tokio::sync::Notify;

use crate::rt::watch;

use crate::compaction::Milestones;
use crate::failure::{Failure, FatalError};
use crate::host::Host;
use crate::machine::{Frozen, LogPosition, MachineError, Replaced, StateMachine, Unsound};
use crate::skips::{OpPlace, PayloadHash, Skips, StoppedAt};
use crate::snapshot::{SnapshotError, SnapshotFile, SnapshotStore};
use crate::types::{Entry, EntryPayload, LogId, Membership, SnapshotMeta, StoredMembership, term_of};

/// A snapshot as openraft passes it around: what it covers, and the open file.
pub(crate) type Snapshot = openraft::Snapshot<crate::types::CommittedLeaderId, u64, crate::types::Member, SnapshotFile>;

/// The machine as openraft drives it.
pub struct Adapter<C: Host, M> {
    shared: Arc<Applied<M>>,
    config: PhantomData<C>,
}

/// What the rest of the node sees of applying.
pub(crate) struct Applied<M> {
    pub(crate) machine: Arc<M>,
    pub(crate) snapshots: SnapshotStore,
    failure: Arc<Failure>,
    data_dir: PathBuf,
    skips: Skips,
    covered: Mutex<Covered>,
    pub(crate) progress: Arc<Progress>,
    /// Payload bytes and entries applied since the current snapshot: what a restart would have to replay.
    pub(crate) bytes_since_snapshot: AtomicU64,
    pub(crate) entries_since_snapshot: AtomicU64,
    pub(crate) entries_applied: AtomicU64,
    /// Seconds that one step held the apply loop, by step.
    held: HistogramVec,
    /// The log begins after this index, or soon will.
    pub(crate) purged: AtomicU64,
    /// Where the log's bytes are, for what a member that is fed may keep of it.
    pub(crate) milestones: Mutex<Milestones>,
    /// Set once consensus runs: from then on whoever asks for a snapshot wants to send it.
    pub(crate) is_started: AtomicBool,
    /// Why the last snapshot was not written: the state was not what it was known to be. None once one was written.
    pub(crate) unsound: watch::Sender<Option<String>>,
}

#[derive(Clone, Default)]
struct Covered {
    last: Option<LogId>,
    membership: StoredMembership,
}

/// The applied position, to be waited for. Wakes its waiters in their order, so that a simulation repeats itself.
#[derive(Default)]
pub(crate) struct Progress {
    at: Mutex<Option<LogPosition>>,
    moved: Notify,
}

impl Progress {
    fn set(&self, at: Option<LogPosition>) {
        *self.at.lock() = at;
        self.moved.notify_waiters();
    }

    pub(crate) fn get(&self) -> Option<LogPosition> {
        *self.at.lock()
    }

    /// Waits until the position satisfies `reached`.
    pub(crate) async fn wait_for(&self, reached: impl Fn(Option<LogPosition>) -> bool) {
        loop {
            // Listen first, then look: a move in between is not missed.
            let moved = self.moved.notified();
            if reached(self.get()) {
                return;
            }
            moved.await;
        }
    }
}

fn position(id: &LogId) -> LogPosition {
    LogPosition { term: term_of(id), index: id.index }
}

impl<M: StateMachine> Applied<M> {
    pub(crate) fn new(
        machine: Arc<M>,
        snapshots: SnapshotStore,
        failure: Arc<Failure>,
        held: HistogramVec,
        (data_dir, skips): (PathBuf, Skips),
    ) -> Arc<Applied<M>> {
        Arc::new(Applied {
            machine,
            snapshots,
            failure,
            data_dir,
            skips,
            covered: Mutex::default(),
            progress: Arc::default(),
            bytes_since_snapshot: AtomicU64::new(0),
            entries_since_snapshot: AtomicU64::new(0),
            entries_applied: AtomicU64::new(0),
            held,
            purged: AtomicU64::new(0),
            milestones: Mutex::default(),
            is_started: AtomicBool::new(false),
            unsound: watch::Sender::new(None),
        })
    }

    /// Runs one step of the apply loop and notes how long it took.
    fn hold<C: Host, T>(&self, step: &str, work: impl FnOnce() -> T) -> T {
        let began = <C::AsyncRuntime as AsyncRuntime>::Instant::now();
        let done = work();
        let held = <C::AsyncRuntime as AsyncRuntime>::Instant::now() - began;
        self.held.with_label_values(&[step]).observe(held.as_secs_f64());
        done
    }

    fn apply(&self, id: &LogId, payload: &EntryPayload) -> Result<Option<M::Outcome>, io::Error> {
        let at = position(id);
        let outcome = match payload {
            EntryPayload::Normal(payload) => {
                self.bytes_since_snapshot.fetch_add(payload.0.len() as u64, Ordering::Relaxed);
                self.milestones.lock().add(id.index, payload.0.len() as u64);
                Some(self.apply_payload(at, &payload.0).map_err(|error| self.op_failed(at, &payload.0, error))?)
            }
            EntryPayload::Blank | EntryPayload::Membership(_) => {
                self.machine.skip(at);
                None
            }
        };
        let mut covered = self.covered.lock();
        if let EntryPayload::Membership(membership) = payload {
            covered.membership = StoredMembership::new(Some(*id), membership.clone());
        }
        covered.last = Some(*id);
        self.entries_since_snapshot.fetch_add(1, Ordering::Relaxed);
        self.entries_applied.fetch_add(1, Ordering::Relaxed);
        Ok(outcome)
    }

    fn apply_payload(&self, at: LogPosition, payload: &[u8]) -> Result<M::Outcome, MachineError> {
        let skipped = self.skips.of(at, payload)?;
        if skipped.is_empty() {
            return self.machine.apply(at, payload);
        }
        tracing::warn!(index = at.index, ?skipped, "ops are left out, as operators had it recorded");
        self.machine.apply_skipping(at, payload, &skipped)
    }

    /// Writes down at which op the machine stopped, and how operators go on from there (M1).
    fn op_failed(&self, at: LogPosition, payload: &[u8], error: MachineError) -> io::Error {
        let Some(ordinal) = error.ordinal else { return self.machine_failed(at, error) };
        let (place, hash) = (OpPlace { index: at.index, ordinal }, PayloadHash::of(payload));
        let stopped = StoppedAt { place, hash, message: error.message.clone() };
        if let Err(error) = stopped.write(&self.data_dir) {
            tracing::error!(%error, "where this member stopped could not be written down");
        }
        let message = format!(
            "{}; every member stops there. Upgrade, or have the op left out on a majority of the stopped members: \
             tidepool member recover --skip {place} --hash {hash}",
            error.message
        );
        self.machine_failed(at, MachineError { message, ..error })
    }

    fn publish_position(&self) {
        let last = self.covered.lock().last.as_ref().map(position);
        self.progress.set(last);
    }

    fn machine_failed(&self, at: LogPosition, error: MachineError) -> io::Error {
        self.failure.report(FatalError::Machine { at, message: error.message.clone() });
        io::Error::other(error)
    }

    fn storage_failed(&self, error: impl Into<io::Error>) -> io::Error {
        let error = error.into();
        self.failure.report(FatalError::Storage(error.to_string()));
        error
    }

    /// Whether this binary can apply what a leader sent (M6); if not, the node ends before it acknowledges any of it.
    pub(crate) fn admit(&self, entries: &[Entry]) -> Result<(), MachineError> {
        for entry in entries {
            if let EntryPayload::Normal(payload) = &entry.payload {
                let admitted = self.machine.admits(&payload.0);
                admitted.map_err(|why| self.unsupported(format!("entry {}: {why}", position(&entry.log_id))))?;
            }
        }
        Ok(())
    }

    /// The same of a snapshot, before it is kept.
    pub(crate) fn admit_snapshot(&self, file: &SnapshotFile) -> Result<(), MachineError> {
        let admitted = self.machine.admits_state(&mut file.reader());
        admitted.map_err(|why| self.unsupported(format!("a snapshot: {why}")))
    }

    fn unsupported(&self, what: String) -> MachineError {
        let why = format!("the leader sent {what}; start a newer binary on this data directory");
        self.failure.report(FatalError::FeatureLevel(why.clone()));
        MachineError::new(why)
    }

    /// The members as of the last applied entry.
    pub(crate) fn membership(&self) -> Membership {
        self.covered.lock().membership.membership().clone()
    }

    /// What was found wrong with the state is over.
    fn sound(&self) {
        self.unsound.send_if_modified(|why| why.take().is_some());
    }

    fn meta(&self) -> SnapshotMeta {
        let covered = self.covered.lock().clone();
        SnapshotMeta { last_log_id: covered.last, last_membership: covered.membership }
    }

    /// Makes `file` the machine's state and the current snapshot, in this order: one that does not load is never found by a
    /// restart. Blocks on the disk.
    fn install(&self, file: SnapshotFile) -> Result<(), io::Error> {
        let at = file.position();
        self.load(&file)
            .map_err(|error| self.machine_failed(at.unwrap_or(LogPosition { term: 0, index: 0 }), error))?;
        let file = self.snapshots.adopt(file).map_err(|e| self.storage_failed(e))?;
        self.took_over(&file);
        Ok(())
    }

    /// Begins with the newest snapshot that loads. Those that do not are set aside like damaged ones; whether the log reaches
    /// the one that is left is for the caller to see. Blocks on the disk.
    pub(crate) fn begin(&self) -> Result<(), SnapshotError> {
        while let Some(file) = self.snapshots.current() {
            match self.load(&file) {
                Ok(()) => {
                    self.took_over(&file);
                    return Ok(());
                }
                Err(error) => {
                    tracing::error!(path = %file.path().display(), %error, "a snapshot does not load; falling back to an older one");
                    self.snapshots.set_aside(&file)?;
                }
            }
        }
        Ok(())
    }

    fn load(&self, file: &SnapshotFile) -> Result<(), MachineError> {
        let Some(at) = file.position() else { return Ok(()) };
        let mut reader = file.reader();
        self.machine.install(at, &mut reader)?;
        reader.finish().map_err(|error| MachineError::new(error.to_string()))
    }

    fn took_over(&self, file: &SnapshotFile) {
        let meta = file.meta();
        *self.covered.lock() = Covered { last: meta.last_log_id, membership: meta.last_membership.clone() };
        self.sound();
        self.bytes_since_snapshot.store(0, Ordering::Relaxed);
        self.entries_since_snapshot.store(0, Ordering::Relaxed);
        *self.milestones.lock() = Milestones::default();
        // The log before it goes.
        self.purged.fetch_max(meta.last_log_id.map_or(0, |id| id.index), Ordering::Relaxed);
        self.publish_position();
    }
}

impl<C: Host, M: StateMachine> Adapter<C, M> {
    pub(crate) fn new(shared: Arc<Applied<M>>) -> Adapter<C, M> {
        Adapter { shared, config: PhantomData }
    }
}

impl<C, M> RaftStateMachine<C> for Adapter<C, M>
where
    C: Host<Outcome = M::Outcome>,
    M: StateMachine,
{
    type SnapshotData = SnapshotFile;
    type SnapshotBuilder = Builder<C, M>;

    async fn applied_state(&mut self) -> Result<(Option<LogId>, StoredMembership), io::Error> {
        let covered = self.shared.covered.lock().clone();
        Ok((covered.last, covered.membership))
    }

    async fn apply<S>(&mut self, mut entries: S) -> Result<(), io::Error>
    where
        S: Stream<Item = Result<EntryResponder<C>, io::Error>> + Unpin + OptionalSend,
    {
        while let Some(next) = entries.next().await {
            let (entry, responder) = next.map_err(|e| self.shared.storage_failed(e))?;
            let outcome = self.shared.hold::<C, _>("entry", || self.shared.apply(&entry.log_id, &entry.payload))?;
            if let Some(responder) = responder {
                responder.send(outcome);
            }
        }
        // Once for all that were ready.
        self.shared.publish_position();
        Ok(())
    }

    async fn get_snapshot_builder(&mut self) -> Builder<C, M> {
        let bytes = self.shared.bytes_since_snapshot.load(Ordering::Relaxed);
        let entries = self.shared.entries_since_snapshot.load(Ordering::Relaxed);
        Builder {
            meta: self.shared.meta(),
            state: Mutex::new(Some(self.shared.hold::<C, _>("freeze", || self.shared.machine.freeze()))),
            covers: (bytes, entries),
            shared: self.shared.clone(),
            config: PhantomData,
        }
    }

    async fn install_snapshot(&mut self, _meta: &SnapshotMeta, snapshot: SnapshotFile) -> Result<(), io::Error> {
        let shared = self.shared.clone();
        C::blocking(move || shared.install(snapshot)).await.map_err(|e| self.shared.storage_failed(e))?
    }

    async fn get_current_snapshot(&mut self) -> Result<Option<Snapshot>, io::Error> {
        let snapshots = &self.shared.snapshots;
        // At the start the newest is what the own state begins with; what is sent must be agreed.
        let started = self.shared.is_started.load(Ordering::Acquire);
        let purged = self.shared.purged.load(Ordering::Relaxed);
        let file = if started { snapshots.to_send(purged) } else { snapshots.current() };
        Ok(file.map(as_openraft))
    }
}

/// An installed snapshot may have reset the counter meanwhile.
fn subtract(counter: &AtomicU64, amount: u64) {
    let covered = |value: u64| Some(value.saturating_sub(amount));
    // The closure never refuses.
    let _ = counter.fetch_update(Ordering::Relaxed, Ordering::Relaxed, covered);
}

fn as_openraft(file: SnapshotFile) -> Snapshot {
    Snapshot { meta: file.meta().clone(), snapshot: file }
}

/// Writes one frozen state beside the apply task.
pub struct Builder<C, M> {
    meta: SnapshotMeta,
    state: Mutex<Option<Box<dyn Frozen>>>,
    covers: (u64, u64),
    shared: Arc<Applied<M>>,
    config: PhantomData<C>,
}

impl<C, M> RaftSnapshotBuilder<C> for Builder<C, M>
where
    C: Host<Outcome = M::Outcome>,
    M: StateMachine,
{
    type SnapshotData = SnapshotFile;

    async fn build_snapshot(&mut self) -> Result<Snapshot, io::Error> {
        let state = self.state.lock().take().ok_or_else(|| io::Error::other("a snapshot builder builds once"))?;
        let (shared, meta) = (self.shared.clone(), self.meta.clone());
        let written: Result<SnapshotFile, SnapshotError> = C::background(move || shared.snapshots.write(&meta, state))
            .await
            .map_err(|e| self.shared.storage_failed(e))?;
        let file = match written {
            Ok(file) => file,
            Err(SnapshotError::Io { source, .. }) if Replaced::caused(&source) => {
                // What was installed meanwhile covers more.
                let installed = self.shared.snapshots.current().ok_or(source)?;
                tracing::info!(path = %installed.path().display(), "snapshot given up for one that was installed");
                return Ok(as_openraft(installed));
            }
            Err(SnapshotError::Io { source, .. }) if Unsound::cause(&source).is_some() => {
                return self.unsound(&source);
            }
            Err(error) => return Err(self.shared.storage_failed(error)),
        };
        subtract(&self.shared.bytes_since_snapshot, self.covers.0);
        subtract(&self.shared.entries_since_snapshot, self.covers.1);
        self.shared.sound();
        tracing::info!(path = %file.path().display(), bytes = file.length(), "snapshot written");
        Ok(as_openraft(file))
    }
}

impl<C: Host<Outcome = M::Outcome>, M: StateMachine> Builder<C, M> {
    /// There is no snapshot of this state, and the member goes on without: the next checkpoint judges it. An error would end it.
    fn unsound(&self, cause: &io::Error) -> Result<Snapshot, io::Error> {
        let index = self.meta.last_log_id.map_or(0, |id| id.index);
        let why = format!("the state at index {index} is not what its digest was kept of: {cause}");
        tracing::error!(why, "no snapshot written; the next checkpoint judges this member");
        self.shared.machine.found_unsound(index, &why);
        self.shared.unsound.send_replace(Some(why));
        let before = self.shared.snapshots.current();
        let before = before.map_or_else(|| SnapshotFile::none(&self.shared.data_dir), Ok);
        // What openraft knows already changes nothing there.
        before.map(as_openraft).map_err(|e| self.shared.storage_failed(e))
    }
}

#[cfg(test)]
mod tests;
