//! Apply: what each op does. Every function is total: it changes the state, or refuses and changes nothing (M1).

mod attributes;
mod copy;
mod end;
mod history;
mod membership;
mod put;
mod release;
mod remove;
mod victims;

use super::audit;
use super::core::{Core, OpenPut};
use super::digest::Sign;
use super::groups::Joins;
use super::limits::{Config, FEATURE_LEVEL, GROUP_MEMBERS_MAX, IDS_PER_OP_MAX};
use super::objects::{Location, Record, Shards};
use super::op::{Entry, Op, TenantId};
use super::outcome::Outcome;
use super::topology::Topology;
use super::view::Change;
use parking_lot::{RwLock, RwLockWriteGuard};
use release::Dropped;
use std::cell::Cell;
use tidepool_proto::capability::Secret;
use tidepool_proto::{Error, ErrorCode, ObjectId, OpId};

/// The result of an op before it is an outcome: a refusal is an error.
type Applied = Result<Outcome, Error>;

/// One op being applied.
pub(super) struct Apply<'d> {
    core: RwLockWriteGuard<'d, Core>,
    shards: &'d Shards,
    topology: &'d RwLock<Topology>,
    at: OpId,
    /// Objects changed since readers were let in.
    changed: usize,
}

/// Applies an entry, op by op; readers of the core get in between ops. Ops of the ordinals in `skipped` are refused, as operators
/// had it recorded (M1); `reached` is told of each op before it is applied.
pub(super) fn apply_entry(
    core: &RwLock<Core>,
    shards: &Shards,
    topology: &RwLock<Topology>,
    (index, term): (u64, u64),
    entry: &Entry<'_>,
    skipped: &[u32],
    reached: &Cell<u32>,
) -> Vec<Outcome> {
    {
        let mut core = core.write();
        core.advance(index, term);
        core.advance_clock(entry.log_time);
    }
    let mut outcomes = Vec::with_capacity(entry.ops.len());
    for (ordinal, op) in entry.ops.iter().enumerate() {
        let at = OpId::new(index, ordinal, 0);
        reached.set(ordinal as u32);
        if skipped.contains(&(ordinal as u32)) {
            outcomes.push(Outcome::Refused(Error::new(
                ErrorCode::Internal,
                format!("op {index}.{ordinal} is left out: it stopped the masters, and an operator had it recorded as refused"),
            )));
            continue;
        }
        #[cfg(test)]
        plant_assertion(op);
        let mut apply = Apply { core: core.write(), shards, topology, at, changed: 0 };
        outcomes.push(apply.op(op).unwrap_or_else(Outcome::Refused));
    }
    outcomes
}

/// Objects that one op changes before it lets readers in.
const OBJECTS_AT_ONCE: usize = 128;

impl Apply<'_> {
    /// Called by an op of many objects, between two of them, with how many it changed since the last call: whoever waits to read gets
    /// in. What it sees is whole, object by object.
    fn let_readers_in(&mut self, changed: usize) {
        self.changed += changed;
        if self.changed >= OBJECTS_AT_ONCE {
            self.changed = 0;
            RwLockWriteGuard::bump(&mut self.core);
        }
    }

    fn op(&mut self, op: &Op<'_>) -> Applied {
        let level = self.core.feature_level;
        if !op.is_allowed_at(level) {
            let (name, needed) = (op.name(), op.level());
            return Err(Error::new(
                ErrorCode::FeatureLevel,
                format!(
                    "{name} needs feature level {needed}, the cluster is at {level}: raise it with tidepool feature-level raise"
                ),
            ));
        }
        match op {
            Op::RegisterNode { node_uuid, process_uuid, address, host_id } => {
                self.register_node(node_uuid, process_uuid, address, host_id)
            }
            Op::MountSegment { node, incarnation, name, bytes } => {
                self.mount_segment(*node, *incarnation, name, *bytes)
            }
            Op::UnmountSegment { node, incarnation, segment } => self.unmount_segment(*node, *incarnation, *segment),
            Op::SetContact { node, incarnation, contact } => self.set_contact(*node, *incarnation, *contact),
            Op::DropNode { node, incarnation } => self.drop_node(*node, *incarnation),
            Op::OpenSession { client_uuid, host_id } => self.open_session(client_uuid, host_id),
            Op::ExpireSessions { sessions } => self.expire_sessions(sessions),
            Op::PutStart(put) => self.put_start(put),
            Op::PutEnd(end) => self.put_end(end),
            Op::PutRevoke(end) => self.put_revoke(end),
            Op::Remove(remove) => self.remove(remove),
            Op::RemoveObjects { session, turn, objects, mode } => self.remove_objects(*session, *turn, objects, *mode),
            Op::SetPin { object, action } => self.set_pin(*object, *action),
            Op::SetTenant { name, quota } => self.set_tenant(name, *quota),
            Op::DropTenant { name } => self.drop_tenant(name),
            Op::Retire { objects, mode } => self.retire(objects, *mode),
            Op::Reclaim { replicas } => self.reclaim(replicas),
            Op::Discard { objects } => self.discard(objects),
            Op::FenceAcknowledged { node, incarnation, replicas } => {
                self.fence_acknowledged(*node, *incarnation, replicas)
            }
            Op::DropReplica { object, replica } => self.drop_replica(*object, *replica, Dropped::Lost),
            Op::DropExtra { object, replica } => self.drop_extra(*object, *replica),
            Op::ClearReplicas(clear) => self.clear_replicas(clear),
            Op::CopyStart(copy) => self.copy_start(copy),
            Op::CopyEnd { replica, end } => self.copy_end(*replica, *end),
            Op::CreateTask(create) => self.create_task(create),
            Op::EndTask { task, state, left, message } => self.end_task(*task, *state, *left, message),
            Op::SetConfig(config) => self.set_config(config),
            Op::Checkpoint { index, digest } => self.checkpoint(*index, *digest),
            Op::BeginHistory { before: (cluster, history) } => self.begin_history(*cluster, *history),
            Op::RaiseFeatureLevel { level } => self.raise_feature_level(*level),
            Op::Audit => {
                audit::step(&mut self.core, self.shards, self.topology, self.at.log_index());
                Ok(Outcome::Done)
            }
        }
    }

    fn set_config(&mut self, config: &Config) -> Applied {
        config.check()?;
        let core = &mut *self.core;
        let secret = core.config.config.secret;
        if secret != Secret::default() && secret != config.secret {
            return Err(invalid(
                "the cluster secret is drawn already; every open grant and lease is signed with it".into(),
            ));
        }
        core.digest.sub(|c| c.config(&core.config));
        let before = core.config.config.lease_ttl_max_ms;
        if config.lease_ttl_max_ms < before {
            core.config.lease_ttl_max_before_ms = before;
            core.config.lease_ttl_lowered_at = core.clock;
        }
        core.config.config = *config;
        core.digest.add(|c| c.config(&core.config));
        Ok(Outcome::Done)
    }

    fn raise_feature_level(&mut self, level: u16) -> Applied {
        let present = self.core.feature_level;
        if level <= present || level > FEATURE_LEVEL {
            return Err(invalid(format!(
                "feature level {level}; the cluster is at {present}, and this binary knows up to {FEATURE_LEVEL}; it is never lowered"
            )));
        }
        self.core.set_feature_level(level);
        Ok(Outcome::Done)
    }

    fn checkpoint(&mut self, index: u64, digest: u128) -> Applied {
        let core = &mut *self.core;
        if index >= self.at.log_index() {
            return Err(invalid(format!("checkpoint of index {index} in entry {}", self.at.log_index())));
        }
        if let Some((index, digest)) = core.checkpoint {
            core.digest.sub(|c| c.checkpoint(index, digest));
        }
        core.checkpoint = Some((index, digest));
        core.digest.add(|c| c.checkpoint(index, digest));
        Ok(Outcome::Done)
    }

    /// Runs `f` on a record that the index names.
    fn with_record<R>(&self, at: Location, f: impl FnOnce(&Record) -> R) -> R {
        self.shards.with(at, f).expect("the index names a record")
    }

    /// Adds or takes a record's part of the digest, and what its tenant has pinned for good.
    fn digest_record(&mut self, at: Location, record: &Record, sign: Sign) {
        let core = &mut *self.core;
        let open = if record.is_complete() { None } else { core.open.get(&record.object) };
        core.objects.change(at, record, open, &core.space, sign);
        if record.hard_pinned {
            let tenant = core.tenants.get_mut(record.tenant).expect("an object's tenant is registered");
            sign.count(&mut tenant.hard_pinned_bytes, record.hard_pinned_bytes());
        }
    }

    /// Takes an object out of shard, index, group, tenant and digest; its extents are the caller's. An open put leaves
    /// its session. An upsert that was to replace it becomes a put.
    fn take_object(&mut self, object: ObjectId) -> Option<Record> {
        let at = self.core.index.remove(&object)?;
        let record = self.shards.remove(at).expect("the index names a record");
        self.digest_record(at, &record, Sign::Sub);
        self.charge(record.tenant, Charge::Return { bytes: record.all_bytes(), objects: 1 });
        self.drop_copies(&record);
        self.core.degraded.remove(&object);
        self.core.extra.remove(&object);
        if !record.is_complete() {
            self.close_put(&record);
        }
        if record.is_complete() {
            let (tenant, key) = (record.tenant, self.shards.hash(record.tenant, &record.key));
            self.core.note_change(|| Change::Gone { tenant, key, object });
        }
        if let Some(name) = record.group() {
            let name = (record.tenant, name.clone());
            let lost = self.core.groups.leave(&name, object, record.is_complete());
            lost.iter().for_each(|key| self.core.parts.lost_members.sub(&name, |c| c.lost_member(&name, key)));
        }
        if let Some(upsert) = self.core.upserts.remove(&object) {
            self.attach_upsert(upsert);
        }
        Some(record)
    }

    /// Puts an open upsert under its key, which no object has any more.
    fn attach_upsert(&mut self, object: ObjectId) {
        let at = self.core.index[&object];
        let record = self.with_record(at, Record::clone);
        self.digest_record(at, &record, Sign::Sub);
        self.core.open.get_mut(&object).expect("an upsert is open").replaces = None;
        self.digest_record(at, &record, Sign::Add);
        self.shards.attach(at);
        if let Some(name) = record.group() {
            self.core.groups.promote(&(record.tenant, name.clone()), object, Joins::Put);
        }
    }

    /// Takes a put off the books of open ones: its session's account, and the object it was to replace.
    fn close_put(&mut self, record: &Record) -> OpenPut {
        let open = self.core.open.remove(&record.object).expect("a PROCESSING object is open");
        if let Some(old) = open.replaces {
            self.core.upserts.remove(&old);
        }
        if let Some(session) = self.core.sessions.by_id.get_mut(&open.session) {
            session.open_grants -= 1;
            session.open_bytes -= record.all_bytes();
        }
        open
    }

    /// Books bytes and objects on a tenant.
    fn charge(&mut self, tenant: TenantId, charge: Charge) {
        let tenant = self.core.tenants.get_mut(tenant).expect("an object's tenant is registered");
        match charge {
            Charge::Take { bytes, objects } => {
                tenant.bytes += bytes;
                tenant.objects += objects;
            }
            Charge::Return { bytes, objects } => {
                tenant.bytes -= bytes;
                tenant.objects -= objects;
            }
        }
    }

    /// Notes that a group is of no use until this member is put again.
    fn note_lost(&mut self, record: &Record) {
        let Some(name) = record.group() else { return };
        let name = (record.tenant, name.clone());
        let Some(group) = self.core.groups.by_name.get_mut(&name) else { return };
        if group.lost.len() < GROUP_MEMBERS_MAX && group.lost.insert(record.key.clone()) {
            self.core.parts.lost_members.add(&name, |c| c.lost_member(&name, &record.key));
        }
    }

    /// A lost member of a group was put again.
    fn note_found(&mut self, record: &Record) {
        let Some(name) = record.group() else { return };
        let name = (record.tenant, name.clone());
        let Some(group) = self.core.groups.by_name.get_mut(&name) else { return };
        if !group.lost.is_empty() && group.lost.remove(&record.key) {
            self.core.parts.lost_members.sub(&name, |c| c.lost_member(&name, &record.key));
        }
    }
}

/// What changes on a tenant's account.
#[derive(Clone, Copy)]
enum Charge {
    Take { bytes: u64, objects: u64 },
    Return { bytes: u64, objects: u64 },
}

/// An op that violates an assumption, for tests of what becomes of the master.
#[cfg(test)]
fn plant_assertion(op: &Op<'_>) {
    assert!(!matches!(op, Op::DropTenant { name } if *name == "stops every master"), "planted");
}

fn invalid(message: String) -> Error {
    Error::new(ErrorCode::InvalidParams, message)
}

fn check_count(what: &str, count: usize) -> Result<(), Error> {
    if count <= IDS_PER_OP_MAX {
        return Ok(());
    }
    Err(invalid(format!("{count} {what} in one op; the limit is {IDS_PER_OP_MAX}")))
}
