//! The write path's second half at the leader: PutEnd with proofs checked (W3), PutRevoke.

use std::sync::Arc;

use tidepool_proto::capability::{Capability, Verb};
use tidepool_proto::{Error, ErrorCode, LogTime, ObjectId, ReplicaId, planted, v1};
use tidepool_raft::rt;

use super::core::{Service, unexpected};
use super::puts::grant_valid_ms;
use super::requests::{check_count, check_session, count};
use crate::directory::{Op, Outcome, PutEnd, ReplicaEnd, ReplicaStatus, SessionId, Statuses};

/// Ends a batch of puts.
pub async fn end(
    service: &Arc<Service>,
    items: &[v1::PutEndItem],
    session: SessionId,
) -> Result<v1::PutEndResponse, Error> {
    let tenure = service.tenure()?;
    let began = rt::now();
    let (ops, positions, mut results) = ending(service, items, session, Op::PutEnd)?;
    if planted!(LostWrite) {
        return Ok(v1::PutEndResponse { results });
    }
    let outcomes = tenure.proposer.propose(&ops, None).await?;
    for (i, outcome) in positions.into_iter().zip(outcomes) {
        results[i] = match outcome {
            Outcome::Ended { copies, .. } => v1::PutEndResult { error: None, copies },
            Outcome::Refused(error) | Outcome::PutDropped(error) => failed_end(&error, i),
            other => return Err(unexpected("put_end", &other)),
        };
    }
    service.metrics().commit_seconds.observe(rt::since(began).as_secs_f64());
    count(service, "put_end", results.iter().map(|r| r.error.as_ref()));
    Ok(v1::PutEndResponse { results })
}

/// Gives a batch of grants back.
pub async fn revoke(
    service: &Arc<Service>,
    items: &[v1::PutEndItem],
    session: SessionId,
) -> Result<v1::PutRevokeResponse, Error> {
    let tenure = service.tenure()?;
    let (ops, positions, mut results) = ending(service, items, session, Op::PutRevoke)?;
    let outcomes = tenure.proposer.propose(&ops, None).await?;
    for (i, outcome) in positions.into_iter().zip(outcomes) {
        match outcome {
            Outcome::Revoked => {}
            Outcome::Refused(error) => results[i] = failed_end(&error, i),
            other => return Err(unexpected("put_revoke", &other)),
        }
    }
    count(service, "put_revoke", results.iter().map(|r| r.error.as_ref()));
    Ok(v1::PutRevokeResponse { errors: results.into_iter().filter_map(|r| r.error).collect() })
}

fn failed_end(error: &Error, index: usize) -> v1::PutEndResult {
    v1::PutEndResult { error: Some(error.for_item(index)), copies: 0 }
}

/// Ops of a batch of ends or revocations, with the positions of the items they stand for; the others have failed here.
#[allow(clippy::type_complexity)]
fn ending(
    service: &Service,
    items: &[v1::PutEndItem],
    session: SessionId,
    op: fn(PutEnd) -> Op<'static>,
) -> Result<(Vec<Op<'static>>, Vec<usize>, Vec<v1::PutEndResult>), Error> {
    check_session(session)?;
    check_count(items.len())?;
    let mut results = vec![v1::PutEndResult::default(); items.len()];
    let (mut ops, mut positions) = (Vec::with_capacity(items.len()), Vec::with_capacity(items.len()));
    for (i, item) in items.iter().enumerate() {
        match statuses(service, item) {
            Ok(replicas) => {
                ops.push(op(PutEnd { session, object: ObjectId(item.object_id), replicas }));
                positions.push(i);
            }
            Err(error) => results[i] = failed_end(&error, i),
        }
    }
    Ok((ops, positions, results))
}

/// Checks the datanodes' proofs (W3): a status without its proof counts as no answer, a wrong proof is refused.
fn statuses(service: &Service, item: &v1::PutEndItem) -> Result<Statuses, Error> {
    let object = ObjectId(item.object_id);
    let (secret, history) = (service.secret(), service.history());
    let valid_ms = grant_valid_ms(service);
    // The closure runs under the shard's lock and must not call the directory.
    service.directory().with_object_id(object, |view| {
        let Some(view) = view else {
            // Gone: the op itself answers GRANT_LOST, by the log.
            return Ok(Statuses::new());
        };
        let expires = LogTime(view.started.0 + valid_ms);
        let mut statuses = Statuses::new();
        for status in &item.replicas {
            let replica = ReplicaId(status.replica_id);
            let verb = match v1::ReplicaOutcome::try_from(status.outcome) {
                Ok(v1::ReplicaOutcome::Stored) => Verb::Stored,
                Ok(v1::ReplicaOutcome::Aborted) => Verb::Aborted,
                _ => {
                    statuses.push(ReplicaStatus { replica, end: ReplicaEnd::Unknown });
                    continue;
                }
            };
            let Some(place) = view.replicas.iter().find(|r| r.replica == replica) else {
                // Its segment went meanwhile; the op decides what that means.
                statuses.push(ReplicaStatus { replica, end: ReplicaEnd::Unknown });
                continue;
            };
            let claim = Capability {
                verb,
                object,
                replica,
                segment: place.segment,
                incarnation: place.incarnation,
                node: place.node,
                offset: place.offset,
                length: place.length,
                expires,
            };
            if !claim.verify(&secret, history, &status.proof) {
                return Err(Error::new(
                    ErrorCode::CapabilityRefused,
                    format!("object {object}: the proof of replica {replica} is not datanode {}'s", place.node),
                ));
            }
            let end = if verb == Verb::Stored { ReplicaEnd::Stored } else { ReplicaEnd::Aborted };
            statuses.push(ReplicaStatus { replica, end });
        }
        Ok(statuses)
    })
}
