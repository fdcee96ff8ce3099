//! A datanode on a simulated machine: the memory, write table, grants, fences and verification of production, without
//! sockets and threads. The simulation brings the bytes, the beats and their answers.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tidepool_proto::clock::BootInstant;
use tidepool_proto::{ClusterId, Error, ErrorCode, History, Incarnation, LogTime, NodeId, ReplicaId, SegmentId, v1};
use tidepool_transport::{Memory, ReadAccess, WriteAccess, WriteOutcome, WriteReply, WriteTicket};

use crate::inspection::inspect;
use crate::life::{Life, Registration};
use crate::log_clock::LogClock;
use crate::metrics::Metrics;
use crate::options::HugePages;
use crate::outbox::Outbox;
use crate::payload::Payload;
use crate::presence;
use crate::registration::wire_identity;
use crate::segment::Segment;
use crate::succession::{Legacy, Lineage, Successor};
use crate::writes::{WriteLimits, WriteTable};

/// Messages of one kind that one beat carries at most.
const PER_BEAT_MAX: usize = 1_024;

/// One process of a datanode.
pub struct SimulatedDatanode {
    payload: Payload,
    metrics: Arc<Metrics>,
    segments: Mutex<Vec<Arc<Segment>>>,
    lineage: Mutex<Lineage>,
    /// What the life before left, when its cluster goes on in another one.
    legacy: Mutex<Option<Legacy>>,
    verdicts: Outbox<v1::Verdict>,
    copies: Outbox<v1::CopyReport>,
    presence: Outbox<v1::PresenceAnswer>,
}

impl SimulatedDatanode {
    /// With memory of these names and sizes.
    pub fn new(segments: &[(&str, u64)]) -> Result<SimulatedDatanode, Error> {
        let internal = |error: &dyn std::fmt::Display| Error::new(ErrorCode::Internal, error.to_string());
        let metrics = Arc::new(Metrics::new().map_err(|e| internal(&e))?);
        let create = |&(name, bytes): &(&str, u64)| Segment::create(name, bytes, HugePages::Off).map(Arc::new);
        let segments: Result<Vec<_>, _> = segments.iter().map(create).collect();
        Ok(SimulatedDatanode {
            payload: Payload::new(metrics.clone()),
            metrics,
            segments: Mutex::new(segments.map_err(|e| internal(&e))?),
            lineage: Mutex::default(),
            legacy: Mutex::default(),
            verdicts: Outbox::default(),
            copies: Outbox::default(),
            presence: Outbox::default(),
        })
    }

    /// What it mounts.
    pub fn mounts(&self) -> Vec<v1::MountSegment> {
        let segments = self.segments.lock();
        segments.iter().map(|s| v1::MountSegment { name: s.name().to_owned(), bytes: s.bytes() }).collect()
    }

    /// Whom to register with, and as which process: the cluster that is followed and the process that was known there, or anybody
    /// and one that `fresh` names.
    pub fn introduces_itself(&self, fresh: [u8; 16]) -> (v1::Identity, [u8; 16]) {
        let legacy = self.legacy.lock();
        let followed = legacy.as_ref().map(|legacy| legacy.successor.cluster);
        let process = legacy.as_ref().and_then(Legacy::process_uuid).unwrap_or(fresh);
        (wire_identity(followed, History(0), NodeId(0)), process)
    }

    /// Whether a master of this identity speaks for the history that is served.
    pub fn is_of(&self, identity: &v1::Identity) -> bool {
        self.life().is_some_and(|life| {
            let own = life.registration();
            identity.cluster_uuid[..] == own.cluster.0 && identity.history == own.history.0
        })
    }

    /// Whether a master of this identity goes on from a cluster and history that this node was in.
    pub fn is_succeeded_by(&self, identity: &v1::Identity) -> bool {
        Successor::of(&self.lineage.lock(), identity).is_some()
    }

    /// Ends the life that is served and keeps what is stored, for the cluster of this identity: as in production, nothing of the old
    /// life writes any more when this returns.
    pub async fn follow(&self, identity: &v1::Identity) {
        let Some(successor) = Successor::of(&self.lineage.lock(), identity) else { return };
        let (before, earlier) = (self.payload.replace(None), self.legacy.lock().take());
        let left = match (before, earlier) {
            (None, Some(earlier)) => earlier.goes_on_in(successor),
            (before, _) => Legacy::of(before, successor).await,
        };
        *self.legacy.lock() = Some(left);
    }

    /// Keeps what is stored if the directory knows the life that stored it, or begins with nothing.
    fn inherit(&self, now: &Registration) -> Result<(), Error> {
        let Some(legacy) = self.legacy.lock().take() else { return Ok(()) };
        legacy.assert_quiet();
        if legacy.is_continued_by(now) || !legacy.has_content() {
            return Ok(());
        }
        legacy.drop_content();
        let mut segments = self.segments.lock();
        let anew = |s: &Arc<Segment>| Segment::create(s.name(), s.bytes(), HugePages::Off).map(Arc::new);
        let fresh: Result<Vec<_>, _> = segments.iter().map(anew).collect();
        *segments = fresh.map_err(|error| Error::new(ErrorCode::Internal, error.to_string()))?;
        Ok(())
    }

    /// Begins to serve what the leader registered, under this process number, and mounted. False: the answers do not fit together.
    pub fn live(&self, process_uuid: [u8; 16], answer: &v1::RegisterResponse, mounted: &[v1::MountedSegment]) -> bool {
        let Some(identity) = &answer.identity else { return false };
        let Ok(cluster) = <[u8; 16]>::try_from(&identity.cluster_uuid[..]) else { return false };
        let Ok(secret) = <[u8; 32]>::try_from(&answer.cluster_secret[..]) else { return false };
        if mounted.len() != self.segments.lock().len() || mounted.iter().any(|m| m.error.is_some()) {
            return false;
        }
        let lineage = self.lineage.lock().and_now(ClusterId(cluster), History(identity.history));
        let registration = Registration {
            cluster: ClusterId(cluster),
            history: History(identity.history),
            node: NodeId(answer.node_id),
            incarnation: Incarnation(answer.incarnation),
            secret: tidepool_proto::capability::Secret(secret),
            heartbeat_interval: Duration::from_millis(u64::from(answer.heartbeat_interval_ms)),
            registered_in: History(match answer.registered_history {
                0 => identity.history,
                earlier => earlier,
            }),
            process_uuid,
            lineage: lineage.clone(),
        };
        *self.lineage.lock() = lineage;
        if self.inherit(&registration).is_err() {
            return false;
        }
        let clock = LogClock::new(LogTime(answer.log_time_ms), BootInstant::now());
        let writes = Arc::new(WriteTable::new(WriteLimits::default(), clock));
        let segments: HashMap<_, _> =
            mounted.iter().map(|m| SegmentId(m.segment_id)).zip(self.segments.lock().iter().cloned()).collect();
        self.payload.replace(Some(Arc::new(Life::new(registration, segments, writes))));
        true
    }

    /// A life, if one is served.
    fn life(&self) -> Option<Arc<Life>> {
        self.payload.life()
    }

    /// Ends the life that is served.
    pub fn end(&self) {
        if let Some(life) = self.payload.replace(None) {
            life.writes().abort_all();
        }
    }

    /// The next beat; none: nothing is registered.
    pub fn beat(&self, sequence: u64) -> Option<v1::HeartbeatRequest> {
        let life = self.life()?;
        let known = life.registration();
        Some(v1::HeartbeatRequest {
            node_id: known.node.0,
            incarnation: known.incarnation.0,
            history: known.history.0,
            sequence,
            fenced_replicas: life.writes().take_acknowledgements(sequence, PER_BEAT_MAX),
            verdicts: self.verdicts.take(sequence, PER_BEAT_MAX),
            identity: Some(wire_identity(Some(known.cluster), known.history, known.node)),
            copies: self.copies.take(sequence, PER_BEAT_MAX),
            presence: self.presence.take(sequence, 1).pop(),
        })
    }

    /// The stream to the leader broke: what it may not have heard is said again.
    pub fn lost_leader(&self) {
        let Some(life) = self.life() else { return };
        life.writes().acknowledgements_lost();
        self.verdicts.lost();
        self.copies.lost();
        self.presence.lost();
        life.writes().clock().lost();
    }

    /// Does what an answer says; answers the copies that are to be made. None: the answer is of a leader of the past.
    pub fn obey(&self, answer: v1::HeartbeatResponse) -> Option<Vec<v1::CopyOrder>> {
        let life = self.life()?;
        let (writes, log_time) = (life.writes(), LogTime(answer.log_time_ms));
        if !writes.observe(answer.term, log_time, BootInstant::now()) {
            return None;
        }
        writes.acknowledgements_arrived(answer.sequence);
        self.verdicts.arrived(answer.sequence);
        self.copies.arrived(answer.sequence);
        self.presence.arrived(answer.sequence);
        let fenced: Vec<ReplicaId> = answer.fence_replicas.iter().map(|&id| ReplicaId(id)).collect();
        writes.fence(&fenced, log_time);
        for command in answer.verify {
            if let Some(verdict) = inspect(&life, &self.metrics, &command) {
                self.verdicts.add(verdict.replica_id, verdict);
            }
        }
        if let Some(answer) = answer.presence.and_then(|query| presence::check(&life, answer.term, &query)) {
            self.presence.add(0, answer);
        }
        Some(answer.copy)
    }

    /// Opens an extent for its one writer.
    pub fn write(&self, access: &WriteAccess, history: u64) -> Result<Box<dyn WriteTicket>, Error> {
        self.payload.begin_write_of(access, history)
    }

    /// Reads.
    pub fn read(&self, access: &ReadAccess) -> Result<Vec<u8>, Error> {
        let guard = self.payload.read(access)?;
        Ok(crate::segment::copy_out(&guard))
    }

    /// A copy ended.
    pub fn copied(&self, order: &v1::CopyOrder, reply: WriteReply) {
        let Some(replica) = order.target.as_ref().map(|target| target.replica_id) else { return };
        let outcome = match reply.outcome {
            WriteOutcome::Stored => v1::ReplicaOutcome::Stored,
            WriteOutcome::Aborted => v1::ReplicaOutcome::Aborted,
        };
        let report = v1::CopyReport {
            task_id: order.task_id,
            replica_id: replica,
            outcome: outcome as i32,
            proof: reply.proof.to_vec().into(),
            message: reply.error.map(|error| error.to_string()).unwrap_or_default(),
        };
        self.copies.add(replica, report);
    }

    /// Writes that are open.
    pub fn open_writes(&self) -> usize {
        self.life().map_or(0, |life| life.writes().figures().open)
    }

    /// Flips one bit of its memory, as a bad chip would.
    pub fn flip_bit(&self, segment: usize, bit: u64) {
        if let Some(segment) = self.segments.lock().get(segment) {
            segment.flip_bit(bit % (segment.bytes() * 8));
        }
    }
}
