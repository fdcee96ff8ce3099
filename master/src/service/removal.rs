//! Remove: unlisted in one entry, space back in the same one if no reader can be on it, later otherwise (L1, L2, L4).
//!
//! A refusal for a lease is decided by the leader alone, but it is logged, as a removal of no objects that takes the number: an attempt
//! of the same call that arrives later, here or at another leader, is refused as well, whatever became of the lease (W8).

use std::sync::Arc;

use tidepool_proto::keys::check_key;
use tidepool_proto::{Error, ErrorCode, ObjectId, planted, v1};

use super::core::{Service, unexpected};
use super::leases::{Marked, Marks};
use super::options::BATCH_ITEMS_MAX;
use super::requests::{check_open, count};
use super::tenure::Tenure;
use crate::directory::{Answered, Op, Outcome, Removal, Remove, RetireMode, SessionId, TenantId, Turn};

/// Removes a batch of keys, each with its own outcome.
pub async fn remove(
    service: &Arc<Service>,
    request: &v1::RemoveRequest,
    tenant: TenantId,
    session: SessionId,
) -> Result<v1::RemoveResponse, Error> {
    let keys: Vec<&[u8]> = match &request.keys {
        Some(keys) if !keys.is_empty() && keys.len() <= BATCH_ITEMS_MAX => keys.iter()?.collect(),
        _ => return Err(Error::new(ErrorCode::InvalidParams, format!("remove takes 1 to {BATCH_ITEMS_MAX} keys"))),
    };
    check_open(service, session)?;
    let mode = match v1::RemoveMode::try_from(request.mode) {
        Ok(mode) => mode,
        Err(_) => return Err(Error::new(ErrorCode::InvalidParams, "unknown remove mode")),
    };
    let tenure = service.tenure()?;
    let mut removal =
        Batch { service, tenure: &tenure, request, tenant, session, mode, results: vec![None; keys.len()] };
    let mut waiting: Vec<usize> = Vec::with_capacity(keys.len());
    for (i, key) in keys.iter().enumerate() {
        match check_key(key) {
            Ok(()) => waiting.push(i),
            Err(error) => removal.results[i] = Some(error.for_item(i)),
        }
    }
    while !waiting.is_empty() {
        waiting = removal.round(&keys, waiting).await?;
    }
    count(service, "remove", removal.results.iter().map(Option::as_ref));
    Ok(v1::RemoveResponse { errors: removal.results.into_iter().flatten().collect() })
}

struct Batch<'a> {
    service: &'a Service,
    tenure: &'a Tenure,
    request: &'a v1::RemoveRequest,
    tenant: TenantId,
    session: SessionId,
    mode: v1::RemoveMode,
    results: Vec<Option<v1::ItemError>>,
}

/// What the leader decided for one key.
enum Decision {
    Propose(Option<ObjectId>, RetireMode),
    Leased(u64),
    /// An attempt before was refused.
    StaysRefused,
    Wait,
}

impl Batch<'_> {
    /// One look at the waiting keys; returns those to look at again.
    async fn round(&mut self, keys: &[&[u8]], waiting: Vec<usize>) -> Result<Vec<usize>, Error> {
        let unmarked = self.tenure.leases.unmarked();
        let mut marks = Marks::new(self.tenure.leases.clone());
        let (mut ops, mut positions, mut again) = (Vec::new(), Vec::new(), Vec::new());
        let mut must_wait = false;
        for i in waiting {
            let sequence = self.sequence(i);
            let turn = Turn { sequence, floor: self.request.floor };
            match self.decide(keys[i], sequence, &mut marks) {
                Decision::Propose(expected, mode) => {
                    ops.push(Op::Remove(Remove {
                        tenant: self.tenant,
                        session: self.session,
                        turn,
                        key: keys[i],
                        expected,
                        mode,
                    }));
                    positions.push((i, None));
                }
                Decision::Leased(remaining_ms) => {
                    let key = String::from_utf8_lossy(keys[i]);
                    let message =
                        format!("key '{key}' is leased for another {remaining_ms} ms; wait, or remove with force");
                    let error = Error::new(ErrorCode::ObjectHasLease, message).retry_after(remaining_ms as u32);
                    if planted!(ForgottenRefusal) {
                        self.results[i] = Some(error.for_item(i));
                        continue;
                    }
                    let (session, mode) = (self.session, RetireMode::RetireOnly);
                    ops.push(Op::RemoveObjects { session, turn, objects: Vec::new(), mode });
                    positions.push((i, Some(error)));
                }
                Decision::StaysRefused => self.results[i] = Some(stays_refused(keys[i]).for_item(i)),
                Decision::Wait => {
                    must_wait = true;
                    again.push(i);
                }
            }
        }
        if !ops.is_empty() {
            let outcomes = self.tenure.proposer.propose(&ops, Some(marks)).await?;
            for ((i, leased), outcome) in positions.into_iter().zip(outcomes) {
                let error = match (outcome, leased) {
                    (Outcome::Removal(Removal::Removed(_)), _) => continue,
                    (Outcome::Removal(Removal::NotFound), _) => not_found(keys[i]),
                    (Outcome::Removal(Removal::NotReady), _) => not_ready(keys[i]),
                    (Outcome::RemovedObjects { .. }, Some(error)) => error,
                    (Outcome::RemoveChanged { .. }, _) => {
                        again.push(i);
                        continue;
                    }
                    (Outcome::Refused(error), leased) => match (self.answered(i), leased) {
                        // Another attempt of this call came first: it was refused, or it was executed and says what it did.
                        (Some(Answered::Removed { .. }), None) => stays_refused(keys[i]),
                        (Some(Answered::Removal(_)), Some(_)) => {
                            again.push(i);
                            continue;
                        }
                        _ => error,
                    },
                    (other, _) => return Err(unexpected("remove", &other)),
                };
                self.results[i] = Some(error.for_item(i));
            }
        } else if must_wait {
            tokio::select! {
                biased;
                () = unmarked => {}
                () = self.tenure.ended() => return Err(self.service.not_leader()),
            }
        }
        Ok(again)
    }

    /// The number of an item in the session.
    fn sequence(&self, i: usize) -> u64 {
        self.request.sequence.saturating_add(i as u64)
    }

    /// What the number of an item answered.
    fn answered(&self, i: usize) -> Option<Answered> {
        self.service.directory().answered(self.session, self.sequence(i))
    }

    /// Looks at the key's object and its leases; marks it when its space may return at once.
    fn decide(&self, key: &[u8], sequence: u64, marks: &mut Marks) -> Decision {
        match self.service.directory().answered(self.session, sequence) {
            None => {}
            Some(Answered::Removed { .. }) => return Decision::StaysRefused,
            // A repeated request: the op answers what the first one did, whatever has the key by now.
            Some(_) => return Decision::Propose(None, RetireMode::RetireOnly),
        }
        let object = self.service.directory().with_object(self.tenant, key, |view| view.map(|v| v.object));
        // Whatever is put there meanwhile carries no mark of ours, so its space must not return in the same entry.
        let Some(object) = object else { return Decision::Propose(None, RetireMode::RetireOnly) };
        if marks.holds(object) {
            // The same key twice in the batch: the second finds nothing.
            return Decision::Propose(Some(object), RetireMode::RetireAndReclaim);
        }
        if self.tenure.may_be_leased_by_predecessor(object) {
            return Decision::Propose(Some(object), RetireMode::RetireOnly);
        }
        if planted!(LookBeforeMark) && self.tenure.leases.live(object, self.tenure.now_ms()).is_none() {
            return Decision::Propose(Some(object), RetireMode::RetireAndReclaim);
        }
        match (marks.mark(object, self.tenure.now_ms()), self.mode) {
            (Marked::Yes, _) => Decision::Propose(Some(object), RetireMode::RetireAndReclaim),
            (Marked::Leased { .. }, v1::RemoveMode::Force) => Decision::Propose(Some(object), RetireMode::RetireOnly),
            (Marked::Leased { remaining_ms }, _) => Decision::Leased(remaining_ms),
            (Marked::Already, _) => Decision::Wait,
        }
    }
}

fn stays_refused(key: &[u8]) -> Error {
    let key = String::from_utf8_lossy(key);
    let message =
        format!("key '{key}' was leased when this removal was first asked for; ask anew, or remove with force");
    Error::new(ErrorCode::ObjectHasLease, message)
}

fn not_found(key: &[u8]) -> Error {
    Error::new(ErrorCode::ObjectNotFound, format!("key '{}' names no object", String::from_utf8_lossy(key)))
}

fn not_ready(key: &[u8]) -> Error {
    let key = String::from_utf8_lossy(key);
    Error::new(ErrorCode::NotReady, format!("key '{key}' is still being put; end or revoke the put first"))
}
