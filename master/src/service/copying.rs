//! Copies under way: what their datanodes are told, what they report, and which are given up (N2).
//!
//! A datanode makes a copy as a reader would: it reads a listed replica under a lease that the leader takes out for it,
//! verifies the bytes, and proves that it stored them. It is told again in every beat until it has reported.

use std::sync::Arc;

use tidepool_proto::capability::{Capability, Verb};
use tidepool_proto::{Error, Incarnation, LogTime, NodeId, ReplicaId, v1};

use super::core::{Service, unexpected};
use super::leases::{Granted, LeaseTerms};
use super::puts::grant_valid_ms;
use super::tenure::Tenure;
use crate::directory::limits::COPIES_MAX;
use crate::directory::{CopyView, Op, Outcome, ReplicaEnd};

/// Copies that one datanode is told of in one beat.
const ORDERS_PER_BEAT: usize = 64;
/// Lease on what is copied; renewed by every beat.
const SOURCE_LEASE_MS: u64 = 5_000;
/// The leader's own account of leases; no session has this number.
const OWN_ACCOUNT: u64 = u64::MAX;

/// What a datanode is to copy.
pub fn orders(service: &Service, tenure: &Tenure, node: NodeId) -> Vec<v1::CopyOrder> {
    let copies = service.directory().copies(None, COPIES_MAX).into_iter().filter(|copy| copy.node == node);
    copies.take(ORDERS_PER_BEAT).filter_map(|copy| order(service, tenure, &copy)).collect()
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
pub fn ends(service: &Service, node: NodeId, life: Incarnation, reports: &[v1::CopyReport]) -> Vec<Op<'static>> {
    let mut ops = Vec::new();
    for report in reports {
        let replica = ReplicaId(report.replica_id);
        let Some(copy) = service.directory().copies(replica.0.checked_sub(1).map(ReplicaId), 1).pop() else { continue };
        if copy.replica != replica || copy.node != node || copy.incarnation != life {
            continue;
        }
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
    let now = tenure.log_time();
    let late = service.directory().copies(None, COPIES_MAX).into_iter();
    let late = late.filter(|copy| expires(service, copy) <= now);
    let ops: Vec<Op<'_>> = late.map(|copy| Op::CopyEnd { replica: copy.replica, end: ReplicaEnd::Unknown }).collect();
    if ops.is_empty() {
        return Ok(());
    }
    service.metrics().copies.with_label_values(&["given_up"]).inc_by(ops.len() as u64);
    for outcome in tenure.proposer.propose(&ops, None).await? {
        match outcome {
            Outcome::CopyEnded { .. } | Outcome::Refused(_) => {}
            other => return Err(unexpected("copy_end", &other)),
        }
    }
    Ok(())
}
