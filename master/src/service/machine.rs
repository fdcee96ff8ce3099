//! The directory as the state machine that `raft` feeds, and the digests it remembers at checkpoints.

use std::cell::Cell;
use std::collections::VecDeque;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;
use tidepool_proto::{History, LogTime};
use tidepool_raft::rt;
use tidepool_raft::rt::watch;
use tidepool_raft::{Frozen, Levels, LogPosition, MachineError, StateMachine};

use super::audit::AuditMetrics;
use super::evictor::Evictor;
use crate::directory::{
    Directory, Entry, FEATURE_LEVEL, FEATURE_LEVEL_FIRST, FrozenDirectory, Op, Outcome, Violation, ViolationKind,
    admit_image,
};

/// Digests remembered for comparison between masters at one index.
const CHECKPOINTS_KEPT: usize = 64;

/// Where apply stands.
struct Stands {
    applied: Option<LogPosition>,
    feature_level: u16,
    log_time: LogTime,
}

/// The replicated directory of this master.
pub struct Machine {
    directory: Directory,
    evictor: Arc<Evictor>,
    checkpoints: Mutex<VecDeque<(u64, u128)>>,
    applied: watch::Sender<u64>,
    /// Asked for every message of a leader or a datanode and every proposal, which must not wait for an entry that takes long to apply.
    stands: Mutex<Stands>,
    ops: AtomicU64,
    entries: AtomicU64,
    audit: AuditMetrics,
    doubt: Mutex<Option<(u64, String)>>,
    /// Index of the state that was installed last: what is said of an earlier one is over.
    installed: AtomicU64,
    /// What was applied, for tests to compare with a model of it.
    #[cfg(test)]
    history: Mutex<Vec<AppliedEntry>>,
}

/// Index, payload and outcomes; an entry without ops has neither.
#[cfg(test)]
pub type AppliedEntry = (u64, Vec<u8>, Vec<Outcome>);

impl Machine {
    /// An empty directory, with the eviction policies of this name.
    pub fn new(policy: &str, audit: AuditMetrics) -> Option<Machine> {
        let directory = Directory::new(History(0));
        directory.keep_changes();
        Some(Machine {
            directory,
            evictor: Arc::new(Evictor::new(policy)?),
            checkpoints: Mutex::new(VecDeque::new()),
            applied: watch::Sender::new(0),
            stands: Mutex::new(Stands { applied: None, feature_level: FEATURE_LEVEL_FIRST, log_time: LogTime(0) }),
            ops: AtomicU64::new(0),
            entries: AtomicU64::new(0),
            audit,
            doubt: Mutex::new(None),
            installed: AtomicU64::new(0),
            #[cfg(test)]
            history: Mutex::default(),
        })
    }

    /// The directory.
    pub fn directory(&self) -> &Directory {
        &self.directory
    }

    /// The eviction policies, kept warm by what is applied.
    pub fn evictor(&self) -> &Arc<Evictor> {
        &self.evictor
    }

    /// What was applied and not yet taken out. Nothing is applied while it is held.
    #[cfg(test)]
    pub fn history(&self) -> parking_lot::MutexGuard<'_, Vec<AppliedEntry>> {
        self.history.lock()
    }

    /// Metrics of the auditor.
    pub fn audit_metrics(&self) -> &AuditMetrics {
        &self.audit
    }

    /// Ops and entries applied since this process started.
    pub fn applied_counts(&self) -> (u64, u64) {
        (self.ops.load(Ordering::Relaxed), self.entries.load(Ordering::Relaxed))
    }

    /// The digest recorded when the checkpoint entry at `index` was applied.
    pub fn digest_at(&self, index: u64) -> Option<u128> {
        self.checkpoints.lock().iter().find(|(at, _)| *at == index).map(|(_, digest)| *digest)
    }

    /// Last checkpoint applied here.
    pub fn last_checkpoint(&self) -> Option<(u64, u128)> {
        self.checkpoints.lock().back().copied()
    }

    /// Follows the applied index.
    pub fn watch_applied(&self) -> watch::Receiver<u64> {
        self.applied.subscribe()
    }

    /// What the auditor, or the writing of a snapshot, found: records that do not sum up to the digest that is kept of them (M2).
    pub fn doubted(&self) -> Option<(u64, String)> {
        self.doubt.lock().clone()
    }

    /// The state is another one from here on: digests and doubts of the one before say nothing of it.
    fn forget_before(&self, installed: u64) {
        let mut doubt = self.doubt.lock();
        self.installed.store(installed, Ordering::Release);
        *doubt = None;
        self.checkpoints.lock().clear();
    }

    /// The feature level of the applied state.
    pub fn feature_level(&self) -> u16 {
        self.stands.lock().feature_level
    }

    /// Log time of the newest applied entry.
    pub fn log_time(&self) -> LogTime {
        self.stands.lock().log_time
    }

    fn advance(&self, at: LogPosition) {
        let stands = Stands {
            applied: Some(at),
            feature_level: self.directory.feature_level(),
            log_time: self.directory.log_time(),
        };
        *self.stands.lock() = stands;
        self.applied.send_replace(at.index);
    }

    fn note_violations(&self, violations: &[Violation]) {
        if let Some(found) = violations.iter().find(|violation| violation.kind == ViolationKind::Digest) {
            self.doubt.lock().get_or_insert_with(|| (found.index, format!("the auditor found {}", found.facts)));
        }
    }

    /// Applies ops; an assumption that one of them violates becomes an error that names it (M1).
    fn apply_ops(&self, at: LogPosition, entry: &Entry<'_>, skipped: &[u32]) -> Result<Vec<Outcome>, MachineError> {
        let reached = Cell::new(0);
        APPLYING.set(true);
        let applied = catch_unwind(AssertUnwindSafe(|| {
            self.directory.apply_entry_skipping((at.index, at.term), entry, skipped, &reached)
        }));
        APPLYING.set(false);
        applied.map_err(|panic| {
            let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
            let text = text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_default();
            let name = entry.ops.get(reached.get() as usize).map_or("?", Op::name);
            MachineError::new(format!("op {}.{} ({name}): {text}", at.index, reached.get())).at_op(reached.get())
        })
    }
}

thread_local! {
    static APPLYING: Cell<bool> = const { Cell::new(false) };
}

/// Whether this thread applies an op: a panic then stops the node by name of the op, and need not end the process by itself.
pub fn is_applying() -> bool {
    APPLYING.get()
}

impl StateMachine for Machine {
    type Outcome = Vec<Outcome>;

    fn apply(&self, at: LogPosition, payload: &[u8]) -> Result<Vec<Outcome>, MachineError> {
        self.apply_skipping(at, payload, &[])
    }

    fn apply_skipping(&self, at: LogPosition, payload: &[u8], skipped: &[u32]) -> Result<Vec<Outcome>, MachineError> {
        let entry = Entry::decode(payload)
            .map_err(|e| MachineError::new(format!("entry {at} cannot be decoded: {e}; is this binary too old?")))?;
        #[cfg(test)]
        let mut history = self.history.lock();
        let audits = entry.ops.iter().any(|op| matches!(op, Op::Audit));
        let began = audits.then(rt::now);
        #[cfg(feature = "sim")]
        if super::sim::is_left_out(at.index) {
            self.directory.skip(at.index, at.term);
            self.advance(at);
            return Ok(entry.ops.iter().map(|_| Outcome::Done).collect());
        }
        let outcomes = self.apply_ops(at, &entry, skipped)?;
        #[cfg(feature = "sim")]
        if super::sim::is_doubled(at.index) {
            self.apply_ops(LogPosition { index: at.index + (1 << 40), ..at }, &entry, skipped)?;
        }
        if let Some(began) = began {
            let (seconds, violations) = (rt::since(began).as_secs_f64(), self.directory.take_violations());
            self.audit.note(seconds, self.directory.audit_progress(), &violations);
            self.note_violations(&violations);
        }
        if outcomes.len() != entry.ops.len() {
            let (ops, got) = (entry.ops.len(), outcomes.len());
            return Err(MachineError::new(format!("entry {at} has {ops} ops but {got} outcomes")));
        }
        for (op, outcome) in entry.ops.iter().zip(&outcomes) {
            // Ids would be taken for those of the wrong history.
            if let (Op::BeginHistory { .. }, Outcome::Refused(error)) = (op, outcome) {
                return Err(MachineError::new(format!("entry {at}: the history cannot begin: {error}")));
            }
        }
        #[cfg(test)]
        history.push((at.index, payload.to_vec(), outcomes.clone()));
        self.evictor.changed(self.directory.take_changes());
        self.ops.fetch_add(entry.ops.len() as u64, Ordering::Relaxed);
        self.entries.fetch_add(1, Ordering::Relaxed);
        if entry.ops.iter().any(|op| matches!(op, Op::Checkpoint { .. })) {
            let mut checkpoints = self.checkpoints.lock();
            if checkpoints.len() == CHECKPOINTS_KEPT {
                checkpoints.pop_front();
            }
            checkpoints.push_back((at.index, self.directory.digest()));
        }
        self.advance(at);
        #[cfg(feature = "sim")]
        super::sim::observe(&self.directory, at.index, &entry.ops);
        Ok(outcomes)
    }

    fn skip(&self, at: LogPosition) {
        #[cfg(test)]
        self.history.lock().push((at.index, Vec::new(), Vec::new()));
        self.directory.skip(at.index, at.term);
        self.advance(at);
    }

    fn admits(&self, payload: &[u8]) -> Result<(), MachineError> {
        Entry::admit(payload).map_err(|e| MachineError::new(e.to_string()))
    }

    fn admits_state(&self, input: &mut dyn io::Read) -> Result<(), MachineError> {
        admit_image(input).map(drop).map_err(|e| MachineError::new(e.to_string()))
    }

    fn levels(&self) -> Levels {
        Levels { state: self.feature_level(), binary: FEATURE_LEVEL }
    }

    fn applied(&self) -> Option<LogPosition> {
        self.stands.lock().applied
    }

    fn freeze(&self) -> Box<dyn Frozen> {
        Box::new(FrozenMachine(self.directory.freeze()))
    }

    fn found_unsound(&self, index: u64, why: &str) {
        let mut doubt = self.doubt.lock();
        if index >= self.installed.load(Ordering::Acquire) {
            doubt.get_or_insert_with(|| (index, why.to_owned()));
        }
    }

    fn install(&self, at: LogPosition, input: &mut dyn io::Read) -> Result<(), MachineError> {
        self.directory.restore(input).map_err(|e| MachineError::new(format!("snapshot at {at}: {e}")))?;
        self.forget_before(at.index);
        self.evictor.replaced(self.directory.all_readable());
        match self.directory.applied() {
            Some(applied) if applied == (at.index, at.term) => {
                self.advance(at);
                #[cfg(feature = "sim")]
                super::sim::observe(&self.directory, at.index, &[]);
                Ok(())
            }
            applied => Err(MachineError::new(format!("snapshot at {at} holds the state of {applied:?}"))),
        }
    }
}

struct FrozenMachine(FrozenDirectory);

impl Frozen for FrozenMachine {
    fn write_to(self: Box<Self>, out: &mut dyn io::Write) -> io::Result<()> {
        self.0.write_to(out)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::directory::{EntryBuilder, FEATURE_LEVEL_FIRST};
    use tidepool_proto::LogTime;

    fn at(index: u64) -> LogPosition {
        LogPosition { term: 1, index }
    }

    /// One that has applied a checkpoint at this index.
    fn with_checkpoint(index: u64) -> Machine {
        let machine = Machine::new("lru", AuditMetrics::new().unwrap()).unwrap();
        let mut entry = EntryBuilder::new(FEATURE_LEVEL_FIRST);
        entry.push(&Op::Checkpoint { index: 0, digest: 0 }).unwrap();
        machine.apply(at(index), &entry.finish(LogTime(index))).unwrap();
        machine
    }

    /// A checkpoint of the state before would be judged as if it were this one's, and vouch for its images. Fails when
    /// the checkpoints or the doubt stay, and when a doubt about the state before is taken in (each tried).
    #[test]
    fn what_is_known_of_a_state_goes_when_another_is_installed() {
        let (machine, other) = (with_checkpoint(5), with_checkpoint(9));
        machine.found_unsound(5, "a record");
        assert!(machine.digest_at(5).is_some() && machine.doubted().is_some());
        let mut image = Vec::new();
        other.freeze().write_to(&mut image).unwrap();
        machine.install(at(9), &mut &image[..]).unwrap();
        assert_eq!((machine.digest_at(5), machine.last_checkpoint(), machine.doubted()), (None, None, None));
        // An image of the state before is still being written, and is found to be wrong.
        machine.found_unsound(8, "a record");
        assert_eq!(machine.doubted(), None);
        machine.found_unsound(9, "a record");
        assert!(machine.doubted().is_some());
    }
}
