//! A put's start: the key's present object decides whether there is one, `victims` where it goes.

use super::end::Ends;
use super::victims::{Choice, Wanted};
use super::{Applied, Apply, Charge, Sign, invalid};
use crate::directory::core::OpenPut;
use crate::directory::groups::Joins;
use crate::directory::limits::{
    DATA_TYPE_MAX, EXCLUDED_NODES_MAX, GRANTED_PERCENT_MAX, GROUP_MEMBERS_MAX, GROUP_NAME_BYTES_MAX,
    PREFERRED_SEGMENTS_MAX, SOFT_PIN_TTL_MAX_MS, VICTIMS_PER_OP_MAX,
};
use crate::directory::objects::{Asked, Extras, Record, Replica};
use crate::directory::op::{PutStart, SoftPinAction, TenantId};
use crate::directory::outcome::{Answered, Grant, GrantedReplica, Outcome};
use smallvec::SmallVec;
use std::sync::Arc;
use tidepool_proto::ids::REPLICAS_PER_OBJECT_MAX;
use tidepool_proto::keys::check_key;
use tidepool_proto::object::{OBJECT_BYTES_MAX, extent_bytes, stored_bytes};
use tidepool_proto::{Error, ErrorCode, ObjectId, ReplicaId, planted};

/// What a put finds under its key.
enum Present {
    /// Nothing that stays: it may start, and what is named gives way.
    Vacant { preempted: Option<ObjectId> },
    /// A COMPLETE object that an upsert may replace; the open upsert of it gives way.
    Replaceable { old: Record, preempted: Option<ObjectId> },
    /// A retry: what was granted.
    Repeated(Grant),
}

impl Apply<'_> {
    pub(super) fn put_start(&mut self, put: &PutStart<'_>) -> Applied {
        check_put(put)?;
        self.check_tenant(put.tenant)?;
        let session = self.core.sessions.get_mut(put.session)?;
        if let Some(turn) = put.upsert
            && let Some(answered) = session.check_turn(put.session, turn)?
        {
            return self.repeat_upsert(put, answered);
        }
        let hash = self.shards.hash(put.tenant, put.key);
        let (replaced, preempted) = match self.present(put, hash)? {
            Present::Repeated(grant) => return Ok(Outcome::Granted(grant)),
            Present::Vacant { preempted } => (None, preempted),
            Present::Replaceable { old, preempted } => (Some(old), preempted),
        };
        if preempted.is_none() && !self.shards.has_room(hash) {
            return Err(Error::new(
                ErrorCode::ResourceExhausted,
                format!("key '{}': its shard holds the most objects it can", shown(put.key)),
            ));
        }
        let group = self.group_of(put, replaced.as_ref())?;
        self.check_granted(put, preempted)?;
        self.check_hard_pinned(put, replaced.as_ref(), preempted)?;
        let choice = self.choose(&Wanted {
            put,
            bytes: extent_bytes(put.length),
            preempted: preempted.map(|id| self.with_record(self.core.index[&id], |r| (id, r.all_bytes()))),
            group: group.clone().map(|name| (put.tenant, name)),
        })?;
        // From here on nothing fails.
        if let Some(object) = preempted {
            self.drop_put(object, &Ends::unknown());
        }
        if let Some(turn) = put.upsert {
            self.record_answer(put.session, turn, Answered::Upsert(ObjectId::from(self.at)));
        }
        Ok(Outcome::Granted(self.grant(put, hash, choice, replaced, group, preempted)))
    }

    /// A client may have only so many bytes granted and not ended (L5). What it preempts of its own comes back first.
    fn check_granted(&self, put: &PutStart<'_>, preempted: Option<ObjectId>) -> Result<(), Error> {
        let limit = self.core.config.config.granted_bytes_max(self.core.space.capacity());
        let session = &self.core.sessions.by_id[&put.session];
        let own = preempted.filter(|id| self.core.open[id].session == put.session);
        let back = own.map_or(0, |id| self.with_record(self.core.index[&id], Record::all_bytes));
        let open_bytes = session.open_bytes - back;
        let need = extent_bytes(put.length).saturating_mul(put.replica_num.into());
        if open_bytes == 0 || open_bytes.saturating_add(need) <= limit {
            return Ok(());
        }
        Err(granted_too_much(put.key, open_bytes, need, limit))
    }

    /// What is pinned for good without a quota of bytes may fill only a part of the pool. What this put replaces or preempts
    /// gives its part back.
    fn check_hard_pinned(
        &self,
        put: &PutStart<'_>,
        replaced: Option<&Record>,
        preempted: Option<ObjectId>,
    ) -> Result<(), Error> {
        if !put.hard_pin && !replaced.is_some_and(|old| old.hard_pinned) {
            return Ok(());
        }
        let room = self.core.hard_pin_room(put.tenant);
        let need = extent_bytes(put.length).saturating_mul(put.replica_num.into());
        let preempted = preempted.map_or(0, |id| self.with_record(self.core.index[&id], Record::hard_pinned_bytes));
        let back = preempted + replaced.map_or(0, Record::hard_pinned_bytes);
        if need <= room.saturating_add(back) {
            return Ok(());
        }
        let percent = self.core.config.config.hard_pinned_percent_max;
        Err(Error::new(
            ErrorCode::HardPinLimit,
            format!(
                "key '{}' would pin {need} bytes for good, {room} are left: without a quota of bytes at most {percent} % of the pool may be (hard_pinned_percent_max); remove some, or give the tenant a quota",
                shown(put.key)
            ),
        ))
    }

    /// The first answer of an upsert whose sequence was used.
    fn repeat_upsert(&mut self, put: &PutStart<'_>, answered: Answered) -> Applied {
        let Answered::Upsert(object) = answered else {
            return Err(invalid(format!("key '{}': the sequence was used by another request", shown(put.key))));
        };
        let open = self.core.open.get(&object).filter(|open| open.session == put.session && open.token == put.token);
        if open.is_none() {
            return Err(Error::new(
                ErrorCode::GrantLost,
                format!("key '{}': this upsert was granted as object {object} and has ended", shown(put.key)),
            ));
        }
        let record = self.with_record(self.core.index[&object], Record::clone);
        if (record.tenant, &*record.key, record.length) != (put.tenant, put.key, put.length) {
            return Err(invalid(format!(
                "key '{}': the sequence and token were used for key '{}' with {} bytes, now for {}",
                shown(put.key),
                shown(&record.key),
                record.length,
                put.length
            )));
        }
        Ok(Outcome::Granted(self.grant_of(&record, true, None, Vec::new())))
    }

    /// What has the key, and whether the put may start beside or instead of it.
    fn present(&self, put: &PutStart<'_>, hash: u64) -> Result<Present, Error> {
        let Some(at) = self.shards.locate(hash, put.tenant, put.key) else {
            return Ok(Present::Vacant { preempted: None });
        };
        let record = self.with_record(at, Record::clone);
        if !record.is_complete() {
            return match self.answer_open(put, &record)? {
                Some(grant) => Ok(Present::Repeated(grant)),
                None => Ok(Present::Vacant { preempted: Some(record.object) }),
            };
        }
        if put.upsert.is_none() {
            let (key, object) = (shown(put.key), record.object);
            return Err(Error::new(ErrorCode::ObjectAlreadyExists, format!("key '{key}' has object {object}")));
        }
        let preempted = self.core.upserts.get(&record.object).copied();
        Ok(Present::Replaceable { old: record, preempted })
    }

    /// What to answer when the key is being put: a retry's first grant, a refusal, or None: it gives way.
    fn answer_open(&self, put: &PutStart<'_>, record: &Record) -> Result<Option<Grant>, Error> {
        let key = shown(put.key);
        let open = &self.core.open[&record.object];
        if open.session == put.session && open.token == put.token {
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
        if put.upsert.is_none() && age_ms < timeout_ms {
            let left_ms = timeout_ms - age_ms;
            if planted!(ExistsWhileProcessing) {
                return Err(Error::new(ErrorCode::ObjectAlreadyExists, format!("key '{key}' is being put")));
            }
            return Err(Error::new(
                ErrorCode::PutInProgress,
                format!("key '{key}' is being put as object {}; it may be preempted in {left_ms} ms", record.object),
            )
            .retry_after(left_ms.min(u32::MAX.into()) as u32));
        }
        Ok(None)
    }

    /// Name of the group that the object joins. A key stays in its group for good.
    fn group_of(&self, put: &PutStart<'_>, replaced: Option<&Record>) -> Result<Option<Arc<[u8]>>, Error> {
        if let Some(old) = replaced {
            let group = old.group();
            if !put.group.is_empty() && group.is_none_or(|name| **name != *put.group) {
                return Err(invalid(format!(
                    "key '{}' has group '{}'; an upsert cannot move it to '{}': remove it first",
                    shown(put.key),
                    shown(group.map_or(&[][..], |name| name)),
                    shown(put.group)
                )));
            }
            return Ok(group.cloned());
        }
        if put.group.is_empty() {
            return Ok(None);
        }
        let name = self.core.groups.shared_name(put.tenant, put.group);
        let group = self.core.groups.get(&(put.tenant, name.clone()));
        if group.is_some_and(|group| group.members.len() + group.upserts.len() >= GROUP_MEMBERS_MAX) {
            return Err(Error::new(
                ErrorCode::ResourceExhausted,
                format!(
                    "key '{}': group '{}' has {GROUP_MEMBERS_MAX} members, the limit",
                    shown(put.key),
                    shown(put.group)
                ),
            ));
        }
        Ok(Some(name))
    }

    fn grant(
        &mut self,
        put: &PutStart<'_>,
        hash: u64,
        choice: Choice,
        replaced: Option<Record>,
        group: Option<Arc<[u8]>>,
        preempted: Option<ObjectId>,
    ) -> Grant {
        let object = ObjectId::from(self.at);
        let bytes = extent_bytes(put.length);
        let mut replicas: SmallVec<[Replica; 1]> = SmallVec::with_capacity(choice.plan.len());
        for (i, &segment) in choice.plan.iter().enumerate() {
            let offset = self.core.space.allocate(segment, bytes);
            replicas.push(Replica { id: ReplicaId::from(self.at.with_slot(i + 1)), offset, segment });
        }
        // The old object may have been evicted for this one.
        let replaces = replaced.as_ref().map(|old| old.object).filter(|old| self.core.index.contains_key(old));
        let record = Record {
            key: put.key.into(),
            object,
            length: put.length,
            started: self.core.clock,
            tenant: put.tenant,
            stored_slots: 0,
            asked: Asked::of(put.replica_num, replicas.len() as u8).expect("checked before: both are at most 15"),
            copies: 0,
            data_type: put.data_type,
            hard_pinned: put.hard_pin || replaced.is_some_and(|old| old.hard_pinned),
            extras: group.map(|group| Box::new(Extras { group: Some(group), ..Extras::default() })),
            replicas,
        };
        let open = OpenPut { token: put.token, session: put.session, soft_pin: put.soft_pin, replaces };
        self.core.open.insert(object, open);
        self.charge(put.tenant, Charge::Take { bytes: record.all_bytes(), objects: 1 });
        let session = self.core.sessions.get_mut(put.session).expect("checked before");
        session.open_grants += 1;
        session.open_bytes += record.all_bytes();
        if let Some(name) = record.group() {
            let joins = if replaces.is_some() { Joins::Upsert } else { Joins::Put };
            self.core.groups.join((put.tenant, name.clone()), object, joins);
        }
        let grant = self.grant_of(&record, false, preempted, choice.evicted);
        let places: SmallVec<[Replica; 2]> = record.replicas.iter().copied().collect();
        let at = match replaces {
            None => self.shards.insert(hash, record),
            Some(old) => {
                assert!(self.core.upserts.insert(old, object).is_none(), "object {old} has two upserts");
                self.shards.insert_detached(hash, record)
            }
        };
        for replica in places {
            self.core.space.note_used(replica.segment, replica.offset, at);
        }
        let shard = self.shards.read(at.shard());
        self.digest_record(at, shard.record(at.slot()).expect("just inserted"), Sign::Add);
        drop(shard);
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

    /// TENANT_NOT_REGISTERED unless it is.
    pub(super) fn check_tenant(&self, tenant: TenantId) -> Result<(), Error> {
        if self.core.tenants.get(tenant).is_some() {
            return Ok(());
        }
        Err(Error::new(ErrorCode::TenantNotRegistered, format!("tenant {} is not registered", tenant.0)))
    }
}

fn check_put(put: &PutStart<'_>) -> Result<(), Error> {
    check_key(put.key)?;
    let key = || shown(put.key);
    let within = |what: &str, value: u64, min: u64, max: u64| {
        if (min..=max).contains(&value) {
            return Ok(());
        }
        Err(invalid(format!("key '{}': {what} is {value}; it must be {min} to {max}", key())))
    };
    within("its length", put.length, 1, OBJECT_BYTES_MAX)?;
    within("the number of copies", put.replica_num.into(), 1, REPLICAS_PER_OBJECT_MAX as u64)?;
    within("the number of excluded nodes", put.excluded.len() as u64, 0, EXCLUDED_NODES_MAX as u64)?;
    within("the number of preferred segments", put.preferred.len() as u64, 0, PREFERRED_SEGMENTS_MAX as u64)?;
    within("the number of victims", put.victims.len() as u64, 0, VICTIMS_PER_OP_MAX as u64)?;
    within("the data type", put.data_type.0.into(), 0, DATA_TYPE_MAX.into())?;
    within("the length of its group's name", put.group.len() as u64, 0, GROUP_NAME_BYTES_MAX as u64)?;
    check_soft_pin(put.key, put.soft_pin)
}

/// A soft pin's time must be one that ends.
pub(super) fn check_soft_pin(key: &[u8], action: SoftPinAction) -> Result<(), Error> {
    match action {
        SoftPinAction::Enable { ttl_ms } if !(1..=SOFT_PIN_TTL_MAX_MS).contains(&ttl_ms) => Err(invalid(format!(
            "key '{}': a soft pin of {ttl_ms} ms; it must be 1 to {SOFT_PIN_TTL_MAX_MS}",
            shown(key)
        ))),
        _ => Ok(()),
    }
}

/// RESOURCE_EXHAUSTED, naming the limit of L5.
fn granted_too_much(key: &[u8], open_bytes: u64, need: u64, limit: u64) -> Error {
    let message = format!(
        "key '{}' needs {need} bytes, and this client has {open_bytes} granted and not ended; the limit is {limit} (granted_bytes_min, or {GRANTED_PERCENT_MAX} % of the pool): end or revoke some first",
        shown(key)
    );
    Error::new(ErrorCode::ResourceExhausted, message).retry_after(5)
}

/// A key for a message: its first 64 bytes.
pub(super) fn shown(key: &[u8]) -> String {
    let head = String::from_utf8_lossy(&key[..key.len().min(64)]);
    if key.len() > 64 { format!("{head}...") } else { head.into_owned() }
}
