//! A put's life: start, end, revocation, discard.

use super::victims::{Choice, Wanted};
use super::{Applied, Apply, Sign, check_count, invalid};
use crate::directory::limits::{EXCLUDED_NODES_MAX, VICTIMS_PER_OP_MAX};
use crate::directory::objects::{Record, Replica};
use crate::directory::op::{PutEnd, PutStart, ReplicaEnd, Statuses, TenantId};
use crate::directory::outcome::{Grant, GrantedReplica, Outcome};
use crate::directory::space::{Retired, Use};
use smallvec::SmallVec;
use tidepool_proto::ids::REPLICAS_PER_OBJECT_MAX;
use tidepool_proto::keys::check_key;
use tidepool_proto::object::{OBJECT_BYTES_MAX, extent_bytes, stored_bytes};
use tidepool_proto::{Error, ErrorCode, ObjectId, ReplicaId};

/// What the statuses of a put say, by replica slot.
struct Ends {
    stored: u16,
    aborted: u16,
}

impl Ends {
    fn is_stored(&self, replica: ReplicaId) -> bool {
        self.stored >> replica.op().slot() & 1 == 1
    }
    fn is_aborted(&self, replica: ReplicaId) -> bool {
        self.aborted >> replica.op().slot() & 1 == 1
    }
}

impl Apply<'_> {
    pub(super) fn put_start(&mut self, put: &PutStart<'_>) -> Applied {
        check_put(put)?;
        self.core.sessions.get_mut(put.session)?;
        let hash = self.shards.hash(put.tenant, put.key);
        let preempted = match self.shards.locate(hash, put.tenant, put.key) {
            None => None,
            Some(at) => {
                let record = self.with_record(at, Record::clone);
                match self.answer_present(put, &record)? {
                    Some(grant) => return Ok(Outcome::Granted(grant)),
                    None => Some(record.object),
                }
            }
        };
        if preempted.is_none() && !self.shards.has_room(hash) {
            return Err(Error::new(
                ErrorCode::ResourceExhausted,
                format!("key '{}': its shard holds the most objects it can", shown(put.key)),
            ));
        }
        let choice = self.choose(&Wanted {
            put,
            bytes: extent_bytes(put.length),
            objects: self.core.index.len() - usize::from(preempted.is_some()),
        })?;
        // From here on nothing fails.
        if let Some(object) = preempted {
            self.drop_put(object, &Ends { stored: 0, aborted: 0 });
        }
        Ok(Outcome::Granted(self.grant(put, hash, choice, preempted)))
    }

    /// What to answer when the key has an object: a retry's first grant, a refusal, or None: it may be preempted.
    fn answer_present(&self, put: &PutStart<'_>, record: &Record) -> Result<Option<Grant>, Error> {
        let key = shown(put.key);
        if record.is_complete() {
            return Err(Error::new(
                ErrorCode::ObjectAlreadyExists,
                format!("key '{key}' has object {}", record.object),
            ));
        }
        if record.session == put.session && self.core.open.get(&record.object) == Some(&put.token) {
            if record.length != put.length {
                return Err(invalid(format!(
                    "key '{key}': the token was used for {} bytes, now for {}; draw a token per put",
                    record.length, put.length
                )));
            }
            return Ok(Some(self.grant_of(record, true, None, Vec::new())));
        }
        let age_ms = self.core.clock.0.saturating_sub(record.started.0);
        let timeout_ms = self.core.config.config.put_start_discard_timeout_ms;
        if age_ms < timeout_ms {
            let left_ms = timeout_ms - age_ms;
            return Err(Error::new(
                ErrorCode::PutInProgress,
                format!("key '{key}' is being put as object {}; it may be preempted in {left_ms} ms", record.object),
            )
            .retry_after(left_ms.min(u32::MAX.into()) as u32));
        }
        Ok(None)
    }

    fn grant(&mut self, put: &PutStart<'_>, hash: u64, choice: Choice, preempted: Option<ObjectId>) -> Grant {
        let object = ObjectId::from(self.at);
        let bytes = extent_bytes(put.length);
        let mut replicas: SmallVec<[Replica; 1]> = SmallVec::with_capacity(choice.plan.len());
        for (i, &segment) in choice.plan.iter().enumerate() {
            let offset = self.core.space.allocate(segment, bytes);
            replicas.push(Replica { id: ReplicaId::from(self.at.with_slot(i + 1)), offset, segment });
        }
        let record = Record {
            key: put.key.into(),
            object,
            length: put.length,
            session: put.session,
            started: self.core.clock,
            tenant: put.tenant,
            stored_slots: 0,
            granted: replicas.len() as u8,
            copies: 0,
            replicas,
        };
        self.core.open.insert(object, put.token);
        self.digest_record(&record, Sign::Add);
        let session = self.core.sessions.get_mut(put.session).expect("checked before");
        session.open_grants += 1;
        session.open_bytes += bytes * record.replicas.len() as u64;
        let grant = self.grant_of(&record, false, preempted, choice.evicted);
        let places: SmallVec<[Replica; 2]> = record.replicas.iter().copied().collect();
        let at = self.shards.insert(hash, record);
        for replica in places {
            self.core.space.note_used(replica.segment, replica.offset, at);
        }
        assert!(self.core.index.insert(object, at).is_none(), "object {object} exists");
        grant
    }

    fn grant_of(&self, record: &Record, repeated: bool, preempted: Option<ObjectId>, evicted: Vec<ObjectId>) -> Grant {
        let length = stored_bytes(record.length);
        let granted = |replica: &Replica| {
            let segment = self.core.space.segment(replica.segment);
            GrantedReplica {
                replica: replica.id,
                segment: segment.id,
                node: segment.node,
                incarnation: segment.incarnation,
                offset: replica.offset,
                length,
            }
        };
        Grant {
            object: record.object,
            replicas: record.replicas.iter().map(granted).collect(),
            started: record.started,
            repeated,
            preempted,
            evicted,
        }
    }

    pub(super) fn put_end(&mut self, end: &PutEnd) -> Applied {
        let Some(&at) = self.core.index.get(&end.object) else { return Err(grant_lost(end.object)) };
        let mut shard = self.shards.write(at.shard());
        let record = shard.record_mut(at.slot()).expect("the index names a record");
        check_session(record, end)?;
        let ends = check_statuses(end.object, record.granted, &end.replicas)?;
        if record.is_complete() {
            if record.stored_slots == ends.stored {
                return Ok(Outcome::Ended { copies: record.copies.into() });
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
        self.digest_record(record, Sign::Sub);
        let all = record.replicas.len();
        self.close_put(record, all);
        let failed: SmallVec<[Replica; 1]> =
            record.replicas.iter().copied().filter(|replica| !ends.is_stored(replica.id)).collect();
        record.replicas.retain(|replica| ends.is_stored(replica.id));
        record.copies = record.replicas.len() as u8;
        record.stored_slots = ends.stored;
        self.digest_record(record, Sign::Add);
        let (bytes, copies) = (record.extent_bytes(), record.copies.into());
        for replica in &record.replicas {
            self.core.space.convert(replica.segment, replica.offset, bytes, Use::Processing, Use::Complete);
        }
        drop(shard);
        for replica in failed {
            self.release_granted(end.object, replica, bytes, &ends);
        }
        Ok(Outcome::Ended { copies })
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
        let (granted, complete) =
            self.with_record(at, |r| (check_session(r, end).map(|()| r.granted), r.is_complete()));
        let mut ends = check_statuses(end.object, granted?, &end.replicas)?;
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
                self.drop_put(object, &Ends { stored: 0, aborted: 0 });
                discarded.push(object);
            }
        }
        Ok(Outcome::Discarded { objects: discarded })
    }

    /// Drops an open put. Aborted replicas are free at once, the others wait for their fence.
    fn drop_put(&mut self, object: ObjectId, ends: &Ends) {
        let record = self.take_object(object).expect("the caller found it");
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

fn check_put(put: &PutStart<'_>) -> Result<(), Error> {
    check_tenant(put.tenant)?;
    check_key(put.key)?;
    let key = || shown(put.key);
    if put.length == 0 || put.length > OBJECT_BYTES_MAX {
        return Err(invalid(format!(
            "key '{}' has {} bytes; an object has 1 to {OBJECT_BYTES_MAX}",
            key(),
            put.length
        )));
    }
    if put.replica_num == 0 || usize::from(put.replica_num) > REPLICAS_PER_OBJECT_MAX {
        return Err(invalid(format!(
            "key '{}': {} copies asked for; 1 to {REPLICAS_PER_OBJECT_MAX} can be made",
            key(),
            put.replica_num
        )));
    }
    if put.excluded.len() > EXCLUDED_NODES_MAX {
        return Err(invalid(format!(
            "key '{}' excludes {} nodes; the limit is {EXCLUDED_NODES_MAX}",
            key(),
            put.excluded.len()
        )));
    }
    if put.victims.len() > VICTIMS_PER_OP_MAX {
        return Err(invalid(format!(
            "key '{}' names {} victims; the limit is {VICTIMS_PER_OP_MAX}",
            key(),
            put.victims.len()
        )));
    }
    Ok(())
}

/// Only the default tenant exists so far.
pub(super) fn check_tenant(tenant: TenantId) -> Result<(), Error> {
    if tenant == TenantId::DEFAULT {
        return Ok(());
    }
    Err(Error::new(ErrorCode::TenantNotRegistered, format!("tenant {} is not registered", tenant.0)))
}

fn check_session(record: &Record, end: &PutEnd) -> Result<(), Error> {
    if record.session == end.session {
        return Ok(());
    }
    Err(Error::new(
        ErrorCode::IllegalClient,
        format!("object {} was started by session {}, not {}", end.object, record.session, end.session),
    ))
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

/// A key for a message: its first 64 bytes.
pub(super) fn shown(key: &[u8]) -> String {
    let head = String::from_utf8_lossy(&key[..key.len().min(64)]);
    if key.len() > 64 { format!("{head}...") } else { head.into_owned() }
}
