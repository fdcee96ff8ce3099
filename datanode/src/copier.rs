//! Copies on the leader's word (N2): reads an object from another datanode as any reader would, and writes it here as any
//! writer would: with a grant, verified, fenced like a put. The proof of the end goes to the leader in a beat.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tidepool_proto::{Address, Error, ErrorCode, Incarnation, NodeId, v1};
use tidepool_transport::tcp::{DataIdentity, TcpEngine, TcpOptions};
use tidepool_transport::{Buffer, Engine, ReadAccess, ReadItem, WriteAccess, WriteOutcome, WriteReply, WriteTicket};
use tokio::sync::Semaphore;

use crate::life::Life;
use crate::metrics::Metrics;
use crate::outbox::Outbox;
use crate::payload::Payload;

/// Bytes asked of the source at once.
const CHUNK_BYTES: u64 = 4 << 20;
/// Bytes written between two looks at whether the copy was fenced.
const STEP_BYTES: usize = 256 << 10;
/// Connections to one source.
const STRIPES: usize = 1;
/// Reports remembered after they were sent: the leader asks again when one was lost.
const REPORTS_KEPT: usize = 4_096;

/// Makes copies, a few at a time, and keeps their reports until the leader has them.
pub(crate) struct Copier {
    shared: Arc<Shared>,
}

struct Shared {
    life: Arc<Life>,
    payload: Arc<Payload>,
    metrics: Arc<Metrics>,
    /// Made when the first copy is asked for.
    engine: Mutex<Option<Arc<TcpEngine>>>,
    places: Semaphore,
    /// Copies that wait or run: the leader repeats itself.
    pending: Mutex<BTreeSet<u64>>,
    reports: Outbox<v1::CopyReport>,
    /// How the last copies ended, by replica.
    ended: Mutex<BTreeMap<u64, v1::CopyReport>>,
}

impl Copier {
    pub(crate) fn new(life: Arc<Life>, payload: Arc<Payload>, metrics: Arc<Metrics>, copies_max: usize) -> Copier {
        let shared = Shared {
            life,
            payload,
            metrics,
            engine: Mutex::new(None),
            places: Semaphore::new(copies_max.max(1)),
            pending: Mutex::default(),
            reports: Outbox::default(),
            ended: Mutex::default(),
        };
        Copier { shared: Arc::new(shared) }
    }

    pub(crate) fn reports(&self) -> &Outbox<v1::CopyReport> {
        &self.shared.reports
    }

    /// Makes a copy, unless it is being made already. One that has ended is reported again: its report was lost.
    pub(crate) fn copy(&self, order: v1::CopyOrder) {
        let Some(replica) = order.target.as_ref().map(|target| target.replica_id) else { return };
        if let Some(report) = self.shared.ended.lock().get(&replica) {
            self.shared.reports.add(replica, report.clone());
            return;
        }
        if !self.shared.pending.lock().insert(replica) {
            return;
        }
        let shared = self.shared.clone();
        let deadline = Instant::now() + Duration::from_millis(order.remaining_ms);
        tokio::spawn(async move {
            let work = async {
                if let Ok(Ok(_place)) = tokio::time::timeout_at(deadline.into(), shared.places.acquire()).await {
                    shared.carry_out(replica, &order, deadline).await;
                }
            };
            // With its life a copy ends where it stands, also in a read that waits: dropped, it writes no more.
            tokio::select! {
                () = shared.life.ended() => {}
                () = work => {}
            }
            shared.pending.lock().remove(&replica);
        });
    }
}

impl Shared {
    async fn carry_out(&self, replica: u64, order: &v1::CopyOrder, deadline: Instant) {
        let (Some(source), Some(target)) = (&order.source, &order.target) else { return };
        let write = WriteAccess { object_id: order.object_id, replica: target.clone(), length: target.length };
        let mut ticket = match self.payload.begin_write_of(&write, order.history) {
            Ok(ticket) => ticket,
            Err(error) => {
                // Nothing was opened, so there is nothing to prove: the leader gives the copy up in time.
                tracing::warn!(replica, %error, "a copy was not begun");
                return;
            }
        };
        let filled = self.fill(ticket.as_mut(), order.object_id, source, &order.source_address, deadline).await;
        if let Err(error) = &filled {
            tracing::warn!(replica, source = order.source_address, %error, "a copy failed");
        }
        let WriteReply { outcome, error, proof } = ticket.finish(filled.is_ok());
        let outcome = match outcome {
            WriteOutcome::Stored => v1::ReplicaOutcome::Stored,
            WriteOutcome::Aborted => v1::ReplicaOutcome::Aborted,
        };
        self.metrics
            .copies
            .with_label_values(&[if outcome == v1::ReplicaOutcome::Stored { "stored" } else { "aborted" }])
            .inc();
        let why = filled.err().or(error).map(|error| error.to_string()).unwrap_or_default();
        let report = v1::CopyReport {
            task_id: order.task_id,
            replica_id: replica,
            outcome: outcome as i32,
            proof: proof.to_vec().into(),
            message: why,
        };
        {
            let mut ended = self.ended.lock();
            ended.insert(replica, report.clone());
            while ended.len() > REPORTS_KEPT {
                ended.pop_first();
            }
        }
        self.reports.add(replica, report);
    }

    /// Fills the extent from the source. The ticket verifies what comes, block by block.
    async fn fill(
        &self,
        ticket: &mut dyn WriteTicket,
        object_id: u64,
        source: &v1::Replica,
        address: &str,
        deadline: Instant,
    ) -> Result<(), Error> {
        let peer: Address = address.parse()?;
        let engine = self.engine();
        let mut at = 0;
        while at < source.length {
            if self.life.is_over() {
                return Err(Error::new(ErrorCode::Fenced, "this incarnation is over"));
            }
            let length = CHUNK_BYTES.min(source.length - at);
            let (buffer, into) = Buffer::zeroed(length as usize);
            let access = ReadAccess { object_id, replica: source.clone(), offset: at, length };
            let items = vec![ReadItem { access, into: vec![into] }];
            let read = engine.read(&peer, items, deadline).await.pop();
            read.unwrap_or_else(|| Err(Error::new(ErrorCode::Internal, "the engine answered nothing")))?;
            let held = |_| Error::new(ErrorCode::Internal, "the engine still holds memory of a read that ended");
            let bytes = buffer.take().map_err(held)?;
            for step in bytes.chunks(STEP_BYTES) {
                ticket.fill(at, step)?;
                at += step.len() as u64;
                tokio::task::yield_now().await;
            }
        }
        Ok(())
    }

    fn engine(&self) -> Arc<TcpEngine> {
        let registration = self.life.registration();
        let make = || {
            let identity = DataIdentity {
                cluster: registration.cluster,
                history: registration.history,
                node: NodeId(0),
                incarnation: Incarnation(0),
            };
            let options = TcpOptions { stripes: STRIPES, io_threads: 1, ..TcpOptions::new(identity) };
            Arc::new(TcpEngine::new(options))
        };
        self.engine.lock().get_or_insert_with(make).clone()
    }
}
