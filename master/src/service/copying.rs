//! Copies under way: what their datanodes are told, what they report, and which are given up (N2).
//!
//! A datanode makes a copy as a reader would: it reads a listed replica under a lease that the leader takes out for it,
//! verifies the bytes, and proves that it stored them. It is told as soon as the copy has started, and again in its beats
//! until it has reported.

use std::collections::BTreeSet;
use std::sync::Arc;

use tidepool_proto::capability::{Capability, Verb};
use tidepool_proto::{Error, Incarnation, LogTime, NodeId, ReplicaId, v1};

use super::core::{Service, unexpected};
use super::leases::{Granted, LeaseTerms};
use super::puts::grant_valid_ms;
use super::tenure::Tenure;
use crate::directory::limits::COPIES_MAX;
use crate::directory::{CopyStart, CopyView, Op, Outcome, ReplicaEnd};

/// Copies that one datanode is told of in one message.
const ORDERS_PER_MESSAGE: usize = 256;
/// Copies given up in one round.
const GIVEN_UP_PER_ROUND: usize = 256;
/// How long it is told only of what is new before it is told of everything again.
const TELL_AGAIN_MS: u64 = 100;
/// Lease on what is copied; renewed by every beat.
const SOURCE_LEASE_MS: u64 = 5_000;
/// The leader's own account of leases; no session has this number.
const OWN_ACCOUNT: u64 = u64::MAX;

/// Starts copies in one proposal; an answer each. Their datanodes are told at once.
pub async fn start(service: &Service, tenure: &Tenure, copies: &[CopyStart]) -> Result<Vec<Result<(), Error>>, Error> {
    if copies.is_empty() {
        return Ok(Vec::new());
    }
    let ops: Vec<Op<'_>> = copies.iter().cloned().map(Op::CopyStart).collect();
    let (mut answers, mut nodes) = (Vec::with_capacity(copies.len()), BTreeSet::new());
    for outcome in tenure.proposer.propose(&ops, None).await? {
        answers.push(match outcome {
            Outcome::CopyGranted(granted) => {
                nodes.insert(granted.node);
                Ok(())
            }
            Outcome::Refused(error) => Err(error),
            other => return Err(unexpected("copy_start", &other)),
        });
    }
    let started = answers.iter().filter(|answer| answer.is_ok()).count() as u64;
    service.metrics().copies.with_label_values(&["started"]).inc_by(started);
    nodes.into_iter().for_each(|node| tenure.nodes.wake(node));
    Ok(answers)
}

/// What one conversation with a datanode has told it of.
#[derive(Default)]
pub struct Told {
    replicas: BTreeSet<ReplicaId>,
    /// What it said that it could not make: said again before the end is in the log, it counts once.
    failed: BTreeSet<ReplicaId>,
    all_ms: u64,
}

impl Told {
    /// What is to be told in answer to a beat: everything, or soon after that what is new; but not what the beat reports,
    /// whose end may not be in the log yet.
    pub fn in_answer(
        &mut self,
        service: &Service,
        tenure: &Tenure,
        node: NodeId,
        reports: &[v1::CopyReport],
    ) -> Vec<v1::CopyOrder> {
        if tenure.now_ms().saturating_sub(self.all_ms) >= TELL_AGAIN_MS {
            self.all_ms = tenure.now_ms();
            self.replicas.clear();
        }
        self.replicas.extend(reports.iter().map(|report| ReplicaId(report.replica_id)));
        self.fresh(service, tenure, node)
    }

    /// What it was not told yet.
    pub fn fresh(&mut self, service: &Service, tenure: &Tenure, node: NodeId) -> Vec<v1::CopyOrder> {
        let copies = service.directory().copies_to_node(node, None, COPIES_MAX);
        let open: BTreeSet<ReplicaId> = copies.iter().map(|copy| copy.replica).collect();
        self.replicas.retain(|replica| open.contains(replica));
        self.failed.retain(|replica| open.contains(replica));
        let new = copies.iter().filter(|copy| !self.replicas.contains(&copy.replica)).take(ORDERS_PER_MESSAGE);
        let orders: Vec<v1::CopyOrder> = new.filter_map(|copy| order(service, tenure, copy)).collect();
        self.replicas.extend(orders.iter().filter_map(|o| Some(ReplicaId(o.target.as_ref()?.replica_id))));
        orders
    }
}

fn order(service: &Service, tenure: &Tenure, copy: &CopyView) -> Option<v1::CopyOrder> {
    let log_time = tenure.log_time();
    let expires = expires(service, copy);
    let remaining_ms = expires.0.checked_sub(log_time.0).filter(|&left| left > 0)?;
    let lease = LeaseTerms {
        now_ms: tenure.now_ms(),
        ttl_ms: SOURCE_LEASE_MS.min(service.lease_ttl_max().as_millis() as u64),
        bytes_max: u64::MAX,
        client_bytes_max: u64::MAX,
        client: OWN_ACCOUNT,
        client_bytes: tenure.leases.client_bytes(OWN_ACCOUNT),
        segments: Default::default(),
    };
    // The closure runs under the shard's lock and must not call the directory.
    let (source, length) = service.directory().with_object_id(copy.object, |view| {
        let view = view?;
        let going = view.listed().find(|place| Some(place.replica) == copy.instead_of);
        let source = *going.or_else(|| view.listed().next())?;
        // A mark means that its space is being reclaimed: told again in the next beat, if it is still there.
        (tenure.leases.grant(copy.object, source.length, &lease) == Granted::Lease).then_some((source, view.length))
    })?;
    let (secret, history) = (service.secret(), service.history());
    let read = Capability {
        verb: Verb::Read,
        object: copy.object,
        replica: source.replica,
        segment: source.segment,
        incarnation: source.incarnation,
        node: source.node,
        offset: source.offset,
        length: source.length,
        expires: LogTime(log_time.0 + remaining_ms),
    };
    Some(v1::CopyOrder {
        task_id: copy.task.0,
        object_id: copy.object.0,
        source: Some(read.to_replica(&secret, history)),
        source_address: service.directory().node(source.node)?.address.to_string(),
        target: Some(write_capability(copy, Verb::Write, source.length, expires).to_replica(&secret, history)),
        length,
        remaining_ms,
        history: Service::history_on_wire(&service.directory().ancestors(), copy.object.op()),
    })
}

/// A copy may be written until it may be given up.
fn expires(service: &Service, copy: &CopyView) -> LogTime {
    LogTime(copy.started.0 + grant_valid_ms(service))
}

fn write_capability(copy: &CopyView, verb: Verb, length: u64, expires: LogTime) -> Capability {
    Capability {
        verb,
        object: copy.object,
        replica: copy.replica,
        segment: copy.segment,
        incarnation: copy.incarnation,
        node: copy.node,
        offset: copy.offset,
        length,
        expires,
    }
}

/// What a datanode's reports come to. A report without its proof counts as none: the copy is given up in time.
pub fn ends(
    service: &Service,
    tenure: &Tenure,
    told: &mut Told,
    (node, life): (NodeId, Incarnation),
    reports: &[v1::CopyReport],
) -> Vec<Op<'static>> {
    let mut ops = Vec::new();
    for report in reports {
        let replica = ReplicaId(report.replica_id);
        let copy = service.directory().copy(replica).filter(|copy| copy.node == node && copy.incarnation == life);
        let Some(copy) = copy else { continue };
        let (verb, end) = match v1::ReplicaOutcome::try_from(report.outcome) {
            Ok(v1::ReplicaOutcome::Stored) => (Verb::Stored, ReplicaEnd::Stored),
            Ok(v1::ReplicaOutcome::Aborted) => (Verb::Aborted, ReplicaEnd::Aborted),
            _ => continue,
        };
        let stored = tidepool_proto::object::stored_bytes;
        let length = service.directory().with_object_id(copy.object, |view| view.map(|view| stored(view.length)));
        let Some(length) = length else { continue };
        let claim = write_capability(&copy, verb, length, expires(service, &copy));
        if !claim.verify(&service.secret(), service.history(), &report.proof) {
            tracing::warn!(node = node.0, %replica, "a copy was reported without its proof");
            continue;
        }
        if end == ReplicaEnd::Aborted {
            tracing::warn!(node = node.0, object = %copy.object, why = report.message, "a copy failed");
            if told.failed.insert(replica) {
                tenure.attempts.copy_failed(&copy, &report.message, tenure.now_ms());
            }
        }
        service
            .metrics()
            .copies
            .with_label_values(&[if end == ReplicaEnd::Stored { "stored" } else { "aborted" }])
            .inc();
        ops.push(Op::CopyEnd { replica, end });
    }
    ops
}

/// Gives up copies that were not reported in time; their space waits for the datanodes' fences (W5).
pub async fn give_up(service: &Arc<Service>, tenure: &Tenure) -> Result<(), Error> {
    let Some(started_by) = tenure.log_time().0.checked_sub(grant_valid_ms(service)) else { return Ok(()) };
    let late = service.directory().copies_started_by(LogTime(started_by), GIVEN_UP_PER_ROUND);
    if late.is_empty() {
        return Ok(());
    }
    late.iter()
        .for_each(|copy| tenure.attempts.copy_failed(copy, "the datanode did not report in time", tenure.now_ms()));
    let end = |copy: &CopyView| Op::CopyEnd { replica: copy.replica, end: ReplicaEnd::Unknown };
    let ops: Vec<Op<'_>> = late.iter().map(end).collect();
    service.metrics().copies.with_label_values(&["given_up"]).inc_by(ops.len() as u64);
    for outcome in tenure.proposer.propose(&ops, None).await? {
        match outcome {
            Outcome::CopyEnded { .. } | Outcome::Refused(_) => {}
            other => return Err(unexpected("copy_end", &other)),
        }
    }
    Ok(())
}
