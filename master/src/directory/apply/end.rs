//! A put's end: completion, revocation, discard. An upsert's end switches the key to the new value (W7).

use super::{Applied, Apply, Charge, Sign, check_count, invalid};
use crate::directory::core::OpenPut;
use crate::directory::groups::Joins;
use crate::directory::objects::{Record, Replica};
use crate::directory::op::{PutEnd, ReplicaEnd, RetireMode, SoftPinAction, Statuses};
use crate::directory::outcome::Outcome;
use crate::directory::read::readable;
use crate::directory::space::{Retired, Use};
use smallvec::SmallVec;
use tidepool_proto::{Error, ErrorCode, LogTime, ObjectId, ReplicaId};

/// What the statuses of a put say, by replica slot.
pub(super) struct Ends {
    stored: u16,
    aborted: u16,
}

impl Ends {
    /// Nothing is said of any.
    pub(super) fn unknown() -> Ends {
        Ends { stored: 0, aborted: 0 }
    }
    fn is_stored(&self, replica: ReplicaId) -> bool {
        self.stored >> replica.op().slot() & 1 == 1
    }
    fn is_aborted(&self, replica: ReplicaId) -> bool {
        self.aborted >> replica.op().slot() & 1 == 1
    }
}

impl Apply<'_> {
    pub(super) fn put_end(&mut self, end: &PutEnd) -> Applied {
        let Some(&at) = self.core.index.get(&end.object) else { return Err(grant_lost(end.object)) };
        self.check_writer(end)?;
        // Looked up before the shard is locked: the old value of an upsert lies in the same one.
        let until = self.core.open.get(&end.object).map_or(LogTime(0), |open| self.pinned_until(open));
        let mut shard = self.shards.write(at.shard());
        let record = shard.record_mut(at.slot()).expect("the index names a record");
        let ends = check_statuses(end.object, record.asked.granted(), &end.replicas)?;
        if record.is_complete() {
            if record.stored_slots == ends.stored {
                return Ok(Outcome::Ended { copies: record.copies.into(), replaced: None });
            }
            return Err(Error::new(
                ErrorCode::AlreadyEnded,
                format!("object {} was ended with other replicas stored", end.object),
            ));
        }
        if !record.replicas.iter().any(|replica| ends.is_stored(replica.id)) {
            drop(shard);
            return Ok(Outcome::PutDropped(self.drop_ended(end.object, &ends)));
        }
        self.digest_record(at, record, Sign::Sub);
        let open = self.close_put(record);
        let failed: SmallVec<[Replica; 1]> =
            record.replicas.iter().copied().filter(|replica| !ends.is_stored(replica.id)).collect();
        record.replicas.retain(|replica| ends.is_stored(replica.id));
        record.copies = record.replicas.len() as u8;
        record.stored_slots = ends.stored;
        let bytes = record.extent_bytes();
        record.soft_pin(until);
        let completed = record.clone();
        drop(shard);
        self.digest_record(at, &completed, Sign::Add);
        self.charge(completed.tenant, Charge::Return { bytes: bytes * failed.len() as u64, objects: 0 });
        for replica in &completed.replicas {
            self.core.space.convert(replica.segment, replica.offset, bytes, Use::Processing, Use::Complete);
        }
        for replica in failed {
            self.release_granted(end.object, replica, bytes, &ends);
        }
        if let Some(old) = open.replaces {
            self.shards.switch(self.core.index[&old], at);
            self.retire_object(old, RetireMode::RetireOnly);
            if let Some(name) = completed.group() {
                self.core.groups.promote(&(completed.tenant, name.clone()), end.object, Joins::Finished);
            }
        } else if let Some(name) = completed.group_name() {
            self.core.groups.finish(&name);
        }
        self.note_found(&completed);
        self.core.note_copies(&completed);
        let shards = self.shards;
        self.core.note_change(|| readable(shards, &completed));
        Ok(Outcome::Ended { copies: completed.copies.into(), replaced: open.replaces })
    }

    /// Log time until which an object is soft-pinned that is ended now.
    fn pinned_until(&self, open: &OpenPut) -> LogTime {
        match (open.soft_pin, open.replaces) {
            (SoftPinAction::Enable { ttl_ms }, _) => LogTime(self.core.clock.0.saturating_add(ttl_ms)),
            (SoftPinAction::Preserve, Some(old)) => self.with_record(self.core.index[&old], Record::soft_pinned_until),
            (SoftPinAction::Preserve, None) | (SoftPinAction::Disable, _) => LogTime(0),
        }
    }

    /// ILLEGAL_CLIENT unless the put is this session's. Once it has ended anybody who knows its id may ask again.
    fn check_writer(&self, end: &PutEnd) -> Result<(), Error> {
        match self.core.open.get(&end.object) {
            Some(open) if open.session != end.session => Err(Error::new(
                ErrorCode::IllegalClient,
                format!("object {} was started by session {}, not {}", end.object, open.session, end.session),
            )),
            _ => Ok(()),
        }
    }

    /// Drops a put that was ended without a stored copy that is still there, and says why.
    fn drop_ended(&mut self, object: ObjectId, ends: &Ends) -> Error {
        self.drop_put(object, ends);
        let why = match ends.stored {
            0 => "no copy was stored",
            _ => "the segments of its stored copies are gone",
        };
        Error::new(ErrorCode::GrantLost, format!("object {object}: {why}; put it again"))
    }

    pub(super) fn put_revoke(&mut self, end: &PutEnd) -> Applied {
        let Some(&at) = self.core.index.get(&end.object) else { return Err(grant_lost(end.object)) };
        self.check_writer(end)?;
        let (granted, complete) = self.with_record(at, |r| (r.asked.granted(), r.is_complete()));
        let mut ends = check_statuses(end.object, granted, &end.replicas)?;
        if complete {
            return Err(Error::new(
                ErrorCode::AlreadyEnded,
                format!("object {} was ended and can be read; remove it instead", end.object),
            ));
        }
        // A stored replica is as finished as an aborted one: nothing more will be written to either.
        ends.aborted |= ends.stored;
        self.drop_put(end.object, &ends);
        Ok(Outcome::Revoked)
    }

    pub(super) fn discard(&mut self, objects: &[ObjectId]) -> Applied {
        check_count("objects", objects.len())?;
        let timeout_ms = self.core.config.config.put_start_discard_timeout_ms;
        let mut discarded = Vec::new();
        for &object in objects {
            let Some(&at) = self.core.index.get(&object) else { continue };
            let (complete, started) = self.with_record(at, |r| (r.is_complete(), r.started));
            if !complete && self.core.clock.0.saturating_sub(started.0) >= timeout_ms {
                self.drop_put(object, &Ends::unknown());
                discarded.push(object);
            }
        }
        Ok(Outcome::Discarded { objects: discarded })
    }

    /// Drops an open put. Aborted replicas are free at once, the others wait for their fence.
    pub(super) fn drop_put(&mut self, object: ObjectId, ends: &Ends) {
        let is_upsert = self.core.open[&object].replaces.is_some();
        let record = self.take_object(object).expect("the caller found it");
        if !is_upsert {
            self.note_lost(&record);
        }
        for &replica in &record.replicas {
            self.release_granted(object, replica, record.extent_bytes(), ends);
        }
    }

    fn release_granted(&mut self, object: ObjectId, replica: Replica, bytes: u64, ends: &Ends) {
        let Replica { id, offset, segment } = replica;
        if ends.is_aborted(id) {
            self.core.space.give(segment, offset, bytes, Use::Processing);
            return;
        }
        self.core.space.convert(segment, offset, bytes, Use::Processing, Use::Retired);
        self.core.retire(id, Retired { object, segment, offset, bytes, clean: false });
    }
}

fn check_statuses(object: ObjectId, granted: u8, statuses: &Statuses) -> Result<Ends, Error> {
    let (mut ends, mut seen) = (Ends { stored: 0, aborted: 0 }, 0u16);
    for status in statuses {
        let id = status.replica.op();
        let slot = id.slot();
        if id.with_slot(0) != object.op() || slot == 0 || slot > usize::from(granted) {
            return Err(invalid(format!("object {object} was not granted replica {}", status.replica)));
        }
        if seen >> slot & 1 == 1 {
            return Err(invalid(format!("object {object}: replica {} is named twice", status.replica)));
        }
        seen |= 1 << slot;
        match status.end {
            ReplicaEnd::Stored => ends.stored |= 1 << slot,
            ReplicaEnd::Aborted => ends.aborted |= 1 << slot,
            ReplicaEnd::Unknown => {}
        }
    }
    Ok(ends)
}

fn grant_lost(object: ObjectId) -> Error {
    Error::new(
        ErrorCode::GrantLost,
        format!("object {object} is not being put: its grant was revoked, preempted or discarded, or never was"),
    )
}
