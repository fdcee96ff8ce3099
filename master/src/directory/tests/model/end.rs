//! Ends of puts in the model: completion, revocation, discard.

use super::{DISCARD_MS, Model, Object, Retired};
use crate::directory::{Outcome, PutEnd, ReplicaEnd, RetireMode, SoftPinAction};
use std::collections::BTreeSet;
use tidepool_proto::{ErrorCode, ObjectId, ReplicaId, SegmentId};

impl Model {
    /// The object and the slots said to be stored and aborted.
    fn ending(&self, end: &PutEnd) -> Result<(usize, BTreeSet<usize>, BTreeSet<usize>), ErrorCode> {
        let i = self.objects.iter().position(|o| o.id == end.object).ok_or(ErrorCode::GrantLost)?;
        if self.objects[i].ended.is_none() && self.objects[i].session != end.session {
            return Err(ErrorCode::IllegalClient);
        }
        let slots = |wanted| -> BTreeSet<usize> {
            end.replicas.iter().filter(|s| s.end == wanted).map(|s| s.replica.op().slot()).collect()
        };
        let granted = |s: ReplicaId| {
            s.op().with_slot(0) == end.object.op() && (1..=self.objects[i].granted).contains(&s.op().slot())
        };
        let named: BTreeSet<ReplicaId> = end.replicas.iter().map(|s| s.replica).collect();
        if named.len() < end.replicas.len() || !named.into_iter().all(granted) {
            return Err(ErrorCode::InvalidParams);
        }
        Ok((i, slots(ReplicaEnd::Stored), slots(ReplicaEnd::Aborted)))
    }

    pub(super) fn put_end(&mut self, end: &PutEnd) -> Result<Outcome, ErrorCode> {
        let (i, stored, aborted) = self.ending(end)?;
        if let Some((before, copies)) = &self.objects[i].ended {
            return match *before == stored {
                true => Ok(Outcome::Ended { copies: *copies, replaced: None }),
                false => Err(ErrorCode::AlreadyEnded),
            };
        }
        let object = self.objects[i].clone();
        let (kept, failed): (Vec<_>, Vec<_>) =
            object.replicas.iter().copied().partition(|r| stored.contains(&r.0.op().slot()));
        if kept.is_empty() {
            self.drop_put(end.object, &aborted);
            return Ok(Outcome::PutDropped(tidepool_proto::Error::new(ErrorCode::GrantLost, "")));
        }
        self.retire_unclean(&object, &failed, &aborted);
        let copies = kept.len() as u32;
        let old = object.replaces.map(|old| self.object(old).unwrap().clone());
        let ended = &mut self.objects[i];
        ended.pinned_until = match (object.soft_pin, &old) {
            (SoftPinAction::Enable { ttl_ms }, _) => self.clock + ttl_ms,
            (SoftPinAction::Preserve, Some(old)) => old.pinned_until,
            (SoftPinAction::Preserve, None) | (SoftPinAction::Disable, _) => 0,
        };
        (ended.replicas, ended.ended, ended.replaces) = (kept, Some((stored, copies)), None);
        if (copies as usize) < ended.wanted {
            self.events.insert("a put makes fewer copies than were wanted");
        }
        if let Some(old) = &old {
            self.retire(old.id, RetireMode::RetireOnly);
        }
        if old.as_ref().is_some_and(|old| old.pinned_until > 0) && object.soft_pin == SoftPinAction::Preserve {
            self.events.insert("a soft pin lives on in an upsert");
        }
        if self.lost.remove(&(object.tenant, object.group, object.key)) {
            self.events.insert("a lost member is found");
        }
        Ok(Outcome::Ended { copies, replaced: old.map(|old| old.id) })
    }

    pub(super) fn put_revoke(&mut self, end: &PutEnd) -> Result<Outcome, ErrorCode> {
        let (i, stored, aborted) = self.ending(end)?;
        if self.objects[i].ended.is_some() {
            return Err(ErrorCode::AlreadyEnded);
        }
        self.drop_put(end.object, &stored.union(&aborted).copied().collect());
        Ok(Outcome::Revoked)
    }

    pub(super) fn discard(&mut self, id: ObjectId) -> bool {
        let old = |o: &&Object| o.ended.is_none() && self.clock - o.started >= DISCARD_MS;
        let found = self.object(id).filter(old).map(|o| o.replaces.is_some());
        if let Some(is_upsert) = found {
            if is_upsert {
                self.events.insert("a stale upsert is discarded");
            }
            self.drop_put(id, &BTreeSet::new());
        }
        found.is_some()
    }

    /// An open put goes. Of an upsert the old value is left, so nothing is lost.
    pub(super) fn drop_put(&mut self, id: ObjectId, clean: &BTreeSet<usize>) {
        let object = self.take(id);
        if object.replaces.is_none() {
            self.note_lost(&object);
        }
        self.retire_unclean(&object, &object.replicas, clean);
    }

    fn retire_unclean(&mut self, object: &Object, replicas: &[(ReplicaId, SegmentId, u64)], clean: &BTreeSet<usize>) {
        for &(replica, segment, offset) in replicas.iter().filter(|r| !clean.contains(&r.0.op().slot())) {
            self.retired.push(Retired { replica, segment, offset, bytes: object.bytes(), clean: false });
        }
    }
}
