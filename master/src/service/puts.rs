//! The write path at the leader: PutStart with room made inline, PutEnd with proofs checked, PutRevoke.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use smallvec::SmallVec;
use tidepool_proto::capability::{Capability, Verb};
use tidepool_proto::ids::REPLICAS_PER_OBJECT_MAX;
use tidepool_proto::keys::check_key;
use tidepool_proto::object::{OBJECT_BYTES_MAX, extent_bytes};
use tidepool_proto::{Error, ErrorCode, LogTime, NodeId, ObjectId, ReplicaId, v1};

use super::core::{Service, unexpected, uuid};
use super::leases::Marks;
use super::options::BATCH_ITEMS_MAX;
use super::reads::addresses;
use super::room;
use super::tenure::Tenure;
use crate::directory::limits::VICTIMS_PER_OP_MAX;
use crate::directory::{
    Contact, Grant, Op, Outcome, PutEnd, PutStart, ReplicaEnd, ReplicaMode, ReplicaStatus, SessionId, Statuses,
    TenantId, Token,
};

/// Part of the caller's time kept for carrying the answer home.
const ANSWER_ALLOWANCE: Duration = Duration::from_millis(20);
/// Pause before room is looked for again when nothing could be evicted.
const NO_ROOM_PAUSE: Duration = Duration::from_millis(20);

/// Starts a batch of puts. Items that find no space evict and go on, inside the caller's deadline.
pub async fn start(
    service: &Arc<Service>,
    request: &v1::PutStartRequest,
    session: SessionId,
    deadline: Instant,
) -> Result<v1::PutStartResponse, Error> {
    let batch = Batch::check(service, request, session)?;
    let tenure = service.tenure()?;
    let began = Instant::now();
    let mut grants = vec![v1::PutGrant::default(); request.items.len()];
    let mut waiting = Vec::with_capacity(request.items.len());
    for (i, item) in request.items.iter().enumerate() {
        match check_item(item) {
            Ok(token) => waiting.push((i, token)),
            Err(error) => grants[i].error = Some(error.for_item(i)),
        }
    }
    tenure.count_put_bytes(waiting.iter().map(|(i, _)| request.items[*i].length).sum());
    let mut nodes = BTreeSet::new();
    let mut attempt = 0;
    while !waiting.is_empty() {
        let (ops, marks) = batch.ops(service, &tenure, &waiting, attempt);
        let made_room = ops.iter().any(|op| matches!(op, Op::PutStart(p) if !p.victims.is_empty()));
        let outcomes = tenure.proposer.propose(&ops, marks).await?;
        drop(ops);
        let (mut again, mut progress) = (Vec::new(), false);
        for ((i, token), outcome) in waiting.into_iter().zip(outcomes) {
            match outcome {
                Outcome::Granted(grant) => {
                    progress = true;
                    note_evicted(service, &grant);
                    nodes.extend(grant.replicas.iter().map(|r| r.node.0));
                    grants[i] = granted(service, &tenure, &grant);
                }
                Outcome::Refused(error) if lacks_room(&error) => again.push((i, token, error)),
                Outcome::Refused(error) => grants[i].error = Some(error.for_item(i)),
                other => return Err(unexpected("put_start", &other)),
            }
        }
        let out_of_time = Instant::now() + ANSWER_ALLOWANCE + NO_ROOM_PAUSE >= deadline;
        if !again.is_empty() {
            tenure.set_reserve_gone(true);
        }
        if out_of_time || no_room_ever(service, &again, &batch) {
            for (i, _, error) in again.drain(..) {
                grants[i].error = Some(error.retry_after(NO_ROOM_PAUSE.as_millis() as u32).for_item(i));
            }
        }
        if !again.is_empty() && attempt > 0 && !(made_room && progress) {
            tokio::time::sleep(NO_ROOM_PAUSE).await;
        }
        waiting = again.into_iter().map(|(i, token, _)| (i, token)).collect();
        attempt += 1;
    }
    service.metrics().commit_seconds.observe(began.elapsed().as_secs_f64());
    count(service, "put_start", grants.iter().map(|g| g.error.as_ref()));
    Ok(v1::PutStartResponse { grants, nodes: addresses(service, nodes) })
}

/// What all items of a batch share.
struct Batch<'a> {
    request: &'a v1::PutStartRequest,
    session: SessionId,
    replica_num: u8,
    mode: ReplicaMode,
    excluded: SmallVec<[NodeId; 2]>,
}

impl<'a> Batch<'a> {
    fn check(service: &Service, request: &'a v1::PutStartRequest, session: SessionId) -> Result<Batch<'a>, Error> {
        check_session(session)?;
        check_count(request.items.len())?;
        let replica_num = request.replica_num.max(1);
        if replica_num as usize > REPLICAS_PER_OBJECT_MAX {
            return Err(Error::new(
                ErrorCode::InvalidParams,
                format!("replica_num is {replica_num}; the limit is {REPLICAS_PER_OBJECT_MAX}"),
            ));
        }
        let mode = match v1::ReplicaMode::try_from(request.replica_mode) {
            Ok(v1::ReplicaMode::Strict) => ReplicaMode::Strict,
            Ok(v1::ReplicaMode::BestEffort) => ReplicaMode::BestEffort,
            Err(_) => return Err(Error::new(ErrorCode::InvalidParams, "unknown replica mode")),
        };
        let excluded = excluded(service, &request.excluded_nodes);
        Ok(Batch { request, session, replica_num: replica_num as u8, mode, excluded })
    }

    /// Ops for the items still waiting. When free space looks short, or an attempt failed already, victims go with them.
    fn ops(
        &self,
        service: &Service,
        tenure: &Tenure,
        waiting: &[(usize, Token)],
        attempt: usize,
    ) -> (Vec<Op<'a>>, Option<Marks>) {
        let copies = u64::from(self.replica_num);
        let need = |i: usize| extent_bytes(self.request.items[i].length).saturating_mul(copies);
        let total: u64 = waiting.iter().map(|(i, _)| need(*i)).fold(0, u64::saturating_add);
        let free = service.directory().counts().free_bytes;
        let mut room = if attempt > 0 || free < total {
            if free < total {
                tenure.set_reserve_gone(true);
            }
            Some(room::oldest(service, tenure, total))
        } else {
            None
        };
        let mut spare =
            room.as_mut().map(|r| std::mem::take(&mut r.found).into_iter()).into_iter().flatten().peekable();
        let mut ops = Vec::with_capacity(waiting.len());
        let mut neighbour_marks = Vec::new();
        for (i, token) in waiting {
            let (mut victims, mut bytes) = (Vec::new(), 0);
            while bytes < need(*i) {
                let Some(victim) = spare.next() else { break };
                bytes += victim.bytes();
                victims.push(victim.object);
            }
            if attempt > 1 {
                let side_by_side = room::neighbours(service, tenure, self.request.items[*i].length);
                // Neighbours first: they are what a large request needs, and an op names only so many.
                let oldest = std::mem::take(&mut victims);
                victims.extend(side_by_side.found.iter().map(|v| v.object).chain(oldest).take(VICTIMS_PER_OP_MAX));
                neighbour_marks.push(side_by_side.marks);
            }
            let item = &self.request.items[*i];
            ops.push(Op::PutStart(PutStart {
                tenant: TenantId::DEFAULT,
                session: self.session,
                key: &item.key,
                length: item.length,
                token: *token,
                replica_num: self.replica_num,
                mode: self.mode,
                excluded: self.excluded.clone(),
                victims,
            }));
        }
        let mut marks = room.map(|r| r.marks);
        for more in neighbour_marks {
            match &mut marks {
                Some(marks) => marks.absorb(more),
                None => marks = Some(more),
            }
        }
        (ops, marks)
    }
}

fn check_session(session: SessionId) -> Result<(), Error> {
    if session.0 == 0 {
        return Err(Error::new(ErrorCode::SessionUnknown, "no session: say hello first"));
    }
    Ok(())
}

fn check_count(items: usize) -> Result<(), Error> {
    if items == 0 || items > BATCH_ITEMS_MAX {
        return Err(Error::new(
            ErrorCode::InvalidParams,
            format!("{items} items in one call; it takes 1 to {BATCH_ITEMS_MAX}"),
        ));
    }
    Ok(())
}

fn check_item(item: &v1::PutStartItem) -> Result<Token, Error> {
    check_key(&item.key)?;
    if item.length == 0 || item.length > OBJECT_BYTES_MAX {
        let (key, length) = (String::from_utf8_lossy(&item.key), item.length);
        return Err(Error::new(
            ErrorCode::InvalidParams,
            format!("key '{key}' has a value of {length} bytes; it must be 1 to {OBJECT_BYTES_MAX}"),
        ));
    }
    uuid(&item.token, "token")
}

fn lacks_room(error: &Error) -> bool {
    matches!(error.code(), ErrorCode::NoSpace | ErrorCode::NotEnoughReplicas)
}

/// Whether waiting cannot help: no segment is large enough, or there is none at all.
fn no_room_ever(service: &Service, again: &[(usize, Token, Error)], batch: &Batch<'_>) -> bool {
    if again.is_empty() {
        return false;
    }
    let segments = service.directory().segments();
    let eligible = |bytes: u64| {
        let usable = segments.iter().filter(|s| s.contact == Contact::Heard && !batch.excluded.contains(&s.node));
        usable.filter(|s| s.capacity >= bytes).count()
    };
    again.iter().all(|(i, _, error)| {
        let needed = if error.code() == ErrorCode::NotEnoughReplicas { batch.replica_num as usize } else { 1 };
        eligible(extent_bytes(batch.request.items[*i].length)) < needed
    })
}

/// Nodes this client asks to be left out: those it cannot reach. It may be wrong about all of them, so an exclusion that
/// leaves no node to choose is not followed: the client then tries one it suspects, and finds out.
fn excluded(service: &Service, asked: &[u64]) -> SmallVec<[NodeId; 2]> {
    if asked.is_empty() {
        return SmallVec::new();
    }
    let heard = service.directory().nodes().into_iter().filter(|n| n.contact == Contact::Heard && n.segments > 0);
    let leaves_one = heard.into_iter().any(|n| !asked.contains(&n.node.0));
    if leaves_one { asked.iter().map(|&n| NodeId(n)).collect() } else { SmallVec::new() }
}

fn note_evicted(service: &Service, grant: &Grant) {
    if !grant.evicted.is_empty() {
        // What one victim held is not known here; the segment gauges show the bytes.
        room::count_evicted(service, "put", grant.evicted.len() as u64, 0);
    }
}

/// A grant as the client gets it: signed for as long as it cannot be preempted.
fn granted(service: &Service, tenure: &Tenure, grant: &Grant) -> v1::PutGrant {
    let (secret, history) = (service.secret(), service.history());
    let expires = LogTime(grant.started.0 + grant_valid_ms(service));
    let replicas = grant.replicas.iter().map(|place| {
        let capability = Capability {
            verb: Verb::Write,
            object: grant.object,
            replica: place.replica,
            segment: place.segment,
            incarnation: place.incarnation,
            node: place.node,
            offset: place.offset,
            length: place.length,
            expires,
        };
        capability.to_replica(&secret, history)
    });
    v1::PutGrant {
        error: None,
        object_id: grant.object.0,
        remaining_ms: expires.0.saturating_sub(tenure.log_time().0),
        replicas: replicas.collect(),
    }
}

/// How long after its start a grant may be used, in log time: until it may be preempted.
fn grant_valid_ms(service: &Service) -> u64 {
    service.directory().config().config.put_start_discard_timeout_ms
}

/// Ends a batch of puts.
pub async fn end(
    service: &Arc<Service>,
    items: &[v1::PutEndItem],
    session: SessionId,
) -> Result<v1::PutEndResponse, Error> {
    let tenure = service.tenure()?;
    let began = Instant::now();
    let (ops, positions, mut results) = ending(service, items, session, Op::PutEnd)?;
    let outcomes = tenure.proposer.propose(&ops, None).await?;
    for (i, outcome) in positions.into_iter().zip(outcomes) {
        results[i] = match outcome {
            Outcome::Ended { copies } => v1::PutEndResult { error: None, copies },
            Outcome::Refused(error) | Outcome::PutDropped(error) => failed_end(&error, i),
            other => return Err(unexpected("put_end", &other)),
        };
    }
    service.metrics().commit_seconds.observe(began.elapsed().as_secs_f64());
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

/// Counts a batch's results by code.
pub fn count<'a>(service: &Service, op: &str, errors: impl Iterator<Item = Option<&'a v1::ItemError>>) {
    let mut ok = 0;
    for error in errors {
        match error {
            None => ok += 1,
            Some(error) => service.metrics().count(op, ErrorCode::from_u32(error.code), 1),
        }
    }
    service.metrics().count(op, ErrorCode::Ok, ok);
}
