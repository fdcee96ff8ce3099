//! Space coming back: retire, reclaim, fences, corrupt replicas.

use super::{Applied, Apply, Charge, Sign, check_count};
use crate::directory::groups::GroupName;
use crate::directory::objects::{Location, Record, Replica};
use crate::directory::op::RetireMode;
use crate::directory::outcome::Outcome;
use crate::directory::space::{Retired, Use};
use std::collections::BTreeSet;
use tidepool_proto::{Error, ErrorCode, Incarnation, NodeId, ObjectId, ReplicaId, planted};

/// Why a replica goes while its object stays.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Dropped {
    /// As many as before are wanted: it is made again.
    Lost,
    /// One less is wanted.
    Unwanted,
}

/// Objects named for eviction, and the groups that were looked at or are to stay: each object is answered once.
pub(super) struct Named {
    objects: BTreeSet<ObjectId>,
    groups: BTreeSet<GroupName>,
}

impl Named {
    pub(super) fn of(objects: &[ObjectId], stays: Option<&GroupName>) -> Named {
        Named { objects: objects.iter().copied().collect(), groups: stays.cloned().into_iter().collect() }
    }
}

impl Apply<'_> {
    pub(super) fn retire(&mut self, objects: &[ObjectId], mode: RetireMode) -> Applied {
        check_count("objects", objects.len())?;
        let mut named = Named::of(objects, None);
        let mut retired = Vec::new();
        for &object in objects {
            let together = self.evictable_together(object, &mut named);
            for &member in &together {
                self.retire_object(member, mode);
            }
            self.let_readers_in(together.len());
            retired.extend(together);
        }
        Ok(Outcome::Retired { objects: retired })
    }

    /// What goes with an object that is evicted: its group. Nothing if some of it must stay, or is not named, or if it
    /// was answered before.
    pub(super) fn evictable_together(&self, object: ObjectId, named: &mut Named) -> Vec<ObjectId> {
        let evictable = |id: &ObjectId| {
            let at = self.core.index.get(id)?;
            let may_go = |r: &Record| r.is_complete() && (!r.hard_pinned || planted!(EvictPinned));
            self.with_record(*at, |r| may_go(r).then(|| r.group_name()))
        };
        let name = match evictable(&object) {
            Some(None) if named.objects.remove(&object) => return vec![object],
            Some(Some(_)) if planted!(PartOfGroup) && named.objects.remove(&object) => return vec![object],
            Some(Some(name)) => name,
            Some(None) | None => return Vec::new(),
        };
        let group = self.core.groups.get(&name).expect("the group of an object is there");
        let is_new = named.groups.insert(name);
        let goes = |id: &ObjectId| named.objects.contains(id) && evictable(id).is_some();
        if is_new && group.upserts.is_empty() && group.members.iter().all(goes) {
            return group.members.iter().copied().collect();
        }
        Vec::new()
    }

    /// The other members of a group that lost one for good: what is left of it is of no use. Leases may live on them.
    pub(super) fn bury_group(&mut self, name: &GroupName) {
        let members = self.core.groups.get(name).map(|group| group.members.clone()).unwrap_or_default();
        for member in members {
            let stays = self.with_record(self.core.index[&member], |r| !r.is_complete() || r.hard_pinned);
            if !stays {
                let record = self.retire_object(member, RetireMode::RetireOnly);
                self.note_lost(&record);
            }
        }
    }

    /// Takes a COMPLETE object out of the directory.
    pub(super) fn retire_object(&mut self, object: ObjectId, mode: RetireMode) -> Record {
        let record = self.take_object(object).expect("the caller found it");
        for &replica in &record.replicas {
            self.retire_readable(object, replica, record.extent_bytes(), mode);
        }
        record
    }

    pub(super) fn retire_readable(&mut self, object: ObjectId, replica: Replica, bytes: u64, mode: RetireMode) {
        let Replica { id, offset, segment } = replica;
        match mode {
            RetireMode::RetireAndReclaim => self.core.space.give(segment, offset, bytes, Use::Complete),
            RetireMode::RetireOnly => {
                self.core.space.convert(segment, offset, bytes, Use::Complete, Use::Retired);
                self.core.retire(id, Retired { object, segment, offset, bytes, clean: true });
            }
        }
    }

    pub(super) fn reclaim(&mut self, replicas: &[ReplicaId]) -> Applied {
        check_count("replicas", replicas.len())?;
        self.free_retired(replicas, |retired, _| retired.clean)
    }

    pub(super) fn fence_acknowledged(&mut self, node: NodeId, life: Incarnation, replicas: &[ReplicaId]) -> Applied {
        check_count("replicas", replicas.len())?;
        self.core.nodes.current(node, life)?;
        self.free_retired(replicas, |retired, owner| !retired.clean && owner == node)
    }

    /// Frees the retired replicas that pass; the others are skipped.
    fn free_retired(&mut self, replicas: &[ReplicaId], passes: impl Fn(&Retired, NodeId) -> bool) -> Applied {
        let (mut count, mut bytes) = (0, 0);
        for &id in replicas {
            let Some(retired) = self.core.retired.get(&id) else { continue };
            if !passes(retired, self.core.space.segment(retired.segment).node) {
                continue;
            }
            let retired = self.core.forget_retired(id).expect("just seen");
            self.core.space.give(retired.segment, retired.offset, retired.bytes, Use::Retired);
            count += 1;
            bytes += retired.bytes;
        }
        Ok(Outcome::Reclaimed { replicas: count, bytes })
    }

    /// Drops a replica that is bad, or not wanted any more.
    pub(super) fn drop_replica(&mut self, object: ObjectId, replica: ReplicaId, why: Dropped) -> Applied {
        let Some(&at) = self.core.index.get(&object) else {
            return Err(Error::new(ErrorCode::ObjectNotFound, format!("object {object} is not in the directory")));
        };
        let (complete, all, found) = self.with_record(at, |r| {
            (r.is_complete(), r.replicas.len(), r.replicas.iter().copied().find(|r| r.id == replica))
        });
        let Some(found) = found else {
            return Err(Error::new(
                ErrorCode::ReplicaUnavailable,
                format!("object {object} has no replica {replica} (any more)"),
            ));
        };
        if !complete {
            return Err(Error::new(
                ErrorCode::NotReady,
                format!("object {object} is being put; its writer ends replica {replica}"),
            ));
        }
        // Readers may hold leases on it, so its space goes the way of any retired replica.
        if all == 1 {
            let record = self.retire_object(object, RetireMode::RetireOnly);
            self.note_lost(&record);
            record.group_name().iter().for_each(|name| self.bury_group(name));
            return Ok(Outcome::ReplicaDropped { object_gone: true });
        }
        self.drop_one_of_several(at, found, why);
        Ok(Outcome::ReplicaDropped { object_gone: false })
    }

    /// Takes a replica from a COMPLETE object that has others. Readers may hold leases on it.
    pub(super) fn drop_one_of_several(&mut self, at: Location, found: Replica, why: Dropped) {
        let mut shard = self.shards.write(at.shard());
        let record = shard.record_mut(at.slot()).expect("the index names a record");
        self.digest_record(at, record, Sign::Sub);
        record.replicas.retain(|r| r.id != found.id);
        if why == Dropped::Unwanted {
            record.asked = record.asked.one_less();
        }
        self.digest_record(at, record, Sign::Add);
        let (object, bytes, tenant) = (record.object, record.extent_bytes(), record.tenant);
        self.core.note_copies(record);
        drop(shard);
        self.charge(tenant, Charge::Return { bytes, objects: 0 });
        self.retire_readable(object, found, bytes, RetireMode::RetireOnly);
    }
}
