//! What leaves the model's directory: evicted, removed, lost; and space that comes back.

use super::{Model, Object, Retired};
use crate::directory::{Answered, Outcome, Removal, Remove, RetireMode, SessionId, TenantId, Turn};
use std::collections::BTreeSet;
use tidepool_proto::{ErrorCode, ObjectId, ReplicaId};

impl Model {
    /// Takes an object out. Its open upsert becomes a put; a group is forgotten with its last object.
    pub(super) fn take(&mut self, id: ObjectId) -> Object {
        let i = self.objects.iter().position(|o| o.id == id).unwrap();
        let object = self.objects.remove(i);
        let (gone, kept): (Vec<_>, Vec<_>) = self.copies.drain(..).partition(|c| c.object == id);
        self.copies = kept;
        for copy in gone {
            self.events.insert("a copy is given up");
            self.give_up(&copy);
        }
        for upsert in self.objects.iter_mut().filter(|o| o.replaces == Some(id)) {
            upsert.replaces = None;
            self.events.insert("an upsert becomes a put");
        }
        let objects = &self.objects;
        self.lost.retain(|(tenant, group, _)| objects.iter().any(|o| (o.tenant, &o.group) == (*tenant, group)));
        object
    }

    /// Members of an object's group, without open upserts, by id.
    pub(super) fn members(&self, tenant: TenantId, group: &[u8]) -> Vec<ObjectId> {
        let in_group = |o: &&Object| o.tenant == tenant && o.group == group && o.replaces.is_none();
        let members: BTreeSet<ObjectId> = self.objects.iter().filter(in_group).map(|o| o.id).collect();
        members.into_iter().collect()
    }

    /// A member is gone that its group, if there is more of it, cannot do without.
    pub(super) fn note_lost(&mut self, object: &Object) {
        let is_left = self.objects.iter().any(|o| o.tenant == object.tenant && o.group == object.group);
        if !object.group.is_empty() && is_left {
            self.lost.insert((object.tenant, object.group.clone(), object.key.clone()));
        }
    }

    /// What is left of a lost object's group goes, but not what is pinned for good or being put.
    pub(super) fn bury(&mut self, gone: &Object) {
        if gone.group.is_empty() {
            return;
        }
        for id in self.members(gone.tenant, &gone.group) {
            let object = self.object(id).unwrap().clone();
            if object.ended.is_some() && !object.hard_pin {
                self.events.insert("a group is buried");
                self.retire(id, RetireMode::RetireOnly);
                self.note_lost(&object);
            } else if object.ended.is_some() {
                self.events.insert("a hard-pinned object outlives its group");
            } else {
                self.events.insert("a put outlives its group");
            }
        }
    }

    /// Of those named, what may be evicted: alone, or whole groups of which all are named; each once.
    pub(super) fn evictable(&self, named: &[ObjectId], stays: Option<(TenantId, &[u8])>) -> Vec<Vec<ObjectId>> {
        let goes = |o: &Object| o.ended.is_some() && !o.hard_pin;
        let mut units: Vec<Vec<ObjectId>> = Vec::new();
        for object in named.iter().filter_map(|&id| self.object(id)) {
            if !goes(object) || units.concat().contains(&object.id) {
                continue;
            }
            if object.group.is_empty() {
                units.push(vec![object.id]);
                continue;
            }
            let all = self.objects.iter().filter(|o| (o.tenant, &o.group) == (object.tenant, &object.group));
            let whole = all.clone().all(|o| goes(o) && named.contains(&o.id));
            if whole && stays != Some((object.tenant, &object.group)) {
                units.push(self.members(object.tenant, &object.group));
            }
        }
        units
    }

    pub(super) fn retire_named(&mut self, objects: &[ObjectId], mode: RetireMode) -> Outcome {
        let units = self.evictable(objects, None);
        if units.iter().any(|unit| unit.len() > 1) {
            self.events.insert("a group is retired");
        }
        if units.concat().len() < objects.iter().collect::<BTreeSet<_>>().len() {
            self.events.insert("some named to retire stay");
        }
        let objects = units.concat();
        objects.iter().for_each(|&id| assert!(self.retire(id, mode)));
        Outcome::Retired { objects }
    }

    /// Takes a COMPLETE object out. False: it is none.
    pub(super) fn retire(&mut self, id: ObjectId, mode: RetireMode) -> bool {
        if self.object(id).is_none_or(|o| o.ended.is_none()) {
            return false;
        }
        let object = self.take(id);
        if mode == RetireMode::RetireOnly {
            for &(replica, segment, offset) in &object.replicas {
                self.retired.push(Retired { replica, segment, offset, bytes: object.bytes(), clean: true });
            }
        }
        true
    }

    pub(super) fn free_retired(&mut self, ids: &[ReplicaId], which: impl Fn(&Model, &Retired) -> bool) -> Outcome {
        let snapshot = self.clone();
        let (gone, kept): (Vec<_>, Vec<_>) =
            self.retired.drain(..).partition(|r| ids.contains(&r.replica) && which(&snapshot, r));
        self.retired = kept;
        Outcome::Reclaimed { replicas: gone.len() as u64, bytes: gone.iter().map(|r| r.bytes).sum() }
    }

    pub(super) fn drop_replica(&mut self, id: ObjectId, replica: ReplicaId) -> Result<Outcome, ErrorCode> {
        let object = self.objects.iter_mut().find(|o| o.id == id).ok_or(ErrorCode::ObjectNotFound)?;
        let i = object.replicas.iter().position(|r| r.0 == replica).ok_or(ErrorCode::ReplicaUnavailable)?;
        if object.ended.is_none() {
            return Err(ErrorCode::NotReady);
        }
        let (replica, segment, offset) = object.replicas.remove(i);
        let (bytes, object_gone) = (object.bytes(), object.replicas.is_empty());
        self.retired.push(Retired { replica, segment, offset, bytes, clean: true });
        if object_gone {
            let object = self.take(id);
            self.note_lost(&object);
            self.bury(&object);
        }
        Ok(Outcome::ReplicaDropped { object_gone })
    }

    pub(super) fn remove(&mut self, remove: &Remove<'_>) -> Result<Outcome, ErrorCode> {
        self.check_tenant(remove.tenant)?;
        match self.check_turn(remove.session, remove.turn)? {
            None => {}
            Some(Answered::Removal(recorded)) => return Ok(Outcome::Removal(recorded)),
            Some(_) => return Err(ErrorCode::InvalidParams),
        }
        let present = self.find(remove.tenant, remove.key).map(|o| (o.id, o.ended.is_some(), o.hard_pin));
        let removal = match (present, remove.expected) {
            (None, _) => Removal::NotFound,
            (Some((actual, ..)), Some(expected)) if actual != expected => {
                return Ok(Outcome::RemoveChanged { actual });
            }
            (Some((actual, true, _)), None) if remove.mode == RetireMode::RetireAndReclaim => {
                return Ok(Outcome::RemoveChanged { actual });
            }
            (Some((_, false, _)), _) => Removal::NotReady,
            (Some((id, true, hard_pin)), _) => {
                if hard_pin {
                    self.events.insert("a hard-pinned object is removed");
                }
                self.retire(id, remove.mode);
                Removal::Removed(id)
            }
        };
        self.record(remove.session, remove.turn, Answered::Removal(removal));
        Ok(Outcome::Removal(removal))
    }

    pub(super) fn remove_objects(
        &mut self,
        session: SessionId,
        turn: Turn,
        objects: &[ObjectId],
        mode: RetireMode,
    ) -> Result<Outcome, ErrorCode> {
        match self.check_turn(session, turn)? {
            None => {}
            Some(Answered::Removed { objects }) => return Ok(Outcome::RemovedObjects { objects }),
            Some(_) => return Err(ErrorCode::InvalidParams),
        }
        let removed = objects.iter().filter(|&&id| self.retire(id, mode)).count() as u64;
        self.record(session, turn, Answered::Removed { objects: removed });
        Ok(Outcome::RemovedObjects { objects: removed })
    }
}
