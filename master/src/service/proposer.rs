//! Ops into entries: adaptive group commit.
//!
//! A group of ops that arrives while few entries are in flight is proposed at once; while the pipeline is full, groups
//! gather and share the next entry. There is no timer: an idle master adds no delay, a busy one packs up to 1 024 ops.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use bytes::Bytes;
use tidepool_proto::ids::OPS_PER_ENTRY_MAX;
use tidepool_proto::{Error, ErrorCode};
use tidepool_raft::ProposeError;
use tidepool_raft::rt;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, oneshot};

use super::agreement::Halt;
use super::leases::Marks;
use super::metrics::ServiceMetrics;
use super::node::MasterNode;
use super::options::{ENTRIES_IN_FLIGHT_MAX, ENTRY_BYTES_MAX, QUEUED_OPS_MAX};
use super::refusal;
use super::tenure::LogClock;
use crate::directory::{EntryBuilder, FEATURE_LEVEL_FIRST, Op, Outcome, encode_op};

/// How often an entry that waits for its turn looks whether a quorum still answers.
const QUORUM_LOOK_INTERVAL: Duration = Duration::from_millis(20);
/// How long a caller waits for the commit of one op.
const COMMIT_WAIT: Duration = Duration::from_secs(5);

/// Handle to the proposer of one term.
#[derive(Clone)]
pub struct Proposer {
    node: MasterNode,
    groups: mpsc::UnboundedSender<Group>,
    queued_ops: Arc<AtomicUsize>,
    halt: Halt,
}

/// Ops that stay together and in order, the marks that guard them, and who waits for their outcomes.
struct Group {
    ops: Vec<u8>,
    /// Where each op ends in `ops`.
    ends: Vec<usize>,
    /// Feature level that its entry must at least be stamped with.
    level: u16,
    marks: Option<Arc<Marks>>,
    reply: oneshot::Sender<Result<Vec<Outcome>, Error>>,
}

impl Proposer {
    /// Starts the proposer of `term`. It ends when every handle is gone.
    pub fn start(
        node: MasterNode,
        (term, clock, lease): (u64, LogClock, Duration),
        metrics: Arc<ServiceMetrics>,
        halt: Halt,
    ) -> Proposer {
        let (groups, receiver) = mpsc::unbounded_channel();
        let queued_ops = Arc::new(AtomicUsize::new(0));
        let pump = Pump { node: node.clone(), term, clock, lease, metrics, queued_ops: queued_ops.clone() };
        rt::spawn(pump.run(receiver));
        Proposer { node, groups, queued_ops, halt }
    }

    /// Proposes ops and waits until they are committed and applied here. Outcomes come in order, one an op.
    ///
    /// Dropping the future abandons only the wait: the marks stay with the entry until its fate is known.
    pub async fn propose(&self, ops: &[Op<'_>], marks: Option<Marks>) -> Result<Vec<Outcome>, Error> {
        let marks = marks.map(Arc::new);
        let mut waits = Vec::with_capacity(ops.len().div_ceil(OPS_PER_ENTRY_MAX));
        for chunk in ops.chunks(OPS_PER_ENTRY_MAX) {
            waits.push(self.enqueue(chunk, marks.clone())?);
        }
        drop(marks);
        let mut outcomes = Vec::with_capacity(ops.len());
        for wait in waits {
            let part = wait.await.map_err(|_| Error::new(ErrorCode::NotLeader, "this master no longer leads"))??;
            outcomes.extend(part);
        }
        Ok(outcomes)
    }

    /// Proposes one op that somebody waits for, and gives up waiting after a while.
    pub async fn commit(&self, op: Op<'_>) -> Result<Outcome, Error> {
        let name = op.name();
        rt::timeout(COMMIT_WAIT, self.propose_one(op, None)).await.unwrap_or_else(|_| {
            Err(Error::new(
                ErrorCode::DeadlineExceeded,
                format!("{name} was not committed within {} s; its outcome is unknown", COMMIT_WAIT.as_secs()),
            ))
        })
    }

    /// Proposes one op.
    pub async fn propose_one(&self, op: Op<'_>, marks: Option<Marks>) -> Result<Outcome, Error> {
        let mut outcomes = self.propose(std::slice::from_ref(&op), marks).await?;
        outcomes.pop().ok_or_else(|| Error::new(ErrorCode::Internal, "an entry of one op had no outcome"))
    }

    /// Ops waiting for an entry.
    pub fn queued_ops(&self) -> usize {
        self.queued_ops.load(Ordering::Relaxed)
    }

    fn enqueue(
        &self,
        ops: &[Op<'_>],
        marks: Option<Arc<Marks>>,
    ) -> Result<oneshot::Receiver<Result<Vec<Outcome>, Error>>, Error> {
        self.halt.check(ops)?;
        let state = self.node.machine().feature_level();
        if let Some(op) = ops.iter().find(|op| !op.is_allowed_at(state)) {
            // Not even logged: binaries that do not know it may still be members.
            let (name, level) = (op.name(), op.level());
            return Err(Error::new(
                ErrorCode::FeatureLevel,
                format!(
                    "{name} needs feature level {level}, the cluster is at {state}: raise it with tidepool feature-level raise"
                ),
            ));
        }
        let level = ops.iter().map(Op::level).fold(state, u16::max);
        let queued = self.queued_ops.fetch_add(ops.len(), Ordering::Relaxed) + ops.len();
        if queued > QUEUED_OPS_MAX {
            self.queued_ops.fetch_sub(ops.len(), Ordering::Relaxed);
            return Err(Error::new(
                ErrorCode::ResourceExhausted,
                format!("{queued} ops wait for the log; the limit is {QUEUED_OPS_MAX}; slow down and retry"),
            )
            .retry_after(20));
        }
        let mut encoded = Vec::with_capacity(ops.len() * 128);
        let mut ends = Vec::with_capacity(ops.len());
        for op in ops {
            encode_op(op, &mut encoded);
            ends.push(encoded.len());
        }
        let (reply, wait) = oneshot::channel();
        let group = Group { ops: encoded, ends, level, marks, reply };
        self.groups.send(group).map_err(|_| Error::new(ErrorCode::NotLeader, "this master no longer leads"))?;
        Ok(wait)
    }
}

struct Pump {
    node: MasterNode,
    term: u64,
    clock: LogClock,
    /// For how long a quorum's answer holds.
    lease: Duration,
    metrics: Arc<ServiceMetrics>,
    queued_ops: Arc<AtomicUsize>,
}

impl Pump {
    async fn run(self, mut receiver: mpsc::UnboundedReceiver<Group>) {
        let in_flight = Arc::new(Semaphore::new(ENTRIES_IN_FLIGHT_MAX));
        let mut carried: Option<Group> = None;
        loop {
            let first = match carried.take() {
                Some(group) => group,
                None => match receiver.recv().await {
                    Some(group) => group,
                    None => return,
                },
            };
            let permit = match self.turn(&in_flight).await {
                Turn::Taken(permit) => permit,
                Turn::Refused => {
                    self.refuse(first, &mut receiver);
                    continue;
                }
                Turn::Over => return,
            };
            let (mut count, mut bytes) = (first.ends.len(), first.ops.len());
            let mut groups = vec![first];
            while bytes < ENTRY_BYTES_MAX {
                match receiver.try_recv() {
                    Ok(group) if count + group.ends.len() <= OPS_PER_ENTRY_MAX => {
                        (count, bytes) = (count + group.ends.len(), bytes + group.ops.len());
                        groups.push(group);
                    }
                    Ok(group) => {
                        carried = Some(group);
                        break;
                    }
                    Err(_) => break,
                }
            }
            self.queued_ops.fetch_sub(count, Ordering::Relaxed);
            self.metrics.ops_per_entry.observe(count as f64);
            let payload = match self.entry(&groups) {
                Ok(payload) => payload,
                Err(error) => {
                    settle(Err((error, Fate::Refused)), groups);
                    continue;
                }
            };
            let (node, term) = (self.node.clone(), self.term);
            rt::spawn(async move {
                let result = node.propose(payload, term).await;
                settle(
                    result.map(|applied| applied.outcome).map_err(|e| (refusal::proposal(&e), Fate::of(&e))),
                    groups,
                );
                drop(permit);
            });
        }
    }
}

/// Whether the next entry may be proposed.
enum Turn {
    Taken(OwnedSemaphorePermit),
    /// The entries before it wait for a quorum that does not answer: so would this one.
    Refused,
    Over,
}

impl Pump {
    /// Waits until few entries are in flight. A leader that is cut off never sees the end of those that it sent last; what comes
    /// after them is refused as soon as its lease has run out, and whoever asked may ask elsewhere.
    async fn turn(&self, in_flight: &Arc<Semaphore>) -> Turn {
        loop {
            match rt::timeout(QUORUM_LOOK_INTERVAL, in_flight.clone().acquire_owned()).await {
                Ok(permit) => return permit.map_or(Turn::Over, Turn::Taken),
                Err(_) if self.node.status().quorum_answered_within(self.lease) => {}
                Err(_) => return Turn::Refused,
            }
        }
    }

    /// Refuses a group, and all that wait behind it.
    fn refuse(&self, first: Group, receiver: &mut mpsc::UnboundedReceiver<Group>) {
        let mut groups = vec![first];
        while let Ok(group) = receiver.try_recv() {
            groups.push(group);
        }
        self.queued_ops.fetch_sub(groups.iter().map(|group| group.ends.len()).sum(), Ordering::Relaxed);
        let why = "no quorum answers this leader; nothing was logged";
        settle(Err((Error::new(ErrorCode::Unavailable, why), Fate::Refused)), groups);
    }

    /// One entry of all groups' ops, stamped with log time, and with the feature level of the state or of a raise (M6): a
    /// member that does not know it refuses the entry before it acknowledges it.
    fn entry(&self, groups: &[Group]) -> Result<Bytes, Error> {
        let level = groups.iter().map(|group| group.level).max().unwrap_or(FEATURE_LEVEL_FIRST);
        let mut entry = EntryBuilder::new(level);
        for group in groups {
            let mut from = 0;
            for &end in &group.ends {
                entry.push_encoded(&group.ops[from..end])?;
                from = end;
            }
        }
        Ok(entry.finish(self.clock.now()))
    }
}

/// What became of an entry without an outcome.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Fate {
    /// It was never logged: it will not take effect.
    Refused,
    /// It was logged, and may yet take effect.
    Unknown,
}

impl Fate {
    fn of(error: &ProposeError) -> Fate {
        match error {
            ProposeError::NotLeader { .. } | ProposeError::Unavailable(_) | ProposeError::TooLong { .. } => {
                Fate::Refused
            }
            ProposeError::Unknown { .. } | ProposeError::Fatal(_) => Fate::Unknown,
        }
    }
}

/// Hands every group its part of the entry's outcomes. The marks are dropped here, after the fate is known; while it is
/// not known (the term is ending) they stay.
fn settle(result: Result<Vec<Outcome>, (Error, Fate)>, groups: Vec<Group>) {
    match result {
        Ok(outcomes) => {
            let mut outcomes = outcomes.into_iter();
            for group in groups {
                let part: Vec<Outcome> = outcomes.by_ref().take(group.ends.len()).collect();
                drop(group.marks);
                // A caller whose deadline passed no longer waits; its ops took effect all the same.
                let _abandoned = group.reply.send(Ok(part));
            }
        }
        Err((error, fate)) => {
            for group in groups {
                if let Some(marks) = group.marks.as_ref().filter(|_| fate == Fate::Unknown) {
                    marks.keep();
                }
                let _abandoned = group.reply.send(Err(error.clone()));
            }
        }
    }
}
