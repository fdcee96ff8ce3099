//! Space coming back: retire, reclaim, fences, corrupt replicas.

use super::{Applied, Apply, Sign, check_count};
use crate::directory::objects::{Record, Replica};
use crate::directory::op::RetireMode;
use crate::directory::outcome::Outcome;
use crate::directory::space::{Retired, Use};
use tidepool_proto::{Error, ErrorCode, Incarnation, NodeId, ObjectId, ReplicaId};

impl Apply<'_> {
    pub(super) fn retire(&mut self, objects: &[ObjectId], mode: RetireMode) -> Applied {
        check_count("objects", objects.len())?;
        let mut retired = Vec::new();
        for &object in objects {
            let Some(&at) = self.core.index.get(&object) else { continue };
            if self.with_record(at, Record::is_complete) {
                self.retire_object(object, mode);
                retired.push(object);
            }
        }
        Ok(Outcome::Retired { objects: retired })
    }

    /// Takes a COMPLETE object out of the directory.
    pub(super) fn retire_object(&mut self, object: ObjectId, mode: RetireMode) {
        let record = self.take_object(object).expect("the caller found it");
        for &replica in &record.replicas {
            self.retire_readable(object, replica, record.extent_bytes(), mode);
        }
    }

    fn retire_readable(&mut self, object: ObjectId, replica: Replica, bytes: u64, mode: RetireMode) {
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

    pub(super) fn drop_replica(&mut self, object: ObjectId, replica: ReplicaId) -> Applied {
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
            self.retire_object(object, RetireMode::RetireOnly);
            return Ok(Outcome::ReplicaDropped { object_gone: true });
        }
        let mut shard = self.shards.write(at.shard());
        let record = shard.record_mut(at.slot()).expect("the index names a record");
        self.digest_record(record, Sign::Sub);
        record.replicas.retain(|r| r.id != replica);
        self.digest_record(record, Sign::Add);
        let bytes = record.extent_bytes();
        drop(shard);
        self.retire_readable(object, found, bytes, RetireMode::RetireOnly);
        Ok(Outcome::ReplicaDropped { object_gone: false })
    }
}
