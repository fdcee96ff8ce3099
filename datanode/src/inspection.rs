//! Verification on the leader's word (R3): reads a stored object in place and says whether it is intact.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Instant;

use parking_lot::Mutex;
use tidepool_proto::{Error, ErrorCode, ObjectId, SegmentId, v1};
use tokio::sync::mpsc;

use crate::life::Life;
use crate::metrics::Metrics;
use crate::outbox::Outbox;
use crate::verify::{Expected, Verifier};

/// Bytes between two looks at whether the life is over.
const STEP_BYTES: u64 = 4 << 20;

/// Runs inspections one after the other on a blocking thread, and keeps their verdicts until the leader has them.
pub(crate) struct Inspector {
    queue: mpsc::Sender<v1::VerifyReplica>,
    shared: Arc<Shared>,
    limit: usize,
}

struct Shared {
    /// Replicas that wait or run: the leader repeats itself.
    pending: Mutex<BTreeSet<u64>>,
    verdicts: Outbox<v1::Verdict>,
}

impl Inspector {
    /// Starts the task; it ends when this is dropped.
    pub(crate) fn new(life: Arc<Life>, metrics: Arc<Metrics>, limit: usize) -> Inspector {
        let limit = limit.max(1);
        let (queue, mut commands) = mpsc::channel::<v1::VerifyReplica>(limit);
        let shared = Arc::new(Shared { pending: Mutex::default(), verdicts: Outbox::default() });
        let worker = shared.clone();
        tokio::spawn(async move {
            while let Some(command) = commands.recv().await {
                let replica = command.replica_id;
                let (life, metrics) = (life.clone(), metrics.clone());
                let inspected = tokio::task::spawn_blocking(move || inspect(&life, &metrics, &command)).await;
                worker.pending.lock().remove(&replica);
                match inspected {
                    Ok(Some(verdict)) => worker.verdicts.add(verdict.replica_id, verdict),
                    Ok(None) => {}
                    Err(error) => tracing::error!(replica, %error, "inspection failed"),
                }
            }
        });
        Inspector { queue, shared, limit }
    }

    /// Queues an inspection, unless it is queued already or the queue is full; the leader repeats what it gets no verdict for.
    pub(crate) fn inspect(&self, command: v1::VerifyReplica) {
        let replica = command.replica_id;
        if self.shared.verdicts.len() >= self.limit || !self.shared.pending.lock().insert(replica) {
            return;
        }
        if self.queue.try_send(command).is_err() {
            self.shared.pending.lock().remove(&replica);
            tracing::warn!(replica, limit = self.limit, "too many inspections wait; the leader will ask again");
        }
    }

    pub(crate) fn verdicts(&self) -> &Outbox<v1::Verdict> {
        &self.shared.verdicts
    }
}

/// None when the question cannot be answered now and should come again.
pub(crate) fn inspect(life: &Life, metrics: &Metrics, command: &v1::VerifyReplica) -> Option<v1::Verdict> {
    let started = Instant::now();
    let result = match verify(life, command) {
        Err(NotIntact::Later) => return None,
        Err(NotIntact::Corrupt(error)) => Err(error),
        Ok(()) => Ok(()),
    };
    metrics.verified_on_command(command.length, started.elapsed());
    let verdict = v1::Verdict {
        object_id: command.object_id,
        replica_id: command.replica_id,
        intact: result.is_ok(),
        message: result.as_ref().err().map(Error::to_string).unwrap_or_default(),
    };
    if let Err(error) = result {
        metrics.verification_failed();
        tracing::warn!(object = %ObjectId(command.object_id), %error, "a stored object is not intact");
    }
    Some(verdict)
}

/// Why an inspection did not find an intact object.
enum NotIntact {
    Corrupt(Error),
    Later,
}

fn verify(life: &Life, command: &v1::VerifyReplica) -> Result<(), NotIntact> {
    let segment_id = SegmentId(command.segment_id);
    let outside = |what: &str| {
        let (offset, length) = (command.offset, command.length);
        NotIntact::Corrupt(Error::new(ErrorCode::OutOfBounds, format!("{length} bytes at {offset}: {what}")))
    };
    let segment = life.segments().get(&segment_id).ok_or_else(|| outside("no such segment is mounted here"))?;
    if command.length == 0 || segment.address(command.offset, command.length).is_none() {
        return Err(outside("outside the segment"));
    }
    // While another grant fills the range there is nothing to judge: either it is this replica's own, or the leader's question is old.
    let hold = life
        .writes()
        .hold_for_verification(segment_id, command.offset, command.length)
        .map_err(|_| NotIntact::Later)?;
    let expected = Expected {
        history: life.history_of(command.history),
        object: ObjectId(command.object_id),
        stored_bytes: command.length,
    };
    let mut verifier = Verifier::new(expected);
    let mut arrived = 0;
    while arrived < command.length {
        if life.is_over() {
            return Err(NotIntact::Later);
        }
        arrived = (arrived + STEP_BYTES).min(command.length);
        let step = |bytes: &[u8]| {
            if arrived == command.length { verifier.complete(bytes) } else { verifier.advance(bytes) }
        };
        match segment.look(hold.claim(), arrived, step) {
            Some(checked) => checked.map_err(NotIntact::Corrupt)?,
            // Its content was given back since the life was looked at.
            None if life.is_over() => return Err(NotIntact::Later),
            None => return Err(outside("outside the segment")),
        }
    }
    // The content may have been dropped under the last step.
    if life.is_over() { Err(NotIntact::Later) } else { Ok(()) }
}
