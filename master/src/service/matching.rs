//! Removal of what matches a prefix or a regex, a bounded part of the directory a call (M4), and removal of the replicas
//! on one segment. The leader expands to explicit ids; a call repeated answers as it did and removes nothing more (W8).

use std::sync::Arc;

use regex::bytes::{Regex, RegexBuilder};
use smallvec::SmallVec;
use tidepool_proto::{Error, ErrorCode, ReplicaId, planted, v1};

use super::core::{Service, unexpected};
use super::leases::{Marked, Marks};
use super::reads::checked_keys;
use super::requests::{check_open, soft_pin};
use crate::directory::{
    ClearReplicas, ListFilter, ListPage, ObjectState, Op, Outcome, RetireMode, SessionId, SoftPinAction, TenantId, Turn,
};

/// Bytes of a regex.
const REGEX_BYTES_MAX: usize = 4_096;
/// Bytes that a compiled regex, and the states it keeps while it runs, may take.
const REGEX_MEMORY_MAX: usize = 1 << 20;
/// Objects that one call removes at most.
const MATCHES_PER_CALL: usize = 4_096;
/// Keys named of those left.
const LEFT_KEYS_MAX: usize = 100;

/// Compiles a regex; None for an empty one, which matches all. It runs in time linear in the key.
pub fn pattern(regex: &str) -> Result<Option<Regex>, Error> {
    if regex.is_empty() {
        return Ok(None);
    }
    let refuse = |why: String| Error::new(ErrorCode::InvalidParams, format!("regex: {why}"));
    if regex.len() > REGEX_BYTES_MAX {
        return Err(refuse(format!("{} bytes; the limit is {REGEX_BYTES_MAX}", regex.len())));
    }
    let built = RegexBuilder::new(regex).size_limit(REGEX_MEMORY_MAX).dfa_size_limit(REGEX_MEMORY_MAX).build();
    built.map(Some).map_err(|error| refuse(error.to_string()))
}

/// Removes what matches in a part of the directory.
pub async fn remove(
    service: &Arc<Service>,
    request: &v1::RemoveMatchingRequest,
    tenant: TenantId,
    session: SessionId,
) -> Result<v1::RemoveMatchingResponse, Error> {
    check_open(service, session)?;
    let force = match v1::RemoveMode::try_from(request.mode) {
        Ok(mode) => mode == v1::RemoveMode::Force,
        Err(_) => return Err(Error::new(ErrorCode::InvalidParams, "unknown remove mode")),
    };
    let tenure = service.tenure()?;
    let page = matching(service, request, tenant)?;
    let next = page.next.map(|key| bytes::Bytes::from(Vec::from(key))).unwrap_or_default();
    let mut response = v1::RemoveMatchingResponse { next, ..Default::default() };
    let turn = Turn { sequence: request.sequence, floor: request.floor };
    let mut marks = Marks::new(tenure.leases.clone());
    let mut objects = Vec::with_capacity(page.objects.len());
    let mut mode = RetireMode::RetireAndReclaim;
    for found in page.objects {
        let complete =
            |id| service.directory().with_object_id(id, |v| v.is_some_and(|v| v.state == ObjectState::Complete));
        let leased = !force && tenure.leases.live(found.object, tenure.now_ms()).is_some();
        let counter = match (complete(found.object), leased) {
            (false, _) => &mut response.unfinished,
            (true, true) => &mut response.leased,
            (true, false) => {
                let protected = tenure.may_be_leased_by_predecessor(found.object);
                match if protected { Marked::Already } else { marks.mark(found.object, tenure.now_ms()) } {
                    Marked::Yes => {}
                    Marked::Leased { .. } if !force => {
                        response.leased += 1;
                        continue;
                    }
                    // Readers may be on it: unlisted now, free when they are done.
                    _ => mode = RetireMode::RetireOnly,
                }
                objects.push(found.object);
                continue;
            }
        };
        *counter += 1;
        if response.left_keys.len() < LEFT_KEYS_MAX {
            response.left_keys.push(Vec::from(found.key).into());
        }
    }
    let op = Op::RemoveObjects { session, turn, objects, mode };
    match tenure.proposer.propose_one(op, Some(marks)).await? {
        Outcome::RemovedObjects { objects } => response.removed = objects,
        Outcome::Refused(error) => return Err(error),
        other => return Err(unexpected("remove_objects", &other)),
    }
    service.metrics().count("remove_matching", ErrorCode::Ok, response.removed);
    Ok(response)
}

/// A part of what matches, readable or not.
fn matching(service: &Service, request: &v1::RemoveMatchingRequest, tenant: TenantId) -> Result<ListPage, Error> {
    let pattern = pattern(&request.regex)?;
    let matches = pattern.as_ref().map(|pattern| |key: &[u8]| pattern.is_match(key));
    let filter = ListFilter {
        prefix: &request.prefix[..request.prefix.len() - usize::from(planted!(MatchTooMuch))],
        matches: matches.as_ref().map(|matches| matches as &dyn Fn(&[u8]) -> bool),
        data_type: None,
        unreadable_too: true,
    };
    let after = (!request.after.is_empty()).then(|| &request.after[..]);
    Ok(service.directory().list(tenant, &filter, after, MATCHES_PER_CALL))
}

/// Removes the replicas of objects on one segment, or all of them; what is leased or being put is left. Each key has its
/// own number in the session: repeated, it answers as it did and clears nothing more.
pub async fn clear(
    service: &Arc<Service>,
    request: &v1::ReplicaClearRequest,
    tenant: TenantId,
    session: SessionId,
) -> Result<v1::ReplicaClearResponse, Error> {
    let keys = checked_keys(request.keys.as_ref())?;
    let tenure = service.barrier().await?;
    let mut named = service.directory().segments();
    named.retain(|s| request.segment_name.is_empty() || *s.name == *request.segment_name);
    if named.is_empty() {
        let name = &request.segment_name;
        return Err(Error::new(ErrorCode::SegmentNotFound, format!("segment '{name}' is not mounted")));
    }
    let mut ops = Vec::with_capacity(keys.len());
    let mut owners = Vec::with_capacity(keys.len());
    let is_numbered = request.sequence > 0;
    if is_numbered {
        check_open(service, session)?;
    }
    for (i, key) in keys.iter().enumerate() {
        let (object, replicas) = service.directory().with_object(tenant, key, |view| {
            let view = view.filter(|v| v.state == ObjectState::Complete);
            let free = view.filter(|v| tenure.leases.live(v.object, tenure.now_ms()).is_none());
            let on = |v: &crate::directory::ObjectView<'_>| {
                let there = v.replicas.iter().filter(|r| named.iter().any(|s| s.segment == r.segment));
                (v.object, there.map(|r| r.replica).collect())
            };
            free.map(on).unwrap_or_default()
        });
        let replicas: SmallVec<[ReplicaId; 2]> = replicas;
        if is_numbered {
            // Also when nothing was found: repeated, it must find nothing again.
            let sequence = request.sequence.saturating_add(i as u64);
            let turn = Turn { sequence, floor: request.floor };
            ops.push(Op::ClearReplicas(ClearReplicas { session, turn, object, replicas }));
            owners.push(i);
        } else {
            owners.extend(replicas.iter().map(|_| i));
            ops.extend(replicas.into_iter().map(|replica| Op::DropReplica { object, replica }));
        }
    }
    let mut cleared = vec![0u8; keys.len()];
    if !ops.is_empty() {
        for (i, outcome) in owners.into_iter().zip(tenure.proposer.propose(&ops, None).await?) {
            match outcome {
                Outcome::ReplicaDropped { .. } | Outcome::Cleared { cleared: true } => cleared[i] = 1,
                Outcome::Refused(error) if is_numbered => return Err(error),
                _ => {}
            }
        }
    }
    Ok(v1::ReplicaClearResponse { cleared: cleared.into() })
}

/// Sets or ends soft pins.
pub async fn pin(service: &Arc<Service>, request: &v1::PinRequest, tenant: TenantId) -> Result<v1::PinResponse, Error> {
    let keys = checked_keys(request.keys.as_ref())?;
    let action = soft_pin(service, request.action, request.ttl_ms)?;
    if action == SoftPinAction::Preserve {
        return Err(Error::new(ErrorCode::InvalidParams, "a pin is enabled or disabled"));
    }
    let tenure = service.barrier().await?;
    let (mut ops, mut positions, mut errors) = (Vec::new(), Vec::new(), Vec::new());
    for (i, key) in keys.iter().enumerate() {
        match service.directory().with_object(tenant, key, |view| view.map(|v| v.object)) {
            Some(object) => {
                ops.push(Op::SetPin { object, action });
                positions.push(i);
            }
            None => {
                let message = format!("key '{}' names no object", String::from_utf8_lossy(key));
                errors.push(Error::new(ErrorCode::ObjectNotFound, message).for_item(i));
            }
        }
    }
    for (i, outcome) in positions.into_iter().zip(tenure.proposer.propose(&ops, None).await?) {
        match outcome {
            Outcome::Done => {}
            Outcome::Refused(error) => errors.push(error.for_item(i)),
            other => return Err(unexpected("set_pin", &other)),
        }
    }
    Ok(v1::PinResponse { errors })
}
